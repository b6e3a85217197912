"""The experts of each token and their weights: scores, top-k choice, weights.

    route           the choice and its weights
    route_weights   the weights of given experts, for example of a replayed choice: the weights
                    that `route` would return for this choice

Letters: T tokens, E experts, K experts per token, G expert groups of S experts.

Budget: forward reads the logits once, 4TE bytes, and writes 8TK; backward reads 4TE + 8TK and
writes 4TE (scores of each logit and "post" read only K logits of a row). Neither is bound by
memory: a choice is an argmax over E in registers, about 6 integer instructions per logit and
choice. `route_weights` runs the kernels of `route` without the argmaxes, so a replayed choice gets
the bits of its recording.
"""

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moecore.kernels.common import can_use_kernel, cdiv, launch, next_power_of_2, warn_on_fallback
from moecore.kernels.ops import Op, make_setup_context
from moecore.kernels.routing.route_kernel import route_bwd_kernel, route_fwd_kernel
from moecore.kernels.routing.scores import compute_scores_ref

# A program is one warp that holds a tile of whole rows: a row never spans two warps, so that a
# reduction needs no shared memory and no barrier.
FWD_TILE, BWD_TILE = 1024, 512  # logits of one program: 32 and 16 registers per thread
MAX_TOKENS = 64  # of one program, where E is small
MAX_EXPERTS = 1024  # of a row, which one warp holds; more use the references


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteOptions:
    """Options that map router logits to expert ids and weights; `MoEConfig` checks combinations."""

    top_k: int  # experts per token K
    # "softmax" over the experts; "sigmoid" or "sqrtsoftplus", sqrt(log(1 + exp(x))), of each logit
    score_function: str
    # "pre" ranks the scores of all experts; "post" ranks the logits. The weights are the scores of
    # the chosen experts, but "post" and "softmax" give a softmax over the K chosen logits
    score_order: str
    # divide the K weights of a token by their sum (+ 1e-20); not read with "post" and "softmax"
    normalize: bool
    scale: float  # factor on the weights
    num_groups: int  # experts are split into this many equal groups
    # groups that a token may choose from, ranked by the sum of their `group_experts` best selection
    # scores
    top_groups: int
    # at most the experts of a group. 2 is DeepSeek-V3's rule, 1 DeepSeek-V2's, top_k / top_groups
    # Megatron-Core's
    group_experts: int = 2

    @property
    def is_softmax_after_choice(self) -> bool:
        """Whether weights are a softmax over only the K logits of the chosen experts."""
        return self.score_order == "post" and self.score_function == "softmax"


def route_ref(
    logits_TE: Tensor, bias_E: Tensor | None, options: RouteOptions
) -> tuple[Tensor, Tensor]:
    """Compute `route` in plain PyTorch; weights have the logits' dtype, at least fp32."""
    # Example, E=4, two groups, top_groups=1, K=2: scores [.1 .6 .5 .4] have group sums .7 and .9,
    # so the ids are [2, 3] although expert 1 has the best score.
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    if options.is_softmax_after_choice:
        ids_TK = _select_experts(logits_TE.detach(), bias_E, options)
        weights_TK = logits_TE.gather(1, ids_TK).softmax(-1)
    else:
        scores_TE = compute_scores_ref(logits_TE, options.score_function)
        ranked_TE = scores_TE if options.score_order == "pre" else logits_TE
        ids_TK = _select_experts(ranked_TE.detach(), bias_E, options)
        weights_TK = scores_TE.gather(1, ids_TK)
        if options.normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return ids_TK.to(torch.int32), weights_TK * options.scale


