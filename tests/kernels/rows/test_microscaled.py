from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.grouped.scaled_rows import pad_rows
from moecore.kernels.meta import record_launches_on_meta
from moecore.kernels.rows import microscaled
from moecore.kernels.rows.microscaled import quantise_microscaled, quantise_microscaled_matrices
from moecore.kernels.rows.microscaling import (
    compute_finite_magnitude,
    quantise_microscaled_ref,
    unpack_matrices,
)
from moecore.kernels.rows.scaling import Blocks, OperandPair
from moecore.kernels.triton_api import INTERPRET
from tests.helpers.grids import grid
from tests.kernels.conftest import check_without_host

pytest.importorskip("triton", reason="it is of kernels")
RECIPES = {
    "mxfp8": Recipe(scaling="mxfp8"),
    "nvfp4": Recipe(scaling="nvfp4"),
    "fp32 scales": Recipe(scaling="nvfp4", power_of_two=False),
    "no transform": Recipe(scaling="nvfp4", hadamard=False),
}
OF_ROWS = [
    name for name in RECIPES if name != "no transform"
]  # only sums over rows are transformed
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
cases = pytest.mark.parametrize(
    ("name", "over_rows"), [*product(OF_ROWS, (False, True)), ("no transform", True)]
)
packings = pytest.mark.parametrize("packed", [False, True], ids=["values", "packed"])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FEW_DTYPES = DTYPES[:1] if INTERPRET else DTYPES  # the interpreter takes seconds for a case
# The whole product on a GPU. A program has 16 rows, or a block of them.
DTYPES_AND_GRADIENTS = list(product(DTYPES, (False, True)))
if INTERPRET:
    DTYPES_AND_GRADIENTS = [
        *product(DTYPES[:1], (False, True)),
        (DTYPES[1], True),
        (DTYPES[2], False),
    ]
COUNTS = [17, 0, 1, 34, 0, 9]  # rows of experts, behind which some belong to none
SPARE = 9
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def hard(*shape: int, dtype: torch.dtype, device: str, huge: bool = False) -> Tensor:
    """Values of many sizes and signs, blocks of zeros, outliers, what is not finite, denormals."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-6, 7, shape, generator=generator).float())
    rows, limits = x.view(-1, shape[-1]), torch.finfo(dtype)
    for i in range(0, len(rows), 64):
        part = rows[i : i + 64]
        if len(part) >= 36:
            part[:, :32], part[32:, -16:] = 0, -0.0
            part[1, 40], part[2, 50], part[35, 60] = torch.nan, torch.inf, -torch.inf
            part[3, 45] = limits.max if huge else 900
            # The interpreter takes denormals of bf16 for 0.
            tiny = limits.smallest_normal / (1 if INTERPRET and dtype == torch.bfloat16 else 8)
            part[5], part[6] = tiny, limits.smallest_normal
    return x.to(dtype).to(device)


def assert_same(ours: Blocks, theirs: Blocks) -> None:
    """Bits are equal, but those of NaN, and signs of 0 of values that the interpreter widens."""
    assert ours.kind == theirs.kind and len(ours.tensors()) == len(theirs.tensors())
    for a, b in zip(ours.tensors(), theirs.tensors(), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if a.is_floating_point():
            nan = b.float().isnan()
            assert torch.equal(a.float().isnan(), nan)
            if INTERPRET and a.dtype == torch.float32:
                a, b = a + 0.0, b + 0.0
            a, b = (t.contiguous().view(BITS[t.itemsize]).masked_fill(nan, 0) for t in (a, b))
        assert torch.equal(a, b)


def check(x: Tensor, recipe: Recipe, **how: Any) -> None:
    assert_same(quantise_microscaled(x, recipe, **how), quantise_microscaled_ref(x, recipe, **how))


def by_reference(w: Tensor, recipe: Recipe, **how: Any) -> OperandPair:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(microscaled, "has_cast_kernel", lambda _: False)
        return quantise_microscaled_matrices(w, recipe, **how)


@grid(name=RECIPES, over_rows=(False, True), packed=(False, True))
def test_rows(name: str, over_rows: bool, packed: bool, device: str) -> None:
    """Of one tensor, as a linear's: any number of rows, which `over_rows` fills up with zeros."""
    recipe, how = RECIPES[name], dict(over_rows=over_rows, pack=packed)
    for dtype, is_gradient in DTYPES_AND_GRADIENTS:
        x = hard(37, 96, dtype=dtype, device=device)
        check(x, recipe, is_gradient=is_gradient, **how)
    for dtype in FEW_DTYPES:
        for shape in ((1, 32), (37, 288)):
            x = hard(*shape, dtype=dtype, device=device, huge=True)
            check(x, recipe, is_gradient=True, **how)
    check(torch.zeros(0, 64, device=device), recipe, **how)
    check(torch.zeros(17, 64, device=device), recipe, **how)
    check(hard(96, 70, dtype=torch.float32, device=device).T[:37, 16:80], recipe, **how)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("over_rows", [False, True])
