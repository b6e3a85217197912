"""The kernels of `chunked.py` that compute one chunk in one program, with its letters.

`chunks_ptr` has each chunk's first token, then each chunk's end of document; a chunk without tokens
has a first token at or after this end. Tokens after a document have zeros for q, k, v, g and beta.
With PER_DIM, h is H, decays are [T, H, k], and queries and keys are multiplied by decays already.
"""

from moecore.kernels.triton_api import tl, triton


@triton.jit
def load_rows(ptr, tokens, end, columns, stride):
    """Return rows `tokens` and `columns` of a matrix [T, stride]; rows from `end` on are zero."""
    cells = tokens.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(ptr + cells, mask=(tokens < end)[:, None], other=0.0)


@triton.jit
def load_columns(ptr, tokens, end, columns, stride):
    """Return the transpose of `load_rows`, loaded in transposed order."""
    cells = tokens.to(tl.int64)[None, :] * stride + columns[:, None]
    return tl.load(ptr + cells, mask=(tokens < end)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, x, tokens, end, columns, stride):
    """Store x at the addresses from which `load_rows` loads."""
    cells = tokens.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(ptr + cells, x.to(ptr.dtype.element_ty), mask=(tokens < end)[:, None])


@triton.jit
def normalise_rows(ptr, tokens, end, columns, stride, scale, NORM: tl.constexpr):
    """Return `load_rows` times `scale`; if NORM, each row is divided by its L2 norm."""
    x = load_rows(ptr, tokens, end, columns, stride).to(tl.float32)
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) + 1e-6)
    return (x * scale).to(ptr.dtype.element_ty)


@triton.jit
def invert(A, i, LEVELS: tl.constexpr):
    """Return (I + A)^-1 for a strictly lower A [2^LEVELS, 2^LEVELS], from its diagonal blocks.

    The inverse of [[X, 0], [B, Y]] is [[x, 0], [-y B x, y]] with x = X^-1 and y = Y^-1.
    """
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    inverse -= tl.where((i >> 1)[:, None] == (i >> 1)[None, :], A, 0.0)
    for level in range(1, LEVELS):
        is_joined = (i >> (level + 1))[:, None] == (i >> (level + 1))[None, :]
        is_joined &= (i >> level)[:, None] != (i >> level)[None, :]
        product = tl.dot(tl.where(is_joined, A, 0.0), inverse, input_precision="tf32")
        inverse -= tl.dot(inverse, product, input_precision="tf32")
    return inverse


@triton.jit(do_not_specialize=["num_chunks"])
def delta_rule_fwd_chunks_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,  # [T, H]
    beta_ptr,  # [T, H]
    chunks_ptr,  # int32 [2, num_chunks]
    normed_q_ptr,  # [T, h, k], out
    normed_k_ptr,  # [T, h, k], out
    decay_ptr,  # fp32 [T, H], out: sums of g since the chunk began
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
    HAS_BETA: tl.constexpr,
):
    """Write normed q and k, decays, P, X, w, u (see `chunked.py`) of one chunk and value head."""
    H: tl.constexpr = h * R
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(chunks_ptr + chunk), tl.load(chunks_ptr + num_chunks + chunk)
    if start >= end:
        return
    i, k, v = tl.arange(0, CHUNK), tl.arange(0, K), tl.arange(0, V)
    t, key_head = start + i, head // R
    rows = t.to(tl.int64) * H + head
    dtype = normed_k_ptr.dtype.element_ty
    decay = tl.cumsum(tl.load(g_ptr + rows, mask=t < end, other=0.0).to(tl.float32), 0)
    tl.store(decay_ptr + rows, decay, mask=t < end)
    is_past = i[:, None] >= i[None, :]
    between = tl.exp(tl.where(is_past, decay[:, None] - decay[None, :], float("-inf")))
    keys = normalise_rows(k_ptr + key_head * K, t, end, k, k_stride, 1.0, NORM)
    q = normalise_rows(q_ptr + key_head * K, t, end, k, q_stride, scale, NORM)
    if head % R == 0:
        store_rows(normed_q_ptr + key_head * K, q, t, end, k, h * K)
        store_rows(normed_k_ptr + key_head * K, keys, t, end, k, h * K)
    keys_kC = tl.trans(keys)
    scores = tl.dot(q, keys_kC) * between
    store_rows(scores_ptr + head * CHUNK, scores, t, end, i, H * CHUNK)
    if HAS_BETA:
        beta = tl.load(beta_ptr + rows, mask=t < end, other=0.0).to(tl.float32)
        A = tl.dot(keys, keys_kC) * between * beta[:, None]
        inverse = invert(tl.where(i[:, None] > i[None, :], A, 0.0), i, LEVELS)
        store_rows(inverse_ptr + head * CHUNK, inverse, t, end, i, H * CHUNK)
        inverse *= beta[None, :]
        u = tl.dot(inverse.to(dtype), load_rows(v_ptr + head * V, t, end, v, v_stride))
        store_rows(u_ptr + head * V, u, t, end, v, H * V)
        w = tl.dot((inverse * tl.exp(decay)[None, :]).to(dtype), keys)
        store_rows(w_ptr + head * K, w, t, end, k, H * K)


