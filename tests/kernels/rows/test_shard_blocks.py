import math

import pytest
import torch
from torch import Tensor

from moecore.kernels.rows import shard_blocks as s
from moecore.kernels.rows.cast import quantise_matrix
from moecore.kernels.rows.e4m3 import FP8
from moecore.kernels.rows.quantised import quantise_weights
from tests.helpers.grids import grid
from tests.kernels.rows.test_quantised import assert_same, hard_values, values_of

# Shape, dim that is cut, ranks. Chunks begin and end within blocks, and the last may be empty.
CUTS = {
    "rows of a linear": ((208, 256), 0, 3),
    "ragged columns": ((144, 272), 0, 4),
    "more ranks than blocks": ((32, 128), 0, 5),
    "whole experts": ((5, 2, 128, 128), 0, 4),
    "model dim of FC1": ((2, 2, 128, 384), 3, 5),
    "model dim of FC2": ((2, 384, 128), 1, 5),
    "one rank": ((3, 128, 256), 0, 1),
}


def gathered(whole: Tensor, dim: int, ranks: int, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Return values and scales as `ranks` ranks make them of their parts."""
    chunk = math.ceil(whole.shape[dim] / ranks)
    starts = [min(rank * chunk, whole.shape[dim]) for rank in range(ranks)]
    sizes = [min(chunk, whole.shape[dim] - start) for start in starts]
    places = [
        s.MatrixShard.from_slice(whole.shape, dim, *at) for at in zip(starts, sizes, strict=True)
    ]
    parts = [part.contiguous() for part in whole.split(sizes, dim)]
    found = []
    for part, place in zip(parts, places, strict=True):
        found.append(torch.full(place.scales_shape, torch.nan, device=whole.device))
        s.write_block_amax_(part, place, found[-1])
    amax = torch.stack(found).nan_to_num(nan=0.0, posinf=torch.inf).amax(0)
    codes, all_scales = [], []
    for part, place in zip(parts, places, strict=True):
        values = torch.full(part.shape, 0x55, dtype=torch.uint8, device=whole.device)
        scales = torch.zeros_like(amax)
        s.quantise_blocks_(part, place, amax, scales, values, power_of_two=power_of_two)
        codes.append(values)
        all_scales.append(scales)
    assert all(torch.equal(scales, all_scales[0]) for scales in all_scales)
    return torch.cat(codes, dim).view(FP8), all_scales[0]


@grid(case=CUTS, power_of_two=[True, False], dtype=[torch.float32, torch.bfloat16])
def test_parts_of_a_matrix(case: str, power_of_two: bool, dtype: torch.dtype, device: str) -> None:
    shape, dim, ranks = CUTS[case]
    whole = values_of(*shape, dtype=dtype, device=device)
    hard = hard_values(dtype, device, 9, shape[-1]) if shape[-1] >= 300 else None
    if hard is not None:
        whole.view(-1, shape[-1])[100:109] = hard
    values, scales = gathered(whole, dim, ranks, power_of_two)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if rows % 128 or columns % 128:
        want = quantise_matrix(
            whole.view(rows, columns), "block", power_of_two=power_of_two, columnwise=False
        )
        assert_same(values.view(rows, columns), want.rows.values[:, :columns])
        assert_same(scales, want.rows.scales)
    else:
        blocks = quantise_weights(whole.view(1, rows, columns), power_of_two=power_of_two).rows
        assert_same(values.view(rows, columns), blocks.values[0])
        assert_same(scales[:, : columns // 128], blocks.scales[0])


@pytest.mark.parametrize("shape", [(3, 128, 256), (1, 208, 272), (2, 16, 16), (0, 128, 128)])
def test_transposed_bytes(shape: tuple[int, int, int], device: str) -> None:
    values = torch.randint(0, 256, shape, dtype=torch.uint8, device=device).view(FP8)
    for multiple in (1, 128):
        got = s.transpose_values(values, multiple).view(torch.uint8)
        N = shape[1]
        assert got.shape == (shape[0], shape[2], math.ceil(N / multiple) * multiple)
        assert got.is_contiguous() and not got[..., N:].any()
        assert torch.equal(got[..., :N], values.view(torch.uint8).transpose(1, 2))
