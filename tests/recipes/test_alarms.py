import gzip
import json
import math
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moecore.planning.report import report_trace
from moecore.recipes import alarms, process

LAYER = "model.layers.0.mlp"
RUN = (
    "--preset tiny-qwen3 --tokens random --num-layers 1 --batch-size 1 --seq-len 16"
    " --sample-every 0"
)


def lines_of(
    metrics: list[dict[str, float]], loads: list[dict[str, list[float]]] | None = None
) -> dict[int, list[str]]:
    """Return the lines by step, of steps with any; `loads` None = no MoE layers."""
    watched = alarms.Alarms()
    pairs = enumerate(zip(metrics, loads or [{}] * len(metrics), strict=True), start=1)
    found = {step: watched.find_alarms(step, *pair) for step, pair in pairs}
    return {step: lines for step, lines in found.items() if lines}


def falling(count: int) -> list[float]:
    noise = random.Random(0)
    return [2 + 3 / (1 + step / 20) + noise.gauss(0, 0.05) for step in range(count)]


def test_a_spike_of_the_loss_is_one_line() -> None:
    """By hand: the median of 1, 2, 3, 4, ... 40 is 20.5, and that of distances from it is 10."""
    losses = [float(n) for n in range(1, 41)]
    below, above = ({"loss": loss} for loss in (20.5 + 100, 20.5 + 100.01))
    rising = [{"loss": loss} for loss in losses]
    assert lines_of([*rising, below]) == {}
    assert lines_of([*rising, above, above]) == {
        41: [
            "alarm at step 41: loss (120.5) is more than 10 median absolute deviations (10) above "
            "20.5, the median of the 40 before it"
        ]
    }
    assert lines_of([{**one, "reward": 1.0} for one in [*rising, above]]) == {}


def test_losses_that_fall_raise_no_alarm() -> None:
    losses = falling(2000)
    assert lines_of([{"loss": loss} for loss in losses]) == {}
    losses[700:703], losses[900], losses[20] = [4.0] * 3, math.nan, 60.0  # 20: too few before it
    assert [*lines_of([{"loss": loss} for loss in losses])] == [701]


def test_experts_without_tokens_are_named_once() -> None:
    loads = [{"a": [1.0], "b": [float(step in (150, 160))] * 12} for step in range(1, 300)]
    found = lines_of([{"loss": 1.0}] * len(loads), loads)
    names = "0, 1, 2, 3, 4, 5, 6, 7 and 4 more of b"
    line = f"no token of 100 steps has chosen experts {names}"
    assert found == {n: [f"alarm at step {n}: {line}"] for n in (100, 260)}


def test_a_gradient_that_is_not_finite_was_skipped() -> None:
    steps: list[dict[str, float]] = [
        {"loss": 1.0, "grad_norm": norm} for norm in (1.0, math.inf, math.nan)
    ]
    line = "is not finite, so the step was skipped"
    wanted = {
        n: [f"alarm at step {n}: grad_norm ({what}) {line}"] for n, what in ((2, "inf"), (3, "nan"))
    }
    assert lines_of(steps) == wanted
    assert lines_of([{**one, "loss_scale": 2.0} for one in steps]) == {}
    spikes = [{"loss": 1.0, "grad_norm": 7.0, "skipped": float(n == 2)} for n in (1, 2, 3)]
    line = "grad_norm (7) is above the limit of [skip_spikes], so the step was skipped"
    assert lines_of(spikes) == {2: [f"alarm at step 2: {line}"]}


