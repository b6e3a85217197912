from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from moecore import BalanceConfig, MoEConfig, MoELayer
from moecore.base.options.precision import Recipe

LAYERS: dict[str, dict[str, Any]] = {
    "shared, latent": dict(shared_hidden_dim=16, shared_gate=True, latent_dim=16),
    "fp8": dict(dim=128, hidden_dim=128),
    "balanced": dict(
        score_function="sigmoid",
        expert_bias=True,
        balance=BalanceConfig(micro_batch_coef=0.01, bias_update_rate=0.1),
    ),
}


def make(name: str) -> tuple[MoELayer, torch.Tensor]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    sizes: dict[str, Any] = dict(dim=32, hidden_dim=32, num_experts=4, top_k=2)
    layer = MoELayer(MoEConfig(**sizes | LAYERS[name]))
    if name == "fp8":
        layer.get_part("experts").set_backend("auto", recipe=Recipe())
    return layer, torch.randn(2, 8, layer.config.dim)


@pytest.mark.parametrize("name", LAYERS)
def test_eval_is_one_graph(name: str) -> None:
    layer, x = make(name)
    layer.eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("name", LAYERS)
def test_training_breaks_once_where_counts_are_kept(name: str) -> None:
    layer, x = make(name)
    x.requires_grad_()
    counters.clear()
    results = []
    for run in (layer, torch.compile(layer, backend="aot_eager")):
        layer.zero_grad()
        y = run(x)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        results.append((y, dx))
    (reason,) = counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1 and "LoadTracker" in reason
    torch.testing.assert_close(*results)
