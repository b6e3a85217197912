import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import MoEConfig, MoELayer, ParallelConfig, build_meshes, parallelize_moe
from moecore.families import adopt
from moecore.families.family import swap_blocks
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.layer import LayerLayout

CONFIG = MoEConfig(dim=32, hidden_dim=16, num_experts=8, top_k=2)
EXPERTS = ExpertLayout(w1="up", w2="down", gate_up="concatenated")
LAYOUT = LayerLayout(router="gate", expert_layout=EXPERTS)
DOCS = Path(__file__).parents[2] / "docs" / "extending.md"


def random(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.3)


def tensors() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return {"weight": random(8, 32)}, {"up": random(8, 32, 32), "down": random(8, 32, 16)}


def test_the_very_parameters_are_kept() -> None:
    router, experts = tensors()
    experts["up"].requires_grad_(False)
    layer = adopt(CONFIG, LAYOUT, router=router, experts=experts)
    assert layer.gate.weight is router["weight"]
    assert layer.experts.up is experts["up"] and not layer.experts.up.requires_grad
    assert layer.experts.down is experts["down"]
    assert set(layer.state_dict()) == {"gate.weight", "experts.up", "experts.down"}
    assert layer(torch.randn(3, 32)).shape == (3, 32)


def test_dotted_names() -> None:
    """Parts lie in empty modules, and parameters keep the names of the block."""
    layout = replace(LAYOUT, router="moe.gate", experts="moe.experts", shared="mlp.shared")
    router, experts = tensors()
    layer = adopt(CONFIG, layout, router=router, experts=experts, shared=nn.Linear(32, 32))
    names = {"moe.gate.weight", "moe.experts.up", "moe.experts.down"}
    assert set(layer.state_dict()) == names | {"mlp.shared.weight", "mlp.shared.bias"}
    plain = adopt(CONFIG, LAYOUT, router=router, experts=experts, shared=layer.mlp.shared)
    x = torch.randn(3, 32)
    assert torch.equal(layer(x), plain(x))
    MoELayer(CONFIG, layout=layout).init_weights(key="layer")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_selection_bias_may_be_a_parameter(dtype: torch.dtype) -> None:
    config = replace(CONFIG, expert_bias=True, score_function="sigmoid", top_k=1)
    router, experts = tensors()
    router["expert_bias"] = nn.Parameter(10.0 * torch.eye(8)[3].to(dtype))
    layer = adopt(config, LAYOUT, router=router, experts=experts)
    bias = layer.get_part("router").selection_bias
    # Balancing moves it by 0.001; in bf16 it would stop moving at 0.5.
    assert bias is not None and bias.dtype == torch.float32 and not bias.requires_grad
    assert (layer.get_part("router")(torch.randn(5, 32)).expert_ids_TK == 3).all()


def test_latent_experts_need_their_projections() -> None:
    router, experts = tensors()
    message = r"MoEConfig.latent_dim \(16\) must be 0 in adopt"
    with pytest.raises(NotImplementedError, match=message):
        adopt(replace(CONFIG, latent_dim=16), LAYOUT, router=router, experts=experts)


def test_shared_module_and_layer_class() -> None:
    class WithNone(MoELayer):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), None

    router, experts = tensors()
    shared = nn.Linear(32, 32)
    layout = replace(LAYOUT, shared="always")
    layer = adopt(
        CONFIG, layout, router=router, experts=experts, shared=shared, layer_class=WithNone
    )
    assert layer.always is shared
    x = torch.randn(3, 32)
    y, none = layer(x)
    plain = adopt(CONFIG, LAYOUT, router=router, experts=experts)
    assert none is None and torch.allclose(y, plain(x) + shared(x))


def test_a_gate_on_the_shared_module() -> None:
    router, experts = tensors()
    shared, gate = nn.Linear(32, 32), nn.Linear(32, 1)
    layout = replace(LAYOUT, shared="always", shared_gate="opening")
    parts: dict[str, Any] = {"router": router, "experts": experts}
    layer = adopt(CONFIG, layout, **parts, shared=shared, shared_gate=gate)
    assert layer.always is shared and layer.opening is gate
    x = torch.randn(3, 32, requires_grad=True)
    y, inputs = layer(x), [x, *layer.parameters()]
    expected = adopt(CONFIG, LAYOUT, **parts)(x) + torch.sigmoid(gate(x)) * shared(x)
    torch.testing.assert_close(y, expected)
    dy = torch.randn(3, 32)
    found_grads = torch.autograd.grad(y, inputs, dy)
    for found, grad in zip(found_grads, torch.autograd.grad(expected, inputs, dy), strict=True):
        torch.testing.assert_close(found, grad)


