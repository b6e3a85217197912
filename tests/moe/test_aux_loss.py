from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import MoEConfig
from moecore.moe.aux_loss import AuxLoss, list_aux_losses
from moecore.moe.balance import BalanceGroups
from moecore.moe.state import MoEState
from moecore.train.rerun import drop_step
from tests.moe.moe_cases import make_layer


class Attention(nn.Module):
    """A layer whose loss is three times its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.aux_loss = AuxLoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.aux_loss.attach_loss(x, 3 * self.weight)


LAYER = make_layer(MoEConfig(dim=4, hidden_dim=4, num_experts=2, top_k=1))


# A pipeline stage of dense layers has indexers and no MoE layers.
@pytest.mark.parametrize("layers", [{"moe": LAYER}, {}])
def test_gradients_have_the_factors_of_a_step_and_sums_its_means(layers: dict[str, Any]) -> None:
    model = nn.Sequential(Attention())
    (owner,) = list_aux_losses(model).values()
    state = MoEState(layers, BalanceGroups(), other_losses=list_aux_losses(model))
    state.set_num_micro_batches(2)
    scale = torch.tensor(8.0)
    state.set_loss_scale(scale)
    for _ in range(2):
        x = torch.ones(3, requires_grad=True)
        y = model(x)
        assert torch.equal(y, x)
        with torch.no_grad():
            model(x)
        (x_grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert torch.equal(x_grad, torch.ones(3))
        owner.reset()  # of the backward above
        y.sum().backward()
    assert model[0].weight.grad == 2 * 3 * 8 / 2
    metrics = state.finish_step()
    assert metrics.indexer_losses["0"].tolist() == [3.0]  # one of the two was reset
    assert metrics.to_dict()["indexer_loss"] == 3.0
    assert state.finish_step().indexer_losses["0"].tolist() == [0.0]
    model(torch.ones(3, requires_grad=True)).sum().backward()
    drop_step(model)
    assert owner.total == 0 and model[0].weight.grad is None


def test_fp16_needs_a_loss_scale_that_reaches_it() -> None:
    with pytest.raises(ValueError, match=r"dtype of the layer \(torch.float16\) must not be fp16"):
        Attention()(torch.ones(3, dtype=torch.float16, requires_grad=True))
