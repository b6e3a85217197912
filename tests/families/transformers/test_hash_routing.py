"""DeepSeek-V4, whose first layers choose experts by token id: choices, balance and its table.

test_families.py has its loss, gradients and files on two ranks, over ep and over tp.
"""

import copy
from typing import Any

import pytest
import torch

from moecore import BalanceConfig, Meshes, TrainStep, parallelize_moe
from moecore.rl import RouterReplay
from tests.families.transformers.family_models import batch, loss_of, tiny_model

BY_ID, LEARNED = "model.layers.0.mlp", "model.layers.1.mlp"


def deepseek_v4() -> Any:
    return tiny_model("deepseek_v4", vocab_size=64)


def test_logits_and_choices_are_transformers(meshes: Meshes) -> None:
    model = deepseek_v4()
    ids_BT = batch(model, 0)["input_ids"]
    plain, table = copy.deepcopy(model), model.model.layers[0].mlp.gate.tid2eid.clone()
    parallelize_moe(model, meshes)
    layers = [model.get_submodule(name) for name in (BY_ID, LEARNED)]
    assert [layer.config.assignment for layer in layers] == ["hash", "learned"]
    replay = RouterReplay(model)
    with replay.record():
        logits = model(ids_BT).logits
    torch.testing.assert_close(logits, plain(ids_BT).logits, rtol=1e-5, atol=1e-5)
    choices = replay.choices("cpu")
    assert torch.equal(choices[BY_ID][0], table[ids_BT.flatten()].int())
    with replay.replay(choices):
        assert torch.equal(model(ids_BT).logits, logits)
    with pytest.raises(ValueError, match=r"token_ids \(None\) must be those of the 18 tokens"):
        model(inputs_embeds=torch.randn(2, 9, 32))


def test_balance_is_of_the_layers_that_choose(meshes: Meshes) -> None:
    model = deepseek_v4()
    balance = BalanceConfig(micro_batch_coef=0.1, bias_update_rate=0.01)
    parallelize_moe(model, meshes, moe={"balance": balance})
    by_id, learned = (model.get_submodule(name) for name in (BY_ID, LEARNED))
    assert by_id.config.balance == BalanceConfig() and learned.config.balance == balance
    before = learned.gate.e_score_correction_bias.clone()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.0))
    with step.micro_batch():
        loss_of(model, batch(model, 0)).backward()
    counted = step.finish().metrics.tokens_per_expert
    assert {name: int(n.sum()) for name, n in counted.items()} == {BY_ID: 36, LEARNED: 36}
    moved = (learned.gate.e_score_correction_bias - before).abs()
    assert moved.max() == pytest.approx(0.01, rel=1e-4)


def test_a_table_that_nobody_filled_is_refused(meshes: Meshes) -> None:
    model = deepseek_v4()
    model.model.layers[0].mlp.gate.tid2eid.zero_()
    message = r"tid2eid\[0\] \(\[0, 0\]\) must be distinct ids of the 4"
    with pytest.raises(ValueError, match=message):
        parallelize_moe(model, meshes)
