"""The steps of `exchange.py`'s kernels, for one program each: push, notify, wait, receive.

Letters: T local tokens, C capacity, G ranks, S = G * C source rows, D columns, K choices per token.
"""

from moecore.kernels.common import tl, triton
from moecore.kernels.exchange_port import (
    AT_FLAGS,
    AT_IDS,
    AT_ROWS,
    AT_WEIGHTS,
    ERROR,
    ERROR_BEFORE,
    FINISHED,
    OPERATION,
)


@triton.jit
def find_peers(
    ids_ptr,  # [T, K] int32
    peers_ptr,  # [T] int32, out
    chunk,
    num_tokens,  # T
    num_local,  # experts of one block
    G: tl.constexpr,
    ETP: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write which ranks need each token of the chunk."""
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    bits = tl.zeros([CHUNK], dtype=tl.int32)
    for start in range(0, K, BLOCK_K):
        choices = start + tl.arange(0, BLOCK_K)
        inside = (tokens < num_tokens)[:, None] & (choices < K)[None, :]
        where = tokens.to(tl.int64)[:, None] * K + choices[None, :]
        ids = tl.load(ids_ptr + where, mask=inside, other=-1)
        owner = tl.where(ids >= 0, ids // num_local, -1)
        for block in range(G // ETP):
            hit = tl.max((owner == block).to(tl.int32), axis=1)
            bits = bits | (hit * ((1 << ETP) - 1) << (block * ETP))
    tl.store(peers_ptr + tokens, bits, mask=tokens < num_tokens)
    tl.debug_barrier()


@triton.jit
def push_pairs(
    rows_ptr,  # [T, D] tokens, or [S, D] partial sums with REDUCE
    ids_ptr,  # [T, K] int32, read unless REDUCE
    weights_ptr,  # [T, K] fp32, or [S, K] gradients with REDUCE
    marks_ptr,  # [T] int32 ranks by bit, or [S] int32 used with REDUCE
    bases_ptr,  # [4, G] int64
    chunk,
    num_tokens,  # T
    capacity,  # C
    first,  # int64, row of this rank's token 0 in every peer's slot
    rank,
    REDUCE: tl.constexpr,
    CHOICES: tl.constexpr,  # choices travel too: ids and weights, or the weights' gradients
    G: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Store the chunk's rows on the peers, PAIRS pairs (token, peer) at a time."""
    element = rows_ptr.dtype.element_ty
    for start in range(0, CHUNK * G, PAIRS):
        pairs = start + tl.arange(0, PAIRS)
        tokens = chunk * CHUNK + pairs // G
        peers = (pairs % G + tokens + rank) % G
        exists = (pairs < CHUNK * G) & (tokens < capacity)
        if REDUCE:
            sources = (peers * capacity + tokens).to(tl.int64)
            send = tl.load(marks_ptr + sources, mask=exists, other=0) != 0
        else:
            sources = tokens.to(tl.int64)
            bits = tl.load(marks_ptr + tokens, mask=exists & (tokens < num_tokens), other=0)
            send = ((bits >> peers) & 1) != 0
        targets = first + tokens.to(tl.int64)
        base = tl.load(bases_ptr + AT_ROWS * G + peers).to(tl.pointer_type(element))
        to = tl.multiple_of(base, 16) + targets * D
        for column in range(0, D, BLOCK_D):
            columns = column + tl.arange(0, BLOCK_D)
            mask = send[:, None] & (columns < D)[None, :]
            row = tl.load(rows_ptr + sources[:, None] * D + columns[None, :], mask=mask)
            tl.store(to[:, None] + columns[None, :], row, mask=mask)
        if CHOICES:
            base = tl.load(bases_ptr + AT_WEIGHTS * G + peers).to(tl.pointer_type(tl.float32))
            to_weights = base + targets * K
            to_ids = tl.load(bases_ptr + AT_IDS * G + peers).to(tl.pointer_type(tl.int32))
            to_ids += targets * K
            for k in range(0, K, BLOCK_K):
                choices = k + tl.arange(0, BLOCK_K)
                inside = (choices < K)[None, :]
                where = sources[:, None] * K + choices[None, :]
                sent = send[:, None] & inside
                weights = tl.load(weights_ptr + where, mask=sent)
                tl.store(to_weights[:, None] + choices[None, :], weights, mask=sent)
                if not REDUCE:
                    ids = tl.load(ids_ptr + where, mask=sent, other=-1)
                    tl.store(to_ids[:, None] + choices[None, :], ids, exists[:, None] & inside)


@triton.jit
def notify(
    bases_ptr,  # [4, G] int64
    flag,  # int64, which flag
    operation,  # n
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,  # power of two
):
    """Raise a flag on every rank, after all stores of this program."""
    tl.debug_barrier()
    peers = tl.arange(0, BLOCK_G)
    base = tl.load(bases_ptr + AT_FLAGS * G + peers, mask=peers < G, other=0)
    flags = base.to(tl.pointer_type(tl.int32)) + flag
    raised = tl.zeros([BLOCK_G], tl.int32) + (operation + 1)
    tl.atomic_xchg(flags, raised, mask=peers < G, sem="release", scope="sys")


@triton.jit
def _now(lanes):
    return tl.max(
        tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,r", [lanes], tl.int64, is_pure=False, pack=1
        ),
        axis=0,
    )


