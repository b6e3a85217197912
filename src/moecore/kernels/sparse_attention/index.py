"""The indexer of sparse attention: scores, the selection of keys, and the divergence.

    I[c, s] = sum over h of w[c, h] * relu(q[c, h] . k[s]), in fp32; -inf where c does not see s

The kernel of `compute_span_scores` sums over heads in registers and writes only [C, S] numbers. It
reads its keys once, and the queries of all heads from the L2 cache. It computes 2 C S h i FLOPs.
Tiles outside all spans are filled without a product. Plain PyTorch writes and reads C S h numbers.
The kernel of `select_keys` finds the smallest selected score by 8 bits at a time: it reads scores
five times and writes only keys. A row that is much longer than K is first reduced to a short list
of keys, whose scores are at least an estimate of the smallest selected score from a sample of the
row. If the list has fewer than K keys, or has no room for all, the kernel reads the row instead.

In FP8, q and k are the rotated and quantised rows of `index_fp8.py`. A query's scale is a factor of
its w, and a key's scale is a factor of the sum over heads.

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
from moecore.kernels.rows.e4m3 import FP8
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
DTYPES = (torch.bfloat16, torch.float16, FP8)
SCORES = 2**27  # numbers of the scores that `select_in_spans` computes at once: 512 MiB
SAMPLE = 2048  # scores of a row from which `select_keys` estimates the smallest selected score
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
        block = min(2048, max(256, next_power_of_2(S)))
        size = next_power_of_2(4 * top_k) if 4 * max(top_k, SAMPLE) <= S else 0
        lists = scores_CS.new_empty(C, size), out.new_empty(C, size)
        mean_rank = top_k * SAMPLE / S
        rank = int(mean_rank + 5 * mean_rank**0.5) + 8
        args = scores_CS.contiguous(), out, *lists, S, first_key, top_k, rank
        launch(_select_keys_kernel, C, *args, BLOCK=block, LIST=size, SAMPLE=SAMPLE, num_warps=4)
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
    is_supported = q.dtype in DTYPES and indexer.k_Ni.dtype == q.dtype
    return is_supported and q.shape[2] in DIMS and can_use_kernel(q)


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
def _order(scores):
    """Return fp32 as unsigned integers of the same order."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 equals 0
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _load_ordered(row_ptr, columns, stride, S):
    """Return S scores as `_order`, and whether the query sees the key."""
    scores = tl.load(row_ptr + columns * stride, mask=columns < S, other=float("-inf"))
    return _order(scores), scores > float("-inf")


