"""MXFP8 and NVFP4 in plain PyTorch, against their definition and two other implementations."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.rows.microscaled import quantise_microscaled, quantise_microscaled_matrices
from moecore.kernels.rows.microscaling import (
    BACKWARD,
    E2M1,
    apply_hadamard,
    compute_tensor_scales,
    draw_uniform,
    pack_e2m1,
    quantise_mxfp8,
    quantise_nvfp4,
    unpack_e2m1,
)
from tests.kernels.rows import microscaling_oracle
from tests.moe.fp8_reference import fp8

MXFP8, NVFP4 = Recipe(scaling="mxfp8"), Recipe(scaling="nvfp4")
PAPER = Recipe(scaling="nvfp4", power_of_two=False)
PLAIN = Recipe(scaling="nvfp4", hadamard=False, stochastic_rounding=False)
RECIPES = {"mxfp8": MXFP8, "nvfp4": NVFP4, "fp32 scales": PAPER, "plain": PLAIN}
NO_ORACLE = "its quantisers are in the extra `oracles`, see `make test-extras`"
BLOCKS = [(1, 16), (16, 1), (16, 16)]


def uneven(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, zeros, an outlier, and rows of other sizes, in bf16 as rows are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    x *= torch.exp2(torch.arange(shape[-2]) % 9 - 4.0)[:, None]
    x[..., 0, :16] = 0
    x[..., 1, 3] = 900
    return x.bfloat16().float()


def wide(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    scales = scales.double().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return values.double() * scales


@pytest.mark.parametrize("block", [(1, 32), (32, 1)])
def test_mxfp8_is_its_definition(block: tuple[int, int]) -> None:
    x = uneven(64, 96)
    values, scales = quantise_mxfp8(x, block)
    assert values.dtype == torch.float8_e4m3fn and scales.shape == (64 // block[0], 96 // block[1])
    assert torch.equal(wide(values.float(), scales, block), fp8(x, *block))
    assert torch.equal(scales.to(torch.float8_e8m0fnu).float(), scales)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
def test_nvfp4_is_its_definition(block: tuple[int, int], random: bool, power_of_two: bool) -> None:
    x = uneven(48, 64)
    scale = microscaling_oracle.tensor_scale(x, power_of_two)
    ours = compute_tensor_scales(x.abs().amax(), Recipe(scaling="nvfp4", power_of_two=power_of_two))
    assert torch.equal(ours, scale)
    drawn = draw_uniform(x) if random else None
    values, scales = quantise_nvfp4(x, block, ours.reshape(1, 1), drawn)
    assert scales.dtype == torch.float8_e4m3fn
    expected = microscaling_oracle.fp4(
        x, *block, scale, microscaling_oracle.draws(x) if random else None
    )
    # The product of the two scales is rounded to fp32, which only "fp32 scales" show.
    found = wide(values, scales.float() * scale, block)
    assert torch.equal(found, expected)


def test_e2m1_is_the_nearest() -> None:
    """Every number of bf16 up to 8 in a block that has a 6, so that the block's scale is 1."""
    x = torch.arange(0x4101, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = torch.cat((x, -x)).clamp(-6, 6)
    x = torch.nn.functional.pad(x, (0, -len(x) % 15)).view(-1, 15)
    x = torch.cat((x, torch.full((len(x), 1), 6.0)), 1)
    values, scales = quantise_nvfp4(x, (1, 16), torch.ones(1, 1))
    assert (scales.float() == 1).all() and set(values.abs().unique().tolist()) == set(E2M1)
    assert torch.equal(values.double(), microscaling_oracle.e2m1(x))
    up, down = (
        quantise_nvfp4(x, (1, 16), torch.ones(1, 1), torch.full_like(x, draw))[0].abs()
        for draw in (0.0, 1 - 2.0**-24)
    )
    assert (up >= x.abs()).all() and (down <= x.abs()).all()
    exact = torch.isin(x.abs(), torch.tensor(E2M1))
    assert torch.equal(up[exact], down[exact]) and (up > down)[~exact].any()


@pytest.mark.parametrize("over_rows", [False, True])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_operands_are_exact_in_bf16(recipe: Recipe, over_rows: bool) -> None:
    found = quantise_microscaled(uneven(64, 96), recipe, over_rows=over_rows, is_gradient=True)
    assert torch.equal(found.values.bfloat16().float(), found.values)
    if recipe.power_of_two:
        assert torch.equal(found.scales.log2().round(), found.scales.log2())


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_both_layouts_of_matrices(recipe: Recipe) -> None:
    w = torch.stack([uneven(64, 96, seed=i) * 3**i for i in range(3)])
    both = quantise_microscaled_matrices(w, recipe)
    assert both.rows is not None and both.columns is not None and both.columns.kind == BACKWARD
    for i, matrix in enumerate(w):
        for operand, is_transposed in ((both.rows, False), (both.columns, True)):
            found = operand.values[i].double() * operand.scales[i]
            found = found.T if is_transposed else found
            expected = microscaling_oracle.Rounding(recipe).weight(matrix, transposed=is_transposed)
            torch.testing.assert_close(found, expected, rtol=2**-23, atol=0)
    same = torch.equal(both.rows.values, both.columns.values.transpose(1, 2))
    assert same == (recipe.scaling == "nvfp4")
    alone = quantise_microscaled_matrices(w, recipe, rowwise=False)
    assert alone.rows is None and torch.equal(alone.columns.values, both.columns.values)  # type: ignore[union-attr]


def test_an_expert_has_its_own_scale() -> None:
    """Rows of no expert may hold anything: they reach no scale but their own block's."""
    x = uneven(40, 32)
    expert = torch.tensor([0] * 7 + [2] * 20 + [3] * 13)
    x[7:27] *= 1000
    noise = x.clone()
    noise[27:] = torch.tensor([math.nan, math.inf, -math.inf, 1e30] * 8)
    how: dict[str, Any] = dict(expert_M=expert, num_experts=3, is_gradient=True)
    found, other = quantise_microscaled(x, PAPER, **how), quantise_microscaled(noise, PAPER, **how)
    assert torch.equal(found.values[:27], other.values[:27])
    assert torch.equal(found.scales[:3], other.scales[:3]) and found.scales.shape == (4,)
    assert torch.equal(found.scales[0], microscaling_oracle.tensor_scale(x[:7], False))
    assert found.scales[1] == 2.0**-126  # it has no rows
    assert torch.equal(found.scales[2], microscaling_oracle.tensor_scale(x[7:27], False))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_what_is_not_finite_stays_in_its_block(recipe: Recipe, bad: float) -> None:
    x = uneven(32, 64)
    x[5, 40] = bad
    found = quantise_microscaled(x, recipe)
    block = recipe.weight_multiple
    spoilt = torch.zeros(32, 64, dtype=torch.bool)
    whole = slice(40 // block * block, 40 // block * block + block)
    alone = recipe.scaling == "mxfp8" and math.isnan(bad)  # E4M3 has a NaN, E2M1 has none
    spoilt[5, 40 if alone else whole] = True
    assert torch.equal(found.values.isnan(), spoilt) and found.scales.isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_zeros_tiny_and_huge_values(recipe: Recipe) -> None:
    assert not quantise_microscaled(torch.zeros(32, 32), recipe).values.any()
    assert quantise_microscaled(torch.zeros(0, 32), recipe).values.shape == (0, 32)
    for size in (2.0**-100, 2.0**100):
        x = uneven(32, 32)
        found, scaled = quantise_microscaled(x, recipe), quantise_microscaled(x * size, recipe)
        if recipe.power_of_two:  # exponents alone
            expected = found.values.double() * found.scales * size
            assert torch.equal(scaled.values.double() * scaled.scales, expected)


def test_the_transform_is_the_matrix_and_leaves_products() -> None:
    x, y = uneven(48, 32), uneven(48, 64, seed=1)
    matrix = microscaling_oracle.hadamard_matrix()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(16, dtype=torch.float64))
    expected = (matrix @ x.double().reshape(3, 16, 32)).reshape(48, 32)
    # Four additions of 16 numbers up to 900, each rounded to half a unit in the last place.
    assert (apply_hadamard(x) - expected).abs().max() <= 4 * 900 * 2.0**-24 * 4
    whole = x.double().T @ y.double()
    found = apply_hadamard(x).double().T @ apply_hadamard(y).double()
    assert (found - whole).abs().max() <= 1e-6 * whole.abs().max()


def test_draws_depend_on_place_and_value() -> None:
    x = uneven(33, 57)
    found = draw_uniform(x)
    assert torch.equal(found.double(), microscaling_oracle.draws(x))
    assert torch.equal(found, draw_uniform(x))
    assert found.min() >= 0 and found.max() < 1
    same = torch.ones(64, 64)  # one value everywhere
    assert draw_uniform(same).unique().numel() > 4080
    assert (draw_uniform(same) != draw_uniform(same * 2)).float().mean() > 0.999


def test_stochastic_rounding_keeps_the_mean() -> None:
    """Of n draws of a value the mean is within 5 standard errors; a step is 1/2 below 2."""
    n = 1 << 16
    for value in (0.2, 0.9, 1.7):
        x = torch.full((n // 15, 16), value)
        x[:, 15] = 6.0
        values, _ = quantise_nvfp4(x, (1, 16), torch.ones(1, 1), draw_uniform(x))
        share = (value % 0.5) / 0.5
        error = 0.5 * math.sqrt(share * (1 - share) / (15 * len(x)))
        assert abs(values[:, :15].double().mean() - value) < 5 * error
        nearest, _ = quantise_nvfp4(x, (1, 16), torch.ones(1, 1))
        assert abs(nearest[:, :15].double().mean() - value) > 5 * error


def test_packing() -> None:
    assert pack_e2m1(torch.tensor([1.0, -6.0])).tolist() == [0xF2]
    numbers = torch.tensor([*E2M1, *(-x for x in E2M1)])
    pairs = torch.cartesian_prod(numbers, numbers)
    packed, codes = pack_e2m1(pairs), torch.arange(16)
    assert torch.equal(packed[:, 0], (codes[:, None] | codes << 4).flatten().to(torch.uint8))
    assert torch.equal(unpack_e2m1(packed).view(torch.int32), pairs.view(torch.int32))  # -0 too


@pytest.mark.gpu
@pytest.mark.parametrize("over_rows", [False, True])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_a_gpu_has_the_bits_of_a_cpu(recipe: Recipe, over_rows: bool) -> None:
    x = uneven(64, 96)
    expected, found = (
        quantise_microscaled(t, recipe, over_rows=over_rows, is_gradient=True)
        for t in (x, x.cuda())
    )
    assert found.values.dtype == torch.bfloat16
    assert torch.equal(found.values.cpu().float(), expected.values)
    assert torch.equal(found.scales.cpu(), expected.scales)
    w = torch.stack([x, 3 * x])
    ours, theirs = (
        quantise_microscaled_matrices(w, recipe),
        quantise_microscaled_matrices(w.cuda(), recipe),
    )
    for a, b in ((ours.rows, theirs.rows), (ours.columns, theirs.columns)):
        assert a is not None and b is not None and torch.equal(a.values, b.values.cpu().float())


# Two implementations that nobody here wrote. Both multiply by reciprocals where the definition
# divides, so a value in the middle of two may go to either.
def differ(found: Tensor, expected: Tensor) -> float:
    return (found != expected).float().mean().item()


def test_mxfp8_of_torchao() -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason=NO_ORACLE)
    x, mode = uneven(96, 128), mx.ScaleCalculationMode.RCEIL
    scales, values = mx.to_mx(x, torch.float8_e4m3fn, 32, mode)
    ours, our_scales = quantise_mxfp8(x, (1, 32))
    # Of a block of zeros any scale will do.
    used = our_scales > 2.0**-126
    assert torch.equal(scales.float()[used], our_scales[used])
    assert torch.equal(values.float(), ours.float())


def test_nvfp4_of_torchao() -> None:
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason=NO_ORACLE)
    x = uneven(96, 128)
    scale = microscaling_oracle.tensor_scale(x, False)
    scales, packed = nv.nvfp4_quantize(x, 16, scale)
    ours, our_scales = quantise_nvfp4(x, (1, 16), scale.reshape(1, 1))
    used = our_scales.float() >= 2.0**-6  # torchao has no smaller ones
    assert used.float().mean() > 0.9 and torch.equal(scales.float()[used], our_scales.float()[used])
    found = unpack_e2m1(packed).view(96, 8, 16)[used]
    assert differ(found.abs(), ours.view(96, 8, 16)[used].abs()) < 1e-3
    assert torch.equal(pack_e2m1(unpack_e2m1(packed)), packed)
