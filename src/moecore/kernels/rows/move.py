"""Moves rows between source order and expert order: a gather and its adjoint, a sum.

    gather_rows: out[r] = x[row_ids[r]], 0 if no slot is r     the gradient of sum_rows
    sum_rows:    out[s] = sum over k of y[slots[s, k]]         the gradient of gather_rows

Both functions receive both directions of one index (`index.py`): row_ids[slots[s, k]] == s. So the
sum needs no atomics, and the gather reads each source row once.

Letters: S source rows, K choices per source row, R expert rows, D columns.

Bytes moved, with b bytes per element and U <= S * K slots in use: gather reads S * D * b and writes
R * D * b; sum reads U * D * b and writes S * D * b. Both read the index, 4 * (R + 2 * S * K) bytes
at most. With K = E columns of expert choice, gather reads 4 * R * K bytes more.
"""

from functools import cache

import torch
from torch import Tensor

from moecore.kernels.common import (
    KERNEL_DTYPES,
    can_use_kernel,
    cdiv,
    device_of,
    launch,
    next_power_of_2,
)
from moecore.kernels.ops import Op, make_setup_context
from moecore.kernels.rows.row_tiles import mask_rows_in_use
from moecore.kernels.triton_api import tl, triton

FILL_ROWS = 32  # expert rows that one program checks for being named by no slot
FILL_CHOICES = 32  # slots of each of them that it holds at a time
COPY_PROGRAMS = 16
COPY_WORDS = 4096  # of 4 bytes, that a program copies at once


def gather_rows_ref(
    x_SD: Tensor, row_ids_R: Tensor, slots_SK: Tensor, num_rows: Tensor | None
) -> Tensor:
    """Compute `gather_rows` in plain PyTorch; num_rows is not read."""
    if not x_SD.shape[0]:  # the empty sum keeps the graph connected
        return x_SD.new_zeros(row_ids_R.shape[0], x_SD.shape[1]) + x_SD.sum(0)
    return zero_rows_without_slot(x_SD.index_select(0, row_ids_R), slots_SK)


def zero_rows_without_slot(x_RD: Tensor, slots_SK: Tensor) -> Tensor:
    """Return a copy of expert rows with zeros in padding: rows that slots_SK does not contain."""
    R = x_RD.shape[0]
    named_R = torch.zeros(R + 1, dtype=torch.bool, device=x_RD.device)
    named_R[slots_SK.flatten().remainder(R + 1)] = True  # -1 is the spare row
    return torch.where(named_R[:R, None], x_RD, 0)


def sum_rows_ref(
    y_RD: Tensor, row_ids_R: Tensor | None, slots_SK: Tensor, num_rows: Tensor | None
) -> Tensor:
    """Compute `sum_rows` in plain PyTorch."""
    dtype = torch.promote_types(y_RD.dtype, torch.float32)
    out_SD = y_RD.new_zeros(slots_SK.shape[0], y_RD.shape[1], dtype=dtype)
    if not y_RD.shape[0]:
        return (out_SD + y_RD.sum(0)).to(y_RD.dtype)
    for slots_S in slots_SK.unbind(1):
        y_SD = y_RD.index_select(0, slots_S.clamp(min=0))
        out_SD = out_SD + torch.where(slots_S[:, None] >= 0, y_SD, 0)
    return out_SD.to(y_RD.dtype)


