"""Kernels of latent attention to selected keys: forward, gradients of queries and of keys.

Each query has its own list of keys, in ascending order, then -1. A program reads rows of keys by
index, in tiles of BK keys, and skips tiles after the last key of the list. No tensor of gathered
rows exists. Products per query, key and head, of 2 FLOPs per dim:

    kernel                                 products
    _sparse_attention_fwd_kernel           scores (l dims), sum of latents (L)
    _sparse_attention_bwd_scores_kernel    scores (l), dp (L)
    _sum_selected_rows_kernel              output in latent dims (L), gradient of the query (l)
    _sparse_attention_bwd_k_kernel         ds^T q (l), p^T do (L)

In backward, p and ds of a chunk are in memory, 4 H K bytes per query. Therefore scores are computed
once, no program has two large accumulators, and one program sums a key's gradient over all heads.
Then 4 l K bytes per query are added to the keys' gradients by atomic additions in fp32. Their order
is not deterministic. Per-key lists of queries would be deterministic but would not save products.

Legend: C queries, N keys, K selected keys, H heads, l = L + R dims of a latent key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moecore.kernels.common import (
    INTERPRET,
    can_use_kernel,
    cdiv,
    launch,
    next_power_of_2,
    tl,
    triton,
)

HEADS = 64  # of a program: the least rows of a product on Hopper


def has_gathered_kernels(q_tHd: Tensor, latent_dim: int, key_dim: int) -> bool:
    """Whether the kernels support the dtype, dims and device."""
    dims = latent_dim, key_dim - latent_dim
    are_powers = all(16 <= n <= 512 and n & (n - 1) == 0 for n in dims)
    return q_tHd.dtype in (torch.bfloat16, torch.float16) and are_powers and can_use_kernel(q_tHd)


@triton.jit
def _multiply(a, b, WIDEN: tl.constexpr):
    """Return a @ b in fp32; the interpreter cannot multiply 16 bits."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def _count_keys(selected_ptr, query, K: tl.constexpr, LANES: tl.constexpr):
    """Return the number of keys in a query's list."""
    places = tl.arange(0, LANES)
    selected = tl.load(selected_ptr + query * K + places, mask=places < K, other=-1)
    return tl.sum((selected >= 0).to(tl.int32), 0)


