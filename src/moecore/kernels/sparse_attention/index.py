"""The indexer of sparse attention: scores, the selection of keys, and the divergence.

    I[c, s] = sum over h of w[c, h] * relu(q[c, h] . k[s]), in fp32; -inf where c does not see s

The kernel of `compute_span_scores` sums over heads in registers and writes only [C, S] numbers. It
reads its keys once, and the queries of all heads from the L2 cache. It computes 2 C S h i FLOPs.
Tiles outside all spans are filled without a product. Plain PyTorch writes and reads C S h numbers.
The kernel of `select_keys` finds the smallest selected score by 8 bits at a time: it reads a row
five times and writes only its keys.

With FP8 scores, q and k are the rotated and quantised rows of `index_fp8.py`. A query's scale is a
factor of its w, and a key's scale is a factor of the sum over heads.

Legend: C queries of a chunk, S keys of a span, N keys, K keys that a query reads, h heads, i dims.
"""

import torch
from torch import Tensor

from moecore.kernels.common import (
    can_multiply_fp8,
    can_use_kernel,
    cdiv,
    launch,
    next_power_of_2,
)
from moecore.kernels.sparse_attention.contract import IndexerHeads
from moecore.kernels.sparse_attention.index_fp8 import (
    multiply_tiles,
    quantise_rotated,
    round_rotated,
)
from moecore.kernels.sparse_attention.keys import Keys, SpanOfKeys
from moecore.kernels.triton_api import INTERPRET, tl, triton

DIMS = (16, 32, 64, 128)  # of a head: one step of a product
FP8_DIMS = DIMS[1:]
SCORES = 2**27  # numbers of the scores that `select_in_spans` computes at once: 512 MiB
SELECTING = 4  # numbers that `select_keys` allocates per query and key without its kernel


def compute_index_scores(indexer: IndexerHeads, keys: Keys) -> Tensor:
    """Return indexer scores [queries, keys], at least fp32; -inf if a query may not see a key."""
    dots_ChK = keys.compute_dot_products(indexer.q_thi, keys.select_rows(indexer.k_Ni)).relu_()
    scores_CK = torch.einsum("chk,ch->ck", dots_ChK, indexer.w_th.to(dots_ChK.dtype))
    return scores_CK.masked_fill_(~keys.seen_CK, -torch.inf)


def select_keys(scores_CS: Tensor, first_key: int, top_k: int) -> Tensor:
    """Return the keys with the top_k largest scores, int32 [C, top_k], ascending; -1 fills the end.

    Column 0 of scores is key `first_key`. Among equal scores the earlier keys are selected, for any
    chunk size. `Tensor.topk` does not define this order, and scores of 0 are frequent.

    Example: scores [2, 0, 0, 3, 0], first_key 10 and top_k 3 give [10, 11, 13].
    """
    C, S = scores_CS.shape
    if scores_CS.dtype == torch.float32 and can_use_kernel(scores_CS):
        out = torch.empty(C, top_k, dtype=torch.int32, device=scores_CS.device)
        block = min(4096, max(256, next_power_of_2(S)))
        args = scores_CS.contiguous(), out, S, first_key, top_k
        launch(_select_keys_kernel, C, *args, BLOCK=block, num_warps=8)
        return out
    is_choice_CS = scores_CS > -torch.inf
    if top_k < S:
        cutoff_C1 = scores_CS.topk(top_k, sorted=False).values.amin(-1, keepdim=True)
        above_CS = scores_CS > cutoff_C1
        equal_CS = (scores_CS == cutoff_C1) & is_choice_CS
        remaining_C1 = top_k - above_CS.sum(-1, keepdim=True)
        is_choice_CS = above_CS | (equal_CS & (equal_CS.cumsum(-1) <= remaining_C1))
    places_CS = (is_choice_CS.cumsum(-1) - 1).masked_fill_(~is_choice_CS, top_k)
    keys_CS = torch.arange(first_key, first_key + S, dtype=torch.int32, device=scores_CS.device)
    out = keys_CS.new_full((C, top_k + 1), -1)  # the last column receives all other keys
    return out.scatter_(1, places_CS, keys_CS.expand(C, S))[:, :top_k]


