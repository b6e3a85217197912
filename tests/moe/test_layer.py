import copy
from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

from moecore import BalanceConfig, MoELayer
from tests.moe import moe_cases as mc


def test_two_dims_are_one_sequence() -> None:
    layer = mc.make_layer(replace(mc.BASE, balance=mc.ALL_LOSSES))
    mc.compare_with_oracle(layer, mc.tokens(1, 11, 32), forward=lambda x, _: layer(x[0])[None])


@pytest.mark.parametrize("top_k", [5, 7])
def test_a_token_chooses_more_than_the_experts_that_multiply(top_k: int) -> None:
    config = replace(mc.BASE, num_experts=4, zero_experts=3, top_k=top_k)
    mc.compare_with_oracle(mc.make_layer(config), mc.tokens(2, 7, 32))


def test_non_contiguous_inputs() -> None:
    layer = mc.make_layer(mc.CONFIGS["geglu-shared-gate"])
    x = torch.randn(32, 7, 3).permute(2, 1, 0)
    assert not x.is_contiguous()
    expected = layer(x.contiguous())
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer(x[:, ::2]), layer(x[:, ::2].contiguous()))
    x = x.detach().requires_grad_()
    # An expanded (stride 0) gradient of y, as .sum() gives it.
    layer(x).sum().backward()
    contiguous = x.detach().contiguous().requires_grad_()
    layer(contiguous).sum().backward()
    assert torch.equal(x.grad, contiguous.grad)  # type: ignore[arg-type]


def test_no_grad_and_eval() -> None:
    layer = mc.make_layer(replace(mc.BASE, balance=mc.ALL_LOSSES))
    x = torch.randn(4, 5, 32)
    expected = layer(x).detach()
    with torch.no_grad():
        y = layer(x)
    assert not y.requires_grad and torch.equal(y, expected)
    with torch.inference_mode():
        assert torch.equal(layer(x), expected)
    assert torch.equal(layer.eval()(x), expected), "nothing depends on the training flag"


def test_a_new_layer_follows_the_seed_of_torch() -> None:
    torch.manual_seed(7)
    first, second = MoELayer(mc.CONFIGS["softmax"]), MoELayer(mc.CONFIGS["softmax"])
    torch.manual_seed(7)
    again = MoELayer(mc.CONFIGS["softmax"])
    assert torch.equal(first.experts.w1, again.experts.w1)
    assert not torch.equal(first.experts.w1, second.experts.w1)


def test_init_statistics_and_keys() -> None:
    config = replace(mc.CONFIGS["gpt-oss"], dim=256, hidden_dim=64)
    layer = MoELayer(config)
    layer.init_weights(std=0.5, key="layers.3.moe", seed=1)
    assert abs(float(layer.experts.w1.detach().std()) - 0.5) < 0.01
    for name in ("experts.b1", "experts.b2", "router.bias"):
        assert (layer.get_parameter(name) == 0).all()
    other = MoELayer(config)
    other.init_weights(std=0.5, key="layers.4.moe", seed=1)
    assert not torch.equal(layer.experts.w1, other.experts.w1)
    assert not torch.equal(layer.router.weight, other.router.weight)


def test_state_dict_keys() -> None:
    assert list(MoELayer(mc.BASE).state_dict()) == ["router.weight", "experts.w1", "experts.w2"]
    keys = set(MoELayer(mc.CONFIGS["sigmoid-groups-bias"]).state_dict())
    extra = {"router.expert_bias", "shared.w1", "shared.w2"}
    assert keys == {"router.weight", "experts.w1", "experts.w2"} | extra


