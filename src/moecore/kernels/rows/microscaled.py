"""Operands in MXFP8 and NVFP4: emulated, or packed for tensor cores that apply block scales.

`microscaling.py` defines the formats and has the references. The kernels give the same bits. NVFP4
takes two passes: the first computes the largest magnitudes, which give the tensor scales, and the
second quantises. If `hadamard`, both passes transform the rows, which are not stored in between.

    emulated  values in bf16 (fp32 on a CPU), in x's layout, and fp32 scales of tensors
    packed    bytes of values, the summed dim innermost; two codes of "nvfp4" in a byte, the first
              in the low bits. Scales of blocks, E8M0 as uint8 or E4M3, [M, K / 32] or [M, K / 16],
              not swizzled. "nvfp4" also has the largest magnitudes of tensors

Letters: T rows of x, M rows of an operand, K columns, e experts, N rows of a matrix. Bytes moved
with b per element: M * K * (b + 2), and M * K * b again for the largest magnitudes.
"""

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.common import cdiv, launch
from moecore.kernels.rows.cast import has_cast_kernel
from moecore.kernels.rows.e4m3 import FP8
from moecore.kernels.rows.microscaled_kernel import (
    PACKED_COLUMNS,
    PACKED_ROWS,
    VALUES,
    finite_amax_kernel,
    quantise_microscaled_kernel,
)
from moecore.kernels.rows.microscaling import (
    BACKWARD,
    FORWARD,
    PACKED_BACKWARD,
    PACKED_FORWARD,
    compute_finite_magnitude,
    get_emulated_dtype,
    quantise_microscaled_matrices_ref,
    quantise_microscaled_ref,
)
from moecore.kernels.rows.scaling import Blocks, OperandPair, round_up

TILE, NUM_WARPS = (16, 256), 4  # of one program: blocks of one row, and columns


