from dataclasses import replace

import pytest
import torch

from moecore import MoEConfig, MoELayer, place_experts, reorder_experts
from moecore.moe.layer import LayerLayout

CONFIG = MoEConfig(
    dim=16,
    hidden_dim=24,
    num_experts=6,
    top_k=2,
    expert_bias=True,
    router_bias=True,
    fc1_bias=True,
    fc2_bias=True,
)


def test_the_example() -> None:
    assert place_experts(torch.tensor([9, 7, 1, 1]), num_ranks=2).tolist() == [0, 3, 1, 2]


@pytest.mark.parametrize(("E", "P"), [(128, 8), (64, 16), (12, 3)])
def test_ranks_become_even(E: int, P: int) -> None:
    """Loads that fall off as a power, as those of a router do."""
    loads_E = torch.arange(1, E + 1) ** -0.5
    order_E = place_experts(loads_E, num_ranks=P)
    assert order_E.sort().values.equal(torch.arange(E))
    busiest = loads_E[order_E].view(P, -1).sum(1).max()
    assert busiest <= max(1.09 * loads_E.sum() / P, 1.4 * loads_E.max())
    assert busiest <= 0.75 * loads_E.view(P, -1).sum(1).max()


@pytest.mark.parametrize(
    ("zero_experts", "bias_owner"), [(0, None), (3, None), (0, ""), (0, "router.statics")]
)
def test_a_layer_in_another_order_computes_the_same(zero_experts, bias_owner) -> None:
    torch.manual_seed(0)
    layout = LayerLayout(bias_owner=bias_owner)
    layer = MoELayer(replace(CONFIG, zero_experts=zero_experts), layout=layout)
    x, bias_E = torch.randn(40, 16), layer.router.selection_bias
    assert bias_E is not None
    with torch.no_grad():
        for tensor in (*layer.parameters(), bias_E):
            tensor.copy_(torch.randn_like(tensor))
    before, loads_E = layer(x), torch.zeros(6 + zero_experts)
    loads_E.index_add_(0, layer.router(x).expert_ids_TK.flatten().long(), torch.ones(80))
    order_E = torch.tensor([4, 0, 5, 1, 3, 2])
    reorder_experts(layer, order_E)
    torch.testing.assert_close(layer(x), before, rtol=1e-5, atol=1e-6 * float(before.abs().max()))
    found_E = torch.bincount(layer.router(x).expert_ids_TK.flatten(), minlength=6)
    assert torch.equal(found_E[:6].float(), loads_E[order_E])


def test_what_is_refused() -> None:
    layer = MoELayer(CONFIG)
    with pytest.raises(ValueError, match=r"order_E \(6,\) must have each of the 6 experts once"):
        reorder_experts(layer, torch.zeros(6, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"loads_E \(6,\) must be \[E\] with E a multiple of"):
        place_experts(torch.ones(6), num_ranks=4)
    grouped = MoEConfig(dim=16, hidden_dim=24, num_experts=8, top_k=2, num_groups=4, top_groups=2)
    with pytest.raises(NotImplementedError, match=r"top_groups \(2\) must equal num_groups \(4\)"):
        reorder_experts(MoELayer(grouped), torch.arange(8))