@triton.jit
def _latest(
    addresses,  # [THREADS] int64, of flags
    ranks,  # [THREADS] int32, whose
    expected,
    SPIN: tl.constexpr,
):
    """Return a rank whose flag is not there yet, -1 when all are.

    One flag per thread, and a maximum over all threads: every warp must see the same number, or
    the warps would part before a barrier.
    """
    if SPIN:
        flags = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];",
            "=r,l",
            [addresses],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        flags = tl.load(addresses.to(tl.pointer_type(tl.int32)))
    return tl.max(tl.where(flags == expected, -1, ranks), axis=0)


@triton.jit
def wait(
    bases_ptr,  # [4, G] int64
    state_ptr,  # [NUM_WORDS] int32
    report_ptr,  # [NUM_WORDS] int32
    operation,  # n
    first,  # first rank to wait for
    chunk,
    num_chunks,
    rank,
    timeout,  # int64 nanoseconds
    KIND: tl.constexpr,  # 0 spread, 1 reduce
    COUNT: tl.constexpr,  # ranks to wait for
    G: tl.constexpr,
    THREADS: tl.constexpr,
    SPIN: tl.constexpr,  # False: look once, for the interpreter
):
    """Wait for the chunk of COUNT ranks; return whether all came, and record who did not."""
    lanes = tl.arange(0, THREADS)
    ranks = first + lanes % COUNT
    flags = (operation % 2 * G + ranks).to(tl.int64) * num_chunks + chunk
    addresses = tl.load(bases_ptr + AT_FLAGS * G + rank) + flags * 4
    late = _latest(addresses, ranks, operation + 1, SPIN)
    if SPIN:
        if late >= 0:
            start = _now(lanes)
            waited = start - start
            while (late >= 0) & (waited < timeout):
                late = _latest(addresses, ranks, operation + 1, SPIN)
                waited = _now(lanes) - start
    if late >= 0:
        found = 1 + late * 2 + KIND
        if tl.atomic_cas(state_ptr + ERROR, 0, found) == 0:
            tl.store(report_ptr + ERROR, found)
    tl.debug_barrier()
    return late < 0


@triton.jit
def finish(
    state_ptr,  # [NUM_WORDS] int32
    operation,  # n
):
    """Let the last program of the launch end the operation."""
    tl.debug_barrier()
    ticket = tl.atomic_add(state_ptr + FINISHED, 1, sem="acq_rel", scope="gpu")
    if ticket == tl.num_programs(0) - 1:
        tl.store(state_ptr + FINISHED, 0)
        tl.store(state_ptr + ERROR_BEFORE, tl.atomic_add(state_ptr + ERROR, 0))
        tl.store(state_ptr + OPERATION, operation + 1)


