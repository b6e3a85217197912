"""Training, checkpoints and losses have the same bits whatever torch's default dtype and device.

The expected values are those of a run with torch's own defaults. Under the default device "meta",
a tensor that is created without a device has no values, so its first use fails.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore import (
    BalanceConfig,
    DynamicLossScale,
    MoEConfig,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.precision import Recipe
from moecore.base.torch_private import get_local_tensor
from moecore.io import export_hf, latest, load, load_hf, save
from moecore.kernels.adamw_formats import encode_moments_ref
from moecore.models import Decoder, preset
from moecore.moe.balance import BalanceGroups, compute_balance_losses
from moecore.moe.records import Routing
from moecore.moe.shortage import ShortageCounters
from moecore.rl import DPO, GRPO, GSPO, PPO, Engine, Rollouts, group_advantages
from moecore.train import AdamW, Muon, assign_matrices

DEFAULTS = ["bfloat16", "meta"]
Values = dict[str, Any]


@contextmanager
def torch_default(name: str) -> Iterator[None]:
    """Return a context with bfloat16 as the default dtype, or `name` as the default device."""
    if name == "bfloat16":
        torch.set_default_dtype(torch.bfloat16)
    elif name != "none":
        torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def assert_equal(values: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert values[name].dtype == value.dtype, name
            assert values[name].device == value.device, name
            assert values[name].equal(value), name
        else:
            assert values[name] == value, name


def list_parameters(model: nn.Module) -> Values:
    return {n: get_local_tensor(p.detach()).clone() for n, p in model.named_parameters()}


@cache
def decoder() -> Decoder:
    """Return a tiny model with all balance losses and selection biases."""
    config = preset("tiny")
    assert config.moe is not None
    balance = BalanceConfig(
        micro_batch_coef=0.01,
        sequence_coef=0.01,
        global_batch_coef=0.01,
        z_loss_coef=0.001,
        bias_update_rate=0.01,
    )
    moe = replace(config.moe, expert_bias=True, balance=balance)
    model = Decoder(replace(config, moe=moe, num_layers=2))
    model.init_weights(seed=1)
    return model


def train(default, path, make_optimizers, precision) -> Values:
    """Return what two steps, a save and a load produce under a default."""
    model = copy.deepcopy(decoder())
    tokens_BT = torch.randint(
        0, model.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0)
    )
    values: Values = {}
    with torch_default(default):
        parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), precision=precision)
        optimizers = make_optimizers(model)
        # An amax history, which FP8 with delayed scaling has, excludes a loss scale.
        scale = None if precision is not None else DynamicLossScale(initial=2.0**12)
        step = TrainStep(model, optimizers, max_norm=1.0, loss_scale=scale)
        for number in range(2):
            with step.micro_batch():
                loss = model(tokens_BT[:, :-1], tokens_BT[:, 1:])
                (loss if scale is None else step.scale_loss(loss)).backward()
            stats = step.finish()
            values |= {f"loss {number}": loss.detach().clone(), f"stats {number}": stats.to_dict()}
        values |= list_parameters(model)
        for optimizer in optimizers:
            for group in optimizer.state_dict()["state"].values():
                for slot, value in group.items():
                    values[f"{len(values)} {slot}"] = get_local_tensor(value).clone()
        save(path, 2, model, optimizers, extra=step.state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        saved = latest(path)
        assert saved is not None
        load(saved, model, optimizers)
        values |= {f"loaded {name}": value for name, value in list_parameters(model).items()}
    return values


def make_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [AdamW(model.parameters(), lr=0.0123)]


def make_muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    assignment = assign_matrices(model)
    return [Muon(assignment, lr=0.0123), AdamW(assignment.adamw_params, lr=0.0123)]


@pytest.mark.parametrize(
    ("make_optimizers", "precision"),
    [
        (make_adamw, None),
        (make_muon, None),
        (make_adamw, Recipe()),
        (make_adamw, Recipe(scaling="tensorwise", grad_format="e5m2", amax_history=4)),
    ],
    ids=["adamw", "muon", "FP8 blocks", "FP8 delayed scaling"],
)
def test_steps_and_checkpoints(make_optimizers, precision, tmp_path) -> None:
    expected = train("none", tmp_path / "none", make_optimizers, precision)
    for default in DEFAULTS:
        assert_equal(train(default, tmp_path / default, make_optimizers, precision), expected)


def exchange_weights(default: str, path: Path) -> Values:
    """Return the tensors that an export writes and that a load reads under a default."""
    from safetensors import safe_open

    from tests.families.transformers.hf_models import qwen3_moe

    torch.manual_seed(0)
    model, target = qwen3_moe(), qwen3_moe()
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"))
    parallelize_moe(target, build_meshes(ParallelConfig(), "cpu"))
    with torch_default(default):
        export_hf(model, path)
        load_hf(path, target)
    values = list_parameters(target)
    assert_equal(values, list_parameters(model))
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as reader:
            values |= {f"file {name}": reader.get_tensor(name) for name in sorted(reader.keys())}
    values |= {f"buffer {name}": buffer.clone() for name, buffer in target.named_buffers()}
    return values


def test_hugging_face_directories(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    expected = exchange_weights("none", tmp_path / "none")
    for default in DEFAULTS:
        assert_equal(exchange_weights(default, tmp_path / default), expected)


def train_policy(default: str) -> Values:
    """Return log-probabilities, losses and gradients of each objective under a default."""
    model = copy.deepcopy(decoder())
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 64, (n,), generator=generator).tolist() for n in (3, 2, 4, 1)]
    responses = [torch.randint(0, 64, (n,), generator=generator).tolist() for n in (5, 7, 1, 6)]
    noise_3N = 0.3 * torch.randn(3, 29, generator=generator)
    rewards_n, groups_n = torch.tensor([1.0, 0.2, 0.3, 0.7]), torch.tensor([0, 0, 1, 1])
    values: Values = {}
    with torch_default(default):
        parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"))
        step = TrainStep(model)
        engine = Engine(model, step, max_tokens=17)
        rollouts = Rollouts.of(prompts, responses, temperature=0.9)
        scores = engine.log_probs(rollouts, entropy=True)
        values |= {"log p": scores.log_probs_N, "entropy": scores.entropy_N}
        advantages_N = rollouts.expand_to_tokens(group_advantages(rewards_n, groups_n))
        rollouts = rollouts.replace(
            advantages_N=advantages_N + noise_3N[0],
            old_log_probs_N=scores.log_probs_N + noise_3N[1],
            ref_log_probs_N=scores.log_probs_N + noise_3N[2],
        )
        for objective in (PPO(entropy_coef=0.01), GRPO(kl_coef=0.1), GSPO(), DPO()):
            result = engine.forward_backward(rollouts, objective)
            step.finish()
            name = type(objective).__name__
            values |= {f"{name} loss": result.loss, f"{name} log p": result.scores.log_probs_N}
            for key, parameter in model.named_parameters():
                if parameter.grad is not None:
                    values[f"{name} gradient of {key}"] = get_local_tensor(parameter.grad).clone()
                    parameter.grad = None
    return values


def test_reinforcement_learning() -> None:
    expected = train_policy("none")
    assert any(value.count_nonzero() for key, value in expected.items() if "gradient" in key)
    for default in DEFAULTS:
        assert_equal(train_policy(default), expected)


@pytest.mark.parametrize("default", DEFAULTS)
def test_the_capacity_that_a_buffer_needed(default: str) -> None:
    words = torch.tensor([1003, 1], dtype=torch.int32)
    shortage = ShortageCounters(words, words, even=1000.0)
    with torch_default(default):
        factor = shortage.compute_min_capacity_factor()
    assert factor.dtype == torch.float32 and factor.item() == pytest.approx(1.003)


@pytest.mark.parametrize("default", DEFAULTS)
def test_balance_losses_of_several_ranks(default: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compute() -> Tensor:
        config = MoEConfig(dim=8, hidden_dim=8, num_experts=3, top_k=1, balance=balance)
        groups = BalanceGroups(global_batch=ranks, data_ranks=8)  # type: ignore[arg-type]
        return compute_balance_losses(routing, routing.chosen_ids_TK, 1, config, groups)

    ranks = SimpleNamespace(size=lambda: 8)
    # Three of eight ranks have tokens: 8 / 3 is no number of bfloat16.
    monkeypatch.setattr(dist, "all_reduce", lambda values, group: values.mul_(3))
    balance = BalanceConfig(micro_batch_coef=0.01, global_batch_coef=0.01, z_loss_coef=0.001)
    ids_TK = torch.tensor([[0], [1], [1], [2], [1]], dtype=torch.int32)
    logits_TE = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    routing = Routing(
        expert_ids_TK=ids_TK, weights_TK=torch.ones(5, 1), chosen_ids_TK=ids_TK, logits_TE=logits_TE
    )
    expected = compute()
    with torch_default(default):
        losses = compute()
    assert_equal({"losses": losses}, {"losses": expected})


@pytest.mark.parametrize("default", DEFAULTS)
def test_moments_in_fp8(default: str) -> None:
    generator = torch.Generator().manual_seed(0)
    # The eighth power has elements below the smallest normal code of their block.
    m, v = torch.randn(2, 4096, generator=generator).pow(8)
    noise = torch.randint(0, 2**32, (4096,), generator=generator)
    expected = encode_moments_ref(m, v, noise)
    with torch_default(default):
        codes = encode_moments_ref(m, v, noise)
    assert all(map(torch.equal, codes, expected))
