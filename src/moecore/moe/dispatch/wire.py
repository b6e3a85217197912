"""What travels for a token: its row as it is, or packed as FP8 until experts gather it.

Letters: T tokens, D model dim, S source rows, R expert rows, W bytes of a packed row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moecore.kernels.rows.packed import PACKED_COLUMNS, pack_rows
from moecore.kernels.rows.record import Rows


@dataclass(frozen=True, slots=True)
class Wire:
    """The format of rows between ranks, the same on all of them."""

    fp8: bool = False

    def check(self, x_TD: Tensor) -> None:
        """Raise a ValueError for rows that cannot be packed."""
        if self.fp8 and x_TD.shape[1] % PACKED_COLUMNS:
            raise ValueError(
                f"model dim ({x_TD.shape[1]}) must be a multiple of {PACKED_COLUMNS} with "
                "NVLinkOptions.fp8_dispatch (True): pad it, or let rows travel as they are"
            )

    def pack(self, x_TD: Tensor) -> Tensor:
        """Return what travels: x_TD, or [T, W]. No autograd."""
        return pack_rows(x_TD.contiguous()) if self.fp8 else x_TD

    def unpack(self, came_SN: Tensor, like: Tensor) -> Rows:
        """Return the rows that came, of the width and dtype of `like`; FP8 rows stay packed."""
        return Rows.from_packed(came_SN, like.shape[1], like.dtype) if self.fp8 else Rows(came_SN)

    def receiver(self) -> Receiver | None:
        """Return what receives the gradients of the experts' output; None = autograd does."""
        return Receiver() if self.fp8 else None


class Receiver:
    """A `GradientReceiver`: what autograd carries then is a handle, which nobody may read."""

    def __init__(self) -> None:
        self.takes_packed = False
        self._came: tuple[Tensor, Rows] | None = None

    def put(self, rows: Rows) -> Tensor:
        """Return what stands for these gradients, without memory."""
        handle = rows.values.new_empty(1, dtype=rows.dtype).expand(rows.values.shape)
        self._came = handle, rows
        return handle

    def take(self, dy: Tensor) -> Rows | None:
        """Return the rows; None where they came as they are."""
        came, self._came = self._came, None
        if came is not None and dy is not came[0]:
            raise RuntimeError(
                "gradients of the experts' output must not change between combine and the experts "
                "with NVLinkOptions.fp8_dispatch (True), which brings them as FP8: remove the hook"
            )
        return None if came is None else came[1]