@triton.jit
def receive_choices(
    bases_ptr,  # [4, G] int64
    ids_ptr,  # [S, K] int32, out
    weights_ptr,  # [S, K] fp32, out
    used_ptr,  # [S] int32, out
    chunk,
    row,  # int64, source row of its rank's token 0
    slot,  # int64, first row of the slot
    capacity,  # C
    arrived,  # False: all are holes
    rank,
    G: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Copy the ids and weights of a chunk out of the buffer, and find its used rows."""
    ids_base = tl.load(bases_ptr + AT_IDS * G + rank).to(tl.pointer_type(tl.int32))
    weights_base = tl.load(bases_ptr + AT_WEIGHTS * G + rank).to(tl.pointer_type(tl.float32))
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    rows = row + tokens
    exists = tokens < capacity
    used = tl.zeros([CHUNK], dtype=tl.int32)
    for k in range(0, K, BLOCK_K):
        choices = k + tl.arange(0, BLOCK_K)
        inside = exists[:, None] & (choices < K)[None, :]
        where = rows[:, None] * K + choices[None, :]
        from_ids = ids_base + slot * K + where
        from_weights = weights_base + slot * K + where
        ids = tl.load(from_ids, mask=inside & arrived, other=-1, cache_modifier=".cg")
        weights = tl.load(from_weights, mask=inside & arrived, other=0.0, cache_modifier=".cg")
        tl.store(ids_ptr + where, ids, mask=inside)
        tl.store(weights_ptr + where, tl.where(ids >= 0, weights, 0.0), mask=inside)
        used = tl.maximum(used, tl.max((ids >= 0).to(tl.int32), axis=1))
    tl.store(used_ptr + rows, used, mask=exists)
    tl.debug_barrier()


@triton.jit
def _load_part(
    base,  # region of the buffer
    part,  # rank whose sums they are; zeros come back from G on
    bits,  # [TILE_ROWS] int32 ranks that hold a sum, by bit
    row,  # [TILE_ROWS] int64, place of token in the part of rank 0
    capacity,  # C
    columns,  # [BLOCK] int
    G: tl.constexpr,
    N: tl.constexpr,
):
    has = (((bits >> part) & 1) != 0) & (part < G)
    mask = has[:, None] & (columns < N)[None, :]
    where = (row + part * capacity)[:, None] * N + columns[None, :]
    return tl.load(base + where, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def add_parts(
    base,  # region of the buffer
    out_ptr,  # [T, N]
    peers_ptr,  # [T] int32
    chunk,
    num_tokens,  # T
    slot,  # int64, first row of the slot
    capacity,  # C
    G: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sums over ranks of a chunk's tokens, in rank order."""
    for start in range(0, CHUNK, TILE_ROWS):
        tokens = chunk * CHUNK + start + tl.arange(0, TILE_ROWS)
        bits = tl.load(peers_ptr + tokens, mask=tokens < num_tokens, other=0)
        row = slot + tokens
        for column in range(0, N, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            total = tl.zeros([TILE_ROWS, BLOCK], dtype=tl.float32)
            for part in range(0, G, 4):
                # Four independent loads before the first add.
                y0 = _load_part(base, part, bits, row, capacity, columns, G, N)
                y1 = _load_part(base, part + 1, bits, row, capacity, columns, G, N)
                y2 = _load_part(base, part + 2, bits, row, capacity, columns, G, N)
                y3 = _load_part(base, part + 3, bits, row, capacity, columns, G, N)
                total = total + y0
                total = total + y1
                total = total + y2
                total = total + y3
            out = out_ptr + tokens.to(tl.int64)[:, None] * N + columns[None, :]
            mask = (tokens < num_tokens)[:, None] & (columns < N)[None, :]
            tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def copy_rows(
    base,  # region of the buffer
    out_ptr,  # [S, D]
    used_ptr,  # [S] int32
    chunk,
    row,  # int64, source row of its rank's token 0
    slot,  # int64, first row of the slot
    capacity,  # C
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copy the used rows of a chunk out of the buffer."""
    for start in range(0, CHUNK, TILE_ROWS):
        inside = start + tl.arange(0, TILE_ROWS)
        tokens = chunk * CHUNK + inside
        rows = row + tokens
        exists = (inside < CHUNK) & (tokens < capacity)
        used = tl.load(used_ptr + rows, mask=exists, other=0, cache_modifier=".cg") != 0
        for column in range(0, D, BLOCK_D):
            columns = column + tl.arange(0, BLOCK_D)
            mask = used[:, None] & (columns < D)[None, :]
            where = rows[:, None] * D + columns[None, :]
            x = tl.load(base + slot * D + where, mask=mask, cache_modifier=".cg")
            tl.store(out_ptr + where, x, mask=mask)
