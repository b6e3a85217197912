"""Every composition equals one process: the proof that gradients are right on any folding.

    python -m pytest tests/test_parity.py            8 gloo ranks on CPU
    python -m pytest tests/test_parity.py -m gpu     the same cases over NCCL on 8 GPUs
    python -m pytest tests/test_parity.py -m gpu -k nvlink     the cases that need GPUs, alone

Losses, every gradient, its norm, auxiliary losses, counts, parameters after two SGD and two AdamW
steps: fp32 within 1e-5 of each tensor's scale, bf16 at most twice as wrong as one process in bf16.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moecore import FSDPOptions
from tests.parity import Case, run_case
from tests.ranks import run_ranks

FP32_BOUND = 1e-5
CASES_PER_SPAWN = 4
GATHERED = FSDPOptions(reshard_after_forward=False, prefetch_blocks=0)
TOGETHER = FSDPOptions(blocks_per_unit=2)  # of three blocks


def case(world: int, dense: str, expert: str, **options: Any) -> Case:
    """Read degrees such as "dp_shard=4 tp=2" and "ep=4 edp_shard=2"; all are given."""
    degrees = dict(part.split("=") for part in f"{dense} {expert}".split())
    parallel = {name: int(value) for name, value in degrees.items()}
    return Case(world=world, parallel=parallel, **options)


CASES = [
    case(8, "dp_shard=8", "ep=8 edp_shard=1"),
    case(8, "dp_shard=8", "ep=1 edp_shard=8", model="sigmoid", meta=True),
    case(8, "dp_shard=8", "ep=4 edp_shard=2", model="sigmoid", accumulate=2, no_sync=True),
    case(8, "dp_shard=8", "ep=2 edp_shard=4", model="biases", dispatcher="allgather"),
    case(8, "dp_shard=8", "ep=4 etp=2 edp_shard=1", model="biases"),
    case(8, "dp_shard=8", "ep=2 etp=4 edp_shard=1", model="relu2", loss="sum"),
    case(8, "dp_shard=8", "ep=2 etp=2 edp_shard=2", model="softmax", meta=True),
    case(8, "dp_shard=8", "etp=2 edp_shard=4", model="gated-shared", dispatcher="allgather"),
    case(8, "dp_replicate=2 dp_shard=4", "ep=8 edp_shard=1", loss="sum", fsdp=TOGETHER),
    case(8, "dp_replicate=2 dp_shard=4", "edp_replicate=2 edp_shard=1 ep=4", model="sigmoid"),
    case(8, "dp_replicate=4 dp_shard=2", "edp_replicate=2 edp_shard=2 ep=2", model="biases"),
    case(8, "dp_replicate=8 dp_shard=1", "edp_replicate=4 edp_shard=1 ep=2", frozen=True),
    case(8, "dp_shard=4 tp=2", "ep=8 edp_shard=1", model="gated-shared", recompute=True),
    case(8, "dp_shard=4 tp=2", "ep=4 edp_shard=2", model="sigmoid", loss="sum", accumulate=2),
    case(8, "dp_shard=4 tp=2", "ep=4 etp=2 edp_shard=1", model="biases", tied=True),
    case(8, "dp_shard=2 tp=4", "ep=8 edp_shard=1", model="relu2", dispatcher="allgather"),
    case(8, "dp_shard=2 tp=4", "ep=2 edp_shard=4", model="sigmoid", tied=True),
    case(8, "dp_shard=2 tp=4", "ep=4 edp_shard=2", loss="sum", fsdp=GATHERED),
    case(8, "dp_shard=2 tp=4", "ep=2 etp=4 edp_shard=1", model="gated-shared"),
    case(8, "dp_replicate=2 dp_shard=2 tp=2", "edp_replicate=2 edp_shard=2 ep=2", loss="sum"),
    case(8, "dp_replicate=4 dp_shard=1 tp=2", "edp_replicate=2 edp_shard=1 ep=4", model="relu2"),
    case(8, "dp_shard=4 tp=2", "ep=4 edp_shard=2", model="latent-capacity", accumulate=2),
    case(
        8,
        "dp_shard=2 tp=4",
        "ep=2 etp=2 edp_shard=2",
        model="sinkhorn",
        recompute=True,
        fsdp=TOGETHER,
    ),
    case(6, "dp_shard=2 tp=3", "ep=3 edp_shard=2", model="expert-choice", dispatcher="allgather"),
    case(6, "dp_shard=3 tp=2", "ep=6 edp_shard=1", model="top-1", loss="sum"),
    case(6, "dp_shard=6", "ep=6 edp_shard=1", model="biases", experts="sequential"),
    case(6, "dp_shard=6", "ep=3 edp_shard=2", model="gated-shared", fsdp=GATHERED),
    case(6, "dp_shard=6", "ep=2 edp_shard=3", model="relu2", accumulate=3),
    case(6, "dp_shard=2 tp=3", "ep=6 edp_shard=1", model="sigmoid", meta=True),
    case(6, "dp_shard=3 tp=2", "ep=3 edp_shard=2", model="biases", loss="sum"),
    case(6, "dp_shard=2 tp=3", "ep=2 edp_shard=3", dispatcher="allgather"),
    case(6, "dp_replicate=3 dp_shard=2", "edp_replicate=2 edp_shard=1 ep=3", model="sigmoid"),
    case(6, "dp_replicate=2 dp_shard=1 tp=3", "ep=2 etp=3 edp_shard=1", model="biases"),
    case(
        6,
        "dp_shard=3 tp=2",
        "edp_replicate=3 edp_shard=1 ep=2",
        loss="sum",
        accumulate=2,
        no_sync=True,
        recompute=True,
        fsdp=TOGETHER,
    ),
    case(6, "dp_shard=3 tp=2", "ep=3 etp=2 edp_shard=1", model="gated-shared", tied=True),
]
BF16 = FSDPOptions(param_dtype=torch.bfloat16)
BF16_TOGETHER = FSDPOptions(param_dtype=torch.bfloat16, blocks_per_unit=2)
BF16_CASES = [
    case(8, "dp_shard=8", "ep=4 edp_shard=2", model="balanced", bf16=True, fsdp=BF16_TOGETHER),
    case(8, "dp_shard=8", "ep=2 etp=2 edp_shard=2", model="balanced", bf16=True, fsdp=BF16),
    case(
        8, "dp_shard=8", "ep=4 etp=2 edp_shard=1", model="balanced", bf16=True, fsdp=BF16_TOGETHER
    ),
    case(
        8,
        "dp_replicate=2 dp_shard=4",
        "edp_replicate=2 edp_shard=1 ep=4",
        model="balanced",
        dispatcher="allgather",
        bf16=True,
        fsdp=BF16,
    ),
]
# Stores into peers' memory: on GPUs only.
NVLINK_CASES = [
    case(8, "dp_shard=8", "ep=8 edp_shard=1", model="sigmoid", dispatcher="nvlink", accumulate=2),
    case(8, "dp_shard=8", "ep=4 etp=2 edp_shard=1", model="biases", dispatcher="nvlink"),
    case(
        8,
        "dp_shard=4 tp=2",
        "ep=4 edp_shard=2",
        model="gated-shared",
        dispatcher="nvlink",
        recompute=True,
    ),
]
NVLINK_BF16_CASES = [
    case(
        8,
        "dp_shard=8",
        "ep=8 edp_shard=1",
        model="balanced",
        dispatcher="nvlink",
        bf16=True,
        fsdp=BF16,
    ),
]
TAMPERED = [
    case(8, "dp_shard=4 tp=2", "ep=4 edp_shard=2", tamper="-no-gradient-scale"),
    case(8, "dp_shard=2 tp=4", "ep=4 edp_shard=2", tamper="-wrong-group"),
]


def worker(rank: int, device: torch.device, cases: list[Case]) -> dict[str, Any]:
    return {c.name: run_case(c, device) for c in cases}


def need_eight_gpus() -> None:
    if torch.cuda.device_count() < 8:
        pytest.skip(f"needs 8 GPUs, this host has {torch.cuda.device_count()}")


def run_all(device_type: str) -> dict[str, Any]:
    """Run all cases, a few per spawn: an idle gloo group still polls, and each mesh holds ten."""
    results: dict[str, Any] = {}
    for world in (8, 6):
        cases = [c for c in CASES + BF16_CASES + TAMPERED if c.world == world]
        for i in range(0, len(cases), CASES_PER_SPAWN):
            batch = cases[i : i + CASES_PER_SPAWN]
            results |= run_ranks(world, worker, batch, device_type=device_type)
    return results


@pytest.fixture(scope="module")
def cpu_results() -> dict[str, Any]:
    return run_all("cpu")


@pytest.fixture(scope="module")
def gpu_results() -> dict[str, Any]:
    need_eight_gpus()
    return run_all("cuda")


@pytest.fixture(scope="module")
def nvlink_results() -> dict[str, Any]:
    need_eight_gpus()
    return run_ranks(8, worker, NVLINK_CASES + NVLINK_BF16_CASES, device_type="cuda")


def failures(errors: dict[str, float]) -> dict[str, float]:
    """Return the quantities outside of the bound; nan is outside. `pytest -rP` shows the worst."""
    outside = {name: error for name, error in errors.items() if not error <= FP32_BOUND}
    worst = max(errors, key=lambda name: errors[name])
    print(f"{len(outside)} of {len(errors)} outside, worst {worst} {errors[worst]:.2g}")
    return outside


def check(errors: dict[str, float]) -> None:
    assert len(errors) > 50, "every gradient and parameter is compared"
    outside = failures(errors)
    assert not outside, outside


@pytest.mark.parametrize("c", CASES, ids=lambda c: c.name)
def test_equals_one_process(c: Case, cpu_results: dict[str, Any]) -> None:
    check(cpu_results[c.name])


def check_bf16(ratios: dict[str, float]) -> None:
    assert len(ratios) > 30, "every gradient is compared"
    print(f"worst ratio {max(ratios.values()):.2f}")
    assert not {name: ratio for name, ratio in ratios.items() if not ratio <= 2}


@pytest.mark.parametrize("c", BF16_CASES, ids=lambda c: c.name)
def test_bf16_is_at_most_twice_as_wrong_as_one_process(
    c: Case, cpu_results: dict[str, Any]
) -> None:
    check_bf16(cpu_results[c.name])


@pytest.mark.parametrize("c", TAMPERED, ids=lambda c: c.name)
def test_notices_tampering(c: Case, cpu_results: dict[str, Any]) -> None:
    assert len(failures(cpu_results[c.name])) > 10


@pytest.mark.gpu
@pytest.mark.parametrize("c", CASES, ids=lambda c: c.name)
def test_equals_one_process_on_gpus(c: Case, gpu_results: dict[str, Any]) -> None:
    check(gpu_results[c.name])


@pytest.mark.gpu
@pytest.mark.parametrize("c", BF16_CASES, ids=lambda c: c.name)
def test_bf16_is_at_most_twice_as_wrong_as_one_process_on_gpus(
    c: Case, gpu_results: dict[str, Any]
) -> None:
    check_bf16(gpu_results[c.name])


@pytest.mark.gpu
@pytest.mark.parametrize("c", TAMPERED, ids=lambda c: c.name)
def test_notices_tampering_on_gpus(c: Case, gpu_results: dict[str, Any]) -> None:
    assert len(failures(gpu_results[c.name])) > 10


@pytest.mark.gpu
@pytest.mark.parametrize("c", NVLINK_CASES, ids=lambda c: c.name)
def test_nvlink_equals_one_process_on_gpus(c: Case, nvlink_results: dict[str, Any]) -> None:
    check(nvlink_results[c.name])


@pytest.mark.gpu
@pytest.mark.parametrize("c", NVLINK_BF16_CASES, ids=lambda c: c.name)
def test_nvlink_in_bf16_is_at_most_twice_as_wrong_as_one_process_on_gpus(
    c: Case, nvlink_results: dict[str, Any]
) -> None:
    check_bf16(nvlink_results[c.name])
