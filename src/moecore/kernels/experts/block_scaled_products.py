"""Products of a rank's experts in MXFP8 and NVFP4, on tensor cores that multiply scales of blocks.

Operands are those of `emulated_products.py`, as bytes and scales of blocks, and so are the products
but for the order of sums, which are in fp32: see `grouped/block_scaled.py`. Letters: likewise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from moecore.base.options.precision import Recipe
from moecore.kernels.experts.contract import GradTarget
from moecore.kernels.experts.emulated_products import EmulatedProducts
from moecore.kernels.grouped.block_scaled import block_scaled_gemm, block_scaled_wgrad
from moecore.kernels.rows.microscaled import emulated_matrices
from moecore.kernels.rows.microscaling import transposed_matrices
from moecore.kernels.rows.scaling import Blocks, Both


class BlockScaledProducts(EmulatedProducts):
    """The contract is `products.Products`, recipes "mxfp8" and "nvfp4"."""

    packed = True

    @override
    @staticmethod
    def quantise(w_eNK: Tensor, recipe: Recipe, **layouts: Any) -> Both:
        return emulated_matrices(w_eNK, recipe, packed=True, **layouts)

    @override
    def gathered(self, matrix: Blocks, backward: bool) -> Blocks:
        return transposed_matrices(matrix) if backward else matrix

    @override
    def _multiply(self, a: Blocks, b: Blocks, dtype: torch.dtype) -> Tensor:
        return block_scaled_gemm(a, b, self.offsets_e, self.recipe, dtype)

    @override
    def _outer(self, x: Blocks, y: Blocks, transposed: bool, target: GradTarget) -> Tensor:
        left, right = (y, x) if transposed else (x, y)
        how: Any = dict(out=target.out, adds=target.adds, dtype=target.dtype, scale=target.scale)
        return block_scaled_wgrad(left, right, self.padded.offsets_e, self.recipe, **how)
