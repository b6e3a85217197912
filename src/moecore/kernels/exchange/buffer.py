"""The buffers of an exchange: their layout in each rank's memory, and one rank's view of them.

Each rank owns one buffer that all ranks of the group can write. The buffer has four regions:

    rows     [2 slots, S]  rows of up to `row_bytes`; with `sums_slot` a third slot, of copied sums
    ids      [2 slots, S, K]  int32
    weights  [2 slots, S, K]  fp32
    flags    [2 slots, G, chunks]  int32, zero at first

Letters: G ranks, C max_tokens of any rank, S = G * C source rows, K choices.

Rows have any dtype; only sums read the dtype. Rows of fewer than `row_bytes` are packed densely.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecore.kernels.common import cdiv, next_power_of_2
from moecore.kernels.triton_api import tl

SUM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROW_ALIGNMENT = 16  # a row's bytes are a multiple of this
MAX_RANKS = 64  # an int64 has a bit for each rank
ALIGNMENT = 256

# Regions of a buffer, and words of an exchange's state and report.
AT_ROWS, AT_IDS, AT_WEIGHTS, AT_FLAGS = (tl.constexpr(i) for i in range(4))
SUMS_SLOT = tl.constexpr(2)  # the slot that copy engines write
NUM_WORDS = 8
ERROR_WORD, ERROR_BEFORE_WORD, NEEDED_WORD = 2, 3, 4
OPERATION, FINISHED, ERROR, ERROR_BEFORE, NEEDED_ROWS = (tl.constexpr(i) for i in range(5))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeLayout:
    """The sizes and the buffer layout of an exchange of token rows, identical on all ranks."""

    num_ranks: int  # G
    max_tokens: int  # C, the largest token count of a rank; at least 1
    row_bytes: int  # the largest size of a row, that is of a sum; a multiple of `ROW_ALIGNMENT`
    top_k: int  # K
    num_push: int  # programs of a launch that send
    num_receive: int  # programs of a launch that receive
    # Chunks per push program, rounded to powers of two. More chunks shorten the time of a launch
    # after its last store; with fewer chunks the launch waits less.
    rounds: int = 8
    num_warps: int = 16  # of a program
    sums_slot: bool = False  # whether the buffer has slot `SUMS_SLOT`

    @property
    def source_rows(self) -> int:
        """Maximum number of rows that a rank receives: one for each token of each rank."""
        return self.num_ranks * self.max_tokens

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, an area for rows; operations alternate between the two slots."""
        return self.source_rows * self.row_bytes

    @property
    def chunk(self) -> int:
        """Number of tokens in a chunk: tokens that are sent together and announced by one flag."""
        return min(64, max(8, next_power_of_2(cdiv(self.max_tokens, self.rounds * self.num_push))))

    @property
    def num_chunks(self) -> int:
        """Number of chunks of a rank's tokens."""
        return cdiv(self.max_tokens, self.chunk)

    @property
    def region_bytes(self) -> list[int]:
        """Bytes of the regions of rows, ids, weights and flags, rounded up to `ALIGNMENT`."""
        choices = 2 * self.source_rows * self.top_k * 4
        flags = 2 * self.num_chunks * self.num_ranks * 4
        sizes = ((2 + self.sums_slot) * self.slot_bytes, choices, choices, flags)
        return [cdiv(size, ALIGNMENT) * ALIGNMENT for size in sizes]

    def view_sums(self, peer_memory: Tensor, sender_rank: int) -> Tensor:
        """Return the `max_tokens` rows of a peer's buffer to which `sender_rank` writes sums."""
        num_bytes = self.max_tokens * self.row_bytes
        return peer_memory[SUMS_SLOT.value * self.slot_bytes :].narrow(
            0, sender_rank * num_bytes, num_bytes
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank's buffer."""
        return sum(self.region_bytes)

    def locate_regions(self, base_address: int) -> list[int]:
        """Return the addresses of rows, ids, weights and flags in a buffer at `base_address`."""
        return [base_address + sum(self.region_bytes[:i]) for i in range(4)]


class ExchangePointers(NamedTuple):
    """The three tensors with addresses that kernels receive: buffers, state, report to the host."""

    bases: Any
    state: Any
    report: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SymmetricBuffer:
    """This rank's addresses of all ranks' buffers of an exchange, and this rank's state."""

    layout: ExchangeLayout
    rank: int  # this rank in the group
    bases: Tensor  # int64 [4, G] on the device, this rank's addresses of every rank's regions
    state: Tensor  # int32 [NUM_WORDS] on the device, initially zero
    # int32 [NUM_WORDS] in memory that the host and the device access; a copy of errors
    report: Tensor
    timeout_ns: int  # how long a receiver waits for a peer
    memory: Any = None  # an owner of the memory, kept alive with this record
    # for each peer, the memory to which `copy_sums_to_peers` writes; empty without `sums_slot`
    sums_slots: tuple[Tensor, ...] = ()

    @property
    def kernel_tensors(self) -> ExchangePointers:
        """The three tensors of this record that kernels receive."""
        return ExchangePointers(self.bases, self.state, self.report)


def view_int32(rows: Tensor) -> Tensor:
    """Return rows as int32 [rows, words]; they are copied if their address is no multiple of 4."""
    is_odd = rows.storage_offset() * rows.itemsize % torch.int32.itemsize
    return (rows.clone() if is_odd else rows).view(torch.int32)
