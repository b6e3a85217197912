"""Reference models: a LoRA model without its adapters, or another model."""

from __future__ import annotations

import copy

import pytest
import torch

from moecore import Meshes, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.families import use_causal_attention
from moecore.rl import DPO, Engine
from tests.families.transformers.hf_models import random_model
from tests.rl.engine_cases import decoder, randomize, responses_of, rollouts_of


@pytest.fixture(scope="module")
def meshes() -> Meshes:
    return build_meshes(ParallelConfig(), device_type="cpu")


def test_a_lora_model_without_its_adapters_is_its_base(meshes: Meshes) -> None:
    from tests.families.transformers.lora_cases import adapted_model

    rollouts = rollouts_of(0, 61)
    model = adapted_model("qwen3-moe", {})
    use_causal_attention(model.get_base_model())
    parallelize_moe(model, meshes)
    trained = {n: p.requires_grad for n, p in model.named_parameters()}
    step = TrainStep(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad]))
    engine = Engine(model, step, max_tokens=20)
    found = engine.reference_log_probs(rollouts).log_probs_N
    base = random_model("qwen3-moe")
    with torch.no_grad():
        wanted = responses_of(lambda ids: base(ids).logits, rollouts)
    mask = rollouts.response_mask_N
    torch.testing.assert_close(
        found[mask], torch.cat([r.log_p for r in wanted]), rtol=1e-6, atol=2e-6
    )
    assert (engine.log_probs(rollouts).log_probs_N - found).abs().max() > 0.1
    assert trained == {n: p.requires_grad for n, p in model.named_parameters()}
    engine.forward_backward(rollouts.replace(ref_log_probs_N=found), DPO())
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {
        n for n, is_trained in trained.items() if is_trained
    }
    assert not engine.step.finish().is_skipped


def test_another_model_is_a_reference(meshes: Meshes) -> None:
    rollouts, model = rollouts_of(0), decoder()
    other = copy.deepcopy(model)
    randomize(other, 5)
    with torch.no_grad():
        wanted = responses_of(other, rollouts)
    parallelize_moe(other, meshes)
    other.requires_grad_(False)
    parallelize_moe(model, meshes)
    engine = Engine(model, TrainStep(model), max_tokens=20, reference=other)
    found = engine.reference_log_probs(rollouts).log_probs_N[rollouts.response_mask_N]
    torch.testing.assert_close(found, torch.cat([r.log_p for r in wanted]), rtol=1e-6, atol=1e-6)


def test_without_either_it_is_one_line(meshes: Meshes) -> None:
    model = parallelize_moe(decoder(), meshes)
    engine = Engine(model, TrainStep(model), max_tokens=20)
    with pytest.raises(ValueError, match=r"model \(Decoder\) must have adapters of peft[^\n]*$"):
        engine.reference_log_probs(rollouts_of(0))
    other = parallelize_moe(decoder(), meshes)
    with pytest.raises(ValueError, match=r"step \(of a Decoder\) must be of the model[^\n]*$"):
        Engine(other, engine.step, max_tokens=20)
