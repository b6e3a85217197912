"""The kernels of `chunked.py` for a decay per key dim (Kimi delta attention), in its notation.

The decay between two tokens is one matrix per key dim, so P and A are sums over pairs of halves.
At level l, tokens i and j are in the later and the earlier half of a block of 2^(l+1) tokens, whose
later half begins with token m. Each pair i > j is at one level:

    P_ij = sum over k of (q_ik exp(G_ik - G_mk)) (k_jk exp(G_mk - G_jk))

No exponent is positive, so no factor overflows. Factors are rounded to the dtype of q. If keys are
nearly equal, the gradient of beta is therefore less exact than with a decay per head.
"""

from moecore.kernels.linear_attention.chunked_kernel import (
    invert,
    load_columns,
    load_rows,
    store_rows,
)
from moecore.kernels.triton_api import tl, triton


@triton.jit
def _decay_to_middle(decay_ptr, decay, start, end, i, k, stride, level):
    """Return exp(-|G_i - G_m|) of each token i and the first token m of its block's later half."""
    middle = ((i >> level) | 1) << level
    return tl.exp(-tl.abs(decay - load_rows(decay_ptr, start + middle, end, k, stride)))


@triton.jit
def _find_pairs(i, level):
    """Return which tokens i (rows) and j (columns), i > j, are the pairs of a level."""
    return (((i >> level)[:, None] ^ 1) == (i >> level)[None, :]) & (i[:, None] > i[None, :])


@triton.jit
def _load_factors(ptr, t, end, stride, scale, K: tl.constexpr, NORM: tl.constexpr):
    """Return the factors by which `normalise_rows` multiplies rows, [tokens, 1]."""
    x = load_rows(ptr, t, end, tl.arange(0, K), stride).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) + 1e-6) * scale if NORM else scale