@cache
def choose_column_block(num_columns: int, itemsize: int) -> dict[str, int]:
    """Return BLOCK_D (columns of a program) and num_warps: each thread accesses 16 bytes."""
    # The most columns, up to 2048, that leave at most 1/8 idle.
    fits = (n for n in (2048, 1024, 512, 256) if -(-num_columns // n) * n * 8 <= num_columns * 9)
    block = next(fits, min(256, max(16, next_power_of_2(num_columns))))
    return {"BLOCK_D": block, "num_warps": max(2, min(8, block * itemsize // 512))}


@triton.jit(do_not_specialize=["num_expert_rows", "num_fill_programs"])
def _gather_rows_fwd_kernel(
    x_ptr,  # [S, D]
    row_ids_ptr,  # [R] int32
    slots_ptr,  # [S, K] int32, -1 = none
    num_rows_ptr,  # 0-dim int32, or None for R
    out_ptr,  # [R, D]
    num_expert_rows,  # R
    num_fill_programs,  # programs that fill; the rest copy
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two
    BLOCK_D: tl.constexpr,
    FILL_R: tl.constexpr,
    FILL_D: tl.constexpr,
    CLEAR: tl.constexpr,  # zeros from num_rows on; else those rows stay as they are
):
    """Zero FILL_R rows without a slot, or copy BLOCK_D columns of one token's row to its rows."""
    pid = tl.program_id(0)
    if pid < num_fill_programs:
        # Rows that no slot names: padding below num_rows, and all rows from there on.
        rows = pid.to(tl.int64) * FILL_R + tl.arange(0, FILL_R)
        exists = rows < num_expert_rows
        row_mask = mask_rows_in_use(rows, num_expert_rows, num_rows_ptr)
        sources = tl.load(row_ids_ptr + rows, mask=row_mask, other=0).to(tl.int64)
        named = tl.zeros([FILL_R], dtype=tl.int32)
        for start in range(0, K, BLOCK_K):
            choices = start + tl.arange(0, BLOCK_K)
            at = slots_ptr + sources[:, None] * K + choices[None, :]
            mask = row_mask[:, None] & (choices < K)[None, :]
            slots = tl.load(at, mask=mask, other=-1)
            named += tl.sum((slots == rows[:, None]).to(tl.int32), axis=1)
        fill = (exists if CLEAR else row_mask) & (named == 0)
        if tl.max(fill.to(tl.int32), axis=0) > 0:
            zeros = tl.zeros([FILL_R, FILL_D], dtype=out_ptr.dtype.element_ty)
            for start in range(0, D, FILL_D):
                columns = start + tl.arange(0, FILL_D)
                out = out_ptr + rows[:, None] * D + columns[None, :]
                tl.store(out, zeros, mask=fill[:, None] & (columns < D)[None, :])
    else:
        BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
        source = ((pid - num_fill_programs) // BLOCKS).to(tl.int64)
        columns = (pid - num_fill_programs) % BLOCKS * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = columns < D
        x = tl.load(x_ptr + source * D + columns, mask=inside, other=0.0)
        for k in range(K):
            slot = tl.load(slots_ptr + source * K + k).to(tl.int64)
            tl.store(out_ptr + slot * D + columns, x, mask=inside & (slot >= 0))


@triton.jit
def _load_expert_row(
    y_ptr, slots_ptr, source_row, choice, columns, D: tl.constexpr, K: tl.constexpr
):
    """Return columns of the expert row of a token's choice in fp32; 0 if it has no expert row."""
    slot = tl.load(slots_ptr + source_row * K + choice, mask=choice < K, other=-1).to(tl.int64)
    mask = (columns < D) & (slot >= 0)
    return tl.load(y_ptr + slot * D + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _sum_rows_fwd_kernel(
    y_ptr,  # [R, D]
    slots_ptr,  # [S, K] int32, -1 = none
    out_ptr,  # [S, D]
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write BLOCK_D columns of the sum of one token's expert rows, added in fp32."""
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    pid = tl.program_id(0)
    source = (pid // BLOCKS).to(tl.int64)
    columns = pid % BLOCKS * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], dtype=tl.float32)
    for k in range(0, K, 4):
        # Four independent loads before the first add.
        y0 = _load_expert_row(y_ptr, slots_ptr, source, k, columns, D, K)
        y1 = _load_expert_row(y_ptr, slots_ptr, source, k + 1, columns, D, K)
        y2 = _load_expert_row(y_ptr, slots_ptr, source, k + 2, columns, D, K)
        y3 = _load_expert_row(y_ptr, slots_ptr, source, k + 3, columns, D, K)
        total = total + y0
        total = total + y1
        total = total + y2
        total = total + y3
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + source * D + columns, out, mask=columns < D)


def _launch_gather(
    x_SD: Tensor, row_ids_R: Tensor, slots_SK: Tensor, num_rows: Tensor | None, *, clear: bool
) -> Tensor:
    """Return each expert row's token row; from num_rows on uninitialised, or zero if `clear`."""
    (S, D), K, R = x_SD.shape, slots_SK.shape[1], row_ids_R.shape[0]
    out_RD = x_SD.new_empty(R, D)
    if not R or not D:
        return out_RD
    block = choose_column_block(D, x_SD.element_size())
    num_fill = cdiv(R, FILL_ROWS)
    inputs = (x_SD.contiguous(), row_ids_R.contiguous(), slots_SK.contiguous(), num_rows)
    launch(
        _gather_rows_fwd_kernel,
        num_fill + S * cdiv(D, block["BLOCK_D"]),
        *(*inputs, out_RD, R, num_fill),
        D=D,
        K=K,
        BLOCK_K=min(FILL_CHOICES, next_power_of_2(K)),
        FILL_R=FILL_ROWS,
        FILL_D=128 // x_SD.element_size(),
        CLEAR=clear,
        **block,
    )
    return out_RD


def _launch_sum(y_RD: Tensor, slots_SK: Tensor) -> Tensor:
    """Return the sum of each token's expert rows, [S, D], by the kernel."""
    (S, K), D = slots_SK.shape, y_RD.shape[1]
    out_SD = y_RD.new_empty(S, D)
    block = choose_column_block(D, y_RD.element_size())
    args = (y_RD.contiguous(), slots_SK.contiguous(), out_SD)
    launch(_sum_rows_fwd_kernel, S * cdiv(D, block["BLOCK_D"]), *args, D=D, K=K, **block)
    return out_SD


# The references run inside the ops too: plain autograd would add 16-bit rows in 16 bits.


def gather_rows_without_autograd(
    x_SD: Tensor, row_ids_R: Tensor, slots_SK: Tensor, num_rows: Tensor | None
) -> Tensor:
    """Compute `gather_rows` without autograd, for the implementation of other operations."""
    if x_SD.dtype in KERNEL_DTYPES and x_SD.shape[0] and can_use_kernel(x_SD, slots_SK):
        return _launch_gather(x_SD, row_ids_R, slots_SK, num_rows, clear=True)
    return gather_rows_ref(x_SD, row_ids_R, slots_SK, num_rows)


def sum_rows_without_autograd(
    y_RD: Tensor, row_ids_R: Tensor | None, slots_SK: Tensor, num_rows: Tensor | None
) -> Tensor:
    """Compute `sum_rows` without autograd, for the implementation of other operations."""
    if y_RD.dtype in KERNEL_DTYPES and can_use_kernel(y_RD, slots_SK):
        return _launch_sum(y_RD, slots_SK)
    return sum_rows_ref(y_RD, row_ids_R, slots_SK, num_rows)


_gather_rows = Op(
    "gather_rows",
    gather_rows_without_autograd,
    lambda x_SD, row_ids_R, *_: x_SD.new_empty(row_ids_R.shape[0], x_SD.shape[1]),
    setup_context=make_setup_context(slice(1, None)),
    backward=lambda ctx, dout_RD: (_sum_rows(dout_RD, *ctx.saved_tensors), None, None, None),
)
_sum_rows: Op[Tensor] = Op(
    "sum_rows",
    sum_rows_without_autograd,
    lambda y_RD, _, slots_SK, *__: y_RD.new_empty(slots_SK.shape[0], y_RD.shape[1]),
    setup_context=make_setup_context(slice(1, None)),
    backward=lambda ctx, dout_SD: (_gather_rows(dout_SD, *ctx.saved_tensors), None, None, None),
)


def gather_rows(
    x_SD: Tensor, row_ids_R: Tensor, slots_SK: Tensor, num_rows: Tensor | None = None
) -> Tensor:
    """Return each expert row's source row (token), [R, D]. No host sync.

    Differentiable in x_SD; `sum_rows` is the gradient. Rows that slots_SK does not contain are
    zeros: padding, and all rows from num_rows on.

    Args:
        x_SD: source rows, any float dtype; copied if not contiguous.
        row_ids_R: int32, source row of each expert row, in [0, S) for rows before num_rows.
        slots_SK: int32, expert row of each source row for its k-th expert, distinct; -1 = none.
        num_rows: 0-dim int32 on the device, the expert rows in use; None means R.
    """
    return _gather_rows(x_SD, row_ids_R, slots_SK, num_rows)


def gather_used_rows(x_SD: Tensor, row_ids_R: Tensor, slots_SK: Tensor, num_rows: Tensor) -> Tensor:
    """Return x_SD[row_ids_R], [R, D], without autograd and without a host sync.

    Rows from num_rows on are uninitialised. x_SD has at least one row, and is bf16, fp16 or fp32 on
    a GPU. Other arguments are as in `gather_rows`.
    """
    return _launch_gather(x_SD, row_ids_R, slots_SK, num_rows, clear=False)


def sum_rows(
    y_RD: Tensor, row_ids_R: Tensor, slots_SK: Tensor, num_rows: Tensor | None = None
) -> Tensor:
    """Return, for each source row (token), the sum of its expert rows, [S, D] in y_RD's dtype.

    Differentiable in y_RD; `gather_rows` is the gradient. No host sync; the same bits in every run.
    Rows are added in fp32 (fp64 for fp64) in order of k and rounded once. y_RD is copied if not
    contiguous; rows that slots_SK does not contain are not read. Other arguments are as in
    `gather_rows`; only backward reads row_ids_R and num_rows.

    Example, S = 2, K = 2, R = 3: slots_SK [[0, 2], [1, -1]] gives [y0 + y2, y1].
    """
    return _sum_rows(y_RD, row_ids_R, slots_SK, num_rows)


def copy_first_rows_ref(target_RB: Tensor, source_RB: Tensor, num_rows: Tensor) -> None:
    """Compute `copy_first_rows` in plain PyTorch. Host sync."""
    count = min(int(num_rows), source_RB.shape[0])
    target_RB[:count].copy_(source_RB[:count])


@triton.jit(do_not_specialize=["max_rows"])
def _copy_first_rows_kernel(
    source_ptr,  # [R, words of a row] int32
    target_ptr,  # [R, words of a row] int32, out
    num_rows_ptr,  # int32
    max_rows,  # R
    row_words,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the first num_rows rows as words of 4 bytes; PROGRAMS programs share them."""
    num_words = tl.minimum(tl.load(num_rows_ptr), max_rows).to(tl.int64) * row_words
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, num_words, PROGRAMS * BLOCK):
        i = start + tl.arange(0, BLOCK)
        words = tl.load(source_ptr + i, mask=i < num_words)
        tl.store(target_ptr + i, words, mask=i < num_words)


def copy_first_rows(target_RB: Tensor, source_RB: Tensor, num_rows: Tensor) -> None:
    """Copy the first num_rows rows of `source_RB` to `target_RB`; later rows do not change.

    Both matrices are uint8, contiguous, on the GPU or in pinned host memory. Few programs copy,
    because PCIe is slow. num_rows is 0-dim int32 on the GPU.
    """
    row_bytes = source_RB.shape[1]
    if not can_use_kernel(num_rows) or row_bytes % 4:
        copy_first_rows_ref(target_RB, source_RB, num_rows)
        return
    words = (source_RB.view(torch.int32), target_RB.view(torch.int32))
    args = (*words, num_rows, source_RB.shape[0], row_bytes // 4)
    with device_of(num_rows):  # the source or the target may lie in host memory
        sizes = dict(PROGRAMS=COPY_PROGRAMS, BLOCK=COPY_WORDS, num_warps=8)
        _copy_first_rows_kernel[(COPY_PROGRAMS,)](*args, **sizes)
