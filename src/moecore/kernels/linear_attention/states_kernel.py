"""The kernels of `chunked.py` that scan the chunks of documents, with its letters.

They compute the state before each chunk, and in reverse the gradient of the state after each chunk.
A document is one program per value head and BLOCK_V columns, because columns are independent.
"""

from moecore.kernels.linear_attention.chunked_kernel import load_columns, load_rows, store_rows
from moecore.kernels.triton_api import tl, triton


@triton.jit
def delta_rule_fwd_states_kernel(
    k_ptr,  # [T, h, k], normed
    w_ptr,  # [T, H, k]
    u_ptr,  # [T, H, v], or the values if HAS_BETA is False
    decay_ptr,  # fp32 [T, H]
    cu_seqlens_ptr,  # int [n + 1]
    first_chunks_ptr,  # int32 [n + 1]
    initial_ptr,  # fp32 [n, H, k, v]
    states_ptr,  # [num_chunks, H, k, v], out: S, before each chunk
    updates_ptr,  # [T, H, v], out if HAS_BETA: N
    last_ptr,  # fp32 [n, H, k, v + MAP_COLUMNS], out
    u_stride,
    h: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_BETA: tl.constexpr,
    PER_DIM: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    MAP_COLUMNS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Scan a document's chunks: compute BLOCK_V columns of the state of one value head.

    With MAP_COLUMNS, `last` has L and M of `contract.py`, and the kernel writes no other output. M
    has k columns, or one if HAS_BETA is False.
    """
    H: tl.constexpr = h * R
    WIDTH: tl.constexpr = V + MAP_COLUMNS
    document, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    i, k = tl.arange(0, CHUNK), tl.arange(0, K)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    cells = k[:, None] * WIDTH + v[None, :]
    dtype = k_ptr.dtype.element_ty
    k_ptr += head // R * K
    start, end = tl.load(cu_seqlens_ptr + document), tl.load(cu_seqlens_ptr + document + 1)
    first, last = tl.load(first_chunks_ptr + document), tl.load(first_chunks_ptr + document + 1)
    state = tl.zeros([K, BLOCK_V], dtype=tl.float32)
    factors, u_end = tl.zeros([K], dtype=tl.float32), end
    if MAP_COLUMNS:
        state = tl.where(k[:, None] + V == v[None, :], 1.0, 0.0)
        u_end = tl.where(tl.program_id(1) * BLOCK_V < V, end, start)  # the matrix has no values
    if HAS_INITIAL:
        state = tl.load(initial_ptr + (document * H + head) * K * V + cells)
    for step in range(last - first):
        chunk = first.to(tl.int64) + step
        t = start + step * CHUNK + i
        low = state.to(dtype)
        if not MAP_COLUMNS:
            tl.store(states_ptr + (chunk * H + head) * K * V + cells, low)
        updates = load_rows(u_ptr + head * V, t, u_end, v, u_stride).to(tl.float32)
        if HAS_BETA:
            updates -= tl.dot(load_rows(w_ptr + head * K, t, end, k, H * K), low)
            if not MAP_COLUMNS:
                store_rows(updates_ptr + head * V, updates, t, end, v, H * V)
        final = tl.minimum(start + (step + 1) * CHUNK, end) - 1
        if PER_DIM:
            total = tl.load(decay_ptr + (final.to(tl.int64) * H + head) * K + k)[:, None]
        else:
            total = tl.load(decay_ptr + final.to(tl.int64) * H + head)
            decay = tl.load(decay_ptr + t.to(tl.int64) * H + head, mask=t < end, other=0.0)
            updates *= tl.exp(tl.where(t < end, total - decay, 0.0))[:, None]
        keys = load_columns(k_ptr, t, end, k, h * K)
        state = state * tl.exp(total) + tl.dot(keys, updates.to(dtype))
        if MAP_COLUMNS == 1:
            factors += total
    last_ptr += (document * H + head) * K * WIDTH
    tl.store(last_ptr + cells, state)
    if MAP_COLUMNS == 1 and tl.program_id(1) == 0:
        tl.store(last_ptr + k * WIDTH + V, tl.exp(factors))


@triton.jit
def delta_rule_bwd_states_kernel(
    q_ptr,  # [T, h, k], normed
    k_ptr,  # [T, h, k], normed
    w_ptr,  # [T, H, k]
    scores_ptr,  # [T, H, CHUNK]
    decay_ptr,  # fp32 [T, H]
    do_ptr,  # [T, H, v]
    cu_seqlens_ptr,  # int [n + 1]
    first_chunks_ptr,  # int32 [n + 1]
    dlast_ptr,  # fp32 [n, H, k, v]
    dstates_ptr,  # [num_chunks, H, k, v], out: dS', gradients of the states after each chunk
    dupdates_ptr,  # [T, H, v], out: dN
    dinitial_ptr,  # fp32 [n, H, k, v], out
    h: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_BETA: tl.constexpr,
    PER_DIM: tl.constexpr,
    IS_TRANSITION: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Scan a document's chunks in reverse: compute gradients of BLOCK_V columns of the state.

    If IS_TRANSITION, the gradient of the last state is zero, and only `dinitial` is written.
    """
    H: tl.constexpr = h * R
    document, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    i, k = tl.arange(0, CHUNK), tl.arange(0, K)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    cells = k[:, None] * V + v[None, :]
    dtype = k_ptr.dtype.element_ty
    k_ptr += head // R * K
    q_ptr += head // R * K
    start, end = tl.load(cu_seqlens_ptr + document), tl.load(cu_seqlens_ptr + document + 1)
    first, last = tl.load(first_chunks_ptr + document), tl.load(first_chunks_ptr + document + 1)
    dstate = tl.zeros([K, BLOCK_V], dtype=tl.float32)
    if not IS_TRANSITION:
        dstate = tl.load(dlast_ptr + (document * H + head) * K * V + cells)
    for step in range(last - first):
        from_first = last - first - 1 - step
        chunk = first.to(tl.int64) + from_first
        t = start + from_first * CHUNK + i
        low = dstate.to(dtype)
        if not IS_TRANSITION:
            tl.store(dstates_ptr + (chunk * H + head) * K * V + cells, low)
        final = tl.minimum(start + (from_first + 1) * CHUNK, end) - 1
        dupdates = tl.dot(load_rows(k_ptr, t, end, k, h * K), low)
        if PER_DIM:
            total = tl.load(decay_ptr + (final.to(tl.int64) * H + head) * K + k)[:, None]
        else:
            total = tl.load(decay_ptr + final.to(tl.int64) * H + head)
            decay = tl.load(decay_ptr + t.to(tl.int64) * H + head, mask=t < end, other=0.0)
            dupdates *= tl.exp(tl.where(t < end, total - decay, 0.0))[:, None]
        do = load_rows(do_ptr + head * V, t, end, v, H * V)
        dupdates += tl.dot(load_columns(scores_ptr + head * CHUNK, t, end, i, H * CHUNK), do)
        if not IS_TRANSITION:
            store_rows(dupdates_ptr + head * V, dupdates, t, end, v, H * V)
        dstate *= tl.exp(total)
        if not PER_DIM:
            do = (do.to(tl.float32) * tl.exp(decay)[:, None]).to(dtype)
        dstate += tl.dot(load_columns(q_ptr, t, end, k, h * K), do)
        if HAS_BETA:
            w = load_columns(w_ptr + head * K, t, end, k, H * K)
            dstate -= tl.dot(w, dupdates.to(dtype))
    tl.store(dinitial_ptr + (document * H + head) * K * V + cells, dstate)
