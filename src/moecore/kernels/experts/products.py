"""The products of a rank's experts: what they are asked for, and which of them there are.

    torch_products.py    torch's grouped product, any device
    triton_products.py   this package's kernels
    fp8_products.py      blockwise FP8: kernels on Hopper, references on a CPU
    scaled_products.py   FP8 with a scale per row or per tensor: torch's grouped product, likewise
    emulated_products.py MXFP8 and NVFP4: operands rounded to them, products of bf16
    block_scaled_products.py  the same on tensor cores that multiply scales of blocks
    te_products.py       Transformer Engine's, in 16 bits and by its recipes

A set of products is made for one index, one activation and the weights. Formats of what lies
between two products are its own: what a verb returns goes to its other verbs alone. Letters: as in
`contract.py`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from moecore.base.options.precision import Recipe, Scaling
from moecore.kernels.common import has_block_scaled_kernels, has_hopper_kernels
from moecore.kernels.experts.block_scaled_products import BlockScaledProducts
from moecore.kernels.experts.contract import (
    FP8_PRODUCTS,
    ExpertMLPOptions,
    ExpertSpec,
    ExpertWeights,
    GradTarget,
    LowRankUpdate,
    ProductsName,
    Wants,
)
from moecore.kernels.experts.emulated_products import EmulatedProducts
from moecore.kernels.experts.fp8_products import BlockwiseProducts
from moecore.kernels.experts.scaled_products import ScaledProducts
from moecore.kernels.experts.te_products import TEProducts
from moecore.kernels.experts.torch_products import TorchProducts
from moecore.kernels.experts.triton_products import HopperProducts, TritonProducts
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.record import Rows
from moecore.kernels.rows.scaling import Both


class Products(Protocol):
    """The six products of the two matrices, and the activation between them.

    What low-rank updates add is in the first four, and in two verbs of their own gradients.
    A class's `supports(spec)` returns, in one line, why it cannot multiply some experts, or None.
    """

    # row_ids_R, slots_SK and the number of used rows, as row movers take them
    where: tuple[Tensor, Tensor, Tensor]
    wants: Wants | None  # what a backward asks for, which puts it here
    of_index: Any  # what later products of the same options and index need not find again; or None

    @property
    def takes_packed(self) -> bool:
        """Whether unsummed gradients may come as `pack_rows` packs them, with the same results."""

    def as_kept(self, rows: Rows) -> Rows:
        """Return source rows as they are multiplied, and kept for backward; such rows as is."""

    def fc1(self, rows: Rows, *, keep: bool) -> tuple[Rows | None, Any]:
        """Return H, [R, C], as it is kept for backward, and the weighted activation."""
        # Of rows `as_kept`; without H where nobody keeps it.

    def fc2(self, a: Any) -> Tensor:
        """Return y_RD, the output of each expert row, of the activation."""

    def fc1_again(self, rows: Rows) -> Rows:
        """Return H, of rows `as_kept`."""

    def activation_again(self, h: Rows) -> Any:
        """Return the activation as `activation_bwd` does, without a gradient."""

    def dy(self, dy: Any, *, unsummed: bool) -> Any:
        """Return the gradient of the output, [S, D] or unsummed [R, D], for the verbs below."""
        # A tensor, or quantised `Rows` where `takes_packed`.

    def activation_bwd(self, dy: Any, h: Rows) -> tuple[Any, Tensor, Any]:
        """Return dH, dweights_R and the activation: FC2's input gradient, and through it."""

    def fc1_bwd(self, dh: Any) -> Tensor:
        """Return dx_RD, the gradient of each expert row."""

    def fc1_wgrad(self, rows: Rows, dh: Any, target: GradTarget) -> Tensor:
        """Put the gradient of w1 at the target; return it."""

    def fc2_wgrad(self, dy: Any, a: Any, target: GradTarget) -> Tensor:
        """Put the gradient of w2 at the target; return it."""

    def fc1_update_grad(self, rows: Rows, dh: Any) -> LowRankUpdate:
        """Return the gradients of the update of w1."""

    def fc2_update_grad(self, dy: Any, a: Any) -> LowRankUpdate:
        """Return the gradients of the update of w2."""

    def drop_weights(self) -> None:
        """Drop the matrices: gradients of weights alone are computed from here on."""


