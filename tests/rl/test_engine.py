import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import TrainStep
from moecore.base.torch_private import get_local_tensor
from moecore.families import use_causal_attention
from moecore.models import Decoder
from moecore.rl import DPO, GRPO, GSPO, PPO, Engine, OwnObjective, Rollouts, group_advantages
from moecore.train import AdamW
from tests.families.transformers.hf_models import random_model
from tests.helpers.operations import Operations
from tests.rl import engine_cases
from tests.rl.replay_cases import equal, worst


@cache
def plain() -> nn.Module:
    return engine_cases.decoder()


def engine_of_plain(**options: Any) -> Engine:
    return engine_cases.engine_of(copy.deepcopy(plain()), **options)


def whole_rollouts() -> Rollouts:
    """With log-probabilities of one process, and noise."""
    rollouts = engine_cases.rollouts_of(1)
    return engine_cases.near(rollouts, engine_cases.log_probs_by_hand(plain(), rollouts))


def test_log_probs_and_entropies_are_those_of_log_softmax() -> None:
    rollouts = engine_cases.rollouts_of(1)
    with torch.no_grad():
        wanted = engine_cases.responses_of(plain(), rollouts)
    engine = engine_of_plain(max_tokens=20)
    found = engine.log_probs(rollouts, entropy=True)
    mask = rollouts.response_mask_N
    assert found.entropy_N is not None
    log_p, entropy = (torch.cat([getattr(r, n) for r in wanted]) for n in ("log_p", "entropy"))
    for got, want in ((found.log_probs_N, log_p), (found.entropy_N, entropy)):
        assert not got[~mask].any() and got.dtype == torch.float32
        torch.testing.assert_close(got[mask], want, rtol=1e-6, atol=1e-6)
    assert engine.log_probs(rollouts).entropy_N is None


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize("name", engine_cases.OBJECTIVES)
def test_an_objective_is_its_formula_whatever_the_micro_batches(name: str, loss: str) -> None:
    rollouts, numbers = whole_rollouts(), set()
    want_loss, want = engine_cases.by_hand(plain(), [rollouts], name)
    for max_tokens in (20, 64):
        engine = engine_of_plain(max_tokens=max_tokens, loss=loss)
        found = engine.forward_backward(rollouts, engine_cases.OBJECTIVES[name][0])
        numbers.add(found.num_micro_batches)
        torch.testing.assert_close(found.loss, want_loss, rtol=2e-6, atol=2e-6)
        assert worst(engine_cases.gradients(engine.model), want) < 1e-5
    assert max(numbers) > 1 == min(numbers)


def test_token_ids_outside_of_the_vocabulary_are_refused() -> None:
    rollouts = engine_cases.rollouts_of(0)
    model = random_model("qwen3-moe", num_hidden_layers=1)
    use_causal_attention(model)
    for engine, size in ((engine_of_plain(), 128), (engine_cases.engine_of(model), 61)):
        for wrong in (size, -1):
            tokens_N = rollouts.tokens_N.clamp(max=60).index_fill(0, torch.tensor(0), wrong)
            with pytest.raises(ValueError, match=rf"must be in \[0, vocab_size {size}\)"):
                engine.log_probs(rollouts.replace(tokens_N=tokens_N))


def test_a_step_without_gradients_is_refused() -> None:
    engine = engine_of_plain()
    message = r"forward_backward\(\) must run with gradients"
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        engine.forward_backward(whole_rollouts(), GRPO())
    with torch.inference_mode(), pytest.raises(ValueError, match=message):
        engine.step.forward_backward([{}])


@pytest.mark.parametrize("name", engine_cases.OBJECTIVES)
def test_an_objective_of_no_sequences_has_a_gradient_of_nothing(name: str) -> None:
    log_probs = torch.zeros(0, requires_grad=True)
    found = engine_cases.OBJECTIVES[name][0](
        log_probs, torch.zeros(0), engine_cases.rollouts_of(0).take([])
    )
    found.sum().backward()
    assert found.shape == (0,) and log_probs.grad is not None


