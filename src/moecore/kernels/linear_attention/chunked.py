"""The delta rule with decays, chunk by chunk, by Triton kernels.

In a chunk of C tokens with the state S before it, keys K, queries Q (both normed, Q scaled), sums G
of g since the chunk began, L the last of them, and D_ij = exp(G_i - G_j) for i >= j, otherwise 0:

    X = (I + strictly lower part of beta K K^T D)^-1     w = X beta exp(G) K     u = X beta V
    N = u - w S                                         P = Q K^T D
    O = exp(G) Q S + P N                                S' = exp(L) S + (exp(L - G) K)^T N

Gradients, with Y = beta (V - exp(G) K S), N = X Y, dS' from the next chunk, and E = exp(L - G):

    dN = P^T dO + E K dS'       dY = X^T dN        dS = exp(L) dS' + (exp(G) Q)^T dO - w^T dN
    dP = dO N^T D               dA = -strictly lower part of dY N^T D           dV = beta dY
    dQ = exp(G) dO S^T + dP K   dKr = -exp(G) dY S^T + dA K                     dK = beta dKr + dKc
    dKc = E N dS'^T + dP^T Q + (beta dA)^T K            dbeta = sum(dY V + K dKr) of each row
    dG = sum(Q dQ + beta K dKr - K dKc) of each row     dL = sum(K E N dS'^T) + exp(L) sum(S dS')

Without beta, N = V and X, w, dA and dKr do not exist. Backward recomputes all but the inputs.

With a decay per key dim, G and L have key dims: P_ij = sum of Q_ik K_jk D_ijk over k, as K K^T D,
and dG and dL are not summed over k. The kernels of `kda_kernel.py` then compute the chunks. The
other kernels receive exp(G) Q and exp(L - G) K as queries and keys of each value head.

Per token and value head, with R value heads per key head, in multiply-adds and in elements moved:

    kernel        multiply-adds                elements
    fwd_chunks    C (3 k + v) + 10 C^2         2 k + 2 k / R + 2 v + k + 2 C
    kda_fwd       C (13 k + v) + 10 C^2        7 k + 2 v + 2 C
    fwd_states    2 k v, or 2 k (v + k)        k + k / R + 2 v + k v / C
    fwd_outputs   k v + C v                    k / R + 2 v + C + k v / C
    bwd_states    3 k v + C v                  k + 2 k / R + 2 v + C + k v / C
    bwd_chunks    3 k v + 2 C (2 k + v) + C v  2 k + 2 k / R + 5 v + C + 4 k v / C
    kda_scores    3 C v                        5 v + 3 C
    kda_bwd       3 k v + 24 C k               6 k + 4 v + 2 C + 2 k v / C
    bwd_norm      0                            2 k + 4 k / R

With a `StateChain`, fwd_states runs with k more columns before it runs with the first states, and
bwd_states runs once before the gradients of last states are known. Both then write no chunks.

Source: Gated Delta Networks (arXiv:2412.06464), section 3.3, and Kimi Linear (arXiv:2510.26692),
section 3; the gradients are derived by hand.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.kernels.common import can_use_kernel, cdiv, launch_or_record
from moecore.kernels.linear_attention.chunked_kernel import (
    delta_rule_bwd_chunks_kernel,
    delta_rule_bwd_norm_kernel,
    delta_rule_fwd_chunks_kernel,
    delta_rule_fwd_outputs_kernel,
)
from moecore.kernels.linear_attention.contract import DeltaRule, StateChain
from moecore.kernels.linear_attention.kda_kernel import (
    kda_bwd_chunks_kernel,
    kda_bwd_scores_kernel,
    kda_fwd_chunks_kernel,
)
from moecore.kernels.linear_attention.states_kernel import (
    delta_rule_bwd_states_kernel,
    delta_rule_fwd_states_kernel,
)
from moecore.kernels.zigzag import find_document_ids, get_shared_table

CHUNK = 64
LEVELS = CHUNK.bit_length() - 1
KEY_DIMS, TILE = (64, 128), 128  # of a key, and of a tile of values; Triton 3.6 miscompiles smaller
HALVES = (torch.bfloat16, torch.float16)
# Launch options on Hopper. ptxas 12.8 miscompiles others (tests/kernels/test_compile.py).
CHUNKS: dict[str, Any] = dict(num_warps=4, num_stages=1)
STATES: dict[str, Any] = dict(BLOCK_V=32, num_warps=4, num_stages=3)
OUTPUT: dict[str, Any] = dict(num_warps=4, num_stages=1)
STATES_BWD: dict[str, Any] = dict(BLOCK_V=32, num_warps=4, num_stages=2)
TRANSITIONS: dict[str, Any] = dict(BLOCK_V=64, num_warps=4, num_stages=2)
BWD: dict[str, Any] = dict(BLOCK_K=32, num_warps=4, num_stages=1)
KDA_CHUNKS: dict[str, Any] = dict(BLOCK_K=32, num_warps=8, num_stages=1)
KDA_BWD: dict[str, Any] = dict(BLOCK_K=32, BLOCK_V=64, num_warps=8, num_stages=1)


class ScanSize(NamedTuple):
    """The shape and the FLOPs of one launch of a linear-attention kernel, recorded in a dry run."""

    shape: tuple[int, int, int, int, int]  # documents, value heads, mean tokens of a document, k, v
    flops: int


def find_problem(rule: DeltaRule) -> str | None:
    """Return why the kernels cannot compute this rule, in one line; None = they can."""
    k = rule.k_Thk.shape[-1]
    if rule.v_THv.dtype not in HALVES or not can_use_kernel(rule.v_THv):
        device = rule.v_THv.device.type
        return f"tensors ({rule.v_THv.dtype} on {device}) must be of 16 bits on cuda"
    if rule.g_THk.ndim == 3 and rule.beta_TH is None:
        return "decays without learning rates (per key dim) must be per head"
    if k > KEY_DIMS[-1]:
        return f"key dims ({k}) must be <= {KEY_DIMS[-1]}"
    return None


def gated_delta_rule(
    rule: DeltaRule,
    cu_seqlens: Tensor,
    initial_states_nHkv: Tensor | None,
    chain: StateChain | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs o_THv and each document's last state, computed by the kernels.

    Keys are padded with zeros to `KEY_DIMS`, values to full tiles. Columns of a state are
    independent, so each tile of value dims is computed like a head.
    """
    (T, H, v), k = rule.v_THv.shape, rule.k_Thk.shape[-1]
    more_k, tiles = KEY_DIMS[k > KEY_DIMS[0]] - k, cdiv(v, TILE)
    q, keys, values, g, beta = rule[:5]
    q, keys, g = (_pad(x, more_k) if x.ndim == 3 else x for x in (q, keys, g))
    values = _pad(values, tiles * TILE - v).unflatten(2, (tiles, TILE)).flatten(1, 2)
    if initial_states_nHkv is not None:
        states = _pad(initial_states_nHkv, tiles * TILE - v, more_k)
        initial_states_nHkv = states.unflatten(3, (tiles, TILE)).transpose(2, 3).flatten(1, 2)
    if tiles > 1:
        g = g.repeat_interleave(tiles, dim=1)
        beta = None if beta is None else beta.repeat_interleave(tiles, dim=1)
    o, last = _ChunkedRule.apply(
        q, keys, values, g, beta, initial_states_nHkv, cu_seqlens, rule.scale, rule.norm_qk, chain
    )
    last = last.unflatten(1, (H, tiles)).transpose(2, 3).flatten(3)
    return o.view(T, H, -1)[..., :v], last[..., :k, :v]


