import math

import pytest
import torch
from torch import Tensor

from moecore.kernels import adamw_formats as af

UNIT = 2.0**-9  # least value of the first moment, over its scale
LEAST_NORMAL = 2.0**-6


def random_moments(spread: float, numel: int = 64 * af.MOMENT_BLOCK + 5) -> tuple[Tensor, Tensor]:
    """Moments whose sizes within a block are `spread` powers of e apart, zeros among them."""
    generator = torch.Generator().manual_seed(0)
    size = torch.exp(torch.randn(numel, generator=generator) * spread) * 1e-5
    m = size * torch.randn(numel, generator=generator)
    v = size**2 * torch.rand(numel, generator=generator) * 4
    m[::17] = 0
    v[::34] = 0
    return m, v


def noise(numel: int, step: float = 3.0) -> Tensor:
    return af.make_random_bits_ref(numel, torch.tensor(step), 7)


def test_a_block_by_hand() -> None:
    """Largest 448 * 2^-9 of the first, 1.75 * 2^16 * 2^-30 of the second moment."""
    m = torch.tensor([448.0, -224.0, 1.0, 0.0, 1 / 512, 1 / 2048]) * 2.0**-9
    v = torch.tensor([1.75 * 2**16, 1.0, 2.0**-17, 0.0, 2.0**-17, 2.0**-30]) * 2.0**-30
    first, second, exponents = af.encode_moments_ref(m, v)
    assert exponents.tolist() == [[127 - 9, 127 - 30]]
    assert first.tolist() == [0x7E, 0x80 | 0x76, 0x38, 0, 1, 0]
    # The square of the first one's least value is 2^-36 = 2^-6 * 2^-30: three become it.
    least = (15 - 6) << 3
    assert second.tolist() == [0xFE, 15 << 3, least, 0, least, least]


@pytest.mark.parametrize("spread", [0.5, 2.0, 8.0])
def test_decoded_values_are_encoded_without_an_error_and_bf16_holds_them(spread: float) -> None:
    m, v = random_moments(spread)
    kept = af.decode_moments_ref(*af.encode_moments_ref(m, v, noise(m.numel())))
    again = af.decode_moments_ref(*af.encode_moments_ref(*(t.bfloat16().float() for t in kept)))
    assert all(map(torch.equal, kept, again))
    assert all(torch.equal(t.bfloat16().float(), t) for t in kept)


@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-20, 1e15])
def test_any_size_of_gradients(scale: float) -> None:
    m, v = random_moments(1.0)
    m, v = m * scale, v * scale * scale
    kept_m, kept_v = af.decode_moments_ref(*af.encode_moments_ref(m, v))
    block = m.abs().max().item()
    torch.testing.assert_close(kept_m, m, rtol=2.0**-4, atol=max(block * 2.0**-17, 2.0**-127))
    assert ((kept_v > 0) == (v > 0)).all() and kept_v.isfinite().all()


def test_nan_and_infinity_spoil_only_themselves() -> None:
    m, v = random_moments(1.0)
    want = af.decode_moments_ref(*af.encode_moments_ref(m, v))
    at = [0, 200, m.numel() - 1]
    for bad in (math.nan, math.inf, -math.inf):
        x, y = m.clone(), v.clone()
        x[at], y[at] = bad, abs(bad)
        others = torch.ones_like(m, dtype=torch.bool)
        others[at] = False
        # They are no largest value of a block.
        x[others], y[others] = m[others], v[others]
        first, second, exponents = af.encode_moments_ref(x, y)
        assert {int(c) & 0x7F for c in first[at]} == {af.FIRST_NAN}
        assert {int(c) for c in second[at]} == {af.SECOND_NAN}
        got = af.decode_moments_ref(first, second, exponents)
        whole = torch.arange(af.MOMENT_BLOCK * 2, af.MOMENT_BLOCK * 64)  # blocks without one
        for a, b in zip(got, want, strict=True):
            assert a[at].isnan().all() and a[others].isfinite().all()
            assert torch.equal(a[whole], b[whole])


