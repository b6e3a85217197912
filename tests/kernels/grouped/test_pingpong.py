import pytest
import torch

from moecore.kernels.grouped.pingpong import CLEARED_ROWS, pingpong_activation_bwd
from moecore.kernels.grouped.skeleton import Addend
from moecore.kernels.rows.activation import ActivationOptions, weighted_activation_bwd_ref
from tests.helpers.grids import grid
from tests.kernels.grouped.oracle import grouped_gemm_ref
from tests.kernels.grouped.test_grouped_gemm import check
from tests.kernels.row_cases import COUNTS, KINDS, SIZES, make, randn

pytestmark = pytest.mark.gpu


@grid(rank=[0, 8, 64, 136], kind=KINDS, sizes=SIZES, gather=[False, True], name=COUNTS)
def test_activation_bwd(name, gather, sizes, kind, rank) -> None:
    D, F = sizes
    counts = COUNTS[name]
    offsets, row_ids, tiles, S = make(counts)
    R, used = row_ids.shape[0], sum(counts)
    options = ActivationOptions(kind=kind, limit=1.0)
    dy, weights = randn(S if gather else R, D), torch.rand(R, device="cuda")
    h, w2 = randn(R, 2 * F), randn(len(counts), D, F) / D**0.5
    h[used:] = float("nan")
    ids = row_ids if gather else None
    addend = Addend(randn(R, rank), randn(len(counts), rank, F)) if rank else None
    where = (tiles, h, weights, offsets, options)
    found = pingpong_activation_bwd(dy, w2, *where, row_ids_R=ids, addend=addend)
    again = pingpong_activation_bwd(dy, w2, *where, row_ids_R=ids, addend=addend)
    da = grouped_gemm_ref(dy, w2, offsets, row_ids_R=ids)
    exact_da = grouped_gemm_ref(dy.double(), w2.double(), offsets, row_ids_R=ids)
    if addend is not None:
        da += grouped_gemm_ref(*addend, offsets)
        exact_da += grouped_gemm_ref(*(side.double() for side in addend), offsets)
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
