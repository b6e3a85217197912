import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import Meshes, MoEConfig, MoELayer, parallelize_moe
from moecore.families import adopt
from moecore.families.family import swap_blocks
from moecore.families.transformers.blocks import STACKED
from moecore.parallel.model.parallel_state import get_moe_state
from tests.families.transformers import hf_models as hm

ASKED: dict[str, Any] = {"output_router_logits": True}


def pair(name: str, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    """A model twice; its balance loss is large enough to be a fair part of the gradient."""
    if name in hm.WITH_BALANCE_LOSS:
        kwargs["router_aux_loss_coef"] = 0.5
    model = hm.random_model(name, **kwargs)
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("mask", [None, hm.padding_mask()], ids=["full", "padded"])
@pytest.mark.parametrize("name", hm.WITH_BALANCE_LOSS)
def test_own_balance_loss(name: str, mask: Tensor | None, meshes: Meshes) -> None:
    model, plain = pair(name)
    parallelize_moe(model, meshes)
    expected = hm.run(plain, mask, **ASKED)
    hm.assert_equal_numbers(hm.run(model, mask, **ASKED), expected)
    assert float(expected["aux_loss"]) > 1 and "router_logits/1" in expected
    plain.zero_grad()
    without = hm.run(plain, mask) | {
        k: v for k, v in expected.items() if k not in plain_keys(plain)
    }
    assert hm.worst(without, expected)[0] > 1e-2, "the loss must matter, or equality shows nothing"


def plain_keys(plain: nn.Module) -> set[str]:
    return {"logits", "loss"} | {f"grad/{n}" for n, _ in plain.named_parameters()}


def test_asked_for_in_the_config(meshes: Meshes) -> None:
    model, plain = pair("qwen2-moe", output_router_logits=True)
    parallelize_moe(model, meshes)
    expected = hm.run(plain)
    assert "aux_loss" in expected
    hm.assert_equal_numbers(hm.run(model), expected)


@pytest.mark.parametrize("name", hm.ARCHITECTURES)
def test_gradient_checkpointing_records_once(name: str, meshes: Meshes) -> None:
    asked = ASKED if name in hm.WITH_BALANCE_LOSS else {}
    model, plain = pair(name)
    parallelize_moe(model, meshes)
    hm.enable_checkpointing(model)
    layers = [m for m in model.modules() if isinstance(m, MoELayer)]
    runs: list[None] = []
    for layer in layers:
        layer.get_part("router").register_forward_pre_hook(lambda *_: runs.append(None))
    for step in (1, 2):  # hooks that piled up would show in the second step
        found, expected = (
            hm.run(model, hm.padding_mask(), **asked),
            hm.run(plain, hm.padding_mask(), **asked),
        )
        hm.assert_equal_numbers(found, expected)  # one tensor of router logits per layer, too
        assert len(runs) == step * 2 * len(layers), "each forward ran again in backward"
    counts = get_moe_state(model).finish_step().tokens_per_expert.values()
    chosen = 2 * int(hm.padding_mask().sum()) * model.config.num_experts_per_tok
    assert all(int(c.sum()) == chosen for c in counts)


@pytest.mark.parametrize("name", hm.WITH_BALANCE_LOSS)
def test_recorded_before_parallelize(name: str, meshes: Meshes) -> None:
    """transformers hooks its routers at the first such forward and never again."""
    model, plain = pair(name)
    hm.run(model, **ASKED)
    model.zero_grad()
    parallelize_moe(model, meshes)
    hm.assert_equal_numbers(hm.run(model, **ASKED), hm.run(plain, **ASKED))


def test_a_copied_layer_records_for_the_copy() -> None:
    """Adapted and copied, not parallelized: each model collects its own logits."""
    model, plain = pair("olmoe")
    swap_blocks(model, {})
    copied, expected = copy.deepcopy(model), hm.run(plain, **ASKED)
    hm.assert_equal_numbers(hm.run(copied, **ASKED), expected)
    hm.assert_equal_numbers(hm.run(model, **ASKED), expected)


@pytest.mark.parametrize("name", hm.ARCHITECTURES)
def test_transformers_can_initialise_its_modules(name: str) -> None:
    """It looks for a router's weight in every module of the router's class."""
    model, _ = pair(name)
    swap_blocks(model, {})
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module._is_hf_initialized = False
    with torch.no_grad():
        model.lm_head.weight.fill_(9.0)
    model.initialize_weights()
    assert float(model.lm_head.weight.detach().abs().max()) < 1, "it ran"


def test_a_layer_that_is_not_recorded(meshes: Meshes) -> None:
    """A transformers release that records otherwise must not lose the loss of a layer."""
    model, _ = pair("qwen3-moe")
    parallelize_moe(model, meshes)
    layer = next(m for m in model.modules() if isinstance(m, MoELayer))
    layer.get_part("router")._forward_hooks.clear()
    ids, _ = hm.batch()
    model(ids)
    message = r"recorded \(1\) must equal the MoE layers \(2\)"
    with pytest.raises(NotImplementedError, match=message):
        model(ids, **ASKED)


def test_an_adapter_of_the_user(meshes: Meshes) -> None:
    """It hands over no router logits, so the model's loss would be of no layer at all."""

    def adapter(block: Any, model: nn.Module) -> MoELayer:
        E, D = block.gate.weight.shape
        config = MoEConfig(dim=D, hidden_dim=16, num_experts=E, top_k=2)
        router = dict(block.gate.named_parameters())
        return adopt(config, STACKED, router=router, experts=dict(block.experts.named_parameters()))

    model, _ = pair("mixtral")
    parallelize_moe(model, meshes, adapters={type(model.model.layers[0].mlp): adapter})
    ids, _ = hm.batch()
    model(ids)
    message = r"recorded \(0\) must equal the MoE layers \(2\)"
    with pytest.raises(NotImplementedError, match=message):
        model(ids, **ASKED)


def test_a_model_that_could_not_be_parallelized_still_records(meshes: Meshes) -> None:
    model, plain = pair("mixtral")
    model.model.layers[1].mlp.experts.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="must have no hooks"):
        parallelize_moe(model.model, meshes)
    ids, _ = hm.batch()
    found, expected = model.eval()(ids, **ASKED), plain.eval()(ids, **ASKED)
    assert torch.equal(found.aux_loss, expected.aux_loss)


@pytest.mark.parametrize("is_base", [True, False], ids=["base model", "with its head"])
def test_hidden_states_and_attentions_are_recorded(is_base: bool, meshes: Meshes) -> None:
    model, plain = (m.model if is_base else m for m in pair("mixtral"))
    parallelize_moe(model, meshes)
    ids, _ = hm.batch()
    outputs = []
    for m in (model, plain):
        with torch.no_grad():
            outputs.append(m(ids, output_hidden_states=True, output_attentions=True, **ASKED))
    for name, length in (("hidden_states", 3), ("attentions", 2), ("router_logits", 2)):
        found, expected = ([t.float() for t in getattr(out, name)] for out in outputs)
        assert len(found) == length
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)
