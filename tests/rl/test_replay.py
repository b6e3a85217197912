from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moecore import BalanceConfig, MoEConfig
from moecore.base.options.layer import CapacityConfig
from moecore.families.family import swap_blocks
from moecore.rl import RouterReplay
from tests.families.transformers.hf_models import MODELS as HF_MODELS
from tests.moe.moe_cases import ALL_LOSSES, leaves, make_layer
from tests.moe.reference import moe_reference
from tests.rl import replay_cases


@pytest.mark.parametrize("mode", replay_cases.MODES)
@pytest.mark.parametrize("name", replay_cases.CONFIGS)
def test_equals_the_recorded_run_bit_for_bit(name: str, mode: replay_cases.Mode) -> None:
    model, inputs = (
        replay_cases.make_model(replay_cases.CONFIGS[name], mode),
        replay_cases.batches(2),
    )
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 7:] = True
    replay = RouterReplay(model)
    for mask in (None, padding):
        with replay.record():
            expected = replay_cases.train(model, inputs, replay_cases.fifo, mask)
        choices = replay.choices()
        assert all(len(ids) == 2 for ids in choices.values())
        with replay.replay(choices):
            found = replay_cases.train(model, inputs, replay_cases.fifo, mask)
        assert any(key.startswith("counts") for key in found)
        assert replay_cases.equal(found, expected)


def test_one_other_id_changes_the_output() -> None:
    model, (x,) = replay_cases.make_model(replay_cases.CONFIGS["shared"]), replay_cases.batches(1)
    choices = replay_cases.recorded(model, [x])
    replay, expected = RouterReplay(model), model(x)
    name = replay.layer_names[-1]
    chosen = choices[name][0][3].tolist()
    choices[name][0][3, 0] = next(e for e in range(8) if e not in chosen)
    with replay.replay(choices):
        found = model(x)
    # Experts with other numbers of rows may sum in another order.
    moved_BS = (found - expected).abs().amax(-1) / expected.abs().max()
    assert moved_BS[0, 3] > 1e-3
    moved_BS[0, 3] = 0
    assert moved_BS[0, :4].max() < 1e-6 and moved_BS[1].max() < 1e-6


@pytest.mark.parametrize("mode", replay_cases.MODES)
def test_hugging_face_model(mode: replay_cases.Mode) -> None:
    model = HF_MODELS["qwen3-moe"]().train()
    replay_cases.randomize(model, 0)
    swap_blocks(model, {})
    if mode != "none":
        model.gradient_checkpointing_enable({"use_reentrant": mode == "reentrant"})
        model.enable_input_require_grads()
    x = replay_cases.batches(1)[0] % 61

    def step() -> dict[str, Tensor]:
        model.zero_grad()
        out = model(input_ids=x, labels=x, use_cache=False)
        logits = out.logits.detach()
        out.loss.backward()
        return replay_cases.results(model, [out.loss, logits])

    replay = RouterReplay(model)
    with replay.record():
        expected = step()
    assert replay.layer_names == ["model.layers.0.mlp", "model.layers.1.mlp"]
    for layer in replay_cases.layers_of(model):
        layer.tracker.counts = None
    with replay.replay(replay.choices()):
        assert replay_cases.equal(step(), expected)
    replay_cases.randomize(model, 1, only="gate.weight")
    assert not replay_cases.equal(step(), expected)


