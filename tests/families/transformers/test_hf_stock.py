import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from moecore import MoELayer
from moecore.families.family import swap_blocks
from moecore.moe.routed_experts import RoutedExperts
from tests.families.transformers.hf_models import ARCHITECTURES, random_model


def moe_blocks(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if "experts" in m._modules]


def router_name(block: Any) -> str:
    return "gate" if hasattr(block, "gate") else "router"


def subclass(module: Any) -> None:
    """As a patched class or transformers' register_patch_mapping leaves it."""
    cls = type(module)

    class Doubled(cls):
        def forward(self, *args: Any) -> Any:
            return 2 * super().forward(*args)

    module.__class__ = Doubled


def wrap(owner: Any, name: str) -> None:
    """As PEFT leaves a module whose parameters it adapts."""

    class ParamWrapper(nn.Module):
        def __init__(self, base_layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer

    setattr(owner, name, ParamWrapper(getattr(owner, name)))


def patch(module: Any, method: str = "forward") -> None:
    own = getattr(module, method)
    setattr(module, method, lambda *args: 2 * own(*args))


def scale_activation(block: Any) -> None:
    class SiLU(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * nn.functional.silu(x)

    block.experts.act_fn = SiLU()


def borrow(block: Any) -> None:
    """transformers' own code, but of another class."""
    block.forward = types.MethodType(type(block.experts).forward, block)


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "subclass-experts": (lambda b: subclass(b.experts), r"experts \(Doubled\) of .* must be of"),
    "subclass-router": (lambda b: subclass(getattr(b, router_name(b))), r"\(Doubled\) of"),
    "wrapped-experts": (
        lambda b: wrap(b, "experts"),
        r"experts \(ParamWrapper\) of .*LoRA of peft works",
    ),
    "wrapped-router": (
        lambda b: wrap(b, router_name(b)),
        r"\(ParamWrapper\) of .*LoRA of peft works",
    ),
    "block-forward": (patch, r"^forward of \w+ must be transformers' own"),
    "experts-forward": (lambda b: patch(b.experts), r"^forward of experts \(\w+Experts\) of"),
    "experts-gating": (lambda b: patch(b.experts, "_apply_gate"), r"^_apply_gate of experts"),
    "router-forward": (lambda b: patch(getattr(b, router_name(b))), r"^forward of \w+ \(\w+Router"),
    "other-method": (borrow, r"^forward of \w+ must be transformers' own"),
    "child": (lambda b: setattr(b, "lora", nn.Linear(32, 32)), r"lora of \w+ must not exist"),
    "child-of-experts": (
        lambda b: setattr(b.experts, "lora", nn.Linear(32, 32)),
        r"lora of experts \(\w+\) of \w+ must not exist",
    ),
    "parameter": (
        lambda b: b.register_parameter("scale", nn.Parameter(torch.ones(32))),
        r"scale of \w+ must not exist",
    ),
    "buffer": (
        lambda b: b.register_buffer("scale", torch.ones(32)),
        r"scale of \w+ must not exist",
    ),
    "parametrization": (
        lambda b: parametrizations.weight_norm(b.experts, "down_proj"),
        r"experts \(Parametrized\w+\) of",
    ),
    "activation": (scale_activation, r"experts.act_fn \(SiLU\) of \w+ must be of"),
    "patched-activation": (
        lambda b: patch(b.experts.act_fn),
        r"forward of experts.act_fn \(SiLU\w*\) of",
    ),
}


CASES = [
    (name, change)
    for name in ("qwen3-moe", "deepseek-v3", "gpt-oss")
    for change in CHANGES
    if name != "gpt-oss" or "activation" not in change  # its activation is no module
]


@pytest.mark.parametrize(("name", "change"), CASES)
def test_a_changed_block_is_refused(name: str, change: str) -> None:
    model = random_model(name)
    make, message = CHANGES[change]
    make(moe_blocks(model)[-1])
    with pytest.raises(NotImplementedError, match=message) as caught:
        swap_blocks(model, {})
    assert "adapter of yours, see docs/extending.md" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not any(isinstance(m, MoELayer) for m in model.modules())


@pytest.mark.parametrize("part", ["", "experts", "gate", "experts.act_fn"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_patched_class_is_refused(part: str, wrapped: bool, monkeypatch: Any) -> None:
    """`functools.wraps` gives a patch the name and module of what it replaces."""
    model = random_model("olmoe")
    cls = type(moe_blocks(model)[0].get_submodule(part))
    own = cls.forward

    def doubled(self: Any, *args: Any) -> Any:
        return 2 * own(self, *args)

    monkeypatch.setattr(cls, "forward", functools.wraps(own)(doubled) if wrapped else doubled)
    with pytest.raises(NotImplementedError, match=r"forward of .*must be transformers' own"):
        swap_blocks(model, {})
    monkeypatch.undo()
    swap_blocks(model, {})


def test_a_subclass_of_a_block_keeps_what_it_computes() -> None:
    model = random_model("mixtral")
    subclass(moe_blocks(model)[0])
    x = torch.randn(2, 5, 32)
    before, found = moe_blocks(model)[0](x), swap_blocks(model, {})
    assert [type(layer) for layer in found.values()] == [RoutedExperts, MoELayer]
    torch.testing.assert_close(moe_blocks(model)[0](x), before)


def test_experts_run_by_a_function_of_the_user() -> None:
    model = random_model("qwen2-moe")
    functions = sys.modules["transformers.integrations.moe"].ALL_EXPERTS_FUNCTIONS
    functions["mine"] = lambda experts, x, ids, weights: torch.zeros_like(x)
    try:
        model.set_experts_implementation("mine")
        with pytest.raises(NotImplementedError, match=r"_experts_implementation \('mine'\) of"):
            swap_blocks(model, {})
    finally:
        del functions["mine"]
    model.set_experts_implementation("eager")
    swap_blocks(model, {})


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_changes_no_maths_is_taken(name: str) -> None:
    """torch.compile, transformers' own ways to run experts, and a method put back by its patch."""
    model = random_model(name)
    model.set_experts_implementation("grouped_mm")
    for block in moe_blocks(model):
        block.compile()
        block.experts.forward = block.experts.forward
        if hasattr(block.experts, "act_fn"):
            block.experts.act_fn = nn.SiLU()  # what hidden_act "swish" gives
    assert len(swap_blocks(model, {})) == 2


@pytest.mark.parametrize("name", ["qwen2-moe", "deepseek-v3"])
def test_a_wrapped_part_of_the_shared_expert_is_kept(name: str) -> None:
    """As PEFT wraps it; the shared expert is taken along as it is."""
    model = random_model(name)
    block = moe_blocks(model)[0]
    shared = getattr(block, "shared_expert", None) or block.shared_experts
    wrap(shared, "up_proj")
    swap_blocks(model, {})
    assert any(m is shared for m in model.modules())
