"""Which experts each token goes to, and with which weight: scores, top-k choice, weights.

Letters: T tokens, E experts, K experts per token, G expert groups of S experts.

Budget: forward reads the logits once, 4TE bytes, and writes 8TK; backward reads 4TE + 8TK and
writes 4TE (scores of each logit and "post" read only K logits of a row). Neither is bound by
memory: a choice is an argmax over E in registers, about 6 integer instructions per logit and
choice.

Note [order]. A row is ranked by (selection score, greatest first; then id, lowest first). The
kernel compares int32 keys that sort like the floats, so that equal floats tie exactly: -0.0 is
0.0, every NaN is one value above infinity, and -2**31, which no float has, marks what may not be
chosen. A choice is then two integer reductions, the greatest key and the lowest column that has
it; a warp reduces 32-bit integers in one instruction each.

Note [columns]. With groups, a row is laid out as G blocks of a power of two columns, so that it
reshapes to [groups, experts of a group] whatever E is. Columns keep the order of the ids.

Note [one warp]. A program is one warp that holds a tile of whole rows: a row never spans two
warps, so that a reduction needs no shared memory and no barrier.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moecore.kernels.common import (
    cdiv,
    next_power_of_2,
    on_device,
    tl,
    triton,
    use_kernel,
    warn_plain,
)
from moecore.kernels.ops import Op
from moecore.kernels.routing.scores import (
    check_score_function,
    exp,
    row_scores,
    row_sums,
    score,
    scores_ref,
)

SCORE_ORDERS = ("pre", "post")
FWD_TILE, BWD_TILE = 1024, 512  # logits of one program: 32 and 16 registers per thread
MAX_TOKENS = 64  # of one program, where E is small
MAX_EXPERTS = 1024  # of a row, which one warp holds; more use the references


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteOptions:
    """How logits become a choice and weights.

    Attributes:
        top_k: experts per token K.
        score_function: "softmax" over the experts; "sigmoid" or "sqrtsoftplus",
            sqrt(log(1 + exp(x))), of each logit, with "pre" only.
        score_order: "pre" scores all experts and keeps the scores of the chosen; "post" ranks the
            logits, and its weights are a softmax over the K chosen logits.
        normalize: divide the K weights of a token by their sum (+ 1e-20); "pre" only.
        scale: factor on the weights.
        num_groups: experts are split into this many equal groups.
        top_groups: groups that a token may choose from, ranked by the sum of their
            `group_experts` best selection scores.
        group_experts: at most the experts of a group. 2 is DeepSeek-V3's rule, 1 DeepSeek-V2's,
            top_k / top_groups Megatron-Core's.
        balanced: deal the experts out in turn, whatever the scores: all once before one comes
            again (see `dealt_ids`); weights still come from the scores.

    Raises:
        ValueError: for an unknown score function or order, two that do not go together, or
            group_experts < 1.
    """

    top_k: int
    score_function: str
    score_order: str
    normalize: bool
    scale: float
    num_groups: int
    top_groups: int
    group_experts: int = 2
    balanced: bool = False

    def __post_init__(self) -> None:
        check_score_function("RouteOptions.score_function", self.score_function)
        if self.score_order not in SCORE_ORDERS:
            shown = ", ".join(repr(order) for order in SCORE_ORDERS)
            raise ValueError(
                f"RouteOptions.score_order ({self.score_order!r}) must be one of {shown}"
            )
        if self.score_order == "post" and self.score_function != "softmax":
            raise ValueError(
                "RouteOptions.score_order ('post') must be 'pre' with score_function "
                f"({self.score_function!r}): use score_order='pre'"
            )
        if self.group_experts < 1:
            raise ValueError(
                f"RouteOptions.group_experts ({self.group_experts}) must be >= 1: use 2 for "
                "DeepSeek-V3's rule"
            )


def route_ref(
    logits_TE: Tensor, bias_E: Tensor | None, options: RouteOptions
) -> tuple[Tensor, Tensor]:
    """Return what `route` returns, in plain PyTorch; weights in the dtype of fp32 or fp64 logits.

    Example, E=4, two groups, top_groups=1, K=2: scores [.1 .6 .5 .4] have group sums .7 and .9,
    so the ids are [2, 3] although expert 1 has the best score.
    """
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    if options.score_order == "post":
        ids_TK = _select(logits_TE.detach(), bias_E, options)
        weights_TK = logits_TE.gather(1, ids_TK).softmax(-1)
    else:
        scores_TE = scores_ref(logits_TE, options.score_function)
        ids_TK = _select(scores_TE.detach(), bias_E, options)
        weights_TK = scores_TE.gather(1, ids_TK)
        if options.normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return ids_TK.to(torch.int32), weights_TK * options.scale


def dealt_ids(num_tokens: int, num_experts: int, top_k: int, device: torch.device) -> Tensor:
    """Return the balanced choices, int64 [T, K]: the j-th choice of all is `j * step % E`.

    Neighbours would live on one rank, and the token would travel to one rank where a learned
    choice goes to several; see `deal_step`.

    Example, E=8, K=2, step 3: [0, 3], [6, 1], [4, 7], [2, 5], and again.
    """
    order = torch.arange(num_tokens * top_k, device=device)
    step = deal_step(num_experts, top_k)
    return (order % num_experts * step % num_experts).view(num_tokens, top_k)


def deal_step(num_experts: int, top_k: int) -> int:
    """Return the first number from 2E / 3K on that has no divisor in common with E.

    A token's experts then span two thirds of all, so it goes to about as many ranks as one with
    random choices: E=128, K=8, 8 ranks: 5.5 and 5.3; 4 ranks: 3.4 and 3.6.
    """
    step = max(1, 2 * num_experts // (3 * top_k))
    while math.gcd(step, num_experts) > 1:
        step += 1
    return step


def _select(ranked_TE: Tensor, bias_E: Tensor | None, options: RouteOptions) -> Tensor:
    """Return the ids [T, K] int64, best first; stable sorts keep lower ids first among equals."""
    (T, E), K = ranked_TE.shape, options.top_k
    if options.balanced:
        return dealt_ids(T, E, K, ranked_TE.device)
    if bias_E is not None:
        ranked_TE = ranked_TE + bias_E
    order_TE = _best_first(ranked_TE)
    if options.top_groups < options.num_groups:
        ranked_TGS = ranked_TE.view(T, options.num_groups, E // options.num_groups)
        # Added best first, as the kernel does: equal bits tie in both.
        best, *others = ranked_TGS.topk(options.group_experts, dim=-1).values.unbind(-1)
        groups_TG = _best_first(sum(others, start=best))
        excluded_TG = torch.ones_like(groups_TG, dtype=torch.uint8)
        excluded_TG.scatter_(1, groups_TG[:, : options.top_groups], 0)
        excluded_TE = excluded_TG[..., None].expand_as(ranked_TGS).reshape(T, E)
        # Excluded experts go last whatever their scores: an allowed one may be at -inf.
        order_TE = order_TE.gather(1, excluded_TE.gather(1, order_TE).sort(stable=True).indices)
    return order_TE[:, :K]


def _best_first(x: Tensor) -> Tensor:
    # PyTorch's sort on CUDA may place a NaN below -inf when its sign bit is set.
    x = x.masked_fill(x.isnan(), torch.nan)
    return x.sort(dim=-1, descending=True, stable=True).indices


@triton.jit
def _key(x):
    """Return int32 keys that sort like fp32 x: see Note [order]."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _float(key):
    """Return the fp32 value of a key; a NaN for the key of excluded columns."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(keys, columns):
    """Return [rows, 1], the column of each row's greatest key, the lowest among equals."""
    best = tl.max(keys, axis=1, keep_dims=True)
    return tl.min(tl.where(keys == best, columns, keys.shape[1] - 1), axis=1, keep_dims=True)