def test_the_first_step_on_fresh_rollouts_has_ratio_one() -> None:
    rollouts = engine_cases.rollouts_of(0).replace(old_log_probs_N=None)
    engine = engine_of_plain()
    found = engine.forward_backward(rollouts, PPO())
    weights, mask = rollouts.weights_N, rollouts.response_mask_N
    assert weights is not None and rollouts.advantages_N is not None
    want = -(weights * rollouts.advantages_N)[mask].sum() / weights[mask].sum()
    torch.testing.assert_close(found.loss, want)
    again_N = engine.log_probs(rollouts).log_probs_N
    torch.testing.assert_close(found.scores.log_probs_N, again_N, rtol=1e-6, atol=1e-6)


def test_a_step_after_offload_has_the_bits_of_one_without() -> None:
    rollouts, found = whole_rollouts(), []
    for away in ([], ["all"], ["optimizer", "weights"]):
        model, reference = engine_of_plain().model, engine_of_plain().model
        step = TrainStep(model, AdamW(model.parameters(), lr=1e-3), max_norm=1.0)
        engine = Engine(model, step, max_tokens=20, reference=reference)
        before = {name: tensor.clone() for name, tensor in engine.weights(bucket_bytes=1 << 20)}
        for _ in range(2):
            engine.forward_backward(rollouts, GRPO())
            step.finish()
            for part in away:
                engine.offload(part)
            if "weights" in away or "all" in away:
                with pytest.raises(ValueError, match=r"forward must not run while .*weights"):
                    engine.reference_log_probs(rollouts)
            for part in away:
                engine.onload(part)
        scores = engine.reference_log_probs(rollouts)
        found.append(dict(model.named_parameters()) | {"reference": scores.log_probs_N})
    assert all(equal(found[0], other) for other in found[1:])
    after = dict(engine.weights(bucket_bytes=1 << 20))
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        assert torch.equal(after[name], get_local_tensor(found[0][name]))
        assert not torch.equal(after[name], before[name])
    assert after.keys() == before.keys()


def test_numbers_outside_of_responses_are_not_read() -> None:
    rollouts = whole_rollouts()
    spoiled = {
        name: getattr(rollouts, name).masked_fill(~rollouts.response_mask_N, float("nan"))
        for name in ("advantages_N", "old_log_probs_N", "ref_log_probs_N", "weights_N")
    }
    found = []
    for given in (rollouts, rollouts.replace(**spoiled)):
        engine = engine_of_plain()
        loss = engine.forward_backward(given, engine_cases.OBJECTIVES["grpo"][0]).loss
        found.append({"loss": loss} | engine_cases.gradients(engine.model))
    assert equal(*found)


def test_logits_of_all_tokens_never_exist() -> None:
    sizes = replace(engine_cases.config(), vocab_size=131)
    engine, rollouts = engine_cases.engine_of(Decoder(sizes)), engine_cases.rollouts_of(1)

    def count_rows(_: Any, out: Any) -> int | None:
        is_wide = isinstance(out, Tensor) and out.ndim > 1 and out.shape[-1] == 131
        return out.shape[:-1].numel() if is_wide else None

    with Operations(count_rows) as seen:
        engine.log_probs(rollouts, entropy=True)
        engine.forward_backward(rollouts, PPO(entropy_coef=0.1))
    assert max({*seen.found} - {sizes.dim}) == sizes.ce_chunk_tokens == 7  # the head has `dim` rows


def numbers_of(model: nn.Module, device: str, **options: Any) -> dict[str, Tensor]:
    """Return the loss, log-probabilities and gradients of an objective that replays routes."""
    engine = engine_cases.engine_of(model.to(device), device=device, **options)
    given = engine_cases.moved(whole_rollouts(), device)
    routes = engine.log_probs(given, entropy=True, routes=True).routes_NLK
    result = engine.forward_backward(given.replace(routes_NLK=routes), GSPO(entropy_coef=0.1))
    numbers = {"loss": result.loss, "log_probs": result.scores.log_probs_N}
    return {n: x.cpu() for n, x in (numbers | engine_cases.gradients(model)).items()}


