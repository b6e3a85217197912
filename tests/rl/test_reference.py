import copy

import pytest
import torch

from moecore import TrainStep
from moecore.families import use_causal_attention
from moecore.rl import DPO, Engine
from tests.families.transformers.hf_models import random_model
from tests.rl import engine_cases


def test_a_lora_model_without_its_adapters_is_its_base() -> None:
    from tests.families.transformers.lora_cases import adapted_model

    rollouts = engine_cases.rollouts_of(0, 61)
    model = adapted_model("qwen3-moe", {})
    use_causal_attention(model.get_base_model())
    engine_cases.engine_of(model)
    trained = {n: p.requires_grad for n, p in model.named_parameters()}
    step = TrainStep(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad]))
    engine = Engine(model, step, max_tokens=20)
    found = engine.reference_log_probs(rollouts).log_probs_N
    base = random_model("qwen3-moe")
    with torch.no_grad():
        wanted = engine_cases.responses_of(lambda ids: base(ids).logits, rollouts)
    wanted_N = torch.cat([r.log_p for r in wanted])
    torch.testing.assert_close(found[rollouts.response_mask_N], wanted_N, rtol=1e-6, atol=2e-6)
    assert (engine.log_probs(rollouts).log_probs_N - found).abs().max() > 0.1
    assert trained == {n: p.requires_grad for n, p in model.named_parameters()}
    engine.forward_backward(rollouts.replace(ref_log_probs_N=found), DPO())
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {
        n for n, is_trained in trained.items() if is_trained
    }
    assert not engine.step.finish().is_skipped


def test_another_model_is_a_reference() -> None:
    rollouts, model = engine_cases.rollouts_of(0), engine_cases.decoder()
    other = copy.deepcopy(model)
    engine_cases.randomize(other, 5)
    wanted_N = engine_cases.log_probs_by_hand(other, rollouts)
    engine_cases.engine_of(other).model.requires_grad_(False)
    engine = Engine(model, engine_cases.engine_of(model).step, max_tokens=20, reference=other)
    found_N = engine.reference_log_probs(rollouts).log_probs_N
    torch.testing.assert_close(found_N, wanted_N, rtol=1e-6, atol=1e-6)


def test_without_either_it_is_one_line() -> None:
    engine = engine_cases.engine_of(engine_cases.decoder())
    with pytest.raises(ValueError, match=r"model \(Decoder\) must have adapters of peft[^\n]*$"):
        engine.reference_log_probs(engine_cases.rollouts_of(0))
    with pytest.raises(ValueError, match=r"step \(of a Decoder\) must be of the model[^\n]*$"):
        Engine(engine_cases.engine_of(engine_cases.decoder()).model, engine.step, max_tokens=20)
