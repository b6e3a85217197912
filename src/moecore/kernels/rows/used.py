"""The used rows of a matrix, to or from memory that the GPU reaches over PCIe, without a host sync.

Their number is on the device, so no copy engine can be given it. A few programs take all rows in
turns: PCIe is slow, and the multiprocessors are others'.

Letters: R rows, B bytes of a row. Bytes moved: 2 * num_rows * B.
"""

from functools import partial

import torch
from torch import Tensor

from moecore.kernels.common import on_device, tl, triton, use_kernel

PROGRAMS = 16
BLOCK = 4096  # words of 4 bytes that a program takes at once
NUM_WARPS = 8
WORD_BYTES = 4


def copy_used_ref(target_RB: Tensor, source_RB: Tensor, num_rows: Tensor) -> None:
    """Do what `copy_used` does, in plain PyTorch. Host sync."""
    used = min(int(num_rows), source_RB.shape[0])
    target_RB[:used].copy_(source_RB[:used])


@partial(triton.jit, do_not_specialize=["length"])
def _copy_used_kernel(
    source_ptr,  # [R, words of a row] int32
    target_ptr,  # [R, words of a row] int32, out
    num_rows_ptr,  # int32
    length,  # R
    row_words,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    used = tl.minimum(tl.load(num_rows_ptr), length).to(tl.int64) * row_words
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, used, PROGRAMS * BLOCK):
        i = start + tl.arange(0, BLOCK)
        words = tl.load(source_ptr + i, mask=i < used)
        tl.store(target_ptr + i, words, mask=i < used)


def copy_used(target_RB: Tensor, source_RB: Tensor, num_rows: Tensor) -> None:
    """Copy the first rows of a matrix; what lies past them in the target stays as it is.

    Args:
        target_RB: uint8, contiguous; on the GPU or in pinned host memory, like the source.
        source_RB: likewise.
        num_rows: 0-dim int32 on the GPU; more than R count as R.
    """
    row_bytes = source_RB.shape[1]
    if not use_kernel(num_rows) or row_bytes % WORD_BYTES:
        copy_used_ref(target_RB, source_RB, num_rows)
        return
    with on_device(num_rows):
        _copy_used_kernel[(PROGRAMS,)](
            source_RB.view(torch.int32),
            target_RB.view(torch.int32),
            num_rows,
            source_RB.shape[0],
            row_bytes // WORD_BYTES,
            PROGRAMS=PROGRAMS,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