@triton.jit
def _softmax_of_chosen(picked, in_k):
    """Return the softmax over a row's chosen logits, 0 elsewhere and in a row without any."""
    exps = tl.where(in_k, picked, float("-inf"))
    exps = exp(picked - tl.max(exps, axis=1, keep_dims=True))
    exps = tl.where(in_k, exps, 0.0)
    total = row_sums(exps)
    return tl.div_rn(exps, tl.where(total == 0.0, 1.0, total))


@triton.jit
def _exclude_groups(
    keys,  # [BT, GP * SP] int32
    G: tl.constexpr,  # groups
    TOP_GROUPS: tl.constexpr,
    GROUP_EXPERTS: tl.constexpr,
    BT: tl.constexpr,
    GP: tl.constexpr,  # powers of two
    SP: tl.constexpr,
):
    """Return the keys with every expert excluded that is not in one of the best groups."""
    keys = tl.reshape(keys, [BT, GP, SP])
    columns = tl.arange(0, SP)[None, None, :]
    rest, sums = keys, tl.zeros([BT, GP], dtype=tl.float32)
    for _ in tl.static_range(GROUP_EXPERTS):
        greatest = tl.max(rest, axis=2, keep_dims=True)
        sums += _float(tl.reshape(greatest, [BT, GP]))
        # One of them goes, so that equals count as often as they are there.
        column = tl.min(tl.where(rest == greatest, columns, SP - 1), axis=2, keep_dims=True)
        rest = tl.where(columns == column, -0x80000000, rest)
    groups = tl.arange(0, GP)[None, :]
    group_keys = tl.where(groups < G, _key(sums), -0x80000000)
    kept = tl.zeros([BT, GP], dtype=tl.int32)
    for _ in range(TOP_GROUPS):
        best = _best(group_keys, groups)
        kept = tl.where(groups == best, 1, kept)
        group_keys = tl.where(groups == best, -0x80000000, group_keys)
    keys = tl.where(kept[:, :, None] != 0, keys, -0x80000000)
    return tl.reshape(keys, [BT, GP * SP])


