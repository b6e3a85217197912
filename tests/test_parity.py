"""Every composition equals one process: the proof that gradients are right on any folding.

    python -m pytest tests/test_parity.py            8 ranks on CPU
    python -m pytest tests/test_parity.py -m gpu     the same cases over NCCL on 8 GPUs, and nvlink
    python -m pytest tests/test_parity.py -m gpu -k nvlink     dispatcher "nvlink" alone
    python -m pytest tests/test_parity.py -m gpu -k "nvlink and 4r"       cases of 4 ranks alone
    python -m pytest tests/test_parity.py -m gpu -k "nvlink and overlap"    without overlap

Ranks of cases that want more GPUs than the host has share them (`tests/helpers/ranks.py`).
Only what is asked for runs, eight cases per start of the ranks at most.

Losses, every gradient, its norm, auxiliary losses, counts, parameters after a step of SGD and one
of AdamW: fp32 within 1e-5 of each tensor's scale, bf16 and FP8 at most twice as wrong as one
process.
"""

from itertools import groupby
from typing import Any

import pytest
import torch

from moecore import (
    CloneOptions,
    ContextOptions,
    FSDPOptions,
    MemoryOptions,
    NVLinkOptions,
    StashOptions,
)
from moecore.base.options.precision import Precision, Recipe
from moecore.kernels.common import has_hopper_kernels
from tests.helpers.parity import Case, run_case
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.slow

FP32_BOUND, CASES_PER_SPAWN = 1e-5, 8
GATHERED = FSDPOptions(dense_strategy="optim", prefetch_blocks=0)
TOGETHER = FSDPOptions(blocks_per_unit=2)  # of three blocks
STASH = MemoryOptions(stash=StashOptions(page_rows=4, factor=4.0))
ONE, TWO = (CloneOptions(per_rank=n, min_share=0.0) for n in (1, 2))
KEPT = CloneOptions(per_rank=2, min_share=0.0, refresh=1)


NAMES = {"dp": "dp_shard", "rep": "dp_replicate", "edp": "edp_shard", "erep": "edp_replicate"}


def case(world: int, dense: str, expert: str, **options: Any) -> Case:
    """Read degrees such as "dp=4 tp=2" and "ep=4 edp=2", of `NAMES` or of `ParallelConfig`."""
    degrees = dict(part.split("=") for part in f"{dense} {expert}".split())
    parallel = {NAMES.get(name, name): int(value) for name, value in degrees.items()}
    return Case(world=world, parallel=parallel, **options)


def domains(world: int, dense: str, expert: str, domain: int, **options: Any) -> Case:
    """Tokens travel in two levels, over domains of so many ranks."""
    return case(world, dense, expert, dispatcher="hierarchical", domain=domain, **options)