@pytest.mark.parametrize("spread", [0.5, 2.0, 5.0])
def test_what_is_kept_cannot_make_an_update_explode(spread: float) -> None:
    """The bounds of the note "moments of one byte", on every element."""
    m, v = random_moments(spread)
    v = torch.where(v > 0, v, (m * m).clamp(min=1e-30))  # m without v is nothing of AdamW's
    first, second, exponents = af.encode_moments_ref(m, v, noise(m.numel()))
    kept_m, kept_v = af.decode_moments_ref(first, second, exponents)
    unit = (exponents[:, 0].int() << 23).view(torch.float32) * UNIT
    unit = unit.repeat_interleave(af.MOMENT_BLOCK)[: m.numel()]
    exact, kept = m.abs() / v.sqrt(), kept_m.abs() / kept_v.sqrt()
    below = m.abs() < unit
    assert kept[below].max() <= 1
    normal = (first & 0x78 != 0) & (second & 0xF8 != 0) & ~below
    assert (kept / exact)[normal].max() <= 1.125**1.5 * 1.0001
    assert (kept / exact)[~below & (m != 0)].max() <= 2 * 2**0.5
    assert normal.float().mean() > 0.2 and (spread < 5 or below.float().mean() > 0.02)


def test_rounding_of_both_loses_nothing_on_average() -> None:
    num = 400
    m, v = random_moments(2.0, 8 * af.MOMENT_BLOCK)
    exponents = af.encode_moments_ref(m, v)[2]
    units = (exponents.int() << 23).view(torch.float32) * torch.tensor([UNIT, 2.0**-17])
    unit_m, unit_v = units.repeat_interleave(af.MOMENT_BLOCK, 0).unbind(1)
    means = [torch.zeros_like(m, dtype=torch.float64) for _ in range(2)]
    for step in range(num):
        kept = af.decode_moments_ref(*af.encode_moments_ref(m, v, noise(m.numel(), float(step))))
        for mean, x in zip(means, kept, strict=True):
            mean += x / num
    is_free = v >= torch.maximum(unit_m**2, unit_v)  # of the floor
    assert is_free.float().mean() > 0.8
    gap_m, gap_v = (torch.maximum(x.abs() / 8, u) for x, u in ((m, unit_m), (v, unit_v)))
    assert ((means[0] - m) / gap_m).abs().max() < 5 * 0.5 / num**0.5
    assert ((means[1] - v) / gap_v)[is_free].abs().max() < 5 * 0.5 / num**0.5


HALVES = torch.arange(1 << 16)
TOPS = [0, 1, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x4049, 0x7F7E, 0x7F7F]  # subnormal to the largest


def test_masters_split_and_join_to_the_bit() -> None:
    """All lower halves below several upper ones, with both signs: ties, subnormals, overflow."""
    for top in (*TOPS, *(t | 0x8000 for t in TOPS)):
        bits = (top << 16) + HALVES
        x = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)
        weight, remainder = af.split_master_ref(x)
        assert torch.equal(
            af.join_master_ref(weight, remainder).view(torch.int32), x.view(torch.int32)
        )
        nearest = x.bfloat16()
        is_tie = (x.view(torch.int32) & 0xFFFF) == 0x8000
        assert torch.equal(weight[~is_tie].view(torch.int16), nearest[~is_tie].view(torch.int16))
        # Away from zero, by which the sign of the remainder is that of a full upper half.
        assert weight[is_tie].view(torch.int16).item() & 0xFFFF == top + 1
    bf16 = HALVES.to(torch.int16).view(torch.bfloat16)
    weight, remainder = af.split_master_ref(bf16.float())
    torch.testing.assert_close(weight, bf16, rtol=0, atol=0, equal_nan=True)
    assert not remainder.any()


def test_masters_that_are_not_finite() -> None:
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -8388607], dtype=torch.int32)  # NaN
    weight, remainder = af.split_master_ref(bits.view(torch.float32))
    assert weight.isnan().all() and af.join_master_ref(weight, remainder).isnan().all()
    infinite = torch.tensor([math.inf, -math.inf])
    weight, remainder = af.split_master_ref(infinite)
    assert torch.equal(weight.float(), infinite)
    assert torch.equal(af.join_master_ref(weight, remainder), infinite)