@triton.jit(do_not_specialize=["num_chunks"])
def kda_fwd_chunks_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,  # [T, H, k]
    beta_ptr,  # [T, H]
    chunks_ptr,  # int32 [2, num_chunks]
    decayed_q_ptr,  # [T, H, k], out: exp(G) Q
    decayed_k_ptr,  # [T, H, k], out: exp(L - G) K
    decay_ptr,  # fp32 [T, H, k], out: sums of g since the chunk began
    scores_ptr,  # [T, H, CHUNK], out: P
    inverse_ptr,  # [T, H, CHUNK], out: X
    w_ptr,  # [T, H, k], out
    u_ptr,  # [T, H, v], out
    q_stride,
    k_stride,
    v_stride,
    scale,
    num_chunks,
    h: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write decayed q and k, decays, P, X, w, u (see `chunked.py`) of one chunk and value head."""
    H: tl.constexpr = h * R
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(chunks_ptr + chunk), tl.load(chunks_ptr + num_chunks + chunk)
    if start >= end:
        return
    i, v = tl.arange(0, CHUNK), tl.arange(0, V)
    t = start + i
    q_ptr += head // R * K
    k_ptr += head // R * K
    decay_ptr += head * K
    dtype = decayed_k_ptr.dtype.element_ty
    final = (tl.minimum(start + CHUNK, end) - 1).to(tl.int64) * (H * K)
    q_factors = _load_factors(q_ptr, t, end, q_stride, scale, K, NORM)
    k_factors = _load_factors(k_ptr, t, end, k_stride, 1.0, K, NORM)
    scores = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    A = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        decay = tl.cumsum(load_rows(g_ptr + head * K, t, end, k, H * K).to(tl.float32), 0)
        store_rows(decay_ptr, decay, t, end, k, H * K)
        tl.debug_barrier()  # other threads read these sums
        q = (load_rows(q_ptr, t, end, k, q_stride) * q_factors).to(dtype)
        keys = (load_rows(k_ptr, t, end, k, k_stride) * k_factors).to(dtype)
        total = tl.load(decay_ptr + final + k)
        store_rows(decayed_q_ptr + head * K, q * tl.exp(decay), t, end, k, H * K)
        store_rows(decayed_k_ptr + head * K, keys * tl.exp(total - decay), t, end, k, H * K)
        diagonal = tl.sum(q.to(tl.float32) * keys.to(tl.float32), 1)
        scores += tl.where(i[:, None] == i[None, :], diagonal[:, None], 0.0)
        for level in range(LEVELS):
            to_middle = _decay_to_middle(decay_ptr, decay, start, end, i, k, H * K, level)
            low_keys = (keys * to_middle).to(dtype)
            columns, is_pair = tl.trans(low_keys), _find_pairs(i, level)
            scores += tl.where(is_pair, tl.dot((q * to_middle).to(dtype), columns), 0.0)
            A += tl.where(is_pair, tl.dot(low_keys, columns), 0.0)
    store_rows(scores_ptr + head * CHUNK, scores, t, end, i, H * CHUNK)
    beta = tl.load(beta_ptr + t.to(tl.int64) * H + head, mask=t < end, other=0.0).to(tl.float32)
    inverse = invert(A * beta[:, None], i, LEVELS)
    store_rows(inverse_ptr + head * CHUNK, inverse, t, end, i, H * CHUNK)
    inverse = (inverse * beta[None, :]).to(dtype)
    u = tl.dot(inverse, load_rows(v_ptr + head * V, t, end, v, v_stride))
    store_rows(u_ptr + head * V, u, t, end, v, H * V)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        keys = (load_rows(k_ptr, t, end, k, k_stride) * k_factors).to(dtype)
        keys = (keys * tl.exp(load_rows(decay_ptr, t, end, k, H * K))).to(dtype)
        store_rows(w_ptr + head * K, tl.dot(inverse, keys), t, end, k, H * K)


@triton.jit(do_not_specialize=["num_chunks"])
def kda_bwd_scores_kernel(
    beta_ptr,  # [T, H]
    inverse_ptr,  # [T, H, CHUNK]
    updates_ptr,  # [T, H, v]
    do_ptr,  # [T, H, v]
    dupdates_ptr,  # [T, H, v], dN, overwritten by dY
    chunks_ptr,  # int32 [2, num_chunks]
    dscores_ptr,  # [T, H, CHUNK], out: dP
    dA_ptr,  # [T, H, CHUNK], out
    dv_ptr,  # [T, H, v], out
    num_chunks,
    h: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write dP, dA, dY and dV (see `chunked.py`) of a chunk and value head; undefined if masked."""
    H: tl.constexpr = h * R
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(chunks_ptr + chunk), tl.load(chunks_ptr + num_chunks + chunk)
    if start >= end:
        return
    i, v = tl.arange(0, CHUNK), tl.arange(0, V)
    t = start + i
    updates_vC = tl.trans(load_rows(updates_ptr + head * V, t, end, v, H * V))
    dscores = tl.dot(load_rows(do_ptr + head * V, t, end, v, H * V), updates_vC)
    store_rows(dscores_ptr + head * CHUNK, dscores, t, end, i, H * CHUNK)
    inverse = load_columns(inverse_ptr + head * CHUNK, t, end, i, H * CHUNK)
    dY = tl.dot(inverse, load_rows(dupdates_ptr + head * V, t, end, v, H * V))
    beta = tl.load(beta_ptr + t.to(tl.int64) * H + head, mask=t < end, other=0.0).to(tl.float32)
    store_rows(dv_ptr + head * V, dY * beta[:, None], t, end, v, H * V)
    dA = -tl.dot(dY.to(dupdates_ptr.dtype.element_ty), updates_vC)
    store_rows(dA_ptr + head * CHUNK, dA, t, end, i, H * CHUNK)
    tl.debug_barrier()  # other threads read dN until here
    store_rows(dupdates_ptr + head * V, dY, t, end, v, H * V)


