"""Kernels of parts of NVFP4 weights: the bits of their references, wherever a weight is cut."""

from __future__ import annotations

import pytest
import torch

from moecore.base.options.precision import Recipe
from moecore.kernels.rows import microscaled
from moecore.kernels.rows.e4m3 import FP8
from moecore.kernels.rows.shard_matrices import num_matrices
from moecore.kernels.rows.shard_squares import (
    amax_of_squares_,
    amax_of_squares_ref_,
    finite_amax_,
    pack_part_,
    pack_part_ref_,
)
from tests.kernels.rows.test_shard_matrices import CUTS, parts, weight

WIDE = ((2, 32, 336), 2, (110, 112, 114))  # more columns than a program has, ragged
RECIPES = [Recipe(scaling="nvfp4", power_of_two=x) for x in (True, False)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("shape", "dim", "sizes"), [*CUTS, WIDE])
def test_parts(
    shape: tuple[int, ...],
    dim: int,
    sizes: tuple[int, ...],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, count = weight(shape), num_matrices(torch.Size(shape))
    rows, columns = whole.numel() // shape[-1], shape[-1]
    for dtype in DTYPES:
        cut = parts(whole.to(dtype).to(device), dim, sizes)
        squares = torch.zeros(rows // 16, columns // 16, device=device)
        amax = torch.zeros(count, device=device)
        for part, place, first in cut:
            found, expected = torch.full_like(squares, 7), torch.full_like(squares, 7)
            amax_of_squares_(part, place, found)
            amax_of_squares_ref_(part, place, expected)
            assert torch.equal(found, expected)
            of_matrices = torch.full_like(amax, 7)
            finite_amax_(part, first, of_matrices)
            with monkeypatch.context() as patch:
                patch.setattr(microscaled, "has_kernel", lambda _: False)
                by_reference = torch.full_like(amax, 7)
                finite_amax_(part, first, by_reference)
            assert torch.equal(of_matrices, by_reference)
            squares, amax = squares.maximum(found), amax.maximum(of_matrices)
        assert squares.isinf().any() and amax.isfinite().all()
        for part, place, _ in cut:
            for recipe in RECIPES:
                results = []
                for pack in (pack_part_, pack_part_ref_):
                    scales = torch.zeros_like(squares).to(FP8)
                    packed = torch.full((part.numel() // 2,), 0x55, device=device).byte()
                    pack(part, place, squares, amax, scales, packed, recipe)
                    results.append((scales.view(torch.uint8) & 0x7F, packed))
                assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
