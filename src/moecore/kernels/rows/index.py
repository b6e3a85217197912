"""From the experts of each row to the rows of each expert: a stable counting sort with padding.

A pair is one (source row, choice). Each pair of a local expert gets an expert row, ordered by
expert, then by (s, k). Each expert's rows are padded to a multiple. Integer operations, the same
bits in every run:

    count   per block of pairs: the number of pairs of each expert
    scan    per expert: the number of its pairs in earlier blocks, and its total
    layout  the running sum of the padded totals; zeros in the rows without a pair
    place   row of a pair = start of its expert + pairs in earlier blocks + earlier pairs in its own

For few pairs `tally` replaces count and scan: each expert's program reads all pairs.

Letters: S source rows, K choices per source row, N = S * K pairs, e local experts, R expert rows
(length), B = N / 128 blocks of pairs. Bytes moved: ids and weights 8 * N, slots 4 * N, row ids and
weights 8 * R, and the [B, e] table 16 * B * e.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecore.kernels.common import can_use_kernel, cdiv, launch, next_power_of_2
from moecore.kernels.ops import Op
from moecore.kernels.triton_api import tl, triton

BLOCK_N = 128  # pairs of one program; place compares all pairs of a block with each other
BLOCK_B = 2048  # blocks of pairs that scan takes at once
# Of so few blocks each expert's program counts all pairs itself, FEW_B blocks at once: one launch
# for count and scan.
FEW_BLOCKS, FEW_B, FEW_WARPS = 64, 32, 4
BLOCK_R = 1024  # expert rows that one program of layout clears
MAX_ROWS = 2**31 - 1  # row numbers are int32


class ExpertIndex(NamedTuple):
    """Which expert rows (token copies sorted by local expert) belong to which token and expert."""

    # int32, source row of each expert row, 0 where there is none; None = row r is source row r
    row_ids_R: Tensor | None
    weights_R: Tensor  # fp32, weight of each expert row, differentiable; 0 where there is none
    # int32, expert row of each source row's k-th choice; -1 where it has none here
    slots_SK: Tensor
    # int32 running sum of the padded counts: expert i owns rows [offsets_e[i - 1], offsets_e[i])
    offsets_e: Tensor
    # int32 [e * N], the same sum for each (expert, LoRA adapter) of N adapters, of which each row
    # uses one; None = every row uses all adapters
    offsets_g: Tensor | None = None

    @property
    def num_rows(self) -> Tensor:
        """0-dim int32 on the device: expert rows in use. Later rows have no defined content."""
        return self.offsets_e.select(0, -1)


def compute_max_padded_rows(num_rows: int, num_experts: int, row_multiple: int) -> int:
    """Return an upper bound of rows if each of `num_experts` pads its rows to `row_multiple`."""
    # Example, 5 rows of 2 experts, multiple 4: 1 and 4 take 8, 2 and 3 take 8; 12 is enough.
    return cdiv(num_rows + num_experts * (row_multiple - 1), row_multiple) * row_multiple


def build_index_ref(
    ids_SK: Tensor,
    weights_SK: Tensor,
    *,
    first_expert: int,
    num_local_experts: int,
    row_multiple: int,
    max_rows: int,
) -> ExpertIndex:
    """Compute `build_index` in plain PyTorch; `max_rows` is the length of the result."""
    N, e, device = ids_SK.numel(), num_local_experts, ids_SK.device
    local_N = ids_SK.flatten().long() - first_expert
    local_N = torch.where((local_N < 0) | (local_N >= e), e, local_N)
    counts = torch.zeros(e + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, local_N, torch.ones_like(local_N))
    padded_e = (counts[:-1] + row_multiple - 1) // row_multiple * row_multiple
    offsets_e = padded_e.cumsum(0)
    # From a pair's place in the sort to its row: minus the unpadded, plus the padded start.
    shift = torch.cat([offsets_e - padded_e, offsets_e[:1]]) - (counts.cumsum(0) - counts)
    order_N = torch.argsort(local_N, stable=True)
    expert_N = local_N[order_N]
    row_N = torch.arange(N, device=device) + shift[expert_N]
    # Pairs without an expert here land in one spare row past the end.
    row_N = torch.where(expert_N == e, max_rows, row_N).clamp(max=max_rows)
    slot_N = torch.empty_like(row_N).scatter_(0, order_N, row_N)
    sources_N = torch.arange(N, device=device, dtype=torch.int32) // max(ids_SK.shape[1], 1)
    spare_R = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
    weights_R = weights_SK.new_zeros(max_rows + 1).scatter(0, slot_N, weights_SK.flatten())
    return ExpertIndex(
        row_ids_R=spare_R.scatter_(0, slot_N, sources_N)[:max_rows],
        weights_R=weights_R[:max_rows],
        slots_SK=slot_N.where(slot_N < max_rows, -1).to(torch.int32).view(ids_SK.shape),
        offsets_e=offsets_e.to(torch.int32),
    )


@triton.jit(do_not_specialize=["first_expert", "num_pairs"])
def _build_index_fwd_count_kernel(
    ids_ptr,  # [N] int32 global expert ids
    block_counts_ptr,  # [B, e] int32, out: pairs of block b that go to expert i
    first_expert,  # first global id owned here
    num_pairs,  # N
    NUM_LOCAL: tl.constexpr,
    BINS: tl.constexpr,  # power of two >= NUM_LOCAL
    BLOCK_N: tl.constexpr,
):
    """Count the choices of each local expert in one block of (token, choice) pairs."""
    block = tl.program_id(0).to(tl.int64)
    pairs = block * BLOCK_N + tl.arange(0, BLOCK_N)
    local = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1) - first_expert
    local_mask = (local >= 0) & (local < NUM_LOCAL) & (pairs < num_pairs)
    counts = tl.histogram(tl.where(local_mask, local, 0), BINS, mask=local_mask)
    bins = tl.arange(0, BINS)
    tl.store(block_counts_ptr + block * NUM_LOCAL + bins, counts, mask=bins < NUM_LOCAL)


@triton.jit(do_not_specialize=["num_blocks"])
def _build_index_fwd_scan_kernel(
    block_counts_ptr,  # [B, e] int32, in place: counts become sums over earlier blocks
    expert_counts_ptr,  # [e] int32, out
    num_blocks,  # B
    NUM_LOCAL: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Replace one expert's counts per block by sums over earlier blocks, and write their total."""
    expert = tl.program_id(0)
    total = 0
    for start in range(0, num_blocks, BLOCK_B):
        blocks = start + tl.arange(0, BLOCK_B)
        entry = block_counts_ptr + blocks.to(tl.int64) * NUM_LOCAL + expert
        counts = tl.load(entry, mask=blocks < num_blocks, other=0)
        before = total + tl.cumsum(counts, axis=0) - counts
        tl.store(entry, before.to(tl.int32), mask=blocks < num_blocks)
        total += tl.sum(counts, axis=0)
    tl.store(expert_counts_ptr + expert, total)


