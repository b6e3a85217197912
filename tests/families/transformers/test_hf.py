import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from moecore import (
    BalanceConfig,
    DenseOptions,
    Meshes,
    MoELayer,
    TrainStep,
    parallelize_moe,
)
from moecore.parallel.model.parallel_state import get_moe_state
from tests.families.transformers import hf_models


def shapes(tensors: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors}


@pytest.mark.parametrize("experts", ["torch", "sequential"])
@pytest.mark.parametrize("name", hf_models.MODELS)
def test_same_numbers_and_names(name: str, experts: Any, meshes: Meshes) -> None:
    model = hf_models.random_model(name)
    plain = copy.deepcopy(model)
    returned = parallelize_moe(model, meshes, expert_backend=experts)
    assert returned is model and model.training
    assert sum(isinstance(m, MoELayer) for m in model.modules()) >= 2
    assert shapes(model.named_parameters()) == shapes(plain.named_parameters())
    # torch.optim state dicts are positional: in another order, states change places.
    names = [[n for n, _ in m.named_parameters()] for m in (model, plain)]
    assert names[0] == names[1]
    assert shapes(model.state_dict().items()) == shapes(plain.state_dict().items())
    assert shapes(model.named_buffers()) == shapes(plain.named_buffers())
    assert all(isinstance(p, DTensor) for p in model.parameters())
    for key, tensor in plain.state_dict().items():
        mine = model.state_dict()[key]
        mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
        assert torch.equal(mine, tensor), key
    hf_models.assert_equal_numbers(hf_models.run(model), hf_models.run(plain))


@pytest.mark.parametrize("name", hf_models.ARCHITECTURES)
def test_eval_and_counts(name: str, meshes: Meshes) -> None:
    model = hf_models.random_model(name)
    plain = copy.deepcopy(model).eval()
    parallelize_moe(model, meshes)
    model.eval()
    ids, _ = hf_models.batch()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    assert not any(n.any() for n in get_moe_state(model).finish_step().tokens_per_expert.values())
    model.train()
    hf_models.run(model)
    metrics = get_moe_state(model).finish_step()
    layers = [n for n, m in model.named_modules() if isinstance(m, MoELayer)]
    assert list(metrics.tokens_per_expert) == layers
    top_k = model.config.num_experts_per_tok
    assert all(int(c.sum()) == 22 * top_k for c in metrics.tokens_per_expert.values())


@pytest.mark.parametrize("name", hf_models.ARCHITECTURES)
def test_one_expert_per_token_has_the_weight_of_the_model(name: str, meshes: Meshes) -> None:
    """1 where the model divides the weight by itself, whatever moecore's default is."""
    model = hf_models.random_model(name, num_experts_per_tok=1).eval()
    plain, (ids, _) = copy.deepcopy(model), hf_models.batch()
    parallelize_moe(model, meshes)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)


def test_balance_loss_reaches_a_transformers_model(meshes: Meshes) -> None:
    model = hf_models.random_model("qwen3-moe")
    plain = copy.deepcopy(model)
    parallelize_moe(model, meshes, moe={"balance": BalanceConfig(micro_batch_coef=0.5)})
    found, expected = hf_models.run(model), hf_models.run(plain)
    assert torch.allclose(found["loss"], expected["loss"]), "the loss value does not change"
    name = "grad/model.layers.1.mlp.gate.weight"
    assert not torch.allclose(found[name], expected[name])
    aux = get_moe_state(model).finish_step().aux_losses["model.layers.0.mlp"]
    assert float(aux[0]) >= 0.5 * 0.9


@pytest.mark.parametrize("by_position", [False, True])
def test_a_batch_without_labels_weighs_as_zero(by_position: bool, meshes: Meshes) -> None:
    """Beside a batch with labels, whose stock gradient is halved; also where none counts at all."""
    stock, model = hf_models.random_model("qwen3-moe"), hf_models.random_model("qwen3-moe")
    ids, labels = hf_models.batch()
    loss = stock(input_ids=ids, labels=labels, use_cache=False).loss
    (loss / 2).backward()
    step = TrainStep(parallelize_moe(model, meshes), num_micro_batches=2)
    none = torch.full_like(labels, -100)
    if by_position:
        for each in (labels, none):
            with step.micro_batch():
                found = model(ids, None, None, None, None, each, False).loss
                (found / 2).backward()
        assert found == 0
    else:
        given = [dict(input_ids=ids, labels=each, use_cache=False) for each in (labels, none)]
        torch.testing.assert_close(step.forward_backward(given), torch.stack([loss, 0 * loss]))
        assert step.compute_losses(given[1:]).tolist() == [0.0]
    hf_models.assert_equal_numbers(
        hf_models.whole_gradients(model), hf_models.whole_gradients(stock)
    )
    for num_items in (0, torch.tensor(0)):
        assert model(input_ids=ids, labels=none, num_items_in_batch=num_items).loss == 0


