"""The protocol of an exchange's kernels: peers of a token, flags, waits, and the end of a launch.

Two slots need no barrier. Operation n uses slot n % 2. A rank that pushes n + 2 has finished n + 1,
so it has seen the flags of n + 1 of every chunk of every rank, including empty chunks. Those ranks
raised the flags after they finished n, and therefore after their last read of slot n % 2.

A flag has the value n + 1 and is never cleared, so a flag that arrives after a timeout is not
mistaken for a flag of a later operation. n is counted on the device, so a replayed CUDA graph
continues the count. All ranks must run the same operations in the same order, one at a time.

Memory order: a program stores, passes a barrier, and raises its flags by a release at system scope.
A receiver acquires at system scope, passes a barrier, and loads past the L1 cache.

Letters: T local tokens, G ranks, K choices per token.
"""

from moecore.kernels.exchange.buffer import AT_FLAGS, ERROR, ERROR_BEFORE, FINISHED, OPERATION
from moecore.kernels.triton_api import tl, triton


@triton.jit
def find_peers(ids_ptr, peers_ptr, chunk_idx, num_tokens, block_experts, CONST: tl.constexpr):
    """Write a bit mask per token of a chunk: bit g is set if rank g has an expert of the token."""
    CHUNK: tl.constexpr = CONST.CHUNK
    tokens = chunk_idx * CHUNK + tl.arange(0, CHUNK)
    bits = tl.zeros([CHUNK], dtype=tl.int64)
    for start in range(0, CONST.K, CONST.BLOCK_K):
        choices = start + tl.arange(0, CONST.BLOCK_K)
        inside = (tokens < num_tokens)[:, None] & (choices < CONST.K)[None, :]
        offsets = tokens.to(tl.int64)[:, None] * CONST.K + choices[None, :]
        ids = tl.load(ids_ptr + offsets, mask=inside, other=-1)
        owner = tl.where(ids >= 0, ids // block_experts, -1)
        for block in range(CONST.G // CONST.ETP):
            hit = tl.max((owner == block).to(tl.int32), axis=1).to(tl.int64)
            bits = bits | (hit * CONST.BLOCK_BITS << (block * CONST.ETP))
    tl.store(peers_ptr + tokens, bits, mask=tokens < num_tokens)
    tl.debug_barrier()


@triton.jit
def raise_flags(bases_ptr, operation_idx, chunk_idx, num_chunks, rank, CONST: tl.constexpr):
    """Set flag `chunk_idx` of this rank on every rank, after all stores of this program."""
    G: tl.constexpr = CONST.G
    BLOCK_G: tl.constexpr = CONST.BLOCK_G
    flag = (operation_idx % 2 * G + rank).to(tl.int64) * num_chunks + chunk_idx
    tl.debug_barrier()
    peers = tl.arange(0, BLOCK_G)
    base = tl.load(bases_ptr + AT_FLAGS * G + peers, mask=peers < G, other=0)
    flags = base.to(tl.pointer_type(tl.int32)) + flag
    raised = tl.zeros([BLOCK_G], tl.int32) + (operation_idx + 1)
    tl.atomic_xchg(flags, raised, mask=peers < G, sem="release", scope="sys")


@triton.jit
def _read_timer(lanes):
    """Return the GPU's global timer in nanoseconds; `lanes` [THREADS] gives only the shape."""
    return tl.max(
        tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,r", [lanes], tl.int64, is_pure=False, pack=1
        ),
        axis=0,
    )


@triton.jit
def _find_late_rank(addresses, ranks, expected_flag, SPIN: tl.constexpr):
    """Return one of `ranks` whose flag at `addresses` is not `expected_flag`; -1 = all are."""
    # One flag per thread, and a maximum over all threads: all warps must see the same number, or
    # they would diverge before a barrier.
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
    return tl.max(tl.where(flags == expected_flag, -1, ranks), axis=0)


@triton.jit
def get_remaining_time(buffer, timeout_ns):
    """Return the time to wait in ns, int64: `timeout_ns`, or 0 after a failed operation."""
    return tl.where(tl.load(buffer.state + ERROR_BEFORE) == 0, timeout_ns, 0).to(tl.int64)


@triton.jit
def wait_for_flags(
    buffer,  # ExchangePointers
    operation_idx,  # n
    first_rank,  # first rank to wait for
    chunk_idx,
    num_chunks,
    rank,
    timeout_ns,  # int64 nanoseconds
    OPERATION_KIND: tl.constexpr,  # 0 spread, 1 reduce
    NUM_RANKS: tl.constexpr,  # ranks to wait for
    CONST: tl.constexpr,  # G, THREADS and SPIN
):
    """Wait for a chunk's flags from NUM_RANKS ranks; return whether all flags arrive in time.

    After a timeout, a late rank and OPERATION_KIND are recorded in the buffer's state.
    """
    ranks = first_rank + tl.arange(0, CONST.THREADS) % NUM_RANKS
    flags = (operation_idx % 2 * CONST.G + ranks).to(tl.int64) * num_chunks + chunk_idx
    addresses = tl.load(buffer.bases + AT_FLAGS * CONST.G + rank) + flags * 4
    expected_flag = operation_idx + 1
    late = _find_late_rank(addresses, ranks, expected_flag, CONST.SPIN)
    if CONST.SPIN:
        if late >= 0:
            lanes = tl.arange(0, CONST.THREADS)
            start = _read_timer(lanes)
            waited = start - start
            while (late >= 0) & (waited < timeout_ns):
                late = _find_late_rank(addresses, ranks, expected_flag, CONST.SPIN)
                waited = _read_timer(lanes) - start
    if late >= 0:
        error_code = 1 + late * 2 + OPERATION_KIND
        if tl.atomic_cas(buffer.state + ERROR, 0, error_code) == 0:
            tl.store(buffer.report + ERROR, error_code)
    tl.debug_barrier()
    return late < 0


@triton.jit
def finish_operation(state_ptr, operation_idx):
    """Increment the operation counter if this is the last program of the launch to finish."""
    tl.debug_barrier()
    ticket = tl.atomic_add(state_ptr + FINISHED, 1, sem="acq_rel", scope="gpu")
    if ticket == tl.num_programs(0) - 1:
        tl.store(state_ptr + FINISHED, 0)
        tl.store(state_ptr + ERROR_BEFORE, tl.atomic_add(state_ptr + ERROR, 0))
        tl.store(state_ptr + OPERATION, operation_idx + 1)