@triton.jit(do_not_specialize=["num_chunks"])
def delta_rule_fwd_outputs_kernel(
    q_ptr,  # [T, h, k], normed
    scores_ptr,  # [T, H, CHUNK]
    updates_ptr,  # [T, H, v]
    decay_ptr,  # fp32 [T, H]
    states_ptr,  # [num_chunks, H, k, v]
    chunks_ptr,  # int32 [2, num_chunks]
    o_ptr,  # [T, H, v], out
    updates_stride,
    num_chunks,
    h: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    PER_DIM: tl.constexpr,
):
    """Write the outputs of one chunk and value head."""
    H: tl.constexpr = h * R
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(chunks_ptr + chunk), tl.load(chunks_ptr + num_chunks + chunk)
    if start >= end:
        return
    i, k, v = tl.arange(0, CHUNK), tl.arange(0, K), tl.arange(0, V)
    t = start + i
    states_ptr += (chunk.to(tl.int64) * H + head) * K * V
    q = load_rows(q_ptr + head // R * K, t, end, k, h * K)
    o = tl.dot(q, tl.load(states_ptr + k[:, None] * V + v[None, :]))
    if not PER_DIM:
        o *= tl.exp(tl.load(decay_ptr + t.to(tl.int64) * H + head, mask=t < end))[:, None]
    scores = load_rows(scores_ptr + head * CHUNK, t, end, i, H * CHUNK)
    o += tl.dot(scores, load_rows(updates_ptr + head * V, t, end, v, updates_stride))
    store_rows(o_ptr + head * V, o, t, end, v, H * V)


@triton.jit(do_not_specialize=["num_chunks"])
def delta_rule_bwd_chunks_kernel(
    q_ptr,  # [T, h, k], normed
    k_ptr,  # [T, h, k], normed
    v_ptr,
    beta_ptr,  # [T, H]
    decay_ptr,  # fp32 [T, H]
    inverse_ptr,  # [T, H, CHUNK]
    updates_ptr,  # [T, H, v]
    states_ptr,  # [num_chunks, H, k, v]
    do_ptr,  # [T, H, v]
    dupdates_ptr,  # [T, H, v]
    dstates_ptr,  # [num_chunks, H, k, v]
    chunks_ptr,  # int32 [2, num_chunks]
    dq_ptr,  # [T, H, k], out: of normed queries, before the sum over value heads
    dk_ptr,  # [T, H, k], out: of normed keys
    dv_ptr,  # [T, H, v], out if HAS_BETA
    dg_ptr,  # [T, H], out
    dbeta_ptr,  # [T, H], out
    v_stride,
    updates_stride,
    num_chunks,
    h: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_BETA: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the gradients of one chunk's inputs, of one value head."""
    H: tl.constexpr = h * R
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(chunks_ptr + chunk), tl.load(chunks_ptr + num_chunks + chunk)
    if start >= end:
        return
    i, v = tl.arange(0, CHUNK), tl.arange(0, V)
    t = start + i
    rows = t.to(tl.int64) * H + head
    state = (chunk.to(tl.int64) * H + head) * K * V
    dtype = k_ptr.dtype.element_ty
    total = tl.load(decay_ptr + (tl.minimum(start + CHUNK, end) - 1).to(tl.int64) * H + head)
    products = tl.zeros([PART], dtype=tl.float32)
    for first in range(0, K * V, PART):
        cells = state + first + tl.arange(0, PART)
        dstate = tl.load(dstates_ptr + cells).to(tl.float32)
        products += tl.load(states_ptr + cells).to(tl.float32) * dstate
    dtotal = tl.exp(total) * tl.sum(products)
    decay = tl.load(decay_ptr + rows, mask=t < end, other=0.0)
    is_past = (i[:, None] >= i[None, :]) & (t < end)[:, None]
    between = tl.exp(tl.where(is_past, decay[:, None] - decay[None, :], float("-inf")))
    until_last = tl.exp(tl.where(t < end, total - decay, 0.0))
    updates = load_rows(updates_ptr + head * V, t, end, v, updates_stride)
    do = load_rows(do_ptr + head * V, t, end, v, H * V)
    dscores = (tl.dot(do, tl.trans(updates)) * between).to(dtype)
    since_first = tl.exp(decay)
    ddecay = tl.zeros([CHUNK], dtype=tl.float32)
    if HAS_BETA:
        beta = tl.load(beta_ptr + rows, mask=t < end, other=0.0).to(tl.float32)
        inverse = load_columns(inverse_ptr + head * CHUNK, t, end, i, H * CHUNK)
        dY = tl.dot(inverse, load_rows(dupdates_ptr + head * V, t, end, v, H * V))
        store_rows(dv_ptr + head * V, dY * beta[:, None], t, end, v, H * V)
        values = load_rows(v_ptr + head * V, t, end, v, v_stride)
        dbeta = tl.sum(dY * values.to(tl.float32), 1)
        dA = tl.dot(dY.to(dtype), tl.trans(updates)) * between
        dA = tl.where(i[:, None] > i[None, :], -dA, 0.0)
        beta_dA = (dA * beta[:, None]).to(dtype)
        dA, dY = dA.to(dtype), dY.to(dtype)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        q = load_rows(q_ptr + head // R * K, t, end, k, h * K)
        keys = load_rows(k_ptr + head // R * K, t, end, k, h * K)
        cells = state + v[:, None] + k[None, :] * V
        state_vk = tl.load(states_ptr + cells)
        dq = tl.dot(do, state_vk) * since_first[:, None]
        dq = tl.dot(dscores, keys, acc=dq)
        ddecay += tl.sum(q.to(tl.float32) * dq, 1)
        store_rows(dq_ptr + head * K, dq, t, end, k, H * K)
        dk = tl.dot(updates, tl.load(dstates_ptr + cells)) * until_last[:, None]
        dtotal += tl.sum(dk * keys.to(tl.float32))
        dk = tl.dot(tl.trans(dscores), q, acc=dk)
        if HAS_BETA:
            dk = tl.dot(tl.trans(beta_dA), keys, acc=dk)
        ddecay -= tl.sum(keys.to(tl.float32) * dk, 1)
        if HAS_BETA:
            dk_row = tl.dot(dY, state_vk) * -since_first[:, None]
            dk_row = tl.dot(dA, keys, acc=dk_row)
            of_row = tl.sum(keys.to(tl.float32) * dk_row, 1)
            dbeta += of_row
            ddecay += beta * of_row
            dk += dk_row * beta[:, None]
        store_rows(dk_ptr + head * K, dk, t, end, k, H * K)
    if HAS_BETA:
        tl.store(dbeta_ptr + rows, dbeta.to(dbeta_ptr.dtype.element_ty), mask=t < end)
    dg = tl.cumsum(ddecay, 0, reverse=True) + dtotal
    tl.store(dg_ptr + rows, dg.to(dg_ptr.dtype.element_ty), mask=t < end)


@triton.jit(do_not_specialize=["num_tokens"])
def delta_rule_bwd_norm_kernel(
    x_ptr,  # queries or keys
    dnormed_ptr,  # [T, H, k]
    dx_ptr,  # [T, h, k], out
    stride,
    scale,
    num_tokens,
    h: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    NORM: tl.constexpr,
):
    """Sum gradients over the R value heads of a key head; backpropagate through norm and scale."""
    head, k = tl.program_id(1), tl.arange(0, K)
    t = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    dx = tl.zeros([CHUNK, K], dtype=tl.float32)
    for r in range(R):
        dx += load_rows(dnormed_ptr + (head * R + r) * K, t, num_tokens, k, h * R * K)
    if NORM:
        x = load_rows(x_ptr + head * K, t, num_tokens, k, stride).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) + 1e-6)
        x *= rstd
        dx = rstd * (dx - x * tl.sum(x * dx, 1, keep_dims=True))
    store_rows(dx_ptr + head * K, dx * scale, t, num_tokens, k, h * K)