@triton.jit(do_not_specialize=["first_expert", "num_pairs", "num_blocks"])
def _build_index_fwd_tally_kernel(
    ids_ptr,  # [N] int32 global expert ids
    block_counts_ptr,  # [B, e] int32, out: pairs of expert i in blocks before b
    expert_counts_ptr,  # [e] int32, out
    first_expert,  # first global id owned here
    num_pairs,  # N
    num_blocks,  # B
    NUM_LOCAL: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Count one expert's (token, choice) pairs before each block of pairs, and in total."""
    expert = tl.program_id(0)
    total = 0
    for start in range(0, num_blocks, BLOCK_B):
        blocks = start + tl.arange(0, BLOCK_B)
        pairs = blocks[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        local = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1) - first_expert
        counts = tl.sum(((local == expert) & (pairs < num_pairs)).to(tl.int32), axis=1)
        before = total + tl.cumsum(counts, axis=0) - counts
        entry = block_counts_ptr + blocks * NUM_LOCAL + expert
        tl.store(entry, before.to(tl.int32), mask=blocks < num_blocks)
        total += tl.sum(counts, axis=0)
    tl.store(expert_counts_ptr + expert, total)


@triton.jit(do_not_specialize=["num_rows"])
def _build_index_fwd_layout_kernel(
    expert_counts_ptr,  # [e] int32
    offsets_ptr,  # [e] int32, out: running sum of the padded totals
    row_ids_ptr,  # [R] int32, out: 0 in rows without a pair
    weights_ptr,  # [R] fp32, out: 0 in rows without a pair
    num_rows,  # R
    NUM_LOCAL: tl.constexpr,
    BINS: tl.constexpr,  # power of two >= NUM_LOCAL
    MULTIPLE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write the running sum of padded row counts; write zeros to padding and unused expert rows."""
    pid = tl.program_id(0)
    experts = tl.arange(0, BINS)
    totals = tl.load(expert_counts_ptr + experts, mask=experts < NUM_LOCAL, other=0)
    padded_counts = (totals + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    offsets = tl.cumsum(padded_counts, axis=0)
    if pid == 0:
        tl.store(offsets_ptr + experts, offsets.to(tl.int32), mask=experts < NUM_LOCAL)
    # The first programs clear one expert's padding each, the others a block past the last expert.
    if pid < NUM_LOCAL:
        if MULTIPLE > 1:
            stop = tl.sum(tl.where(experts == pid, offsets, 0), axis=0)
            count = tl.sum(tl.where(experts == pid, padded_counts - totals, 0), axis=0)
            pads = stop - 1 - tl.arange(0, MULTIPLE)
            unused = (pads >= stop - count) & (pads < num_rows)
            tl.store(row_ids_ptr + pads, tl.zeros([MULTIPLE], tl.int32), mask=unused)
            tl.store(weights_ptr + pads, tl.zeros([MULTIPLE], tl.float32), mask=unused)
    else:
        rows = (pid - NUM_LOCAL).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        past = (rows >= tl.sum(padded_counts, axis=0)) & (rows < num_rows)
        tl.store(row_ids_ptr + rows, tl.zeros([BLOCK_R], tl.int32), mask=past)
        tl.store(weights_ptr + rows, tl.zeros([BLOCK_R], tl.float32), mask=past)


@triton.jit(do_not_specialize=["first_expert", "num_pairs", "num_rows"])
def _build_index_fwd_place_kernel(
    ids_ptr,  # [N] int32 global expert ids
    pair_weights_ptr,  # [N] fp32
    block_counts_ptr,  # [B, e] int32, pairs of expert i in blocks before b
    expert_counts_ptr,  # [e] int32
    offsets_ptr,  # [e] int32
    row_ids_ptr,  # [R] int32, out
    weights_ptr,  # [R] fp32, out
    slots_ptr,  # [N] int32, out
    first_expert,  # first global id owned here
    num_pairs,  # N
    num_rows,  # R
    K: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    MULTIPLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write each (token, choice) pair's expert row, and to this row the token and the weight."""
    block = tl.program_id(0).to(tl.int64)
    inside = tl.arange(0, BLOCK_N)
    pairs = block * BLOCK_N + inside
    local = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1) - first_expert
    local_mask = (local >= 0) & (local < NUM_LOCAL) & (pairs < num_pairs)
    earlier = (local[:, None] == local[None, :]) & (inside[:, None] < inside[None, :])
    rank = tl.sum(earlier.to(tl.int32), axis=0)

    before = tl.load(block_counts_ptr + block * NUM_LOCAL + local, mask=local_mask, other=0)
    total = tl.load(expert_counts_ptr + local, mask=local_mask, other=0)
    padded_count = (total + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    stop = tl.load(offsets_ptr + local, mask=local_mask, other=0)
    row = stop - padded_count + before + rank
    local_mask = local_mask & (row < num_rows)
    weights = tl.load(pair_weights_ptr + pairs, mask=local_mask, other=0.0)
    tl.store(row_ids_ptr + row, (pairs // K).to(tl.int32), mask=local_mask)
    tl.store(weights_ptr + row, weights, mask=local_mask)
    tl.store(slots_ptr + pairs, tl.where(local_mask, row, -1), mask=pairs < num_pairs)


@triton.jit(do_not_specialize=["num_pairs"])
def _build_index_bwd_kernel(dweights_ptr, slots_ptr, dpairs_ptr, num_pairs, BLOCK: tl.constexpr):
    """Write BLOCK pairs' gradients [N]: their expert rows' gradients [R], or 0 for slot -1."""
    pairs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.load(slots_ptr + pairs, mask=pairs < num_pairs, other=-1)
    grads = tl.load(dweights_ptr + slots, mask=slots >= 0, other=0.0)
    tl.store(dpairs_ptr + pairs, grads, mask=pairs < num_pairs)


def _launch_build_index(
    ids_SK: Tensor,
    weights_SK: Tensor,
    first_expert: int,
    num_local_experts: int,
    row_multiple: int,
    max_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `build_index`'s result, computed by kernels; `max_rows` expert rows."""
    N, R, e, device = ids_SK.numel(), max_rows, num_local_experts, ids_SK.device
    row_ids_R, weights_R, slots_SK, offsets_e = _make_empty(ids_SK, weights_SK, e, R)
    B = cdiv(N, BLOCK_N)
    ids_SK, weights_SK = ids_SK.contiguous(), weights_SK.contiguous()
    table_Be = torch.empty(B, e, dtype=torch.int32, device=device)
    totals_e = torch.empty(e, dtype=torch.int32, device=device)
    bins = max(32, next_power_of_2(e))
    if B <= FEW_BLOCKS:
        args = (ids_SK, table_Be, totals_e, first_expert, N, B)
        blocks = dict(BLOCK_B=FEW_B, BLOCK_N=BLOCK_N, num_warps=FEW_WARPS)
        launch(_build_index_fwd_tally_kernel, e, *args, NUM_LOCAL=e, **blocks)
    else:
        bins_and_block = dict(NUM_LOCAL=e, BINS=bins, BLOCK_N=BLOCK_N)
        launch(
            _build_index_fwd_count_kernel, B, ids_SK, table_Be, first_expert, N, **bins_and_block
        )
        blocks = dict(NUM_LOCAL=e, BLOCK_B=BLOCK_B, num_warps=8)
        launch(_build_index_fwd_scan_kernel, e, table_Be, totals_e, B, **blocks)
    grid, outputs = e + cdiv(R, BLOCK_R), (offsets_e, row_ids_R, weights_R)
    sizes = dict(NUM_LOCAL=e, MULTIPLE=row_multiple)
    constants = dict(**sizes, BINS=bins, BLOCK_R=BLOCK_R)
    launch(_build_index_fwd_layout_kernel, grid, totals_e, *outputs, R, **constants)
    pairs = (ids_SK, weights_SK, table_Be, totals_e, *outputs, slots_SK, first_expert, N, R)
    launch(_build_index_fwd_place_kernel, B, *pairs, K=ids_SK.shape[1], **sizes, BLOCK_N=BLOCK_N)
    return row_ids_R, weights_R, slots_SK, offsets_e


def _launch_build_index_bwd(dweights_R: Tensor, slots_SK: Tensor) -> Tensor:
    """Return weights_SK's gradient: dweights_R at each choice's expert row, 0 for slot -1."""
    dweights_SK = torch.empty_like(slots_SK, dtype=dweights_R.dtype)
    args = (dweights_R.contiguous(), slots_SK, dweights_SK, slots_SK.numel())
    launch(_build_index_bwd_kernel, cdiv(slots_SK.numel(), 1024), *args, BLOCK=1024)
    return dweights_SK


def _make_empty(
    ids_SK: Tensor, weights_SK: Tensor, num_local_experts: int, max_rows: int
) -> tuple[Tensor, ...]:
    """Return the uninitialised outputs of `_launch_build_index`."""
    integers = partial(torch.empty, dtype=torch.int32, device=ids_SK.device)
    weights_R = torch.empty(max_rows, dtype=weights_SK.dtype, device=ids_SK.device)
    return integers(max_rows), weights_R, integers(tuple(ids_SK.shape)), integers(num_local_experts)


_build_index_bwd = Op(
    "build_index_bwd",
    _launch_build_index_bwd,
    lambda d_R, slots_SK: torch.empty_like(slots_SK, dtype=d_R.dtype),
)


def _save_slots(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the output slots_SK, the expert row of each choice, for backward."""
    ctx.save_for_backward(output[2])
    ctx.set_materialize_grads(False)  # the integer outputs would get zeros of their size


def _backward(ctx: Any, _: Any, dweights_R: Tensor | None, *__: Any) -> Any:
    """Return the gradient of weights_SK, and None for the other arguments."""
    dweights_SK = None
    if ctx.needs_input_grad[1] and dweights_R is not None:
        dweights_SK = _build_index_bwd(dweights_R, *ctx.saved_tensors)
    return None, dweights_SK, None, None, None, None


_build_index = Op(
    "build_index",
    _launch_build_index,
    lambda ids_SK, weights_SK, _, e, __, R: _make_empty(ids_SK, weights_SK, e, R),
    setup_context=_save_slots,
    backward=_backward,
)


def build_index(
    ids_SK: Tensor,
    weights_SK: Tensor,
    *,
    first_expert: int,
    num_local_experts: int,
    row_multiple: int = 1,
    max_pairs: int | None = None,
) -> ExpertIndex:
    """Sort the (token, expert) pairs by local expert, as an `ExpertIndex`. No host sync.

    Row id and weight are 0 in padding rows and in all rows past offsets_e[-1]. weights_R is
    differentiable in weights_SK; rows without a pair may have any gradient, even NaN.

    Args:
        ids_SK: int32, K distinct global expert ids per token; -1 and other ranks' ids are skipped.
        weights_SK: fp32 routing weight of each id; weights of skipped ids are not read.
        first_expert: global id of the first local expert.
        row_multiple: each expert's rows are padded up to a multiple of this, a power of two.
        max_pairs: an upper bound of the pairs of local experts; None = S * K. R is this bound with
            padding (`compute_max_padded_rows`). If offsets_e[-1] > R, rows past R were dropped, and
            experts must not use the index.

    Example, experts 2 and 3 of six, row_multiple 2, ids [[3, 0], [2, 3], [5, 3]]. Expert 2 gets row
    1 and a row of padding, expert 3 rows 0, 1, 2 and a row of padding. row_ids_R is [1, 0, 0, 1, 2,
    0, 0, 0], slots_SK [[2, -1], [0, 3], [-1, 4]] and offsets_e [2, 6].
    """
    if ids_SK.ndim != 2 or ids_SK.dtype != torch.int32:
        raise ValueError(
            f"ids_SK ({tuple(ids_SK.shape)}, {ids_SK.dtype}) must be [S, K] int32: cast it"
        )
    if weights_SK.shape != ids_SK.shape:
        raise ValueError(
            f"weights_SK ({tuple(weights_SK.shape)}) must have the shape of ids_SK "
            f"({tuple(ids_SK.shape)}): pass one weight per choice"
        )
    if row_multiple < 1 or row_multiple & (row_multiple - 1):
        raise ValueError(
            f"row_multiple ({row_multiple}) must be a power of two: use 1 for no padding"
        )
    R = compute_max_padded_rows(
        ids_SK.numel() if max_pairs is None else max_pairs, num_local_experts, row_multiple
    )
    if max(R, ids_SK.numel()) > MAX_ROWS:
        raise ValueError(
            f"expert rows ({R}) and choices ({ids_SK.numel()}) must be <= {MAX_ROWS}, what int32 "
            "counts: split the batch"
        )
    if weights_SK.dtype == torch.float32 and can_use_kernel(ids_SK, weights_SK):
        return ExpertIndex(
            *_build_index(ids_SK, weights_SK, first_expert, num_local_experts, row_multiple, R)
        )
    return build_index_ref(
        ids_SK,
        weights_SK,
        first_expert=first_expert,
        num_local_experts=num_local_experts,
        row_multiple=row_multiple,
        max_rows=R,
    )
