"""How AdamW keeps its numbers in fewer bits: bf16 and FP8 moments, bf16 weights with a remainder.

    round_at_random          fp32 to the values of bf16
    encode_moments           fp32 to bytes and exponents of their blocks
    decode_moments           and back
    split_master             fp32 to bf16 and int16
    join_master              and back, to the bit

Functions named `_ref` are the same in plain PyTorch.

Note "rounded at random": the second moment of a constant gradient closes 1 - beta2 of its gap per
step. In bf16, rounded to nearest, anything below 1/512 of the moment is lost: with beta2 = 0.999
it would never fall again. So a moment is rounded up with a probability of the part that is cut
off, and on average nothing is lost. The bits come from a hash of step, tensor and position, so
equal steps give equal bits.

Note "moments of one byte": the first is e4m3, the second e5m3 without a sign, each times the power
of two of its block of 128 neighbours. Both have three bits of mantissa and no infinity; the largest
is 1.75 * 2^8 and 1.75 * 2^16, and all bits set are NaN. Why:

- The second moment is rounded at random itself, not its root: only then is nothing lost on average.
  Its five bits of exponent are as wide as e4m3 of the root, and its sign's bit makes it twice as
  fine.
- What is kept changes by 1 - beta of its gap per step and lies on the grid, so it moves by one
  value of the grid now and then: its error does not grow with the steps.
- A power of two moves no value off the grid when the largest of a block changes. So values that are
  decoded and encoded again are the same, and bf16 holds both moments without an error.
- A second moment that becomes 0 beside a first one that does not would make the update explode.
  Above 0 it is therefore kept as at least its own least value, and at least the square of the
  first moment's least value in its block. So |m| / sqrt(v) of what is kept is at most 1 where m was
  rounded up from below its least value. Else it is at most 1.125 * sqrt(1.125) times the exact one,
  and 2 * sqrt(2) times where m and v are below 8 of their least values.

Note "remainder": int16 has 2^16 values, and 2^16 fp32 numbers lie between two neighbours in the
middle of bf16 numbers if exactly one of both ends belongs to them. So weights are rounded to
nearest, ties away from zero: ties to even would have 2^16 + 1 of them for every even one. The fp32
number's bits are those of the weight, shifted, plus the remainder.

Source: the hash is lowbias32 of https://nullprogram.com/blog/2018/07/31/.
"""

import torch
from torch import Tensor

from moecore.kernels.common import cdiv, tl, triton
from moecore.kernels.rows.e4m3 import from_e4m3

MOMENT_BLOCK = 128  # neighbours in memory that share an exponent
GOLDEN = 0x9E3779B9  # spreads steps and tensors over the hash's seeds
NEAREST = 0x8000  # noise with which nothing is random
FIRST_BIAS, SECOND_BIAS = 7, 15  # of the exponents of both formats
FIRST_NAN, SECOND_NAN = 0x7F, 0xFF
_FIRST, _SECOND = tl.constexpr(FIRST_BIAS), tl.constexpr(SECOND_BIAS)
_FIRST_UNITS = tl.constexpr(2.0 ** (FIRST_BIAS + 2))  # least values in a scale
_SECOND_UNITS = tl.constexpr(2.0 ** (SECOND_BIAS + 2))
_FIRST_NAN, _SECOND_NAN = tl.constexpr(FIRST_NAN), tl.constexpr(SECOND_NAN)


def noise_ref(numel: int, step: Tensor, number: int) -> Tensor:
    """Return int64 [numel] with 32 bits of noise in each, for tensor `number`."""
    position = torch.arange(numel, device=step.device) & 0xFFFFFFFF
    seed = (step.long() * GOLDEN + (number * GOLDEN * GOLDEN & 0xFFFFFFFF)) & 0xFFFFFFFF
    x = position ^ seed
    x = x ^ (x >> 16)
    x = _times(x, 0x7FEB352D)
    x = x ^ (x >> 15)
    x = _times(x, 0x846CA68B)
    return x ^ (x >> 16)


def _times(x: Tensor, factor: int) -> Tensor:
    """Return the low 32 bits of a product, by halves of the factor: int64 has no room for all."""
    return ((x * (factor & 0xFFFF)) + (((x * (factor >> 16)) & 0xFFFF) << 16)) & 0xFFFFFFFF


