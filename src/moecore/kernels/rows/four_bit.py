"""Weights in 4 bits: NF4, MXFP4 and NVFP4 values with scales, quantised and dequantised.

    format   values of the 16 codes         values of a group   scale of a group   first value in
    "nf4"    quantiles of N(0, 1), [-1, 1]  64                  fp32, max |x|      the high 4 bits
    "mxfp4"  E2M1: 0, 0.5, 1, .. 6, signed  32                  E8M0, 2^(s - 127)  the low 4 bits
    "nvfp4"  E2M1                           16                  E4M3 * row scale   the low 4 bits

A group is a run of neighbouring values of the last dim, the dim that forward sums. A value is
values[code] * scale in fp32, rounded once to the requested dtype. `dequantise` reads 0.53 to 0.56
bytes per value and writes the value. The row scale of NVFP4 is a power of two, E8M0, in the last
byte of the row's scales. NVIDIA's format has one fp32 scale per tensor, which the first part of a
tensor that is loaded in parts does not know. A value of NVFP4 is exact in bf16.

Source: NF4 arXiv:2305.14314, with the codes and the packing of bitsandbytes; MXFP4 the OCP
Microscaling Formats specification v1.0, packed as gpt-oss publishes it; NVFP4 arXiv:2509.25149.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from moecore.base.options.precision import FrozenFormat
from moecore.kernels.common import can_use_kernel, cdiv, launch
from moecore.kernels.ops import Op
from moecore.kernels.rows.e4m3 import FP8, from_e4m3
from moecore.kernels.rows.e4m3 import MAX as MAX_E4M3
from moecore.kernels.rows.scaling import Blocks
from moecore.kernels.triton_api import tl, triton

GROUPS_PER_PROGRAM = 64
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS = 127
E2M1_EXPONENT = 2  # of the largest value of E2M1, 6 = 1.5 * 2^2
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True, slots=True)
class FourBitFormat:
    """A 4-bit format: values of codes 0 to 15, number of values per scale, packing in bytes."""

    values: tuple[float, ...]
    group: int  # number of values that share a scale
    scale_dtype: torch.dtype  # fp32, or uint8 for the exponents of E8M0
    is_high_first: bool  # whether the first of two values is in the high 4 bits of a byte
    has_row_scale: bool = False  # whether scales are E4M3, and a row ends with a scale in E8M0

    @property
    def bits(self) -> float:
        """Bits per value, including its share of the group's scale, without the row's scale."""
        return 4 + 8 * self.scale_dtype.itemsize / self.group

    def count_bytes(self, shape: tuple[int, ...], k: int) -> int:
        """Return the bytes of values and scales of a tensor with groups along dim `k`."""
        numel = math.prod(shape)
        num_row_scales = numel // max(1, shape[k]) if self.has_row_scale else 0
        return int(numel * self.bits) // 8 + num_row_scales


FORMATS: dict[FrozenFormat, FourBitFormat] = {
    "nf4": FourBitFormat(NF4, 64, torch.float32, is_high_first=True),
    "mxfp4": FourBitFormat((*E2M1, *(-v for v in E2M1)), 32, torch.uint8, is_high_first=False),
    "nvfp4": FourBitFormat(
        (*E2M1, *(-v for v in E2M1)), 16, torch.uint8, is_high_first=False, has_row_scale=True
    ),
}


def make_empty_blocks(shape: tuple[int, ...], kind: FrozenFormat, device: torch.device) -> Blocks:
    """Allocate uninitialised 4-bit values and scales for a tensor of `shape` [..., K].

    The values are uint8 [..., K / 2]. The scales are [..., K / group], or [..., K / group + 1] in a
    format with row scales. K must be a multiple of `group`, the number of values per scale.
    """
    fmt = FORMATS[kind]
    *rows, K = shape
    assert K % fmt.group == 0, "the caller has checked K"
    values = torch.empty(*rows, K // 2, dtype=torch.uint8, device=device)
    num_scales = K // fmt.group + fmt.has_row_scale
    scales = torch.empty(*rows, num_scales, dtype=fmt.scale_dtype, device=device)
    return Blocks(values, scales, kind)


def quantise(x: Tensor, kind: FrozenFormat) -> Blocks:
    """Quantise x [..., K] to the nearest 4-bit values, ties to the lower value.

    K must be divisible by the number of values per scale. NF4 multiplies by the reciprocal of the
    scale. MXFP4's scale is 2^(floor(log2(max |x|)) - 2), which preserves values that are already
    MXFP4. NVFP4's scale is max |x| / 6 over the row scale, rounded to nearest E4M3. The row scale
    is the power of two with which the row's largest scale is in [224, 448]. The scale of zeros is 0
    (NF4 and NVFP4) or 2^-127 (MXFP4).
    """
    fmt = FORMATS[kind]
    x_GV = x.float().unflatten(-1, (-1, fmt.group))
    amax_G1 = x_GV.abs().amax(-1, keepdim=True)
    if fmt.has_row_scale:
        wide_G1 = amax_G1 / E2M1[-1]
        exponent_11 = torch.frexp(wide_G1.amax(-2, keepdim=True) / MAX_E4M3)[1]
        exponent_11 = exponent_11.clamp(-E8M0_BIAS, E8M0_BIAS)
        scales_G1 = torch.ldexp(wide_G1, -exponent_11).to(FP8)
        x_GV = (torch.ldexp(x_GV, -exponent_11) / scales_G1.float()).where(scales_G1.float() > 0, 0)
        of_rows = (exponent_11 + E8M0_BIAS).to(torch.uint8)
        scales = torch.cat([scales_G1.view(torch.uint8), of_rows], -2)
    elif fmt.scale_dtype == torch.uint8:
        exponent_G1 = torch.frexp(amax_G1)[1] - 1 - E2M1_EXPONENT  # amax = m * 2^e, 0.5 <= m < 1
        exponent_G1 = exponent_G1.where(amax_G1 > 0, -E8M0_BIAS).clamp(-E8M0_BIAS, E8M0_BIAS)
        x_GV = torch.ldexp(x_GV, -exponent_G1)
        scales = (exponent_G1 + E8M0_BIAS).to(torch.uint8)
    else:
        x_GV, scales = x_GV * (1 / amax_G1).where(amax_G1 > 0, 0), amax_G1
    values, codes = _sort_values(kind, x.device)
    borders = (values[1:] + values[:-1]) / 2
    place_GV = torch.bucketize(x_GV.contiguous(), borders, out_int32=True)
    pairs = codes[place_GV].flatten(-2).unflatten(-1, (-1, 2))
    first, second = pairs.unbind(-1)
    high, low = (first, second) if fmt.is_high_first else (second, first)
    return Blocks(high << 4 | low, scales.squeeze(-1), kind)


def dequantise(blocks: Blocks, dtype: torch.dtype) -> Tensor:
    """Return the values [..., K] of 4-bit blocks in `dtype`, a new contiguous tensor. No autograd.

    On CUDA one kernel runs, after copies of non-contiguous tensors. No host sync.
    """
    return _dequantise(blocks.values, blocks.scales, blocks.kind, dtype)


def _launch_dequantise(values: Tensor, scales: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Compute `dequantise` by the kernel if it can run, otherwise in plain PyTorch."""
    blocks = Blocks(values, scales, kind)
    if not can_use_kernel(values):
        return dequantise_ref(blocks, dtype)
    fmt = FORMATS[kind]  # type: ignore[index]
    out, num_groups = (
        _make_empty_values(values, scales, kind, dtype),
        2 * values.numel() // fmt.group,
    )
    launch(
        dequantise_four_bit_kernel,
        cdiv(num_groups, GROUPS_PER_PROGRAM),
        values.contiguous(),
        scales.contiguous(),
        _get_values(kind, values.device),
        out,
        num_groups,
        scales.shape[-1],
        PAIRS=fmt.group // 2,
        GROUPS=GROUPS_PER_PROGRAM,
        HIGH_FIRST=fmt.is_high_first,
        E8M0=fmt.scale_dtype == torch.uint8,
        ROW_SCALE=fmt.has_row_scale,
    )
    return out


