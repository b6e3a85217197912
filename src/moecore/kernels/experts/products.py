"""The products of a rank's experts: protocol, implementations, and which of them is used.

    grouped_products.py  GroupedProducts    over a grouped matmul of torch or Transformer Engine
    triton_products.py   TritonProducts     this package's kernels in 16 bits
    fp8_products.py      BlockwiseProducts  blockwise FP8: kernels on Hopper, references on a CPU

An implementation is constructed for one index, one activation and the weights. It chooses the
formats between its products, so a method's result is only an argument of its other methods.
Letters: as in `contract.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from moecore.base.options.precision import Recipe, Scaling
from moecore.kernels.common import has_hopper_kernels
from moecore.kernels.experts.contract import (
    FP8_PRODUCTS,
    ExpertMLPOptions,
    ExpertSpec,
    ExpertWeights,
    GradTarget,
    LowRankUpdate,
    ProductsName,
    RowMap,
    Wants,
)
from moecore.kernels.experts.fp8_products import BlockwiseProducts, quantise_weights_blockwise
from moecore.kernels.experts.grouped_products import GroupedProducts, Matmuls, TorchMatmuls
from moecore.kernels.experts.quantised_products import (
    EmulatedMatmuls,
    ScaledMatmuls,
    quantise_by_rows,
    quantise_emulated,
)
from moecore.kernels.experts.te_products import TEMatmuls, find_te_problem
from moecore.kernels.experts.triton_products import TritonProducts, find_triton_problem
from moecore.kernels.rows.e4m3 import BLOCK
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.record import Rows
from moecore.kernels.rows.scaling import OperandPair


class Products(Protocol):
    """FC1, activation and FC2 of a rank's experts and their gradients, in one precision.

    An instance belongs to one index and one set of weights. Low-rank updates are included. X are
    source rows, H is FC1's output, dY the gradient of the output.
    """

    row_map: RowMap
    index_cache: Any  # a value computed from the index, reused by backward's products; or None

    @property
    def accepts_packed_grads(self) -> bool:
        """Whether `dy` may be given rows packed by `pack_rows`, with equal results."""

    def prepare_rows(self, rows: Rows) -> Rows:
        """Return source rows, quantised if these products read and save them in FP8."""

    def fc1(self, rows: Rows, *, keep: bool) -> tuple[Rows | None, Any]:
        """Return H [R, C] as saved for backward, None unless `keep`, and the activation."""

    def fc2(self, a: Any) -> Tensor:
        """Return a @ w2^T [R, D], the output of each expert row, from `fc1`'s activation."""

    def recompute_h(self, rows: Rows) -> Rows:
        """Recompute H [R, C] in backward, from rows returned by `prepare_rows`."""

    def recompute_activation(self, h: Rows) -> Any:
        """Return the activation of H in the format of `activation_bwd`, without its gradients."""

    def prepare_output_grad(self, dy: Any, *, unsummed: bool, wants: Wants | None = None) -> Any:
        """Return the gradient of the output in the format that the methods below read.

        `dy` is [S, D], or [R, D] if `unsummed`. It may be `Rows` if `accepts_packed_grads`. `wants`
        has the gradients that this backward computes.
        """

    def activation_bwd(self, dy: Any, h: Rows) -> tuple[Any, Tensor, Any]:
        """Return dH, gradients of routing weights (fp32 [R]) and the activation; dy is prepared."""

    def fc1_dgrad(self, dh: Any) -> Tensor:
        """Return dH @ w1 [R, D], the gradient of each expert row of X."""

    def fc1_wgrad(self, rows: Rows, dh: Any, target: GradTarget) -> Tensor:
        """Return the gradient of w1: `target.out`, overwritten or added to, or a new tensor."""

    def fc2_wgrad(self, dy: Any, a: Any, target: GradTarget) -> Tensor:
        """Return the gradient of w2: `target.out`, overwritten or added to, or a new tensor."""

    def fc1_update_grad(self, rows: Rows, dh: Any) -> LowRankUpdate:
        """Return the gradients of A and B of the low-rank update of w1."""

    def fc2_update_grad(self, dy: Any, a: Any) -> LowRankUpdate:
        """Return the gradients of A and B of the low-rank update of w2."""

    def drop_weights(self) -> None:
        """Free the matrices. Only `fc1_wgrad` and `fc2_wgrad` may be called after this call."""


