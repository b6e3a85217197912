"""Recipe: how one kind of matrix product is computed in FP8. A record alone, without tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moecore._fields import check_fields

Scaling = Literal["blockwise", "rowwise", "tensorwise"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How products of one role are quantised.

    Attributes:
        scaling: "blockwise": activations and gradients have a scale per 1 x 128 elements along the
            summed dim, weights one per 128 x 128. "rowwise": one per row of either operand.
            "tensorwise": one per tensor.
        power_of_two: whether scales are rounded up to powers of two, so that to quantise once more
            loses nothing but what underflows.
    """

    scaling: Scaling = "blockwise"
    power_of_two: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
