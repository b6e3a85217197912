"""What the operation on a rank's experts takes, and who may take part in its backward.

Letters: S source rows, R expert rows (one per source row and local expert), e experts, D model dim,
F hidden dim, C columns of FC1 (2F for gated activations, else F), K choices per source row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from moecore.base.fields import CheckedRecord, Rules
from moecore.base.options.precision import Recipe, RecipeBackend
from moecore.kernels.common import has_block_scaled_kernels, has_hopper_kernels
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.record import Rows
from moecore.kernels.rows.scaling import OperandPair

ProductsName = Literal["auto", "triton", "torch", "te"]
# Expert rows that products multiply: X and the activation by w1 and w2, dY and dH by their
# transposes; and X by dH, the activation by dY.
Operand = Literal["x", "a", "dy", "dh"]
OPERANDS: tuple[Operand, ...] = get_args(Operand)
Role = Literal["w1", "w2"]
# By the rows: the matrix that multiplies them, and whether that is in the backward.
MATRICES: dict[Operand, tuple[Role, bool]] = {
    "x": ("w1", False),
    "a": ("w2", False),
    "dy": ("w2", True),
    "dh": ("w1", True),
}
ComputeGrad = Callable[..., Tensor]  # (*operands, GradTarget) -> the gradient
GROUPED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of torch's grouped product
# Who multiplies by a recipe, by its backend.
FP8_PRODUCTS: dict[RecipeBackend, tuple[ProductsName, ...]] = {
    "moecore": ("auto", "triton"),
    "te": ("auto", "te"),
}
LEAVE_OUT = "leave them out of Precision.roles, or by an override"


@dataclass(frozen=True, slots=True)
class GradTarget:
    """Where a weight's gradient goes."""

    # a tensor of the weight's shape, contiguous, fp32 or bf16; None = a new one
    out: Tensor | None = None
    adds: bool = False  # whether it is added to what `out` holds, else it takes its place
    dtype: torch.dtype | None = None  # of a new one; None = the weight's
    scale: float = 1.0  # of what goes there


SINK = "_moecore_sink"  # attribute of a parameter: shape of a view of it -> GradSink


class GradSink(Protocol):
    """Takes a weight's gradient past autograd, where a backward allows that."""

    def put(self, compute: ComputeGrad, *operands: Any) -> Tensor | None:
        """Let compute(*operands, target) put a gradient at a target: now, or once later."""
        # Return the gradient where it goes to autograd; None where the sink has taken it, or will.

    def defer(self, compute: ComputeGrad, *operands: Any) -> bool:
        """Let it be computed later where the running backward defers; return whether it does."""


def sink_of(param: Tensor, shape: torch.Size) -> GradSink | None:
    """Return what may take a parameter's gradient of a shape; None = autograd alone."""
    if torch.compiler.is_compiling():
        return None
    make: Callable[[torch.Size], GradSink | None] | None = getattr(param, SINK, None)
    return None if make is None else make(shape)


class LowRankUpdate(NamedTuple):
    """What is added to each expert's matrix, b @ a, and never formed; or the gradients of both."""

    a_erI: Tensor  # [e, r, in], r a multiple of 16 bytes, contiguous
    b_eOr: Tensor  # [e, out, r], scaling included, contiguous


class RowMap(NamedTuple):
    """Both directions between source rows and expert rows, as row movers take them."""

    row_ids_R: Tensor
    slots_SK: Tensor
    num_rows: Tensor  # of expert rows in use


