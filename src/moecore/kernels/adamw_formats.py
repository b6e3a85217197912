"""Optimizer state of AdamW in fewer bits: bf16 and FP8 moments, and bf16 weights with a remainder.

    round_stochastically  fp32 -> bf16 values
    encode_moments        both fp32 moments -> one byte per value, and exponents of blocks
    decode_moments        the inverse
    split_master          fp32 weight -> bf16 weight and int16 remainder
    join_master           the inverse, bit for bit

The functions named `_ref` compute the same in plain PyTorch.

Note "stochastic rounding": the second moment of a constant gradient closes 1 - beta2 of its gap per
step. Rounded to nearest in bf16, a change below 1/512 of the moment is lost, so with beta2 = 0.999
the moment would never fall again. Therefore a moment is rounded up with a probability equal to the
part that is cut off, and its mean is exact. The random bits are a hash of step, tensor and
position, so equal steps give equal bits.

Note "moments of one byte": the first moment is e4m3, the second e5m3 without a sign. Both are
multiplied by the power of two of their block of 128 neighbours. Both have three bits of mantissa
and no infinity. The largest values are 1.75 * 2^8 and 1.75 * 2^16, and all bits set are NaN.

- The second moment itself is stochastically rounded, not its root, so its mean is exact. Five bits
of exponent cover the range of e4m3 of the root; the unused sign bit is a third bit of mantissa.
- A stored moment changes by 1 - beta of its gap per step and is a value of the format. So it
changes to a neighbouring value from time to time, and its error does not grow with the steps.
- If the power of two of a block changes, all values stay representable. So decoded values are
encoded without an error, and bf16 represents both moments exactly.
- If a second moment became 0 and its first moment did not, the update would explode. So a positive
second moment is stored as at least the least value of its format, and at least the square of the
first moment's least value in its block. Then |m| / sqrt(v) of stored moments is at most 1 where m
was rounded up from below its least value. Elsewhere it is at most 1.125 * sqrt(1.125) times the
exact ratio, and 2 * sqrt(2) times where m and v are below 8 of their least values.

Note "remainder": an int16 has 2^16 values. 2^16 fp32 numbers are between the two midpoints around a
bf16 number, if exactly one midpoint belongs to the number. So weights are rounded to nearest with
ties away from zero: with ties to even, an even number would have 2^16 + 1 fp32 numbers. The bits of
the fp32 weight are the bits of the bf16 weight, shifted, plus the remainder.

Source: the hash is lowbias32 of https://nullprogram.com/blog/2018/07/31/.
"""

import torch
from torch import Tensor

from moecore.kernels.rows.e4m3 import from_e4m3
from moecore.kernels.triton_api import tl, triton

MOMENT_BLOCK = 128  # neighbours in memory that share an exponent
GOLDEN = 0x9E3779B9  # spreads steps and tensors over the hash's seeds
NEAREST = 0x8000  # noise that rounds to nearest
FIRST_BIAS, SECOND_BIAS = 7, 15  # of the exponents of both formats
FIRST_NAN, SECOND_NAN = 0x7F, 0xFF
_FIRST, _SECOND = tl.constexpr(FIRST_BIAS), tl.constexpr(SECOND_BIAS)
_FIRST_UNITS = tl.constexpr(2.0 ** (FIRST_BIAS + 2))  # least values in a scale
_SECOND_UNITS = tl.constexpr(2.0 ** (SECOND_BIAS + 2))
_FIRST_NAN, _SECOND_NAN = tl.constexpr(FIRST_NAN), tl.constexpr(SECOND_NAN)


def make_random_bits_ref(numel: int, step: Tensor, rounding_seed: int) -> Tensor:
    """Return 32 random bits per element, int64 [numel]: a hash of position, step and seed."""
    position = torch.arange(numel, device=step.device) & 0xFFFFFFFF
    seed = (step.long() * GOLDEN + (rounding_seed * GOLDEN * GOLDEN & 0xFFFFFFFF)) & 0xFFFFFFFF
    x = position ^ seed
    x = x ^ (x >> 16)
    x = _multiply_uint32(x, 0x7FEB352D)
    x = x ^ (x >> 15)
    x = _multiply_uint32(x, 0x846CA68B)
    return x ^ (x >> 16)


def _multiply_uint32(value: Tensor, factor: int) -> Tensor:
    """Return the low 32 bits of value * factor; two half products avoid an int64 overflow."""
    return ((value * (factor & 0xFFFF)) + (((value * (factor >> 16)) & 0xFFFF) << 16)) & 0xFFFFFFFF