SOFTMAX = MoEConfig(dim=32, hidden_dim=16, num_experts=8, top_k=3, balance=ALL_LOSSES)
LAYERS = {
    "softmax": SOFTMAX,
    "sigmoid": replace(
        SOFTMAX, top_k=2, score_function="sigmoid", expert_bias=True, routed_scaling_factor=2.5
    ),
    "post": replace(SOFTMAX, score_order="post"),
    "raw": replace(SOFTMAX, normalize_weights=False),
    "capacity": replace(SOFTMAX, capacity=CapacityConfig(factor=0.8)),
    "expert-choice": replace(
        SOFTMAX,
        assignment="expert_choice",
        capacity=CapacityConfig(factor=1.0),
        balance=BalanceConfig(z_loss_coef=0.01),
    ),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("frozen_router", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_changed_router_against_the_reference(name, frozen_router, weighted) -> None:
    """Recorded ids, weights given or of the router as it is: output, gradients, losses, counts."""
    config = LAYERS[name]
    layer = make_layer(config)
    x = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(2))
    replay = RouterReplay(layer)
    with replay.record():
        layer(x)
    choices = replay.choices()
    ids_TK = choices[""][0]
    # The last tokens have no choice, and one has fewer than the others.
    ids_TK[-3:] = -1
    ids_TK[5, 1:] = -1
    replay_cases.randomize(layer, 7, only="router.weight")
    layer.get_part("router").requires_grad_(not frozen_router)
    tensors = leaves(layer)
    tensors["router.weight"].requires_grad_(not frozen_router)
    ours, truth = x.clone().requires_grad_(), x.clone().requires_grad_()
    given_TK = None
    if weighted:  # the router has the gradient of the losses alone
        given_TK = torch.rand(ids_TK.shape, generator=torch.Generator().manual_seed(3))
    with replay.replay(choices, weights=None if given_TK is None else {"": [given_TK]}):
        y = layer(ours)
        y.square().sum().backward()
    given = dict(given_ids_NK=ids_TK, given_weights_NK=given_TK)
    expected = moe_reference(truth, tensors, config, **given)
    (expected.y_BTD.square().sum() + sum(expected.losses.values())).backward()
    found = {"y": y.detach(), "x": ours.grad, "losses": layer.tracker.counts.losses}  # type: ignore[union-attr]
    wanted = {"y": expected.y_BTD.detach(), "x": truth.grad}
    order = ("micro_batch", "sequence", "global_batch", "z")
    wanted["losses"] = torch.stack([expected.losses[n].detach() for n in order])
    for key, parameter in layer.named_parameters():
        assert (parameter.grad is None) == (frozen_router and key == "router.weight")
        if parameter.grad is not None:
            found[key], wanted[key] = parameter.grad, tensors[key].grad
    assert replay_cases.worst(found, wanted) <= 1e-5  # type: ignore[arg-type]
    assert torch.equal(layer.tracker.counts.choices_E, expected.counts_E)  # type: ignore[union-attr]
    live = layer.get_part("router")(x.flatten(0, 1)).chosen_ids_TK
    assert not torch.equal(live, ids_TK)


@pytest.mark.parametrize("recorded_in_training", [False, True])
def test_drops_are_those_of_the_replay(recorded_in_training: bool) -> None:
    """Choices are noted before capacity, which is that of the mode: eval drops nothing."""
    layer, x_TD = make_layer(LAYERS["capacity"]), torch.randn(30, 32)
    outputs = {mode: layer.train(mode)(x_TD) for mode in (True, False)}
    assert not torch.equal(outputs[True], outputs[False])
    replay = RouterReplay(layer.train(recorded_in_training))
    with replay.record():
        layer(x_TD)
    for mode, expected in outputs.items():
        with replay.replay(replay.choices()):
            assert torch.equal(layer.train(mode)(x_TD), expected)


def test_expert_choice_beyond_the_capacity_is_dropped() -> None:
    """Buffers are sized for what experts take. Given every token, they keep what they would choose:
    the highest scores, which are the weights here."""
    config = replace(LAYERS["expert-choice"], normalize_weights=False)
    layer, x_TD = make_layer(config), torch.randn(16, 32)
    every_TK = torch.arange(8, dtype=torch.int32).repeat(16, 1)
    with RouterReplay(layer).replay({"": [every_TK]}):
        y = layer(x_TD)
    expected = moe_reference(x_TD[None], leaves(layer), config).y_BTD[0]
    assert replay_cases.worst({"y": y.detach()}, {"y": expected.detach()}) <= 1e-5


def test_only_some_layers() -> None:
    """The others route as ever: what they choose then is what they choose alone."""
    model, inputs = replay_cases.make_model(replay_cases.CONFIGS["shared"]), replay_cases.batches(1)
    choices = replay_cases.recorded(model, inputs)
    first, second = RouterReplay(model).layer_names
    replay_cases.randomize(model, 3, only="router.weight")
    live = replay_cases.recorded(model, inputs)
    with RouterReplay(model, layers=[second]).replay({second: choices[second]}):
        found = model(inputs[0])
    with RouterReplay(model).replay({first: live[first], second: choices[second]}):
        assert torch.equal(model(inputs[0]), found)