RecipeProducts = BlockwiseProducts | ScaledProducts | EmulatedProducts
OF_SCALING: dict[Scaling, type[RecipeProducts]] = {
    "blockwise": BlockwiseProducts,
    "rowwise": ScaledProducts,
    "tensorwise": ScaledProducts,
    "mxfp8": EmulatedProducts,
    "nvfp4": EmulatedProducts,
}
NAMED: dict[str, type[TorchProducts]] = {
    "triton": TritonProducts,
    "torch": TorchProducts,
    "te": TEProducts,
}


def why_not(name: ProductsName, spec: ExpertSpec) -> str | None:
    """Return why the products of a name cannot compute such experts, one line; None = they can."""
    recipe = spec.recipe
    if recipe is None:
        return NAMED["torch" if name == "auto" else name].supports(spec)
    if name not in FP8_PRODUCTS[recipe.backend]:
        return refuse_recipe(name, recipe)
    return (TEProducts if recipe.backend == "te" else OF_SCALING[recipe.scaling]).supports(spec)


def refuse_recipe(name: str, recipe: Recipe) -> str:
    """Return why experts in FP8 are not for what multiplies by another name."""
    names = " or ".join(map(repr, FP8_PRODUCTS[recipe.backend]))
    if name == "te":
        names += ", or Recipe.backend ('moecore') 'te',"
    return (
        f"expert_backend ({name!r}) must be {names} for experts in FP8: drop it, or "
        "leave the experts out of Precision.roles"
    )


def uses_te(name: str, recipe: Recipe | None) -> bool:
    """Whether Transformer Engine multiplies: the host reads how many rows each expert has."""
    return name == "te" or (recipe is not None and recipe.backend == "te")


def choose_products(name: ProductsName, spec: ExpertSpec) -> ProductsName:
    """Return a name but "auto", which is "triton" where that is supported and was faster."""
    if name == "auto" and uses_te(name, spec.recipe):
        name = "te"
    elif name == "auto":
        is_hopper = spec.device is not None and has_hopper_kernels(spec.device)
        is_faster = is_hopper and spec.gated and not why_not("triton", spec)
        name = "triton" if is_faster or spec.recipe is not None else "torch"
    problem = why_not(name, spec)
    if problem is not None:
        raise ValueError(problem)
    return name


def _products_of(recipe: Recipe, device: torch.device) -> type[RecipeProducts]:
    """Return moecore's own products by a recipe."""
    kind = OF_SCALING[recipe.scaling]
    if kind is EmulatedProducts and has_block_scaled_kernels(device):
        return BlockScaledProducts
    return kind


def make_products(
    options: ExpertMLPOptions,
    index: ExpertIndex,
    weights: ExpertWeights,
    of_index: Any = None,
) -> Products:
    """Return the products of options whose name `choose_products` gave."""
    # `of_index` is that of earlier products of the same options and index.
    known: dict[str, Any] = {} if of_index is None else {"of_index": of_index}
    recipe, device = options.recipe, index.row_ids_R.device
    if options.products == "te" and device.type != "meta":  # there moecore's have the shapes
        return TEProducts(index, options.activation, weights, recipe, **known)
    if recipe is not None:
        of_recipe = _products_of(recipe, device)
        return of_recipe(index, options.activation, weights, recipe, **known)
    kind: type[TorchProducts] = (
        TorchProducts if options.products == "te" else NAMED[options.products]
    )
    if kind is TritonProducts and index.row_ids_R.shape[0] and has_hopper_kernels(device):
        kind = HopperProducts
    return kind(index, options.activation, weights, **known)


def quantise_matrices(w_eNK: Tensor, recipe: Recipe) -> Both:
    """Return one matrix of every expert as the products of a recipe take it. No autograd."""
    return _products_of(recipe, w_eNK.device).quantise(w_eNK, recipe)
