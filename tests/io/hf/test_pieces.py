import random

import pytest
import torch

from moecore.io.hf.names import plan_hf_tensors
from moecore.io.hf.pieces import PieceOverlap, TensorPiece, find_overlaps, find_shard_runs
from moecore.models import preset


def test_worked_example():
    indices = [torch.arange(4), torch.arange(2), torch.tensor([2, 3]), torch.arange(1)]
    found = list(
        find_overlaps(find_shard_runs(indices), TensorPiece("fused", (), (4, 8, 1)), (4, 2, 4, 1))
    )
    whole = slice(0, 1)
    assert found == [
        PieceOverlap(
            (slice(0, 4), slice(2 + 4 * half, 4 + 4 * half), whole),
            (slice(0, 4), slice(half, half + 1), slice(0, 2), whole),
        )
        for half in range(2)
    ]


CASES = [
    ((6, 5), TensorPiece("all", (), (6, 5))),
    ((4, 2, 6, 3), TensorPiece("fused", (), (4, 12, 3))),
    ((4, 2, 6, 3), TensorPiece("one", (2, 1), (6, 3))),
    ((4, 12, 3), TensorPiece("up", (1, slice(6, 12)), (6, 3))),
    ((10, 4), TensorPiece("half", (slice(5, 10),), (5, 4))),
    ((1, 4), TensorPiece("gate", (), (1, 4))),
    ((3, 2, 1, 4), TensorPiece("narrow", (1, 0), (1, 4))),
    ((7,), TensorPiece("vector", (), (7,))),
    ((), TensorPiece("scalar", (), ())),
]


@pytest.mark.parametrize(("shape", "piece"), CASES, ids=lambda c: getattr(c, "name", None))
@pytest.mark.parametrize("most", [1 << 62, 1, 20])
def test_boxes_are_the_elements_that_both_have(shape, piece, most):
    """Fill a shard through the boxes from a piece with known numbers."""
    rng = random.Random(0)
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    held = tensor[piece.region].reshape(piece.shape)
    for order in [sorted, list] * 15:
        # Any indices per dim, in any order; rising ones have the longest runs.
        indices = [
            torch.tensor(order(rng.sample(range(n), rng.randint(0, n))), dtype=torch.int64)
            for n in shape
        ]
        mesh = torch.meshgrid(*indices, indexing="ij") if indices else ()
        want = tensor[mesh] if indices else tensor
        inside = torch.zeros(shape, dtype=torch.bool)
        inside[piece.region] = True
        want = torch.where(inside[mesh] if indices else inside, want, -1.0)
        found, seen = torch.full_like(want, -1.0), 0
        for box in find_overlaps(find_shard_runs(indices), piece, shape, max_numel=most):
            part = found[box.target]
            part.copy_(held[box.source].reshape(part.shape))
            seen += part.numel()
        assert torch.equal(found, want)
        assert seen == int((want >= 0).sum())  # each element once


def test_boxes_are_cut_where_the_first_dim_allows():
    boxes = list(find_overlaps((((0, 10),), ((0, 3),)), CASES[0][1], (6, 5), max_numel=7))
    assert len(boxes) == 3
    piece = TensorPiece("all", (), (10, 3))
    boxes = list(find_overlaps((((0, 10),), ((0, 3),)), piece, (10, 3), max_numel=7))
    assert [b.source[0] for b in boxes] == [slice(i, i + 2) for i in range(0, 10, 2)]


def test_pieces_of_a_plan_follow_each_other():
    """`hf.convert` appends them one after the other."""
    for layout in ("fused", "per_expert"):
        for recipe in plan_hf_tensors(preset("tiny-deepseek-v3"), layout).values():
            numbers = torch.arange(torch.Size(recipe.shape).numel()).view(recipe.shape)
            flat = torch.cat([numbers[piece.region].flatten() for piece in recipe.pieces])
            assert torch.equal(flat, numbers.flatten())