class _MicroscaleInput(NamedTuple):
    """A tensor to quantise to MXFP8 or NVFP4, and the source and expert of each result row."""

    x_TK: Tensor
    shape: tuple[int, ...]  # of the operand before it is transposed: [M, K] or [e, N, K]
    source_rows_M: Tensor | None = None  # row of x of each operand row; -1 = zeros
    expert_M: Tensor | None = None  # expert of each operand row; None = row // N
    num_scales: int = 1  # tensor scales: experts + 1 (rows without an expert), or matrices
    hadamard: bool = False  # whether each 16 rows are first Hadamard-transformed

    def launch(
        self, kernel: Any, scale_block: tuple[int, int], *tensors: Any, **constants: Any
    ) -> None:
        """Launch a kernel on this input; `scale_block` is (rows, columns) of one scale."""
        (rows, columns), (*lead, N, K), x_TK = scale_block, self.shape, self.x_TK
        M, below = prod(lead) * N, TILE[0] if rows == 1 else 1
        launch(
            kernel,
            cdiv(M, rows * below) * cdiv(K, TILE[1]),
            *(x_TK, self.source_rows_M, self.expert_M, *tensors),
            *(x_TK.shape[0], M, N, x_TK.stride(0)),
            **constants,
            K=K,
            HADAMARD=self.hadamard,
            ROWS=rows,
            COLUMNS=columns,
            G=below,
            B=TILE[1] // columns,
            num_warps=NUM_WARPS,
        )

    def compute_amax(self, scale_block: tuple[int, int]) -> Tensor:
        """Return the largest finite magnitude for each tensor scale, fp32 [num_scales]."""
        amax = self.x_TK.new_zeros(self.num_scales, dtype=torch.float32)
        self.launch(finite_amax_kernel, scale_block, amax)
        return amax

    def quantise(
        self,
        recipe: Recipe,
        scale_block: tuple[int, int],
        amax: Tensor | None = None,
        *,
        pack: bool = False,
        transposed: bool = False,
        stochastic: bool = False,
    ) -> Blocks:
        """Return the quantised operand, in packed bytes if `pack`, otherwise emulated in bf16.

        `scale_block` is (rows, columns) of one scale. `amax`, fp32 [num_scales], gives the tensor
        scales of "nvfp4"; None = computed. `transposed` needs `pack`.
        """
        layout = (PACKED_ROWS, PACKED_COLUMNS)[transposed] if pack else VALUES
        is_nvfp4, new = recipe.scaling == "nvfp4", self.x_TK.new_empty
        if not is_nvfp4:
            amax = None
        elif amax is None:
            amax = self.compute_amax(scale_block)
        *lead, N, K = self.shape
        scales, block_scales = new(self.num_scales, dtype=torch.float32), None
        if pack:
            sizes, of_scales = [N, K], [N // scale_block[0], K // scale_block[1]]
            if transposed:
                sizes, of_scales = sizes[::-1], of_scales[::-1]
            out = new(*lead, sizes[0], sizes[1] // (1 + is_nvfp4), dtype=torch.uint8)
            block_scales = new(*lead, *of_scales, dtype=torch.uint8)
        else:
            out = new(self.shape, dtype=get_emulated_dtype(self.x_TK))
        self.launch(
            quantise_microscaled_kernel,
            scale_block,
            *(amax, out.view(torch.int32) if pack and transposed else out),
            *(block_scales, scales),
            NUM_SCALES=self.num_scales,
            LAYOUT=int(layout),
            POWER_OF_TWO=recipe.power_of_two,
            RANDOM=stochastic,
        )
        if block_scales is None:
            return Blocks(out, scales, FORWARD)
        if is_nvfp4:
            return Blocks(out, block_scales.view(FP8), PACKED_FORWARD, amax)
        return Blocks(out.view(FP8), block_scales, PACKED_FORWARD)


def quantise_microscaled(
    x_TK: Tensor,
    recipe: Recipe,
    *,
    over_rows: bool = False,
    is_gradient: bool = False,
    source_rows_M: Tensor | None = None,
    expert_M: Tensor | None = None,
    num_experts: int = 0,
    pack: bool = False,
) -> Blocks:
    """Quantise x's rows in MXFP8 or NVFP4 to an operand [M, K]; [K, M] if `over_rows` and `pack`.

    If `pack`, the result has bytes of values and of block scales. Otherwise it has values times
    block scales, in bf16 (fp32 on CPUs), and tensor scales, fp32 [e + 1]: of each expert, and of
    rows without an expert. No autograd, no host sync.

    Args:
        x_TK: any floating dtype.
        recipe: "mxfp8" or "nvfp4".
        over_rows: whether the matmul sums over rows, not columns. The summed dim has full blocks.
        is_gradient: whether `recipe.stochastic_rounding` applies to the values.
        source_rows_M: int64, the row of x of each row of the operand; -1 = zeros. None = row i is
            x's row i, and if `over_rows`, zeros fill the last block.
        expert_M: int64, the expert of each row; `num_experts` (e) = no expert. All rows of a block
            have one expert. None = one scale for all rows.
    """
    if not has_cast_kernel(x_TK):
        order: Any = dict(source_rows_M=source_rows_M, expert_M=expert_M, num_experts=num_experts)
        modes: Any = dict(over_rows=over_rows, is_gradient=is_gradient, pack=pack)
        return quantise_microscaled_ref(x_TK, recipe, **order, **modes)
    x_TK = x_TK.detach() if x_TK.stride(1) == 1 else x_TK.detach().contiguous()
    (T, K), size, is_nvfp4 = x_TK.shape, recipe.weight_multiple, recipe.scaling == "nvfp4"
    M = round_up(T, size) if over_rows else T
    M = M if source_rows_M is None else source_rows_M.shape[0]
    transforms = over_rows and is_nvfp4 and recipe.hadamard
    rows = _MicroscaleInput(x_TK, (M, K), source_rows_M, expert_M, num_experts + 1, transforms)
    return rows.quantise(
        recipe,
        (size, 1) if over_rows else (1, size),
        pack=pack,
        transposed=over_rows,
        stochastic=is_gradient and is_nvfp4 and recipe.stochastic_rounding,
    )


def compute_finite_amax(x_eNK: Tensor) -> Tensor:
    """Return the largest finite magnitude of each matrix of a contiguous [e, N, K], fp32 [e]."""
    if not has_cast_kernel(x_eNK):
        return compute_finite_magnitude(x_eNK).amax((1, 2))
    rows = x_eNK.view(-1, x_eNK.shape[2])
    return _MicroscaleInput(rows, x_eNK.shape, num_scales=x_eNK.shape[0]).compute_amax((1, 16))


def quantise_microscaled_matrices(
    w_eNK: Tensor,
    recipe: Recipe,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax_e: Tensor | None = None,
    pack: bool = False,
) -> OperandPair:
    """Quantise matrices to operands summed over K (`rowwise`) and N (`columnwise`). No autograd.

    In "nvfp4", whose blocks are square, both operands have the same numbers. `amax_e`, fp32 [e],
    replaces the largest finite magnitude of each matrix; None = computed. `pack` is as in
    `quantise_microscaled`; without `pack`, scales are fp32 [e].
    """
    w_eNK = w_eNK.detach().contiguous()
    make: Any = partial(quantise_microscaled_matrices_ref, w_eNK)
    if has_cast_kernel(w_eNK):
        rows_of_all = w_eNK.view(-1, w_eNK.shape[2])
        make = _MicroscaleInput(rows_of_all, w_eNK.shape, num_scales=w_eNK.shape[0]).quantise
    height, width = recipe.weight_block
    operands: list[Blocks | None] = [None, None]
    sides = ((rowwise, (height, width)), (columnwise, (width, height)))
    for i, (is_needed, block) in enumerate(sides):
        if is_needed:
            first = None if pack else operands[0]
            operand = first if first is not None and height == width else None
            operand = operand or make(recipe, block, amax_e, pack=pack, transposed=bool(i))
            if pack:
                operand = replace(operand, kind=(PACKED_FORWARD, PACKED_BACKWARD)[i])
                amax_e = operand.amax
            else:
                values = operand.values.transpose(1, 2) if i else operand.values
                operand = Blocks(values, (first or operand).scales, (FORWARD, BACKWARD)[i])
            operands[i] = operand
    return OperandPair(*operands)
