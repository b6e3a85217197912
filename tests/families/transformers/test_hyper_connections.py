import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from moecore.families.family import find_family
from moecore.families.transformers import fused_modules
from moecore.families.transformers.fused_modules import fuse_hyper_connections
from tests.families.transformers.family_models import IS_BEFORE_5_23, batch, loss_of, tiny_model
from tests.families.transformers.hf_models import enable_checkpointing


@pytest.fixture(scope="module")
def stock() -> Any:
    model = tiny_model("deepseek_v4", vocab_size=64)
    with torch.no_grad():  # weights of a trained model: all three scales count
        for layer in model.model.layers:
            for connection in (layer.attn_hc, layer.ffn_hc):
                connection.scale.copy_(torch.tensor([0.7, -1.3, 0.9]))
    return model


def fused(stock: nn.Module) -> Any:
    model = copy.deepcopy(stock)
    fuse_hyper_connections(model.model.layers)
    return model


def padded(model: nn.Module) -> dict[str, Tensor]:
    """A batch whose second row ends early."""
    given = batch(model, 1)
    mask = torch.ones_like(given["input_ids"])
    mask[1, -3:] = 0
    return given | {"attention_mask": mask}


@pytest.fixture
def calls(monkeypatch: Any) -> list[int]:
    """The tokens of each call of moecore's function."""
    found: list[int] = []
    collapse = fused_modules.collapse_streams

    def spy(streams_TND: Tensor, *given: Any) -> Any:
        found.append(len(streams_TND))
        return collapse(streams_TND, *given)

    monkeypatch.setattr(fused_modules, "collapse_streams", spy)
    return found


def run(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return logits, loss and gradients, by name."""
    model.zero_grad()
    loss = loss_of(model, given)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        return {"logits": model(**given).logits, "loss": loss.detach(), **grads}


@pytest.mark.parametrize("has_padding", [False, True])
def test_logits_loss_and_gradients_are_transformers(stock, has_padding, calls) -> None:
    given, model = padded(stock) if has_padding else batch(stock, 0), fused(stock)
    found, want = run(model, given), run(stock, given)
    assert found.keys() == want.keys()
    assert calls == [given["input_ids"].numel()] * 8  # two layers of two sublayers, two forwards
    for name, tensor in want.items():
        apart = (found[name] - tensor).abs().max()
        assert apart <= 1e-5 * tensor.abs().max(), name
    assert model.state_dict().keys() == stock.state_dict().keys()


def test_parallelized_models_get_them_and_customised_layers_stay(stock: Any) -> None:
    model = copy.deepcopy(stock)
    first, second = model.model.layers
    own = second.ffn_hc.forward = lambda streams: type(second.ffn_hc).forward(
        second.ffn_hc, streams
    )
    find_family(model).prepare_for_sharding(model)
    assert "forward" in vars(first) and "forward" in vars(first.attn_hc)
    assert "forward" not in vars(second) and second.ffn_hc.forward is own


@pytest.mark.parametrize("by", ["autocast", "compiler"])
def test_autocast_and_compilers_get_the_class_own_code(stock, by, calls) -> None:
    given, model = batch(stock, 0), fused(stock)
    if by == "compiler":
        model.model.layers[0].compile(backend="eager")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=by == "autocast"):
        assert torch.equal(model(**given).logits, stock(**given).logits)
    assert len(calls) == (0 if by == "autocast" else 2)  # of the layer that is not compiled


def test_gradient_checkpointing_recomputes_them(stock: Any, calls: list[int]) -> None:
    given, model = batch(stock, 0), fused(stock)
    want = run(stock, given)
    enable_checkpointing(model)
    model.train()
    calls.clear()
    cache = DynamicCache(config=model.config)
    found = run(model, given | {"use_cache": True, "past_key_values": cache})
    assert len(calls) == 3 * 4  # forward, once more in backward, and without gradients
    for name, tensor in want.items():
        apart = (found[name] - tensor).abs().max()
        assert apart <= 1e-5 * tensor.abs().max(), name


@pytest.mark.skipif(IS_BEFORE_5_23, reason="layers of transformers < 5.23 drop it before forward")
def test_gradient_checkpointing_keeps_a_cache_without_gradients(stock: Any) -> None:
    """Nothing is recomputed then: a token after cached ones is that of the full row."""
    ids, model = batch(stock, 0)["input_ids"], fused(stock)
    enable_checkpointing(model)
    model.train()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
        last = model(ids[:, -1:], past_key_values=cache).logits
        torch.testing.assert_close(last, stock(ids).logits[:, -1:], rtol=1e-4, atol=1e-4)