@triton.jit
def _find_cutoff(row_ptr, stride, S, rank, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Search the `rank`-th largest of S scores by 8 bits per step; 0 if the query sees fewer keys.

    Return the first 8 * STEPS bits of its `_load_ordered`, and its rank among scores of equal bits.
    """
    block, bins = tl.arange(0, BLOCK), tl.arange(0, 256)
    cutoff = tl.full([], 0, dtype=tl.uint32)
    num_seen = tl.full([], 0, dtype=tl.int32)
    remaining = tl.full([], 0, dtype=tl.int32) + rank
    for step in tl.static_range(STEPS):
        counts = tl.zeros([256], dtype=tl.int32)
        for begin in range(0, S, BLOCK):
            ordered, is_choice = _load_ordered(row_ptr, begin + block, stride, S)
            if step > 0:
                is_choice &= (ordered >> (32 - 8 * step)) == (cutoff >> (32 - 8 * step))
            digits = ((ordered >> (24 - 8 * step)) & 255).to(tl.int32)
            if step < 2 or tl.sum(is_choice.to(tl.int32), 0) > 0:  # cheaper than a histogram
                counts += tl.histogram(digits, 256, mask=is_choice)
        if step == 0:
            num_seen = tl.sum(counts, 0)
        suffix_sums = tl.cumsum(counts, 0, reverse=True)
        digit = tl.max(tl.where(suffix_sums >= remaining, bins, 0), 0)
        remaining -= tl.sum(tl.where(bins > digit, counts, 0), 0)
        cutoff |= digit.to(tl.uint32) << (24 - 8 * step)
    return tl.where(num_seen >= rank, cutoff, 0), remaining


@triton.jit(do_not_specialize=["S", "first_key", "rank"])
def _select_keys_kernel(
    scores_ptr,  # [C, S] fp32
    out_ptr,  # [C, top_k] int32
    list_ptr,  # [C, LIST] fp32
    places_ptr,  # [C, LIST] int32
    S,
    first_key,
    top_k,
    rank,  # in the sample
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,  # largest scores of a row that fit; 0 = the row is searched
    SAMPLE: tl.constexpr,
):
    """Write the keys with the top_k largest scores of one row."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr, out_row = scores_ptr + row * S, out_ptr + row * top_k
    block = tl.arange(0, BLOCK)
    has_list = False
    source_ptr, length, places_row = row_ptr, S, out_row
    if LIST > 0:
        low, _ = _find_cutoff(row_ptr, S // SAMPLE, SAMPLE, rank, 2, SAMPLE)
        list_row, places_row = list_ptr + row * LIST, places_ptr + row * LIST
        number = tl.full([], 0, dtype=tl.int32)
        for begin in range(0, S, BLOCK):
            columns = begin + block
            scores = tl.load(row_ptr + columns, mask=columns < S, other=float("-inf"))
            is_large = (_order(scores) >= low) & (scores > float("-inf"))
            places = number + tl.cumsum(is_large.to(tl.int32), 0) - 1
            tl.store(list_row + places, scores, mask=is_large & (places < LIST))
            tl.store(places_row + places, columns, mask=is_large & (places < LIST))
            number += tl.sum(is_large.to(tl.int32), 0)
        tl.debug_barrier()
        has_list = (number <= LIST) & ((number >= top_k) | (low == 0))
        if has_list:
            source_ptr, length = list_row, number
    cutoff, remaining = _find_cutoff(source_ptr, 1, length, top_k, 4, BLOCK)
    num_selected = tl.full([], 0, dtype=tl.int32)
    for begin in range(0, length, BLOCK):
        ordered, is_choice = _load_ordered(source_ptr, begin + block, 1, length)
        is_equal = (is_choice & (ordered == cutoff)).to(tl.int32)
        is_first = (is_equal > 0) & (tl.cumsum(is_equal, 0) <= remaining)
        selected = (is_choice & (ordered > cutoff)) | is_first
        places = num_selected + tl.cumsum(selected.to(tl.int32), 0) - 1
        keys = begin + block
        if has_list:
            keys = tl.load(places_row + keys, mask=keys < length, other=0)
        tl.store(out_row + places, (first_key + keys).to(tl.int32), mask=selected)
        num_selected += tl.sum(selected.to(tl.int32), 0)
        remaining -= tl.sum(is_first.to(tl.int32), 0)
    for begin in range(0, top_k, BLOCK):
        places = begin + block
        tl.store(out_row + places, -1, mask=(places >= num_selected) & (places < top_k))


def round_to_fp8(indexer: IndexerHeads) -> tuple[IndexerHeads, Tensor | None]:
    """Return rotated queries and keys in FP8, and the keys' scales, fp32 [N].

    Without a kernel for products in FP8 the dtype does not change, which represents the rounded
    values exactly, and the scales are None.
    """
    q, k, w = indexer
    has_kernel = _has_index_kernel(indexer) and q.shape[2] in FP8_DIMS
    if not (has_kernel and can_multiply_fp8(q.device)):
        return IndexerHeads(round_rotated(q), round_rotated(k), w), None
    (q, q_scales), (k, k_scales) = quantise_rotated(q), quantise_rotated(k)
    return IndexerHeads(q, k, w.float() * q_scales), k_scales


def compute_span_scores(
    indexer: IndexerHeads, span: SpanOfKeys, k_scales_N: Tensor | None = None
) -> Tensor:
    """Return indexer scores [queries, keys] of a key range; -inf if not visible. No host sync.

    `indexer` and `k_scales_N` may be the result of `round_to_fp8`.
    """
    if not _has_index_kernel(indexer):
        return compute_index_scores(indexer, span)
    q_Chi, k_Si = indexer.q_thi.contiguous(), span.select_rows(indexer.k_Ni).contiguous()
    (C, h, i), S = q_Chi.shape, len(k_Si)
    scores_CS = q_Chi.new_empty(C, S, dtype=torch.float32)
    k_scales_S = None if k_scales_N is None else span.select_rows(k_scales_N)
    if INTERPRET and k_scales_S is not None:
        q_Chi, k_Si = q_Chi.view(torch.uint8), k_Si.view(torch.uint8)
    launch(
        _index_scores_kernel,
        (cdiv(C, 64), cdiv(S, 128)),
        *(q_Chi, k_Si, indexer.w_th.float().contiguous(), k_scales_S),
        *(span.first_C, span.last_C, scores_CS, C, S, span.first),
        HEADS=h,
        DIM=i,
        WIDEN=INTERPRET,
        BC=64,
        BS=128,
        num_warps=4,
        num_stages=2 if k_scales_N is None else 3,
    )
    return scores_CS
