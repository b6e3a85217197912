"""Three kernels of `gathered.py` for Hopper, with equal FLOPs but more overlap or fewer bytes.

Forward loads the keys of the next tile during all products of a tile. Triton's own pipeline begins
to load a gathered tile only after the last product of the tile before. The scores' gradient has the
queries and output gradients of BH heads in shared memory, and reads each key once. The kernel of
key gradients adds the gradients of a tile to memory during the products of the next tile. The
docstring of `gathered.py` explains the letters.
"""

import torch
from torch import Tensor

from moecore.kernels.common import has_hopper_kernels
from moecore.kernels.triton_api import async_load, gl, gluon, hopper, thread_barrier

# H, L and R of DeepSeek-V3.2 and V4; others were not measured.
SHAPES = (128, 512, 64), (64, 512, 0), (128, 512, 0)


def has_hopper_gathered_kernels(q_CHl: Tensor, latent_dim: int) -> bool:
    """Whether the Hopper kernels support the queries' dtype, heads, dims and device."""
    shape = q_CHl.shape[1], latent_dim, q_CHl.shape[2] - latent_dim
    return shape in SHAPES and q_CHl.dtype == torch.bfloat16 and has_hopper_kernels(q_CHl.device)


@gluon.jit
def _begin_loading_rows(
    latents, turned, slot, rows_ptr, ids, R: gl.constexpr, layout: gl.constexpr
):
    """Start copies of rows of L + R numbers to a slot of two buffers, as one group."""
    L: gl.constexpr = latents.shape[2]
    row = rows_ptr + (ids.to(gl.int64) * (L + R))[:, None]
    dims = gl.arange(0, L, gl.SliceLayout(0, layout))[None, :]
    async_load(latents.index(slot), row + dims)
    if R > 0:
        dims = L + gl.arange(0, R, gl.SliceLayout(0, layout))[None, :]
        async_load(turned.index(slot), row + dims)
    hopper.async_copy.commit_group()


@gluon.jit
def _load_ids(selected_ptr, begin, num_keys, BK: gl.constexpr, layout: gl.constexpr):
    """Return the keys [begin, begin + BK) of a list, 0 after its end."""
    places = begin + gl.arange(0, BK, gl.SliceLayout(1, layout))
    return gl.load(selected_ptr + places, mask=places < num_keys, other=0)