def select_in_spans(indexer: IndexerHeads, first_t: Tensor, last_t: Tensor, top_k: int) -> Tensor:
    """Return for each query the `top_k` best keys of its span, int32 [t, top_k], as `select_keys`.

    Spans, from `first_t` to `last_t` (int64, both included), may be empty. No host sync.
    """
    t, N = len(first_t), len(indexer.k_Ni)
    size = max(1, SCORES // (N * count_workspace_floats(indexer)))
    selected = torch.empty(t, top_k, dtype=torch.int32, device=first_t.device)
    for begin in range(0, t, size):
        part = slice(begin, begin + size)
        of_part = indexer._replace(q_thi=indexer.q_thi[part], w_th=indexer.w_th[part])
        span = SpanOfKeys(0, N, first_t[part], last_t[part])
        selected[part] = select_keys(compute_span_scores(of_part, span), 0, top_k)
    return selected


def compute_divergence(p_CK: Tensor, scores_CK: Tensor) -> Tensor:
    """Return each query's KL divergence of p from softmax(scores); p is 0 where scores are -inf."""
    log_q_CK = scores_CK.log_softmax(-1).masked_fill(p_CK == 0, 0)
    return (torch.xlogy(p_CK, p_CK) - p_CK * log_q_CK).sum(-1)


def differentiate_divergence(
    dkl_C: Tensor, p_CK: Tensor, indexer: IndexerHeads, keys: Keys, dk_Ni: Tensor
) -> tuple[Tensor, Tensor]:
    """Return gradients of the indexer's queries and weights; add the keys' gradient to `dk_Ni`.

    `p_CK` has attention probabilities averaged over heads, `dkl_C` gradients of divergences.
    """
    rows = keys.select_rows(indexer.k_Ni)
    dots_ChK = keys.compute_dot_products(indexer.q_thi, rows)
    w_Ch = indexer.w_th.to(dots_ChK.dtype)
    scores_CK = torch.einsum("chk,ch->ck", dots_ChK.relu(), w_Ch)
    q_CK = scores_CK.masked_fill_(~keys.seen_CK, -torch.inf).softmax(-1)
    dscores_CK = (q_CK - p_CK) * dkl_C[:, None]
    dw_Ch = torch.einsum("chk,ck->ch", dots_ChK.relu(), dscores_CK)
    ddots_ChK = (dscores_CK[:, None] * w_Ch[..., None]).masked_fill_(dots_ChK <= 0, 0)
    ddots_ChK = ddots_ChK.to(rows.dtype)
    keys.add_outer_products(dk_Ni, (ddots_ChK, indexer.q_thi))
    return keys.sum_weighted_rows(ddots_ChK, rows), dw_Ch


def count_workspace_floats(indexer: IndexerHeads) -> int:
    """Return the workspace of the indexer's scores and top-k: fp32 numbers per query and key."""
    return 1 if _has_index_kernel(indexer) else max(SELECTING, indexer.q_thi.shape[1])


def _has_index_kernel(indexer: IndexerHeads) -> bool:
    """Whether `_index_scores_kernel` supports the dtype, head dim and device."""
    q = indexer.q_thi
    is_half = q.dtype in (torch.bfloat16, torch.float16) and indexer.k_Ni.dtype == q.dtype
    return is_half and q.shape[2] in DIMS and can_use_kernel(q)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "first_key"])
def _index_scores_kernel(
    q_ptr,  # [C, h, i]
    k_ptr,  # [S, i]
    w_ptr,  # [C, h] fp32
    k_scales_ptr,  # [S] fp32; None = 1
    first_ptr,  # [C] int64, the first key that a query sees, of all keys
    last_ptr,  # [C] int64, the last one
    scores_ptr,  # [C, S] fp32
    num_queries,
    num_keys,
    first_key,  # of the span, of all keys
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDEN: tl.constexpr,  # the interpreter cannot multiply 16 bits
    BC: tl.constexpr,
    BS: tl.constexpr,
):
    """Write indexer scores of BC queries and BS keys; -inf for keys that a query may not see."""
    rows = tl.program_id(0).to(tl.int64) * BC + tl.arange(0, BC)
    columns = tl.program_id(1).to(tl.int64) * BS + tl.arange(0, BS)
    dims = tl.arange(0, DIM)
    row_mask = rows < num_queries
    last_key = first_key + num_keys - 1
    # There are less than 2^31 keys, and comparisons of 64 bits would spill registers.
    first = tl.load(first_ptr + rows, mask=row_mask, other=last_key + 1).to(tl.int32)
    last = tl.load(last_ptr + rows, mask=row_mask, other=-1).to(tl.int32)
    keys = (first_key + columns).to(tl.int32)
    total = tl.zeros([BC, BS], dtype=tl.float32)
    if (tl.max(last, 0) >= tl.min(keys, 0)) & (tl.min(first, 0) <= tl.max(keys, 0)):
        k = tl.load(
            k_ptr + columns[None, :] * DIM + dims[:, None],
            mask=(columns < num_keys)[None, :],
            other=0.0,
        )
        for head in range(HEADS):
            of_head = rows * HEADS + head
            q = tl.load(
                q_ptr + of_head[:, None] * DIM + dims[None, :], mask=row_mask[:, None], other=0.0
            )
            w = tl.load(w_ptr + of_head, mask=row_mask, other=0.0)
            total += tl.maximum(multiply_tiles(q, k, WIDEN), 0.0) * w[:, None]
        if k_scales_ptr is not None:
            scales = tl.load(k_scales_ptr + columns, mask=columns < num_keys, other=0.0)
            total *= scales[None, :]
    seen = (keys[None, :] >= first[:, None]) & (keys[None, :] <= last[:, None])
    tl.store(
        scores_ptr + rows[:, None] * num_keys + columns[None, :],
        tl.where(seen, total, float("-inf")),
        mask=row_mask[:, None] & (columns < num_keys)[None, :],
    )


