"""Linear attention over cp ranks, which exchange the states before their chunks of documents.

Legend: G ranks, n documents, 2 * n chunks of this rank, H value heads, k and v dims of a head, D
channels, t tokens of this rank, w tokens that a convolution looks back.

Each document is cut into 2 * G chunks (`kernels/zigzag.py`). Each rank stores two of them. The
state of a document passes through the ranks in ascending, then in descending order:

    G = 2    rank 0: chunk 0 -> rank 1: chunk 1 -> rank 1: chunk 2 -> rank 0: chunk 3

The output of a chunk is linear in the state S before it. A rank therefore computes its chunks once
with S = 0, and with k extra columns of values: they are zero, and their initial state is the
identity. The last state of the extra columns is the chunk's transition M, and their output is r:

    last state = (last state with S = 0) + M S        o of a token = (o with S = 0) + S^T r

An all-to-all gives each rank the states of all chunks for some documents and heads. The rank
computes the state before each chunk, and a second all-to-all returns these states to the ranks of
the chunks. Autograd differentiates all of it.

Source: LASP-2 (arXiv:2502.07563), with the transitions of the delta rule.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moecore.base.torch_private import skips_communication
from moecore.kernels.linear_attention import DeltaRule, causal_convolution, gated_delta_rule
from moecore.moe.dispatch.collectives import all_gather_rows, exchange_with_grad

MAX_GROUPS = 1023  # groups that torch's grouped product supports


@dataclass(frozen=True)
class LocalChunks:
    """This rank's two chunks (early and late) of each document, for linear attention."""

    group: dist.ProcessGroup
    cu_seqlens: Tensor

    @cached_property
    def chunk_cu_seqlens(self) -> Tensor:
        """int32 [2 * n + 1]: each chunk's first token on this rank, then the number of tokens."""
        ends = self.cu_seqlens[1:] // self.group.size()
        middles = ends - self.chunk_lengths
        inner = torch.stack((middles, ends), dim=1).flatten()
        return F.pad(inner, (1, 0)).int()

    @cached_property
    def chunk_lengths(self) -> Tensor:
        """[n], the number of tokens of one chunk of each document."""
        return self.cu_seqlens.diff() // (2 * self.group.size())

    def gather_previous_tokens(self, x_tD: Tensor, num_tokens: int) -> Tensor:
        """Return [2 * n, num_tokens, D], the tokens before this rank's chunks of n documents.

        Zeros stand for tokens before the document. Collective.
        """
        G, rank = self.group.size(), self.group.rank()
        lengths = self.chunk_lengths.long()[:, None, None]
        back_w = torch.arange(num_tokens, 0, -1, device=x_tD.device)
        last = (self.chunk_cu_seqlens[1:, None] - back_w).clamp(min=0)
        last_GPwD = all_gather_rows(x_tD[last], self.group)
        # A chunk may be shorter than w, so the chunk of each of the w tokens is computed.
        chunk_2 = rank + (2 * G - 1 - 2 * rank) * torch.arange(2, device=x_tD.device)
        place_n2w = chunk_2[:, None] * lengths - back_w
        chunk_n2w = place_n2w.clamp(min=0) // lengths.clamp(min=1)
        from_end = lengths * (chunk_n2w + 1) - place_n2w
        owner = torch.minimum(chunk_n2w, 2 * G - 1 - chunk_n2w)
        document = torch.arange(len(lengths), device=x_tD.device)[:, None, None]
        chunk = (owner * len(lengths) + document) * 2 + (chunk_n2w >= G)
        exists = (place_n2w >= 0) & (lengths > 0)
        source = (chunk * num_tokens + num_tokens - from_end).where(exists, 0).flatten(0, 1)
        before = last_GPwD.flatten(0, 1)[source]
        return before.masked_fill(~exists.flatten(0, 1)[..., None], 0)

    def compute_initial_states(self, final_states: Tensor, value_dim: int) -> Tensor:
        """Return the state before each of this rank's chunks of n documents, [2 * n, H, k, v].

        `final_states` [2 * n, H, k, v + k] has each chunk's last state if the first is 0. Its last
        k columns are the matrix that multiplies an initial state. v is `value_dim`. Collective.
        """
        G, (num, H, k, _) = self.group.size(), final_states.shape
        chains = final_states.unflatten(0, (num // 2, 2)).transpose(0, 1).flatten(1, 2)
        num_chains = chains.shape[1]
        chains = F.pad(chains, (0, 0, 0, 0, 0, -num_chains % G))
        local_parts = self._exchange_states(chains.unflatten(1, (G, -1)).transpose(0, 1))
        by_chunk = torch.cat((local_parts[:, 0], local_parts[:, 1].flip(0)))
        states = [local_parts.new_zeros(local_parts.shape[2], k, value_dim)]
        for last in by_chunk[:-1]:
            states.append(torch.baddbmm(last[..., :value_dim], last[..., value_dim:], states[-1]))
        first, second = torch.stack(states).chunk(2)
        parts = self._exchange_states(torch.stack((first, second.flip(0)), dim=1))
        parts = parts.transpose(0, 1).flatten(1, 2)[:, :num_chains]
        return parts.unflatten(1, (num // 2, H)).transpose(0, 1).flatten(0, 1)  # type: ignore[no-any-return]

    def _exchange_states(self, x_G: Tensor) -> Tensor:
        """All-to-all [G, ...] along the first dim; backward sends gradients by an all-to-all."""

        def run_all_to_all(send_buffer: Tensor) -> Tensor:
            recv_buffer = torch.empty_like(send_buffer, memory_format=torch.contiguous_format)
            if not skips_communication(send_buffer):
                dist.all_to_all_single(recv_buffer, send_buffer.contiguous(), group=self.group)
            return recv_buffer

        return exchange_with_grad(x_G, run_all_to_all, run_all_to_all)


def run_rule_over_ranks(rule: DeltaRule, chunks: LocalChunks) -> Tensor:
    """Return the outputs o_tHv of a delta rule for the local tokens of `chunks`. Collective."""
    v_tHv, k = rule.v_THv, rule.k_Thk.shape[-1]
    (_, H, v), num = v_tHv.shape, len(chunks.chunk_cu_seqlens) - 1
    dtype = torch.promote_types(v_tHv.dtype, torch.float32)
    initial = torch.eye(k, v + k, dtype=dtype, device=v_tHv.device).roll(v, 1)
    initial = initial.expand(num, H, k, v + k).contiguous()
    wide = rule._replace(v_THv=F.pad(v_tHv, (0, k)))
    wide_tHv, states = gated_delta_rule(wide, chunks.chunk_cu_seqlens, initial)
    zero_state_tHv, factors_tHk = wide_tHv.split((v, k), dim=-1)
    entering = chunks.compute_initial_states(states, v).to(v_tHv.dtype)
    outs = _apply_initial_states(factors_tHk, entering, chunks.chunk_cu_seqlens)
    return zero_state_tHv + outs  # type: ignore[no-any-return]


def _apply_initial_states(r_tHk: Tensor, states_PHkv: Tensor, chunk_cu_seqlens: Tensor) -> Tensor:
    """Return [t, H, v]: each token's row of `r_tHk` times the state before the token's chunk."""
    (t, H, k), num, v = r_tHk.shape, len(states_PHkv), states_PHkv.shape[-1]
    multiple = 16 // r_tHk.element_size()  # strides of grouped_mm are multiples of 16 bytes
    if k % multiple or v % multiple:
        r_tHk = F.pad(r_tHk, (0, -k % multiple))
        states_PHkv = F.pad(states_PHkv, (0, -v % multiple, 0, -k % multiple))
    ends = (
        chunk_cu_seqlens[1:]
        + t * torch.arange(H, dtype=torch.int32, device=chunk_cu_seqlens.device)[:, None]
    )
    r_Htk, states_HPkv = r_tHk.transpose(0, 1), states_PHkv.transpose(0, 1)
    outs = []
    for heads in torch.arange(H, device="cpu").split(max(MAX_GROUPS // num, 1)):
        part = slice(int(heads[0]), int(heads[-1]) + 1)
        offsets = (ends[part] - part.start * t).flatten()
        rows = r_Htk[part].flatten(0, 1)
        outs.append(F.grouped_mm(rows, states_HPkv[part].flatten(0, 1), offs=offsets))
    return torch.cat(outs)[:, :v].unflatten(0, (H, t)).transpose(0, 1)  # type: ignore[no-any-return]


def causal_conv1d_over_ranks(
    x_tD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, chunks: LocalChunks, *, apply_silu: bool
) -> Tensor:
    """Return y_tD of `causal_conv1d` for this rank's tokens of sharded documents. Collective."""
    past = chunks.gather_previous_tokens(x_tD, weight_DW.shape[1] - 1)
    inputs, cu_seqlens = (x_tD, weight_DW, bias_D), chunks.chunk_cu_seqlens
    return causal_convolution(*inputs, cu_seqlens, previous_tokens_nwD=past, apply_silu=apply_silu)
