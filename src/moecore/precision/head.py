"""The products of an output head with a chunk of tokens: logits, and the gradients of both inputs.

    recipe       operands     logits       hidden states' gradient    weight's gradient
    None         dtype        fp32         dtype                      fp32
    "blockwise"  FP8          dtype        dtype                      fp32

In FP8, hidden states and the gradient of logits have a scale per 1 x 128 elements. For the weight's
gradient they have a scale per 128 x 128 elements, as the weight has. The products are the experts'
kernels with one expert (`kernels/grouped/fp8.py`).

Letters: C tokens of a chunk, D model dim, V vocabulary of this rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.common import has_hopper_kernels, is_gpu
from moecore.kernels.cross_entropy import (
    cross_entropy_,
    cross_entropy_blocks,
    softmax_gradient_,
    softmax_gradient_blocks,
)
from moecore.kernels.grouped.fp8 import fp8_gemm, fp8_wgrad
from moecore.kernels.rows.e4m3 import BLOCK
from moecore.kernels.rows.quantised import (
    gather_row_blocks,
    quantise_rows,
    quantise_weights,
    tile_tokens,
)
from moecore.kernels.rows.row_tiles import RowTiles, map_row_tiles
from moecore.kernels.rows.scaling import Blocks


class HeadProducts:
    """Computes an output head's logits and the gradients of both inputs, chunk by chunk of tokens.

    Call `compute_logits` first for each chunk: the other methods read the hidden states that it
    saves. `training`: whether a backward follows.
    """

    chunks = 1  # chunks of tokens whose logits need the memory of one chunk of fp32 logits

    def __init__(self, weight_VD: Tensor, *, training: bool) -> None:
        self.weight_VD = weight_VD

    def compute_logits(self, hidden_CD: Tensor) -> Tensor:
        """Return a chunk's logits [C, V], fp32 or fp64, and save its hidden states."""
        self.hidden_CD = hidden_CD
        dtype = torch.promote_types(hidden_CD.dtype, torch.float32)
        return mm_with_dtype(hidden_CD, self.weight_VD.t(), dtype)

    def compute_cross_entropy(
        self, logits_CV: Tensor, labels_C: Tensor, *, needs_grad: bool
    ) -> tuple[Tensor, Any]:
        """Return the chunk's summed loss, 0-dim, and with `needs_grad` the gradient of logits.

        The logits are overwritten. The gradient (a tensor or `Blocks`) is the argument of
        `write_d_hidden` and `add_d_weight`. Tokens with label -100 are ignored.
        """
        return cross_entropy_(logits_CV, labels_C, self.hidden_CD.dtype if needs_grad else None)

    def compute_softmax_gradient(
        self, logits_CV: Tensor, labels_C: Tensor, row_max_C: Tensor, sums_C: Tensor
    ) -> Any:
        """Return softmax(logits) - one_hot(labels), for `write_d_hidden`. Overwrites the logits.

        `labels_C` are indices into this rank's part of the vocabulary, or -1. `row_max_C` and
        `sums_C` are the maximum and the sum of exp(x - maximum) over the full vocabulary.
        """
        return softmax_gradient_(logits_CV, labels_C, row_max_C, sums_C, self.hidden_CD.dtype)

    def write_d_hidden(self, d_logits: Any, out_CD: Tensor) -> None:
        """Write d_logits @ weight, the gradient of the chunk's hidden states, to `out_CD`."""
        torch.mm(d_logits, self.weight_VD, out=out_CD)

    def add_d_weight(self, d_logits: Any, out_VD: Tensor, *, overwrites: bool) -> None:
        """Add d_logits^T @ hidden to `out_VD`, or overwrite `out_VD` if `overwrites`."""
        add_product_(out_VD, d_logits.t(), self.hidden_CD, beta=0 if overwrites else 1)