@gluon.jit(do_not_specialize=["sinks_ptr"])
def sm90_sparse_attention_fwd_kernel(
    q_ptr,  # [C, H, L + R]
    keys_ptr,  # [N, L + R]
    selected_ptr,  # [C, K] int32
    sinks_ptr,  # [H], or anything without sinks
    o_ptr,  # [C, H, L]
    lse_ptr,  # [C, H] fp32
    scale,
    H: gl.constexpr,  # a multiple of BH
    L: gl.constexpr,
    R: gl.constexpr,
    K: gl.constexpr,
    LANES: gl.constexpr,  # K, as a power of two
    HAS_SINKS: gl.constexpr,
    BH: gl.constexpr,
    BK: gl.constexpr,
):
    """Write attention output, in latent dims, and log-sum-exp of one query and BH heads."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    # Few rows per thread: addresses of more rows would spill registers.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BK // 2, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, L // 2, 16])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    query = (gl.program_id(0) // (H // BH)).to(gl.int64)
    first_head = gl.program_id(0) % (H // BH) * BH
    selected_ptr += query * K
    lanes = gl.arange(0, LANES, gl.BlockedLayout([4], [32], [8], [0]))
    selected = gl.load(selected_ptr + lanes, mask=lanes < K, other=-1)
    num_keys = gl.sum((selected >= 0).to(gl.int32), 0)
    q_latent = gl.allocate_shared_memory(dtype, [1, BH, L], shared)
    k_latent = gl.allocate_shared_memory(dtype, [2, BK, L], shared)
    q_turned = gl.allocate_shared_memory(dtype, [1, BH, R], shared) if R > 0 else q_latent
    k_turned = gl.allocate_shared_memory(dtype, [2, BK, R], shared) if R > 0 else k_latent
    row_ids = query * H + first_head + gl.arange(0, BH, gl.SliceLayout(1, layout))
    _begin_loading_rows(q_latent, q_turned, 0, q_ptr, row_ids, R, layout)
    ids = _load_ids(selected_ptr, 0, num_keys, BK, layout)
    _begin_loading_rows(k_latent, k_turned, 0, keys_ptr, ids, R, layout)
    ids = _load_ids(selected_ptr, BK, num_keys, BK, layout)
    heads = first_head + gl.arange(0, BH, gl.SliceLayout(1, s_layout))
    tile = gl.arange(0, BK, gl.SliceLayout(0, s_layout))
    factor = scale * 1.4426950408889634
    high = gl.full([BH], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    sums = gl.zeros([BH, BK], gl.float32, s_layout)  # of p, before the sum over columns
    if HAS_SINKS:
        high = gl.load(sinks_ptr + heads).to(gl.float32) * 1.4426950408889634
        sums += gl.where(tile == 0, 1.0, 0.0)[None, :]
    acc = hopper.warpgroup_mma_init(gl.zeros([BH, L], gl.float32, o_layout))
    slot = 0
    for begin in range(0, num_keys, BK):
        hopper.async_copy.wait_group(0)
        hopper.fence_async_shared()
        thread_barrier()
        k, q = k_latent.index(slot), q_latent.index(0)
        s = gl.zeros([BH, BK], gl.float32, s_layout)
        s = hopper.warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
        if R > 0:
            k_T = k_turned.index(slot).permute((1, 0))
            s = hopper.warpgroup_mma(q_turned.index(0), k_T, s, is_async=True)
        acc = hopper.warpgroup_mma_wait(2 if R > 0 else 1, deps=(acc,))
        thread_barrier()  # both warp groups have read the other buffer
        if begin + BK < num_keys:
            _begin_loading_rows(k_latent, k_turned, 1 - slot, keys_ptr, ids, R, layout)
        ids = _load_ids(selected_ptr, begin + 2 * BK, num_keys, BK, layout)
        s = hopper.warpgroup_mma_wait(0, deps=(s,))
        s = gl.where((begin + tile < num_keys)[None, :], s * factor, float("-inf"))
        higher = gl.maximum(high, gl.max(s, 1))
        p = gl.exp2(s - higher[:, None])
        shrink = gl.exp2(high - higher)
        high = higher
        sums = sums * shrink[:, None] + p
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
        acc = hopper.warpgroup_mma(p, k, acc, is_async=True)
        slot = 1 - slot
    total = gl.sum(sums, 1)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    o = acc / gl.convert_layout(total, gl.SliceLayout(1, o_layout))[:, None]
    places = (row_ids * L)[:, None] + gl.arange(0, L, gl.SliceLayout(0, layout))[None, :]
    gl.store(o_ptr + places, gl.convert_layout(o.to(dtype), layout))
    gl.store(lse_ptr + query * H + heads, (high + gl.log2(total)) * 0.6931471805599453)


@gluon.jit
def _begin_loading_dims(
    ring, slot, keys_ptr, ids, first, WIDTH: gl.constexpr, layout: gl.constexpr
):
    """Start copies of the dims of keys `ids` from `first` on to a slot, as one group."""
    dims = first + gl.arange(0, ring.shape[2], gl.SliceLayout(0, layout))[None, :]
    async_load(ring.index(slot), keys_ptr + (ids.to(gl.int64) * WIDTH)[:, None] + dims)
    hopper.async_copy.commit_group()


@gluon.jit
def sm90_sparse_attention_bwd_scores_kernel(
    q_ptr,  # [C, H, L + R]
    keys_ptr,  # [N, L + R]
    selected_ptr,  # [C, K] int32
    do_ptr,  # [C, H, L]
    lse_ptr,  # [C, H] fp32
    delta_ptr,  # [C, H] fp32
    p_ptr,  # [C, H, P], 0 where a tile of BK keys has fewer
    ds_ptr,  # [C, H, P], times `scale`
    scale,
    H: gl.constexpr,  # a multiple of BH
    L: gl.constexpr,  # a multiple of BL, and so is R
    R: gl.constexpr,
    K: gl.constexpr,
    LANES: gl.constexpr,
    P: gl.constexpr,  # K, as a multiple of BK
    BH: gl.constexpr,
    BK: gl.constexpr,
    BL: gl.constexpr,  # dims of a step
    STAGES: gl.constexpr,
):
    """Write p and ds of one query and BH heads."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BK // 2, 16])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    STEPS: gl.constexpr = (L + R) // BL
    query = (gl.program_id(0) // (H // BH)).to(gl.int64)
    first_head = query * H + gl.program_id(0) % (H // BH) * BH
    selected_ptr += query * K
    lanes = gl.arange(0, LANES, gl.BlockedLayout([4], [32], [8], [0]))
    selected = gl.load(selected_ptr + lanes, mask=lanes < K, other=-1)
    num_keys = gl.sum((selected >= 0).to(gl.int32), 0)
    q = gl.allocate_shared_memory(dtype, [STEPS, BH, BL], shared)
    do = gl.allocate_shared_memory(dtype, [L // BL, BH, BL], shared)
    keys = gl.allocate_shared_memory(dtype, [STAGES, BK, BL], shared)
    row = (first_head + gl.arange(0, BH, gl.SliceLayout(1, layout)))[:, None]
    dims = gl.arange(0, BL, gl.SliceLayout(0, layout))[None, :]
    for step in gl.static_range(STEPS):
        async_load(q.index(step), q_ptr + row * (L + R) + (step * BL + dims))
        if step < L // BL:
            async_load(do.index(step), do_ptr + row * L + (step * BL + dims))
    hopper.async_copy.commit_group()
    ids = _load_ids(selected_ptr, 0, num_keys, BK, layout)
    for step in gl.static_range(STAGES - 1):
        _begin_loading_dims(keys, step, keys_ptr, ids, step * BL, L + R, layout)
    heads = first_head + gl.arange(0, BH, gl.SliceLayout(1, s_layout))
    shift = gl.load(lse_ptr + heads) * 1.4426950408889634
    delta = gl.load(delta_ptr + heads)
    factor = scale * 1.4426950408889634
    tile = gl.arange(0, BK, gl.SliceLayout(0, s_layout))
    rows = first_head + gl.arange(0, BH, gl.SliceLayout(1, out_layout))
    places = (rows * P)[:, None] + gl.arange(0, BK, gl.SliceLayout(0, out_layout))[None, :]
    slot = 0
    for begin in range(0, num_keys, BK):
        next_ids = _load_ids(selected_ptr, begin + BK, num_keys, BK, layout)
        s = gl.zeros([BH, BK], gl.float32, s_layout)
        dp = gl.zeros([BH, BK], gl.float32, s_layout)
        for step in gl.static_range(STEPS):
            hopper.async_copy.wait_group(STAGES - 2)
            if step > 0:
                s, dp = hopper.warpgroup_mma_wait(0, deps=(s, dp))
            hopper.fence_async_shared()
            thread_barrier()  # the keys are loaded, and the slot of the step before is read
            k_T = keys.index(slot).permute((1, 0))
            s = hopper.warpgroup_mma(q.index(step), k_T, s, use_acc=step > 0, is_async=True)
            if step < L // BL:
                dp = hopper.warpgroup_mma(do.index(step), k_T, dp, use_acc=step > 0, is_async=True)
            free, next_step = (slot + STAGES - 1) % STAGES, step + STAGES - 1
            if step + STAGES - 1 < STEPS:
                _begin_loading_dims(keys, free, keys_ptr, ids, next_step * BL, L + R, layout)
            else:
                next_step -= STEPS
                _begin_loading_dims(keys, free, keys_ptr, next_ids, next_step * BL, L + R, layout)
            slot = (slot + 1) % STAGES
        ids = next_ids
        s, dp = hopper.warpgroup_mma_wait(0, deps=(s, dp))
        p = gl.exp2(s * factor - shift[:, None])
        p = gl.where((begin + tile < num_keys)[None, :], p, 0.0)
        ds = p * (dp - delta[:, None]) * scale
        gl.store(p_ptr + begin + places, gl.convert_layout(p.to(dtype), out_layout))
        gl.store(ds_ptr + begin + places, gl.convert_layout(ds.to(dtype), out_layout))
    hopper.async_copy.wait_group(0)


@gluon.jit
def _begin_loading_scores(p_smem, ds_smem, p_ptr, ds_ptr, begin, H: gl.constexpr, P: gl.constexpr):
    """Start copies of p and ds of all heads and the keys of a tile, as one group."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    heads = gl.arange(0, H, gl.SliceLayout(1, layout))
    keys = begin + gl.arange(0, p_smem.shape[1], gl.SliceLayout(0, layout))
    places = (heads * P)[:, None] + keys[None, :]
    async_load(p_smem, p_ptr + places)
    async_load(ds_smem, ds_ptr + places)
    hopper.async_copy.commit_group()


@gluon.jit
def _add_to_keys(out_ptr, rows, ids, is_key, first, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Add fp32 rows to rows `ids` of a matrix of WIDTH columns, from column `first` on."""
    if LAYOUT is not None:
        rows = gl.convert_layout(rows, LAYOUT)
    dims = first + gl.arange(0, rows.shape[1], gl.SliceLayout(0, rows.type.layout))
    row_layout: gl.constexpr = gl.SliceLayout(1, rows.type.layout)
    out = out_ptr + (gl.convert_layout(ids, row_layout).to(gl.int64) * WIDTH)[:, None]
    mask = gl.convert_layout(is_key, row_layout)[:, None]
    gl.atomic_add(out + dims[None, :], rows, mask=mask, sem="relaxed")


@gluon.jit
def sm90_sparse_attention_bwd_k_kernel(
    ds_ptr,  # [C, H, P]
    q_ptr,  # [C, H, L + R]
    selected_ptr,  # [C, K] int32
    dkeys_ptr,  # [N, L + R] fp32, added to
    p_ptr,  # [C, H, P]
    do_ptr,  # [C, H, L]
    num_programs,  # of a band
    band_keys,  # entries of a list that a program reads, a multiple of BK
    H: gl.constexpr,  # a power of two
    L: gl.constexpr,
    R: gl.constexpr,
    K: gl.constexpr,
    LANES: gl.constexpr,
    P: gl.constexpr,
    PARTS: gl.constexpr,  # programs of a query
    BK: gl.constexpr,
):
    """Add to dkeys_ptr the gradients of a band of one query's keys, for 1 / PARTS of the dims."""
    LATENT: gl.constexpr = L // PARTS
    TURNED: gl.constexpr = R // PARTS
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    thin: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0])
    latent_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, LATENT // 2, 16])
    ids_layout: gl.constexpr = gl.SliceLayout(1, latent_layout)
    # Four numbers per thread, which lanes of a warp exchange from `latent_layout`.
    vector: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [0, 128]],
        [],
        [64, 256],
    )
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    first_place = gl.program_id(0) // num_programs * band_keys
    query = (gl.program_id(0) % num_programs // PARTS).to(gl.int64)
    part = gl.program_id(0) % num_programs % PARTS
    first = part * LATENT
    selected_ptr += query * K
    p_ptr += query * H * P
    ds_ptr += query * H * P
    p_smem = gl.allocate_shared_memory(dtype, [2, H, BK], shared)
    ds_smem = gl.allocate_shared_memory(dtype, [2, H, BK], shared)
    q = gl.allocate_shared_memory(dtype, [H, LATENT], shared)
    do = gl.allocate_shared_memory(dtype, [H, LATENT], shared)
    row = (query * H + gl.arange(0, H, gl.SliceLayout(1, layout)))[:, None]
    dims = first + gl.arange(0, LATENT, gl.SliceLayout(0, layout))[None, :]
    async_load(q, q_ptr + row * (L + R) + dims)
    async_load(do, do_ptr + row * L + dims)
    if R > 0:
        first_turned = L + part * TURNED
        turned_layout: gl.constexpr = gl.NVMMADistributedLayout(
            [3, 0], [4, 2], [16, TURNED // 2, 16]
        )
        dturned = gl.zeros([BK, TURNED], gl.float32, turned_layout)
        q_turned = gl.allocate_shared_memory(dtype, [H, TURNED], gl.NVMMASharedLayout(64, 16))
        row = (query * H + gl.arange(0, H, gl.SliceLayout(1, thin)))[:, None]
        dims = first_turned + gl.arange(0, TURNED, gl.SliceLayout(0, thin))[None, :]
        async_load(q_turned, q_ptr + row * (L + R) + dims)
    lanes = gl.arange(0, LANES, gl.BlockedLayout([4], [32], [8], [0]))
    selected = gl.load(selected_ptr + lanes, mask=lanes < K, other=-1)
    num_keys = gl.minimum(gl.sum((selected >= 0).to(gl.int32), 0), first_place + band_keys)
    for i in gl.static_range(2):
        begin = gl.minimum(first_place + i * BK, P - BK)
        _begin_loading_scores(p_smem.index(i), ds_smem.index(i), p_ptr, ds_ptr, begin, H, P)
    tile = gl.arange(0, BK, ids_layout)
    ids = gl.zeros([BK], gl.int32, ids_layout)  # of the tile before
    is_key = tile < 0
    dlatent = gl.zeros([BK, LATENT], gl.float32, latent_layout)
    for begin in range(first_place, num_keys, BK):
        slot = (begin - first_place) // BK % 2
        hopper.async_copy.wait_group(1)
        hopper.fence_async_shared()
        thread_barrier()
        p_buffer, ds_buffer = p_smem.index(slot), ds_smem.index(slot)
        p_T, ds_T = p_buffer.permute((1, 0)), ds_buffer.permute((1, 0))
        latent = gl.zeros([BK, LATENT], gl.float32, latent_layout)
        latent = hopper.warpgroup_mma(ds_T, q, latent, use_acc=False, is_async=True)
        latent = hopper.warpgroup_mma(p_T, do, latent, is_async=True)
        if R > 0:
            turned = gl.zeros([BK, TURNED], gl.float32, turned_layout)
            turned = hopper.warpgroup_mma(ds_T, q_turned, turned, use_acc=False, is_async=True)
            _add_to_keys(dkeys_ptr, dturned, ids, is_key, first_turned, L + R, None)
        _add_to_keys(dkeys_ptr, dlatent, ids, is_key, first, L + R, vector)
        is_key = begin + tile < num_keys
        ids = gl.load(selected_ptr + begin + tile, mask=is_key, other=0)
        if R > 0:
            dlatent, dturned = hopper.warpgroup_mma_wait(0, deps=(latent, turned))
        else:
            dlatent = hopper.warpgroup_mma_wait(0, deps=(latent,))
        thread_barrier()  # both warp groups have read the buffer
        first_key = gl.minimum(begin + 2 * BK, P - BK)  # the last tiles are read once more
        _begin_loading_scores(p_buffer, ds_buffer, p_ptr, ds_ptr, first_key, H, P)
    _add_to_keys(dkeys_ptr, dlatent, ids, is_key, first, L + R, vector)
    if R > 0:
        _add_to_keys(dkeys_ptr, dturned, ids, is_key, first_turned, L + R, None)
    hopper.async_copy.wait_group(0)
