"""Documents in pieces, whose states go from piece to piece, against whole documents."""

import pytest
import torch

from moecore.kernels.linear_attention import DeltaRule, chunked, gated_delta_rule
from moecore.kernels.linear_attention.gated_delta import (
    compute_transitions_ref,
    gated_delta_rule_ref,
)
from tests.kernels.conftest import check_without_host
from tests.kernels.linear_attention.oracle import delta_rule_ref
from tests.kernels.linear_attention.pieces import PIECES, Pieces
from tests.kernels.linear_attention.test_linear_attention import (
    KINDS,
    grads,
    make_low_rule,
    relative,
    rule_of,
)

DIMS = [dict(H=4, h=2, k=64, v=128), dict(H=2, h=1, k=16, v=176)]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_their_documents(kind: str) -> None:
    pieces = Pieces(PIECES)
    rule = rule_of(pieces.borders[-1], kind=kind)
    leaves = [x for x in rule[:5] if x is not None]
    got, _ = gated_delta_rule(rule, pieces.cu_seqlens, chain=pieces)
    want, _ = delta_rule_ref(rule, pieces.borders)
    pairs = [(got, want), *zip(grads((got,), leaves), grads((want,), leaves), strict=True)]
    assert max(relative(found, expected) for found, expected in pairs) <= 5e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", DIMS, ids=["one tile", "two tiles"])
def test_kernels_over_pieces_are_at_most_twice_as_wrong_as_plain_pytorch(
    dims, kind, device
) -> None:
    """Against plain PyTorch in 16 bits of whole documents."""
    pieces = Pieces(PIECES, device)
    rule, _, leaves = make_low_rule(pieces.borders, device, kind, False, **dims)
    assert chunked.find_problem(rule) is None
    cu_seqlens = torch.tensor(pieces.borders, dtype=torch.int32, device=device)
    with torch.autocast(rule.v_THv.device.type, rule.v_THv.dtype):
        plain, _ = gated_delta_rule_ref(rule, cu_seqlens, None)
    got, _ = gated_delta_rule(rule, pieces.cu_seqlens, chain=pieces)
    outs = delta_rule_ref(rule, pieces.borders)[0], got, plain
    want, *others = ([o, *grads((o,), leaves)] for o in outs)
    for w, g, p in zip(want, *others, strict=True):
        assert relative(g, w) <= 2 * relative(p, w) + 4e-3


@pytest.mark.parametrize("kind", KINDS)
def test_transitions_of_kernels(kind, device) -> None:
    """Last states and maps, also of an empty piece, whose map is the identity."""
    pieces = Pieces(PIECES, device)
    rule, _, _ = make_low_rule(pieces.borders, device, kind, False, **DIMS[0])
    with torch.no_grad():
        got = chunked._Scan(rule, pieces.cu_seqlens).compute_transitions()
        exact = rule._replace(**{n: getattr(rule, n).double() for n in ("q_Thk", "k_Thk", "v_THv")})
        want = compute_transitions_ref(exact, pieces.cu_seqlens)
    assert relative(got, want) <= 4e-3
    empty = got[len(PIECES[0]) + 2, :, :, DIMS[0]["v"] :]
    identity = torch.eye(64) if kind != "no rates" else torch.ones(64, 1)
    assert torch.equal(empty.cpu(), identity.expand_as(empty))


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_of_whole_documents_changes_no_bit(kind, device) -> None:
    pieces = Pieces([[sum(lengths)] for lengths in PIECES], device)
    rule, _, leaves = make_low_rule(pieces.borders, device, kind, False, **DIMS[0])
    runs = (gated_delta_rule(rule, pieces.cu_seqlens, chain=c)[0] for c in (None, pieces))
    alone, chained = ([o, *grads((o,), leaves)] for o in runs)
    assert all(torch.equal(x, y) for x, y in zip(alone, chained, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_of_pieces_do_not_wait_for_the_device_and_repeat_their_bits(kind) -> None:
    pieces = Pieces(PIECES, "cuda")
    dims = dict(H=4, h=2, k=128, v=128)
    rule, _, leaves = make_low_rule(pieces.borders, "cuda", kind, False, **dims)
    do = torch.randn_like(rule.v_THv)

    def step(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        beta = inputs[4] if len(inputs) > 4 else None
        rules = DeltaRule(*inputs[:4], beta, *rule[5:])
        o, _ = gated_delta_rule(rules, pieces.cu_seqlens, chain=pieces)
        return o, *torch.autograd.grad(o, inputs, do)

    check_without_host(step, leaves)