class BlockwiseHeadProducts(HeadProducts):
    """`HeadProducts` in FP8 with a "blockwise" recipe, for V and D that are multiples of 128."""

    # Logits take two bytes. Their gradient takes one byte per operand, and the second operand is
    # made after the logits are freed.
    chunks = 2

    def __init__(self, weight_VD: Tensor, *, training: bool, recipe: Recipe) -> None:
        super().__init__(weight_VD, training=training)
        self.power_of_two = recipe.power_of_two
        w_1VD = weight_VD.detach().contiguous()[None]
        self.weight = quantise_weights(w_1VD, power_of_two=self.power_of_two, columnwise=training)

    def compute_logits(self, hidden_CD: Tensor) -> Tensor:
        """Return a chunk's logits [C, V] in the dtype of `hidden_CD`; save its FP8 blocks."""
        self.dtype, C = hidden_CD.dtype, hidden_CD.shape[0]
        self.ends_1 = torch.full((1,), C, dtype=torch.int32, device=hidden_CD.device)
        self.tiles: RowTiles = map_row_tiles(self.ends_1, C)
        rows = quantise_rows(hidden_CD.contiguous(), power_of_two=self.power_of_two)
        self.hidden = gather_row_blocks(rows, None, None, None)
        return self._multiply(self.hidden, self.weight.rows)

    def compute_cross_entropy(
        self, logits_CV: Tensor, labels_C: Tensor, *, needs_grad: bool
    ) -> tuple[Tensor, Any]:
        """Return the summed loss and, with `needs_grad`, the gradient of logits in FP8 blocks."""
        if not needs_grad:
            return cross_entropy_(logits_CV, labels_C, None)
        return cross_entropy_blocks(logits_CV, labels_C, power_of_two=self.power_of_two)

    def compute_softmax_gradient(
        self, logits_CV: Tensor, labels_C: Tensor, row_max_C: Tensor, sums_C: Tensor
    ) -> Blocks:
        """Return the gradient of logits in FP8 blocks."""
        return softmax_gradient_blocks(
            logits_CV, labels_C, row_max_C, sums_C, power_of_two=self.power_of_two
        )

    def write_d_hidden(self, d_logits: Blocks, out_CD: Tensor) -> None:
        """Write d_logits @ weight, in FP8, to `out_CD`."""
        out_CD.copy_(self._multiply(d_logits, self.weight.columns))

    def add_d_weight(self, d_logits: Blocks, out_VD: Tensor, *, overwrites: bool) -> None:
        """Add d_logits^T @ hidden, in FP8, to `out_VD`, or overwrite `out_VD` if `overwrites`."""
        a, b = (tile_tokens(x, None, self.tiles) for x in (d_logits, self.hidden))
        fp8_wgrad(a, b, self.tiles, out=out_VD[None], accumulate=not overwrites, dtype=out_VD.dtype)

    def _multiply(self, a: Blocks, b: Blocks | None) -> Tensor:
        """Return a @ b^T of quantised operands, in the dtype of the hidden states."""
        assert b is not None
        return fp8_gemm(a, b, self.ends_1, self.tiles, self.dtype)


def find_fp8_head_problem(
    shape: Sequence[int], recipe: Recipe, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why a recipe does not support a head's local weight of `shape` [V, D], or None."""
    is_gpu = device.type == "cuda"
    if is_gpu and not has_hopper_kernels(device):
        return "its products need a GPU of Hopper and Triton"
    if not recipe.reads_blocks:
        return f"{recipe.describe()} has no products for it"
    if any(n == 0 or n % BLOCK for n in shape):
        return f"its weight {list(shape)} of a rank is no matrix of multiples of {BLOCK}"
    if dtype.itemsize != 2 and (is_gpu or dtype != torch.float32):
        return f"its products are in {dtype}"
    return None


def make_head_products(weight_VD: Tensor, recipe: Recipe | None, *, training: bool) -> HeadProducts:
    """Create the object for the matmuls of a head's local weight [V, D].

    `recipe` None = matmuls in the weight's dtype. `training`: whether a backward follows. Raises a
    ValueError if the recipe does not support the weight.
    """
    if recipe is None:
        return HeadProducts(weight_VD, training=training)
    reason = find_fp8_head_problem(weight_VD.shape, recipe, weight_VD.dtype, weight_VD.device)
    if reason is not None:
        raise ValueError(f"weight_VD must fit FP8 products, but {reason}: use recipe=None")
    return BlockwiseHeadProducts(weight_VD, training=training, recipe=recipe)


def mm_with_dtype(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b, rounded once to `dtype`."""
    if a.dtype == dtype:
        return a @ b
    if is_gpu(a):
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def add_product_(out: Tensor, a: Tensor, b: Tensor, *, beta: int) -> None:
    """Write out * beta + a @ b to `out`, in the dtype of `out`; beta 0 = overwrite."""
    if a.dtype == out.dtype or not is_gpu(a):
        out.addmm_(a.to(out.dtype), b.to(out.dtype), beta=beta)
    elif a.is_meta:  # on which torch 2.11 has no other product of two dtypes
        out.addmm_(a, b, beta=beta)
    else:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, beta=beta, out=out)
