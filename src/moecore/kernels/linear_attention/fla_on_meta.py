"""flash-linear-attention on meta tensors: saves and allocates tensors, and records launches.

Letters of `contract.py`; C tokens of a chunk. Backward recomputes the states of all chunks.

FLOPs count the matrix products, with triangles as squares, but not the inverse of a chunk's
triangular system. FLOPs per token and value head:

                              forward                   backward
    gated delta rule          6 k v + 2 C (3 k + 2 v)   16 k v + 2 C (9 k + 5 v + 2 C)
    without learning rates    4 k v + 2 C (k + v)       10 k v + 2 C (3 k + 2 v)

Source: flash-linear-attention 0.6 (`fla/ops`: `gated_delta_rule/chunk.py`, `simple_gla/chunk.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecore.kernels.common import cdiv
from moecore.kernels.linear_attention.contract import DeltaRule
from moecore.kernels.meta import record_launch

CHUNK = 64
KEY_DIMS = 128  # dims of a key in one program of the backward


class ScanSize(NamedTuple):
    """The shape and the FLOPs of one recorded kernel launch of linear attention."""

    shape: tuple[int, int, int, int, int]  # documents, value heads, tokens of a document, k, v
    flops: int


def gated_delta_rule(
    rule: DeltaRule, cu_seqlens: Tensor, initial_states_nHkv: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return empty outputs and last states on meta, and record the launches of a dry run."""
    q, k, v, g, beta = rule[:5]
    assert rule.norm_qk == (beta is not None), "queries and keys are normed where there are rates"
    states = initial_states_nHkv, len(cu_seqlens) - 1
    if beta is None:
        return _RuleWithoutRatesOnMeta.apply(q, k, v, g, *states)  # type: ignore[no-any-return]
    return _RuleOnMeta.apply(q, k, v, g, beta, *states)  # type: ignore[no-any-return]


def causal_convolution(
    x_TD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, previous_tokens_nwD: Tensor | None
) -> Tensor:
    """Return an empty result on meta; record the convolution's launches in forward and backward."""
    return _ConvolutionOnMeta.apply(x_TD, weight_DW, bias_D, previous_tokens_nwD)  # type: ignore[no-any-return]


