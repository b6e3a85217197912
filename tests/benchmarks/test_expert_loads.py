from dataclasses import replace

import pytest
import torch
from benchmarks import expert_loads as el

from tests.moe import moe_cases as mc

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("E", "K", "shares"),
    [
        (8, 2, {0: 0.5, 5: 0.01}),
        (12, 3, {}),
        (13, 5, {12: 0.2, 3: 0.0, 4: 0.15}),
        (4, 4, {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}),
        (6, 1, {2: 1.0}),
    ],
)
def test_experts_have_their_shares(E: int, K: int, shares: dict[int, float]) -> None:
    ids_TK = el.make_ids_from_shares(997, E, K, CPU, shares=shares)
    assert ids_TK.dtype == torch.int32 and all(len(set(row)) == K for row in ids_TK.tolist())
    others = (1 - sum(shares.values())) / max(1, E - len(shares))
    wanted = [shares.get(e, others) * 997 * K for e in range(E)]
    found = torch.bincount(ids_TK.flatten(), minlength=E)
    assert max(abs(f - w) for f, w in zip(found.tolist(), wanted, strict=True)) <= 4


def test_a_layer_with_forced_shares_equals_the_oracle() -> None:
    layer = mc.make_layer(replace(mc.BASE, balance=mc.ALL_LOSSES, zero_experts=2))
    el.force_expert_loads(layer, {1: 0.4, 9: 0.2})
    given = el.make_ids_from_shares(21, 10, 2, CPU, shares={1: 0.4, 9: 0.2})
    mc.compare_with_oracle(layer, mc.tokens(3, 7, 32), given_ids_NK=given)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({8: 0.1}, "must be of experts 0 to 7"),
        ({0: 0.6}, r"must lie in \[0, 1 / top_k \(2\)\]"),
        ({0: 0.5, 1: 0.5, 2: 0.5}, "each other expert of layer such a share, not -0.1"),
        (dict.fromkeys(range(8), 0.1), "must lie in"),
    ],
)
def test_shares_that_no_routing_has(shares: dict[int, float], message: str) -> None:
    model = torch.nn.ModuleDict({"layer": mc.make_layer(mc.BASE)})
    with pytest.raises(ValueError, match=message):
        el.force_expert_loads(model, shares)
    assert model["layer"].router.forced_ids is None
    with pytest.raises(ValueError, match="whose experts choose evenly"):
        el.force_expert_loads(mc.make_layer(mc.OPTIONS["expert-choice"]), {})