def test_deepseek_bias_follows_the_load(meshes: Meshes) -> None:
    model = hf_models.random_model("deepseek-v3")
    before = {n: b.clone() for n, b in model.named_buffers() if "correction" in n}
    parallelize_moe(model, meshes, moe={"balance": BalanceConfig(bias_update_rate=0.125)})
    hf_models.run(model)
    counts = get_moe_state(model).finish_step().tokens_per_expert
    for name, bias in before.items():
        load = counts[name.removesuffix(".gate.e_score_correction_bias")].float()
        step = model.get_buffer(name) - bias
        torch.testing.assert_close(step, 0.125 * torch.sign(load.mean() - load))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("top_k", 2),
        ("norm_topk_prob", False),
        ("routed_scaling_factor", 7.0),
        ("num_group", 2),
        ("topk_group", 3),
    ],
)
def test_deepseek_v3_options_are_those_of_the_router(option, value, meshes) -> None:
    """Forward reads the router's copies: a config that is changed later changes nothing."""
    model = hf_models.random_model("deepseek-v3")
    model.config.num_experts_per_tok, model.config.n_group = 1, 1
    for layer in model.model.layers[1:]:
        assert hasattr(layer.mlp.gate, option)
        setattr(layer.mlp.gate, option, value)
    plain = copy.deepcopy(model)
    parallelize_moe(model, meshes)
    hf_models.assert_equal_numbers(hf_models.run(model), hf_models.run(plain))


def test_unknown_architecture_is_named_with_its_class(meshes: Meshes) -> None:
    model = hf_models.mixtral()
    model.model.layers[1].mlp.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
    model.model.layers[1].mlp.__class__ = type("NewMoE", (nn.Module,), {})
    with pytest.raises(ValueError) as caught:
        parallelize_moe(model, meshes)
    message = str(caught.value)
    for piece in ("model.layers.1.mlp", "NewMoE", "adapters={", "extending.md"):
        assert piece in message
    assert not any(isinstance(m, MoELayer) for m in model.modules())


@pytest.mark.parametrize("act", ["relu", "gelu", "quick_gelu"])
def test_other_activations(meshes: Meshes, act: str) -> None:
    model = hf_models.random_model("qwen3-moe", hidden_act=act)
    plain = copy.deepcopy(model)
    parallelize_moe(model, meshes)
    hf_models.assert_equal_numbers(hf_models.run(model), hf_models.run(plain))


def test_empty_shared_experts_are_refused_or_left_out(meshes: Meshes) -> None:
    model = hf_models.random_model("deepseek-v3", n_shared_experts=0)
    with pytest.raises(ValueError, match=r"shared_experts.gate_proj.weight \(0, 32\) must hold"):
        parallelize_moe(copy.deepcopy(model), meshes)
    for layer in model.model.layers[1:]:
        layer.mlp.shared_experts = None
    hf_models.run(parallelize_moe(model, meshes))


def test_save_pretrained_of_a_parallelized_model(meshes: Meshes, tmp_path: Path) -> None:
    """Of shards it is refused, on every rank; whole tensors that the user gathered it writes."""
    model: Any = parallelize_moe(hf_models.random_model("qwen3-moe"), meshes)
    for tensors in ({}, {"state_dict": model.state_dict()}):
        with pytest.raises(NotImplementedError, match=r"use moecore.io.export_hf\("):
            model.save_pretrained(tmp_path / "refused", **tensors)
    assert not (tmp_path / "refused").exists()
    whole = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    model.save_pretrained(tmp_path / "whole", state_dict=whole)
    again = hf_models.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert all(torch.equal(again.state_dict()[name], whole[name]) for name in whole)


def test_compiled_layers_share_their_code_unless_there_is_a_cache(meshes, monkeypatch) -> None:
    # What graphs there are is the question, not what Inductor makes of them: tests/train/graphs.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    model = hf_models.MODELS["qwen3-moe"](num_hidden_layers=2, attn_implementation="sdpa").train()
    ids = torch.randint(0, 61, (2, 5))
    want = model(input_ids=ids).logits
    parallelize_moe(model, meshes, dense=DenseOptions(compile=True))
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="use_cache")
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, want)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with torch.no_grad():
            model.eval()(input_ids=ids)  # generation may have one
    assert graphs == 2, "up to the MoE layer, and from there on"
    with pytest.warns(UserWarning, match=r"use_cache \(True\) of Qwen3MoeModel must be False"):
        model.train()(input_ids=ids)