@pytest.mark.parametrize("frozen", ["experts", "router", "all but the router", "everything"])
def test_frozen_parts(frozen: str) -> None:
    layer, free = mc.make_layer(replace(mc.BASE, balance=mc.ALL_LOSSES)), mc.make_layer(mc.BASE)
    free.set_balance(mc.ALL_LOSSES)
    for name, parameter in layer.named_parameters():
        is_router = name.startswith("router")
        freeze = {
            "experts": not is_router,
            "router": is_router,
            "all but the router": not is_router,
            "everything": True,
        }[frozen]
        parameter.requires_grad_(not freeze)
    x_a, x_b = (torch.ones(2, 5, 32).cumsum(1).requires_grad_() for _ in range(2))
    layer(x_a).square().sum().backward()
    free(x_b).square().sum().backward()
    for (name, a), b in zip(layer.named_parameters(), free.parameters(), strict=True):
        if a.requires_grad:
            mc.assert_equal_to_scale(a.grad, b.grad, name)
        else:
            assert a.grad is None
    if frozen != "router" and frozen != "everything":
        assert torch.equal(x_a.grad, x_b.grad)  # type: ignore[arg-type]


def test_everything_frozen_and_no_input_gradient() -> None:
    layer = mc.make_layer(mc.BASE).requires_grad_(False)
    assert not layer(torch.randn(3, 32)).requires_grad and layer.tracker.counts is None


def test_deepcopy_has_its_own_tracker() -> None:
    layer = mc.make_layer(mc.BASE)
    other = copy.deepcopy(layer)
    other(torch.randn(3, 32)).sum().backward()
    assert layer.tracker.counts is None and other.tracker.counts is not None


def test_set_balance_checks_the_rules() -> None:
    layer = mc.make_layer(mc.BASE)
    with pytest.raises(ValueError, match="bias_update_rate"):
        layer.set_balance(BalanceConfig(bias_update_rate=0.1))
    layer.set_balance(mc.ALL_LOSSES)
    assert layer.config.balance == layer.tracker.config.balance == mc.ALL_LOSSES


@pytest.mark.parametrize("name", mc.CONFIGS)
def test_backward_inside_autocast_changes_nothing(name: str) -> None:
    """What forward computed wide, such as the router, is wide in backward too."""
    found = []
    for inside in (False, True):
        layer = mc.make_layer(mc.CONFIGS[name])
        layer.set_balance(mc.ALL_LOSSES)
        x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
        found.append({"x": x.grad} | {n: p.grad for n, p in layer.named_parameters()})
    assert not [n for n, grad in found[0].items() if not torch.equal(grad, found[1][n])]


@pytest.mark.parametrize("name", ["softmax", "gpt-oss", "geglu-shared-gate"])
def test_a_plain_layer_in_fp64_is_exact(name: str) -> None:
    """By finite differences, which find whatever is rounded to fp32 on the way."""
    config = replace(mc.CONFIGS[name], hidden_dim=5, num_experts=4)
    layer = mc.make_layer(config).double()
    x = torch.randn(3, config.dim, dtype=torch.float64, requires_grad=True)
    with pytest.warns(UserWarning, match="experts are multiplied one by one, slowly: dtype of the"):
        assert layer(x).dtype == torch.float64
    experts = {f"experts.{name}": p for name, p in layer.experts.named_parameters()}
    for name, param in experts.items():
        torch.autograd.gradcheck(
            lambda p, name=name: functional_call(layer, {name: p}, x.detach()),
            param.detach().clone().requires_grad_(),
            fast_mode=True,
        )


@pytest.mark.parametrize("sizes", [(31, 16), (32, 15), (33, 7)])
@pytest.mark.parametrize("name", ["softmax", "gpt-oss"])
def test_a_plain_layer_of_odd_dims(name: str, sizes: tuple[int, int]) -> None:
    config = replace(mc.CONFIGS[name], dim=sizes[0], hidden_dim=sizes[1])
    mc.compare_with_oracle(mc.make_layer(config), mc.tokens(3, 7, sizes[0]))


def test_a_plain_layer_of_ids_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^dtype of the experts \(torch.int64\) must be torch.fl"):
        mc.make_layer(mc.BASE)(torch.ones(3, 32, dtype=torch.int64))
