"""The kernels behind `route.py`.

Letters: T tokens, E experts, K experts per token, G expert groups of S experts; a program holds
BLOCK_T tokens, and P marks a size up to a power of two.
"""

from moecore.kernels.routing.scores import (
    compute_exp,
    compute_scores,
    compute_scores_of_rows,
    sum_rows,
)
from moecore.kernels.triton_api import tl, triton

# The kernel compares int32 keys that sort like the floats, so that equal floats tie exactly: -0.0
# is 0.0, every NaN is one value above infinity, and -2**31, which no float has, marks columns that
# may not be chosen. A choice is two integer reductions, the greatest key and the lowest column that
# has it; a warp reduces 32-bit integers in one instruction.


@triton.jit
def _encode_sort_key(x):
    """Return int32 keys that sort as fp32 x does. Equal floats have equal keys; NaN is greatest."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _decode_sort_key(key):
    """Return the fp32 value of a sort key; NaN for the key of excluded experts."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _find_greatest_key(keys, columns):
    """Return [rows, 1], the column of each row's greatest key, or the lowest such column."""
    best = tl.max(keys, axis=1, keep_dims=True)
    return tl.min(tl.where(keys == best, columns, keys.shape[1] - 1), axis=1, keep_dims=True)


@triton.jit
def _compute_choice_softmax(choice_logits, choice_mask):
    """Return the softmax of a row's logits where `choice_mask` is True, 0 elsewhere."""
    exps = tl.where(choice_mask, choice_logits, float("-inf"))
    exps = compute_exp(choice_logits - tl.max(exps, axis=1, keep_dims=True))
    exps = tl.where(choice_mask, exps, 0.0)
    total = sum_rows(exps)
    return tl.div_rn(exps, tl.where(total == 0.0, 1.0, total))


@triton.jit
def _exclude_groups(
    keys,  # [BLOCK_T, G_POW2 * S_POW2] int32
    G: tl.constexpr,  # groups
    TOP_GROUPS: tl.constexpr,
    GROUP_EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    G_POW2: tl.constexpr,  # powers of two
    S_POW2: tl.constexpr,
):
    """Return sort keys, with -2**31 for experts outside of a token's TOP_GROUPS best groups."""
    keys = tl.reshape(keys, [BLOCK_T, G_POW2, S_POW2])
    columns = tl.arange(0, S_POW2)[None, None, :]
    rest, sums = keys, tl.zeros([BLOCK_T, G_POW2], dtype=tl.float32)
    for _ in tl.static_range(GROUP_EXPERTS):
        greatest = tl.max(rest, axis=2, keep_dims=True)
        sums += _decode_sort_key(tl.reshape(greatest, [BLOCK_T, G_POW2]))
        # Remove one of the greatest, so that equal keys count separately.
        column = tl.min(tl.where(rest == greatest, columns, S_POW2 - 1), axis=2, keep_dims=True)
        rest = tl.where(columns == column, -0x80000000, rest)
    groups = tl.arange(0, G_POW2)[None, :]
    group_keys = tl.where(groups < G, _encode_sort_key(sums), -0x80000000)
    group_mask = tl.zeros([BLOCK_T, G_POW2], dtype=tl.int32)
    for _ in range(TOP_GROUPS):
        best = _find_greatest_key(group_keys, groups)
        group_mask = tl.where(groups == best, 1, group_mask)
        group_keys = tl.where(groups == best, -0x80000000, group_keys)
    keys = tl.where(group_mask[:, :, None] != 0, keys, -0x80000000)
    return tl.reshape(keys, [BLOCK_T, G_POW2 * S_POW2])