CASES = [
    case(8, "dp=8", "ep=1 edp=8", model="sigmoid", meta=True),
    domains(8, "dp=8", "ep=4 edp=2", 2, model="sigmoid", accumulate=2, clones=TWO),
    case(8, "dp=8", "ep=2 etp=4 edp=1", model="relu2", loss="sum", clones=TWO),
    domains(8, "rep=2 dp=4", "ep=8 edp=1", 2, loss="sum", fsdp=TOGETHER),
    case(8, "rep=8 dp=1", "erep=4 edp=1 ep=2", frozen=True),
    case(8, "dp=4 tp=2", "ep=8 edp=1", model="gated-shared", recompute=True),
    case(8, "dp=2 tp=4", "ep=4 edp=2", loss="sum", fsdp=GATHERED),
    case(6, "dp=2 tp=3", "ep=3 edp=2", model="expert-choice", dispatcher="allgather"),
    domains(6, "dp=3 tp=2", "ep=6 edp=1", 3, model="top-1", loss="sum", clones=ONE),
    case(6, "dp=2 tp=3", "ep=6 edp=1", model="sigmoid", meta=True, clones=KEPT),
    case(6, "dp=2 tp=3", "ep=2 edp=3", dispatcher="allgather", sliced=True),
    case(6, "rep=2 dp=1 tp=3", "ep=2 etp=3 edp=1", model="biases"),
    case(
        6,
        "dp=3 tp=2",
        "erep=3 edp=1 ep=2",
        loss="sum",
        accumulate=2,
        recompute=True,
        fsdp=TOGETHER,
        sliced=True,
    ),
]
GATHER, HEADS, RING = (ContextOptions(way=way) for way in ("allgather", "a2a", "p2p"))
BOTH = ContextOptions(way="a2a+p2p", a2a_ranks=2)
CASES += [
    domains(8, "dp=2 cp=4", "ep=8 edp=1", 4, model="latent-capacity", context=RING, packed=True),
    case(8, "dp=2 cp=2 tp=2", "ep=4 edp=2", model="sinkhorn", context=GATHER),
    case(8, "dp=1 cp=4 tp=2", "ep=8 edp=1", context=BOTH, packed=True, recompute=True),
    case(8, "rep=2 dp=2 cp=2", "erep=2 edp=2 ep=2", model="relu2", context=RING, meta=True),
    case(6, "dp=2 cp=3", "ep=6 edp=1", model="biases", context=RING, tied=True),
    case(6, "dp=1 cp=3 tp=2", "ep=3 edp=2", model="top-1", context=HEADS),
]
CASES += [
    case(8, "dp=4 tp=2", "ep=4 etp=2 edp=1", model="biases", tied=True, torch_optimizers=True),
    domains(6, "dp=6", "ep=6 edp=1", 2, model="biases", expert_backend="sequential", clones=TWO),
    domains(8, "dp=2 cp=2 tp=2", "ep=4 etp=2 edp=1", 4, model="expert-choice", accumulate=2),
]
# What CASES have of cp, for hosts of 2 GPUs.
CONTEXT_PAIRS = [
    case(2, "dp=1 cp=2", "ep=2 edp=1", context=GATHER),
    case(2, "dp=1 cp=2", "etp=2 edp=1", model="sigmoid", context=HEADS),
    case(2, "dp=1 cp=2", "ep=1 edp=2", model="latent-capacity", context=RING),
]
BF16 = FSDPOptions(param_dtype=torch.bfloat16)
BF16_TOGETHER = FSDPOptions(param_dtype=torch.bfloat16, blocks_per_unit=2)
FP8 = Precision(recipe=Recipe(), roles=("attention", "mlp"))
ROUGH_CASES = [
    case(8, "dp=2 cp=4", "ep=8 edp=1", model="balanced", precision=FP8, context=BOTH),
    case(
        8,
        "dp=4 cp=2",
        "ep=2 etp=2 edp=2",
        model="balanced",
        bf16=True,
        fsdp=BF16,
        context=RING,
        packed=True,
    ),
    case(8, "dp=8", "ep=4 etp=2 edp=1", model="balanced", bf16=True, fsdp=BF16_TOGETHER),
    case(
        8,
        "rep=2 dp=4",
        "erep=2 edp=1 ep=4",
        model="balanced",
        dispatcher="allgather",
        bf16=True,
        fsdp=BF16,
    ),
]
# Stores into peers' memory: on GPUs only. Compositions of 2, 4 and 8 of them, some also without
# overlap. Learned routing has room for what comes.


def nvlink(world, dense, expert, *, overlap=True, keep_rows=True, row_factor=None, **options):
    """Read the options of `NVLinkOptions`, and what `case` reads."""
    choices = NVLinkOptions(
        overlap_weight_grads=overlap, keep_rows=keep_rows, row_factor=row_factor
    )
    dispatcher = "hierarchical" if "domain" in options else "nvlink"  # nvlink inside of domains
    return case(world, dense, expert, dispatcher=dispatcher, nvlink=choices, **options)


def both_overlaps(world: int, dense: str, expert: str, **options: Any) -> list[Case]:
    return [nvlink(world, dense, expert, overlap=overlap, **options) for overlap in (True, False)]