@pytest.mark.gpu
def test_on_cuda_numbers_are_those_of_the_cpu() -> None:
    found = numbers_of(copy.deepcopy(plain()), "cuda")
    assert worst(found, numbers_of(copy.deepcopy(plain()), "cpu")) < 1e-4


def test_numbers_of_a_model_in_fp64_are_those_in_fp32() -> None:
    expected = numbers_of(copy.deepcopy(plain()).double(), "cpu", expert_backend="sequential")
    assert expected["log_probs"].dtype == torch.float32
    assert worst(numbers_of(copy.deepcopy(plain()), "cpu"), expected) < 1e-4


def test_group_advantages() -> None:
    rewards = torch.tensor([1.0, 2.0, 6.0, 5.0, 3.0, 3.0])
    found = group_advantages(rewards, [7, 7, 7, 2, 4, 4])
    first = (rewards[:3] - 3) / (rewards[:3].std() + 1e-6)
    torch.testing.assert_close(found, torch.cat([first, torch.zeros(3)]))
    alone = group_advantages(rewards, [7, 7, 7, 2, 4, 4], scale_rewards=False)
    torch.testing.assert_close(alone, torch.tensor([-2.0, -1, 3, 0, 0, 0]))
    with pytest.raises(ValueError, match=r"rewards_n \(6,\) must be one finite number[^\n]*$"):
        group_advantages(rewards.log() * float("nan"), [7, 7, 7, 2, 4, 4])


def test_rollouts_are_taken_with_all_that_is_known_of_them() -> None:
    rollouts = engine_cases.rollouts_of(0)
    taken = rollouts.take([2, 0])
    assert taken.lengths == [sum(engine_cases.LENGTHS[2]), sum(engine_cases.LENGTHS[0])]
    assert taken.sequence_N.tolist() == [0] * 5 + [1] * 8
    places = [*range(19, 24), *range(8)]
    for name in ("tokens_N", "response_mask_N", "advantages_N", "weights_N"):
        assert torch.equal(getattr(taken, name), getattr(rollouts, name)[places])
    assert rollouts.sum_responses(torch.ones(len(rollouts.tokens_N))).tolist() == [5, 9, 1, 6]


def test_numbers_of_other_sequences_are_refused() -> None:
    rollouts = engine_cases.rollouts_of(0)
    for sequences in ([4], [-2]):
        with pytest.raises(ValueError, match=r"sequences \(\[-?\d\]\) must be numbers from 0 to 3"):
            rollouts.take(sequences)
    for number in (3, 9):
        with pytest.raises(ValueError, match=rf"\({number},\) must be one number per sequence"):
            rollouts.expand_to_tokens(torch.ones(number))
        with pytest.raises(ValueError, match=rf"\({number},\) must be one number per token"):
            rollouts.sum_responses(torch.ones(number))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "tokens": (dict(tokens_N=torch.zeros(2, 3)), r"Rollouts.tokens_N .* must be int64 \[N\]"),
    "borders": (dict(cu_seqlens=torch.tensor([0, 3])), "Rollouts.cu_seqlens .* must be integers"),
    "mask": (dict(response_mask_N=torch.ones(31)), "Rollouts.response_mask_N .* must be bool"),
    "first": (dict(response_mask_N=torch.ones(31).bool()), "be False for the first token"),
    "shape": (dict(advantages_N=torch.ones(4)), r"Rollouts.advantages_N .* must be floating \(31,"),
    "dtype": (dict(weights_N=torch.ones(31).long()), "Rollouts.weights_N .* must be floating"),
    "routes": (dict(routes_NLK=torch.zeros(31, 2)), "Rollouts.routes_NLK .* must be integers"),
    "temperature": (dict(temperature=0.0), r"Rollouts.temperature \(0.0\) must be a finite number"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rollouts_are_one_line(name: str) -> None:
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message) as error:
        engine_cases.rollouts_of(0).replace(**changes)
    assert "\n" not in str(error.value)


