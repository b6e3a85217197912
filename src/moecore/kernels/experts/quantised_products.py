"""Grouped matmuls of a rank's experts whose operands are quantised: all recipes but "blockwise".

    ScaledMatmuls    FP8 with a scale per row or per tensor: "rowwise", "tensorwise"
    EmulatedMatmuls  a scale per block of 32 or 16: "mxfp8", "nvfp4"

X and H are saved for backward in the dtype of the rows, or by "mxfp8" and "nvfp4" in the format of
the recipe (`Recipe.keep_hidden`), and widened in backward. Each operand is quantised from the dtype
of the rows along the dim that its product sums. Source rows that were dispatched in FP8 are widened
first. The layers of these recipes are slower than those of "blockwise".

Letters: as in `contract.py`; P expert rows, each expert's padded with zeros to full blocks.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from moecore.base.options.precision import Recipe
from moecore.kernels.common import has_block_scaled_kernels, has_hopper_kernels
from moecore.kernels.experts.contract import MATRICES, ExpertWeights, GradTarget, Operand, Role
from moecore.kernels.experts.grouped_products import Matmuls
from moecore.kernels.grouped.block_scaled import block_scaled_gemm, block_scaled_wgrad
from moecore.kernels.grouped.gemm import grouped_gemm
from moecore.kernels.grouped.scaled import scaled_gemm, scaled_wgrad
from moecore.kernels.grouped.scaled_rows import (
    compute_row_amax,
    pad_offsets,
    pad_rows,
    quantise_expert_matrices,
    quantise_expert_rows,
)
from moecore.kernels.grouped.wgrad import grouped_wgrad, scale_and_store_grad
from moecore.kernels.rows.cast import has_cast_kernel
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.microscaled import quantise_microscaled, quantise_microscaled_matrices
from moecore.kernels.rows.microscaled_activation import ExpertOrder, microscaled_activation
from moecore.kernels.rows.microscaled_rows import pack_microscaled_rows
from moecore.kernels.rows.microscaling import transpose_matrices, unpack_matrices
from moecore.kernels.rows.record import Rows
from moecore.kernels.rows.scaling import Blocks, OperandPair
from moecore.kernels.rows.shard_blocks import transpose_values


class QuantisedMatrices:
    """Cache of w1 and w2 as quantised matmul operands, each quantised when it is first read."""

    def __init__(
        self,
        weights: ExpertWeights,
        quantise: Callable[..., OperandPair],  # (w_eNK, *, rows, columns)
        unpack: Callable[[Blocks, bool], Blocks],  # (all-gathered matrix, is_transposed)
    ) -> None:
        self.dtypes = {"w1": weights.w1_eCD.dtype, "w2": weights.w2_eDF.dtype}
        self._weights: ExpertWeights | None = weights
        self._quantise, self._unpack = quantise, unpack
        self._operands: dict[tuple[Role, bool], Blocks] = {}  # by role and whether transposed

    def get_operand(self, role: Role, is_transposed: bool) -> Blocks:
        """Return w1 or w2 (`role`), quantised for sums over columns, or over rows if transposed."""
        weights = self._weights
        assert weights is not None, "the weights were dropped"
        if weights.quantised is not None:
            pair: Any = weights.quantised[role == "w2"]
            if pair.columns is None:  # only one layout was all-gathered
                return self._unpack(pair.rows, is_transposed)
            return pair[is_transposed]  # type: ignore[no-any-return]
        key = role, is_transposed
        if key not in self._operands:
            w_eNK = weights.w1_eCD if role == "w1" else weights.w2_eDF
            pair = self._quantise(w_eNK, rowwise=not is_transposed, columnwise=is_transposed)
            for i, layout in enumerate(pair):
                if layout is not None:
                    self._operands[role, bool(i)] = layout
        return self._operands[key]

    def drop_matrices(self) -> None:
        """Free the matrices; `get_operand` must not be called after this call."""
        self._weights = None
        self._operands.clear()


class ScaledMatmuls(Matmuls):
    """`Matmuls` in FP8 with a scale per row or per tensor, by torch. A CPU runs plain PyTorch."""

    def __init__(self, index: ExpertIndex, weights: ExpertWeights, recipe: Recipe) -> None:
        self.recipe, self.offsets_e = recipe, index.offsets_e
        self.has_low_rank_kernels = has_hopper_kernels(index.weights_R.device)
        self.magnitudes = weights.magnitudes
        quantise = partial(quantise_by_rows, recipe=recipe)
        self.matrices = QuantisedMatrices(weights, quantise, _unpack_fp8)
        # by operand and whether its columns: the layout that was made together with the other one
        self._other_layouts: dict[tuple[Operand, bool], Blocks] = {}

    def multiply(self, rows_RK: Tensor, operand: Operand) -> Tensor:
        matrix = self.matrices.get_operand(*MATRICES[operand])
        a = self._quantise(operand, rows_RK)
        return scaled_gemm(a, matrix, self.offsets_e, rows_RK.dtype)

    def compute_weight_grad(
        self, dy_RN: Tensor, x_RK: Tensor, role: Role, target: GradTarget
    ) -> Tensor:
        dy = self._quantise("dh" if role == "w1" else "dy", dy_RN, columnwise=True)
        x = self._quantise("x" if role == "w1" else "a", x_RK, columnwise=True)
        grad_eNK = scaled_wgrad(dy, x, self._padded_e, dy_RN.dtype)
        target = target._replace(dtype=target.dtype or self.matrices.dtypes[role])
        return scale_and_store_grad(grad_eNK, *target)

    def drop_weights(self) -> None:
        self.matrices.drop_matrices()

    @cached_property
    def _padded_e(self) -> Tensor:
        """Running sum of the experts' row counts, each padded to a multiple of 16."""
        return pad_offsets(self.offsets_e)

    def _quantise(self, operand: Operand, rows: Tensor, *, columnwise: bool = False) -> Blocks:
        """Quantise expert rows to sum over columns, or with `columnwise` over rows.

        If backward also reads the other layout, one pass makes both; the next call returns the
        other.
        """
        layout = self._other_layouts.pop((operand, columnwise), None)
        if layout is not None:
            return layout
        is_gradient = MATRICES[operand][1]
        has_both_layouts = is_gradient and self._is_read_in_backward(operand, not columnwise)
        amax = new_amax = None
        if self.magnitudes is not None:
            if is_gradient or not columnwise:  # forward records the amax of X and A
                new_amax = self.magnitudes.new_amax.get(operand)
            amax = self.magnitudes.past_amax[operand]
            if amax is not None and not self.magnitudes.has_all_amax:
                amax = compute_row_amax(rows, self.offsets_e, amax)
        layouts: Any = quantise_expert_rows(
            rows,
            self.offsets_e,
            self._padded_e if columnwise or has_both_layouts else None,
            per_row=self.recipe.scaling == "rowwise",
            power_of_two=self.recipe.power_of_two,
            fp8_format=self.recipe.grad_format if is_gradient else "e4m3",
            rowwise=has_both_layouts or not columnwise,
            columnwise=has_both_layouts or columnwise,
            amax=amax,
            new_amax=new_amax,
        )
        if has_both_layouts:
            self._other_layouts[operand, not columnwise] = layouts[not columnwise]
        return layouts[columnwise]  # type: ignore[no-any-return]

    def _is_read_in_backward(self, operand: Operand, columnwise: bool) -> bool:
        """Return whether backward sums an output gradient over columns, or rows (`columnwise`)."""
        if self.wants is None:
            return False
        if columnwise:
            return self.wants.w2_eDF if operand == "dy" else self.wants.w1_eCD
        return operand == "dh" and self.wants.x


