"""Grouped products of MXFP8 and NVFP4 operands, interpreted, and for Blackwell."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.common import NVFP4_TRITON
from moecore.kernels.grouped.block_scaled import block_scaled_gemm, block_scaled_wgrad
from moecore.kernels.grouped.scaled_rows import pad_rows
from moecore.kernels.rows import microscaled
from moecore.kernels.rows.microscaled import quantise_microscaled_matrices
from moecore.kernels.rows.microscaling import quantise_microscaled_ref, transpose_matrices
from moecore.kernels.rows.scaling import Blocks
from moecore.kernels.triton_api import HAS_TRITON, INTERPRET, triton

RECIPES = {
    "mxfp8": Recipe(scaling="mxfp8"),
    "nvfp4": Recipe(scaling="nvfp4"),
    "fp32 scales": Recipe(scaling="nvfp4", power_of_two=False),
}
VERSION = tuple(map(int, triton.__version__.split(".")[:2])) if HAS_TRITON else (0, 0)
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
COUNTS = [5, 0, 131, 1, 0, 64]  # rows of experts, behind which some belong to none
R = sum(COUNTS) + 9
SIZES = [(96, 160), (32, 64), (64, 512)]  # N and K


def skip_old_triton(request: pytest.FixtureRequest) -> None:
    """Skip a test of NVFP4 on a GPU for which Triton cannot compile it."""
    is_nvfp4 = "mxfp8" not in request.node.name
    if "gpu" in request.keywords and is_nvfp4 and VERSION < NVFP4_TRITON:
        pytest.skip("Triton is older than 3.9, which compiles NVFP4")


@pytest.fixture(autouse=True)
def can_compile(request: pytest.FixtureRequest) -> None:
    skip_old_triton(request)


class Operands:
    """Rows, matrices and gradients of experts, packed, and the same as emulated values."""

    def __init__(self, recipe: Recipe, N: int, K: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.recipe = recipe
        self.offsets_e = torch.tensor(COUNTS, device=device).cumsum(0).int()
        e, self.padded = len(COUNTS), pad_rows(self.offsets_e, R, recipe.weight_multiple)
        # Of another size in every expert and block, so that a wrong scale is seen.
        sizes = 2.0 ** torch.randint(-4, 5, (e, 1, 1), generator=generator)
        self.w_eNK = (torch.randn(e, N, K, generator=generator) * sizes).to(device)
        self.w_eNK[:, :, :16] *= 8
        self.x_RK, self.y_RN = (
            (torch.randn(R, n, generator=generator) * 2.0 ** (torch.arange(R) // 7 % 9)[:, None])
            for n in (K, N)
        )
        self.x_RK, self.y_RN = self.x_RK.to(device), self.y_RN.to(device)
        self.how: dict[str, Any] = dict(expert_M=self.padded.expert_R, num_experts=e)
        row_P = torch.arange(self.padded.num_rows, device=device)
        source_P = torch.full((self.padded.num_rows + 1,), -1, device=device)
        source_P = source_P.index_copy_(0, self.padded.position_R, row_P[:R])[:-1]
        expert_P = torch.searchsorted(self.padded.offsets_e, row_P.int(), right=True)
        self.how_rows = self.how | dict(expert_M=expert_P, source_rows_M=source_P, over_rows=True)

    def rows(self, x: Tensor, **how: Any) -> Blocks:
        return quantise_microscaled_ref(x, self.recipe, **self.how, **how)

    def columns(self, x: Tensor, **how: Any) -> Blocks:
        return quantise_microscaled_ref(x, self.recipe, **self.how_rows, **how)

    def matrices(self, backward: bool = False, **how: Any) -> Blocks:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(microscaled, "has_cast_kernel", lambda _: False)
            found = quantise_microscaled_matrices(self.w_eNK, self.recipe, **how)[backward]
        assert found is not None
        return found


def check(found: Tensor, expected: Tensor, magnitudes: Tensor, terms: int) -> None:
    """Two orders of a sum in fp32 are apart by its roundings at most; then one to the dtype."""
    wrong = (found.float() - expected.float()).abs()
    step = 2.0 ** (-7 if INTERPRET else -8)  # the interpreter truncates
    step = 0 if found.dtype == torch.float32 else step
    assert (wrong <= terms * 2.0**-24 * magnitudes + step * expected.float().abs()).all()


def emulated_gemm(a: Blocks, b: Blocks, expert: int, rows: slice) -> tuple[Tensor, Tensor]:
    """Return what the emulation multiplies for an expert, in fp32, and sums of magnitudes."""
    x, w = a.values[rows].float(), b.values[expert].float()
    scale = a.scales[expert] * b.scales[expert]
    return x @ w.T * scale, x.abs() @ w.abs().T * scale


def slices(offsets_e: Tensor) -> list[slice]:
    ends = [0, *offsets_e.tolist()]
    return [slice(*pair) for pair in pairwise(ends)]


def check_gemm(o: Operands, dtype: torch.dtype) -> None:
    for backward, x in enumerate((o.x_RK, o.y_RN)):
        b = o.matrices(bool(backward), pack=True)
        a, how = o.rows(x, pack=True), (o.offsets_e, o.recipe, dtype)
        found = block_scaled_gemm(a, b, *how)
        assert found.dtype == dtype
        wide = o.rows(x), o.matrices(bool(backward))
        for i, rows in enumerate(slices(o.offsets_e)):
            check(found[rows], *emulated_gemm(*wide, i, rows), terms=x.shape[1])


def check_wgrad(o: Operands) -> None:
    sides = o.columns(o.y_RN, pack=True), o.columns(o.x_RK, pack=True)
    found = block_scaled_wgrad(*sides, o.padded.offsets_e, o.recipe)
    y, x = o.columns(o.y_RN), o.columns(o.x_RK)
    for i, rows in enumerate(slices(o.padded.offsets_e)):
        left, right = y.values[rows].float().T, x.values[rows].float()
        scale = y.scales[i] * x.scales[i]
        product, magnitudes = left @ right * scale, left.abs() @ right.abs() * scale
        check(found[i], product, magnitudes, terms=rows.stop - rows.start)
        assert COUNTS[i] or not found[i].any()


@pytest.mark.parametrize(("N", "K"), SIZES)
@recipes
def test_products(N: int, K: int, recipe: Recipe, device: str) -> None:
    """Experts of any number of rows, tiles that end past every dim."""
    o = Operands(recipe, N, K, device)
    check_gemm(o, torch.float32)
    check_gemm(o, torch.bfloat16)
    check_wgrad(o)


@recipes
def test_gradients_are_added(recipe: Recipe, device: str) -> None:
    o = Operands(recipe, 32, 64, device)
    sides = o.columns(o.y_RN, pack=True), o.columns(o.x_RK, pack=True)
    new = block_scaled_wgrad(*sides, o.padded.offsets_e, o.recipe)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.randn(new.shape, device=device).to(dtype)
        expected = out.float() + new * 0.25
        how: dict[str, Any] = dict(out=out, scale=0.25)
        assert (
            block_scaled_wgrad(*sides, o.padded.offsets_e, o.recipe, accumulate=True, **how) is out
        )
        check(out, expected, terms=2, magnitudes=expected.float().abs() + new.abs())
        block_scaled_wgrad(*sides, o.padded.offsets_e, o.recipe, **how)
        check(out, new * 0.25, terms=0, magnitudes=new)


@pytest.mark.parametrize("recipe", [RECIPES["mxfp8"], RECIPES["nvfp4"]], ids=["mxfp8", "nvfp4"])
def test_what_is_not_finite_stays_in_its_row_and_its_expert(recipe: Recipe, device: str) -> None:
    o = Operands(recipe, 32, 64, device)
    clean = block_scaled_gemm(
        o.rows(o.x_RK, pack=True), o.matrices(pack=True), o.offsets_e, recipe, torch.float32
    )
    o.x_RK[7, 3], o.x_RK[-9:] = torch.inf, torch.nan
    a, b = o.rows(o.x_RK, pack=True), o.matrices(pack=True)
    found = block_scaled_gemm(a, b, o.offsets_e, recipe, torch.float32)
    others = torch.arange(R, device=device) != 7
    others[-9:] = False
    assert torch.equal(found[others], clean[others]) and not found[7].isfinite().any()
    sides = o.columns(o.y_RN, pack=True), o.columns(o.x_RK, pack=True)
    grad = block_scaled_wgrad(*sides, o.padded.offsets_e, recipe)
    assert not grad[2].isfinite().all() and grad[[0, 1, 3, 4, 5]].isfinite().all()


def test_gathered_matrices_are_transposed() -> None:
    """Blocks of 16 x 16 are the same numbers along either dim."""
    w = torch.randn(2, 64, 96, generator=torch.Generator().manual_seed(0))
    rows, columns = quantise_microscaled_matrices(w, RECIPES["nvfp4"], pack=True)
    assert rows is not None and columns is not None
    found = transpose_matrices(rows)
    assert found.kind == columns.kind
    for ours, theirs in zip(found.tensors(), columns.tensors(), strict=True):
        bits = [t.view(torch.uint8) if t.itemsize == 1 else t for t in (ours, theirs)]
        assert ours.dtype == theirs.dtype and torch.equal(*bits) and ours.is_contiguous()