def test_rows_of_experts(name: str, over_rows: bool, device: str) -> None:
    """Ragged, some empty, some rows of nobody, which may hold anything; counts on the device."""
    recipe, offsets_e = RECIPES[name], torch.tensor(COUNTS, device=device).cumsum(0).int()
    R, e = sum(COUNTS) + SPARE, len(COUNTS)
    padded = pad_rows(offsets_e, R, recipe.weight_multiple)
    where: dict[str, Tensor] = {"expert_M": padded.expert_R}
    if over_rows:
        row_P = torch.arange(padded.num_rows, device=device)
        source_P = torch.full((padded.num_rows + 1,), -1, device=device)
        where["source_rows_M"] = source_P.index_copy_(0, padded.position_R, row_P[:R])[:-1]
        where["expert_M"] = torch.searchsorted(padded.offsets_e, row_P.int(), right=True)
    for dtype in FEW_DTYPES:
        x = hard(R, 80 if over_rows else 96, dtype=dtype, device=device)
        x[-SPARE:] = torch.tensor([torch.nan, torch.inf, 1e30], device=device).repeat(3)[:, None]
        how: dict[str, Any] = dict(num_experts=e, over_rows=over_rows, is_gradient=True)
        for packed in (False, True):
            check(x, recipe, pack=packed, **where, **how)


@packings
@pytest.mark.parametrize("name", OF_ROWS)
def test_rows_of_every_size(name: str, packed: bool, device: str) -> None:
    """A scale for each row: every exponent of fp32, and what lies next to 448 and 6 * 448 times it.

    Multiples of an eighth of the largest are ties of either format, or lie next to them.
    """
    recipe, exponents = RECIPES[name], torch.arange(-149.0, 119.0)
    if INTERPRET:  # those next to denormals of values and scales, to 1 and to the largest
        exponents = torch.cat([exponents[:35], exponents[140:160], exponents[-15:]])
    largest = torch.exp2(exponents)[:, None] * torch.tensor([448.0, 2688.0])
    near = [torch.nextafter(largest, torch.tensor(to)) for to in (0.0, torch.inf)]
    largest = torch.cat([largest, *near]).view(-1, 1).to(device)
    steps = torch.arange(-32, 32, device=device) / 32
    x = torch.cat([largest * steps, largest], 1)[:, 1:]
    expert_M = torch.arange(len(x), device=device)
    how: dict[str, Any] = dict(expert_M=expert_M, num_experts=len(x), pack=packed)
    for is_gradient in (False, True) if recipe.scaling == "nvfp4" else (False,):
        check(x, recipe, is_gradient=is_gradient, **how)


@packings
@cases
def test_ties(name: str, over_rows: bool, packed: bool, device: str) -> None:
    """Scales of blocks in the middle of two of E4M3, and next to it; values in that of two of E2M1.

    The largest value makes the scale of the tensor 1.
    """
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    largest = 3 * (e4m3[1:] + e4m3[:-1])
    near = [torch.nextafter(largest, torch.tensor(to)) for to in (0.0, torch.inf)]
    of_scales = torch.cat([largest, *near])[:, None] * torch.arange(1, 17) / 16
    eighths = torch.cat([torch.full((3, 1), 6.0), torch.arange(45.0).view(3, 15) / 8], 1)
    of_values = (e4m3[:, None, None] * eighths).view(-1, 16)
    x = torch.cat([torch.full((1, 16), 2688.0), of_scales, -of_values]).view(-1, 32).to(device)
    check(x.T if over_rows else x, RECIPES[name], over_rows=over_rows, pack=packed)


