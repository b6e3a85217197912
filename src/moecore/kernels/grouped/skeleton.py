"""Parts that the products on Hopper share: a ring of stages, the order of tiles, staged stores.

    loading      the loops over tiles and steps; a kernel's LOAD_STEP starts the loads of a step
    staging      a result is copied to shared memory and stored by TMA, or by threads if rows or
                 columns end within the block

A stage has two barriers: full when all announced data has arrived, empty when all readers have read
it. Loading warps and each group count their steps. The number of a step gives its stage and parity.

Letters: R expert rows, e experts, M N the sizes of an output.
"""

from typing import Any, NamedTuple

from torch import Tensor

from moecore.kernels.rows.activation_kernel import ActivationConstants
from moecore.kernels.rows.row_tiles import MAP_FIELDS
from moecore.kernels.triton_api import TRITON, gl, gluon, hopper, thread_barrier, tma_store

FIELDS = gl.constexpr(MAP_FIELDS)
HAS_FEW_REGISTERS = gl.constexpr(TRITON >= (3, 9))  # Triton 3.9 uses more of them


class GroupedConstants(NamedTuple):
    """Compile-time constants of a Hopper kernel: tile sizes, stages, registers and variants."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int  # row tiles that share weights in L2
    STAGES: int
    PRODUCER_REGISTERS: int  # of a thread
    PRODUCER_WARPS: int = 1
    CONSUMER_REGISTERS: int = 0
    EPILOGUE_REGISTERS: int = 0
    EPILOGUE_ROWS: int = 0  # of an activation, at a time in registers
    ACT: ActivationConstants | None = None
    B_IS_NK: bool = False
    GATHER: bool = False
    ADD: bool = False
    TRANSPOSED: bool = False
    ADDEND: bool = False


class Addend(NamedTuple):
    """Rows [R, r] and a matrix [r, N] per expert, whose product a kernel adds to another product.

    A kernel sums both products in one loop: first the other product, then the addend's.
    """

    rows_Rr: Tensor  # in expert order, contiguous; r a multiple of 8
    b_erN: Tensor  # one matrix of every expert, strides in the order of the other product's matrix


class Ring(NamedTuple):
    """A ring of shared-memory stages for blocks of a and b, with two barriers per stage."""

    a: Any
    b: Any
    full: Any
    empty: Any


class RowTiling(NamedTuple):
    """The tiles of an output [rows, N]: map of row tiles, and numbers of row and column tiles."""

    map_ptr: Any
    num_rows: Any
    num_columns: Any


class WeightTiling(NamedTuple):
    """The tiles of weight gradients [experts, M, N]: rows and columns per expert, and total."""

    num_rows: Any
    num_columns: Any
    num_tiles: Any


@gluon.jit
def make_barriers(NUM_BARRIERS: gl.constexpr, NUM_ARRIVALS: gl.constexpr):
    """Return NUM_BARRIERS initialised mbarriers; a phase completes with NUM_ARRIVALS arrivals."""
    # A partition must use the barriers. Otherwise the compiler reuses their memory without the
    # required `mbarrier.inval`, and if processes shared a GPU 8 bytes there were sometimes
    # overwritten (docs/findings.md#warps-registers-and-barriers).
    bars = gl.allocate_shared_memory(gl.int64, [NUM_BARRIERS, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_BARRIERS):
        hopper.mbarrier.init(bars.index(i), count=NUM_ARRIVALS)
    return bars


@gluon.jit
def begin_stage(ring, step_idx, NUM_BYTES: gl.constexpr):
    """Wait until a step's stage is empty; return its index and barrier, which awaits NUM_BYTES."""
    STAGES: gl.constexpr = ring.full.shape[0]
    slot = step_idx % STAGES
    bar = ring.full.index(slot)
    hopper.mbarrier.wait(ring.empty.index(slot), (step_idx // STAGES & 1) ^ 1)
    hopper.mbarrier.expect(bar, NUM_BYTES)
    return slot, bar


@gluon.jit
def wait_for_stage(ring, step_idx):
    """Wait until the ring's stage of step `step_idx` is full, and return the stage's index."""
    STAGES: gl.constexpr = ring.full.shape[0]
    slot = step_idx % STAGES
    hopper.mbarrier.wait(ring.full.index(slot), step_idx // STAGES & 1)
    return slot


@gluon.jit
def release_previous_stage(ring, step_idx, pred):
    """If `pred`, mark the ring's stage of the step before `step_idx` as empty."""
    STAGES: gl.constexpr = ring.full.shape[0]
    hopper.mbarrier.arrive(ring.empty.index((step_idx + STAGES - 1) % STAGES), count=1, pred=pred)


@gluon.jit
def locate_output_tile(tile_idx, tiling, GROUP_M: gl.constexpr):
    """Return (expert, first row, end of expert's rows, column tile) of tile `tile_idx`."""
    width = GROUP_M * tiling.num_columns
    first = tile_idx // width * GROUP_M
    size = gl.minimum(tiling.num_rows - first, GROUP_M)
    inside = tile_idx % width
    at = tiling.map_ptr + (1 + first + inside % size) * FIELDS
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), inside // size


@gluon.jit
def locate_weight_tile(tile_idx, tiling, GROUP_M: gl.constexpr):
    """Return (expert, row tile, column tile) of tile `tile_idx` of the weight gradients."""
    per_expert = tiling.num_rows * tiling.num_columns
    expert = tile_idx // per_expert
    inside = tile_idx % per_expert
    width = GROUP_M * tiling.num_columns
    first = inside // width * GROUP_M
    size = gl.minimum(tiling.num_rows - first, GROUP_M)
    inside = inside % width
    return expert, first + inside % size, inside // size


@gluon.jit
def load_expert_range(ends_ptr, expert):
    """Return (start, end) of an expert's rows. `ends_ptr` has the running sum of row counts."""
    start = gl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    return start, gl.load(ends_ptr + expert)


@gluon.jit
def _begin_step(ring, step_idx, CONST: gl.constexpr):
    """Wait for a step's empty stage for blocks of a and b; return its index and its barrier."""
    BITS: gl.constexpr = ring.a.dtype.primitive_bitwidth
    return begin_stage(ring, step_idx, (CONST.BLOCK_M + CONST.BLOCK_N) * CONST.BLOCK_K * BITS // 8)


@gluon.jit
def load_row_tiles(LOAD_STEP: gl.constexpr, operands, ring, tiling, K, CONST: gl.constexpr):
    """In the loading warp, call LOAD_STEP for each BLOCK_K columns of this program's tiles."""
    step = 0
    for tile in range(gl.program_id(0), tiling.num_rows * tiling.num_columns, gl.num_programs(0)):
        place = locate_output_tile(tile, tiling, CONST.GROUP_M)
        for k in range(0, K, CONST.BLOCK_K):
            slot, bar = _begin_step(ring, step, CONST)
            LOAD_STEP(operands, place, k, ring, slot, bar, CONST)
            step += 1


@gluon.jit
def load_weight_tiles(
    LOAD_STEP: gl.constexpr,  # function that starts the loads of one step
    operands,  # tuple that LOAD_STEP reads
    ends_ptr,  # [e] int32, running sum of the experts' rows, or row tiles
    ring,  # Ring that LOAD_STEP fills
    tiling,  # WeightTiling
    ROWS_PER_STEP: gl.constexpr,  # rows, or row tiles, of a step
    CONST: gl.constexpr,  # GroupedConstants
):
    """In the loading warp, call LOAD_STEP for each block of rows of this program's tiles."""
    step = 0
    for tile in range(gl.program_id(0), tiling.num_tiles, gl.num_programs(0)):
        expert, m, n = locate_weight_tile(tile, tiling, CONST.GROUP_M)
        start, end = load_expert_range(ends_ptr, expert)
        for row in range(start, end, ROWS_PER_STEP):
            slot, bar = _begin_step(ring, step, CONST)
            LOAD_STEP(operands, m, n, row, ring, slot, bar, CONST)
            step += 1


@gluon.jit
def wait_for_staging_buffer(MAX_PENDING_STORES: gl.constexpr = 0):
    """Wait until TMA has read all but MAX_PENDING_STORES of this warp group's staged blocks."""
    hopper.tma.store_wait(MAX_PENDING_STORES)
    thread_barrier()


@gluon.jit
def fence_staging_buffer():
    """Make the blocks that this warp group wrote to shared memory visible to TMA."""
    hopper.fence_async_shared()
    thread_barrier()


@gluon.jit
def store_block(out_ptr, x, first_row, row_end, first_column, num_columns, row_stride):
    """Store x from (first_row, first_column) on; skip rows >= row_end, columns >= num_columns."""
    rows = first_row + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    columns = first_column + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    at = out_ptr + (rows.to(gl.int64) * row_stride)[:, None] + columns[None, :]
    gl.store(at, x, mask=(rows < row_end)[:, None] & (columns < num_columns)[None, :])


@gluon.jit
def add_block(out_ptr, x, first_row, first_column, num_rows, num_columns):
    """Add fp32 x to a matrix from (first_row, first_column) on; skip elements outside."""
    rows = first_row + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    columns = first_column + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    at = out_ptr + (rows.to(gl.int64) * num_columns)[:, None] + columns[None, :]
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    old = gl.load(at, mask=mask, other=0.0).to(gl.float32)
    gl.store(at, (old + x).to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def store_weight_block(
    out_desc, out_smem, x, expert, first_row, first_column, TRANSPOSED: gl.constexpr
):
    """Copy x to shared memory; TMA stores it at (expert, first_row, first_column) of the gradients.

    If TRANSPOSED, out_smem and out_desc have the transposed layout, but x and the arguments do not.
    """
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    out = x.to(out_desc.dtype)
    wait_for_staging_buffer()
    if TRANSPOSED:
        out_smem.reshape((COLUMNS, ROWS)).permute((1, 0)).store(out)
        first_row, first_column = first_column, first_row
    else:
        out_smem.reshape((ROWS, COLUMNS)).store(out)
    fence_staging_buffer()
    tma_store(out_desc, [expert, first_row, first_column], out_smem)
