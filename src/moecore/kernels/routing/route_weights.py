"""The weights of a choice that is given: of a replayed one, or one that a rule made.

    weights[t, k] = what `route` would give expert ids[t, k] as a weight, had it chosen ids[t]

Letters: T tokens, E experts, K choices per token; an id of -1 is no choice: its weight is 0, and
it has no part in the others'.

Budget: as `route`, without the argmaxes; the kernels are those of `route`, so that a replayed
choice gets the very weights of its recording.
"""

from typing import Any

import torch
from torch import Tensor

from moecore.kernels.common import use_kernel, warn_plain
from moecore.kernels.ops import Op
from moecore.kernels.routing.route import MAX_EXPERTS, RouteOptions, launch_forward, route_backward
from moecore.kernels.routing.scores import scores_ref


def route_weights_ref(logits_TE: Tensor, ids_TK: Tensor, options: RouteOptions) -> Tensor:
    """Return what `route_weights` returns, in plain PyTorch, in fp32 or fp64 as the logits."""
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    chosen_TK = ids_TK >= 0
    ids_TK = ids_TK.long().clamp(min=0)
    if options.score_order == "post":
        picked_TK = logits_TE.gather(1, ids_TK)
        # A row without a choice would be a softmax of nothing, NaN.
        out_TK = ~chosen_TK & chosen_TK.any(-1, keepdim=True)
        weights_TK = picked_TK.masked_fill(out_TK, -torch.inf).softmax(-1)
        weights_TK = torch.where(chosen_TK, weights_TK, 0)
    else:
        scores_TE = scores_ref(logits_TE, options.score_function)
        weights_TK = torch.where(chosen_TK, scores_TE.gather(1, ids_TK), 0)
        if options.normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK * options.scale


def _route_weights(
    logits_TE: Tensor,
    ids_TK: Tensor,
    score_function: str,
    score_order: str,
    normalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
) -> Tensor:
    logits_TE, ids_TK = logits_TE.contiguous(), ids_TK.contiguous()
    weights_TK = logits_TE.new_empty(ids_TK.shape)
    options = RouteOptions(
        top_k=ids_TK.shape[1],
        score_function=score_function,
        score_order=score_order,
        normalize=normalize,
        scale=scale,
        num_groups=num_groups,
        top_groups=top_groups,
    )
    launch_forward(logits_TE, None, ids_TK, weights_TK, options, given=True)
    return weights_TK


def _route_weights_fake(logits_TE: Tensor, ids_TK: Tensor, *rest: Any) -> Tensor:
    return logits_TE.new_empty(ids_TK.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits_TE, ids_TK, *options = inputs
    ctx.save_for_backward(logits_TE, ids_TK)
    ctx.options = options[:4]


def _backward(ctx: Any, dweights_TK: Tensor) -> tuple[Tensor | None, ...]:
    logits_TE, ids_TK = ctx.saved_tensors
    dlogits_TE = None
    if ctx.needs_input_grad[0]:
        dlogits_TE = route_backward(logits_TE, ids_TK.contiguous(), dweights_TK, *ctx.options)
    return (dlogits_TE, *(None,) * 7)


_route_weights_op = Op(
    "route_weights",
    _route_weights,
    _route_weights_fake,
    setup_context=_setup_context,
    backward=_backward,
)


def route_weights(logits_TE: Tensor, ids_TK: Tensor, options: RouteOptions) -> Tensor:
    """Return the weights of the given choices; of a choice that `route` made, its bits.

    Args:
        logits_TE: [T, E], fp32 or fp64 (others are widened to fp32). fp64 takes the plain PyTorch
            path on every device.
        ids_TK: int32, distinct in a row; -1 = no choice.
        options: scores, weights and groups, whose layout orders the sums; its other fields of the
            choice are not read.

    Returns:
        [T, K] fp32, differentiable in the logits; no host sync.
    """
    is_small = logits_TE.dtype != torch.float64 and logits_TE.shape[1] <= MAX_EXPERTS
    if not (is_small and use_kernel(logits_TE)):
        warn_plain(
            logits_TE, f"routing weights of {logits_TE.shape[1]} experts in {logits_TE.dtype}"
        )
        return route_weights_ref(logits_TE, ids_TK, options).float()
    return _route_weights_op(
        logits_TE.float(),
        ids_TK,
        options.score_function,
        options.score_order,
        options.normalize,
        options.scale,
        options.num_groups,
        options.top_groups,
    )
