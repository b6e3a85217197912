"""ExpertLayout: names, orders and shapes of a model's expert parameters.

Letters: D model dim, F hidden dim, E experts.
"""

from dataclasses import dataclass
from typing import Literal

from moecore.base.fields import CheckedRecord, FieldErrors
from moecore.base.options.layer import MoEConfig

GateUp = Literal["split", "concatenated", "interleaved", "separate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayout(CheckedRecord):
    """Names of a model's expert parameters, and the order of their dims; defaults: moecore's.

    Attributes:
        w1, w2, b1, b2: parameter names of FC1, FC2 and their biases.
        w3: parameter name of a gated FC1's up half with `gate_up` "separate"; not used otherwise.
        transposed: matrices are [E, in, out] instead of [E, out, in].
        gate_up: order of gate and up in a gated FC1. "split" is [E, 2, F, D]; "concatenated" is
            [E, 2F, D] with all of gate first; "interleaved" is [E, 2F, D] with alternating columns
            of FC1's output; "separate" is gate w1 and up w3, both [E, F, D]. Every forward
            concatenates separate parameters (2F * D per local expert, saved for backward); FC1 has
            no biases then. With etp, "concatenated" needs a strided placement: `full_tensor` of
            torch 2.11 cannot all-gather it and plain DCP refuses it.
    """

    w1: str = "w1"
    w2: str = "w2"
    w3: str = "w3"
    b1: str = "b1"
    b2: str = "b2"
    transposed: bool = False
    gate_up: GateUp = "split"

    def _find_field_errors(self) -> FieldErrors:
        if self.transposed and self.gate_up in ("split", "separate"):
            yield (
                "transposed",
                f"go with gate_up ({self.gate_up!r}) = 'concatenated' or 'interleaved', as models "
                "store transposed matrices: use one of them",
            )


def compute_expert_shapes(config: MoEConfig, layout: ExpertLayout) -> dict[str, tuple[int, ...]]:
    """Return {parameter name: unsharded shape} of a layer's experts."""
    E, D, F_ = config.num_experts, config.expert_dim, config.hidden_dim
    separate = config.gated and layout.gate_up == "separate"
    columns: tuple[int, ...] = (F_,) if separate else (config.fc1_dim,)
    if config.gated and layout.gate_up == "split":
        columns = (2, F_)
    w1 = (E, D, *columns) if layout.transposed else (E, *columns, D)
    w2 = (E, F_, D) if layout.transposed else (E, D, F_)
    shapes: dict[str, tuple[int, ...]] = {layout.w1: w1, layout.w2: w2}
    if separate:
        shapes[layout.w3] = w1
    if config.fc1_bias:
        shapes[layout.b1] = (E, *columns)
    if config.fc2_bias:
        shapes[layout.b2] = (E, D)
    return shapes