@triton.jit
def _load_ordered(row_ptr, columns, S):
    """Return scores as unsigned integers of the same order, and whether the query sees the key."""
    scores = tl.load(row_ptr + columns, mask=columns < S, other=float("-inf"))
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 equals 0
    ordered = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    return ordered, scores > float("-inf")


@triton.jit(do_not_specialize=["S", "first_key"])
def _select_keys_kernel(
    scores_ptr,  # [C, S] fp32
    out_ptr,  # [C, top_k] int32
    S,
    first_key,
    top_k,
    BLOCK: tl.constexpr,
):
    """Write the keys with the top_k largest scores of one row: a radix search of the cutoff."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr, out_row = scores_ptr + row * S, out_ptr + row * top_k
    block, bins = tl.arange(0, BLOCK), tl.arange(0, 256)
    cutoff = tl.full([], 0, dtype=tl.uint32)  # its leading digits, of 8 bits each
    remaining = tl.full([], 0, dtype=tl.int32) + top_k  # keys to select among equal digits
    for step in tl.static_range(4):
        counts = tl.zeros([256], dtype=tl.int32)
        for begin in range(0, S, BLOCK):
            ordered, is_choice = _load_ordered(row_ptr, begin + block, S)
            if step > 0:
                is_choice &= (ordered >> (32 - 8 * step)) == (cutoff >> (32 - 8 * step))
            digits = ((ordered >> (24 - 8 * step)) & 255).to(tl.int32)
            if step < 2 or tl.sum(is_choice.to(tl.int32), 0) > 0:  # cheaper than a histogram
                counts += tl.histogram(digits, 256, mask=is_choice)
        if step == 0:
            remaining = tl.minimum(remaining, tl.sum(counts, 0))
        suffix_sums = tl.cumsum(counts, 0, reverse=True)
        digit = tl.max(tl.where(suffix_sums >= remaining, bins, 0), 0)
        remaining -= tl.sum(tl.where(bins > digit, counts, 0), 0)
        cutoff |= digit.to(tl.uint32) << (24 - 8 * step)
    num_selected = tl.full([], 0, dtype=tl.int32)
    for begin in range(0, S, BLOCK):
        ordered, is_choice = _load_ordered(row_ptr, begin + block, S)
        is_equal = (is_choice & (ordered == cutoff)).to(tl.int32)
        is_first = (is_equal > 0) & (tl.cumsum(is_equal, 0) <= remaining)
        selected = (is_choice & (ordered > cutoff)) | is_first
        places = num_selected + tl.cumsum(selected.to(tl.int32), 0) - 1
        keys = (first_key + begin + block).to(tl.int32)
        tl.store(out_row + places, keys, mask=selected)
        num_selected += tl.sum(selected.to(tl.int32), 0)
        remaining -= tl.sum(is_first.to(tl.int32), 0)
    for begin in range(0, top_k, BLOCK):
        places = begin + block
        tl.store(out_row + places, -1, mask=(places >= num_selected) & (places < top_k))


def compute_span_scores(indexer: IndexerHeads, span: SpanOfKeys, *, fp8: bool = False) -> Tensor:
    """Return indexer scores [queries, keys] of a key range; -inf if not visible. No host sync.

    With `fp8`, queries and keys are rotated and rounded to FP8. GPUs without products in FP8
    multiply the rounded values in the indexer's dtype, which represents them exactly.
    """
    multiplies_fp8 = _has_index_kernel(indexer) and indexer.q_thi.shape[2] in FP8_DIMS
    multiplies_fp8 &= fp8 and can_multiply_fp8(indexer.q_thi.device)
    if fp8 and not multiplies_fp8:
        q, k = round_rotated(indexer.q_thi), round_rotated(indexer.k_Ni)
        indexer = indexer._replace(q_thi=q, k_Ni=k)
    if not _has_index_kernel(indexer):
        return compute_index_scores(indexer, span)
    q_Chi, k_Si = indexer.q_thi.contiguous(), span.select_rows(indexer.k_Ni).contiguous()
    w_Ch, k_scales_S = indexer.w_th.float().contiguous(), None
    if multiplies_fp8:
        (q_Chi, q_scales_Ch), (k_Si, k_scales_S) = quantise_rotated(q_Chi), quantise_rotated(k_Si)
        w_Ch = w_Ch * q_scales_Ch
    (C, h, i), S = q_Chi.shape, len(k_Si)
    scores_CS = w_Ch.new_empty(C, S)
    launch(
        _index_scores_kernel,
        (cdiv(C, 64), cdiv(S, 256)),
        *(q_Chi, k_Si, w_Ch, k_scales_S, span.first_C, span.last_C, scores_CS),
        *(C, S, span.first),
        HEADS=h,
        DIM=i,
        WIDEN=INTERPRET,
        BC=64,
        BS=256,
        num_warps=8,
        num_stages=3,
    )
    return scores_CS
