"""Hyper-connections: N residual streams per token, collapsed before a sublayer and mixed after it.

    mix[m]     = sum over c of fn[m, c] * streams[c] / sqrt(mean of streams^2 + norm_eps)
    pre[n]     = sigmoid(mix * scale[0] + base) + eps
    post[n]    = 2 * sigmoid(mix * scale[1] + base)
    comb[j, k] = softmax over k of (mix * scale[2] + base), plus eps; then columns are divided by
                 their sums plus eps, and iterations - 1 times rows and columns (Sinkhorn)
    x[d]       = sum over n of pre[n] * streams[n, d]                              collapse
    out[k, d]  = post[k] * y[d] + sum over j of comb[j, k] * streams[j, d]         expand

Letters: T tokens, N streams, D model dim, C = N * D, M = (2 + N) * N mixes of a token: of pre, of
post, of comb row by row; W = N + N * N weights of a token after the sublayer: post, then comb.

Budget, with b bytes per element. Forward moves (4C + 2D) T b: the product with fn and a program per
token read the streams, and expand reads and writes them. Backward moves (8C + 4D) T b, and reads
the streams four times. Saved for backward: streams once, y, and M + W + 1 fp32 numbers per token.

Source: manifold-constrained hyper-connections, arXiv:2512.24880; DeepSeek-V4.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.kernels.common import KERNEL_DTYPES, can_use_kernel, cdiv, launch, next_power_of_2
from moecore.kernels.hyper_connections_kernel import (
    collapse_streams_bwd_kernel,
    collapse_streams_bwd_mixes_kernel,
    collapse_streams_fwd_kernel,
    expand_streams_bwd_kernel,
    expand_streams_fwd_kernel,
)
from moecore.kernels.ops import Op
from moecore.kernels.routing.router_logits import compute_router_dweight, router_logits

BLOCK_D = 1024  # elements of each stream in one step of a token's program
TILE = dict(BLOCK_T=128, BLOCK_D=64)  # of collapse_streams_bwd_kernel
TILE_WARPS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkhornOptions:
    """Constants of hyper-connections: number of Sinkhorn iterations, and epsilons."""

    iterations: int  # divisions of columns, >= 1; rows are divided iterations - 1 times
    eps: float
    norm_eps: float  # of the mean square of a token's streams


@dataclass(frozen=True, slots=True)
class CollapsedStreams:
    """The residual streams before a sublayer, and weights that mix its output into the streams."""

    streams_TND: Tensor
    weights_TW: Tensor  # fp32
    # With kernels: one element, expanded. It is an input of `expand_streams`, its gradient is the
    # gradient of the streams there, and `collapse_streams` adds this gradient. None = autograd.
    grad_carrier_TND: Tensor | None = None


def collapse_streams_ref(
    streams_TND: Tensor, fn_MC: Tensor, base_M: Tensor, scale_3: Tensor, options: SinkhornOptions
) -> tuple[Tensor, Tensor]:
    """Compute `collapse_streams` in plain PyTorch, in fp32 (fp64 for fp64 streams).

    Returns the sublayer's input, and per token the unrounded mixing weights [W].
    """
    (T, N, _), eps = streams_TND.shape, options.eps
    wide_TND = streams_TND.to(torch.promote_types(streams_TND.dtype, torch.float32))
    flat_TC, sizes = wide_TND.flatten(1), (N, N, N * N)
    r_T1 = (flat_TC.square().mean(-1, keepdim=True) + options.norm_eps).rsqrt()
    mixes = F.linear(flat_TC * r_T1, fn_MC.to(flat_TC.dtype)).split(sizes, dim=-1)
    groups = zip(mixes, scale_3, base_M.split(sizes), strict=True)
    pre, post, comb = (mix * scale + base for mix, scale, base in groups)
    comb = comb.view(T, N, N).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(options.iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    x_TD = ((pre.sigmoid() + eps)[..., None] * wide_TND).sum(1)
    weights_TW = torch.cat((2 * post.sigmoid(), comb.flatten(1)), dim=-1)
    return x_TD.to(streams_TND.dtype), weights_TW


def expand_streams_ref(streams_TND: Tensor, y_TD: Tensor, weights_TW: Tensor) -> Tensor:
    """Compute `expand_streams` in plain PyTorch; return [T, N, D] in the dtype of the streams."""
    T, N, _ = streams_TND.shape
    post_TN, comb_TW = weights_TW.split((N, N * N), dim=-1)
    mixed_TND = comb_TW.view(T, N, N).mT @ streams_TND.to(weights_TW.dtype)
    return (post_TN[..., None] * y_TD[:, None] + mixed_TND).to(streams_TND.dtype)  # type: ignore[no-any-return]


def _make_constants(streams_TND: Tensor) -> dict[str, Any]:
    """Return the compile-time constants of the kernels with one program per token."""
    _, N, D = streams_TND.shape
    return dict(N=N, D=D, N_POW2=next_power_of_2(N), BLOCK_D=min(BLOCK_D, next_power_of_2(D)))


Collapsed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _make_empty_collapsed(streams_TND: Tensor, fn_MC: Tensor, *_: Any) -> Collapsed:
    """Return uninitialised outputs of `_collapse_forward`."""
    (T, N, D), M = streams_TND.shape, len(fn_MC)
    weights, raw, r = (
        streams_TND.new_empty(shape, dtype=torch.float32) for shape in ((T, M - N), (T, M), (T,))
    )
    return streams_TND.new_empty(T, D), weights, raw, r, streams_TND.new_empty(()).expand(T, N, D)


def _collapse_forward(
    streams_TND: Tensor,
    fn_MC: Tensor,
    base_M: Tensor,
    scale_3: Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> Collapsed:
    """Return sublayer input, mixing weights, raw mixes, 1 / RMS per token, and gradient carrier.

    Raw mixes are not divided by the RMS. The carrier has no values: in backward its gradient is the
    streams' gradient from `_expand_forward`.
    """
    x_TD, weights_TW, _, r_T, grad_carrier_TND = _make_empty_collapsed(streams_TND, fn_MC)
    raw_TM = router_logits(streams_TND.flatten(1), fn_MC)
    args = (streams_TND, raw_TM, base_M, scale_3, x_TD, weights_TW, r_T, norm_eps, eps, iterations)
    launch(collapse_streams_fwd_kernel, len(x_TD), *args, **_make_constants(streams_TND))
    return x_TD, weights_TW, raw_TM, r_T, grad_carrier_TND


def _save_collapse(ctx: Any, inputs: tuple[Any, ...], output: Collapsed) -> None:
    """Save the inputs, raw mixes and 1 / RMS for backward."""
    ctx.save_for_backward(*inputs[:4], *output[2:4])
    ctx.others = inputs[4:6]


def _make_empty_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return an uninitialised tensor like each of `tensors`."""
    return tuple(map(torch.empty_like, tensors))


