"""The experts of one rank as one operation, which saves only X and H for backward.

    h[r] = x[row_ids[r]] @ w1[i]^T      a[r] = act(h[r]) * weight[r]      i = expert of row r
    y[s] = sum over k of a[slots[s, k]] @ w2[i]^T

    da[r] = dy[row_ids[r]] @ w2[i]      dh, dweight and a from h and da in one pass
    dx[s] = sum over k of dh[slots[s, k]] @ w1[i]
    dw2[i] = sum of dy[row_ids[r]]^T a[r]      dw1[i] = sum of dh[r]^T x[row_ids[r]]

The weight is applied before FC2, so FC2's output is not needed: dweight[r] = <da[r], act(h[r])>.
Forward and backward of gated experts compute 18 * R * D * F FLOPs. Plain eager code runs one
`autograd.Function`. Compilers, fake tensors and dispatch modes see the custom op of `traced.py`.

Letters: as in `contract.py`.

Source: Megatron-Core's memory-efficient permutation (arXiv:2603.07685), which applies the weight
before FC2.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moecore.base.torch_private import (
    has_tangents,
    is_plain_eager,
    tree_flatten,
    tree_unflatten,
    will_run_node,
)
from moecore.kernels.experts.backward import SavedState, compute_gradients
from moecore.kernels.experts.contract import (
    ExpertMLPOptions,
    ExpertWeights,
    GradFlags,
    GradientReceiver,
    UnsummedInput,
)
from moecore.kernels.experts.products import make_products
from moecore.kernels.experts.traced import run_traced_backward, run_traced_expert_mlp
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.move import sum_rows_without_autograd
from moecore.kernels.rows.record import Rows


class _ExpertMLP(torch.autograd.Function):
    """Autograd node of `expert_mlp` in eager mode, with dispatcher hooks and gradient sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        x_SD: Tensor,
        w1_eCD: Tensor,
        w2_eDF: Tensor,
        weights_R: Tensor,
        grad_handle_RD: Tensor | None,
        a1_erD: Tensor | None,
        b1_eCr: Tensor | None,
        a2_erF: Tensor | None,
        b2_eDr: Tensor | None,
        rows: Rows,
        weights: ExpertWeights,
        index: ExpertIndex,
        options: ExpertMLPOptions,
        unsummed: UnsummedInput | None,
        receiver: GradientReceiver | None,
    ) -> Tensor:
        """Return each token's sum, or with `unsummed` each expert row's output."""
        products = make_products(options, index, weights)
        ctx.index_cache = products.index_cache  # a few kB, so saved-tensor hooks may ignore it
        x = products.prepare_rows(rows)
        h, a = products.fc1(x, saves_h=options.saves_h and any(ctx.needs_input_grad))
        y = products.fc2(a)
        if unsummed is None:
            y = sum_rows_without_autograd(y, *products.row_map)
        refetch = None if unsummed is None else unsummed.refetch
        ctx.receiver = receiver
        if receiver is not None:
            receiver.accepts_packed_grads = products.accepts_packed_grads
        refetch_tensors = () if refetch is None else refetch.tensors
        if rows.is_saved_elsewhere:
            x = rows
        elif products.packs_rows and refetch is None:
            x = products.pack_rows(x)
        state = SavedState(x if refetch is None else None, h, weights, index)
        matrices: list[Tensor] = []
        tensors, ctx.pair = state.list_saved_tensors(), None
        if weights.quantised is not None:
            matrices, ctx.pair = tree_flatten(weights.quantised)
        ctx.save_for_backward(*tensors, *matrices, *refetch_tensors)
        ctx.ends = (len(tensors), len(tensors) + len(matrices))
        ctx.options, ctx.sinks, ctx.dtype = options, weights.sinks, rows.dtype
        ctx.magnitudes = weights.magnitudes  # not saved by autograd: backward changes it in place
        ctx.is_unsummed = unsummed is not None
        ctx.fetch = None if refetch is None else refetch.fetch
        ctx.sender = None if unsummed is None else unsummed.sender
        ctx.handle_node = None if grad_handle_RD is None else grad_handle_RD.grad_fn
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `forward`'s first nine arguments, None if not requested."""
        tensors, (end, kept_from) = ctx.saved_tensors, ctx.ends  # checkpointing unpacks once
        matrices = None if ctx.pair is None else tree_unflatten(tensors[end:kept_from], ctx.pair)
        state = SavedState.from_tensors(tensors[:end], ctx.dtype, matrices, ctx.magnitudes)
        needs = ctx.needs_input_grad
        wants = GradFlags(needs[4 if ctx.is_unsummed else 0], *needs[1:4], *needs[5:9])
        reads_rows = wants.w1_eCD or wants.a1_erD or wants.b1_eCr or state.h is None
        if ctx.fetch is not None and reads_rows:
            state = replace(state, rows=ctx.fetch(*tensors[kept_from:]))
        arrived = None if ctx.receiver is None else ctx.receiver.take_packed_grads(grads[0])
        if is_plain_eager() and not torch.is_grad_enabled():
            results = compute_gradients(
                make_products(ctx.options, state.index, state.weights, ctx.index_cache),
                state,
                grads[0].contiguous() if arrived is None else arrived,
                wants,
                has_expert_rows=ctx.is_unsummed,
                sinks=ctx.sinks,
                sender=ctx.sender if wants.x and will_run_node(ctx.handle_node) else None,
            )
        else:  # tracers see the custom op, which refuses a second derivative
            dy = grads[0] if arrived is None else arrived.widen()
            results = run_traced_backward(dy, state, ctx.options, ctx.is_unsummed, wants)
        dx, dhandle = (None, results.x) if ctx.is_unsummed else (results.x, None)
        return dx, *results[1:4], dhandle, *results[4:], *(None,) * 6


