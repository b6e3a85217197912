import pytest
import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.grouped.scaled_rows import quantise_expert_matrices_ref
from moecore.kernels.rows import microscaled, shard_matrices
from moecore.kernels.rows.e4m3 import FP8
from moecore.kernels.rows.microscaled import quantise_microscaled_matrices
from moecore.kernels.rows.microscaling import unpack_matrices
from moecore.kernels.rows.scaling import Blocks
from moecore.kernels.rows.shard_blocks import MatrixShard, view_as_matrices

# Shape, dim that is cut, rows of it on each rank.
CUTS = [
    ((2, 2, 24, 32), 0, (1, 1, 0)),
    ((2, 2, 24, 32), 3, (10, 10, 12)),
    ((2, 32, 48), 1, (11, 11, 10)),
    ((48, 32), 0, (17, 17, 14)),
]
WIDE = ((2, 32, 336), 2, (110, 112, 114))  # more columns than a program has, ragged
RECIPES = [Recipe(scaling="nvfp4", power_of_two=x) for x in (True, False)]


def weight(shape: tuple[int, ...]) -> Tensor:
    """Blocks of zeros, of small values, with an infinity and with NaN."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = x * 2.0 ** (torch.arange(x.numel()) // 7 % 11 - 5).view(shape)
    x[..., :16, :16] = 0
    flat = x.view(-1)
    flat[-1], flat[-40], flat[-shape[-1] * 16 - 1] = torch.inf, torch.nan, 2.0**-140
    return x


def parts(x: Tensor, dim: int, sizes: tuple[int, ...]) -> list[tuple[Tensor, MatrixShard, int]]:
    """Return each rank's part, its place, and its first matrix."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    is_of_experts = dim == 0 and x.ndim > 2
    return [
        (
            part.contiguous(),
            MatrixShard.from_slice(x.shape, dim, start, part.shape[dim]),
            start if is_of_experts else 0,
        )
        for part, start in zip(x.split(sizes, dim), starts, strict=True)
    ]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize(("shape", "dim", "sizes"), CUTS)
@pytest.mark.parametrize("power_of_two", [True, False])
def test_nvfp4(shape, dim, sizes, power_of_two) -> None:
    recipe, x = Recipe(scaling="nvfp4", power_of_two=power_of_two), weight(shape)
    e, (rows, columns) = shard_matrices.count_matrices(x.shape), (x[..., 0].numel(), shape[-1])
    squares, amax = torch.zeros(rows // 16, columns // 16), torch.zeros(e)
    for part, place, first in parts(x, dim, sizes):
        of_squares, of_matrices = torch.full_like(squares, 7), torch.full_like(amax, 7)
        shard_matrices.write_square_amax_(part, place, of_squares)
        shard_matrices.write_finite_amax_(part, first, of_matrices)
        squares, amax = squares.maximum(of_squares), amax.maximum(of_matrices)
    packed = []
    for part, place, _ in parts(x, dim, sizes):
        scales = torch.zeros_like(squares).to(FP8)
        bytes_ = torch.zeros(part.numel() // 2, dtype=torch.uint8)
        shard_matrices.pack_shard_(part, place, squares, amax, scales, bytes_, recipe)
        packed.append(bytes_.view(*part.shape[:-1], part.shape[-1] // 2))
    matrices = torch.Size((e, rows // e, columns))
    found = Blocks(torch.cat(packed, dim), scales, "packed", amax)
    rows_of = view_as_matrices(found, matrices).rows
    assert rows_of is not None
    for transposed, expected in enumerate(quantise_microscaled_matrices(x.view(matrices), recipe)):
        ours = unpack_matrices(rows_of, recipe, transposed=bool(transposed))
        assert expected is not None and ours.kind == expected.kind
        assert same(ours.values, expected.values) and ours.values.isnan().any()
        assert torch.equal(ours.scales, expected.scales)


@pytest.mark.parametrize(("shape", "dim", "sizes"), CUTS)
@pytest.mark.parametrize("is_finite", [True, False])
def test_one_scale_per_matrix(shape, dim, sizes, is_finite) -> None:
    x = weight(shape)
    x = torch.where(x.isinf(), 3.0, x) if is_finite else x  # infinity makes all of a matrix NaN
    e, amax = (
        shard_matrices.count_matrices(x.shape),
        torch.zeros(shard_matrices.count_matrices(x.shape)),
    )
    for part, _, first in parts(x, dim, sizes):
        of_matrices = torch.full_like(amax, 7)
        shard_matrices.write_matrix_amax_(part, first, of_matrices)
        amax = amax.maximum(of_matrices)
    found = []
    for part, _, first in parts(x, dim, sizes):
        scales = torch.zeros(e)
        values = torch.zeros(part.numel(), dtype=torch.uint8)
        shard_matrices.quantise_shard_(part, first, amax, scales, values, power_of_two=False)
        found.append(values.view(part.shape))
    expected = quantise_expert_matrices_ref(
        x.view(e, -1, shape[-1]), per_row=False, power_of_two=False
    ).rows
    assert expected is not None and torch.equal(scales, expected.scales[:, 0])
    ours = torch.cat(found, dim).view(FP8).view(expected.values.shape)
    assert same(ours.float(), expected.values.float())


@pytest.mark.parametrize(("shape", "dim", "sizes"), [*CUTS, WIDE])
def test_kernels_have_the_bits_of_their_references(shape, dim, sizes, device, monkeypatch) -> None:
    whole, count = weight(shape), shard_matrices.count_matrices(torch.Size(shape))
    rows, columns = whole.numel() // shape[-1], shape[-1]
    for dtype in (torch.float32, torch.bfloat16):
        cut = parts(whole.to(dtype).to(device), dim, sizes)
        squares = torch.zeros(rows // 16, columns // 16, device=device)
        amax = torch.zeros(count, device=device)
        for part, place, first in cut:
            found, expected = torch.full_like(squares, 7), torch.full_like(squares, 7)
            shard_matrices.write_square_amax_(part, place, found)
            shard_matrices.write_square_amax_ref_(part, place, expected)
            assert torch.equal(found, expected)
            of_matrices = torch.full_like(amax, 7)
            shard_matrices.write_finite_amax_(part, first, of_matrices)
            with monkeypatch.context() as patch:
                patch.setattr(microscaled, "has_cast_kernel", lambda _: False)
                by_reference = torch.full_like(amax, 7)
                shard_matrices.write_finite_amax_(part, first, by_reference)
            assert torch.equal(of_matrices, by_reference)
            squares, amax = squares.maximum(found), amax.maximum(of_matrices)
        assert squares.isinf().any() and amax.isfinite().all()
        for part, place, _ in cut:
            for recipe in RECIPES:
                results = []
                for pack in (shard_matrices.pack_shard_, shard_matrices.pack_shard_ref_):
                    scales = torch.zeros_like(squares).to(FP8)
                    packed = torch.full((part.numel() // 2,), 0x55, device=device).byte()
                    pack(part, place, squares, amax, scales, packed, recipe)
                    results.append((scales.view(torch.uint8) & 0x7F, packed))
                assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