@dataclass(frozen=True, slots=True)
class ProductSource:
    """Rows of a product: source rows, or rows in expert order where `row_ids_R` is None."""

    rows: Tensor
    row_ids_R: Tensor | None
    is_finite: bool = False  # also past the last expert's rows, where others may hold anything

    def expert_rows(self) -> Tensor:
        """Return rows in expert order."""
        ids_R = self.row_ids_R
        return self.rows if ids_R is None else self.rows.index_select(0, ids_R)


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """The largest magnitudes of expert rows, fp32 [1], with delayed scaling."""

    past: Mapping[Operand, Tensor | None]  # of earlier steps, for scales; None, 0 = of the rows
    is_sure: bool  # none is 0
    seen: Mapping[Operand, Tensor]  # grow to those of this step; empty = nothing is collected


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights:
    """One rank's experts, in the dtype of the products; with a recipe, in any of their own."""

    w1_eCD: Tensor  # FC1, gate rows then up rows, or the two alternating (`ActivationOptions`)
    w2_eDF: Tensor  # FC2
    # biases, or None
    b1_eC: Tensor | None = None
    b2_eD: Tensor | None = None
    # low-rank updates of w1 and w2, or None
    update1: LowRankUpdate | None = None
    update2: LowRankUpdate | None = None
    # of w1 and w2: what may take their gradients past autograd, or None
    sinks: tuple[GradSink | None, GradSink | None] = (None, None)
    # w1 and w2 as the recipe's products take them, kept for backward, which reads no values of the
    # matrices then. None = the products quantise them, in backward once more
    quantised: tuple[OperandPair, OperandPair] | None = None
    magnitudes: Magnitudes | None = None  # None = the recipe has no `amax_history`

    def updates(self) -> tuple[Tensor | None, ...]:
        """Return A and B of w1, then those of w2; None where there is no update."""
        return (*(self.update1 or (None, None)), *(self.update2 or (None, None)))

    def updated(self, updates: Sequence[Any]) -> ExpertWeights:
        """Return these weights with the updates that `updates()` has returned."""
        update1, update2 = (
            None if pair[0] is None else LowRankUpdate(*pair) for pair in (updates[:2], updates[2:])
        )
        return replace(self, update1=update1, update2=update2)


class Wants(NamedTuple):
    """Which gradients are asked for; x is that of source rows, or of expert rows unsummed."""

    x: bool
    w1: bool
    w2: bool
    weights: bool
    # of A or B
    update1: bool = False
    update2: bool = False


class GradientSender(Protocol):
    """A dispatcher's part in the experts' backward: it sends gradients of rows home early."""

    def start(
        self,
        drows_RD: Tensor,
        dweights_R: Tensor | None,
        row_ids_R: Tensor,
        slots_SK: Tensor,
        num_rows: Tensor,
    ) -> None:
        """Begin to send them; backward returns the same tensors. The index is `ExpertInput`'s."""


class GradientReceiver(Protocol):
    """A dispatcher's part in the experts' backward: gradients of outputs arrive as FP8 rows."""

    accepts_packed_grads: bool  # the experts' answer, in forward, on every rank the same

    def take(self, dy_RD: Tensor) -> Rows | None:
        """Return the rows for which a gradient stands; None = it is the gradient itself."""


@dataclass(frozen=True, slots=True)
class Refetch:
    """Brings the source rows once more in backward, in place of keeping them."""

    fetch: Callable[..., Rows]  # fetch(*kept) -> the same rows, bit for bit
    tensors: tuple[Tensor, ...]  # what autograd keeps instead


