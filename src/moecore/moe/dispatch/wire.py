"""Wire: format of a token's row between ranks, unchanged or packed as FP8 with scales.

Experts gather packed rows without unpacking. Letters: T tokens, D model dim, S source rows, R
expert rows, W bytes of a packed row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moecore.kernels.experts.contract import GradientReceiver
from moecore.kernels.rows.move import gather_rows, sum_rows
from moecore.kernels.rows.packed import PACKED_COLUMNS, PACKED_DTYPE, pack_rows
from moecore.kernels.rows.record import Rows
from moecore.moe.dispatch.collectives import exchange_with_grad


@dataclass(frozen=True, slots=True)
class Wire:
    """The format of rows that ranks send: unchanged, or packed as FP8 values with scales."""

    fp8: bool = False

    def check_dim(self, dim: int) -> None:
        """Raise a ValueError if rows of `dim` columns cannot be packed as FP8."""
        if self.fp8 and dim % PACKED_COLUMNS:
            raise ValueError(
                f"dim of the experts' rows ({dim}) must be a multiple of {PACKED_COLUMNS} with "
                "DispatchOptions.fp8 (True): pad it, or let rows travel as they are"
            )

    def pack_rows(self, x_TD: Tensor) -> Tensor:
        """Return the rows to send: x_TD unchanged, or packed FP8 rows [T, W]. No autograd."""
        return pack_rows(x_TD.contiguous()) if self.fp8 else x_TD

    def gather_send_rows(
        self, x_TD: Tensor, token_ids_M: Tensor, slots_TG: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Gather the rows to send; return (FP8 rows, handle), or (None, rows) without FP8.

        The handle is a placeholder without values, through which autograd passes rows' gradients.
        """
        row_map = (token_ids_M, slots_TG)
        if not self.fp8:
            return None, gather_rows(x_TD, *row_map)
        handle_MD = exchange_with_grad(
            x_TD,
            partial(make_row_handle, num_rows=token_ids_M.shape[0]),
            lambda d_MD: sum_rows(d_MD, *row_map),
        )
        return gather_fp8_rows(self.pack_rows(x_TD), *row_map), handle_MD

    def wrap_received_rows(
        self, rows_SN: Tensor, like: Tensor, grad_handle_SD: Tensor | None = None
    ) -> Rows:
        """Return received rows as `Rows`, of the width and dtype of `like`; FP8 stays packed."""
        if not self.fp8:
            return Rows(rows_SN)
        return Rows.from_bytes(rows_SN, like.shape[1], like.dtype, grad_handle_SD)

    def make_receiver(self) -> Receiver | None:
        """Return a `Receiver` of the gradients of experts' outputs; None if not sent as FP8."""
        return Receiver() if self.fp8 and not torch.compiler.is_compiling() else None


def make_row_handle(like: Tensor, num_rows: int) -> Tensor:
    """Return a placeholder [num_rows, D] with the dtype of `like` and one element of storage."""
    return like.new_empty(1).expand(num_rows, like.shape[1])


def gather_fp8_rows(words_TW: Tensor, token_ids_M: Tensor, slots_TG: Tensor) -> Tensor:
    """Return the packed rows `words_TW[token_ids_M]`; `slots_TG` is the inverse map."""
    words_TN = words_TW.view(torch.float32)  # the kernel copies the bits of a float
    return gather_rows(words_TN, token_ids_M, slots_TG).view(PACKED_DTYPE)


class Receiver:
    """Receives gradients of experts' outputs as FP8; autograd gets a placeholder tensor."""

    def __init__(self) -> None:
        self.accepts_packed_grads = False
        self.next: GradientReceiver | None = None  # of the second dispatch, if there are two
        self._entry: tuple[Tensor, Rows] | None = None

    def exchange_as_fp8(self, dy_TD: Tensor, exchange: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Send gradients dy as FP8 rows by `exchange`; return a placeholder for the received rows.

        If a second dispatch follows, return the received rows dequantised instead. If the experts
        accept no FP8 gradients, send nothing and return None.
        """
        if not (self.next or self).accepts_packed_grads:
            return None
        words_RW = exchange(pack_rows(dy_TD.contiguous()))
        rows = Rows.from_bytes(words_RW, dy_TD.shape[1], dy_TD.dtype)
        if self.next is not None:  # the second dispatch packs the rows again
            return rows.widen()
        grad_handle_RD = make_row_handle(dy_TD, words_RW.shape[0])
        self._entry = grad_handle_RD, rows
        return grad_handle_RD

    def take_packed_grads(self, dy: Tensor) -> Rows | None:
        """Return the received FP8 rows of the placeholder `dy`; None if dy was not sent as FP8."""
        entry, self._entry = self._entry, None
        if entry is not None and dy is not entry[0]:
            raise RuntimeError(
                "gradients of the experts' output must not change between combine and the experts "
                "with DispatchOptions.fp8 (True), which brings them as FP8: remove the hook"
            )
        return None if entry is None else entry[1]