QUANTISE: dict[Scaling, Callable[..., OperandPair]] = {
    "blockwise": quantise_weights_blockwise,
    "rowwise": quantise_by_rows,
    "tensorwise": quantise_by_rows,
    "mxfp8": quantise_emulated,
    "nvfp4": quantise_emulated,
}


def find_products_problem(name: ProductsName, spec: ExpertSpec) -> str | None:
    """Return an error text if the products `name` cannot compute such experts, or None."""
    recipe = spec.recipe
    if recipe is not None and name not in FP8_PRODUCTS[recipe.backend]:
        return make_recipe_error(name, recipe)
    if uses_te(name, recipe):
        return find_te_problem(spec)
    if recipe is not None:
        return spec.find_fp8_problem(
            BLOCK if recipe.scaling == "blockwise" else recipe.weight_multiple
        )
    return find_triton_problem(spec) if name == "triton" else spec.find_grouped_problem()


def make_recipe_error(name: str, recipe: Recipe) -> str:
    """Return the error text for an expert backend that cannot run this recipe."""
    names = " or ".join(map(repr, FP8_PRODUCTS[recipe.backend]))
    if name == "te":
        names += ", or Recipe.backend ('moecore') 'te',"
    return (
        f"expert_backend ({name!r}) must be {names} for experts in FP8: drop it, or "
        "leave the experts out of Precision.roles"
    )


def uses_te(name: str, recipe: Recipe | None) -> bool:
    """Return whether products `name` with this recipe run Transformer Engine, with a host sync."""
    return name == "te" or (recipe is not None and recipe.backend == "te")


def choose_products(name: ProductsName, spec: ExpertSpec) -> ProductsName:
    """Resolve "auto" to the name of products. Raise ValueError if they cannot compute `spec`."""
    if name == "auto" and uses_te(name, spec.recipe):
        name = "te"
    elif name == "auto":
        is_hopper = spec.device is not None and has_hopper_kernels(spec.device)
        is_faster = is_hopper and spec.gated and find_products_problem("triton", spec) is None
        name = "triton" if is_faster or spec.recipe is not None else "torch"
    problem = find_products_problem(name, spec)
    if problem is not None:
        raise ValueError(problem)
    return name


def make_products(
    options: ExpertMLPOptions,
    index: ExpertIndex,
    weights: ExpertWeights,
    index_cache: Any = None,
) -> Products:
    """Return a `Products` object for `options.products`, a name returned by `choose_products`.

    `index_cache` is the attribute of the forward's products, for the same options and index; None =
    compute.
    """
    activation, recipe = options.activation, options.recipe
    matmuls: Matmuls
    # On meta this package's products have the shapes of Transformer Engine's.
    if options.products == "te" and index.row_ids_R.device.type != "meta":
        matmuls = TEMatmuls(index, weights, recipe, index_cache)
    elif recipe is None:
        if options.products == "triton":
            return TritonProducts(index, activation, weights, index_cache)
        matmuls = TorchMatmuls(index, weights)
    elif recipe.scaling == "blockwise":
        return BlockwiseProducts(index, activation, weights, recipe, index_cache)
    elif recipe.scaling in ("rowwise", "tensorwise"):
        matmuls = ScaledMatmuls(index, weights, recipe)
    else:
        matmuls = EmulatedMatmuls(index, weights, recipe)
    return GroupedProducts(index, activation, weights, matmuls)


def quantise_matrices(w_eNK: Tensor, recipe: Recipe) -> OperandPair:
    """Quantise all experts' matrices of FC1 or FC2 for sums over K and over N. No autograd."""
    return QUANTISE[recipe.scaling](w_eNK, recipe)
