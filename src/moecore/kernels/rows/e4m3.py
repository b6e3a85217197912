"""FP8 values and the scales of their blocks, for every kernel that quantises.

A scale is amax / 448, or the smallest power of two with which the largest value fits 448, and at
least 2^-126. A NaN does not count for amax. An infinity makes its block NaN.

A GPU of Hopper or later converts two values by one instruction. The interpreter uses integer
operations, and so do packed rows, which GPUs of any age receive.
"""

import torch
from torch import Tensor

from moecore.kernels.triton_api import INTERPRET, tl, triton

BLOCK = 128  # elements of one scale along the summed dim
FP8 = torch.float8_e4m3fn
MAX = 448.0  # its largest value
LEAST_SCALE = 2.0**-126  # the scale and its reciprocal are normal fp32 numbers
INTERPRETED = tl.constexpr(INTERPRET)


def compute_block_scale_ref(
    amax: Tensor, power_of_two: bool, format_max: float = MAX
) -> tuple[Tensor, Tensor]:
    """Return the fp32 scales of blocks from their amax, and 1 / scale (NaN if amax is infinite).

    A scale is amax / format_max, rounded up to 2^n if `power_of_two`, and at least 2^-126.
    `format_max` is the largest value of the FP8 format.
    """
    # A tensor, because a GPU replaces a division by a number by a less exact multiplication.
    scales = amax / torch.full_like(amax, format_max)
    if power_of_two:
        scales = (scales.view(torch.int32) + 0x007FFFFF & 0x7F800000).view(torch.float32)
    scales = scales.clamp(min=LEAST_SCALE)
    return scales, (torch.ones_like(scales) / scales).masked_fill(scales.isinf(), torch.nan)


def abs_without_nan_ref(x: Tensor) -> Tensor:
    """Return |x|, and 0 for NaN, in plain PyTorch."""
    return torch.where(x.isnan(), 0, x).abs()


@triton.jit
def abs_without_nan(x):  # fp32
    """Return |x|, and 0 for NaN."""
    if INTERPRETED:  # whose maximum keeps NaN
        return tl.where(x == x, tl.abs(x), 0.0)
    else:
        return tl.maximum(tl.abs(x), 0.0)


@triton.jit
def compute_block_scale(amax, POWER_OF_TWO: tl.constexpr, E5M2: tl.constexpr = False):
    """Return the FP8 scale for amax (not NaN), and 1 / scale (NaN if amax is infinite)."""
    infinite = amax == float("inf")
    if POWER_OF_TWO:
        # 448 is 1.75 * 2^8 and 57344 1.75 * 2^15: a larger mantissa takes the next exponent.
        bits = amax.to(tl.int32, bitcast=True) + 0x001FFFFF & 0x7F800000
        bits -= (15 if E5M2 else 8) << 23
        bits = tl.where(infinite, 0x7F800000, tl.maximum(bits, 0x00800000))
        scale = bits.to(tl.float32, bitcast=True)
        inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    else:
        exact = tl.div_rn(amax, 57344.0 if E5M2 else 448.0)
        scale = tl.maximum(exact, 1.1754943508222875e-38)  # 2^-126
        inverse = tl.div_rn(1.0, scale)
    return scale, tl.where(infinite, float("nan"), inverse)


@triton.jit
def encode_e4m3(x):  # fp32, rounds to at most 448 but for NaN
    """Return fp32 as e4m3 bits in int32: nearest, ties to even. x is NaN or rounds to <= 448."""
    bits = x.to(tl.int32, bitcast=True)
    positive = bits & 0x7FFFFFFF
    # From 2^-6 on the result has 3 of the 23 mantissa bits: 20 are rounded off.
    normal = (positive + 0x0007FFFF + ((positive >> 20) & 1) >> 20) - (120 << 3)
    # Below 2^-6 the result is a multiple of 2^-9: adding 2^14 rounds to such a multiple.
    shifted = positive.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(positive < 0x3C800000, small, normal)
    code = tl.where(x == x, code, 0x7F)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def decode_e4m3(code):  # int32 with e4m3 in its low bits
    """Return the fp32 values of e4m3 codes, which are in the low 8 bits of int32."""
    magnitude = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    magnitude = tl.where((code & 0x7F) == 0x7F, float("nan"), magnitude)
    return tl.where((code & 0x80) != 0, -magnitude, magnitude)