@triton.jit
def _choose_experts(
    keys,  # [BLOCK_T, G_POW2 * S_POW2] int32
    K: tl.constexpr,
    S: tl.constexpr,  # experts of a group
    BLOCK_T: tl.constexpr,
    K_POW2: tl.constexpr,
    G_POW2: tl.constexpr,
    S_POW2: tl.constexpr,
):
    """Return the experts with each token's K greatest keys, int32, padded with 0 to K_POW2."""
    columns = tl.arange(0, G_POW2 * S_POW2)[None, :]
    slots = tl.arange(0, K_POW2)[None, :]
    choices = tl.zeros([BLOCK_T, K_POW2], dtype=tl.int32)
    for k in range(K):
        best = _find_greatest_key(keys, columns)
        choices = tl.where(slots == k, best, choices)
        keys = tl.where(columns == best, -0x80000000, keys)
    if G_POW2 > 1:
        choices = (choices // S_POW2) * S + choices % S_POW2
    return choices


@triton.jit(do_not_specialize=["num_tokens"])
def route_fwd_kernel(
    logits,  # [T, E] fp32
    bias,  # [E] fp32, or None
    ids,  # [T, K] int32; out, unless HAS_IDS: then read, -1 = no choice
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
    HAS_IDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    K_POW2: tl.constexpr,
    G_POW2: tl.constexpr,
    S_POW2: tl.constexpr,
):
    """Write the ids and weights of BLOCK_T tokens; with HAS_IDS the ids are read, not chosen."""
    S: tl.constexpr = E // G
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    slots = tl.arange(0, K_POW2)[None, :]
    row_mask = rows < num_tokens
    columns = tl.arange(0, G_POW2 * S_POW2)[None, :]
    experts = columns
    real = columns < E
    # With groups, a row is laid out as G blocks of a power of two columns, so that it reshapes to
    # [groups, experts of a group] whatever E is. Columns keep the order of the ids.
    if G_POW2 > 1:
        experts = (columns // S_POW2) * S + columns % S_POW2
        real = (columns % S_POW2 < S) & (columns < G * S_POW2)
    x = tl.load(logits + rows * E + experts, mask=row_mask & real, other=0.0)
    x = tl.where(real, x, float("-inf"))
    if POST:
        ranked, top, factor = x, 0.0, 0.0  # scores of single logits, or a softmax of the chosen
    else:
        ranked, top, factor = compute_scores_of_rows(x, FUNCTION)
    in_k = row_mask & (slots < K)
    if HAS_IDS:
        choices = tl.load(ids + rows * K + slots, mask=in_k, other=-1)
        in_k = in_k & (choices >= 0)
    else:
        if bias is not None:
            ranked += tl.load(bias + experts, mask=real, other=0.0)
        keys = tl.where(real, _encode_sort_key(ranked), -0x80000000)
        if G > 1:
            keys = _exclude_groups(keys, G, TOP_GROUPS, GROUP_EXPERTS, BLOCK_T, G_POW2, S_POW2)
        choices = _choose_experts(keys, K, S, BLOCK_T, K_POW2, G_POW2, S_POW2)
    # The chosen logits are read again, from cache: cheaper than a reduction per choice.
    choice_logits = tl.load(logits + rows * E + choices, mask=in_k, other=0.0)
    if POST and FUNCTION == "softmax":
        w = _compute_choice_softmax(choice_logits, in_k)
    else:
        w, _ = compute_scores(choice_logits, top, factor, FUNCTION)
        w = tl.where(in_k, w, 0.0)
        if NORMALIZE:
            w = tl.div_rn(w, sum_rows(w) + 1e-20)
    if not HAS_IDS:
        tl.store(ids + rows * K + slots, choices, mask=in_k)
    tl.store(weights + rows * K + slots, w * scale, mask=row_mask & (slots < K))


@triton.jit(do_not_specialize=["num_tokens"])
def route_bwd_kernel(
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
    BLOCK_T: tl.constexpr,
    K_POW2: tl.constexpr,
    E_POW2: tl.constexpr,
):
    """Write the gradient of BLOCK_T tokens' logits from the gradient of their K weights."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    slots = tl.arange(0, K_POW2)[None, :]
    columns = tl.arange(0, E_POW2)[None, :]
    row_mask = rows < num_tokens
    in_k = row_mask & (slots < K)
    choices = tl.load(ids + rows * K + slots, mask=in_k, other=-1)
    in_k = in_k & (choices >= 0)
    dw = tl.load(dweights + rows * K + slots, mask=in_k, other=0.0) * scale
    choice_logits = tl.load(logits + rows * E + choices, mask=in_k, other=0.0)
    background = tl.zeros([BLOCK_T, E_POW2], dtype=tl.float32)
    if POST and FUNCTION == "softmax":
        p = _compute_choice_softmax(choice_logits, in_k)
        dpicked = p * (dw - tl.sum(p * dw, axis=1, keep_dims=True))
    else:
        x = background
        if FUNCTION == "softmax":  # the other scores need nothing of the other experts
            x = tl.load(logits + rows * E + columns, mask=row_mask & (columns < E), other=0.0)
            x = tl.where(columns < E, x, float("-inf"))
        scores, top, factor = compute_scores_of_rows(x, FUNCTION)
        s, slope = compute_scores(choice_logits, top, factor, FUNCTION)
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
    tl.store(dlogits + rows * E + columns, background, mask=row_mask & (columns < E))
    tl.debug_barrier()  # the chosen columns are written twice, by different threads: in this order
    tl.store(dlogits + rows * E + choices, dpicked, mask=in_k)