_ExpertMLP.__name__ = "moecore::expert_mlp"  # in profiles, as the custom op


def expert_mlp(
    rows: Rows,
    weights: ExpertWeights,
    index: ExpertIndex,
    options: ExpertMLPOptions,
    *,
    unsummed: UnsummedInput | None = None,
    receiver: GradientReceiver | None = None,
) -> Tensor:
    """Return each token's sum of its experts' outputs, times routing weights.

    Differentiable once; forward-mode derivatives raise a NotImplementedError. Backend "triton" has
    no host sync. Backend "torch" has no host sync in bf16 on Hopper and datacenter Blackwell; on
    other GPUs it loops over experts on the host. Rows, FC1's output, weights and index are saved
    for backward. Backward skips the matmuls of gradients that are not required. Under a compiler or
    a dispatch mode, gradient sinks, `unsummed.sender`, `unsummed.refetch` and quantised weights are
    not used.

    Args:
        rows: tokens [S, D]. The gradient of FP8 rows is the gradient of `rows.grad_handle_SD`.
        weights: this rank's experts, without biases.
        options: `products` must be a name that `choose_products` returned, not "auto".
        unsummed: passed by a dispatcher that sums expert rows itself. The gradient of expert rows
            is then the gradient of `unsummed.grad_handle_RD`.
        receiver: passed by a dispatcher that may receive gradients of the output as FP8 rows.

    Returns:
        [S, D] in the dtype of the rows, added in fp32 and rounded once; bit-reproducible with
        "triton". With `unsummed`, the R expert rows [R, D]; padding rows are uninitialised.
    """
    tensors = (rows.values, weights.w1_eCD, weights.w2_eDF, index.weights_R)
    updates = weights.list_updates()
    if has_tangents(*tensors, *(t for t in updates if t is not None)):
        raise NotImplementedError(
            "expert_mlp has no forward-mode derivative: use reverse mode, or "
            "expert_backend='sequential'"
        )
    grad_handle_RD = None if unsummed is None else unsummed.grad_handle_RD
    if rows.scales is None and not rows.values.is_contiguous():
        rows = replace(rows, values=rows.values.contiguous())
    if not is_plain_eager():
        return run_traced_expert_mlp(rows, weights, grad_handle_RD, index, options)
    of_rows = rows.values if rows.grad_handle_SD is None else rows.grad_handle_SD
    leaves = (of_rows, *tensors[1:], grad_handle_RD, *updates)
    y: Tensor = _ExpertMLP.apply(*leaves, rows, weights, index, options, unsummed, receiver)
    return y