def refused(engine: Engine, rollouts: Rollouts, objective: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        engine.forward_backward(rollouts, objective)
    assert "\n" not in str(error.value)


def test_what_does_not_fit_is_one_line() -> None:
    engine, rollouts = engine_of_plain(max_tokens=16), engine_cases.rollouts_of(0)
    missing = r"Rollouts.ref_log_probs_N \(None\) must be given for GRPO"
    refused(engine, rollouts.replace(ref_log_probs_N=None), GRPO(), missing)
    refused(engine, rollouts.take([0, 1, 2]), DPO(), r"rollouts \(3 sequences\) must be a multiple")
    refused(engine, rollouts, DPO(), r"max_tokens \(16\) must be >= 19, the tokens of sequence 0")
    nothing = rollouts.replace(response_mask_N=torch.zeros_like(rollouts.response_mask_N))
    pairs = nothing.replace(tokens_N=nothing.tokens_N).take([0, 2])
    refused(engine, pairs, DPO(), r"rollouts \(0 responses with a weight\) must have one in each")
    refused(engine, nothing, PPO(), r"rollouts \(0 tokens of responses with a weight")
    negative = rollouts.replace(weights_N=-torch.ones(len(rollouts.tokens_N)))
    refused(engine, negative, PPO(), "Rollouts.weights_N must be >= 0")
    for name in ("advantages_N", "old_log_probs_N", "ref_log_probs_N", "weights_N"):
        for value in (float("nan"), float("inf"), 1e308):  # the last is infinite in fp32
            numbers_N = getattr(rollouts, name).double()
            numbers_N[3] = value
            wrong = rollouts.replace(**{name: numbers_N})
            refused(engine, wrong, GRPO(), f"Rollouts.{name} must be finite in responses, as fp32")
    bare = r"objective \(<function.*\) must be an? .*: pass PPO\(\), GRPO\(\) or OwnObjective"
    refused(engine, rollouts, engine_cases.own, bare)
    with pytest.raises(ValueError, match=r"PPO.clip \(1.5\) must be"):
        PPO(clip=1.5)
    with pytest.raises(ValueError, match=r"model \(Decoder\) must be parallelized"):
        Engine(engine_cases.decoder(), engine.step, max_tokens=16)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda log_p: None, r"OwnObjective returned None, which must be a tensor"),
        (lambda log_p: 0.5, r"OwnObjective returned 0\.5, which must be a tensor"),
        (lambda log_p: [log_p], r"OwnObjective returned \[tensor.*, which must be a tensor"),
        (lambda log_p: -log_p.mean(), r"returned \(\), which must be one loss per token"),
        (lambda log_p: log_p.long(), r"returned torch\.int64 on cpu, which must be floating"),
        (lambda log_p: log_p.to("meta"), r"on meta, which must be floating on cpu"),
        (lambda log_p: log_p.detach(), r"returned losses without a gradient"),
    ],
)
def test_an_own_objective_that_returns_no_losses_is_one_line(returned: Any, message: str) -> None:
    objective = OwnObjective(lambda log_probs_N, entropy_N, rollouts: returned(log_probs_N))
    refused(engine_of_plain(), engine_cases.rollouts_of(0), objective, message)


@pytest.mark.parametrize("weight", [1e-308, 1e-30, 1e30])
@pytest.mark.parametrize("mean", ["token", "sequence"])
def test_the_scale_of_weights_does_not_matter(weight: float, mean: Any) -> None:
    rollouts, found = whole_rollouts(), []
    for scale in (1.0, weight):
        engine = engine_of_plain()
        weights_N = torch.full((len(rollouts.tokens_N),), scale, dtype=torch.float64)
        engine.forward_backward(rollouts.replace(weights_N=weights_N), PPO(mean=mean))
        found.append(engine_cases.gradients(engine.model))
    assert worst(*found) < 1e-5