@triton.jit
def to_e4m3(x):  # fp32, rounds to at most 448 but for NaN
    """Return fp32 as e4m3 bits in uint8, rounded to nearest. x is NaN or rounds to <= 448."""
    if INTERPRETED:
        return encode_e4m3(x).to(tl.uint8)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def from_e4m3(code):  # uint8
    """Return the fp32 values of e4m3 bits in uint8."""
    if INTERPRETED:
        return decode_e4m3(code.to(tl.int32))
    else:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def pack_e4m3_words(x0, x1, x2, x3):  # fp32 of one shape, round to at most 448 but for NaN
    """Pack four fp32 tensors as e4m3 in int32, x0 in the lowest byte, x3 in the highest."""
    if INTERPRETED:
        return (
            encode_e4m3(x0)
            | (encode_e4m3(x1) << 8)
            | (encode_e4m3(x2) << 16)
            | (encode_e4m3(x3) << 24)
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f",
            [x0, x1, x2, x3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


# PTX of `transpose_e4m3_words`: each word times its factor, two values at a time, then 4 x 4 bytes.
_TIMES = """
mov.b32 {{l, h}}, ${word};
cvt.rn.f16x2.e4m3x2 x, l;
cvt.rn.f16x2.e4m3x2 y, h;
mov.b32 g, {{${factor}, ${factor}}};
mul.rn.f16x2 x, x, g;
mul.rn.f16x2 y, y, g;
cvt.rn.satfinite.e4m3x2.f16x2 l, x;
cvt.rn.satfinite.e4m3x2.f16x2 h, y;
mov.b32 r{row}, {{l, h}};"""
TRANSPOSE_WORDS = tl.constexpr(
    "{\n.reg .b16 l, h;\n.reg .b32 x, y, g, r0, r1, r2, r3, t0, t1, t2, t3;"
    + "".join(_TIMES.format(row=i, word=4 + i, factor=8 + i) for i in range(4))
    + """
prmt.b32 t0, r0, r1, 0x5140;
prmt.b32 t1, r0, r1, 0x7362;
prmt.b32 t2, r2, r3, 0x5140;
prmt.b32 t3, r2, r3, 0x7362;
prmt.b32 $0, t0, t2, 0x5410;
prmt.b32 $1, t0, t2, 0x7632;
prmt.b32 $2, t1, t3, 0x5410;
prmt.b32 $3, t1, t3, 0x7632;
}"""
)


@triton.jit
def _gather_byte(w0, w1, w2, w3, f0, f1, f2, f3, byte: tl.constexpr):
    """Return a word with byte number `byte` of words w0 to w3 (e4m3), multiplied by f0 to f3."""
    x0 = decode_e4m3((w0 >> (8 * byte)) & 0xFF).to(tl.float16) * f0
    x1 = decode_e4m3((w1 >> (8 * byte)) & 0xFF).to(tl.float16) * f1
    x2 = decode_e4m3((w2 >> (8 * byte)) & 0xFF).to(tl.float16) * f2
    x3 = decode_e4m3((w3 >> (8 * byte)) & 0xFF).to(tl.float16) * f3
    return pack_e4m3_words(
        x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    )


@triton.jit
def transpose_e4m3_words(w0, w1, w2, w3, f0, f1, f2, f3):
    """Transpose 4 x 4 e4m3 values: rows w0 to w3, times fp16 factors f0 to f3 that are <= 1."""
    if INTERPRETED:
        words: tl.tuple = ()
        for byte in tl.static_range(4):
            words += (_gather_byte(w0, w1, w2, w3, f0, f1, f2, f3, byte),)
        return words
    else:
        return tl.inline_asm_elementwise(
            TRANSPOSE_WORDS,
            "=&r,=&r,=&r,=&r,r,r,r,r,h,h,h,h",
            [w0, w1, w2, w3, f0, f1, f2, f3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