def _make_empty_values(values: Tensor, scales: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Return an empty output of `dequantise`."""
    return values.new_empty(*values.shape[:-1], 2 * values.shape[-1], dtype=dtype)


_dequantise: Op[Tensor] = Op("dequantise_four_bit", _launch_dequantise, _make_empty_values)


def dequantise_ref(blocks: Blocks, dtype: torch.dtype) -> Tensor:
    """Compute `dequantise` in plain PyTorch."""
    fmt = FORMATS[blocks.kind]  # type: ignore[index]
    values, scales = _get_values(blocks.kind, blocks.values.device), blocks.scales
    of_bytes = torch.stack((values.repeat_interleave(16), values.repeat(16)), dim=-1)
    of_bytes = of_bytes if fmt.is_high_first else of_bytes.flip(-1)
    if fmt.scale_dtype == torch.uint8:
        powers = [2.0 ** (s - E8M0_BIAS) for s in range(255)]  # 255 means not a number
        table = torch.tensor([*powers, math.nan], dtype=torch.float32, device=scales.device)
        exponents = scales[..., -1:] if fmt.has_row_scale else scales
        of_groups = scales[..., :-1].contiguous().view(FP8).float() if fmt.has_row_scale else 1
        scales = table[exponents.int()] * of_groups
    grouped = of_bytes[blocks.values.int()].flatten(-2).unflatten(-1, (-1, fmt.group))
    wide: Tensor = grouped.mul_(scales[..., None]).flatten(-2).to(dtype)
    return wide


@triton.jit
def dequantise_four_bit_kernel(
    values_ptr,  # uint8 [num_groups, PAIRS]
    scales_ptr,  # fp32, or with E8M0 uint8, [num_groups], or with ROW_SCALE rows of row_scales
    table_ptr,  # fp32 [16], the values of the codes
    out_ptr,  # [num_groups, 2 * PAIRS], out
    num_groups,
    row_scales,  # scales of a row, with the scale of the row
    PAIRS: tl.constexpr,
    GROUPS: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
    E8M0: tl.constexpr,
    ROW_SCALE: tl.constexpr,
):
    """Dequantise GROUPS groups of 2 * PAIRS values; the values of a group share a scale."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = (group < num_groups)[:, None]
    at = group[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    pair = tl.load(values_ptr + at, mask=inside, other=0).to(tl.int32)
    is_group = group < num_groups
    if ROW_SCALE:
        row = group // (row_scales - 1)
        of_group = from_e4m3(tl.load(scales_ptr + group + row, mask=is_group, other=0))
        scale = tl.load(scales_ptr + (row + 1) * row_scales - 1, mask=is_group, other=0)
    else:
        scale = tl.load(scales_ptr + group, mask=is_group, other=0)
    if E8M0:
        bits = tl.where(scale == 0, 1 << 22, scale.to(tl.int32) << 23)  # 2^-127 is subnormal
        bits = tl.where(scale == 255, 0x7FC00000, bits)
        scale = bits.to(tl.float32, bitcast=True)
    if ROW_SCALE:
        scale *= of_group
    high = tl.load(table_ptr + (pair >> 4)) * scale[:, None]
    low = tl.load(table_ptr + (pair & 15)) * scale[:, None]
    out = tl.interleave(high, low) if HIGH_FIRST else tl.interleave(low, high)
    at = group[:, None] * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@cache
def _get_values(kind: FrozenFormat, device: torch.device) -> Tensor:
    """Return the values of a format's codes, fp32 [16]."""
    return torch.tensor(FORMATS[kind].values, dtype=torch.float32, device=device)


@cache
def _sort_values(kind: FrozenFormat, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the distinct values of a format in ascending order, fp32, and their codes, uint8."""
    codes = {value: code for code, value in reversed([*enumerate(FORMATS[kind].values)])}
    values = sorted(codes)  # without E2M1's negative zero
    sorted_codes = torch.tensor([codes[v] for v in values], dtype=torch.uint8, device=device)
    return torch.tensor(values, dtype=torch.float32, device=device), sorted_codes