def _select_experts(scores_TE: Tensor, bias_E: Tensor | None, options: RouteOptions) -> Tensor:
    """Return expert ids [T, K] int64 by descending score + bias; equal sums are ordered by id."""
    (T, E), K = scores_TE.shape, options.top_k
    if bias_E is not None:
        scores_TE = scores_TE + bias_E
    order_TE = _sort_best_first(scores_TE)
    if options.top_groups < options.num_groups:
        ranked_TGS = scores_TE.view(T, options.num_groups, E // options.num_groups)
        # Added best first, as the kernel does: equal bits tie in both.
        best, *rest = ranked_TGS.topk(options.group_experts, dim=-1).values.unbind(-1)
        groups_TG = _sort_best_first(sum(rest, start=best))
        excluded_TG = torch.ones_like(groups_TG, dtype=torch.uint8)
        excluded_TG.scatter_(1, groups_TG[:, : options.top_groups], 0)
        excluded_TE = excluded_TG[..., None].expand_as(ranked_TGS).reshape(T, E)
        # Excluded experts go last whatever their scores: an allowed one may be at -inf.
        order_TE = order_TE.gather(1, excluded_TE.gather(1, order_TE).sort(stable=True).indices)
    return order_TE[:, :K]


def _sort_best_first(scores: Tensor) -> Tensor:
    """Return the indices of a stable descending sort of the last dim; NaN sorts first."""
    # PyTorch's sort on CUDA may place a NaN below -inf when its sign bit is set.
    scores = scores.masked_fill(scores.isnan(), torch.nan)
    return scores.sort(dim=-1, descending=True, stable=True).indices


def _count_tokens_per_program(max_logits: int, num_columns: int) -> int:
    """Return how many rows of `num_columns` fit into `max_logits` logits, in [1, MAX_TOKENS]."""
    return max(1, min(MAX_TOKENS, max_logits // num_columns))


# `RouteOptions` as arguments of a custom op, in the order of its fields.
_OPTIONS = (
    "int top_k, str score_function, str score_order, bool normalize, float scale, int num_groups, "
    "int top_groups, int group_experts"
)
_OPTION_NAMES = [field.name for field in fields(RouteOptions)]


@cache
def flatten_options(options: RouteOptions) -> tuple[Any, ...]:
    """Return the options as a tuple of custom op arguments, in the order of their fields."""
    return tuple(getattr(options, name) for name in _OPTION_NAMES)


@cache
def _unflatten_options(flat_options: tuple[Any, ...]) -> RouteOptions:
    """Return the options of a flat tuple: the inverse of `flatten_options`."""
    return RouteOptions(**dict(zip(_OPTION_NAMES, flat_options, strict=True)))


def run_route_kernel(
    logits_TE: Tensor, bias_E: Tensor | None, *flat_options: Any
) -> tuple[Tensor, Tensor]:
    """Return expert ids and weights by `route`'s kernel; `flat_options`: see `flatten_options`."""
    return _launch_route(logits_TE, bias_E, None, _unflatten_options(flat_options))


def _launch_route(
    logits_TE: Tensor, bias_E: Tensor | None, ids_TK: Tensor | None, options: RouteOptions
) -> tuple[Tensor, Tensor]:
    """Return expert ids [T, K] and weights, by the kernel; ids_TK None = the kernel chooses ids."""
    (T, E), K = logits_TE.shape, options.top_k if ids_TK is None else ids_TK.shape[1]
    empty_TK, weights_TK = _make_empty_choice(logits_TE, bias_E, K)
    BLOCK_T, constants = _choose_forward_constants(E, K, options, ids_TK is not None)
    bias_E = None if bias_E is None else bias_E.float().contiguous()
    ids_TK = empty_TK if ids_TK is None else ids_TK.contiguous()
    args = (logits_TE.contiguous(), bias_E, ids_TK, weights_TK, T, options.scale)
    launch(route_fwd_kernel, cdiv(T, BLOCK_T), *args, **constants)
    return ids_TK, weights_TK


@cache
def _choose_forward_constants(
    E: int, K: int, options: RouteOptions, has_ids: bool
) -> tuple[int, dict[str, Any]]:
    """Return the forward kernel's tokens per program and constants; `has_ids`: ids are inputs."""
    G = options.num_groups if options.top_groups < options.num_groups else 1
    G_POW2, S_POW2, K_POW2 = (next_power_of_2(n) for n in (G, E // G, K))
    BLOCK_T = _count_tokens_per_program(FWD_TILE, max(G_POW2 * S_POW2, K_POW2))
    sizes = dict(
        E=E, K=K, G=G, BLOCK_T=BLOCK_T, K_POW2=K_POW2, G_POW2=G_POW2, S_POW2=S_POW2, HAS_IDS=has_ids
    )
    groups = dict(TOP_GROUPS=options.top_groups, GROUP_EXPERTS=options.group_experts)
    post, normalize = options.score_order == "post", options.normalize
    scores = _make_score_constants(options.score_function, post, normalize)
    return BLOCK_T, sizes | groups | scores


def _make_score_constants(score_function: str, is_post: bool, normalize: bool) -> dict[str, Any]:
    """Return both kernels' constants; `is_post` = weights are a softmax of the chosen logits."""
    options = dict(num_warps=1, enable_fp_fusion=False)  # Note [same bits] of scores.py
    return dict(FUNCTION=score_function, POST=is_post, NORMALIZE=normalize, **options)


def _make_empty_choice(
    logits_TE: Tensor, bias_E: Tensor | None, top_k: int, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Return empty ids, int32 [T, K], and weights [T, K] in the logits' dtype. Ignores `rest`."""
    shape = (logits_TE.shape[0], top_k)
    return logits_TE.new_empty(shape, dtype=torch.int32), logits_TE.new_empty(shape)


def _route_bwd(
    logits_TE: Tensor,
    ids_TK: Tensor,
    dweights_TK: Tensor,
    score_function: str,
    score_order: str,
    normalize: bool,
    scale: float,
) -> Tensor:
    """Return the gradient of the logits from the gradient of the weights; id -1 has no gradient."""
    (T, E), K = logits_TE.shape, ids_TK.shape[1]
    dlogits_TE = logits_TE.new_empty(T, E)
    E_POW2 = next_power_of_2(E)
    BLOCK_T = _count_tokens_per_program(BWD_TILE, E_POW2)
    tensors = (logits_TE.contiguous(), ids_TK.contiguous(), dweights_TK.contiguous(), dlogits_TE)
    sizes = dict(E=E, K=K, BLOCK_T=BLOCK_T, K_POW2=next_power_of_2(K), E_POW2=E_POW2)
    scores = _make_score_constants(score_function, score_order == "post", normalize)
    launch(route_bwd_kernel, cdiv(T, BLOCK_T), *tensors, T, scale, **sizes, **scores)
    return dlogits_TE


backward = Op("route_bwd", _route_bwd, lambda x_TE, *_: x_TE.new_empty(x_TE.shape))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save logits, ids and options for backward; mark the ids as not differentiable."""
    ctx.save_for_backward(inputs[0], output[0])
    ctx.others = inputs[3:7]
    ctx.mark_non_differentiable(output[0])
    ctx.set_materialize_grads(False)  # the ids would get zeros of their size


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the logits' gradient, from the last of `grads`, and None for nine other inputs."""
    dlogits_TE = None
    if ctx.needs_input_grad[0] and grads[-1] is not None:
        dlogits_TE = backward(*ctx.saved_tensors, grads[-1], *ctx.others)
    return (dlogits_TE, *(None,) * 9)


_route_op = Op(
    "route",
    run_route_kernel,
    _make_empty_choice,
    setup_context=_setup_context,
    backward=_backward,
    schema=f"(Tensor logits_TE, Tensor? bias_E, {_OPTIONS}) -> (Tensor, Tensor)",
)


def check_route_options(num_experts: int, options: RouteOptions) -> None:
    """Raise a ValueError if top_k, groups or other options do not match `num_experts`."""
    E = num_experts
    allowed = options.top_groups * (E // options.num_groups)
    if E % options.num_groups or not 1 <= options.top_k <= allowed:
        raise ValueError(
            f"logits_TE of {E} experts must split into num_groups ({options.num_groups}), of which "
            f"top_groups ({options.top_groups}) hold top_k ({options.top_k}): change the options"
        )
    size = E // options.num_groups
    if options.top_groups < options.num_groups and options.group_experts > size:
        raise ValueError(
            f"RouteOptions.group_experts ({options.group_experts}) must be <= the experts of a "
            f"group ({size}): lower group_experts or num_groups"
        )


def route(logits_TE: Tensor, bias_E: Tensor | None, options: RouteOptions) -> tuple[Tensor, Tensor]:
    """Return the chosen experts and the weights of their outputs.

    Groups of experts, and then experts, are chosen by the greatest selection score, and by the
    lowest id if scores are equal. A NaN counts as greater than every number: ids stay distinct and
    in range, and a token with a NaN logit has a NaN weight. No host sync; bit-identical between
    runs. Scores of the kernel and of `route_ref` may differ in their last bits, so they may choose
    different experts if scores are nearly equal.

    Args:
        logits_TE: any float dtype, computed in fp32; fp64 is computed in plain PyTorch.
        bias_E: fp32, added to the selection scores, which are scores or logits (`score_order` "pre"
            or "post"), and not to the weights; no gradient. None = no bias.

    Returns:
        Expert ids [T, K] int32, best first, and weights [T, K] fp32, differentiable in the logits.
    """
    E = logits_TE.shape[1]
    check_route_options(E, options)
    is_small = logits_TE.dtype != torch.float64 and E <= MAX_EXPERTS
    if not (is_small and can_use_kernel(logits_TE)):
        warn_on_fallback(logits_TE, f"routing to {E} experts in {logits_TE.dtype}")
        ids_TK, weights_TK = route_ref(logits_TE, bias_E, options)
        return ids_TK, weights_TK.float()
    return _route_op(logits_TE.float(), bias_E, *flatten_options(options))


def route_weights_ref(logits_TE: Tensor, ids_TK: Tensor, options: RouteOptions) -> Tensor:
    """Compute `route_weights` in plain PyTorch, in fp32, or in fp64 for fp64 logits."""
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    is_choice_TK = ids_TK >= 0
    ids_TK = ids_TK.long().clamp(min=0)
    if options.is_softmax_after_choice:
        logits_TK = logits_TE.gather(1, ids_TK)
        # The softmax of a row without a choice would be NaN.
        out_TK = ~is_choice_TK & is_choice_TK.any(-1, keepdim=True)
        weights_TK = logits_TK.masked_fill(out_TK, -torch.inf).softmax(-1)
        weights_TK = torch.where(is_choice_TK, weights_TK, 0)
    else:
        scores_TE = compute_scores_ref(logits_TE, options.score_function)
        weights_TK = torch.where(is_choice_TK, scores_TE.gather(1, ids_TK), 0)
        if options.normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK * options.scale


def _route_weights(logits_TE: Tensor, ids_TK: Tensor, *flat_options: Any) -> Tensor:
    """Return the weights of given expert ids by the kernel, without autograd."""
    return _launch_route(logits_TE, None, ids_TK, _unflatten_options(flat_options))[1]


_route_weights_op = Op(
    "route_weights",
    _route_weights,
    lambda logits_TE, ids_TK, *_: logits_TE.new_empty(ids_TK.shape),
    setup_context=make_setup_context(slice(2), slice(3, 7)),
    backward=_backward,
    schema=f"(Tensor logits_TE, Tensor ids_TK, {_OPTIONS}) -> Tensor",
)


def route_weights(logits_TE: Tensor, ids_TK: Tensor, options: RouteOptions) -> Tensor:
    """Return the weights [T, K] of given expert ids, bit-equal to `route`'s for ids from `route`.

    fp32, differentiable in the logits; no host sync. Ids are int32, distinct in a row; -1 = none.
    Options that only affect the choice of experts are not read, except the numbers of groups.
    """
    is_small = logits_TE.dtype != torch.float64 and logits_TE.shape[1] <= MAX_EXPERTS
    if not (is_small and can_use_kernel(logits_TE)):
        operation = f"routing weights of {logits_TE.shape[1]} experts in {logits_TE.dtype}"
        warn_on_fallback(logits_TE, operation)
        return route_weights_ref(logits_TE, ids_TK, options).float()
    return _route_weights_op(logits_TE.float(), ids_TK, *flatten_options(options))
