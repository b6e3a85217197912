"""Records and protocols of the operation on a rank's experts.

Letters: S source rows, R expert rows (one per source row and local expert), e experts, D model dim,
F hidden dim, C columns of FC1 (2F for gated activations, otherwise F), K choices per source row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, Self, get_args

import torch
from torch import Tensor

from moecore.base.fields import CheckedRecord, FieldErrors
from moecore.base.options.precision import Recipe, RecipeBackend
from moecore.kernels.common import has_block_scaled_kernels, has_hopper_kernels
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.record import Rows
from moecore.kernels.rows.scaling import OperandPair

ProductsName = Literal["auto", "triton", "torch", "te"]
# The expert rows that products read: X, the activation, dY and dH.
Operand = Literal["x", "a", "dy", "dh"]
OPERANDS: tuple[Operand, ...] = get_args(Operand)
Role = Literal["w1", "w2"]
# For each operand, the matrix that multiplies it, and whether the product is in backward.
MATRICES: dict[Operand, tuple[Role, bool]] = {
    "x": ("w1", False),
    "a": ("w2", False),
    "dy": ("w2", True),
    "dh": ("w1", True),
}
ComputeGrad = Callable[..., Tensor]  # (*operands, GradTarget) -> the gradient
GROUPED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of torch's grouped product
# The expert backends that can run a recipe, by `Recipe.backend`.
FP8_PRODUCTS: dict[RecipeBackend, tuple[ProductsName, ...]] = {
    "moecore": ("auto", "triton"),
    "te": ("auto", "te"),
}
LEAVE_OUT = "leave them out of Precision.roles, or by an override"


class GradTarget(NamedTuple):
    """Where a kernel writes a weight's gradient: to `out`, added to `out`, or to a new tensor."""

    # contiguous, of the weight's shape, fp32 or bf16; None = a new tensor
    out: Tensor | None = None
    accumulate: bool = False  # whether the gradient is added to `out` instead of overwriting it
    dtype: torch.dtype | None = None  # dtype of a new tensor; None = the weight's
    scale: float = 1.0  # factor on the gradient


SINK = "_moecore_sink"  # attribute of a parameter: a function from a view's shape to a GradSink


class GradSink(Protocol):
    """Receives a weight's gradient in place of autograd, for example to accumulate or defer it."""

    def accumulate(self, compute: ComputeGrad, *operands: Any) -> Tensor | None:
        """Call compute(*operands, target) now or later, with a `GradTarget` for the result.

        Returns a gradient for autograd, or None if the sink stores the gradient.
        """

    def defer(self, compute: ComputeGrad, *operands: Any) -> bool:
        """If backward defers weight gradients, store the call and return True; otherwise False."""


def find_sink(param: Tensor, grad_shape: torch.Size) -> GradSink | None:
    """Return a parameter's `GradSink` for gradients of this shape; None = autograd gets them."""
    if torch.compiler.is_compiling():
        return None
    make: Callable[[torch.Size], GradSink | None] | None = getattr(param, SINK, None)
    return None if make is None else make(grad_shape)


class LowRankUpdate(NamedTuple):
    """LoRA matrices a and b of each expert's matrix (W + b @ a), or the gradients of a and b.

    With N adapters (`ExpertIndex.offsets_g`), dim 0 has e * N pairs of (expert, adapter).
    """

    a_erI: Tensor  # [e, r, in], r a multiple of 16 bytes, contiguous
    b_eOr: Tensor  # [e, out, r], scaling included, contiguous


class RowMap(NamedTuple):
    """The expert rows (copies of a token, one per expert) of each token, and each row's token."""

    row_ids_R: Tensor | None  # int32, source row of each expert row; None = row r is source row r
    slots_SK: Tensor  # int32, expert row of each source row's k-th choice; -1 = none
    num_rows: Tensor  # number of expert rows in use


