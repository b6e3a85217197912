"""Logits, choice and weights of tokens: `router_logits` and `route` as one autograd node.

A node and its call cost more host time than two launches, so plain eager code uses one node for
both. Under tracers, without a kernel for these tensors, and in fp64 they are two operations.

Letters: T tokens, D model dim, E experts, K experts per token.
"""

from typing import Any

import torch
from torch import Tensor

from moecore.base.torch_private import is_plain_eager
from moecore.kernels.common import can_use_kernel
from moecore.kernels.ops import is_plain
from moecore.kernels.routing import route as routes
from moecore.kernels.routing import router_logits as products


class _RouteTokens(torch.autograd.Function):
    """apply(x, weight, bias, selection bias, flat options) returns logits, expert ids, weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_ED: Tensor,
        bias_E: Tensor | None,
        selection_bias_E: Tensor | None,
        flat_options: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = products.run_logits_kernel(x_TD, weight_ED, bias_E)
        ids_TK, weights_TK = routes.run_route_kernel(logits_TE, selection_bias_E, *flat_options)
        ctx.save_for_backward(x_TD, weight_ED, logits_TE, ids_TK)
        ctx.bias_dtype = None if bias_E is None else bias_E.dtype
        ctx.options = flat_options[1:5]
        ctx.mark_non_differentiable(ids_TK)
        ctx.set_materialize_grads(False)  # the ids would get zeros of their size
        return logits_TE, ids_TK, weights_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dlogits_TE, _, dweights_TK = grads
        x_TD, weight_ED, logits_TE, ids_TK = ctx.saved_tensors
        if dweights_TK is not None:
            by_choice_TE = routes.backward(logits_TE, ids_TK, dweights_TK, *ctx.options)
            dlogits_TE = by_choice_TE if dlogits_TE is None else dlogits_TE + by_choice_TE
        if dlogits_TE is None:
            return (None,) * 5
        needs = ctx.needs_input_grad[:3]
        args = (needs, ctx.bias_dtype, dlogits_TE, x_TD, weight_ED)
        return *products.compute_input_gradients(*args), None, None


_RouteTokens.__name__ = "moecore::route_tokens"  # in profiles, as the custom ops


def route_tokens(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    selection_bias_E: Tensor | None,
    options: routes.RouteOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the router logits [T, E], and the expert ids and weights [T, K] from `route`.

    `bias_E` is added to the logits. `selection_bias_E` only affects the choice of experts.
    """
    tensors = [t for t in (x_TD, weight_ED, bias_E, selection_bias_E) if t is not None]
    can_fuse = (
        torch.is_grad_enabled()
        and is_plain_eager()
        and can_use_kernel(*tensors)
        and all(is_plain(t) for t in tensors)
        and products.has_logits_kernel(x_TD, weight_ED)
        and weight_ED.shape[0] <= routes.MAX_EXPERTS
    )
    if can_fuse:
        products.check_logits_shapes(x_TD, weight_ED, bias_E)
        routes.check_route_options(weight_ED.shape[0], options)
        flat = routes.flatten_options(options)
        outputs: Any = _RouteTokens.apply(x_TD, weight_ED, bias_E, selection_bias_E, flat)
        return outputs  # type: ignore[no-any-return]
    logits_TE = products.router_logits(x_TD, weight_ED, bias_E)
    return logits_TE, *routes.route(logits_TE, selection_bias_E, options)