def test_a_shared_gate_has_a_name_and_something_to_gate() -> None:
    router, experts = tensors()
    gate, named = nn.Linear(32, 1), replace(LAYOUT, shared_gate="opening")
    parts: dict[str, Any] = {"router": router, "experts": experts}
    with pytest.raises(ValueError, match=r"shared_gate \(''\) must name the .*\(Linear\) of adopt"):
        adopt(CONFIG, LAYOUT, **parts, shared=nn.Linear(32, 32), shared_gate=gate)
    with pytest.raises(ValueError, match=r"\('opening'\) must name the shared_gate \(None\)"):
        adopt(CONFIG, named, **parts, shared=nn.Linear(32, 32))
    with pytest.raises(ValueError, match=r"shared_gate \(Linear\) must come with shared \(None\)"):
        adopt(CONFIG, named, **parts, shared_gate=gate)


def error_of(config: MoEConfig, router: Any, experts: Any, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as caught:
        adopt(config, LAYOUT, router=router, experts=experts, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_and_unknown_names() -> None:
    router, experts = tensors()
    message = error_of(CONFIG, router, {"up": experts["up"]})
    assert "Experts tensors ['up'] must be ['down', 'up']" in message
    message = error_of(CONFIG, router, experts | {"extra": experts["up"]})
    assert "'extra'" in message
    message = error_of(replace(CONFIG, router_bias=True), router, experts)
    assert "Router tensors ['weight'] must be ['bias', 'weight']" in message
    message = error_of(replace(CONFIG, expert_bias=True), router, experts)
    assert "'expert_bias'" in message
    message = error_of(CONFIG, router | {"bias": random(8)}, experts)
    assert "['bias', 'weight'] must be ['weight']" in message
    assert "shared" in error_of(replace(CONFIG, shared_hidden_dim=16), router, experts)


def test_wrong_shapes() -> None:
    router, experts = tensors()
    message = error_of(CONFIG, router, experts | {"down": random(8, 16, 32)})
    assert "Experts down (8, 16, 32) must have the shape (8, 32, 16)" in message
    message = error_of(replace(CONFIG, num_experts=4), router, experts)
    assert "Router weight (8, 32) must have the shape (4, 32)" in message
    message = error_of(replace(CONFIG, activation="relu2"), router, experts)
    assert "Experts up (8, 32, 32) must have the shape (8, 16, 32)" in message


class Stacked(nn.Module):
    """A user's block with stacked experts, so that every name stays."""

    def __init__(self, num_experts: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(32, num_experts, bias=False)
        self.experts = nn.Module()
        self.experts.up, self.experts.down = random(num_experts, 32, 32), random(8, 32, 16)


class Other(Stacked):
    """Another class of block."""


def stacked_adapter(block: nn.Module, model: nn.Module) -> MoELayer:
    router = dict(block.gate.named_parameters())
    return adopt(CONFIG, LAYOUT, router=router, experts=dict(block.experts.named_parameters()))


def block_list(*blocks: nn.Module) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList(nn.Sequential(b) for b in blocks)})


def test_swap_keeps_names_order_and_mode() -> None:
    model = block_list(Stacked(), nn.Linear(32, 32), Stacked()).eval()
    before = dict(model.named_parameters())
    layers = swap_blocks(model, {Stacked: stacked_adapter})
    assert list(layers) == ["layers.0.0", "layers.2.0"] and dict(model.named_parameters()) == before
    assert list(model.state_dict()) == list(before)
    assert not any(module.training for module in model.modules())
    assert swap_blocks(model, {}) == layers, "a second pass finds the layers"


def test_unknown_block_is_named_with_its_class_and_the_way_out() -> None:
    model = block_list(Stacked(), Stacked())
    with pytest.raises(ValueError) as caught:
        swap_blocks(model, {})
    message = str(caught.value)
    assert message.startswith(
        "MoE blocks layers.0.0 (Stacked) and 1 more must have an adapter: "
        "pass parallelize_moe(..., adapters={Stacked: fn(block, model) -> MoELayer})"
    )
    assert isinstance(model.layers[0][0], Stacked)


class FFN(nn.Sequential):
    def __init__(self, dim: int = 32, hidden_dim: int = 48) -> None:
        super().__init__(nn.Linear(dim, hidden_dim), nn.SiLU(), nn.Linear(hidden_dim, dim))


def parts(**children: nn.Module | nn.Parameter) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def ffns(number: int = 8, dim: int = 32) -> nn.ModuleList:
    return nn.ModuleList(FFN(dim) for _ in range(number))


def stack(*shape: int) -> nn.Module:
    return parts(weight=random(*shape))


ROUTED = {
    "a list": lambda: parts(router=nn.Linear(32, 8), ffns=ffns()),
    "a list behind a gate": lambda: parts(gate=nn.Linear(32, 8), branches=ffns()),
    "a router with parts": lambda: parts(top_gate=nn.Sequential(nn.Linear(32, 8)), fc=ffns()),
    "stacks": lambda: parts(router=nn.Linear(32, 8), fc1=stack(8, 96, 32), fc2=stack(8, 32, 48)),
}
DENSE = {
    "a decoder and its classifier": lambda: parts(layers=ffns(), head=nn.Linear(32, 8)),
    "a gated mlp": lambda: parts(gate=nn.Linear(32, 48), up=nn.Linear(32, 48)),
    "a gate of another size": lambda: parts(gate=nn.Linear(32, 1), layers=ffns()),
    "heads": lambda: parts(
        gate=nn.Linear(32, 8), heads=nn.ModuleList(nn.Linear(32, 4) for _ in range(8))
    ),
    "layers of several kinds": lambda: parts(
        gate=nn.Linear(32, 2), layers=nn.ModuleList([FFN(), nn.Sequential(FFN())])
    ),
    "convolutions": lambda: parts(
        router=nn.Linear(32, 32), conv=nn.Conv1d(32, 32, 3), out=nn.Conv1d(32, 32, 3)
    ),
}


@pytest.mark.parametrize("kind", ROUTED)
def test_experts_without_an_adapter_are_not_dense_in_silence(kind: str) -> None:
    adapters = {Stacked: stacked_adapter}
    with pytest.warns(UserWarning, match=r"layers.0.0 \(Module\) looks like a router"):
        assert not swap_blocks(block_list(ROUTED[kind]()), {})
    message = (
        r"block layers.1.0 \(Module\) must have an adapter, as layers.0.0 of the same list has"
    )
    with pytest.raises(ValueError, match=message):
        swap_blocks(block_list(Stacked(), ROUTED[kind]()), adapters)
    apart = parts(layers=block_list(Stacked()), head=ROUTED[kind]())
    with pytest.warns(UserWarning, match=r"head \(Module\) looks like a router"):
        assert len(swap_blocks(apart, adapters)) == 1


@pytest.mark.parametrize("kind", DENSE)
def test_dense_modules_are_not_taken_for_experts(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert swap_blocks(block_list(DENSE[kind]()), {}) == {}
        assert swap_blocks(DENSE[kind](), {}) == {}


def test_an_adapter_is_found_by_the_class_itself() -> None:
    message = "adapters={MyBlock: fn}, whose key is the class itself"
    with pytest.raises(ValueError, match=message):
        parallelize_moe(
            block_list(Stacked()),
            build_meshes(ParallelConfig(), "cpu"),
            adapters={"Stacked": stacked_adapter},  # type: ignore[dict-item]
        )


def test_a_bare_block_must_have_a_parent() -> None:
    with pytest.raises(ValueError, match="must be held by a parent"):
        swap_blocks(Stacked(), {Stacked: stacked_adapter})


def test_a_failing_adapter_leaves_the_model_as_it_was() -> None:
    """Half of the blocks swapped would be a model that nobody asked for."""
    model = block_list(Stacked(), Stacked(num_experts=4))
    with pytest.raises(ValueError, match="must have the shape"):
        swap_blocks(model, {Stacked: stacked_adapter})
    assert all(isinstance(model.layers[i][0], Stacked) for i in (0, 1))


def test_an_adapter_must_return_a_layer() -> None:
    model = block_list(Stacked(), Other())
    adapters = {Stacked: stacked_adapter, Other: lambda block, _: nn.Sequential(block)}
    message = (
        r"adapter of layers.1.0 \(Other\) must return a MoELayer, .* returns RoutedExperts, see"
    )
    with pytest.raises(ValueError, match=message):
        swap_blocks(model, adapters)
    assert isinstance(model.layers[0][0], Stacked)


class ListedExperts(nn.Module):
    """A block whose experts an adapter has to stack."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 8, bias=False)
        self.experts = nn.ModuleList(
            parts(up=nn.Linear(32, 32, bias=False), down=nn.Linear(16, 32, bias=False))
            for _ in range(8)
        )


@torch.no_grad()
def listed_adapter(block: nn.Module, model: nn.Module) -> MoELayer:
    """Fill one of the matrices in place and stack the other."""
    up = torch.empty_like(block.experts[0].up.weight).new_empty(8, 32, 32)
    for e, expert in enumerate(block.experts):
        up[e].copy_(expert.up.weight)
    down = torch.stack([expert.down.weight for expert in block.experts])
    router = {"weight": block.gate.weight}
    return adopt(CONFIG, LAYOUT, router=router, experts={"up": up, "down": down})


def with_shared_memory(block: nn.Module) -> None:
    memory = torch.randn(33, 8)
    block.gate.weight = nn.Parameter(memory[:32].view(8, 32))
    block.scale = nn.Parameter(memory[32])


def read_by_shape_alone(block: nn.Module, model: nn.Module) -> MoELayer:
    router = {"weight": torch.zeros_like(block.gate.weight)}
    return adopt(CONFIG, LAYOUT, router=router, experts=dict(block.experts.named_parameters()))


def add(name: str, value: nn.Module | Tensor) -> Callable[[nn.Module], None]:
    def change(block: nn.Module) -> None:
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            block.register_buffer(name, value)
        else:
            setattr(block, name, value)

    return change


NOT_PASSED: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "shared expert": (
        add("shared", nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 32))),
        "shared.0.weight, shared.0.bias, shared.1.weight, shared.1.bias:",
    ),
    "noisy gate": (add("w_noise", random(32, 8)), "w_noise:"),
    "router bias": (lambda b: b.gate.register_parameter("bias", random(8)), "gate.bias:"),
    "expert bias": (
        lambda b: [e.up.register_parameter("bias", random(32)) for e in b.experts],
        "experts.0.up.bias, .*experts.5.up.bias and 2 more:",
    ),
    "correction bias": (add("correction_bias", torch.zeros(8)), "correction_bias:"),
    "nested module": (
        add("norms", nn.ModuleDict({"input": nn.LayerNorm(32, bias=False)})),
        "norms.input.weight:",
    ),
    "memory shared with the router": (with_shared_memory, "scale:"),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", NOT_PASSED)
def test_tensors_that_an_adapter_leaves_out_are_named(kind: str, device: str) -> None:
    """The model would lose them without a word."""
    change, names = NOT_PASSED[kind]
    block = ListedExperts()
    with torch.device(device):
        change(block)
    model = block_list(block).to(device)
    message = rf"^adapter of layers.0.0 \(ListedExperts\) must pass .* which lacks {names} pass"
    with pytest.raises(ValueError, match=message) as caught:
        swap_blocks(model, {ListedExperts: listed_adapter})
    assert "\n" not in str(caught.value) and model.layers[0][0] is block


def test_a_tensor_of_the_shape_of_a_parameter_does_not_replace_it() -> None:
    with pytest.raises(ValueError, match=r"which lacks gate\.weight: pass"):
        swap_blocks(block_list(Stacked()), {Stacked: read_by_shape_alone})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_new_tensors_made_of_the_parameters_are_taken(device: str) -> None:
    model = block_list(ListedExperts()).to(device)
    swap_blocks(model, {ListedExperts: listed_adapter})
    assert isinstance(model.layers[0][0], MoELayer)


def test_a_buffer_may_go_into_the_config_and_a_cache_need_not_be_passed() -> None:
    def adapter(block: nn.Module, model: nn.Module) -> MoELayer:
        config = replace(CONFIG, routed_scaling_factor=float(block.factor))
        router = dict(block.gate.named_parameters())
        return adopt(config, LAYOUT, router=router, experts=dict(block.experts.named_parameters()))

    block = Stacked()
    block.register_buffer("factor", torch.tensor(2.5))
    block.register_buffer("tokens_per_expert", torch.zeros(8), persistent=False)
    model = block_list(block)
    swap_blocks(model, {Stacked: adapter})
    assert model.layers[0][0].config.routed_scaling_factor == 2.5


def test_an_adapter_without_a_block_is_named() -> None:
    adapters = {Stacked: stacked_adapter, nn.Conv2d: stacked_adapter}
    with pytest.warns(UserWarning, match="adapter of Conv2d is not used"):
        swap_blocks(block_list(Stacked()), adapters)


HOOKS = [
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
]


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("where", ["", "experts", "gate"])
def test_hooks_that_a_swap_would_drop_are_refused(where: str, register: str) -> None:
    model = block_list(Stacked())
    block = model.layers[0][0]
    hook = getattr(block.get_submodule(where), register)(lambda *_: None)
    place = r"layers\.0\.0" + (rf"\.{where}" if where else "")
    with pytest.raises(ValueError, match=f"^{place} must have no hooks"):
        swap_blocks(model, {Stacked: stacked_adapter})
    assert model.layers[0][0] is block
    hook.remove()
    swap_blocks(model, {Stacked: stacked_adapter})


def test_hooks_of_a_module_that_the_layer_keeps() -> None:
    """They run as before."""

    def adapter(block: nn.Module, model: nn.Module) -> MoELayer:
        parts = stacked_adapter(block, model)
        router = dict(parts.gate.named_parameters())
        experts = dict(parts.experts.named_parameters())
        return adopt(CONFIG, LAYOUT, router=router, experts=experts, shared=block.always)

    block, calls = Stacked(), []
    block.always = nn.Linear(32, 32)
    block.always.register_forward_hook(lambda *_: calls.append(1))
    model = block_list(block)
    swap_blocks(model, {Stacked: adapter})
    model.layers[0][0](torch.randn(3, 32))
    assert calls == [1]


def test_a_block_at_two_places_is_swapped_at_both() -> None:
    """Looped transformers use one block several times; the second place must not keep the old."""
    block = Stacked()
    model = block_list(block, block)
    swap_blocks(model, {Stacked: stacked_adapter})
    first, second = (model.layers[i][0] for i in (0, 1))
    assert isinstance(first, MoELayer) and first is second


def test_the_examples_of_the_documentation_run() -> None:
    example, noisy = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)[:2]
    scope: dict[str, Any] = {"__name__": "adapters_example"}
    torch.manual_seed(0)
    exec(compile(example, str(DOCS), "exec"), scope)
    names = [n for n, _ in scope["model"].named_parameters()]
    assert "0.moe.gate.weight" in names, "the router keeps its name"
    assert "0.moe.experts.w1" in names, "the stacked experts have a new one, as the text says"
    x = scope["x"]
    scope["model"](x).square().sum().backward()
    for name, parameter in scope["model"].named_parameters():
        assert parameter.grad is not None, name
    exec(compile(noisy, str(DOCS), "exec"), scope)
    check_noisy_block(scope, x)


def check_noisy_block(scope: dict[str, Any], x: Tensor) -> None:
    """Compare the block that keeps its router with the loop over the same experts."""
    (block,) = scope["noisy"].eval()
    loop = scope["ClassicMoE"](32, hidden_dim=16, num_experts=8, top_k=2)
    loop.gate.weight = nn.Parameter(block.gate.weight.full_tensor())
    w1, w2 = block.experts.w1.full_tensor(), block.experts.w2.full_tensor()
    for e, expert in enumerate(loop.experts):
        values = {"gate.weight": w1[e, 0], "up.weight": w1[e, 1], "down.weight": w2[e]}
        expert.load_state_dict(values)
    torch.testing.assert_close(scope["noisy"](x), loop(x))
    block.train()(x).square().sum().backward()
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, name