@dataclass(frozen=True, slots=True)
class ProductSource:
    """The rows that a grouped matmul reads: token rows by index, or rows in expert order."""

    rows: Tensor
    row_ids_R: Tensor | None  # None = the rows are in expert order
    is_finite: bool = False  # whether unused rows after the last expert are finite too

    def gather_expert_rows(self) -> Tensor:
        """Return the rows in expert order, gathered by `row_ids_R` if it is not None."""
        ids_R = self.row_ids_R
        return self.rows if ids_R is None else self.rows.index_select(0, ids_R)


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """Amax of the experts' operands for delayed FP8 scaling: of earlier steps and of this step."""

    past_amax: Mapping[
        Operand, Tensor | None
    ]  # over earlier steps; None or 0 = use the rows' own amax
    has_all_amax: bool  # whether no value of `past` is 0
    new_amax: Mapping[Operand, Tensor]  # of this step, raised in place; empty = not recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights:
    """One rank's expert weights, LoRA updates and quantised copies, and sinks for gradients."""

    w1_eCD: Tensor  # FC1, gate rows then up rows, or the two alternating (`ActivationOptions`)
    w2_eDF: Tensor  # FC2
    # biases, or None
    b1_eC: Tensor | None = None
    b2_eD: Tensor | None = None
    # low-rank updates of w1 and w2, or None
    update1: LowRankUpdate | None = None
    update2: LowRankUpdate | None = None
    # the sinks of the gradients of w1 and w2, or None
    sinks: tuple[GradSink | None, GradSink | None] = (None, None)
    # w1 and w2 quantised, saved for backward, which then reads no values of the matrices. None =
    # forward and backward each quantise them
    quantised: tuple[OperandPair, OperandPair] | None = None
    magnitudes: Magnitudes | None = None  # None = no delayed scaling

    def list_updates(self) -> tuple[Tensor | None, ...]:
        """Return LoRA matrices [A of w1, B of w1, A of w2, B of w2]; None without a LoRA update."""
        return (*(self.update1 or (None, None)), *(self.update2 or (None, None)))

    def replace_updates(self, updates: Sequence[Any]) -> Self:
        """Return a copy with other LoRA matrices, in the order of `list_updates()`."""
        update1, update2 = (
            None if pair[0] is None else LowRankUpdate(*pair) for pair in (updates[:2], updates[2:])
        )
        return replace(self, update1=update1, update2=update2)


class GradFlags(NamedTuple):
    """For each gradient, whether the backward of the experts computes it."""

    x: bool  # of source rows, or of expert rows if the dispatcher sums them
    w1_eCD: bool
    w2_eDF: bool
    weights_R: bool  # routing weights
    # A and B of the low-rank updates
    a1_erD: bool = False
    b1_eCr: bool = False
    a2_erF: bool = False
    b2_eDr: bool = False


class GradientSender(Protocol):
    """A dispatcher that sends gradients of rows before the experts' backward has finished."""

    def start_sending(
        self,
        drows_RD: Tensor,
        dweights_R: Tensor | None,
        row_ids_R: Tensor | None,
        slots_SK: Tensor,
        num_rows: Tensor,
    ) -> None:
        """Start to send gradients of expert rows and routing weights (None = no gradient)."""


class GradientReceiver(Protocol):
    """A dispatcher that receives the gradients of the experts' outputs as FP8 rows."""

    accepts_packed_grads: bool  # set by the experts in forward, equal on all ranks

    def take_packed_grads(self, dy_RD: Tensor) -> Rows | None:
        """Return the FP8 gradients for the placeholder `dy_RD`; None = `dy_RD` contains values."""


@dataclass(frozen=True, slots=True)
class Refetch:
    """A function by which backward receives token rows again, in place of saving them."""

    fetch: Callable[..., Rows]  # fetch(*tensors) returns the rows bit for bit
    tensors: tuple[Tensor, ...]  # saved for backward in place of the rows


