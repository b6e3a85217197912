"""Kernels of latent attention to selected keys: forward, gradients of queries and of keys.

Each query has its own list of keys, in ascending order, then -1. A program reads rows of keys by
index, in tiles of BK keys, and skips tiles after the last key of the list. No tensor of gathered
rows exists. FLOPs per query, key and head:

    kernel                          products                                  FLOPs
    _sparse_attention_fwd_kernel    scores (l), sum of latents (L)            2 (l + L)
    _sparse_attention_bwd_q_kernel  scores (l), dp (L), dq (l)                2 (2 l + L)
    _sparse_attention_bwd_k_kernel  ds^T q (l), p^T do (L)                    2 (l + L)

The second kernel writes p and ds of a chunk, 4 H K bytes per query. The third kernel reads them,
sums over all heads, and adds rows of fp32 to the keys' gradients: 4 l K bytes of atomic additions
per query. Their order is not deterministic, see `has_gathered_kernels`.

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
    return (
        q_tHd.dtype in (torch.bfloat16, torch.float16) and are_powers and can_use_kernel(q_tHd)
    )


@triton.jit
def _multiply(a, b, WIDEN: tl.constexpr):
    """Return a @ b in fp32; the interpreter cannot multiply 16 bits."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def _count_keys(selected_ptr, query, K: tl.constexpr, PADDED: tl.constexpr):
    """Return the number of keys in a query's list."""
    places = tl.arange(0, PADDED)
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
    PADDED: tl.constexpr,  # K, as a power of two
    HAS_SINKS: tl.constexpr,
    WIDEN: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write attention output, in latent dims, and log-sum-exp of one query and BH heads."""
    query = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BH + tl.arange(0, BH)
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
    num_keys = _count_keys(selected_ptr, query, K, PADDED)
    for begin in tl.range(0, num_keys, BK, num_stages=STAGES):
        seen = begin + tile < num_keys
        key = tl.load(selected_ptr + query * K + begin + tile, mask=seen, other=0).to(tl.int64)
        k_row = keys_ptr + key[:, None] * (L + R)
        k_latent = tl.load(k_row + latent[None, :])
        k_turned = tl.load(k_row + L + turned[None, :])
        s = _multiply(q_latent, k_latent.T, WIDEN) + _multiply(q_turned, k_turned.T, WIDEN)
        s = tl.where(seen[None, :], s * factor, float("-inf"))
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
def _sparse_attention_bwd_q_kernel(
    q_ptr,  # [C, H, L + R]
    keys_ptr,  # [N, L + R]
    selected_ptr,  # [C, K] int32
    do_ptr,  # [C, H, L]
    lse_ptr,  # [C, H] fp32
    delta_ptr,  # [C, H] fp32
    dq_ptr,  # [C, H, L + R]
    p_ptr,  # [C, H, K]
    ds_ptr,  # [C, H, K], times `scale`
    scale,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,  # K, as a power of two
    WIDEN: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradient of one query and BH heads, and p and ds of its keys."""
    query = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BH + tl.arange(0, BH)
    mask = heads < H
    latent, turned, tile = tl.arange(0, L), tl.arange(0, R), tl.arange(0, BK)
    row = (query * H + heads)[:, None]
    q_row = q_ptr + row * (L + R)
    q_latent = tl.load(q_row + latent[None, :], mask=mask[:, None], other=0.0)
    q_turned = tl.load(q_row + L + turned[None, :], mask=mask[:, None], other=0.0)
    do = tl.load(do_ptr + row * L + latent[None, :], mask=mask[:, None], other=0.0)
    lse = tl.load(lse_ptr + query * H + heads, mask=mask, other=0.0) * 1.4426950408889634
    delta = tl.load(delta_ptr + query * H + heads, mask=mask, other=0.0)
    factor = scale * 1.4426950408889634
    dq_latent = tl.zeros([BH, L], dtype=tl.float32)
    dq_turned = tl.zeros([BH, R], dtype=tl.float32)
    num_keys = _count_keys(selected_ptr, query, K, PADDED)
    for begin in tl.range(0, num_keys, BK, num_stages=STAGES):
        seen = begin + tile < num_keys
        key = tl.load(selected_ptr + query * K + begin + tile, mask=seen, other=0).to(tl.int64)
        k_row = keys_ptr + key[:, None] * (L + R)
        k_latent = tl.load(k_row + latent[None, :])
        k_turned = tl.load(k_row + L + turned[None, :])
        s = _multiply(q_latent, k_latent.T, WIDEN) + _multiply(q_turned, k_turned.T, WIDEN)
        dp = _multiply(do, k_latent.T, WIDEN)
        p = tl.where(seen[None, :], tl.exp2(s * factor - lse[:, None]), 0.0)
        ds = (p * (dp - delta[:, None]) * scale).to(k_latent.dtype)
        dq_latent += _multiply(ds, k_latent, WIDEN)
        dq_turned += _multiply(ds, k_turned, WIDEN)
        at = row * K + begin + tile[None, :]
        tl.store(p_ptr + at, p.to(k_latent.dtype), mask=mask[:, None] & seen[None, :])
        tl.store(ds_ptr + at, ds, mask=mask[:, None] & seen[None, :])
    dq_row = dq_ptr + row * (L + R)
    dtype = dq_ptr.dtype.element_ty
    tl.store(dq_row + latent[None, :], dq_latent.to(dtype), mask=mask[:, None])
    tl.store(dq_row + L + turned[None, :], dq_turned.to(dtype), mask=mask[:, None])


