"""The buffers of an exchange: what lies where in each rank's memory, and one rank's end of it.

Each rank owns one buffer that all ranks of the group can write: four regions, side by side.

    rows     [2 slots, S]  rows of up to `row_bytes`; with `sums_slot` a third slot, of copied sums
    ids      [2 slots, S, K]  int32
    weights  [2 slots, S, K]  fp32
    flags    [2 slots, G, chunks]  int32, zero at first

Letters: G ranks, C max_tokens of any rank, S = G * C source rows, K choices.

A buffer carries bytes: only sums know a dtype. Rows of fewer bytes lie closer together in a slot.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecore.kernels.common import cdiv, next_power_of_2, tl

SUM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROW_ALIGNMENT = 16  # bytes of a row are multiples of it
MAX_RANKS = 64  # bits of an int64 that name ranks
ALIGNMENT = 256

# Regions of a buffer, and words of an exchange's state and report.
AT_ROWS, AT_IDS, AT_WEIGHTS, AT_FLAGS = (tl.constexpr(i) for i in range(4))
SUMS_SLOT = tl.constexpr(2)  # that copy engines write
NUM_WORDS = 8
ERROR_WORD, ERROR_BEFORE_WORD, NEEDED_WORD = 2, 3, 4
OPERATION, FINISHED, ERROR, ERROR_BEFORE, NEEDED_ROWS = (tl.constexpr(i) for i in range(5))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeLayout:
    """What all ranks agree on: sizes, and with them where everything lies in a rank's buffer."""

    num_ranks: int  # G
    max_tokens: int  # C, most tokens of any rank; at least 1
    row_bytes: int  # most bytes of a row, those of a sum; a multiple of `ROW_ALIGNMENT`
    top_k: int  # K
    # programs of one launch
    num_push: int
    num_receive: int
    # chunks per push program, as near as powers of two come: with more a launch ends sooner after
    # its last store, with fewer it waits less
    rounds: int = 8
    num_warps: int = 16  # of a program
    sums_slot: bool = False  # whether there is a slot that copy engines write, `SUMS_SLOT`

    @property
    def source_rows(self) -> int:
        """S."""
        return self.num_ranks * self.max_tokens

    @property
    def slot_bytes(self) -> int:
        """Bytes of the rows of one slot."""
        return self.source_rows * self.row_bytes

    @property
    def chunk(self) -> int:
        """Tokens per flag."""
        return min(64, max(8, next_power_of_2(cdiv(self.max_tokens, self.rounds * self.num_push))))

    @property
    def num_chunks(self) -> int:
        """Chunks of each rank."""
        return -(-self.max_tokens // self.chunk)

    @property
    def region_bytes(self) -> tuple[int, int, int, int]:
        """Bytes of rows, ids, weights and flags, rounded up to `ALIGNMENT`."""
        choices = 2 * self.source_rows * self.top_k * 4
        flags = 2 * self.num_chunks * self.num_ranks * 4
        sizes = ((2 + self.sums_slot) * self.slot_bytes, choices, choices, flags)
        at_rows, at_ids, at_weights, at_flags = (-(-n // ALIGNMENT) * ALIGNMENT for n in sizes)
        return at_rows, at_ids, at_weights, at_flags

    def sums_at(self, memory: Tensor, rank: int) -> Tensor:
        """Return where a rank copies its sums, uint8 [C * row_bytes] of a peer's [num_bytes]."""
        num_bytes = self.max_tokens * self.row_bytes
        return memory[SUMS_SLOT.value * self.slot_bytes :].narrow(0, rank * num_bytes, num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank's memory."""
        return sum(self.region_bytes)

    def regions(self, base: int) -> list[int]:
        """Return the addresses of a buffer's four regions."""
        sizes = self.region_bytes
        return [base + sum(sizes[:i]) for i in range(4)]


class End(NamedTuple):
    """One rank's end of a buffer, for kernels: `PeerBuffer.bases`, `state` and `report`."""

    bases: Any
    state: Any
    report: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerBuffer:
    """One rank's view of the memory of all ranks, and its words of state."""

    rank: int  # of this end
    bases: Tensor  # int64 [4, G] on the device, addresses of every rank's regions as seen here
    state: Tensor  # int32 [NUM_WORDS] on the device, zero at first
    # int32 [NUM_WORDS] in memory that host and device see; errors are written here too
    report: Tensor
    timeout_ns: int  # how long a receiver waits for a peer
    memory: Any = None  # what must live as long as the addresses are used

    @property
    def end(self) -> End:
        """Its tensors, as kernels take them."""
        return End(self.bases, self.state, self.report)


@dataclass(frozen=True, kw_only=True, slots=True)
class SymmetricBuffer(PeerBuffer):
    """That of an exchange of rows."""

    layout: ExchangeLayout  # the same on all ranks
    # by peer, where `copy_sums` writes; empty without such a slot
    sums_slots: tuple[Tensor, ...] = ()


def as_words(rows: Tensor) -> Tensor:
    """Return rows as the 32-bit words that a spread moves, at a multiple of their size."""
    is_odd = rows.storage_offset() * rows.itemsize % torch.int32.itemsize
    return (rows.clone() if is_odd else rows).view(torch.int32)