@packings
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_matrices(name: str, packed: bool, device: str) -> None:
    recipe = RECIPES[name]
    for dtype in FEW_DTYPES:
        w = hard(2, 32, 288, dtype=dtype, device=device)
        given = compute_finite_magnitude(w).amax((1, 2)) * 2 + 1
        for amax_e in (None, given) if recipe.scaling == "nvfp4" else (None,):
            how: dict[str, Any] = dict(amax_e=amax_e, pack=packed)
            truth = by_reference(w, recipe, **how)
            for ours, theirs in zip(
                quantise_microscaled_matrices(w, recipe, **how), truth, strict=True
            ):
                assert ours is not None and theirs is not None
                assert_same(ours, theirs)
        alone = quantise_microscaled_matrices(w, recipe, rowwise=False, **how)
        assert alone.rows is None and alone.columns is not None and truth.columns is not None
        assert_same(alone.columns, truth.columns)
    strided = hard(2, 96, 64, dtype=torch.float32, device=device).mT
    assert_same(*(f(strided, recipe).rows for f in (quantise_microscaled_matrices, by_reference)))  # type: ignore[arg-type]


def test_packed_matrices_widen_to_the_values(device: str) -> None:
    recipe = RECIPES["nvfp4"]
    w = hard(2, 64, 96, dtype=torch.float32, device=device)
    packed = quantise_microscaled_matrices(w, recipe, columnwise=False, pack=True).rows
    assert packed is not None
    for transposed, expected in enumerate(quantise_microscaled_matrices(w, recipe)):
        found = unpack_matrices(packed, recipe, transposed=bool(transposed))
        assert_same(found, Blocks(expected.values, expected.scales, found.kind))


@pytest.mark.gpu
@recipes
def test_nothing_waits_for_the_device(recipe: Recipe) -> None:
    experts = torch.arange(140, device="cuda") // 16
    how: dict[str, Any] = dict(expert_M=experts, num_experts=9, is_gradient=True)

    def quantise(x: Tensor) -> list[Tensor]:
        pair = quantise_microscaled_matrices(x[None, :128], recipe)
        rows = quantise_microscaled(x, recipe, **how)
        columns = quantise_microscaled(x, recipe, over_rows=True, is_gradient=True)
        return [t for operand in (*pair, rows, columns) if operand for t in operand.tensors()]

    x = torch.randn(140, 96, device="cuda").bfloat16()
    check_without_host(quantise, (x,))


@pytest.mark.gpu
@cases
def test_large_operands(name: str, over_rows: bool) -> None:
    """Many programs, and rows behind 2^31 elements."""
    recipe = RECIPES[name]
    x = torch.randn(4100, 2048, device="cuda", dtype=torch.bfloat16)
    check(x, recipe, over_rows=over_rows, is_gradient=True)
    wide = torch.zeros((1 << 31) // 4096 + 32, 4096, device="cuda", dtype=torch.bfloat16)
    wide[-32:] = torch.randn(32, 4096, device="cuda", dtype=torch.bfloat16)
    found = quantise_microscaled(wide, recipe, over_rows=over_rows)
    expected = quantise_microscaled_ref(wide[-32:], recipe, over_rows=over_rows)
    assert torch.equal(found.values[-32:], expected.values)
    assert torch.equal(found.scales, expected.scales) and not found.values[:-32].any()


@pytest.mark.parametrize(("recipe", "launches"), [(RECIPES["mxfp8"], 1), (RECIPES["nvfp4"], 2)])
def test_an_operand_is_a_launch_and_its_magnitudes_another(recipe: Recipe, launches: int) -> None:
    names: list[str] = []
    with record_launches_on_meta(lambda name, _: names.append(name)):
        x = torch.empty(64, 96, device="meta")
        for over_rows in (False, True):
            quantise_microscaled(x, recipe, over_rows=over_rows, is_gradient=True)
        quantise_microscaled_matrices(x[None], recipe, columnwise=False)
    assert names.count("quantise_microscaled_kernel") == 3 and len(names) == 3 * launches
