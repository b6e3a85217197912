import math
from typing import Any

import pytest
import torch

from moecore.models import Decoder, preset
from moecore.recipes.optimizer import OptimizerConfig
from moecore.recipes.schedule import EqualSteps, LearningRateSchedule, StepSizes
from moecore.train import Muon


def decays(config: OptimizerConfig) -> dict[str, tuple[float, float]]:
    """Return weight decay and factor of the learning rate by parameter."""
    model = Decoder(preset("tiny"))
    names = {param: name for name, param in model.named_parameters()}
    return {
        names[param]: (group["weight_decay"], group["lr_factor"])
        for optimizer in config.build_optimizers(model)
        for group in optimizer.param_groups
        for param in group["params"]
    }


def test_norms_biases_and_embeddings_do_not_decay() -> None:
    found = decays(OptimizerConfig(weight_decay=0.3))
    assert set(found) == {name for name, _ in Decoder(preset("tiny")).named_parameters()}
    for name, (decay, factor) in found.items():
        is_matrix = not any(word in name for word in ("norm", "bias", "embed"))
        assert (decay, factor) == (0.3 if is_matrix else 0.0, 1.0), name
    assert {d for d, _ in decays(OptimizerConfig(weight_decay=0.3, decay_all=True)).values()} == {
        0.3
    }


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_first_matching_group_counts(optimizer: str) -> None:
    groups = ("*.router.*,lr_factor=0.5", "*.experts.*,weight_decay=0,lr_factor=2")
    found = decays(OptimizerConfig(optimizer=optimizer, weight_decay=0.3, param_groups=groups))
    routers = [name for name in found if ".router." in name]
    experts = [name for name in found if ".experts." in name]
    assert routers and experts and all(found[name] == (0.3, 0.5) for name in routers)
    assert all(found[name] == (0.0, 2.0) for name in experts)


def test_routers_have_a_rate_of_their_own() -> None:
    config = OptimizerConfig(router_lr_factor=0.25, param_groups=("*.1.mlp.router.*,lr_factor=2",))
    for name, (_, factor) in decays(config).items():
        expected = 2.0 if ".1.mlp.router." in name else 0.25 if ".router." in name else 1.0
        assert factor == expected, name


def test_options_reach_the_optimizers() -> None:
    muon, adamw = OptimizerConfig(
        optimizer="muon", beta1=0.8, beta2=0.9, eps=1e-6, momentum=0.7, muon_beta2=0.6
    ).build_optimizers(Decoder(preset("tiny")))
    assert isinstance(muon, Muon)
    group = adamw.param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-6)
    assert (muon.param_groups[0]["momentum"], muon.param_groups[0]["beta2"]) == (0.7, 0.6)
    (adamw,) = OptimizerConfig(moment_dtype="bfloat16").build_optimizers(Decoder(preset("tiny")))
    assert adamw.moment_dtype == torch.bfloat16  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 0.0}, "OptimizerConfig.lr (0.0) must be a finite number > 0"),
        ({"beta2": 1.0}, "OptimizerConfig.beta2 (1.0) must be "),
        ({"muon_beta2": 0.9}, "OptimizerConfig.muon_beta2 (0.9) must be None without"),
        (
            {"optimizer": "muon", "master_remainder": True},
            "OptimizerConfig.master_remainder (True)",
        ),
        ({"param_groups": ("*,rate=1",)}, "param_groups ('*,rate=1') must be PATTERN,lr_factor="),
        ({"warmup_steps": 1, "warmup_tokens": 1}, "LearningRateSchedule.warmup_tokens (1) must be"),
        ({"decay_steps": 1}, "LearningRateSchedule.decay_steps (1) must be None with lr_schedule"),
        ({"min_lr_ratio": 1.5}, "LearningRateSchedule.min_lr_ratio (1.5) must be"),
    ],
)
def test_options_that_are_wrong(values: dict[str, object], message: str) -> None:
    record: Any = LearningRateSchedule if message.startswith("Learning") else OptimizerConfig
    with pytest.raises(ValueError) as error:
        record(**values)
    assert str(error.value).startswith(message), error.value


def rates(schedule: LearningRateSchedule, steps: int = 20) -> list[float]:
    steps_of = StepSizes([EqualSteps(1, 1, 100)]).count_steps
    return [
        schedule.compute_factor(step, num_steps=steps, count_steps=steps_of)
        for step in range(1, steps + 1)
    ]


def test_rates_are_those_of_torch_schedulers() -> None:
    """torch counts from 0: its rate after n steps is that of step n here."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    lr = torch.optim.lr_scheduler
    warmup = lr.LinearLR(optimizer, start_factor=0.25, total_iters=3)
    cosine = lr.CosineAnnealingLR(optimizer, T_max=16, eta_min=0.1)
    torchs = lr.SequentialLR(optimizer, [warmup, cosine], milestones=[3])
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        torchs.step()
    assert rates(LearningRateSchedule(warmup_steps=4)) == pytest.approx(expected, abs=1e-9)


def test_rates_by_hand() -> None:
    plain = LearningRateSchedule(warmup_steps=0, min_lr_ratio=0.0)
    assert rates(plain, 4) == pytest.approx(
        [0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(1, 5)]
    )
    linear = LearningRateSchedule(lr_schedule="linear", warmup_steps=2, min_lr_ratio=0.5)
    assert rates(linear, 6) == pytest.approx([0.5, 1.0, 0.875, 0.75, 0.625, 0.5])
    wsd = LearningRateSchedule(
        lr_schedule="wsd", warmup_steps=1, decay_steps=4, min_lr_ratio=0.0, decay_shape="linear"
    )
    assert rates(wsd, 8) == pytest.approx([1, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    root = LearningRateSchedule(lr_schedule="wsd", warmup_steps=1, decay_steps=4, min_lr_ratio=0.0)
    assert rates(root, 8)[4:] == pytest.approx([1 - math.sqrt(i / 4) for i in range(1, 5)])
    constant = LearningRateSchedule(lr_schedule="constant", warmup_tokens=250)
    assert rates(constant, 5) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])
    # A third of 60 steps, 100 of 1,000 and a twentieth of 10,000.
    for steps, warmup in ((60, 20), (1000, 100), (10_000, 500)):
        factors = rates(LearningRateSchedule(min_warmup_steps=100), steps)
        assert factors[0] == pytest.approx(1 / warmup) and factors[warmup - 1] == 1.0
    longer = LearningRateSchedule(warmup_steps=0, schedule_steps=40)
    assert rates(longer) == pytest.approx(rates(LearningRateSchedule(warmup_steps=0), 40)[:20])