def round_stochastically_ref(x: Tensor, random_bits: Tensor) -> Tensor:
    """Round x to bf16 stochastically and return fp32; `random_bits` are int64 below 2^16."""
    bits = (x.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF) + random_bits.view_as(x)
    bits = bits & 0xFFFF0000
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return torch.where(x.isfinite(), bits.int().view(torch.float32), x.float())


def encode_moments_ref(
    m: Tensor, v: Tensor, random_bits: Tensor | int = NEAREST | NEAREST << 16
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise AdamW's moments m and v (fp32 [N], v >= 0) to FP8: codes of m and v, exponents.

    The codes are uint8 [N]. The exponents are uint8 [ceil(N / 128), 2], for m and for v; a scale
    is 2^(exponent - 127). `random_bits`, int64 [N], has 16 bits for m in its low half, then 16 for
    v; the default rounds to nearest.
    """
    random_bits = torch.as_tensor(random_bits, device=m.device)
    first, m_scales = _compute_scales_ref(m, FIRST_BIAS)
    min_value = m_scales * 2.0 ** -(FIRST_BIAS + 2)
    v = torch.where(v > 0, torch.maximum(v, min_value * min_value), v)
    second, v_scales = _compute_scales_ref(v, SECOND_BIAS)
    x = v / v_scales
    x = torch.where(v > 0, x.clamp(min=2.0 ** -(SECOND_BIAS + 2)), x)
    codes = _encode_moment_ref(m.abs() / m_scales, random_bits & 0xFFFF, FIRST_BIAS, FIRST_NAN)
    codes = codes | torch.where(m.signbit(), 0x80, 0)
    codes_of_v = _encode_moment_ref(x, random_bits >> 16, SECOND_BIAS, SECOND_NAN)
    return codes.to(torch.uint8), codes_of_v.to(torch.uint8), torch.stack([first, second], 1)


def _compute_scales_ref(x: Tensor, exponent_bias: int) -> tuple[Tensor, Tensor]:
    """Return block exponents, uint8, and the power-of-two scale of each element of x, fp32 [N]."""
    numel = x.numel()
    size = torch.where(x.isfinite(), x, 0).abs()
    size = torch.nn.functional.pad(size, (0, -numel % MOMENT_BLOCK)).view(-1, MOMENT_BLOCK)
    bits = size.amax(1).view(torch.int32) if numel else size.new_zeros(0, dtype=torch.int32)
    # 1.75 is the largest mantissa: a larger one takes the next exponent.
    exponents = ((bits + 0x001FFFFF) >> 23) - (exponent_bias + 1)
    exponents = exponents.clamp(min=exponent_bias + 3)  # so that the least value is a normal number
    scales = (exponents << 23).view(torch.float32)
    return exponents.to(torch.uint8), scales.repeat_interleave(MOMENT_BLOCK)[:numel]


def _encode_moment_ref(x: Tensor, random_bits: Tensor, exponent_bias: int, nan_code: int) -> Tensor:
    """Round scaled x >= 0 with 16 random bits to int32 codes; NaN and inf become `nan_code`."""
    normal = ((x.view(torch.int32) + (random_bits << 4)) >> 20) - ((127 - exponent_bias) << 3)
    small = (x * 2.0 ** (exponent_bias + 2) + random_bits.float() * 2.0**-16).floor()
    codes = torch.where(x < 2.0 ** (1 - exponent_bias), small.nan_to_num(0).int(), normal)
    return torch.where(x.isfinite(), codes, nan_code)


def decode_moments_ref(m: Tensor, v: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Return AdamW's first and second moments in fp32 [N] from FP8 codes m and v and exponents."""
    scales = (exponents.int() << 23).view(torch.float32)
    scales = scales.repeat_interleave(MOMENT_BLOCK, 0)[: m.numel()]
    first = m.view(torch.float8_e4m3fn).float() * scales[:, 0]
    second = (v.int() << 20).view(torch.float32) * 2.0 ** (127 - SECOND_BIAS) * scales[:, 1]
    return first, torch.where(v == SECOND_NAN, torch.nan, second)


def split_master_ref(master_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Split an fp32 weight into bf16 and int16 remainder; `join_master_ref` restores all bits."""
    bits = master_weight.contiguous().view(torch.int32)
    is_nan = master_weight.isnan()
    high = torch.where(is_nan, 0x7FC0, (bits + 0x8000) >> 16)
    low = torch.where(is_nan, 0, bits)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join_master_ref(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 weight of a bf16 weight and an int16 remainder from `split_master_ref`."""
    high = weight.contiguous().view(torch.int16).int() << 16
    return (high + remainder.int()).view(torch.float32)


@triton.jit
def make_random_bits(positions, seed):  # element positions in the tensor; uint32
    """Return 32 random bits (uint32) for each position: a hash of position and seed."""
    x = positions.to(tl.uint32) ^ seed
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def round_stochastically(x, random_bits):  # fp32; uint32 of 16 bits
    """Round fp32 to bf16 stochastically by 16 random bits per value; return fp32."""
    bits = (x.to(tl.uint32, bitcast=True) + random_bits) & 0xFFFF0000
    # The sum of noise and an infinity or NaN could be another kind of number.
    return tl.where(tl.abs(x) < float("inf"), bits.to(tl.float32, bitcast=True), x)


@triton.jit
def _compute_exponents(x, EXPONENT_BIAS: tl.constexpr):  # fp32 [ROWS, MOMENT_BLOCK]
    """Return the exponent of each row's scale 2^(exponent - 127), int32 [rows]."""
    size = tl.abs(x)
    bits = tl.max(tl.where(size < float("inf"), size, 0.0), 1).to(tl.int32, bitcast=True)
    return tl.maximum((bits + 0x001FFFFF >> 23) - (EXPONENT_BIAS + 1), EXPONENT_BIAS + 3)


@triton.jit
def _compute_scale(exponent):  # int32
    """Return 2^(exponent - 127) in fp32."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _encode_moment(
    x,  # fp32, scaled
    random_bits,  # uint32 of 16 bits
    EXPONENT_BIAS: tl.constexpr,
    INVERSE_MIN_VALUE: tl.constexpr,
    NAN_CODE: tl.constexpr,
):
    """Round scaled x >= 0 to FP8; 1 / INVERSE_MIN_VALUE is the least value, NaN gives NAN_CODE."""
    random_bits = random_bits.to(tl.int32)
    normal = (x.to(tl.int32, bitcast=True) + (random_bits << 4) >> 20) - (
        (127 - EXPONENT_BIAS) << 3
    )
    small = (x * INVERSE_MIN_VALUE + random_bits.to(tl.float32) * 1.52587890625e-05).to(
        tl.int32
    )  # 2^-16
    codes = tl.where(x * INVERSE_MIN_VALUE < 8.0, small, normal)
    return tl.where(x < float("inf"), codes, NAN_CODE)


@triton.jit
def encode_moments(m, v, random_bits):  # fp32 [ROWS, MOMENT_BLOCK] twice; uint32
    """Quantise AdamW's moments m and v to FP8: uint8 codes of each, and int16 exponents per row.

    The low byte of an exponent belongs to m, and the high byte to v. `random_bits` has 16 bits for
    m in its low half, and 16 for v in its high half.
    """
    first = _compute_exponents(m, _FIRST)
    inverse = _compute_scale(254 - first)[:, None]
    min_value = _compute_scale(first)[:, None] / _FIRST_UNITS
    v = tl.where(v > 0, tl.maximum(v, min_value * min_value), v)
    second = _compute_exponents(v, _SECOND)
    x = v * _compute_scale(254 - second)[:, None]
    x = tl.where(v > 0, tl.maximum(x, 1.0 / _SECOND_UNITS), x)
    signs = (m.to(tl.int32, bitcast=True) >> 24) & 0x80
    codes = (
        _encode_moment(tl.abs(m) * inverse, random_bits & 0xFFFF, _FIRST, _FIRST_UNITS, _FIRST_NAN)
        | signs
    )
    codes_of_v = _encode_moment(x, random_bits >> 16, _SECOND, _SECOND_UNITS, _SECOND_NAN)
    return codes.to(tl.uint8), codes_of_v.to(tl.uint8), (first | second << 8).to(tl.int16)


@triton.jit
def decode_moments(m, v, exponents):  # uint8 [ROWS, MOMENT_BLOCK] twice, int16 [ROWS]
    """Return AdamW's first and second moments in fp32 from the outputs of `encode_moments`."""
    exponents = exponents.to(tl.int32)
    m = from_e4m3(m) * _compute_scale(exponents & 0xFF)[:, None]
    code = v.to(tl.int32)
    v = (code << 20).to(tl.float32, bitcast=True) * 5.192296858534828e33  # 2^112
    v *= _compute_scale(exponents >> 8 & 0xFF)[:, None]
    return m, tl.where(code == _SECOND_NAN, float("nan"), v)


@triton.jit
def join_master(weight, remainder):  # int16 twice, the first with the bits of bf16
    """Return the fp32 weight of a bf16 weight's bits and its remainder, both int16."""
    return ((weight.to(tl.int32) << 16) + remainder.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def split_master(master_weight):  # fp32
    """Split an fp32 weight into bf16 bits and a remainder, both int16, for `join_master`."""
    bits = master_weight.to(tl.int32, bitcast=True)
    high = tl.where(master_weight == master_weight, (bits + 0x8000) >> 16, 0x7FC0)
    return high.to(tl.int16), tl.where(master_weight == master_weight, bits, 0).to(tl.int16)