@triton.jit
def _choose(
    keys,  # [BT, GP * SP] int32
    K: tl.constexpr,
    S: tl.constexpr,  # experts of a group
    BT: tl.constexpr,
    KP: tl.constexpr,
    GP: tl.constexpr,
    SP: tl.constexpr,
):
    """Return int32 [BT, KP], the experts of the K greatest keys; 0 in the padding."""
    columns = tl.arange(0, GP * SP)[None, :]
    slots = tl.arange(0, KP)[None, :]
    chosen = tl.zeros([BT, KP], dtype=tl.int32)
    for k in range(K):
        best = _best(keys, columns)
        chosen = tl.where(slots == k, best, chosen)
        keys = tl.where(columns == best, -0x80000000, keys)
    if GP > 1:
        chosen = (chosen // SP) * S + chosen % SP
    return chosen


@partial(triton.jit, do_not_specialize=["num_tokens"])
def _route_fwd_kernel(
    logits,  # [T, E] fp32
    bias,  # [E] fp32, or None
    ids,  # [T, K] int32; out, unless GIVEN: then read, -1 = no choice
    weights,  # out, [T, K] fp32
    num_tokens,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,  # 1 where no group is excluded
    TOP_GROUPS: tl.constexpr,
    GROUP_EXPERTS: tl.constexpr,
    FUNCTION: tl.constexpr,
    POST: tl.constexpr,
    NORMALIZE: tl.constexpr,
    DEAL_STEP: tl.constexpr,  # of balanced choices; 0 = chosen by rank
    GIVEN: tl.constexpr,
    BT: tl.constexpr,
    KP: tl.constexpr,
    GP: tl.constexpr,
    SP: tl.constexpr,
):
    """Route BT tokens: see Note [order], [columns] and [one warp]."""
    S: tl.constexpr = E // G
    rows = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)[:, None]
    slots = tl.arange(0, KP)[None, :]
    here = rows < num_tokens
    columns = tl.arange(0, GP * SP)[None, :]
    experts = columns
    real = columns < E
    if GP > 1:
        experts = (columns // SP) * S + columns % SP
        real = (columns % SP < S) & (columns < G * SP)
    x = tl.load(logits + rows * E + experts, mask=here & real, other=0.0)
    x = tl.where(real, x, float("-inf"))
    if POST:
        ranked = x
    else:
        ranked, top, factor = row_scores(x, FUNCTION)
    in_k = here & (slots < K)
    if GIVEN:
        chosen = tl.load(ids + rows * K + slots, mask=in_k, other=-1)
        in_k = in_k & (chosen >= 0)
    elif DEAL_STEP:
        chosen = ((rows * K + slots) % E * DEAL_STEP % E).to(tl.int32)
    else:
        if bias is not None:
            ranked += tl.load(bias + experts, mask=real, other=0.0)
        keys = tl.where(real, _key(ranked), -0x80000000)
        if G > 1:
            keys = _exclude_groups(keys, G, TOP_GROUPS, GROUP_EXPERTS, BT, GP, SP)
        chosen = _choose(keys, K, S, BT, KP, GP, SP)
    # The chosen logits are read again, from cache: cheaper than a reduction per choice.
    picked = tl.load(logits + rows * E + chosen, mask=in_k, other=0.0)
    if POST:
        w = _softmax_of_chosen(picked, in_k)
    else:
        w, _ = score(picked, top, factor, FUNCTION)
        w = tl.where(in_k, w, 0.0)
        if NORMALIZE:
            w = tl.div_rn(w, row_sums(w) + 1e-20)
    if not GIVEN:
        tl.store(ids + rows * K + slots, chosen, mask=in_k)
    tl.store(weights + rows * K + slots, w * scale, mask=here & (slots < K))


@partial(triton.jit, do_not_specialize=["num_tokens"])
def _route_bwd_kernel(
    logits,  # [T, E] fp32
    ids,  # [T, K] int32, -1 = no choice
    dweights,  # [T, K] fp32
    dlogits,  # out, [T, E] fp32
    num_tokens,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    FUNCTION: tl.constexpr,
    POST: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BT: tl.constexpr,
    KP: tl.constexpr,
    EP: tl.constexpr,
):
    """Write BT rows of dlogits: a background in all columns, then the K chosen ones over it."""
    rows = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)[:, None]
    slots = tl.arange(0, KP)[None, :]
    columns = tl.arange(0, EP)[None, :]
    here = rows < num_tokens
    in_k = here & (slots < K)
    chosen = tl.load(ids + rows * K + slots, mask=in_k, other=-1)
    in_k = in_k & (chosen >= 0)
    dw = tl.load(dweights + rows * K + slots, mask=in_k, other=0.0) * scale
    picked = tl.load(logits + rows * E + chosen, mask=in_k, other=0.0)
    background = tl.zeros([BT, EP], dtype=tl.float32)
    if POST:
        p = _softmax_of_chosen(picked, in_k)
        dpicked = p * (dw - tl.sum(p * dw, axis=1, keep_dims=True))
    else:
        x = background
        if FUNCTION == "softmax":  # the other scores need nothing of the other experts
            x = tl.load(logits + rows * E + columns, mask=here & (columns < E), other=0.0)
            x = tl.where(columns < E, x, float("-inf"))
        scores, top, factor = row_scores(x, FUNCTION)
        s, slope = score(picked, top, factor, FUNCTION)
        s = tl.where(in_k, s, 0.0)
        if NORMALIZE:
            norm = tl.div_rn(1.0, tl.sum(s, axis=1, keep_dims=True) + 1e-20)
            dw = (dw - tl.sum(dw * s, axis=1, keep_dims=True) * norm) * norm
        if FUNCTION != "softmax":
            dpicked = dw * slope
        else:
            inner = tl.sum(dw * s, axis=1, keep_dims=True)
            dpicked = s * (dw - inner)
            background = -inner * scores
    tl.store(dlogits + rows * E + columns, background, mask=here & (columns < E))
    tl.debug_barrier()  # the chosen columns are written twice, by different threads: in this order
    tl.store(dlogits + rows * E + chosen, dpicked, mask=in_k)