NVLINK_CASES = [
    *both_overlaps(2, "dp=2", "ep=2 edp=1", row_factor=1.33),
    nvlink(2, "dp=1 tp=2", "ep=2 edp=1", model="sigmoid", accumulate=3),
    nvlink(2, "dp=2", "ep=2 edp=1", model="biases", loss="sum", row_factor=1.33),
    nvlink(2, "dp=2", "etp=2 edp=1", model="top-1", meta=True, row_factor=1.0),
    nvlink(
        2,
        "dp=2",
        "ep=2 edp=1",
        model="gated-shared",
        recompute=True,
        keep_rows=False,
        row_factor=1.33,
    ),
    nvlink(2, "rep=2 dp=1", "ep=2 edp=1", model="relu2", frozen=True, row_factor=1.33),
    *both_overlaps(4, "dp=4", "ep=4 edp=1", model="sigmoid", accumulate=3, row_factor=2.6),
    nvlink(4, "dp=4", "ep=2 edp=2", loss="sum", accumulate=2, fsdp=TOGETHER, keep_rows=False),
    nvlink(4, "dp=4", "etp=4 edp=1", model="relu2", row_factor=1.0),
    nvlink(
        4, "dp=2 tp=2", "ep=2 etp=2 edp=1", model="gated-shared", recompute=True, row_factor=1.33
    ),
    nvlink(4, "dp=2 tp=2", "ep=4 edp=1", model="latent-capacity", accumulate=2, clones=KEPT),
    nvlink(4, "dp=1 tp=4", "ep=2 edp=2", model="biases", tied=True, row_factor=2.0),
    nvlink(4, "rep=2 dp=2", "erep=2 edp=1 ep=2", model="top-1", meta=True, row_factor=2.0),
    nvlink(4, "dp=4", "ep=4 edp=1", model="sigmoid", accumulate=2, memory=STASH),
    nvlink(4, "dp=4", "ep=4 edp=1", domain=2, model="sigmoid", accumulate=2),
    nvlink(4, "dp=2 tp=2", "ep=2 etp=2 edp=1", domain=2, recompute=True),
    nvlink(4, "dp=4", "ep=2 etp=2 edp=1", clones=TWO, memory=STASH, loss="sum"),
    nvlink(4, "dp=4", "ep=2 edp=2", model="relu2", clones=ONE, recompute=True, fsdp=GATHERED),
    nvlink(8, "dp=8", "ep=8 edp=1", model="sigmoid", accumulate=2),
    nvlink(8, "dp=8", "ep=4 etp=2 edp=1", model="biases"),
    *both_overlaps(
        8, "dp=4 tp=2", "ep=4 edp=2", model="gated-shared", recompute=True, row_factor=2.6
    ),
    nvlink(8, "dp=2 tp=4", "ep=8 edp=1", accumulate=3, loss="sum", keep_rows=False, row_factor=5.3),
    nvlink(8, "rep=4 dp=2", "erep=2 edp=1 ep=2 etp=2", model="relu2", row_factor=1.33),
]
# moecore's own products; an expert has more than one of their tiles of rows, from many ranks. Not
# with tp: "balanced" deals by position, which tp splits.
TRITON = dict(model="balanced", bf16=True, fsdp=BF16, expert_backend="triton", sequences=16)
WIDE = TRITON | dict(model="balanced-wide")
NVLINK_BF16_CASES = [
    *both_overlaps(2, "dp=2", "ep=2 edp=1", row_factor=1.25, **TRITON),
    nvlink(2, "dp=2", "ep=2 edp=1", keep_rows=False, row_factor=1.25, **WIDE),
    *both_overlaps(4, "dp=4", "ep=4 edp=1", row_factor=2.0, **WIDE),
    nvlink(4, "rep=2 dp=2", "ep=2 etp=2 edp=1", row_factor=1.25, **TRITON),
    nvlink(
        4,
        "dp=4",
        "ep=2 edp=2",
        accumulate=3,
        recompute=True,
        keep_rows=False,
        row_factor=1.25,
        **TRITON,
    ),
    nvlink(
        4, "dp=4", "ep=4 edp=1", model="balanced", bf16=True, fsdp=BF16_TOGETHER, row_factor=2.0
    ),
    nvlink(8, "dp=8", "ep=8 edp=1", model="balanced", bf16=True, fsdp=BF16),
    *both_overlaps(8, "dp=8", "ep=8 edp=1", row_factor=2.0, **WIDE),
    nvlink(8, "rep=2 dp=4", "ep=4 etp=2 edp=1", keep_rows=False, row_factor=2.0, **WIDE),
    nvlink(8, "dp=8", "ep=4 edp=2", accumulate=3, row_factor=1.5, **TRITON),
]
TAMPERED = [
    case(8, "dp=4 tp=2", "ep=4 edp=2", tamper="-no-gradient-scale"),
    case(8, "dp=2 tp=4", "ep=4 edp=2", tamper="-wrong-group"),
]


def worker(rank: int, device: torch.device, cases: list[Case]) -> dict[str, Any]:
    return {c.name: run_named(c, device) for c in cases}


def run_named(c: Case, device: torch.device) -> dict[str, float]:
    try:
        return run_case(c, device)
    except Exception as error:
        error.add_note(f"in case {c.name}")  # all cases of this start show this error
        raise


def missing(c: Case, device_type: str) -> str | None:
    """Return what this host lacks for a case."""
    if device_type == "cpu":
        return None
    if c.expert_backend == "triton" and not has_hopper_kernels(torch.device("cuda")):
        return "needs Hopper GPUs for experts 'triton'"
    return None