def loads_of(shares: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the loads of a step in which experts have these shares of the choices."""
    return {layer: [share * len(of_E) for share in of_E] for layer, of_E in shares.items()}


def test_loads_that_collapse_are_one_line() -> None:
    """8 of 32 experts have all tokens in layer b, half of them in layer a; then loads are even."""
    uneven = {"a": [1 / 16] * 16 + [0.0] * 16, "b": [0.1, 0.15] * 4 + [0.0] * 24}
    steps = [loads_of(uneven)] * 60 + [loads_of({"a": [1 / 32] * 32, "b": [1 / 32] * 32})] * 40
    steps += [loads_of({"a": [1 / 32] * 32, "b": uneven["b"]})] * 40
    line = (
        "expert 1 has 15.0% of the choices of 20 steps, 4.8 times the mean: raise --aux-loss "
        "(in pretrain also --global-batch-coef), lower --lr or lengthen the warm-up"
    )
    assert lines_of([{"loss": 1.0}] * len(steps), steps) == {
        20: [f"alarm at step 20: loads of 2 layers, most of all b, have collapsed: {line}"],
        120: [f"alarm at step 120: loads of b have collapsed: {line}"],
    }


@pytest.mark.parametrize(("num_choices", "sigma"), [(32, 0.0), (4096, 0.7)])
def test_loads_of_a_run_that_trains_raise_no_alarm(num_choices: int, sigma: float) -> None:
    """32 choices of 64 experts are uneven by chance; 4,096 with busiest / mean near 4."""
    noise = random.Random(0)
    weights = [math.exp(noise.gauss(0, sigma)) for _ in range(64)]
    steps = []
    for _ in range(100):
        chosen = noise.choices(range(64), weights, k=num_choices)
        steps.append(loads_of({"a": [chosen.count(e) / num_choices for e in range(64)]}))
    busiest = max(max(step["a"]) for step in steps)
    assert busiest > 3 and lines_of([{"loss": 1.0}] * len(steps), steps) == {}


def test_the_first_gradients_say_that_rate_or_weights_are_wrong() -> None:
    """The norms and losses of a run that has collapsed, and of one that trains."""
    bad = [(28.2, 10.05), (22.0, 9.65), (93.1, 12.27), (95.0, 12.51)]
    line = (
        "grad_norm (95) is 3.4 times that of the first step and the loss (12.51) has risen by 2.9: "
        "lower --lr or lengthen the warm-up"
    )
    steps = [{"loss": loss, "grad_norm": norm} for norm, loss in bad]
    assert lines_of(steps) == {4: [f"alarm at step 4: {line}"]}
    assert lines_of([{**step, "reward": 1.0} for step in steps]) == {}
    good = [(13.5, 5.74), (8.3, 4.24), (6.1, 3.45), (50.0, 3.9), (2.0, 3.46), (1.0, 3.9), (1, 3.9)]
    assert lines_of([{"loss": loss, "grad_norm": norm} for norm, loss in good]) == {}
    line = "grad_norm (412) of the first step is above 100: check the initialisation of the weights"
    ((said,),) = lines_of([{"loss": 11.0, "grad_norm": 412.0}] * 3).values()
    assert said.startswith(f"alarm at step 1: {line}")
    late = alarms.Alarms()  # of a run that is started again behind its first steps
    assert late.find_alarms(21, {"loss": 3.0, "grad_norm": 500.0}, {}) == []


def test_a_run_is_traced_and_warned_of(train, tmp_path, monkeypatch, capsys) -> None:
    """A learning rate that breaks the model, and experts that are idle after one step."""
    monkeypatch.setattr(alarms, "IDLE_STEPS", 1)
    monkeypatch.setattr(process, "SETTLING", 2)
    words = f"{RUN} --steps 5 --lr 1e30 --profile 2 --expert-loads-every 1 --checkpoint-every 0"
    assert train.run_rank(train.parse_arguments([*words.split(), "--run-dir", str(tmp_path)])) == 0
    said = capsys.readouterr()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    idle = [e for e, load in enumerate(lines[1][f"expert_loads/{LAYER}"]) if not load]
    said_of = [line for line in (said.out + said.err).splitlines() if line.startswith("alarm")]
    assert all(line["skipped"] for line in lines[1:]) and len(idle) > 1  # of a router of nan
    experts = ", ".join(map(str, idle))
    assert (
        f"alarm at step 2: no token of 1 steps has chosen experts {experts} of {LAYER}" in said_of
    )
    skips = [f"alarm at step {n}: grad_norm (nan) is not finite, so the step" for n in range(2, 6)]
    assert [line.removesuffix(" was skipped") for line in said_of if "grad_norm" in line] == skips
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    steps = {e["name"] for e in events if str(e.get("name", "")).startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3"}
    with pytest.raises(ValueError, match=r"must .*GPU"):  # of a CPU, it has no kernels
        report_trace(tmp_path / "trace.json.gz")


def test_too_few_steps_to_trace_are_refused(train: ModuleType, tmp_path: Path, capsys: Any) -> None:
    words = f"{RUN} --steps 12 --profile 3 --checkpoint-every 0 --run-dir {tmp_path}"
    assert train.run_rank(train.parse_arguments(words.split())) == 2
    error = capsys.readouterr().err
    assert (
        "error: --profile (3) must be <= 2, the steps that this start has after its first" in error
    )