class _Scan:
    """The sizes of one delta rule in a dry run: tokens T, heads H, dims k and v, and chunks."""

    def __init__(self, k_Thk: Tensor, v_THv: Tensor, num_documents: int) -> None:
        (self.T, self.H, self.v), self.k = v_THv.shape, k_Thk.shape[2]
        self._shape = num_documents, self.H, self.T // max(1, num_documents), self.k, self.v
        self.num_chunks = max(num_documents, cdiv(self.T, CHUNK))

    def record(
        self, kernel_name: str, *tensors: Tensor | None, num_states: int = 0, num_chunks: int = 0
    ) -> None:
        """Record a launch of 2 (num_states k v + num_chunks CHUNK) FLOPs per token and head."""
        flops = 2 * self.T * self.H * (num_states * self.k * self.v + CHUNK * num_chunks)
        record_launch(kernel_name, ScanSize(self._shape, flops), *tensors)

    def record_output(self, *tensors: Tensor) -> None:
        """Record the launch for outputs; `tensors`: q, k, values, states, decay sums, outputs."""
        self.record("chunk_fwd_kernel_o", *tensors, num_states=1, num_chunks=self.k + self.v)

    def recompute_w_u(
        self, k: Tensor, v: Tensor, beta: Tensor, decay_sums: Tensor, inverse_systems: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return empty w [T, H, k] and u [T, H, v]; record the launch of the kernel for both."""
        w, u = k.new_empty(self.T, self.H, self.k), torch.empty_like(v)
        tensors = k, v, beta, w, u, inverse_systems, decay_sums
        self.record("recompute_w_u_fwd_kernel", *tensors, num_chunks=self.k + self.v)
        return w, u

    def compute_states(
        self,
        k: Tensor,
        w: Tensor,
        u: Tensor,
        decay_sums: Tensor,
        initial_states: Tensor | None,
        final_states: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return empty first states [chunks, H, k, v] and new values; record the launch."""
        h, new = k.new_empty(self.num_chunks, self.H, self.k, self.v), torch.empty_like(u)
        tensors = k, u, w, new, decay_sums, h, initial_states, final_states
        self.record("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", *tensors, num_states=2)
        return h, new

    def compute_plain_states(
        self,
        k: Tensor,
        v: Tensor,
        decay_sums: Tensor,
        initial_states: Any,
        final_states: Any,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return empty first states in `dtype`, of a rule without rates; record the launch."""
        h = k.new_empty(self.num_chunks, self.H, self.k, self.v, dtype=dtype)
        self.record(
            "chunk_fwd_kernel_h", k, v, h, decay_sums, initial_states, final_states, num_states=1
        )
        return h


class _RuleOnMeta(torch.autograd.Function):
    """apply(q, k, v, g, beta, initial states or None, num_documents) -> outputs, last states."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_states: Tensor | None,
        num_documents: int,
    ) -> tuple[Tensor, Tensor]:
        inputs = [x.contiguous() for x in (q, k, v, g, beta)]
        (q, q_rstd), (k, k_rstd) = map(_normalise, inputs[:2])
        v, g, beta = inputs[2:]
        scan = _Scan(k, v, num_documents)
        sums = torch.empty_like(g, dtype=torch.float32)
        record_launch("chunk_local_cumsum_scalar_kernel", g, sums)
        A = torch.zeros(scan.T, scan.H, CHUNK, dtype=k.dtype, device=k.device)
        name = "chunk_gated_delta_rule_fwd_kkt_solve_kernel"
        scan.record(name, k, sums, beta, A, num_chunks=scan.k)
        w, u = scan.recompute_w_u(k, v, beta, sums, A)
        last = k.new_zeros(num_documents, scan.H, scan.k, scan.v, dtype=torch.float32)
        h, new = scan.compute_states(k, w, u, sums, initial_states, last)
        o = torch.empty_like(v)
        scan.record_output(q, k, new, h, sums, o)
        ctx.scan = scan
        ctx.save_for_backward(q, q_rstd, k, k_rstd, v, sums, beta, A, initial_states)
        return o, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, q_rstd, k, k_rstd, *rest = ctx.saved_tensors
        do, dlast = (grad.contiguous() for grad in grads)
        (dq, dk), rest = _compute_gradients(ctx.scan, (q, k, *rest), do, dlast)
        return _differentiate_norm(q, q_rstd, dq), _differentiate_norm(k, k_rstd, dk), *rest, None


def _compute_gradients(
    scan: _Scan, saved_tensors: Sequence[Any], do: Tensor, dfinal_states: Tensor
) -> tuple[tuple[Tensor, Tensor], list[Tensor | None]]:
    """Return ((dq, dk), [dv, dg, dbeta, dinitial]), all empty; record the backward's launches."""
    q, k, v, sums, beta, A, initial = saved_tensors
    w, u = scan.recompute_w_u(k, v, beta, sums, A)
    h, new = scan.compute_states(k, w, u, sums, initial, None)
    dv, by_chunk = torch.empty_like(do), scan.k + scan.v
    scan.record("chunk_bwd_kernel_dv_local", q, k, sums, do, dv, num_chunks=by_chunk)
    dh, dinitial = torch.empty_like(h), None if initial is None else torch.empty_like(initial)
    dv_new = torch.empty_like(dv)
    tensors: tuple[Any, ...] = q, k, w, sums, dfinal_states, dinitial, do, dh, dv, dv_new
    scan.record("chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64", *tensors, num_states=3)
    dv = dv_new
    dq, dk, dw = (k.new_empty(scan.T, scan.H, scan.k) for _ in range(3))
    dsums = sums.new_empty(cdiv(scan.k, KEY_DIMS), *sums.shape)
    tensors = q, k, new, sums, h, do, dh, dq, dk, dw, dv, dsums
    chunks = scan.v + 2 * scan.k
    scan.record("chunk_bwd_kernel_dqkwg", *tensors, num_states=3, num_chunks=chunks)
    del tensors  # which has gradients of all value heads
    dq = _sum_over_value_heads(dq, q)
    dk = _sum_over_value_heads(dk, k)
    dsums = dsums.sum(0)
    dk_new, dvalues = k.new_empty(scan.T, scan.H, scan.k), torch.empty_like(v)
    of_sums, dbeta = torch.empty_like(sums), torch.empty_like(beta)
    tensors = k, v, beta, sums, A, dw, dv, dk_new, dvalues, dbeta, of_sums
    chunks = 5 * scan.k + 2 * scan.v + 2 * CHUNK
    scan.record("prepare_wy_repr_bwd_kernel", *tensors, num_chunks=chunks)
    del tensors
    dk_new = _sum_over_value_heads(dk_new, k)
    dk += dk_new
    dsums += of_sums
    dg = torch.empty_like(sums)
    record_launch("chunk_local_cumsum_scalar_kernel", dsums, dg)
    return (dq, dk), [dvalues, dg, dbeta, dinitial]


class _RuleWithoutRatesOnMeta(torch.autograd.Function):
    """apply(q, k, v, g, initial states or None, num_documents) -> outputs, last states."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        initial_states: Tensor | None,
        num_documents: int,
    ) -> tuple[Tensor, Tensor]:
        q, k, v, g = (x.contiguous() for x in (q, k, v, g))
        scan = _Scan(k, v, num_documents)
        sums = torch.empty_like(g, dtype=torch.float32)
        record_launch("chunk_local_cumsum_scalar_kernel", g, sums)
        last = k.new_empty(num_documents, scan.H, scan.k, scan.v, dtype=torch.float32)
        h = scan.compute_plain_states(k, v, sums, initial_states, last, k.dtype)
        o = torch.empty_like(v)
        scan.record_output(q, k, v, h, sums, o)
        ctx.scan = scan
        ctx.save_for_backward(q, k, v, sums, initial_states)
        return o, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scan, (q, k, v, sums, initial) = ctx.scan, ctx.saved_tensors
        do, dlast = (grad.contiguous() for grad in grads)
        h = scan.compute_plain_states(k, v, sums, initial, None, torch.float32)
        dh, dinitial = torch.empty_like(h), None if initial is None else torch.empty_like(initial)
        scan.record("chunk_bwd_kernel_dh", q, sums, do, dlast, dh, dinitial, num_states=1)
        dq, dk = torch.empty_like(q), torch.empty_like(k)
        dsums = sums.new_empty(cdiv(scan.k, KEY_DIMS), *sums.shape)
        tensors = q, k, v, sums, h, do, dh, dq, dk, dsums
        chunks = scan.v + 2 * scan.k
        scan.record("chunk_bwd_kernel_dqkwg", *tensors, num_states=2, num_chunks=chunks)
        del tensors
        dsums = dsums.sum(0)
        dv, inputs = torch.empty_like(do), (q, k, sums, do)
        chunks = scan.k + scan.v
        scan.record("chunk_bwd_kernel_dv", *inputs, dv, dh, num_states=1, num_chunks=chunks)
        del h, dh
        dg = torch.empty_like(sums)
        record_launch("chunk_local_cumsum_scalar_kernel", dsums, dg)
        return dq, dk, dv, dg, dinitial, None


def _normalise(x_Thk: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty x / |x| and fp32 1 / |x|, with norms over the last dim; record the launch."""
    out, rstd = torch.empty_like(x_Thk), x_Thk.new_empty(x_Thk.shape[:2], dtype=torch.float32)
    record_launch("l2norm_fwd_kernel", x_Thk, out, rstd)
    return out, rstd


def _differentiate_norm(x_Thk: Tensor, rstd: Tensor, grad: Tensor) -> Tensor:
    """Return the empty gradient of x for `grad`, the gradient of x / |x|; record the launch."""
    out = torch.empty_like(x_Thk)
    record_launch("l2norm_bwd_kernel", x_Thk, rstd, grad, out)
    return out


def _sum_over_value_heads(grad_THk: Tensor, x_Thk: Tensor) -> Tensor:
    """Sum the gradient over the H / h value heads that share a key head; return [T, h, k]."""
    if grad_THk.shape == x_Thk.shape:
        return grad_THk
    return grad_THk.unflatten(1, (x_Thk.shape[1], -1)).sum(2)  # type: ignore[no-any-return]


class _ConvolutionOnMeta(torch.autograd.Function):
    """apply(x, weight, bias or None, tokens before documents or None) -> y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, previous_tokens: Any) -> Tensor:
        ctx.save_for_backward(x, weight, bias, previous_tokens)
        y = x.new_empty(x.shape)
        record_launch("causal_conv1d_fwd_kernel", x, y, weight, bias, previous_tokens)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, before = ctx.saved_tensors
        y = x.new_empty(x.shape)  # recomputed, before the activation
        record_launch("causal_conv1d_fwd_kernel", x, y, weight, bias, before)
        num_chunks = cdiv(len(x), CHUNK)
        dx = x.new_empty(x.shape)
        parts = weight.new_empty(num_chunks, *weight.shape, dtype=torch.float32)
        dbias = None if bias is None else torch.empty_like(bias)
        dbefore = None if before is None else torch.empty_like(before)
        record_launch("causal_conv1d_bwd_kernel", x, y, weight, before, *grads, dx, parts, dbefore)
        return dx, parts.sum(0).to(weight.dtype), dbias, dbefore
