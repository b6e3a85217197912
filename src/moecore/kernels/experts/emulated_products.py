"""Grouped matmuls of a rank's experts in MXFP8 and NVFP4.

On GPUs without tensor cores for these formats, each operand is rounded to them before a matmul in
bf16, which is for studying losses; a CPU multiplies in fp32. Tensor cores that multiply scales of
blocks take the same operands as bytes, and sum in fp32 in another order: `grouped/block_scaled.py`.
X and H are kept in the dtype of the rows, so recomputation rounds them alike. Rows are quantised in
expert order: a tensor's scale is that of an expert's rows. Those that travelled as FP8 are widened
first.

Letters: as in `contract.py`; P expert rows, each expert's padded to whole blocks with zeros.
"""

from __future__ import annotations

from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from moecore.base.options.precision import Recipe
from moecore.kernels.common import has_block_scaled_kernels, has_hopper_kernels
from moecore.kernels.experts.contract import (
    MATRICES,
    ExpertWeights,
    GradTarget,
    Operand,
    Role,
)
from moecore.kernels.experts.grouped_products import Matmuls
from moecore.kernels.experts.quantised_matrices import QuantisedMatrices
from moecore.kernels.grouped.block_scaled import block_scaled_gemm, block_scaled_wgrad
from moecore.kernels.grouped.gemm import grouped_gemm
from moecore.kernels.grouped.scaled_rows import pad_rows
from moecore.kernels.grouped.wgrad import grouped_wgrad, put_grad
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.microscaled import quantise_microscaled, quantise_microscaled_matrices
from moecore.kernels.rows.microscaling import transpose_matrices, unpack_matrices
from moecore.kernels.rows.scaling import Blocks, OperandPair


class EmulatedMatmuls(Matmuls):
    """Recipes "mxfp8" and "nvfp4"."""

    def __init__(self, index: ExpertIndex, weights: ExpertWeights, recipe: Recipe) -> None:
        self.recipe, self.offsets_e = recipe, index.offsets_e
        device, length = index.row_ids_R.device, index.row_ids_R.shape[0]
        self.has_low_rank_kernels = has_hopper_kernels(device)
        self.is_packed = has_block_scaled_kernels(device)  # operands are bytes
        self._emulate = partial(
            quantise_microscaled,
            recipe=recipe,
            num_experts=index.offsets_e.shape[0],
            pack=self.is_packed,
        )
        self.padded_rows = pad_rows(index.offsets_e, length, recipe.multiple)
        quantise = partial(quantise_emulated, recipe=recipe)
        unpack = _transpose_bytes if self.is_packed else partial(_unpack, recipe)
        self.matrices = QuantisedMatrices(weights, quantise, unpack)

    def multiply(self, rows_RK: Tensor, operand: Operand) -> Tensor:
        role, is_backward = MATRICES[operand]
        b = self.matrices.operand(role, is_backward)
        if not rows_RK.shape[0]:
            return rows_RK.new_empty(0, b.values.shape[1])
        expert_R, dtype = self.padded_rows.expert_R, rows_RK.dtype
        a = self._emulate(rows_RK, expert_M=expert_R, is_gradient=is_backward)
        if self.is_packed:
            return block_scaled_gemm(a, b, self.offsets_e, self.recipe, dtype)
        return _multiply_emulated(a, b, self.offsets_e, expert_R, dtype)

    def weight_grad(self, dy_RN: Tensor, x_RK: Tensor, role: Role, target: GradTarget) -> Tensor:
        dy, x = self._columns(dy_RN, is_gradient=True), self._columns(x_RK, is_gradient=False)
        offsets_e, dtype = self.padded_rows.offsets_e, target.dtype or self.matrices.dtypes[role]
        if self.is_packed:
            out, adds, scale = target.out, target.adds, target.scale
            return block_scaled_wgrad(
                dy, x, offsets_e, self.recipe, out=out, adds=adds, dtype=dtype, scale=scale
            )
        source, other = (x, dy) if role == "w1" else (dy, x)
        grad_eNK = grouped_wgrad(
            source.values, other.values, offsets_e, transposed=role == "w1", dtype=torch.float32
        )
        grad_eNK = grad_eNK * (source.scales * other.scales)[:-1, None, None]
        return put_grad(grad_eNK, target.out, target.adds, dtype, target.scale)

    def drop_weights(self) -> None:
        self.matrices.drop()

    @cached_property
    def _rows_P(self) -> tuple[Tensor, Tensor]:
        """Return the row that each padded row is, -1 for zeros, and its expert; int64 [P]."""
        place_R, length = self.padded_rows.place_R, self.padded_rows.length
        row_P = torch.arange(length, device=place_R.device)
        source_P = row_P.new_full((length + 1,), -1)
        source_P.index_copy_(0, place_R, row_P[: place_R.shape[0]])
        expert_P = torch.searchsorted(self.padded_rows.offsets_e, row_P.int(), right=True)
        return source_P[:-1], expert_P

    def _columns(self, rows: Tensor, *, is_gradient: bool) -> Blocks:
        """Return rows as an operand of sums over rows."""
        source_P, expert_P = self._rows_P
        return self._emulate(
            rows, over_rows=True, is_gradient=is_gradient, sources_M=source_P, expert_M=expert_P
        )


def quantise_emulated(
    w_eNK: Tensor, recipe: Recipe, *, rows: bool = True, columns: bool = True
) -> OperandPair:
    """Return one matrix of every expert as the operands of these matmuls. No autograd."""
    is_packed = has_block_scaled_kernels(w_eNK.device)
    return quantise_microscaled_matrices(w_eNK, recipe, rows=rows, columns=columns, pack=is_packed)


def _unpack(recipe: Recipe, matrix: Blocks, is_transposed: bool) -> Blocks:
    """Return an operand of a matrix that was all-gathered packed."""
    return unpack_matrices(matrix, recipe, transposed=is_transposed)


def _transpose_bytes(matrix: Blocks, is_transposed: bool) -> Blocks:
    return transpose_matrices(matrix) if is_transposed else matrix


def _multiply_emulated(
    a: Blocks, b: Blocks, offsets_e: Tensor, expert_R: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return each expert row times its expert's matrix, by operands of bf16."""
    b_eKN = b.values.transpose(1, 2)
    if has_hopper_kernels(b_eKN.device):
        out_RN = grouped_gemm(a.values, b_eKN, offsets_e, dtype=torch.float32)
    else:
        out_RN = grouped_mm(a.values, b_eKN, offs=offsets_e)
    scales = a.scales[:-1] * b.scales
    return (out_RN * scales[expert_R.clamp(max=scales.shape[0] - 1), None]).to(dtype)
