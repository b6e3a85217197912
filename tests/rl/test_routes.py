import copy

import pytest
import torch

from moecore import FSDPOptions
from moecore.families import use_causal_attention
from moecore.models import Decoder, preset
from moecore.rl import PPO, RouterReplay
from tests.families.transformers.hf_models import random_model
from tests.rl import engine_cases as ec


def test_routes_are_recorded_and_replayed_by_token() -> None:
    plain, rollouts = ec.decoder(), ec.rollouts_of(1)
    found = ec.engine_of(copy.deepcopy(plain), max_tokens=20).log_probs(rollouts, routes=True)
    assert found.routes_NLK is not None
    assert torch.equal(found.routes_NLK, ec.routes_by_hand(plain, rollouts))
    other = rollouts.replace(routes_NLK=ec.forced(found.routes_NLK, 8))
    wanted = ec.log_probs_by_hand(plain, other)
    assert (wanted - found.log_probs_N).abs().max() > 0.1
    mini = [5, 0, 3]
    for max_tokens in (20, 64):
        engine = ec.engine_of(copy.deepcopy(plain), max_tokens=max_tokens)
        found_N = engine.log_probs(other).log_probs_N
        torch.testing.assert_close(found_N, wanted, rtol=1e-6, atol=2e-6)
        found_N = engine.forward_backward(other.take(mini), PPO()).scores.log_probs_N
        wanted_N = wanted[other.find_token_indices(mini)]
        torch.testing.assert_close(found_N, wanted_N, rtol=1e-6, atol=2e-6)


def test_routes_of_a_transformers_model_in_bf16() -> None:
    """Whose weights are gathered anew for each forward, so that no logits can be computed after."""
    model, rollouts = random_model("qwen3-moe"), ec.rollouts_of(1, 61)
    use_causal_attention(model)
    engine = ec.engine_of(model, max_tokens=40, fsdp=FSDPOptions(param_dtype=torch.bfloat16))
    found = engine.log_probs(rollouts, routes=True)
    replayed = rollouts.replace(routes_NLK=found.routes_NLK)
    assert torch.equal(engine.log_probs(replayed).log_probs_N, found.log_probs_N)
    result = engine.forward_backward(replayed, PPO())
    assert torch.equal(result.scores.log_probs_N, found.log_probs_N)


def test_the_model_routes_what_an_engine_did_not_run() -> None:
    rollouts, engine = ec.rollouts_of(0), ec.engine_of(ec.decoder(), max_tokens=20)
    found = engine.log_probs(rollouts, routes=True)
    routes = found.routes_NLK.clone()
    routes[::2] = -1
    partly = rollouts.replace(routes_NLK=routes)
    assert torch.equal(engine.log_probs(partly).log_probs_N, found.log_probs_N)
    weights = ec.weighted(partly)
    weights.route_weights_NLK[::2] = torch.nan  # not read
    other = engine.log_probs(weights).log_probs_N
    assert other.isfinite().all() and (other - found.log_probs_N).abs().max() > 0.1


def test_a_step_with_weights_of_the_routers_trains_them() -> None:
    rollouts, engine = ec.rollouts_of(0), ec.engine_of(ec.decoder(), max_tokens=20)
    routes = engine.log_probs(rollouts, routes=True).routes_NLK
    given = rollouts.replace(routes_NLK=routes)
    for one, trains in ((given, True), (ec.weighted(given), False)):
        engine.forward_backward(one, PPO())
        grads = [g for n, g in ec.gradients(engine.model).items() if n.endswith("router.weight")]
        assert all(grad.any() == trains for grad in grads) and len(grads) in (2, 2 * trains)
        engine.step.drop()


def test_routes_leave_out_multi_token_prediction() -> None:
    engine, rollouts = (
        ec.engine_of(Decoder(preset("tiny-deepseek-v3")), max_tokens=40),
        ec.rollouts_of(0),
    )
    found = engine.log_probs(rollouts, routes=True)
    names = RouterReplay(engine.model).layer_names
    assert found.routes_NLK.shape[1] == sum("mtp" not in name for name in names) < len(names)
    moved = rollouts.replace(routes_NLK=(found.routes_NLK + 1) % 8)
    result = engine.forward_backward(moved, PPO())
    assert (result.scores.log_probs_N - found.log_probs_N).abs().max() > 1e-4
    engine.step.drop()
    same = engine.forward_backward(rollouts.replace(routes_NLK=found.routes_NLK), PPO())
    assert torch.equal(same.scores.log_probs_N, found.log_probs_N)


def test_routes_that_do_not_fit_are_one_line() -> None:
    rollouts, engine = ec.rollouts_of(0), ec.engine_of(ec.decoder(), max_tokens=20)
    few = rollouts.replace(routes_NLK=torch.zeros(31, 1, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"routes_NLK \(31, 1, 2\) must be \[tokens, 2 layers"):
        engine.log_probs(few)
    wrong = rollouts.replace(routes_NLK=torch.full((31, 2, 2), 9))
    message = r"routes_NLK\[:, 0\] of layer 'model.layers.1.mlp', row\[0, 0\] \(9\)"
    with pytest.raises(ValueError, match=message):
        engine.log_probs(wrong)
    with pytest.raises(ValueError, match=r"route_weights_NLK .* routes_NLK \(None\), found"):
        rollouts.replace(route_weights_NLK=torch.ones(31, 2, 2))
    negative = ec.weighted(rollouts.replace(routes_NLK=torch.arange(124).view(31, 2, 2) % 8))
    negative.route_weights_NLK[3, 1, 0] = -0.5
    with pytest.raises(ValueError, match=r"layer 'model.layers.2.mlp', row\[3, 0\] \(-0.5\)"):
        engine.log_probs(negative)
    given = rollouts.replace(routes_NLK=torch.full((31, 2, 2), -1))
    with pytest.raises(ValueError, match=r"routes \(True\) must be False for rollouts with"):
        engine.log_probs(given, routes=True)
