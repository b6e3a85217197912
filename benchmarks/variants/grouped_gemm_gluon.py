"""Candidates: grouped products with loading warps of their own. Not used by src.

Columns of 128: two warp groups take turns (ping-pong). Columns of 256: eight warps on every tile.

In turns, one group multiplies while the other one stores, so that an epilogue, however heavy, hides
behind the next tile's product: EPI 0 stores [R, N]; 1 is FC1 with the activation in the epilogue; 2
is FC2's input gradient with the activation's backward in it, which then needs no pass of its own.
Four more warps fill a ring of stages, gathering rows where asked. It compiles, but has not run on a
GPU. `bench_variants.py` checks and times it beside what src uses.

Letters as in `moecore/kernels/grouped_gemm.py`; N is F for EPI 1 and 2.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moecore.kernels.common import async_load, thread_barrier, tma_load


@triton.jit
def tile_map_kernel(
    offsets_ptr, map_ptr, E, E_POW2: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr
):
    idx = tl.arange(0, E_POW2)
    ends = tl.load(offsets_ptr + idx, mask=idx < E, other=0)
    starts = tl.load(offsets_ptr + idx - 1, mask=(idx < E) & (idx > 0), other=0)
    tiles = tl.where(idx < E, (ends - starts + BM - 1) // BM, 0)
    e = tl.program_id(0)
    num = tl.sum(tl.where(idx == e, tiles, 0), 0)
    first = tl.sum(tl.where(idx < e, tiles, 0), 0)
    start = tl.sum(tl.where(idx == e, starts, 0), 0)
    end = tl.sum(tl.where(idx == e, ends, 0), 0)
    for i in range(0, num, BLOCK):
        j = i + tl.arange(0, BLOCK)
        at = map_ptr + 4 + (first + j) * 4
        tl.store(at, e + j * 0, mask=j < num)
        tl.store(at + 1, start + j * BM, mask=j < num)
        tl.store(at + 2, end + j * 0, mask=j < num)
    if e == 0:
        tl.store(map_ptr, tl.sum(tiles, 0))


def tile_map(offsets, R, BM):
    E = offsets.numel()
    m = torch.empty(4 + 4 * (triton.cdiv(R, BM) + E), device=offsets.device, dtype=torch.int32)
    tile_map_kernel[(E,)](offsets, m, E, triton.next_power_of_2(E), BM, 32)
    return m


@gluon.jit
def find(tile, total, num_n, map_ptr, GROUP_M: gl.constexpr):
    width = GROUP_M * num_n
    group = tile // width
    first = group * GROUP_M
    size = gl.minimum(total - first, GROUP_M)
    inside = tile - group * width
    at = map_ptr + 4 + (first + inside % size) * 4
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), inside // size


@gluon.jit
def mg_producer(
    a_ptr,
    a_desc,
    b_desc,
    ids_ptr,
    map_ptr,
    a_smem,
    b_smem,
    full,
    empty,
    K,
    N,
    lda,
    total,
    num_n,
    GATHER: gl.constexpr,
    B_NK: gl.constexpr,
    EPI: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN_K: gl.constexpr,
):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ar = gl.arange(0, BM, gl.SliceLayout(1, layout))
    ak = gl.arange(0, BK, gl.SliceLayout(0, layout))
    BNE: gl.constexpr = BN // 2 if EPI == 1 else BN
    B_BYTES: gl.constexpr = BN * BK * 2
    BYTES: gl.constexpr = B_BYTES if GATHER else B_BYTES + BM * BK * 2
    num_k = (K + BK - 1) // BK
    it = 0
    for tile in range(gl.program_id(0), total * num_n, gl.num_programs(0)):
        e, row, end, n = find(tile, total, num_n, map_ptr, GROUP_M)
        col = n * BNE
        if GATHER:
            ok = row + ar < end
            src = gl.load(ids_ptr + row + ar, mask=ok, other=0)
            ptrs = a_ptr + (src.to(gl.int64) * lda)[:, None] + ak[None, :]
        for ki in range(num_k):
            stage = it % STAGES
            phase = (it // STAGES) & 1
            k = ki * BK
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(bar, BYTES)
            b = b_smem.index(stage)
            if EPI == 1:
                tma_load(b_desc, [e * 2 * N + col, k], bar, b.slice(0, BNE, 0))
                tma_load(b_desc, [e * 2 * N + N + col, k], bar, b.slice(BNE, BNE, 0))
            elif B_NK:
                tma_load(b_desc, [e * N + col, k], bar, b)
            else:
                tma_load(b_desc, [e * K + k, col], bar, b)
            if GATHER:
                if EVEN_K:
                    async_load(a_smem.index(stage), ptrs + k, ok[:, None] & (ak < BK)[None, :])
                else:
                    async_load(a_smem.index(stage), ptrs + k, ok[:, None] & (k + ak < K)[None, :])
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                tma_load(a_desc, [row, k], bar, a_smem.index(stage))
            it += 1


@gluon.jit
def store_rows(ptr, ld, x, row, end, col, N):
    """Write x [BM, W] to ptr[row:, col:], 16 bytes a thread and access."""
    W: gl.constexpr = x.shape[1]
    TPR: gl.constexpr = W // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // TPR, TPR], [gl.num_warps(), 1], [1, 0])
    x = gl.convert_layout(x, layout)
    r = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    c = col + gl.arange(0, W, gl.SliceLayout(0, layout))
    gl.store(
        ptr + (r.to(gl.int64) * ld)[:, None] + c[None, :],
        x,
        mask=(r < end)[:, None] & (c < N)[None, :],
    )


@gluon.jit
def halves(x):
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def bwd_chunk(da, w, h_ptr, dh_ptr, a_ptr, row, end, col, N):
    W: gl.constexpr = da.shape[1]
    BM: gl.constexpr = da.shape[0]
    layout: gl.constexpr = da.type.layout
    r = row + gl.arange(0, BM, gl.SliceLayout(1, layout))
    c = col + gl.arange(0, W, gl.SliceLayout(0, layout))
    ok = (r < end)[:, None] & (c < N)[None, :]
    at = (r.to(gl.int64) * (2 * N))[:, None] + c[None, :]
    g = gl.load(h_ptr + at, mask=ok, other=0.0).to(gl.float32)
    u = gl.load(h_ptr + at + N, mask=ok, other=0.0).to(gl.float32)
    da = da.to(gl.float32)
    wd = w[:, None]
    s = 1.0 / (1.0 + gl.exp(-g))
    gs = g * s
    act = gs * u
    dw = gl.sum(da * act, 1)
    gl.store(
        a_ptr + (r.to(gl.int64) * N)[:, None] + c[None, :],
        (act * wd).to(a_ptr.dtype.element_ty),
        mask=ok,
    )
    d = da * wd
    gl.store(dh_ptr + at, (d * u * (s + gs * (1 - s))).to(a_ptr.dtype.element_ty), mask=ok)
    gl.store(dh_ptr + at + N, (d * gs).to(a_ptr.dtype.element_ty), mask=ok)
    return dw


@gluon.jit
def mg_consumer(
    map_ptr,
    a_smem,
    b_smem,
    full,
    empty,
    turn,
    da_smem,
    w_ptr,
    h_ptr,
    out_ptr,
    out2_ptr,
    part_ptr,
    R,
    K,
    N,
    total,
    num_n,
    WG: gl.constexpr,
    B_NK: gl.constexpr,
    EPI: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BN, 16]
    )
    BNE: gl.constexpr = BN // 2 if EPI == 1 else BN
    num_k = (K + BK - 1) // BK
    # WG 0 and 1 take turns; WG 2 is one consumer of eight warps that has every tile.
    TURNS: gl.constexpr = 2 if WG < 2 else 1
    OFFSET: gl.constexpr = WG if WG < 2 else 0
    it = OFFSET * num_k
    parity = 1 - OFFSET
    for tile in range(
        gl.program_id(0) + OFFSET * gl.num_programs(0),
        total * num_n,
        TURNS * gl.num_programs(0),
    ):
        _, row, end, n = find(tile, total, num_n, map_ptr, GROUP_M)
        col = n * BNE
        acc = gl.zeros((BM, BN), gl.float32, mma)
        # Not before the other group has read its last stage: a barrier tells even phases from odd
        # ones only, so a group that waits too early takes the other's data for its own.
        if WG < 2:
            mbarrier.wait(turn.index(OFFSET), parity)
            parity = 1 - parity
        for ki in range(num_k):
            stage = it % STAGES
            phase = (it // STAGES) & 1
            mbarrier.wait(full.index(stage), phase)
            fence_async_shared()
            b = b_smem.index(stage)
            if B_NK:
                b = b.permute((1, 0))
            acc = warpgroup_mma(a_smem.index(stage), b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            if WG == 2:
                thread_barrier()  # two warp groups: both have read the stage before this one
            mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1, pred=ki > 0)
            it += 1
        if WG < 2:
            mbarrier.arrive(turn.index(1 - OFFSET), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if WG == 2:
            thread_barrier()
        mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
        it += (TURNS - 1) * num_k
        dtype: gl.constexpr = out_ptr.dtype.element_ty
        if EPI == 0:
            c0, c1 = halves(acc.to(dtype))
            store_rows(out_ptr, N, c0, row, end, col, N)
            store_rows(out_ptr, N, c1, row, end, col + BN // 2, N)
        elif EPI == 1:
            g, u = halves(acc)
            rl: gl.constexpr = gl.SliceLayout(1, g.type.layout)
            r = row + gl.arange(0, BM, rl)
            w = gl.load(w_ptr + r, mask=r < end, other=0.0)
            g16 = g.to(dtype)
            u16 = u.to(dtype)
            store_rows(out_ptr, 2 * N, g16, row, end, col, N)
            store_rows(out_ptr + N, 2 * N, u16, row, end, col, N)
            g = g16.to(gl.float32)
            a = g / (1.0 + gl.exp(-g)) * u16.to(gl.float32) * w[:, None]
            store_rows(out2_ptr, N, a.to(dtype), row, end, col, N)
        else:
            wl: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
            r = row + gl.arange(0, BM, wl)
            w = gl.load(w_ptr + r, mask=r < end, other=0.0)
            c0, c1 = halves(acc.to(dtype))
            c00, c01 = halves(c0)
            c10, c11 = halves(c1)
            # Through shared memory, so that a loop with few registers can take the quarters.
            da_smem.index(0).store(c00)
            da_smem.index(1).store(c01)
            da_smem.index(2).store(c10)
            da_smem.index(3).store(c11)
            Q: gl.constexpr = BN // 4
            layout: gl.constexpr = gl.BlockedLayout(
                [1, 8], [256 // Q, Q // 8], [gl.num_warps(), 1], [1, 0]
            )
            dw = gl.zeros((BM,), gl.float32, gl.SliceLayout(1, layout))
            w = gl.convert_layout(w, gl.SliceLayout(1, layout))
            for q in range(4):
                da = da_smem.index(q).load(layout)
                dw += bwd_chunk(da, w, h_ptr, out_ptr, out2_ptr, row, end, col + q * Q, N)
            dw = gl.convert_layout(dw, wl)
            gl.store(part_ptr + n.to(gl.int64) * R + r, dw, mask=r < end)


@gluon.jit
def mg_kernel(
    a_ptr,
    a_desc,
    b_desc,
    ids_ptr,
    map_ptr,
    w_ptr,
    h_ptr,
    out_ptr,
    out2_ptr,
    part_ptr,
    R,
    K,
    N,
    lda,
    GATHER: gl.constexpr,
    B_NK: gl.constexpr,
    EPI: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN_K: gl.constexpr,
    CREGS: gl.constexpr,
    PREGS: gl.constexpr,
):
    dtype: gl.constexpr = b_desc.dtype
    a_smem = gl.allocate_shared_memory(dtype, [STAGES, BM, BK], a_desc.layout)
    if B_NK:
        b_smem = gl.allocate_shared_memory(dtype, [STAGES, BN, BK], b_desc.layout)
    else:
        b_smem = gl.allocate_shared_memory(dtype, [STAGES, BK, BN], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129 if GATHER else 1)
        mbarrier.init(empty.index(i), count=1)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turn.index(0), count=1)
    mbarrier.init(turn.index(1), count=1)
    BNE: gl.constexpr = BN // 2 if EPI == 1 else BN
    num_n = (N + BNE - 1) // BNE
    total = gl.load(map_ptr)
    staged: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    ROWS: gl.constexpr = BM if EPI == 2 else 8
    da0 = gl.allocate_shared_memory(dtype, [4, ROWS, BN // 4], staged)
    ROWS1: gl.constexpr = ROWS if gl.num_warps() == 4 else 8
    da1 = gl.allocate_shared_memory(dtype, [4, ROWS1, BN // 4], staged)
    if gl.num_warps() == 8:
        gl.warp_specialize(
            [
                (
                    mg_consumer,
                    (
                        map_ptr,
                        a_smem,
                        b_smem,
                        full,
                        empty,
                        turn,
                        da0,
                        w_ptr,
                        h_ptr,
                        out_ptr,
                        out2_ptr,
                        part_ptr,
                        R,
                        K,
                        N,
                        total,
                        num_n,
                        2,
                        B_NK,
                        EPI,
                        BM,
                        BN,
                        BK,
                        GROUP_M,
                        STAGES,
                    ),
                ),
                (
                    mg_producer,
                    (
                        a_ptr,
                        a_desc,
                        b_desc,
                        ids_ptr,
                        map_ptr,
                        a_smem,
                        b_smem,
                        full,
                        empty,
                        K,
                        N,
                        lda,
                        total,
                        num_n,
                        GATHER,
                        B_NK,
                        EPI,
                        BM,
                        BN,
                        BK,
                        GROUP_M,
                        STAGES,
                        EVEN_K,
                    ),
                ),
            ],
            [4],
            [PREGS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    mg_consumer,
                    (
                        map_ptr,
                        a_smem,
                        b_smem,
                        full,
                        empty,
                        turn,
                        da0,
                        w_ptr,
                        h_ptr,
                        out_ptr,
                        out2_ptr,
                        part_ptr,
                        R,
                        K,
                        N,
                        total,
                        num_n,
                        0,
                        B_NK,
                        EPI,
                        BM,
                        BN,
                        BK,
                        GROUP_M,
                        STAGES,
                    ),
                ),
                (
                    mg_consumer,
                    (
                        map_ptr,
                        a_smem,
                        b_smem,
                        full,
                        empty,
                        turn,
                        da1,
                        w_ptr,
                        h_ptr,
                        out_ptr,
                        out2_ptr,
                        part_ptr,
                        R,
                        K,
                        N,
                        total,
                        num_n,
                        1,
                        B_NK,
                        EPI,
                        BM,
                        BN,
                        BK,
                        GROUP_M,
                        STAGES,
                    ),
                ),
                (
                    mg_producer,
                    (
                        a_ptr,
                        a_desc,
                        b_desc,
                        ids_ptr,
                        map_ptr,
                        a_smem,
                        b_smem,
                        full,
                        empty,
                        K,
                        N,
                        lda,
                        total,
                        num_n,
                        GATHER,
                        B_NK,
                        EPI,
                        BM,
                        BN,
                        BK,
                        GROUP_M,
                        STAGES,
                        EVEN_K,
                    ),
                ),
            ],
            [4, 4],
            [CREGS, PREGS],
        )


def gdesc(t, block):
    layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), list(block), layout)


def launch_arguments(a, b, ids, R, tmap, *, gather, b_nk, epi, w=None, h=None, cfg):
    BM, BN, BK, GM, ST, cregs, pregs = cfg
    K = a.shape[1]
    N = b.shape[1] // (2 if epi == 1 else 1) if b_nk else b.shape[2]
    bn = BN // 2 if epi == 1 else BN
    b_desc = gdesc(b.flatten(0, 1), [bn, BK] if b_nk else [BK, bn])
    out2 = part = a
    if epi == 0:
        res = out = torch.empty(R, N, device=a.device, dtype=a.dtype)
    else:
        out = torch.empty(R, 2 * N, device=a.device, dtype=a.dtype)
        out2 = torch.empty(R, N, device=a.device, dtype=a.dtype)
        res = (out, out2)
    if epi == 2:
        part = torch.empty(triton.cdiv(N, BN), R, device=a.device, dtype=torch.float32)
        res = (out, out2, part)
    return res, (
        a,
        gdesc(a, [BM, BK]),
        b_desc,
        ids,
        tmap,
        a if w is None else w,
        a if h is None else h,
        out,
        out2,
        part,
        R,
        K,
        N,
        a.stride(0),
        gather,
        b_nk,
        epi,
        BM,
        BN,
        BK,
        GM,
        ST,
        K % BK == 0,
        cregs,
        pregs,
    )


def pingpong(*args, cfg, **kw):
    result, arguments = launch_arguments(*args, cfg=cfg, **kw)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    mg_kernel[(sms,)](*arguments, num_warps=4 if cfg[0] * cfg[1] <= 128 * 128 else 8)
    return result