def _pad(x: Tensor, columns: int, rows: int = 0) -> Tensor:
    """Pad x with zeros: `columns` after its last dim, `rows` after the dim before. May return x."""
    return F.pad(x, (0, columns, 0, rows)) if columns or rows else x


class _Chunks(NamedTuple):
    """Offsets of documents and chunks; the number of chunks is an upper bound."""

    cu_seqlens: Tensor
    first_chunks: Tensor  # int32 [n + 1]: each document's first chunk, then the number of chunks
    table: Tensor  # int32 [2, chunks]: each chunk's first token, and its document's end

    @classmethod
    def make(cls, cu_seqlens: Tensor, T: int) -> _Chunks:
        """Cut documents into chunks, without a host sync."""
        return cls(cu_seqlens, *get_shared_table(cls._make_table, cu_seqlens, T))

    @staticmethod
    def _make_table(cu_seqlens: Tensor, T: int) -> tuple[Tensor, Tensor]:
        """Return `first_chunks` and `table`."""
        counts = -(-cu_seqlens.diff() // CHUNK)
        firsts = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        ids = torch.arange(T // CHUNK + len(counts), dtype=torch.int32, device=firsts.device)
        documents = find_document_ids(firsts, len(ids)).clamp(max=len(counts) - 1)
        starts = cu_seqlens[documents] + (ids - firsts[documents]) * CHUNK
        table = torch.stack((starts, cu_seqlens[documents + 1])).int()
        return firsts, table


class _Scan:
    """The inputs of a rule, and the tensors that forward and backward compute from them."""

    def __init__(self, rule: DeltaRule, cu_seqlens: Tensor) -> None:
        self.q, self.k, self.v = map(_make_rows, rule[:3])
        self.g, self.beta = rule.g_THk.contiguous(), rule.beta_TH
        if self.beta is not None:
            self.beta = self.beta.contiguous()
        self.scale, self.norm = rule.scale, rule.norm_qk
        (self.T, self.H, V), (h, K) = self.v.shape, self.k.shape[1:]
        self.chunks = _Chunks.make(cu_seqlens, self.T)
        self.num_chunks = self.chunks.table.shape[1]
        self.state_shape = len(cu_seqlens) - 1, self.H, K, V
        self.sizes = dict(h=h, R=self.H // h, K=K, V=V, CHUNK=CHUNK)
        self.is_delta, self.is_per_dim = self.beta is not None, self.g.ndim == 3
        self.decays: dict[str, Any] = dict(PER_DIM=self.is_per_dim)
        if self.is_per_dim:  # decayed queries and keys belong to a value head
            self.decays |= dict(h=self.H, R=1)
        self._compute_chunks()

    def launch(
        self, kernel: Any, grid: tuple[int, int], madds: int, *args: Any, **constants: Any
    ) -> None:
        """Launch, or in a dry run record, a kernel of `madds` multiply-adds per token and head."""
        if self.k.is_meta:
            n, H, K, V = self.state_shape
            shape = n, H, self.T // max(1, n), K, V
            args = ScanSize(shape, 2 * self.T * self.H * madds), *args
        launch_or_record(kernel, grid, *args, **(self.sizes | constants))

    def _compute_chunks(self) -> None:
        """Compute normed keys and queries, G, P, X, w and u."""
        (T, H), C = (self.T, self.H), CHUNK
        (_, h, K), V = self.k.shape, self.v.shape[-1]
        new = self.k.new_empty
        self.normed_q, self.normed_k = (new(T, H if self.is_per_dim else h, K) for _ in range(2))
        self.decay, self.scores = new(self.g.shape, dtype=torch.float32), new(T, H, C)
        self.inverse = self.w = self.normed_k  # without beta no kernel accesses them
        self.u, beta = self.v, self.g if self.beta is None else self.beta
        if self.is_delta:
            self.inverse, self.w, self.u = new(T, H, C), new(T, H, K), new(T, H, V)
        strides = self.q.stride(0), self.k.stride(0), self.v.stride(0)
        kernel, pairs = delta_rule_fwd_chunks_kernel, C * K
        options = dict(HAS_BETA=self.is_delta, **CHUNKS)
        if self.is_per_dim:
            kernel, pairs, options = kda_fwd_chunks_kernel, LEVELS * C * K, KDA_CHUNKS
        self.launch(
            kernel,
            (self.num_chunks, H),
            pairs + self.is_delta * (pairs + C * (10 * C + K + V)),
            *(self.q, self.k, self.v, self.g, beta, self.chunks.table),
            *(self.normed_q, self.normed_k, self.decay, self.scores, self.inverse, self.w, self.u),
            *(*strides, self.scale, self.num_chunks),
            LEVELS=LEVELS,
            NORM=self.norm,
            **options,
        )

    def compute_transitions(self) -> Tensor:
        """Return L and M (see `contract.py`) of each document, fp32 [n, H, k, v + k or 1]."""
        return self._scan_states(None, map_columns=self.sizes["K"] if self.is_delta else 1)

    def compute_states(self, initial: Tensor | None) -> None:
        """Compute S and N, and the last states, from each document's initial state."""
        self.states = self.k.new_empty(self.num_chunks, *self.state_shape[1:])
        self.updates = torch.empty_like(self.u) if self.is_delta else self.u
        self.last = self._scan_states(initial)

    def _scan_states(self, initial: Tensor | None, map_columns: int = 0) -> Tensor:
        """Return each document's last state, then `map_columns` columns of M (`contract.py`)."""
        n, H, K, V = self.state_shape
        options = TRANSITIONS if map_columns else STATES
        last = self.k.new_empty(n, H, K, V + map_columns, dtype=torch.float32)
        columns = V + (map_columns if self.is_delta else 0)
        outs = (self.u, self.u) if map_columns else (self.states, self.updates)
        self.launch(
            delta_rule_fwd_states_kernel,
            (n * H, columns // options["BLOCK_V"]),
            (1 + self.is_delta) * K * columns,
            *(self.normed_k, self.w, self.u, self.decay, *self.chunks[:2]),
            *(last if initial is None else initial, *outs, last, self.u.stride(0)),
            HAS_INITIAL=initial is not None,
            HAS_BETA=self.is_delta,
            MAP_COLUMNS=map_columns,
            **self.decays,
            **options,
        )
        return last

    def compute_outputs(self) -> Tensor:
        """Return the outputs o_THv."""
        o, (K, V) = self.v.new_empty(self.v.shape), self.states.shape[2:]
        self.launch(
            delta_rule_fwd_outputs_kernel,
            (self.num_chunks, self.H),
            (K + CHUNK) * V,
            *(self.normed_q, self.scores, self.updates, self.decay, self.states),
            *(self.chunks.table, o, self.updates.stride(0), self.num_chunks),
            **self.decays,
            **OUTPUT,
        )
        return o

    def compute_initial_gradients(self, do: Tensor, dlast: Tensor | None, *outs: Tensor) -> Tensor:
        """Return the gradients of first states. If `dlast` is None, gradients of last states are 0.

        Otherwise dS' and dN are written to the tensors `outs`.
        """
        n, H, K, V = self.state_shape
        options = TRANSITIONS if dlast is None else STATES_BWD
        dinitial = do.new_empty(self.state_shape, dtype=torch.float32)
        inputs = dinitial if dlast is None else dlast, *(outs or (do, do))
        self.launch(
            delta_rule_bwd_states_kernel,
            (n * H, V // options["BLOCK_V"]),
            (2 + self.is_delta) * K * V + CHUNK * V,
            *(self.normed_q, self.normed_k, self.w, self.scores, self.decay, do),
            *(*self.chunks[:2], *inputs, dinitial),
            HAS_BETA=self.is_delta,
            IS_TRANSITION=dlast is None,
            **self.decays,
            **options,
        )
        return dinitial

    def compute_gradients(self, do: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v, g, beta and the initial states."""
        h, K = self.k.shape[1:]
        dstates, dupdates = torch.empty_like(self.states), torch.empty_like(do)
        dinitial = self.compute_initial_gradients(do, dlast, dstates, dupdates)
        dv, dg, dbeta = dupdates, torch.empty_like(self.g), None
        if self.beta is not None:
            dv, dbeta = torch.empty_like(do), torch.empty_like(self.beta)
        dnormed = [self.k.new_empty(self.T, self.H, K) for _ in range(2)]
        grads = (*dnormed, dv, dg, dg if dbeta is None else dbeta)
        launch = self._launch_kda_gradients if self.is_per_dim else self._launch_chunk_gradients
        launch(do, dupdates, dstates, *grads)
        dq, dk = (x.new_empty(x.shape) for x in (self.q, self.k))
        grid = cdiv(self.T, CHUNK), h
        gradients = (self.q, dnormed[0], dq, self.scale), (self.k, dnormed[1], dk, 1.0)
        for x, dx_THk, dx, scale in gradients:
            args = x, dx_THk, dx, x.stride(0), scale, self.T
            launch_or_record(delta_rule_bwd_norm_kernel, grid, *args, **self.sizes, NORM=self.norm)
        return dq, dk, dv, dg, dbeta, dinitial

    def _launch_chunk_gradients(self, do: Tensor, dN: Tensor, dS: Tensor, *grads: Tensor) -> None:
        """Compute the gradients of normed q and k, v, g and beta, with a decay per head."""
        (K, V), is_delta = self.states.shape[2:], self.is_delta
        self.launch(
            delta_rule_bwd_chunks_kernel,
            (self.num_chunks, self.H),
            (2 + is_delta) * K * V + CHUNK * (2 * K + V + is_delta * 2 * (K + V)),
            *(self.normed_q, self.normed_k, self.v, self.g if self.beta is None else self.beta),
            *(self.decay, self.inverse, self.updates, self.states, do, dN, dS),
            *(self.chunks.table, *grads, self.v.stride(0), self.updates.stride(0), self.num_chunks),
            PART=2048,
            HAS_BETA=is_delta,
            **BWD,
        )

    def _launch_kda_gradients(self, do: Tensor, dN: Tensor, dS: Tensor, *grads: Tensor) -> None:
        """Compute the gradients of normed q and k, v, g and beta, with a decay per key dim."""
        (K, V), grid = self.states.shape[2:], (self.num_chunks, self.H)
        dq, dk, dv, dg, dbeta = grads
        dscores, dA = torch.empty_like(self.scores), torch.empty_like(self.scores)
        self.launch(
            kda_bwd_scores_kernel,
            grid,
            3 * CHUNK * V,
            *(self.beta, self.inverse, self.updates, do, dN, self.chunks.table),
            *(dscores, dA, dv, self.num_chunks),
            **CHUNKS,
        )
        self.launch(
            kda_bwd_chunks_kernel,
            grid,
            3 * K * V + 4 * LEVELS * CHUNK * K,
            *(self.q, self.k, self.v, self.beta, self.decay, dscores, dA, self.updates),
            *(self.states, do, dN, dS, self.chunks.table, dq, dk, dg, dbeta),
            *(self.q.stride(0), self.k.stride(0), self.v.stride(0), self.scale, self.num_chunks),
            LEVELS=LEVELS,
            NORM=self.norm,
            **KDA_BWD,
        )


def _make_rows(x_THX: Tensor) -> Tensor:
    """Return x with heads and dims contiguous in each row, copied if they are not."""
    is_row = x_THX.stride(2) == 1 and x_THX.stride(1) == x_THX.shape[2]
    return x_THX if is_row else x_THX.contiguous()


class _ChunkedRule(torch.autograd.Function):
    """apply(q, k, v, g, beta, initial, cu_seqlens, scale, norm_qk, chain) -> outputs, last."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta, initial, cu_seqlens, scale, norm, ctx.chain = inputs
        scan, maps = _Scan(DeltaRule(q, k, v, g, beta, scale, norm), cu_seqlens), None
        if ctx.chain is not None:
            transitions = scan.compute_transitions()
            initial, maps = ctx.chain.compute_initial_states(transitions, v.shape[-1])
        initial = None if initial is None else initial.contiguous()
        ctx.save_for_backward(q, k, v, g, beta, initial, cu_seqlens, maps)
        ctx.options = scale, norm
        scan.compute_states(initial)
        return scan.compute_outputs(), scan.last

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, initial, cu_seqlens, maps = ctx.saved_tensors
        scan = _Scan(DeltaRule(q, k, v, g, beta, *ctx.options), cu_seqlens)
        do, dlast = (grad.contiguous() for grad in grads)
        if ctx.chain is not None:
            initial_gradients = scan.compute_initial_gradients(do, None)
            dlast = ctx.chain.compute_last_gradients(initial_gradients, maps)
        scan.compute_states(initial)
        *dinputs, dinitial = scan.compute_gradients(do, dlast.contiguous())
        return *dinputs, dinitial if ctx.needs_input_grad[5] else None, *(None,) * 4
