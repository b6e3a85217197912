"""Kernels of latent attention to selected keys: forward, gradients of queries and of keys.

Each query has its own list of keys, in ascending order, then -1. A program reads rows of keys by
index, in tiles of BK keys, and skips tiles after the last key of the list. No tensor of gathered
rows exists. Products per query, key and head, of 2 FLOPs per dim:

    kernel                                 products
    _sparse_attention_fwd_kernel           scores (l dims), sum of latents (L)
    _sparse_attention_bwd_scores_kernel    scores (l), dp (L)
    _sum_selected_rows_kernel              output in latent dims (L), gradient of the query (l)
    _sparse_attention_bwd_k_kernel         ds^T q (l), p^T do (L)

In backward, p and ds of a chunk are in memory, 4 H P bytes per query. Therefore scores are computed
once, no program has two large accumulators, and one program sums a key's gradient over all heads.
Then 4 l K bytes per query are added to the keys' gradients by atomic additions in fp32. Their order
is not deterministic. On Hopper, a launch adds the gradients of one band of all lists after the
other. The gradients of a band fit the L2 cache if the lists select from the same keys, as lists of
consecutive queries do. P is K rounded up to a multiple of 128. Scores after the last key are 0, so
that loads need no mask by key: such a mask would make them 2 bytes wide.

Legend: C queries, N keys, K selected keys, H heads, l = L + R dims of a latent key.
"""

import torch
from torch import Tensor

from moecore.kernels.common import can_use_kernel, cdiv, launch, next_power_of_2
from moecore.kernels.sparse_attention.hopper import (
    has_hopper_gathered_kernels,
    sm90_sparse_attention_bwd_k_kernel,
    sm90_sparse_attention_bwd_scores_kernel,
    sm90_sparse_attention_fwd_kernel,
)
from moecore.kernels.sparse_attention.index_fp8 import multiply_tiles
from moecore.kernels.triton_api import INTERPRET, tl, triton

HEADS = 64  # of a program: the least rows of a product on Hopper
BAND_BYTES = 2**25  # of key gradients that fit the L2 cache
BAND_KEYS = 256  # least entries of a list per program


def has_gathered_kernels(q_tHd: Tensor, latent_dim: int, key_dim: int) -> bool:
    """Whether kernels for selected keys support the dtype, dims and device."""
    fit = _is_power_of_2(latent_dim, 32)
    if key_dim > latent_dim:  # a product has at least 16 columns
        fit &= _is_power_of_2(key_dim - latent_dim, 16 * cdiv(latent_dim, 128))
    return q_tHd.dtype in (torch.bfloat16, torch.float16) and fit and can_use_kernel(q_tHd)


