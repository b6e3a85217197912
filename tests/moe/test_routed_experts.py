from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from moecore import MoEConfig, MoELayer
from moecore.base.options.layer import BalanceConfig
from moecore.moe.routed_experts import RoutedExperts

CONFIG = MoEConfig(dim=16, hidden_dim=8, num_experts=4, top_k=2)


def pair() -> tuple[MoELayer, RoutedExperts]:
    """A layer, and its experts alone with the same weights."""
    torch.manual_seed(0)
    layer, experts = MoELayer(CONFIG), RoutedExperts(CONFIG)
    for name, param in layer.get_part("experts").named_parameters():
        getattr(experts, name).data.copy_(param.data)
    return layer, experts


def test_with_a_layers_choice_it_is_the_layer() -> None:
    layer, experts = pair()
    x_TD = torch.randn(7, 16)
    routing = layer.get_part("router")(x_TD)
    weights_TK = routing.weights_TK.detach().requires_grad_()
    y_TD = experts(x_TD, routing.expert_ids_TK.long(), weights_TK)
    assert torch.equal(y_TD, layer(x_TD))
    y_TD.square().sum().backward()
    assert weights_TK.grad is not None and weights_TK.grad.abs().min() > 0
    assert experts.tracker.counts is not None and int(experts.tracker.counts.choices_E.sum()) == 14


@pytest.mark.parametrize("nothing", [4, 5, -1])
def test_an_id_that_is_no_expert_adds_nothing(nothing: int) -> None:
    _, experts = pair()
    x_TD = torch.randn(3, 16)
    ids_TK = torch.tensor([[0, nothing], [nothing, nothing], [3, 1]])
    weights_TK = torch.rand(3, 2)
    found = experts(x_TD, ids_TK, weights_TK)
    zeroed = weights_TK.masked_fill(ids_TK == nothing, 0)
    torch.testing.assert_close(found, experts(x_TD, ids_TK.where(ids_TK != nothing, 0), zeroed))
    assert torch.equal(found[1], torch.zeros(16))


def test_experts_that_return_their_input_are_not_dispatched() -> None:
    """Against x times their weights; ids 4 to 6 of E=4, Z=3, and 7, which is none."""
    torch.manual_seed(0)
    experts = RoutedExperts(replace(CONFIG, zero_experts=3))
    for param in experts.parameters():
        torch.nn.init.normal_(param)
    x_TD, weights_TK = torch.randn(3, 16, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    ids_TK, leaves = torch.tensor([[0, 4], [6, 5], [7, 3]]), [x_TD, weights_TK]
    with patch.object(experts, "_run_experts", wraps=experts._run_experts) as compute:
        y_TD = experts(x_TD, ids_TK, weights_TK)
    assert int(compute.call_args.args[0].index.num_rows) == 2
    grads = torch.autograd.grad(y_TD.sum(), leaves)
    assert experts.tracker.counts.choices_E.tolist() == [1, 0, 0, 1, 1, 1, 1]
    plain = experts(x_TD, ids_TK.where(ids_TK < 4, -1), weights_TK)
    is_zero_TK = (ids_TK > 3) & (ids_TK < 7)
    plain = plain + x_TD * (weights_TK * is_zero_TK).sum(1, keepdim=True)
    torch.testing.assert_close(y_TD, plain)
    torch.testing.assert_close(grads, torch.autograd.grad(plain.sum(), leaves))


def test_the_same_expert_twice_in_a_token() -> None:
    _, experts = pair()
    x_TD = torch.randn(2, 16)
    twice = experts(x_TD, torch.tensor([[2, 2], [1, 1]]), torch.full((2, 2), 0.5))
    once = experts(x_TD, torch.tensor([[2], [1]]), torch.ones(2, 1))
    torch.testing.assert_close(twice, once)


def test_a_balance_is_the_models() -> None:
    _, experts = pair()
    message = r"must be left out for mlp\.experts, whose router is the mod"
    with pytest.raises(ValueError, match=message):
        experts.check_config(
            "mlp.experts", replace(experts.config, balance=BalanceConfig(micro_batch_coef=0.1))
        )
    experts.check_config("mlp.experts", replace(experts.config, balance=BalanceConfig()))


def test_an_activation_of_the_models() -> None:
    """Equal to the named one where it computes the same."""

    def swiglu(h_RC: Tensor) -> Tensor:
        gate, up = h_RC.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    _, experts = pair()
    own = RoutedExperts(replace(CONFIG, activation="geglu"), own_activation=swiglu)
    own.load_state_dict(experts.state_dict())
    x_TD, ids_TK = torch.randn(5, 16), torch.randint(0, 4, (5, 2))
    weights_TK = torch.rand(5, 2)
    found = [module(x_TD, ids_TK, weights_TK) for module in (own, experts)]
    torch.testing.assert_close(*found)
    for y_TD in found:
        y_TD.square().sum().backward()
    torch.testing.assert_close(own.w1.grad, experts.w1.grad)
    with pytest.raises(ValueError, match=r"own activation of the model \(True\) must be False"):
        own.set_backend("triton")
    with pytest.raises(ValueError, match="expert_fc1"):
        own.set_backend("torch", recompute_fc1=True)
