"""The indexer's scores of a chunk's queries and a span of keys, summed over heads where they arise.

    I[c, s] = sum over h of w[c, h] * relu(q[c, h] . k[s]), in fp32; -inf where c does not see s

Letters: C queries, S keys of the span, h heads, i dims.

Bytes moved: 4 C S for the scores, once; a program reads its keys once, and the queries of all heads
from the L2 cache. 2 C S h i flops, fewer where spans of documents end before a tile or begin behind
it: such tiles are filled without a product. Plain PyTorch writes and reads C S h numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moecore.kernels.common import INTERPRET, cdiv, launch, tl, triton, use_kernel
from moecore.kernels.sparse_attention.contract import IndexerHeads
from moecore.kernels.sparse_attention.index import index_scores
from moecore.kernels.sparse_attention.keys import SpanOfKeys

DIMS = (16, 32, 64, 128)  # of a head: one step of a product
SELECTING = 4  # numbers per pair that the selection from scores makes beside them


def numbers_per_pair(index: IndexerHeads) -> int:
    """Return how many fp32 numbers a chunk makes per query and key."""
    return SELECTING if _has_kernel(index) else max(SELECTING, index.q_thi.shape[1])


def _has_kernel(index: IndexerHeads) -> bool:
    q = index.q_thi
    is_half = q.dtype in (torch.bfloat16, torch.float16) and index.k_Ni.dtype == q.dtype
    return is_half and q.shape[2] in DIMS and use_kernel(q)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "first_key"])
def _index_scores_kernel(
    q_ptr,  # [C, h, i]
    k_ptr,  # [S, i]
    w_ptr,  # [C, h] fp32
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
    rows = tl.program_id(0).to(tl.int64) * BC + tl.arange(0, BC)
    columns = tl.program_id(1).to(tl.int64) * BS + tl.arange(0, BS)
    dims = tl.arange(0, DIM)
    row_mask = rows < num_queries
    last_key = first_key + num_keys - 1
    # Less than 2^31 keys: whole comparisons of 64 bits would spill.
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
            if WIDEN:
                dots = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="ieee")
            else:
                dots = tl.dot(q, k)
            total += tl.maximum(dots, 0.0) * w[:, None]
    seen = (keys[None, :] >= first[:, None]) & (keys[None, :] <= last[:, None])
    tl.store(
        scores_ptr + rows[:, None] * num_keys + columns[None, :],
        tl.where(seen, total, float("-inf")),
        mask=row_mask[:, None] & (columns < num_keys)[None, :],
    )


def span_scores(index: IndexerHeads, span: SpanOfKeys) -> Tensor:
    """Return I_CS of a chunk's queries, -inf where a query does not see a key. No host sync."""
    if not _has_kernel(index):
        return index_scores(index, span)
    q_Chi, k_Si = index.q_thi.contiguous(), span.of(index.k_Ni).contiguous()
    (C, h, i), S = q_Chi.shape, len(k_Si)
    scores_CS = q_Chi.new_empty(C, S, dtype=torch.float32)
    tensors = q_Chi, k_Si, index.w_th.float().contiguous(), span.first_C, span.last_C, scores_CS
    launch(
        _index_scores_kernel,
        (cdiv(C, 64), cdiv(S, 256)),
        *tensors,
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