@triton.jit(do_not_specialize=["sinks_ptr"])
def _sparse_attention_fwd_kernel(
    q_ptr,  # [C, H, L + R]
    keys_ptr,  # [N, L + R]
    selected_ptr,  # [C, K] int32
    sinks_ptr,  # [H], or anything without sinks
    o_ptr,  # [C, H, L]
    lse_ptr,  # [C, H] fp32
    scale,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,  # K, as a power of two
    HAS_SINKS: tl.constexpr,
    WIDEN: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write attention output, in latent dims, and log-sum-exp of one query and BH heads."""
    parts: tl.constexpr = (H + BH - 1) // BH
    query = (tl.program_id(0) // parts).to(tl.int64)
    heads = tl.program_id(0) % parts * BH + tl.arange(0, BH)
    mask = heads < H
    latent, turned, tile = tl.arange(0, L), tl.arange(0, R), tl.arange(0, BK)
    row = (query * H + heads)[:, None]
    q_row = q_ptr + row * (L + R)
    q_latent = tl.load(q_row + latent[None, :], mask=mask[:, None], other=0.0)
    q_turned = tl.load(q_row + L + turned[None, :], mask=mask[:, None], other=0.0)
    factor = scale * 1.4426950408889634
    high = tl.full([BH], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BH], dtype=tl.float32)
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=mask, other=0.0).to(tl.float32)
        high = sinks * 1.4426950408889634
        total += 1.0
    acc = tl.zeros([BH, L], dtype=tl.float32)
    num_keys = _count_keys(selected_ptr, query, K, LANES)
    for begin in tl.range(0, num_keys, BK, num_stages=STAGES):
        is_key = begin + tile < num_keys
        key = tl.load(selected_ptr + query * K + begin + tile, mask=is_key, other=0).to(tl.int64)
        k_row = keys_ptr + key[:, None] * (L + R)
        k_latent = tl.load(k_row + latent[None, :])
        k_turned = tl.load(k_row + L + turned[None, :])
        s = _multiply(q_turned, k_turned.T, WIDEN)  # warps share only the work of the last product
        s += _multiply(q_latent, k_latent.T, WIDEN)
        s = tl.where(is_key[None, :], s * factor, float("-inf"))
        higher = tl.maximum(high, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(high - higher)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + _multiply(p.to(k_latent.dtype), k_latent, WIDEN)
        high = higher
    o = (acc / total[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + row * L + latent[None, :], o, mask=mask[:, None])
    lse = (high + tl.log2(total)) * 0.6931471805599453
    tl.store(lse_ptr + query * H + heads, lse, mask=mask)


@triton.jit
def _sparse_attention_bwd_scores_kernel(
    q_ptr,  # [C, H, L + R]
    keys_ptr,  # [N, L + R]
    selected_ptr,  # [C, K] int32
    do_ptr,  # [C, H, L]
    lse_ptr,  # [C, H] fp32
    delta_ptr,  # [C, H] fp32
    p_ptr,  # [C, H, K]
    ds_ptr,  # [C, H, K], times `scale`
    scale,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
    WIDEN: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,  # latent dims of a step
    STAGES: tl.constexpr,
):
    """Write p and ds of one query, BH heads and BK keys."""
    parts: tl.constexpr = (H + BH - 1) // BH
    tiles: tl.constexpr = (K + BK - 1) // BK
    query = (tl.program_id(0) // (parts * tiles)).to(tl.int64)
    heads = tl.program_id(0) // tiles % parts * BH + tl.arange(0, BH)
    columns = tl.program_id(0) % tiles * BK + tl.arange(0, BK)
    mask, dims, turned = (heads < H)[:, None], tl.arange(0, BL), tl.arange(0, R)
    row = (query * H + heads)[:, None]
    key = tl.load(selected_ptr + query * K + columns, mask=columns < K, other=-1)
    is_key = key >= 0
    if tl.max(key, 0) < 0:
        return
    q_row = q_ptr + row * (L + R)
    k_row = keys_ptr + tl.maximum(key, 0).to(tl.int64)[:, None] * (L + R)
    s = tl.zeros([BH, BK], dtype=tl.float32)
    dp = tl.zeros([BH, BK], dtype=tl.float32)
    for first in tl.range(0, L, BL, num_stages=STAGES):
        k = tl.load(k_row + first + dims[None, :])
        q = tl.load(q_row + first + dims[None, :], mask=mask, other=0.0)
        do = tl.load(do_ptr + row * L + first + dims[None, :], mask=mask, other=0.0)
        s += _multiply(q, k.T, WIDEN)
        dp += _multiply(do, k.T, WIDEN)
    q = tl.load(q_row + L + turned[None, :], mask=mask, other=0.0)
    s += _multiply(q, tl.load(k_row + L + turned[None, :]).T, WIDEN)
    lse = tl.load(lse_ptr + query * H + heads, mask=heads < H, other=0.0)
    delta = tl.load(delta_ptr + query * H + heads, mask=heads < H, other=0.0)
    p = tl.exp2((s * scale - lse[:, None]) * 1.4426950408889634)
    ds = p * (dp - delta[:, None]) * scale
    at, store_mask = row * K + columns[None, :], mask & is_key[None, :]
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=store_mask)
    tl.store(ds_ptr + at, ds.to(ds_ptr.dtype.element_ty), mask=store_mask)


@triton.jit
def _sum_selected_rows_kernel(
    w_ptr,  # [C, H, K]
    keys_ptr,  # [N, D], part of the rows of L + R numbers
    selected_ptr,  # [C, K] int32
    out_ptr,  # [C, H, D], part of rows of WIDTH numbers
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,  # K, as a power of two
    WIDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,  # programs of a query
    BH: tl.constexpr,  # all heads, as a power of two
    BK: tl.constexpr,
    BL: tl.constexpr,  # dims of a program
    STAGES: tl.constexpr,
):
    """Write the sum of w * key of one query, all heads, and BL of the D dims."""
    query = (tl.program_id(0) // PARTS).to(tl.int64)
    heads, tile = tl.arange(0, BH), tl.arange(0, BK)
    dims = tl.program_id(0) % PARTS * BL + tl.arange(0, BL)
    row = (query * H + heads)[:, None]
    mask = (heads < H)[:, None]
    total = tl.zeros([BH, BL], dtype=tl.float32)
    num_keys = _count_keys(selected_ptr, query, K, LANES)
    for begin in tl.range(0, num_keys, BK, num_stages=STAGES):
        is_key = begin + tile < num_keys
        key = tl.load(selected_ptr + query * K + begin + tile, mask=is_key, other=0).to(tl.int64)
        w = tl.load(w_ptr + row * K + begin + tile[None, :], mask=mask & is_key[None, :], other=0.0)
        k = tl.load(keys_ptr + key[:, None] * (L + R) + dims[None, :])
        total += _multiply(w, k, WIDEN)
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + dims[None, :], out, mask=mask)


@triton.jit
def _sparse_attention_bwd_k_kernel(
    ds_ptr,  # [C, H, K]
    q_ptr,  # [C, H, D], part of rows of L + R numbers
    selected_ptr,  # [C, K] int32
    dkeys_ptr,  # [N, D] fp32, part of rows of L + R numbers, added to
    p_ptr,  # [C, H, K], or None for rotated dims
    do_ptr,  # [C, H, L], or None
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,  # K, as a power of two
    WIDEN: tl.constexpr,
    PARTS: tl.constexpr,  # programs of a query
    BH: tl.constexpr,  # all heads, as a power of two
    BK: tl.constexpr,
    BL: tl.constexpr,  # dims of a program
    STAGES: tl.constexpr,
):
    """Add gradients of one query's keys, of BL of the D dims."""
    query = (tl.program_id(0) // PARTS).to(tl.int64)
    heads, tile = tl.arange(0, BH), tl.arange(0, BK)
    dims = tl.program_id(0) % PARTS * BL + tl.arange(0, BL)
    row = (query * H + heads)[:, None]
    mask = (heads < H)[:, None]
    q = tl.load(q_ptr + row * (L + R) + dims[None, :], mask=mask, other=0.0)
    if p_ptr is not None:
        do = tl.load(do_ptr + row * L + dims[None, :], mask=mask, other=0.0)
    num_keys = _count_keys(selected_ptr, query, K, LANES)
    for begin in tl.range(0, num_keys, BK, num_stages=STAGES):
        is_key = begin + tile < num_keys
        key = tl.load(selected_ptr + query * K + begin + tile, mask=is_key, other=0).to(tl.int64)
        at = row * K + begin + tile[None, :]
        ds = tl.load(ds_ptr + at, mask=mask & is_key[None, :], other=0.0)
        rows = _multiply(ds.T, q, WIDEN)
        if p_ptr is not None:
            p = tl.load(p_ptr + at, mask=mask & is_key[None, :], other=0.0)
            rows += _multiply(p.T, do, WIDEN)
        tl.atomic_add(
            dkeys_ptr + key[:, None] * (L + R) + dims[None, :],
            rows,
            mask=is_key[:, None],
            sem="relaxed",
        )


def attend_to_selected(
    q_CHl: Tensor,
    keys_Nl: Tensor,
    selected_CK: Tensor,
    latent_dim: int,
    scale: float,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the output in latent dims [C, H, L] and the log-sum-exp, fp32 [C, H]."""
    (C, H, key_dim), K = q_CHl.shape, selected_CK.shape[1]
    o_CHL = q_CHl.new_empty(C, H, latent_dim)
    lse_CH = q_CHl.new_empty(C, H, dtype=torch.float32)
    selected_CK = selected_CK.contiguous()
    sinks = q_CHl if sinks_H is None else sinks_H.contiguous()
    launch(
        _sparse_attention_fwd_kernel,
        C * cdiv(H, HEADS),
        *(q_CHl.contiguous(), keys_Nl.contiguous(), selected_CK, sinks, o_CHL, lse_CH),
        scale,
        **_list_constants(H, latent_dim, key_dim, K),
        HAS_SINKS=sinks_H is not None,
        BH=HEADS,
        BK=64,
        STAGES=2,
        num_warps=8,
    )
    return o_CHL, lse_CH


def differentiate_selected(
    q_CHl: Tensor,
    keys_Nl: Tensor,
    selected_CK: Tensor,
    do_CHL: Tensor,
    lse_CH: Tensor,
    delta_CH: Tensor,
    scale: float,
    dkeys_Nl: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `q_CHl` and the output; add the gradient of the keys to `dkeys_Nl`.

    The output is [C, H, L], in latent dims. `dkeys_Nl` is fp32.
    """
    (C, H, key_dim), (K, L) = q_CHl.shape, (selected_CK.shape[1], do_CHL.shape[2])
    q_CHl, keys_Nl, dq_CHl = q_CHl.contiguous(), keys_Nl.contiguous(), torch.empty_like(q_CHl)
    selected_CK = selected_CK.contiguous()
    o_CHL, (p_CHK, ds_CHK) = torch.empty_like(do_CHL), q_CHl.new_empty(2, C, H, K)
    constants = _list_constants(H, L, key_dim, K)
    heads = min(128, max(HEADS, next_power_of_2(H)))
    launch(
        _sparse_attention_bwd_scores_kernel,
        C * cdiv(H, heads) * cdiv(K, 128),
        *(q_CHl, keys_Nl, selected_CK, do_CHL, lse_CH, delta_CH, p_CHK, ds_CHK, scale),
        **constants,
        BH=heads,
        BK=128,
        BL=min(64, L),
        STAGES=4,
        num_warps=8,
    )
    constants = constants | dict(BH=max(HEADS, next_power_of_2(H)), BK=64, num_warps=8)
    for w_CHK, part, out in (
        (p_CHK, slice(L), o_CHL),
        (ds_CHK, slice(L), dq_CHl[..., :L]),
        (ds_CHK, slice(L, None), dq_CHl[..., L:]),
    ):
        width = min(256, out.shape[2])
        launch(
            _sum_selected_rows_kernel,
            C * (out.shape[2] // width),
            *(w_CHK, keys_Nl[:, part], selected_CK, out),
            **constants,
            WIDTH=out.stride(1),
            PARTS=out.shape[2] // width,
            BL=width,
            STAGES=3,
        )
    for part, p_and_do in ((slice(L), (p_CHK, do_CHL)), (slice(L, None), (None, None))):
        q_part = q_CHl[..., part]
        width = min(256, q_part.shape[2])
        launch(
            _sparse_attention_bwd_k_kernel,
            C * (q_part.shape[2] // width),
            *(ds_CHK, q_part, selected_CK, dkeys_Nl[:, part], *p_and_do),
            **constants,
            PARTS=q_part.shape[2] // width,
            BL=width,
            STAGES=2,
        )
    return dq_CHl, o_CHL


def _list_constants(H: int, L: int, key_dim: int, K: int) -> dict[str, object]:
    """Return the constants that the kernels share."""
    return dict(H=H, L=L, R=key_dim - L, K=K, LANES=next_power_of_2(K), WIDEN=INTERPRET)
