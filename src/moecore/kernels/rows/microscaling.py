"""MXFP8 and NVFP4 in plain PyTorch: values, scales, and operands of products.

CPUs compute with this file. It is also the reference for the kernels in `microscaled.py`.

             value                  scale of a block           scale of a tensor
    mxfp8    E4M3                   E8M0, of 1 x 32            none
    nvfp4    E2M1: 0, 1/2, 1, 3/2,  E4M3, of 1 x 16; weights   fp32; one per expert
             2, 3, 4, 6 and signs   16 x 16

    x is about value * scale of its block * scale of its tensor

Blocks extend along the summed dim. A value times the scale of its block is a number of bf16, so an
operand is rounded to such numbers ("emulated") and multiplied as bf16, on a CPU as fp32. Scales of
tensors multiply the sums in fp32.

An E8M0 scale is the least power of two with which a block's largest value fits 448 (`scaling.py`).
The OCP specification's example rounds scales down, so that large values saturate, which costs loss.

NVFP4: a tensor's scale is amax / (6 * 448), or the least power of two that is not less. A block's
scale is amax / 6 over the tensor's scale, rounded to the nearest E4M3. Values round to the nearest,
ties to even, and saturate at 6. NaN and infinity do not count for the amax of a tensor, and make
their block NaN.

Stochastic rounding hashes a fixed seed, an element's row and column in its operand, and its value
truncated to bf16. So repeats and recomputation draw the same numbers, without a state to save.

Letters: M, K rows and columns of an operand; P rows with each expert's padded to full blocks.

Source: OCP Microscaling Formats (MX) v1.0; arXiv:2506.08027 (MXFP8) for scales that round up;
arXiv:2509.25149 (NVFP4).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moecore.base.options.precision import Recipe
from moecore.kernels.rows.e4m3 import FP8, MAX, compute_block_scale_ref
from moecore.kernels.rows.scaling import Blocks, quantise_ref

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes, by the three low bits of a code
LARGEST_E2M1 = 6.0
TRANSFORMED = 16  # tokens of one Hadamard transform
# Random once and fixed, one vector for all layers as in the paper: bit i is of token i.
SIGNS = 0b1011_0010_0111_0001
SEED = 0x5EED
# Kinds of `Blocks`: values in bf16, or bytes; of matrices maybe transposed.
FORWARD, BACKWARD = "emulated", "emulated transposed"
PACKED_FORWARD, PACKED_BACKWARD = "packed", "packed transposed"


def _split_blocks(x: Tensor, scale_block: tuple[int, int]) -> Tensor:
    """View x [..., M, K] as blocks [..., M / rows, rows, K / columns, columns]; may copy."""
    (rows, columns), (*outer, M, K) = scale_block, x.shape
    return x.reshape(*outer, M // rows, rows, K // columns, columns)


def _expand_scales(scales: Tensor) -> Tensor:
    """Return a view [..., m, 1, k, 1] of scales [..., m, k], to broadcast with split blocks."""
    return scales[..., :, None, :, None]


def quantise_mxfp8(x: Tensor, scale_block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return E4M3 values of x's shape, and an fp32 scale, a power of two, per `scale_block`."""
    values, scales = quantise_ref(_split_blocks(x, scale_block), (-3, -1), power_of_two=True)
    return values.reshape(x.shape), scales.squeeze(-1).squeeze(-2)


