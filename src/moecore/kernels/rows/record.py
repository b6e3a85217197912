"""Rows of tokens in the format in which they travelled.

Letters: S source rows, D columns.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from moecore.base.torch_names import register_dataclass
from moecore.kernels.rows.packed import packed_views, unpack_rows


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows and, where they are quantised, their scales.

    Attributes:
        values: [S, D] bf16, fp16, fp32 or fp64; float8_e4m3fn with scales, rows maybe strided.
        scales: None, or fp32 [S, ceil(D / 128)]: factor of each 128 columns.
        wide_dtype: with scales: the dtype in which products multiply.
        is_kept: the values are kept for backward anyway (a router reads them too), so that keeping
            them in fewer bytes would only be another copy.
    """

    values: Tensor
    scales: Tensor | None = None
    wide_dtype: torch.dtype | None = None
    is_kept: bool = False

    @classmethod
    def from_packed(cls, packed_SW: Tensor, dim: int, dtype: torch.dtype) -> Rows:
        """Return the rows that `pack_rows` packed, as views of the same memory."""
        return cls(*packed_views(packed_SW, dim), dtype)

    @property
    def dtype(self) -> torch.dtype:
        """In which products multiply the rows."""
        return self.values.dtype if self.wide_dtype is None else self.wide_dtype

    def widen(self) -> Tensor:
        """Return [S, D] in `dtype`: the values themselves where nothing is quantised."""
        if self.scales is None:
            return self.values
        return unpack_rows(self.values, self.scales, self.dtype)


# Units find the tensors of a module's inputs through pytree.
register_dataclass(Rows, field_names=[f.name for f in fields(Rows)], drop_field_names=[])