@dataclass(frozen=True, slots=True)
class UnsummedInput:
    """Inputs of experts if the dispatcher, not the experts, sums a token's expert rows."""

    # [R, D], a tensor that is not read, often without memory (stride 0), whose gradient is the
    # gradient of the expert rows
    grad_handle_RD: Tensor
    # sends the gradients of expert rows and routing weights while weight gradients are computed;
    # None = backward returns them to the dispatcher
    sender: GradientSender | None = None
    refetch: Refetch | None = None  # None = the source rows are saved for backward


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertMLPOptions(CheckedRecord):
    """Options of `expert_mlp`: activation, backend of the matmuls, recompute of FC1, precision."""

    activation: ActivationOptions  # between the two products
    # "triton" (moecore's kernels), "torch" (torch's grouped matmul), "te" (Transformer Engine), or
    # "auto": the recipe's backend, or "triton" for gated experts on Hopper, otherwise "torch"
    products: ProductsName = "torch"
    saves_h: bool = True  # whether FC1's output is saved; False = backward recomputes FC1
    # low-precision format of the products; None = the dtype of rows and weights
    recipe: Recipe | None = None

    def _find_field_errors(self) -> FieldErrors:
        if self.recipe is not None and self.products not in FP8_PRODUCTS[self.recipe.backend]:
            names = " or ".join(map(repr, FP8_PRODUCTS[self.recipe.backend]))
            yield "products", f"be {names} with a recipe ({self.recipe.scaling}): use it"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSpec:
    """Shapes, dtypes and options of experts, by which a backend decides if it supports them."""

    # as in `ActivationOptions`
    gated: bool
    interleaved: bool = False
    # whether matrices are stored as [e, in, out], so that their views are not contiguous
    transposed: bool = False
    # whether there are biases
    fc1_bias: bool = False
    fc2_bias: bool = False
    # whether the activation is a function of the model: `ActivationOptions.function`
    own_activation: bool = False
    # D and F of this rank; here and below None = not known
    dim: int | None = None
    hidden_dim: int | None = None
    # dtypes of rows and weights in the products; with a recipe, of rows
    dtypes: frozenset[torch.dtype] | None = None
    device: torch.device | None = None
    recipe: Recipe | None = None  # as in `ExpertMLPOptions`

    @classmethod
    def from_weights(
        cls,
        rows: Rows,
        weights: ExpertWeights,
        activation: ActivationOptions,
        recipe: Recipe | None = None,
    ) -> Self:
        """Return the spec of weights; if a recipe is given, `dtypes` has only the rows' dtype."""
        w1_eCD, w2_eDF = weights.w1_eCD, weights.w2_eDF
        of_weights = () if recipe is not None else (w1_eCD.dtype, w2_eDF.dtype)
        return cls(
            gated=activation.gated,
            interleaved=activation.interleaved,
            # Matrices that were all-gathered in FP8 have no memory, and meaningless strides.
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

    def find_torch_only_field(self) -> str | None:
        """Return the name of a used option that only torch's grouped matmul supports, or None."""
        fields = {
            "MoEConfig.fc1_bias": self.fc1_bias,
            "MoEConfig.fc2_bias": self.fc2_bias,
            "own activation of the model": self.own_activation,
            "ExpertLayout.transposed": self.transposed,
            "interleaved ExpertLayout.gate_up": self.interleaved and self.gated,
        }
        return next((field for field, is_set in fields.items() if is_set), None)

    def find_grouped_problem(self) -> str | None:
        """Return an error text if torch's grouped matmul cannot compute these experts, or None."""
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

    def find_dtype_problem(
        self,
        allowed_dtypes: Sequence[torch.dtype],
        products_name: str,
        fix: str = "set FSDPOptions.param_dtype",
    ) -> str | None:
        """Return an error text if rows and weights do not share an allowed dtype, or None."""
        if self.dtypes is None or any(self.dtypes == {dtype} for dtype in allowed_dtypes):
            return None
        names = ", ".join(sorted(map(str, self.dtypes)))
        return (
            f"dtype of the experts ({names}) must be {' or '.join(map(str, allowed_dtypes))} "
            f"for {products_name}: convert the model, or {fix}"
        )

    def find_fp8_size_problem(self, size_multiple: int) -> str | None:
        """Return an error text if the model or hidden dim is no multiple of `size_multiple`."""
        for name, size in (("dim", self.dim), ("hidden_dim / etp", self.hidden_dim)):
            if size is not None and size % size_multiple:
                return (
                    f"MoEConfig.{name} ({size}) must be a multiple of {size_multiple} "
                    f"for experts in this FP8: {LEAVE_OUT}"
                )
        return None

    def find_fp8_problem(self, block_size: int) -> str | None:
        """Return an error text if FP8 blocks of `block_size` do not support experts, or None."""
        field = self.find_torch_only_field()
        if field is not None:
            return f"{field} (True) must be False for experts in FP8: {LEAVE_OUT}"
        if (problem := self.find_fp8_size_problem(block_size)) is not None:
            return problem
        if self.device is None or self.device.type in ("cpu", "meta"):  # references: any dtype
            return None
        problem = self.find_dtype_problem((torch.bfloat16,), "experts in FP8")
        if problem is not None:
            return problem
        emulated = self.recipe if self.recipe is not None and self.recipe.is_emulated else None
        has_block_kernels = emulated and has_block_scaled_kernels(self.device, emulated.scaling)
        if not (has_hopper_kernels(self.device) or has_block_kernels):
            return (
                f"device of the experts ({self.device}) must be a Hopper GPU with Triton for "
                "experts in FP8, or a Blackwell GPU for 'mxfp8', or with Triton 3.9 for 'nvfp4': "
                "use precision=None"
            )
        return None