def round_at_random_ref(x: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 values that bf16 has; 16 bits of each int64 of noise decide."""
    bits = (x.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF) + noise.view(x.shape)
    bits = bits & 0xFFFF0000
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return torch.where(x.isfinite(), bits.int().view(torch.float32), x.float())


def num_moment_blocks(numel: int) -> int:
    """Return how many exponents each moment of so many elements has."""
    return cdiv(numel, MOMENT_BLOCK)


def encode_moments_ref(
    m: Tensor, v: Tensor, noise: Tensor | int = NEAREST | NEAREST << 16
) -> tuple[Tensor, Tensor, Tensor]:
    """Return both moments in one byte each; see the note "moments of one byte".

    m and v >= 0 are fp32 [N]. Of the noise, int64 [N], the low 16 bits are for the first moment,
    the next 16 for the second; the default rounds both to nearest. Returned are uint8 [N] twice,
    and exponents uint8 [ceil(N / 128), 2]: scales are 2^(exponent - 127).
    """
    noise = torch.as_tensor(noise, device=m.device)
    first, m_scales = _scales_ref(m, FIRST_BIAS)
    min_value = m_scales * 2.0 ** -(FIRST_BIAS + 2)
    v = torch.where(v > 0, torch.maximum(v, min_value * min_value), v)
    second, v_scales = _scales_ref(v, SECOND_BIAS)
    x = v / v_scales
    x = torch.where(v > 0, x.clamp(min=2.0 ** -(SECOND_BIAS + 2)), x)
    codes = _codes_ref(m.abs() / m_scales, noise & 0xFFFF, FIRST_BIAS, FIRST_NAN)
    codes = codes | torch.where(m.signbit(), 0x80, 0)
    codes_of_v = _codes_ref(x, noise >> 16, SECOND_BIAS, SECOND_NAN)
    return codes.to(torch.uint8), codes_of_v.to(torch.uint8), torch.stack([first, second], 1)


def _scales_ref(x: Tensor, bias: int) -> tuple[Tensor, Tensor]:
    """Return exponents uint8 [blocks] and their powers of two, fp32 [N]."""
    numel = x.numel()
    size = torch.where(x.isfinite(), x, 0).abs()
    size = torch.nn.functional.pad(size, (0, -numel % MOMENT_BLOCK)).view(-1, MOMENT_BLOCK)
    bits = size.amax(1).view(torch.int32) if numel else size.new_zeros(0, dtype=torch.int32)
    # 1.75 is the largest mantissa: a larger one takes the next exponent.
    exponents = ((bits + 0x001FFFFF) >> 23) - (bias + 1)
    exponents = exponents.clamp(min=bias + 3)  # so that the least value is a normal number
    scales = (exponents << 23).view(torch.float32)
    return exponents.to(torch.uint8), scales.repeat_interleave(MOMENT_BLOCK)[:numel]


def _codes_ref(x: Tensor, noise: Tensor, bias: int, nan: int) -> Tensor:
    """Return int32 codes of what is scaled and has no sign."""
    normal = ((x.view(torch.int32) + (noise << 4)) >> 20) - ((127 - bias) << 3)
    small = (x * 2.0 ** (bias + 2) + noise * 2.0**-16).floor()
    codes = torch.where(x < 2.0 ** (1 - bias), small.nan_to_num(0).int(), normal)
    return torch.where(x.isfinite(), codes, nan)


def decode_moments_ref(m: Tensor, v: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Return in fp32, which bf16 holds too, what `encode_moments_ref` returned."""
    scales = (exponents.int() << 23).view(torch.float32)
    scales = scales.repeat_interleave(MOMENT_BLOCK, 0)[: m.numel()]
    first = m.view(torch.float8_e4m3fn).float() * scales[:, 0]
    second = (v.int() << 20).view(torch.float32) * 2.0 ** (127 - SECOND_BIAS) * scales[:, 1]
    return first, torch.where(v == SECOND_NAN, torch.nan, second)


def split_master_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight, bf16, and its remainder, int16; see the note "remainder"."""
    bits = x.contiguous().view(torch.int32)
    is_nan = x.isnan()
    high = torch.where(is_nan, 0x7FC0, (bits + 0x8000) >> 16)
    low = torch.where(is_nan, 0, bits)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join_master_ref(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 number of a bf16 weight and an int16 remainder."""
    high = weight.contiguous().view(torch.int16).int() << 16
    return (high + remainder.int()).view(torch.float32)


@triton.jit
def noise_of(i, seed):  # positions; uint32
    """Return 32 bits for each."""
    x = i.to(tl.uint32) ^ seed
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def round_at_random(x, noise):  # fp32; uint32 of 16 bits
    """Return fp32 values that bf16 has."""
    bits = (x.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
    # Of infinity and NaN the sum could be another kind of number.
    return tl.where(tl.abs(x) < float("inf"), bits.to(tl.float32, bitcast=True), x)


@triton.jit
def _exponents(x, BIAS: tl.constexpr):  # fp32 [ROWS, MOMENT_BLOCK]
    """Return int32 [ROWS]."""
    size = tl.abs(x)
    bits = tl.max(tl.where(size < float("inf"), size, 0.0), 1).to(tl.int32, bitcast=True)
    return tl.maximum((bits + 0x001FFFFF >> 23) - (BIAS + 1), BIAS + 3)


@triton.jit
def _power(exponent):  # int32
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _codes(
    x,  # fp32, scaled
    noise,  # uint32 of 16 bits
    BIAS: tl.constexpr,
    UNITS: tl.constexpr,
    NAN: tl.constexpr,
):
    """Return int32 codes of what has no sign."""
    noise = noise.to(tl.int32)
    normal = (x.to(tl.int32, bitcast=True) + (noise << 4) >> 20) - ((127 - BIAS) << 3)
    small = (x * UNITS + noise.to(tl.float32) * 1.52587890625e-05).to(tl.int32)  # 2^-16
    codes = tl.where(x * UNITS < 8.0, small, normal)
    return tl.where(x < float("inf"), codes, NAN)


@triton.jit
def encode_moments(m, v, noise):  # fp32 [ROWS, MOMENT_BLOCK] twice; uint32
    """Return codes, uint8 twice, and exponents, int16 [ROWS] with the first in its low byte."""
    first = _exponents(m, _FIRST)
    inverse = _power(254 - first)[:, None]
    min_value = _power(first)[:, None] / _FIRST_UNITS
    v = tl.where(v > 0, tl.maximum(v, min_value * min_value), v)
    second = _exponents(v, _SECOND)
    x = v * _power(254 - second)[:, None]
    x = tl.where(v > 0, tl.maximum(x, 1.0 / _SECOND_UNITS), x)
    signs = (m.to(tl.int32, bitcast=True) >> 24) & 0x80
    codes = _codes(tl.abs(m) * inverse, noise & 0xFFFF, _FIRST, _FIRST_UNITS, _FIRST_NAN) | signs
    codes_of_v = _codes(x, noise >> 16, _SECOND, _SECOND_UNITS, _SECOND_NAN)
    return codes.to(tl.uint8), codes_of_v.to(tl.uint8), (first | second << 8).to(tl.int16)


@triton.jit
def decode_moments(m, v, exponents):  # uint8 [ROWS, MOMENT_BLOCK] twice, int16 [ROWS]
    """Return both in fp32."""
    exponents = exponents.to(tl.int32)
    m = from_e4m3(m) * _power(exponents & 0xFF)[:, None]
    code = v.to(tl.int32)
    v = (code << 20).to(tl.float32, bitcast=True) * 5.192296858534828e33  # 2^112
    v *= _power(exponents >> 8 & 0xFF)[:, None]
    return m, tl.where(code == _SECOND_NAN, float("nan"), v)


@triton.jit
def join_master(weight, remainder):  # int16 twice, the first with the bits of bf16
    """Return fp32."""
    return ((weight.to(tl.int32) << 16) + remainder.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def split_master(x):  # fp32
    """Return int16 twice."""
    bits = x.to(tl.int32, bitcast=True)
    high = tl.where(x == x, (bits + 0x8000) >> 16, 0x7FC0)
    return high.to(tl.int16), tl.where(x == x, bits, 0).to(tl.int16)