@dataclass(frozen=True, slots=True)
class UnsummedInput:
    """The part of a dispatcher that adds expert rows itself; source rows then have no gradient."""

    # [R, D], the autograd handle: the gradient of each expert row belongs to it. It has no memory
    # (stride 0) and is never read
    handle_RD: Tensor
    # sends these gradients and those of the routing weights home while the experts compute their
    # weights' gradients; None = backward returns them to the dispatcher
    sender: GradientSender | None = None
    refetch: Refetch | None = None  # brings the source rows in backward; None = they are kept


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertMLPOptions(CheckedRecord):
    """How `expert_mlp` computes."""

    activation: ActivationOptions  # between the two products
    # whose kernels multiply: "triton" (this package's), "torch" (torch's grouped product), "te"
    # (Transformer Engine's) or "auto": the recipe's, else "triton" for gated experts on Hopper
    # that it supports
    products: ProductsName = "torch"
    keep_h: bool = True  # keep FC1's output for backward; False keeps X alone and multiplies again
    # in which FP8 the products are computed; None = in the dtype of rows and weights
    recipe: Recipe | None = None

    def _rules(self) -> Rules:
        if self.recipe is not None and self.products not in FP8_PRODUCTS[self.recipe.backend]:
            names = " or ".join(map(repr, FP8_PRODUCTS[self.recipe.backend]))
            yield "products", f"be {names} with a recipe ({self.recipe.scaling}): use it"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSpec:
    """What decides which products can compute some experts; None = not known yet."""

    # as in `ActivationOptions`
    gated: bool
    interleaved: bool = False
    # matrices are stored as [e, in, out], so that their views have strides
    transposed: bool = False
    # whether there are biases
    fc1_bias: bool = False
    fc2_bias: bool = False
    # whether the activation is the model's, see `ActivationOptions.function`
    own_activation: bool = False
    # D and F of this rank
    dim: int | None = None
    hidden_dim: int | None = None
    # of rows and weights in the products; with a recipe, of rows
    dtypes: frozenset[torch.dtype] | None = None
    device: torch.device | None = None  # of both
    recipe: Recipe | None = None  # as in `ExpertMLPOptions`

    @classmethod
    def of(
        cls,
        rows: Rows,
        weights: ExpertWeights,
        activation: ActivationOptions,
        recipe: Recipe | None = None,
    ) -> ExpertSpec:
        """Return the spec of tensors at hand."""
        w1_eCD, w2_eDF = weights.w1_eCD, weights.w2_eDF
        of_weights = () if recipe is not None else (w1_eCD.dtype, w2_eDF.dtype)
        return cls(
            gated=activation.gated,
            interleaved=activation.interleaved,
            # Those that were gathered in FP8 have no memory, and strides that mean nothing.
            transposed=weights.quantised is None
            and not (w1_eCD.is_contiguous() and w2_eDF.is_contiguous()),
            fc1_bias=weights.b1_eC is not None,
            fc2_bias=weights.b2_eD is not None,
            own_activation=activation.function is not None,
            dim=w2_eDF.shape[1],
            hidden_dim=w2_eDF.shape[2],
            dtypes=frozenset((rows.dtype, *of_weights)),
            device=w1_eCD.device,
            recipe=recipe,
        )

    def torch_only_field(self) -> str | None:
        """Return the field that only torch's grouped matmul supports, or None."""
        fields = {
            "MoEConfig.fc1_bias": self.fc1_bias,
            "MoEConfig.fc2_bias": self.fc2_bias,
            "own activation of the model": self.own_activation,
            "ExpertLayout.transposed": self.transposed,
            "interleaved ExpertLayout.gate_up": self.interleaved and self.gated,
        }
        return next((field for field, is_set in fields.items() if is_set), None)

    def grouped_problem(self) -> str | None:
        """Return why grouped matmuls cannot multiply these (dtype, rows of 16 bytes), or None."""
        if self.dim is None or self.hidden_dim is None or self.dtypes is None:
            return None
        dtype = next(iter(self.dtypes))
        if dtype not in GROUPED:
            return (
                f"dtype of the experts ({dtype}) must be torch.float32, bfloat16 or float16 for "
                "grouped matmuls: convert the model, or use expert_backend='sequential'"
            )
        for name, size in (("dim", self.dim), ("hidden_dim / etp", self.hidden_dim)):
            if size * dtype.itemsize % 16:
                return (
                    f"MoEConfig.{name} ({size}) must be a multiple of {16 // dtype.itemsize} in "
                    f"{dtype} for grouped matmuls (16 bytes): pad it or use "
                    "expert_backend='sequential'"
                )
        return None

    def _multiplies_blocks(self) -> bool:
        """Whether the device has tensor cores for the recipe's blocks."""
        is_emulated = self.recipe is not None and self.recipe.is_emulated
        return self.device is not None and is_emulated and has_block_scaled_kernels(self.device)

    def fp8_size_problem(self, multiple: int) -> str | None:
        """Return which of D and F is no multiple of a recipe's, or None."""
        for name, size in (("dim", self.dim), ("hidden_dim / etp", self.hidden_dim)):
            if size is not None and size % multiple:
                return (
                    f"MoEConfig.{name} ({size}) must be a multiple of {multiple} for experts in "
                    f"this FP8: {LEAVE_OUT}"
                )
        return None

    def fp8_problem(self, multiple: int) -> str | None:
        """Return why FP8 cannot multiply experts, or None; `multiple` must divide D and F."""
        field = self.torch_only_field()
        if field is not None:
            return f"{field} (True) must be False for experts in FP8: {LEAVE_OUT}"
        if (problem := self.fp8_size_problem(multiple)) is not None:
            return problem
        if self.device is None or self.device.type in ("cpu", "meta"):  # references: any dtype
            return None
        if self.dtypes not in (None, {torch.bfloat16}):
            names = ", ".join(sorted(str(dtype) for dtype in self.dtypes or ()))
            return (
                f"dtype of the experts' rows ({names}) must be torch.bfloat16 for experts in FP8: "
                "convert the model, or set FSDPOptions.param_dtype"
            )
        if not (has_hopper_kernels(self.device) or self._multiplies_blocks()):
            return (
                f"device of the experts ({self.device}) must be a Hopper GPU with Triton for "
                "experts in FP8, or a Blackwell GPU with Triton 3.9 for 'mxfp8' and 'nvfp4': use "
                "precision=None"
            )
        return None