def _collapse_backward(
    streams_TND: Tensor,
    fn_MC: Tensor,
    base_M: Tensor,
    scale_3: Tensor,
    raw_TM: Tensor,
    r_T: Tensor,
    dx_TD: Tensor,
    dweights_TW: Tensor,
    dgrad_carrier_TND: Tensor,
    iterations: int,
    eps: float,
    needs_dfn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of streams, fn (uninitialised unless needs_dfn), base and scale."""
    (T, N, D), M, new = streams_TND.shape, len(fn_MC), raw_TM.new_empty
    pre_TN, draw_TM, factor_T, sums_T2M = new(T, N), new(T, M), new(T), new(T, 2, M)
    inputs = (streams_TND, raw_TM, r_T, base_M, scale_3, dx_TD, dweights_TW)
    outputs = (new(T, iterations - 1, N, N), pre_TN, draw_TM, factor_T, sums_T2M)
    args = (*inputs, *outputs, eps, iterations)
    launch(collapse_streams_bwd_mixes_kernel, T, *args, **_make_constants(streams_TND))
    dbase_M, dscale_M = sums_T2M.sum(0)
    dscale_3 = torch.stack([group.sum() for group in dscale_M.split((N, N, N * N))])
    dstreams_TND, dfn_MC = torch.empty_like(streams_TND), torch.empty_like(fn_MC)
    mixes = (pre_TN, draw_TM, factor_T)
    tensors = (streams_TND, fn_MC, dx_TD, dgrad_carrier_TND, *mixes, dstreams_TND, T)
    grid = cdiv(T, TILE["BLOCK_T"]) * N * cdiv(D, TILE["BLOCK_D"])
    sizes = dict(N=N, D=D, M=M, M_POW2=max(16, next_power_of_2(M)), num_warps=TILE_WARPS)
    launch(collapse_streams_bwd_kernel, grid, *tensors, **sizes, **TILE)
    if needs_dfn:
        dfn_MC = compute_router_dweight(draw_TM, streams_TND.flatten(1), fn_MC)
    return dstreams_TND, dfn_MC, dbase_M, dscale_3


_collapse_bwd = Op(
    "collapse_streams_bwd", _collapse_backward, lambda *args: _make_empty_like(*args[:4])
)


def _differentiate_collapse(
    ctx: Any, dx: Tensor, dweights: Tensor, *rest: Tensor
) -> tuple[Any, ...]:
    """Return gradients of `_collapse_forward`'s inputs; rest[-1] is the gradient of the carrier."""
    needs, grads = ctx.needs_input_grad, (dx, dweights, rest[-1])
    args = (*ctx.saved_tensors, *(grad.contiguous() for grad in grads), *ctx.others)
    outputs = _collapse_bwd(*args, needs[1])
    input_grads = (grad if need else None for grad, need in zip(outputs, needs, strict=False))
    return *input_grads, None, None, None


_collapse = Op(
    "collapse_streams",
    _collapse_forward,
    _make_empty_collapsed,
    setup_context=_save_collapse,
    backward=_differentiate_collapse,
)


def _expand_forward(
    streams_TND: Tensor, grad_carrier_TND: Tensor, y_TD: Tensor, weights_TW: Tensor
) -> Tensor:
    """Return the streams after a sublayer with output y_TD; the gradient carrier is not read."""
    out_TND = torch.empty_like(streams_TND)
    args = (streams_TND, y_TD, weights_TW, out_TND)
    launch(expand_streams_fwd_kernel, len(y_TD), *args, **_make_constants(streams_TND))
    return out_TND


def _expand_backward(
    dout_TND: Tensor, streams_TND: Tensor, y_TD: Tensor, weights_TW: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of streams, sublayer output y and mixing weights."""
    grads = _make_empty_like(streams_TND, y_TD, weights_TW)
    args = (dout_TND, streams_TND, y_TD, weights_TW, *grads)
    launch(expand_streams_bwd_kernel, len(y_TD), *args, **_make_constants(streams_TND))
    return grads  # type: ignore[return-value]


_expand_bwd = Op(
    "expand_streams_bwd", _expand_backward, lambda _, *tensors: _make_empty_like(*tensors)
)
_expand = Op(
    "expand_streams",
    _expand_forward,
    lambda streams_TND, *_: torch.empty_like(streams_TND),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], *inputs[2:]),
    backward=lambda ctx, dout: (None, *_expand_bwd(dout.contiguous(), *ctx.saved_tensors)),
)


def collapse_streams(
    streams_TND: Tensor, fn_MC: Tensor, base_M: Tensor, scale_3: Tensor, options: SinkhornOptions
) -> tuple[Tensor, CollapsedStreams]:
    """Return a sublayer's input [T, D] from N residual streams, and a record for `expand_streams`.

    Computed in fp32, rounded once to the streams' dtype. Kernels are differentiable once, plain
    PyTorch (CPUs, fp64) any number of times. No host sync; the same bits in every run. Tensors have
    any float dtype. fn_MC and base_M project a token's N * D stream values to M = (2 + N) * N
    mixing logits. scale_3 has factors of the logits of input, output and stream-to-stream weights.
    """
    plain = torch.compiler.is_compiling() or not can_use_kernel(streams_TND, fn_MC)
    if plain or streams_TND.dtype not in KERNEL_DTYPES:
        x_TD, weights_TW = collapse_streams_ref(streams_TND, fn_MC, base_M, scale_3, options)
        return x_TD, CollapsedStreams(streams_TND, weights_TW)
    streams_TND = streams_TND.contiguous()
    x_TD, weights_TW, _, _, grad_carrier_TND = _collapse(
        streams_TND,
        fn_MC.contiguous(),
        base_M.float().contiguous(),
        scale_3.float().contiguous(),
        options.iterations,
        options.eps,
        options.norm_eps,
    )
    return x_TD, CollapsedStreams(streams_TND.detach(), weights_TW, grad_carrier_TND)


def expand_streams(y_TD: Tensor, collapsed: CollapsedStreams) -> Tensor:
    """Return the residual streams [T, N, D] after a sublayer with output y_TD, any float dtype.

    fp32 inside, rounded once to the streams' dtype. Differentiable as `collapse_streams` is.
    """
    streams_TND, weights_TW = collapsed.streams_TND, collapsed.weights_TW
    if collapsed.grad_carrier_TND is None:
        return expand_streams_ref(streams_TND, y_TD, weights_TW)
    out: Tensor = _expand(streams_TND, collapsed.grad_carrier_TND, y_TD.contiguous(), weights_TW)
    return out