class Results:
    """Case name -> what `run_case` found; ranks start when the first of their cases is asked for.

    A few cases per start: what raises hides the others of its start, and names itself. Those of one
    world and overlap: what breaks with overlap then does not hide the others.
    """

    def __init__(self, cases: list[Case], device_type: str) -> None:
        self._device_type = device_type
        self._missing = {c.name: missing(c, device_type) for c in cases}
        assert len(self._missing) == len(cases), "two cases have one name"
        here = [c for c in cases if self._missing[c.name] is None]
        self._batches = {c.name: batch for batch in batches(here) for c in batch}
        self._found: dict[str, Any] = {}

    def __getitem__(self, name: str) -> dict[str, float]:
        reason = self._missing[name]
        if reason is not None:
            pytest.skip(reason)
        if name not in self._found:
            self._run(self._batches[name])
        if isinstance(self._found[name], Exception):
            raise self._found[name]
        return self._found[name]

    def _run(self, batch: list[Case]) -> None:
        try:
            found = run_ranks(batch[0].world, worker, batch, device_type=self._device_type)
        except Exception as error:  # kept: ranks that wait in vain take minutes
            found = {c.name: error for c in batch}
        self._found |= found


def batches(cases: list[Case]) -> list[list[Case]]:
    """Return cases that share ranks, a few at a time."""

    def kind(c: Case) -> tuple[int, bool]:
        return c.world, c.nvlink is not None and c.nvlink.overlap_weight_grads

    groups = [list(group) for _, group in groupby(sorted(cases, key=kind), kind)]
    return [g[i : i + CASES_PER_SPAWN] for g in groups for i in range(0, len(g), CASES_PER_SPAWN)]


def asked_for(request: pytest.FixtureRequest, cases: list[Case]) -> list[Case]:
    """Return the cases whose tests are selected, by -k or otherwise."""
    tests = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    ]
    names = {t.callspec.params["c"].name for t in tests if request.fixturename in t.fixturenames}
    return [c for c in cases if c.name in names]


@pytest.fixture(scope="module")
def cpu_results(request: pytest.FixtureRequest) -> Results:
    return Results(asked_for(request, CASES + ROUGH_CASES + TAMPERED), "cpu")


@pytest.fixture(scope="module")
def gpu_results(request: pytest.FixtureRequest) -> Results:
    return Results(asked_for(request, CASES + CONTEXT_PAIRS + ROUGH_CASES), "cuda")


@pytest.fixture(scope="module")
def nvlink_results(request: pytest.FixtureRequest) -> Results:
    return Results(asked_for(request, NVLINK_CASES + NVLINK_BF16_CASES), "cuda")


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
def test_equals_one_process(c: Case, cpu_results: Results) -> None:
    check(cpu_results[c.name])


def check_ratios(ratios: dict[str, float]) -> None:
    assert len(ratios) > 30, "every gradient is compared"
    print(f"worst ratio {max(ratios.values()):.2f}")
    assert not {name: ratio for name, ratio in ratios.items() if not ratio <= 2}


@pytest.mark.parametrize("c", ROUGH_CASES, ids=lambda c: c.name)
def test_rounding_is_at_most_twice_as_wrong_as_one_process(c: Case, cpu_results: Results) -> None:
    check_ratios(cpu_results[c.name])


@pytest.mark.parametrize("c", TAMPERED, ids=lambda c: c.name)
def test_notices_tampering(c: Case, cpu_results: Results) -> None:
    assert len(failures(cpu_results[c.name])) > 10


@pytest.mark.gpu
@pytest.mark.parametrize("c", CASES + CONTEXT_PAIRS, ids=lambda c: c.name)
def test_equals_one_process_on_gpus(c: Case, gpu_results: Results) -> None:
    check(gpu_results[c.name])


@pytest.mark.gpu
@pytest.mark.parametrize("c", ROUGH_CASES, ids=lambda c: c.name)
def test_rounding_is_at_most_twice_as_wrong_as_one_process_on_gpus(c, gpu_results) -> None:
    check_ratios(gpu_results[c.name])


@pytest.mark.gpu
@pytest.mark.parametrize("c", NVLINK_CASES, ids=lambda c: c.name)
def test_nvlink_equals_one_process_on_gpus(c: Case, nvlink_results: Results) -> None:
    check(nvlink_results[c.name])


@pytest.mark.gpu
@pytest.mark.parametrize("c", NVLINK_BF16_CASES, ids=lambda c: c.name)
def test_nvlink_in_bf16_is_at_most_twice_as_wrong_as_one_process_on_gpus(c, nvlink_results) -> None:
    check_ratios(nvlink_results[c.name])
