"""Recipe: how one kind of matrix product is computed in FP8. A record alone, without tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from moecore.base.fields import Bound, Rules, check_fields

Scaling = Literal["blockwise", "rowwise", "tensorwise"]
Format = Literal["e4m3", "e5m2"]
KeepHidden = Literal["wide", "fp8"]
Block = tuple[int | None, int | None]  # rows and columns of one scale; None = all of them

ACTIVATION_BLOCKS: dict[Scaling, Block] = {
    "blockwise": (1, 128),
    "rowwise": (1, None),
    "tensorwise": (None, None),
}
WEIGHT_BLOCKS: dict[Scaling, Block] = {**ACTIVATION_BLOCKS, "blockwise": (128, 128)}

History = Annotated[
    int, Bound(">=", 0), Bound("<=", 4096), "use 0 for scales of the tensor's own values"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How products of one role are quantised.

    A value is one FP8 number times its block's scale. Products are summed in fp32. Both operands
    are quantised in blocks along the dim that is summed, so what is multiplied along rows and along
    columns is quantised twice ("tensorwise": once, and transposed).

    Attributes:
        scaling: "blockwise": activations and gradients have a scale per 1 x 128 elements along the
            summed dim, weights one per 128 x 128; "rowwise": one per row of either operand;
            "tensorwise": one per tensor.
        power_of_two: whether scales are rounded up to powers of two, so that to quantise once more
            loses nothing but what underflows.
        grad_format: of gradients of outputs; activations and weights are always "e4m3". "e5m2" has
            two bits of mantissa and reaches 57344 ("hybrid"). Blocks of 128 leave no use for that
            range, so "blockwise" refuses it.
        amax_history: 0: a tensor's scale comes from its own largest value. n ("tensorwise"):
            delayed scaling, from the largest value of the last n optimizer steps, so that no pass
            over the tensor comes before its quantisation; what exceeds it saturates. 0 is
            recommended: delayed scaling clips an outlier that no earlier step had.
        keep_hidden: how the experts keep FC1's output for backward: "wide", in the dtype of the
            products, or "fp8", in blocks of 1 x 128 ("blockwise").

    Raises:
        ValueError: when a field or a combination of fields is not possible.

    Source: blocks of 1 x 128 and 128 x 128 are DeepSeek-V3's (arXiv:2412.19437); e5m2 for gradients
    and delayed scaling are those of "FP8 formats for deep learning" (arXiv:2209.05433).
    """

    scaling: Scaling = "blockwise"
    power_of_two: bool = True
    grad_format: Format = "e4m3"
    amax_history: History = 0
    keep_hidden: KeepHidden = "wide"

    def __post_init__(self) -> None:
        check_fields(self, self._rules)

    def _rules(self) -> Rules:
        rule = f"scaling ({self.scaling!r})"
        if self.grad_format == "e5m2" and self.scaling == "blockwise":
            yield (
                "grad_format",
                f"be 'e4m3' with {rule}, whose blocks need no wider range: drop it, or use "
                "scaling='rowwise' or 'tensorwise'",
            )
        if self.amax_history and self.scaling != "tensorwise":
            yield (
                "amax_history",
                f"be 0 with {rule}, whose scales come from the values they scale: drop it, or use "
                "scaling='tensorwise'",
            )
        if self.keep_hidden == "fp8" and self.scaling != "blockwise":
            yield (
                "keep_hidden",
                f"be 'wide' with {rule}, because what is kept has a scale per 128 columns: drop "
                "it, or use scaling='blockwise'",
            )

    @property
    def activation_block(self) -> Block:
        """Rows and columns of one scale of an activation or a gradient, summed over columns."""
        return ACTIVATION_BLOCKS[self.scaling]

    @property
    def weight_block(self) -> Block:
        """Rows and columns of one scale of a weight, summed over columns."""
        return WEIGHT_BLOCKS[self.scaling]

    @property
    def scale_format(self) -> str:
        """What the scales are: "fp32", or "fp32 power of two"."""
        return "fp32 power of two" if self.power_of_two else "fp32"

    def describe(self) -> str:
        """Return one line: scaling, formats, scales, and what else differs from the defaults.

        Example: "blockwise FP8: e4m3, 1x128 and weights 128x128, scales fp32 power of two".
        """
        formats = "e4m3" if self.grad_format == "e4m3" else "e4m3, gradients e5m2"
        blocks = {
            "blockwise": "1x128 and weights 128x128",
            "rowwise": "by row",
            "tensorwise": "by tensor",
        }[self.scaling]
        line = f"{self.scaling} FP8: {formats}, {blocks}, scales {self.scale_format}"
        if self.amax_history:
            line += f" of the last {self.amax_history} steps"
        return line if self.keep_hidden == "wide" else f"{line}, hidden kept in fp8"