@triton.jit
def _sparse_attention_bwd_k_kernel(
    q_ptr,  # [C, H, L + R]
    selected_ptr,  # [C, K] int32
    do_ptr,  # [C, H, L]
    p_ptr,  # [C, H, K]
    ds_ptr,  # [C, H, K]
    dkeys_ptr,  # [N, L + R] fp32, added to
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,  # K, as a power of two
    WIDEN: tl.constexpr,
    BH: tl.constexpr,  # all heads, as a power of two
    BK: tl.constexpr,
    FIRST: tl.constexpr,  # dim of the first program: 0, or L
    BL: tl.constexpr,  # dims of a program
    STAGES: tl.constexpr,
):
    """Add gradients of one query's keys, of BL latent dims or of the rotated dims."""
    query = tl.program_id(0).to(tl.int64)
    heads, tile = tl.arange(0, BH), tl.arange(0, BK)
    dims = FIRST + tl.program_id(1) * BL + tl.arange(0, BL)
    row = (query * H + heads)[:, None]
    mask = (heads < H)[:, None]
    q = tl.load(q_ptr + row * (L + R) + dims[None, :], mask=mask, other=0.0)
    if FIRST == 0:
        do = tl.load(do_ptr + row * L + dims[None, :], mask=mask, other=0.0)
    num_keys = _count_keys(selected_ptr, query, K, PADDED)
    for begin in tl.range(0, num_keys, BK, num_stages=STAGES):
        seen = begin + tile < num_keys
        key = tl.load(selected_ptr + query * K + begin + tile, mask=seen, other=0).to(tl.int64)
        at = row * K + begin + tile[None, :]
        ds = tl.load(ds_ptr + at, mask=mask & seen[None, :], other=0.0)
        rows = _multiply(ds.T, q, WIDEN)
        if FIRST == 0:
            p = tl.load(p_ptr + at, mask=mask & seen[None, :], other=0.0)
            rows += _multiply(p.T, do, WIDEN)
        tl.atomic_add(
            dkeys_ptr + key[:, None] * (L + R) + dims[None, :],
            rows,
            mask=seen[:, None],
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
    sinks = q_CHl if sinks_H is None else sinks_H.contiguous()
    launch(
        _sparse_attention_fwd_kernel,
        (C, cdiv(H, HEADS)),
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
) -> Tensor:
    """Return the gradient of `q_CHl`; add the gradient of the keys to `dkeys_Nl`, in fp32."""
    (C, H, key_dim), (K, L) = q_CHl.shape, (selected_CK.shape[1], do_CHL.shape[2])
    q_CHl, dq_CHl = q_CHl.contiguous(), torch.empty_like(q_CHl)
    p_CHK, ds_CHK = (q_CHl.new_empty(C, H, K) for _ in range(2))
    constants = _list_constants(H, L, key_dim, K)
    launch(
        _sparse_attention_bwd_q_kernel,
        (C, cdiv(H, HEADS)),
        *(q_CHl, keys_Nl.contiguous(), selected_CK, do_CHL, lse_CH, delta_CH),
        *(dq_CHl, p_CHK, ds_CHK, scale),
        **constants,
        BH=HEADS,
        BK=32,
        STAGES=2,
        num_warps=8,
    )
    for first, num_dims, width in ((0, L, min(256, L)), (L, key_dim - L, key_dim - L)):
        launch(
            _sparse_attention_bwd_k_kernel,
            (C, num_dims // width),
            *(q_CHl, selected_CK, do_CHL, p_CHK, ds_CHK, dkeys_Nl),
            **constants,
            FIRST=first,
            BH=max(16, next_power_of_2(H)),
            BK=64,
            BL=width,
            STAGES=2,
            num_warps=8,
        )
    return dq_CHl


def _list_constants(H: int, L: int, key_dim: int, K: int) -> dict[str, object]:
    """Return the constants that the kernels share."""
    padded = next_power_of_2(K)
    return dict(H=H, L=L, R=key_dim - L, K=K, PADDED=padded, WIDEN=INTERPRET)