def _tokens_per_program(tile: int, num_columns: int) -> int:
    return max(1, min(MAX_TOKENS, tile // num_columns))


def _route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    score_function: str,
    score_order: str,
    normalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
    group_experts: int,
    balanced: bool,
) -> tuple[Tensor, Tensor]:
    logits_TE = logits_TE.contiguous()
    T = logits_TE.shape[0]
    ids_TK = logits_TE.new_empty((T, top_k), dtype=torch.int32)
    weights_TK = logits_TE.new_empty((T, top_k))
    bias_E = None if bias_E is None else bias_E.float().contiguous()
    options = RouteOptions(
        top_k=top_k,
        score_function=score_function,
        score_order=score_order,
        normalize=normalize,
        scale=scale,
        num_groups=num_groups,
        top_groups=top_groups,
        group_experts=group_experts,
        balanced=balanced,
    )
    launch_forward(logits_TE, bias_E, ids_TK, weights_TK, options, given=False)
    return ids_TK, weights_TK


def launch_forward(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    ids_TK: Tensor,
    weights_TK: Tensor,
    options: RouteOptions,
    *,
    given: bool,
) -> None:
    """Fill weights_TK, and ids_TK unless they are given; all contiguous."""
    (T, E), K = logits_TE.shape, ids_TK.shape[1]
    if T == 0:
        return
    G = options.num_groups if options.top_groups < options.num_groups else 1
    GP, SP, KP = (next_power_of_2(n) for n in (G, E // G, K))
    BT = _tokens_per_program(FWD_TILE, max(GP * SP, KP))
    with on_device(logits_TE):
        _route_fwd_kernel[(cdiv(T, BT),)](
            logits_TE,
            bias_E,
            ids_TK,
            weights_TK,
            T,
            options.scale,
            E=E,
            K=K,
            G=G,
            TOP_GROUPS=options.top_groups,
            GROUP_EXPERTS=options.group_experts,
            FUNCTION=options.score_function,
            POST=options.score_order == "post",
            NORMALIZE=options.normalize,
            DEAL_STEP=deal_step(E, K) if options.balanced else 0,
            GIVEN=given,
            BT=BT,
            KP=KP,
            GP=GP,
            SP=SP,
            num_warps=1,
            enable_fp_fusion=False,  # Note [same bits] of scores.py
        )


def _route_fake(
    logits_TE: Tensor, bias_E: Tensor | None, top_k: int, *rest: Any
) -> tuple[Tensor, Tensor]:
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
    logits_TE, dweights_TK = logits_TE.contiguous(), dweights_TK.contiguous()
    (T, E), K = logits_TE.shape, ids_TK.shape[1]
    dlogits_TE = torch.empty_like(logits_TE)
    if T == 0:
        return dlogits_TE
    EP = next_power_of_2(E)
    BT = _tokens_per_program(BWD_TILE, EP)
    with on_device(logits_TE):
        _route_bwd_kernel[(cdiv(T, BT),)](
            logits_TE,
            ids_TK,
            dweights_TK,
            dlogits_TE,
            T,
            scale,
            E=E,
            K=K,
            FUNCTION=score_function,
            POST=score_order == "post",
            NORMALIZE=normalize,
            BT=BT,
            KP=next_power_of_2(K),
            EP=EP,
            num_warps=1,
            enable_fp_fusion=False,  # Note [same bits] of scores.py
        )
    return dlogits_TE


def _route_bwd_fake(logits_TE: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(logits_TE, memory_format=torch.contiguous_format)


# dlogits of `route` and `route_weights`; an id of -1 is no choice.
route_backward = Op("route_bwd", _route_bwd, _route_bwd_fake)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits_TE, _, _, score_function, score_order, normalize, scale, *_ = inputs
    ctx.save_for_backward(logits_TE, output[0])
    ctx.options = (score_function, score_order, normalize, scale)
    ctx.mark_non_differentiable(output[0])
    ctx.set_materialize_grads(False)  # the ids would get zeros of their size


def _backward(ctx: Any, _: Tensor | None, dweights_TK: Tensor | None) -> tuple[Tensor | None, ...]:
    dlogits_TE = None
    if ctx.needs_input_grad[0] and dweights_TK is not None:
        dlogits_TE = route_backward(*ctx.saved_tensors, dweights_TK, *ctx.options)
    return (dlogits_TE, *(None,) * 10)


_route_op = Op("route", _route, _route_fake, setup_context=_setup_context, backward=_backward)


def route(logits_TE: Tensor, bias_E: Tensor | None, options: RouteOptions) -> tuple[Tensor, Tensor]:
    """Return the chosen experts and the weights of their outputs.

    The choice is by (selection score, best first; then id, lowest first), groups likewise. A NaN
    selection score counts as greater than every number, so ids stay distinct and in range, and a
    token with a NaN logit shows it in its weights. No host sync; bit-identical between runs.

    Scores of the kernel may differ from those of `route_ref` in their last bits, so experts that
    nearly tie may change places between the two.

    Args:
        logits_TE: [T, E], fp32 or fp64 (others are widened to fp32). fp64 takes the plain PyTorch
            path on every device.
        bias_E: [E] fp32, added to the selection scores ("pre": to the scores, "post": to the
            logits) and not to the weights; no gradient. None = none.
        options: scores, groups and weights.

    Returns:
        Expert ids [T, K] int32, best first, and weights [T, K] fp32, differentiable in the logits.

    Raises:
        ValueError: when E experts do not suffice for the groups and choices of `options`.
    """
    E = logits_TE.shape[1]
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
    is_small = logits_TE.dtype != torch.float64 and E <= MAX_EXPERTS
    if not (is_small and use_kernel(logits_TE)):
        warn_plain(logits_TE, f"routing to {E} experts in {logits_TE.dtype}")
        ids_TK, weights_TK = route_ref(logits_TE, bias_E, options)
        return ids_TK, weights_TK.float()
    return _route_op(
        logits_TE.float(),
        bias_E,
        options.top_k,
        options.score_function,
        options.score_order,
        options.normalize,
        options.scale,
        options.num_groups,
        options.top_groups,
        options.group_experts,
        options.balanced,
    )
