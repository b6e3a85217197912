"""FC2's input gradient with the activation's backward, against both one after the other."""

from __future__ import annotations

import pytest
import torch

from moecore.kernels.grouped.gemm import grouped_gemm_ref
from moecore.kernels.grouped.pingpong import CLEARED_ROWS, pingpong_activation_bwd
from moecore.kernels.rows.activation import ActivationOptions, weighted_activation_bwd_ref
from tests.kernels.grouped.test_grouped_gemm import check
from tests.kernels.row_cases import COUNTS, KINDS, SIZES, make, randn

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("D, F", SIZES)
@pytest.mark.parametrize("gather", [False, True], ids=["contiguous", "gather"])
@pytest.mark.parametrize("name", COUNTS)
def test_activation_bwd(name: str, gather: bool, D: int, F: int, kind: str) -> None:
    counts = COUNTS[name]
    offsets, row_ids, tiles, S = make(counts)
    R, used = row_ids.shape[0], sum(counts)
    options = ActivationOptions(kind=kind, limit=1.0)
    dy, weights = randn(S if gather else R, D), torch.rand(R, device="cuda")
    h, w2 = randn(R, 2 * F), randn(len(counts), D, F) / D**0.5
    h[used:] = float("nan")
    ids = row_ids if gather else None
    found = pingpong_activation_bwd(dy, w2, tiles, h, weights, offsets, options, row_ids_R=ids)
    again = pingpong_activation_bwd(dy, w2, tiles, h, weights, offsets, options, row_ids_R=ids)
    da = grouped_gemm_ref(dy, w2, offsets, row_ids_R=ids)
    exact_da = grouped_gemm_ref(dy.double(), w2.double(), offsets, row_ids_R=ids)
    plain = weighted_activation_bwd_ref(h, da, weights, offsets[-1], options)
    exact = weighted_activation_bwd_ref(
        h.double(), exact_da, weights.double(), offsets[-1], options
    )
    for ours, same, right, theirs in zip(found, again, exact, plain, strict=True):
        assert torch.equal(ours[:used], same[:used])
        two_dims = (t.reshape(R, -1) for t in (ours, right, theirs))
        check(*two_dims, used)
    dh, dweights, a = found
    assert not dweights[used:].any()
    for cleared in (dh, a):
        assert not cleared[used : used + CLEARED_ROWS].any()