def _is_power_of_2(number: int, minimum: int) -> bool:
    """Whether the number is a power of two from `minimum` to 512."""
    return minimum <= number <= 512 and number & (number - 1) == 0


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
    latent, tile = tl.arange(0, L), tl.arange(0, BK)
    row = (query * H + heads)[:, None]
    q_row = q_ptr + row * (L + R)
    q_latent = tl.load(q_row + latent[None, :], mask=mask[:, None], other=0.0)
    if R > 0:
        turned = tl.arange(0, R)
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
        s = tl.zeros([BH, BK], dtype=tl.float32)
        if R > 0:  # before the latents: warps share only the work of the last product
            s += multiply_tiles(q_turned, tl.load(k_row + L + turned[None, :]).T, WIDEN)
        s += multiply_tiles(q_latent, k_latent.T, WIDEN)
        s = tl.where(is_key[None, :], s * factor, float("-inf"))
        higher = tl.maximum(high, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(high - higher)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + multiply_tiles(p.to(k_latent.dtype), k_latent, WIDEN)
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
    p_ptr,  # [C, H, P], 0 where a tile of BK keys has fewer
    ds_ptr,  # [C, H, P], times `scale`
    scale,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
    WIDEN: tl.constexpr,
    P: tl.constexpr,  # K, as a multiple of BK
    BH: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,  # latent dims of a step
    STAGES: tl.constexpr,
):
    """Write p and ds of one query, BH heads and BK keys."""
    parts: tl.constexpr = (H + BH - 1) // BH
    tiles: tl.constexpr = P // BK
    query = (tl.program_id(0) // (parts * tiles)).to(tl.int64)
    heads = tl.program_id(0) // tiles % parts * BH + tl.arange(0, BH)
    columns = tl.program_id(0) % tiles * BK + tl.arange(0, BK)
    mask, dims = (heads < H)[:, None], tl.arange(0, BL)
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
        s += multiply_tiles(q, k.T, WIDEN)
        dp += multiply_tiles(do, k.T, WIDEN)
    if R > 0:
        turned = L + tl.arange(0, R)
        q = tl.load(q_row + turned[None, :], mask=mask, other=0.0)
        s += multiply_tiles(q, tl.load(k_row + turned[None, :]).T, WIDEN)
    lse = tl.load(lse_ptr + query * H + heads, mask=heads < H, other=0.0)
    delta = tl.load(delta_ptr + query * H + heads, mask=heads < H, other=0.0)
    p = tl.exp2((s * scale - lse[:, None]) * 1.4426950408889634)
    p = tl.where(is_key[None, :], p, 0.0)
    ds = p * (dp - delta[:, None]) * scale
    at = row * P + columns[None, :]
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=mask)
    tl.store(ds_ptr + at, ds.to(ds_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_selected_rows_kernel(
    w_ptr,  # [C, H, P]
    keys_ptr,  # [N, L + R]
    selected_ptr,  # [C, K] int32
    out_ptr,  # [C, H, L + R], or without `HAS_ROTATED` [C, H, L]
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
    WIDEN: tl.constexpr,
    P: tl.constexpr,
    HAS_ROTATED: tl.constexpr,
    PARTS: tl.constexpr,  # programs of a query
    BH: tl.constexpr,  # all heads, as a power of two
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the sum of w * key of one query, all heads, and a part of the dims."""
    query = (tl.program_id(0) // PARTS).to(tl.int64)
    part, heads, tile = tl.program_id(0) % PARTS, tl.arange(0, BH), tl.arange(0, BK)
    latent = part * (L // PARTS) + tl.arange(0, L // PARTS)
    row = (query * H + heads)[:, None]
    mask = (heads < H)[:, None]
    latent_sum = tl.zeros([BH, L // PARTS], dtype=tl.float32)
    if HAS_ROTATED:
        turned = L + part * (R // PARTS) + tl.arange(0, R // PARTS)
        turned_sum = tl.zeros([BH, R // PARTS], dtype=tl.float32)
    num_keys = _count_keys(selected_ptr, query, K, LANES)
    for begin in tl.range(0, num_keys, BK, num_stages=STAGES):
        is_key = begin + tile < num_keys
        key = tl.load(selected_ptr + query * K + begin + tile, mask=is_key, other=0).to(tl.int64)
        w = tl.load(w_ptr + row * P + begin + tile[None, :], mask=mask, other=0.0)
        k_row = keys_ptr + key[:, None] * (L + R)
        latent_sum += multiply_tiles(w, tl.load(k_row + latent[None, :]), WIDEN)
        if HAS_ROTATED:
            turned_sum += multiply_tiles(w, tl.load(k_row + turned[None, :]), WIDEN)
    out_row = out_ptr + row * (L + R if HAS_ROTATED else L)
    tl.store(out_row + latent[None, :], latent_sum.to(out_ptr.dtype.element_ty), mask=mask)
    if HAS_ROTATED:
        tl.store(out_row + turned[None, :], turned_sum.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sparse_attention_bwd_k_kernel(
    ds_ptr,  # [C, H, P]
    q_ptr,  # [C, H, L + R]
    selected_ptr,  # [C, K] int32
    dkeys_ptr,  # [N, L + R] fp32, added to
    p_ptr,  # [C, H, P]
    do_ptr,  # [C, H, L]
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
    WIDEN: tl.constexpr,
    P: tl.constexpr,
    PARTS: tl.constexpr,  # programs of a query
    BH: tl.constexpr,  # all heads, as a power of two
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add gradients of one query's keys, of a part of the dims."""
    HALF: tl.constexpr = L // PARTS // 2  # both at once would need too much shared memory
    query = (tl.program_id(0) // PARTS).to(tl.int64)
    part, heads, tile = tl.program_id(0) % PARTS, tl.arange(0, BH), tl.arange(0, BK)
    low = part * (L // PARTS) + tl.arange(0, HALF)[None, :]
    row = (query * H + heads)[:, None]
    mask = (heads < H)[:, None]
    q_row, do_row = q_ptr + row * (L + R), do_ptr + row * L
    q_low = tl.load(q_row + low, mask=mask, other=0.0)
    q_high = tl.load(q_row + low + HALF, mask=mask, other=0.0)
    if R > 0:
        turned = L + part * (R // PARTS) + tl.arange(0, R // PARTS)[None, :]
        q_turned = tl.load(q_row + turned, mask=mask, other=0.0)
    do_low = tl.load(do_row + low, mask=mask, other=0.0)
    do_high = tl.load(do_row + low + HALF, mask=mask, other=0.0)
    num_keys = _count_keys(selected_ptr, query, K, LANES)
    for begin in tl.range(0, num_keys, BK, num_stages=STAGES):
        at = row * P + begin + tile[None, :]
        ds = tl.load(ds_ptr + at, mask=mask, other=0.0)
        p = tl.load(p_ptr + at, mask=mask, other=0.0)
        is_key = begin + tile < num_keys
        key = tl.load(selected_ptr + query * K + begin + tile, mask=is_key, other=0).to(tl.int64)
        out, is_key = dkeys_ptr + key[:, None] * (L + R), is_key[:, None]
        dk = multiply_tiles(ds.T, q_low, WIDEN) + multiply_tiles(p.T, do_low, WIDEN)
        tl.atomic_add(out + low, dk, mask=is_key, sem="relaxed")
        dk = multiply_tiles(ds.T, q_high, WIDEN) + multiply_tiles(p.T, do_high, WIDEN)
        tl.atomic_add(out + low + HALF, dk, mask=is_key, sem="relaxed")
        if R > 0:
            dk = multiply_tiles(ds.T, q_turned, WIDEN)
            tl.atomic_add(out + turned, dk, mask=is_key, sem="relaxed")


def attend_to_selected(
    q_CHl: Tensor,
    keys_Nl: Tensor,
    selected_CK: Tensor,
    latent_dim: int,
    scale: float,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return attention to selected keys in latent dims [C, H, L], and log-sum-exps, fp32 [C, H]."""
    (C, H, key_dim), K = q_CHl.shape, selected_CK.shape[1]
    o_CHL = q_CHl.new_empty(C, H, latent_dim)
    lse_CH = q_CHl.new_empty(C, H, dtype=torch.float32)
    selected_CK = selected_CK.contiguous()
    sinks = q_CHl if sinks_H is None else sinks_H.contiguous()
    args = (q_CHl.contiguous(), keys_Nl.contiguous(), selected_CK, sinks, o_CHL, lse_CH, scale)
    constants = _list_constants(H, latent_dim, key_dim, K) | dict(HAS_SINKS=sinks_H is not None)
    constants |= dict(BH=HEADS, BK=64, num_warps=8)
    if has_hopper_gathered_kernels(q_CHl, latent_dim):
        del constants["WIDEN"]
        launch(sm90_sparse_attention_fwd_kernel, C * cdiv(H, HEADS), *args, **constants)
    else:
        launch(_sparse_attention_fwd_kernel, C * cdiv(H, HEADS), *args, **constants, STAGES=2)
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
    *,
    num_visible_keys: int,
    returns_output: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of `q_CHl`, and the output; add the keys' gradient to `dkeys_Nl`.

    The output of `attend_to_selected` is recomputed if `returns_output`. `dkeys_Nl` is fp32. The
    speed, but no result, depends on `num_visible_keys`, among which the lists were selected.
    """
    (C, H, key_dim), (K, L) = q_CHl.shape, (selected_CK.shape[1], do_CHL.shape[2])
    q_CHl, keys_Nl, dq_CHl = q_CHl.contiguous(), keys_Nl.contiguous(), torch.empty_like(q_CHl)
    selected_CK = selected_CK.contiguous()
    P = 128 * cdiv(K, 128)
    o_CHL = torch.empty_like(do_CHL) if returns_output else None
    p_CHP, ds_CHP = q_CHl.new_empty(2, C, H, P)
    constants = dict(_list_constants(H, L, key_dim, K), P=P, num_warps=8)
    args = (q_CHl, keys_Nl, selected_CK, do_CHL, lse_CH, delta_CH, p_CHP, ds_CHP, scale)
    is_on_hopper = has_hopper_gathered_kernels(q_CHl, L)
    tiles = dict(BK=128, BL=min(64, L), STAGES=4)
    if is_on_hopper:
        of_hopper = {name: x for name, x in constants.items() if name != "WIDEN"}
        kernel, grid = sm90_sparse_attention_bwd_scores_kernel, C * cdiv(H, HEADS)
        launch(kernel, grid, *args, **of_hopper, **tiles, BH=HEADS)
    else:
        heads = min(128, max(HEADS, next_power_of_2(H)))
        grid = C * cdiv(H, heads) * (P // 128)
        launch(_sparse_attention_bwd_scores_kernel, grid, *args, **constants, **tiles, BH=heads)
    parts = cdiv(L, 256)
    constants |= dict(BH=max(HEADS, next_power_of_2(H)), BK=64, PARTS=parts)
    for w_CHP, out in ((p_CHP, o_CHL), (ds_CHP, dq_CHl)):
        if out is None:
            continue
        launch(
            _sum_selected_rows_kernel,
            C * parts,
            *(w_CHP, keys_Nl, selected_CK, out),
            **constants,
            HAS_ROTATED=out is dq_CHl and key_dim > L,
            STAGES=5,
        )
    of_keys = (ds_CHP, q_CHl, selected_CK, dkeys_Nl, p_CHP, do_CHL)
    if is_on_hopper:
        bands = max(1, min(cdiv(4 * key_dim * num_visible_keys, BAND_BYTES), K // BAND_KEYS))
        of_band = C * parts, 64 * cdiv(cdiv(K, bands), 64)
        del constants["WIDEN"], constants["BH"]
        kernel = sm90_sparse_attention_bwd_k_kernel
        launch(kernel, bands * C * parts, *of_keys, *of_band, **constants)
    else:
        constants |= dict(PARTS=cdiv(L, 128), STAGES=2)
        launch(_sparse_attention_bwd_k_kernel, C * cdiv(L, 128), *of_keys, **constants)
    return dq_CHl, o_CHL


def _list_constants(H: int, L: int, key_dim: int, K: int) -> dict[str, object]:
    """Return the constants that the kernels share."""
    return dict(H=H, L=L, R=key_dim - L, K=K, LANES=next_power_of_2(K), WIDEN=INTERPRET)