def quantise_nvfp4(
    x: Tensor, scale_block: tuple[int, int], tensor_scale: Tensor, draws: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return fp32 values of x's shape, rounded to E2M1, and an E4M3 scale per `scale_block`.

    `tensor_scale`, fp32, broadcasts with the scales of blocks. `draws` has random numbers in [0, 1)
    for stochastic rounding: a value is rounded up if the fraction of the step above the lower
    magnitude exceeds the draw. None = to nearest, ties to even.
    """
    wide = _split_blocks(x.float(), scale_block)
    amax = wide.abs().amax((-3, -1), keepdim=True)
    scales = compute_nvfp4_scales(amax, _expand_scales(tensor_scale))
    step = scales.float() * _expand_scales(tensor_scale)
    values = to_e2m1(wide, step, None if draws is None else _split_blocks(draws, scale_block))
    return values.reshape(x.shape), scales.squeeze(-1).squeeze(-2)


def compute_nvfp4_scales(amax: Tensor, tensor_scale: Tensor) -> Tensor:
    """Return NVFP4's E4M3 scales of blocks from their amax; NaN where amax is not finite."""
    # A GPU multiplies by the reciprocal of a number, so what divides is a tensor.
    exact_scales = amax / torch.full_like(amax, LARGEST_E2M1) / tensor_scale
    return exact_scales.clamp(max=MAX).masked_fill(~amax.isfinite(), torch.nan).to(FP8)


def to_e2m1(x: Tensor, scale: Tensor, draws: Tensor | None = None) -> Tensor:
    """Return x / scale rounded to E2M1, as fp32; 0 if scale is 0. `draws`: see `quantise_nvfp4`."""
    x = (x / scale).masked_fill(scale == 0, 0)
    magnitude = x.abs().clamp(max=LARGEST_E2M1)
    scale = torch.where(magnitude < 4, 1.0, 2.0).masked_fill(magnitude < 2, 0.5)
    steps = magnitude / scale
    if draws is None:
        steps = steps.round()  # its ties are even codes, too
    else:
        down = steps.floor()
        steps = down + (steps - down > draws)
    return (steps * scale).copysign(x)


def pack_e2m1(values: Tensor) -> Tensor:
    """Return E2M1 values as uint8: each byte has two of the last dim, the first in its low bits."""
    # Magnitudes from 2 on are 4, 5, 6 and 7; NaN, of which only the scale is read, is 0.
    values = values.nan_to_num(0)
    magnitude = values.abs()
    large = torch.where(magnitude < 4, magnitude + 2, magnitude / 2 + 4)
    codes = torch.where(magnitude < 2, magnitude * 2, large) + 8 * values.signbit()
    low, high = codes.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4  # type: ignore[no-any-return]


def unpack_e2m1(packed_bytes: Tensor) -> Tensor:
    """Return fp32 values [..., 2n] of bytes [..., n] that `pack_e2m1` made."""
    codes = torch.stack((packed_bytes & 15, packed_bytes >> 4), -1).flatten(-2)
    bits = (codes & 7).float()
    large = torch.where(bits < 6, bits - 2, bits * 2 - 8)
    magnitude = torch.where(bits < 4, bits / 2, large)
    return torch.where(codes < 8, magnitude, -magnitude)


def unpack_matrices(weight: Blocks, recipe: Recipe, *, transposed: bool) -> Blocks:
    """Unpack all-gathered NVFP4 matrices [e, N, K] to a bf16 operand (fp32 on CPUs).

    The operand, [e, K, N] if `transposed`, has values times block scales, and tensor scales [e].
    """
    assert weight.amax is not None, "they were gathered by it"
    wide = _dequantise(unpack_e2m1(weight.values), weight.scales, recipe.weight_block)
    scales = compute_tensor_scales(weight.amax, recipe)
    return Blocks(wide.mT if transposed else wide, scales, (FORWARD, BACKWARD)[transposed])


def transpose_matrices(weight: Blocks) -> Blocks:
    """Transpose packed NVFP4 matrices [experts, N, K] to the packed operand summed over N."""
    values = weight.values
    codes = torch.stack((values & 15, values >> 4), -1).flatten(-2).mT
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    scales = weight.scales.view(torch.uint8).mT.contiguous().view(FP8)
    return Blocks((low | high << 4).contiguous(), scales, PACKED_BACKWARD, weight.amax)


def draw_uniform(x_MK: Tensor) -> Tensor:
    """Return pseudo-random fp32 numbers in [0, 1): a hash of each value and its position."""
    rows, columns = (torch.arange(n, dtype=torch.int32, device=x_MK.device) for n in x_MK.shape)
    hashed = _hash_int32(_hash_int32(rows + SEED)[:, None] + columns)
    hashed = _hash_int32(hashed ^ (x_MK.float().view(torch.int32) >> 16 & 0xFFFF))
    return (hashed >> 8 & 0xFFFFFF).float() * 2.0**-24


def _hash_int32(x: Tensor) -> Tensor:
    """Return a hash of int32, one-to-one: MurmurHash3's finalizer, whose products wrap around."""
    x = (x ^ (x >> 16 & 0xFFFF)) * (0x85EBCA6B - 2**32)
    x = (x ^ (x >> 13 & 0x7FFFF)) * (0xC2B2AE35 - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


def apply_hadamard(x_PC: Tensor) -> Tensor:
    """Return the Hadamard transform of each 16 rows, with fixed signs, in fp32.

    The transform is orthogonal: x^T y does not change if both x and y are transformed.
    """
    P, C = x_PC.shape
    # Made on the device: graphs capture no copies from the host.
    signs = (SIGNS >> torch.arange(TRANSFORMED, device=x_PC.device) & 1) * 2.0 - 1.0
    x = x_PC.float().reshape(-1, TRANSFORMED, C) * signs[:, None]
    x = x.reshape(-1, 2, 2, 2, 2, C)
    for dim in (1, 2, 3, 4):
        first, second = x.unbind(dim)
        x = torch.stack((first + second, first - second), dim)
    return x.reshape(P, C) * 0.25


def compute_tensor_scales(amax: Tensor, recipe: Recipe) -> Tensor:
    """Return tensors' fp32 scales from their largest finite magnitudes; 1 for "mxfp8"."""
    if recipe.scaling == "mxfp8":
        return torch.ones_like(amax)
    return compute_block_scale_ref(amax, recipe.power_of_two, LARGEST_E2M1 * MAX)[0]


def _quantise_blocks(
    x: Tensor,
    recipe: Recipe,
    scale_block: tuple[int, int],
    tensor_scale: Tensor,
    draws: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return values and block scales in the recipe's format; arguments as in `quantise_nvfp4`."""
    if recipe.scaling == "mxfp8":
        return quantise_mxfp8(x, scale_block)
    return quantise_nvfp4(x, scale_block, tensor_scale, draws)


def _dequantise(values: Tensor, scales: Tensor, scale_block: Any) -> Tensor:
    """Return values times the scales of their blocks (rows, columns), bf16, or fp32 on a CPU."""
    wide = _split_blocks(values.float(), scale_block) * _expand_scales(scales.float())
    return wide.reshape(values.shape).to(get_emulated_dtype(values))


def get_emulated_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of emulated matmul operands on x's device: fp32 on a CPU, or bf16."""
    return torch.float32 if x.device.type == "cpu" else torch.bfloat16


def _pack_operand(values: Tensor, scales: Tensor, amax: Tensor, *, transposed: bool) -> Blocks:
    """Return values and block scales as packed bytes, with rows innermost if `transposed`."""
    if transposed:
        values, scales = values.mT, scales.mT
    if values.dtype == FP8:
        exponents = scales.contiguous().view(torch.int32) >> 23  # of infinity 255: E8M0's NaN
        return Blocks(values.contiguous(), exponents.to(torch.uint8), PACKED_FORWARD)
    return Blocks(pack_e2m1(values).contiguous(), scales.contiguous(), PACKED_FORWARD, amax)


def quantise_microscaled_ref(
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
    """Compute `quantise_microscaled` in plain PyTorch."""
    size, is_nvfp4 = recipe.weight_multiple, recipe.scaling == "nvfp4"
    block = (size, 1) if over_rows else (1, size)
    x_MK = x_TK.float()
    if source_rows_M is not None:
        x_MK = pad(x_MK, (0, 0, 0, 1))[source_rows_M]  # -1 is the row of zeros
    elif over_rows:
        x_MK = pad(x_MK, (0, 0, 0, -x_MK.shape[0] % size))
    if over_rows and is_nvfp4 and recipe.hadamard:
        x_MK = apply_hadamard(x_MK)
    if expert_M is None:
        expert_M = torch.zeros(x_MK.shape[0], dtype=torch.int64, device=x_MK.device)
    amax = x_MK.new_zeros(num_experts + 1)
    if is_nvfp4:
        amax.scatter_reduce_(0, expert_M, compute_finite_magnitude(x_MK).amax(1), "amax")
    scales = compute_tensor_scales(amax, recipe)
    is_random = is_gradient and is_nvfp4 and recipe.stochastic_rounding
    of_blocks, draws = scales[expert_M[:: block[0]]][:, None], None
    if is_random:
        draws = draw_uniform(x_MK)
    values, block_scales = _quantise_blocks(x_MK, recipe, block, of_blocks, draws)
    if pack:
        return _pack_operand(values, block_scales, amax, transposed=over_rows)
    return Blocks(_dequantise(values, block_scales, block), scales, FORWARD)


def quantise_microscaled_matrices_ref(
    w_eNK: Tensor,
    recipe: Recipe,
    scale_block: tuple[int, int],
    amax_e: Tensor | None,
    *,
    pack: bool,
    transposed: bool,
) -> Blocks:
    """Return one operand of `quantise_microscaled_matrices`, in plain PyTorch."""
    w_eNK = w_eNK.float()
    amax_e = compute_finite_magnitude(w_eNK).amax((1, 2)) if amax_e is None else amax_e
    scales = compute_tensor_scales(amax_e, recipe)
    values, block_scales = _quantise_blocks(w_eNK, recipe, scale_block, scales[:, None, None])
    if pack:
        return _pack_operand(values, block_scales, amax_e, transposed=transposed)
    return Blocks(_dequantise(values, block_scales, scale_block), scales, FORWARD)


def compute_finite_magnitude(x: Tensor) -> Tensor:
    """Return |x| as fp32, and 0 for NaN and infinity."""
    x = x.float().abs()
    return torch.where(x.isfinite(), x, 0)
