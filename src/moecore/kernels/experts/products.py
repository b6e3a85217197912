"""The choice of an implementation of `Products` for experts, by a backend's name and a recipe."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from moecore.base.options.precision import Recipe, Scaling
from moecore.kernels.common import has_hopper_kernels
from moecore.kernels.experts.base_products import Products
from moecore.kernels.experts.contract import (
    FP8_PRODUCTS,
    ExpertMLPOptions,
    ExpertSpec,
    ExpertWeights,
    ProductsName,
)
from moecore.kernels.experts.fp8_products import BlockwiseProducts, quantise_weights_blockwise
from moecore.kernels.experts.grouped_products import GroupedProducts, Matmuls, TorchMatmuls
from moecore.kernels.experts.quantised_products import (
    EmulatedMatmuls,
    ScaledMatmuls,
    quantise_by_rows,
    quantise_matrices_emulated,
)
from moecore.kernels.experts.te_products import TEMatmuls, find_te_problem
from moecore.kernels.experts.triton_products import TritonProducts, find_triton_problem
from moecore.kernels.rows.e4m3 import BLOCK
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.scaling import OperandPair

QUANTISE: dict[Scaling, Callable[..., OperandPair]] = {
    "blockwise": quantise_weights_blockwise,
    "rowwise": quantise_by_rows,
    "tensorwise": quantise_by_rows,
    "mxfp8": quantise_matrices_emulated,
    "nvfp4": quantise_matrices_emulated,
}


def find_products_problem(products_name: ProductsName, spec: ExpertSpec) -> str | None:
    """Return an error text if this backend does not support experts of this spec, or None."""
    recipe = spec.recipe
    if recipe is not None and products_name not in FP8_PRODUCTS[recipe.backend]:
        return make_recipe_error(products_name, recipe)
    if uses_transformer_engine(products_name, recipe):
        return find_te_problem(spec)
    if recipe is not None:
        is_blockwise = recipe.scaling == "blockwise"
        return spec.find_fp8_problem(BLOCK if is_blockwise else recipe.weight_multiple)
    return find_triton_problem(spec) if products_name == "triton" else spec.find_grouped_problem()


def make_recipe_error(products_name: str, recipe: Recipe) -> str:
    """Return the error text for an expert backend that cannot run this recipe."""
    names = " or ".join(map(repr, FP8_PRODUCTS[recipe.backend]))
    if products_name == "te":
        names += ", or Recipe.backend ('moecore') 'te',"
    return (
        f"expert_backend ({products_name!r}) must be {names} for experts in FP8: drop it, or "
        "leave the experts out of Precision.roles"
    )


def uses_transformer_engine(products_name: str, recipe: Recipe | None) -> bool:
    """Return whether this backend, with this recipe, computes by Transformer Engine."""
    return products_name == "te" or (recipe is not None and recipe.backend == "te")


def choose_products(products_name: ProductsName, spec: ExpertSpec) -> ProductsName:
    """Return the name of the expert backend; "auto" becomes the best for device and recipe.

    Raises a ValueError if the backend does not support experts of this spec.
    """
    if products_name == "auto" and uses_transformer_engine(products_name, spec.recipe):
        products_name = "te"
    elif products_name == "auto":
        is_hopper = spec.device is not None and has_hopper_kernels(spec.device)
        is_faster = is_hopper and spec.gated and find_products_problem("triton", spec) is None
        products_name = "triton" if is_faster or spec.recipe is not None else "torch"
    problem = find_products_problem(products_name, spec)
    if problem is not None:
        raise ValueError(problem)
    return products_name


def make_products(
    options: ExpertMLPOptions, index: ExpertIndex, weights: ExpertWeights, index_cache: Any = None
) -> Products:
    """Return the `Products` of `options.products`, a name that `choose_products` returned.

    `index_cache`: the attribute of an earlier object for the same index; None = compute it.
    """
    activation, recipe = options.activation, options.recipe
    matmuls: Matmuls
    # On meta this package's products have the shapes of Transformer Engine's.
    if options.products == "te" and index.weights_R.device.type != "meta":
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
    """Quantise each expert's matrix by the recipe, for sums over its columns and its rows."""
    return QUANTISE[recipe.scaling](w_eNK, recipe)