def quantise_by_rows(w_eNK: Tensor, recipe: Recipe, **layouts: bool) -> OperandPair:
    """Quantise matrices, a scale per row or matrix; `layouts`: `rowwise` and `columnwise`."""
    per_row, power_of_two = recipe.scaling == "rowwise", recipe.power_of_two
    return quantise_expert_matrices(w_eNK, per_row=per_row, power_of_two=power_of_two, **layouts)


def _unpack_fp8(matrix: Blocks, is_transposed: bool) -> Blocks:
    """Return all-gathered FP8 matrices, one scale each, as an operand; transposed = a copy."""
    values = transpose_values(matrix.values) if is_transposed else matrix.values
    scales = matrix.scales[:, None].expand(values.shape[:2])
    return Blocks(values, scales.contiguous(), "row")


class _QuantisedRows(NamedTuple):
    """Expert rows in MXFP8, for sums over their columns and over rows."""

    rows: Any  # `Blocks`, or None if no product sums over the columns
    columns: Blocks | None
    dtype: torch.dtype  # of products


class EmulatedMatmuls(Matmuls):
    """`Matmuls` in MXFP8 or NVFP4; GPUs without tensor cores for the format emulate it in bf16."""

    def __init__(self, index: ExpertIndex, weights: ExpertWeights, recipe: Recipe) -> None:
        self.recipe, self.offsets_e = recipe, index.offsets_e
        self.packs_rows = recipe.hidden_format == "microscaled"
        device, length = index.weights_R.device, index.weights_R.shape[0]
        self.has_low_rank_kernels = has_hopper_kernels(device)
        self.is_packed = has_block_scaled_kernels(device, recipe.scaling)  # operands are bytes
        self._quantise_rows = partial(
            quantise_microscaled,
            recipe=recipe,
            num_experts=index.offsets_e.shape[0],
            pack=self.is_packed,
        )
        self.padded_rows = pad_rows(index.offsets_e, length, recipe.weight_multiple)
        quantise = partial(quantise_matrices_emulated, recipe=recipe)
        unpack = partial(_unpack_emulated, recipe, self.is_packed)
        self.matrices = QuantisedMatrices(weights, quantise, unpack)

    def activate(self, h_RC: Tensor, *inputs: Any) -> Any:
        if not self._has_fused_kernel(h_RC):
            return super().activate(h_RC, *inputs)
        order = ExpertOrder(self.offsets_e.shape[0], self.is_packed)
        operands: Any = (h_RC, None, *inputs, order)
        return _QuantisedRows(microscaled_activation(*operands)[0][0], None, h_RC.dtype)

    def activate_bwd(self, h_RC: Tensor, *inputs: Any) -> tuple[Any, Any, Any]:
        if not self._has_fused_kernel(h_RC):
            return super().activate_bwd(h_RC, *inputs)  # type: ignore[no-any-return]
        rows_P, _ = self._rows_and_experts_P
        order = ExpertOrder(self.offsets_e.shape[0], self.is_packed, rows_P)
        operands: Any = (h_RC, *inputs, order)
        (dh, dh_columns, a), dweights_R = microscaled_activation(*operands)
        dtype = h_RC.dtype
        return _QuantisedRows(dh, dh_columns, dtype), dweights_R, _QuantisedRows(None, a, dtype)

    def _has_fused_kernel(self, h_RC: Tensor) -> bool:
        """Return whether one kernel activates and quantises: for "nvfp4" two kernels are faster."""
        return self.recipe.scaling == "mxfp8" and has_cast_kernel(h_RC)

    def multiply(self, rows: Any, operand: Operand) -> Tensor:
        role, is_backward = MATRICES[operand]
        b = self.matrices.get_operand(role, is_backward)
        expert_R, dtype = self.padded_rows.expert_R, rows.dtype
        if isinstance(rows, _QuantisedRows):
            a: Blocks = rows.rows
        elif not rows.shape[0]:
            return rows.new_empty(0, b.values.shape[1])  # type: ignore[no-any-return]
        else:
            a = self._quantise_rows(rows, expert_M=expert_R, is_gradient=is_backward)
        if self.is_packed:
            return block_scaled_gemm(a, b, self.offsets_e, self.recipe, dtype)
        b_eKN = b.values.transpose(1, 2)
        if has_hopper_kernels(b_eKN.device):
            out_RN = grouped_gemm(a.values, b_eKN, self.offsets_e, dtype=torch.float32)
        else:
            out_RN = grouped_mm(a.values, b_eKN, offs=self.offsets_e)
        scales = a.scales[:-1] * b.scales
        return (out_RN * scales[expert_R.clamp(max=scales.shape[0] - 1), None]).to(dtype)

    def compute_weight_grad(self, dy: Any, x: Any, role: Role, target: GradTarget) -> Tensor:
        dy = self._quantise_transposed(dy, is_gradient=True)
        x = self._quantise_transposed(x, is_gradient=False)
        offsets_e = self.padded_rows.offsets_e
        target = target._replace(dtype=target.dtype or self.matrices.dtypes[role])
        if self.is_packed:
            return block_scaled_wgrad(dy, x, offsets_e, self.recipe, **target._asdict())
        source, other = (x, dy) if role == "w1" else (dy, x)
        grad_eNK = grouped_wgrad(
            source.values, other.values, offsets_e, transposed=role == "w1", dtype=torch.float32
        )
        grad_eNK = grad_eNK * (source.scales * other.scales)[:-1, None, None]
        return scale_and_store_grad(grad_eNK, *target)

    def pack_rows(self, rows: Rows) -> Rows:
        if rows.scales is not None and rows.scales.dtype == torch.uint8:  # packed already
            return rows
        return Rows(*pack_microscaled_rows(rows.widen().detach(), self.recipe), rows.dtype)

    def drop_weights(self) -> None:
        self.matrices.drop_matrices()

    @cached_property
    def _rows_and_experts_P(self) -> tuple[Tensor, Tensor]:
        """For each row of the padded layout, its expert row (-1 = padding) and expert, int64."""
        place_R, length = self.padded_rows.position_R, self.padded_rows.num_rows
        row_P = torch.arange(length, device=place_R.device)
        source_P = row_P.new_full((length + 1,), -1)
        source_P.index_copy_(0, place_R, row_P[: place_R.shape[0]])
        expert_P = torch.searchsorted(self.padded_rows.offsets_e, row_P.int(), right=True)
        return source_P[:-1], expert_P

    def _quantise_transposed(self, rows: Any, *, is_gradient: bool) -> Any:
        """Quantise expert rows, padded per expert, to an operand of a weight gradient."""
        if isinstance(rows, _QuantisedRows):
            return rows.columns
        source_P, expert_P = self._rows_and_experts_P
        return self._quantise_rows(
            rows, over_rows=True, is_gradient=is_gradient, source_rows_M=source_P, expert_M=expert_P
        )


def quantise_matrices_emulated(
    w_eNK: Tensor, recipe: Recipe, *, rowwise: bool = True, columnwise: bool = True
) -> OperandPair:
    """Return MXFP8 or NVFP4 operands: packed if the GPU supports the format, or dequantised."""
    is_packed = has_block_scaled_kernels(w_eNK.device, recipe.scaling)
    return quantise_microscaled_matrices(
        w_eNK, recipe, rowwise=rowwise, columnwise=columnwise, pack=is_packed
    )


def _unpack_emulated(recipe: Recipe, is_packed: bool, matrix: Blocks, transposed: bool) -> Blocks:
    """Return all-gathered packed matrices [N, K] as operand summed over K, or N if `transposed`."""
    if not is_packed:
        return unpack_matrices(matrix, recipe, transposed=transposed)
    return transpose_matrices(matrix) if transposed else matrix
