"""Offsets of expert rows cut at a length, and a record of how many rows were wanted.

`build_index` drops the rows past its length, which only the last offset shows. Products must not
read past the length, and no row may be lost unseen: so the offsets are cut, and the number of
rows is kept where the host looks later. One launch of one program.
"""

import torch
from torch import Tensor

from moecore.kernels.common import launch, next_power_of_2, tl, triton, use_kernel
from moecore.kernels.exchange.buffer import NEEDED_ROWS, NEEDED_WORD


def limit_rows_ref(offsets_e: Tensor, num_rows: int, state: Tensor, report: Tensor) -> Tensor:
    """Return the offsets cut at `num_rows`, and record the most that was wanted."""
    needed = int(offsets_e.max())
    if needed > num_rows:
        most = max(needed, int(state[NEEDED_WORD]))
        state[NEEDED_WORD] = report[NEEDED_WORD] = most
    return offsets_e.clamp(max=num_rows)


@triton.jit
def _limit_rows_kernel(
    offsets_ptr,  # [e] int32
    out_ptr,  # [e] int32, out
    state_ptr,  # [NUM_WORDS] int32
    report_ptr,  # [NUM_WORDS] int32
    num_rows,  # R
    NUM_LOCAL: tl.constexpr,
    BINS: tl.constexpr,  # power of two >= NUM_LOCAL
):
    experts = tl.arange(0, BINS)
    offsets = tl.load(offsets_ptr + experts, mask=experts < NUM_LOCAL, other=0)
    tl.store(out_ptr + experts, tl.minimum(offsets, num_rows), mask=experts < NUM_LOCAL)
    needed = tl.max(offsets, axis=0)
    most = tl.maximum(needed, tl.load(state_ptr + NEEDED_ROWS))
    if needed > num_rows:
        tl.store(state_ptr + NEEDED_ROWS, most)
        tl.store(report_ptr + NEEDED_ROWS, most)


def limit_rows(offsets_e: Tensor, num_rows: int, state: Tensor, report: Tensor) -> Tensor:
    """Return the offsets cut at R rows; a larger need is recorded. No host sync.

    Args:
        offsets_e: int32 running sum of rows per expert.
        num_rows: R.
        state: int32 [NUM_WORDS] on the device of the offsets; word NEEDED_ROWS becomes the most
            rows that were ever wanted, when that is more than R.
        report: the same words in memory that the host sees too.

    Returns:
        int32 like offsets_e.
    """
    if not use_kernel(offsets_e):
        return limit_rows_ref(offsets_e, num_rows, state, report)
    out_e, e = torch.empty_like(offsets_e), offsets_e.shape[0]
    args = (offsets_e, out_e, state, report, num_rows)
    launch(_limit_rows_kernel, 1, *args, NUM_LOCAL=e, BINS=next_power_of_2(e))
    return out_e