@triton.jit(do_not_specialize=["num_chunks"])
def kda_bwd_chunks_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    beta_ptr,  # [T, H]
    decay_ptr,  # fp32 [T, H, k]
    dscores_ptr,  # [T, H, CHUNK]
    dA_ptr,  # [T, H, CHUNK]
    updates_ptr,  # [T, H, v]
    states_ptr,  # [num_chunks, H, k, v]
    do_ptr,  # [T, H, v]
    dY_ptr,  # [T, H, v]
    dstates_ptr,  # [num_chunks, H, k, v]
    chunks_ptr,  # int32 [2, num_chunks]
    dq_ptr,  # [T, H, k], out: of normed queries, before the sum over value heads
    dk_ptr,  # [T, H, k], out: of normed keys
    dg_ptr,  # [T, H, k], out
    dbeta_ptr,  # [T, H], out
    q_stride,
    k_stride,
    v_stride,
    scale,
    num_chunks,
    h: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write the gradients of one chunk's q, k, g and beta, of one value head."""
    H: tl.constexpr = h * R
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(chunks_ptr + chunk), tl.load(chunks_ptr + num_chunks + chunk)
    if start >= end:
        return
    i = tl.arange(0, CHUNK)
    t = start + i
    rows = t.to(tl.int64) * H + head
    q_ptr += head // R * K
    k_ptr += head // R * K
    decay_ptr += head * K
    v_ptr += head * V
    do_ptr += head * V
    dY_ptr += head * V
    updates_ptr += head * V
    dtype = q_ptr.dtype.element_ty
    state = (chunk.to(tl.int64) * H + head) * K * V
    final = (tl.minimum(start + CHUNK, end) - 1).to(tl.int64) * (H * K)
    q_factors = _load_factors(q_ptr, t, end, q_stride, scale, K, NORM)
    k_factors = _load_factors(k_ptr, t, end, k_stride, 1.0, K, NORM)
    beta = tl.load(beta_ptr + rows, mask=t < end, other=0.0).to(tl.float32)
    dscores = load_rows(dscores_ptr + head * CHUNK, t, end, i, H * CHUNK)
    diagonal = tl.sum(tl.where(i[:, None] == i[None, :], dscores, 0.0), 1, keep_dims=True)
    dA = load_rows(dA_ptr + head * CHUNK, t, end, i, H * CHUNK)
    dbeta = tl.zeros([CHUNK], dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        dq = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
        dk_row = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
        dk = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
        dtotal = tl.zeros([BLOCK_K], dtype=tl.float32)
        for first_v in range(0, V, BLOCK_V):
            v = first_v + tl.arange(0, BLOCK_V)
            cells = state + v[:, None] + k[None, :] * V
            state_vk, dstate_vk = tl.load(states_ptr + cells), tl.load(dstates_ptr + cells)
            dtotal += tl.sum(state_vk.to(tl.float32) * dstate_vk.to(tl.float32), 0)
            dq = tl.dot(load_rows(do_ptr, t, end, v, H * V), state_vk, acc=dq)
            dY = load_rows(dY_ptr, t, end, v, H * V)
            dk_row = tl.dot(dY, state_vk, acc=dk_row)
            dk = tl.dot(load_rows(updates_ptr, t, end, v, H * V), dstate_vk, acc=dk)
            if first == 0:
                values = load_rows(v_ptr, t, end, v, v_stride).to(tl.float32)
                dbeta += tl.sum(dY * values, 1)
        q = (load_rows(q_ptr, t, end, k, q_stride) * q_factors).to(dtype)
        keys = (load_rows(k_ptr, t, end, k, k_stride) * k_factors).to(dtype)
        decay = load_rows(decay_ptr, t, end, k, H * K)
        total = tl.load(decay_ptr + final + k)
        dk *= tl.exp(total - decay)
        dtotal = dtotal * tl.exp(total) + tl.sum(dk * keys, 0)
        dk += diagonal * q
        dk_row *= -tl.exp(decay)
        dq = dq * tl.exp(decay) + diagonal * keys
        for level in range(LEVELS):
            to_middle = _decay_to_middle(decay_ptr, decay, start, end, i, k, H * K, level)
            is_pair = _find_pairs(i, level)
            dscores_of_level = tl.where(is_pair, dscores, 0.0)
            dA_of_level = tl.where(is_pair, dA, 0.0)
            low_q, low_keys = (q * to_middle).to(dtype), (keys * to_middle).to(dtype)
            dq += tl.dot(dscores_of_level, low_keys) * to_middle
            dk_row += tl.dot(dA_of_level, low_keys) * to_middle
            of_level = tl.dot(tl.trans(dscores_of_level), low_q)
            low_keys = (keys * beta[:, None] * to_middle).to(dtype)
            dk += tl.dot(tl.trans(dA_of_level), low_keys, acc=of_level) * to_middle
        store_rows(dq_ptr + head * K, dq, t, end, k, H * K)
        ddecay = q * dq - keys * dk
        dbeta += tl.sum(keys * dk_row, 1)
        dk_row *= beta[:, None]
        store_rows(dk_ptr + head * K, dk + dk_row, t, end, k, H * K)
        dg = tl.cumsum(ddecay + keys * dk_row, 0, reverse=True) + dtotal[None, :]
        store_rows(dg_ptr + head * K, dg, t, end, k, H * K)
    tl.store(dbeta_ptr + rows, dbeta.to(dbeta_ptr.dtype.element_ty), mask=t < end)
