"""A planted bit flip is the oracle: its rank, phase and kind must be in the report."""

import math
import os
import re
import socket
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from moecore.recipes import finetune, pretrain
from moecore.recipes.sdc import find_suspect_ranks
from moecore.recipes.tiny_model import write_tiny_model
from moecore.train.result_trace import trace_results
from tests.helpers.grids import asked_for
from tests.helpers.ranks import run_ranks
from tests.recipes.launched import metrics
from tests.recipes.test_train import run_in_forks, tensors

CHECKS = "--batch-size 1 --grad-accum 2 --sdc-check-every 2 --sdc-check-action log"
WORDS = f"--preset tiny-qwen3 --tokens random --seq-len 16 --workers 0 {CHECKS}"
TUNED = "--model {0} --data {0}/chats.jsonl --seq-len 64 --eval-share 0 " + CHECKS
ATTENTION, EXPERTS = "model.layers.1.self_attn", "model.layers.1.mlp.experts"
FIRST = "model.layers.0.self_attn"
NO_FAULT: tuple[tuple[Any, ...], str] = (), ""
INF, KINDS = math.inf, ("transient", "persistent")
HOST = socket.gethostname()
# Words, then for each check the faulty rank and module, the phase and the calls whose bits flip,
# and the report. Every rank calls a module in two replays, and in two of its neighbor's.
CASES: dict[str, tuple[str, list[tuple[tuple[Any, ...], str]]]] = {
    "replicas": (
        "--ep 1",
        [
            NO_FAULT,
            (
                (1, ATTENTION, "forward", [0]),
                f"rank 1 has a transient error in forward, output of {ATTENTION}",
            ),
            (
                (2, ATTENTION, "backward", [3]),
                f"rank 2 has a transient error in backward, output of {ATTENTION}",
            ),
            (
                (3, ATTENTION, "forward", range(4)),
                f"rank 3 has a persistent error in forward, output of {ATTENTION}",
            ),
            (
                (0, FIRST, "backward", range(4)),
                # Rank 0 names its own place. On other ranks, both outputs are one tensor.
                f"rank 0 has a persistent error in backward, output of {FIRST}.o_proj",
            ),
        ],
    ),
    "two groups of experts": (
        "--ep 2",
        [
            NO_FAULT,
            (
                (3, EXPERTS, "forward", [1]),
                f"rank 3 has a transient error in forward, output of {EXPERTS}",
            ),
            (
                (1, EXPERTS, "backward", [1]),
                f"rank 1 has a transient error in backward, gradient of {EXPERTS}.w2",
            ),
            (
                (1, EXPERTS, "forward", range(4)),
                f"rank 1 or rank 3 has a persistent error in forward, output of {EXPERTS}",
            ),
            (
                (2, ATTENTION, "backward", [1]),
                f"rank 2 has a transient error in backward, output of {ATTENTION}",
            ),
        ],
    ),
    # A residual sum rounds the lowest bit of attention's output away.
    "lowest bit": (
        "--ep 2 --dtype bfloat16",
        [
            NO_FAULT,
            (
                (1, ATTENTION, "forward", [1]),
                f"rank 1 has a transient error in forward, output of {ATTENTION}",
            ),
        ],
    ),
    "one group of experts": (
        "--ep 4",
        [
            NO_FAULT,
            (
                (2, EXPERTS, "forward", [1]),
                f"rank 2 has a transient error in forward, output of {EXPERTS}",
            ),
        ],
    ),
    "tensor parallel": ("--tp 2 --ep 2 --recompute moe", [NO_FAULT]),
    "fine-tuning": (
        "--ep 2",
        [
            NO_FAULT,
            (
                (3, EXPERTS, "forward", [1]),
                f"rank 3 has a transient error in forward, output of {EXPERTS}",
            ),
            (
                (1, EXPERTS, "forward", range(4)),
                f"rank 1 or rank 3 has a persistent error in forward, output of {EXPERTS}",
            ),
        ],
    ),
}


class _Flip(torch.autograd.Function):
    """The identity, which flips a bit of its first value or of the first value's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, phase: str) -> Tensor:
        ctx.phase = phase
        return flip(x) if phase == "forward" else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return flip(grads[0]) if ctx.phase == "backward" else grads[0], None


def flip(x: Tensor) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    bits, bit = (torch.int16, 0) if x.dtype == torch.bfloat16 else (torch.int32, 22)
    x.view(bits).view(-1)[0] ^= 1 << bit
    return x


def plant(module: nn.Module, phase: str, faulty_calls: Any) -> Any:
    """Return a context in which these calls of a module have a bit flip."""
    forward, calls = module.forward, iter(range(1 << 20))

    def call(*args: Any, **kwargs: Any) -> Any:
        y = forward(*args, **kwargs)
        return _Flip.apply(y, phase) if next(calls) in faulty_calls else y

    return patch.object(module, "forward", call)


def check_cases(
    rank: int, device: torch.device, tiny: Path, names: list[str]
) -> dict[str, list[tuple[str, Any]]]:
    """Return the lines and the metrics of each check of each case."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="4")
    results: dict[str, list[tuple[str, Any]]] = {}
    with TemporaryDirectory() as folder:
        for name in names:
            words, faults = CASES[name]
            recipe: Any = finetune if name == "fine-tuning" else pretrain
            common = TUNED.format(tiny) if recipe is finetune else WORDS
            words = f"{common} {words} --run-dir {folder}/{name.replace(' ', '-')}"
            job, results[name] = recipe.build_job(recipe.parse_arguments(words.split())), []
            for step, (fault, _) in enumerate(faults, 1):
                batch = job.next_batch(2 * step)
                with ExitStack() as stack:
                    printed = stack.enter_context(redirect_stdout(StringIO()))
                    if fault and fault[0] == rank:
                        stack.enter_context(plant(job.model.get_submodule(fault[1]), *fault[2:]))
                    numbers = job.check_replays(2 * step, torch.tensor(128), batch)
                results[name].append((printed.getvalue(), numbers))
    return results


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    tiny = tmp_path_factory.mktemp("model")
    sizes = dict(hidden_size=32, num_hidden_layers=2, head_dim=8, moe_intermediate_size=16)
    write_tiny_model(tiny, **sizes)
    return run_ranks(4, check_cases, tiny, asked_for(request, "name"))


@pytest.mark.parametrize("name", CASES)
def test_a_report_names_the_faulty_rank(name: str, outcomes: dict[str, Any]) -> None:
    """Also if its wrong values have reached other ranks, which then differ later."""
    for step, ((_, report), (printed, numbers)) in enumerate(
        zip(CASES[name][1], outcomes[name], strict=True), 1
    ):
        line = re.sub(r"(rank \d)", rf"\1 on {HOST}", f"alarm at step {2 * step}: {report}\n")
        assert printed == (line if report else "")
        kinds = {kind: report.count("rank") * (kind in report) for kind in KINDS}
        assert numbers == {f"sdc_{kind}": number for kind, number in kinds.items()}


@pytest.mark.parametrize(
    ("differences", "distance", "ranks"),
    [
        ([INF, INF, INF], 1, []),
        ([INF, 7, 7, INF], 1, [1]),
        ([3, INF, INF, 3], 1, [3]),
        ([INF, 7, INF, INF], 1, [0, 1]),  # it depends on the data
        ([5, 5], 1, [0, 1]),
        ([9, 9, 9, 4, 9, 4], 2, [3]),  # other ranks receive wrong rows later
        ([INF, 8, 2, 8], 0, [2]),
    ],
)
def test_suspect_ranks(differences: list[float], distance: int, ranks: list[int]) -> None:
    assert find_suspect_ranks(differences, distance) == ranks


def test_a_trace_has_the_last_run(train: ModuleType, tmp_path: Path) -> None:
    """A step whose rows exceed a buffer runs once more."""
    job = train.build_job(train.parse_arguments([*WORDS.split(), "--run-dir", str(tmp_path)]))
    inputs = {"tokens_BT": torch.zeros(1, 16, dtype=torch.int64)}
    inputs |= {"labels_BT": inputs["tokens_BT"], "num_tokens": torch.tensor(16)}
    traces = []
    for num_runs in (1, 2):
        with trace_results(job.model) as trace:
            job.owner.compute_losses([inputs] * num_runs)
        traces.append((trace.read().tolist(), trace.places))
    assert traces[0] == traces[1] and len(traces[0][0]) > 8


@pytest.mark.slow
def test_checks_change_no_bits(tmp_path: Path) -> None:
    """Counts for biases, amax histories, random states and gradients are as without checks."""
    words = "--steps 4 --ep 1 --global-batch-coef 0.05 --router-jitter 0.1 --scaling tensorwise"
    words += " --amax-history 2"
    checks = "--sdc-check-every 2 --expert-loads-every 1"
    run_in_forks(tmp_path / "plain", f"{words} --expert-loads-every 1")
    run_in_forks(tmp_path / "checked", f"{words} {checks}")
    lines = metrics(tmp_path / "checked")
    numbers = [
        (line.pop("sdc_transient", None), line.pop("sdc_persistent", None)) for line in lines
    ]
    assert numbers == [(None, None), (0.0, 0.0)] * 2
    assert lines == metrics(tmp_path / "plain")
    plain, checked = tensors(tmp_path / "plain", 4), tensors(tmp_path / "checked", 4)
    assert plain.keys() == checked.keys()
    assert all(torch.equal(checked[name], block) for name, block in plain.items())


def test_a_run_stops_with_an_error_that_names_the_host(train, tmp_path, monkeypatch, capsys):
    build_job = train.build_job

    def build_faulty_job(args: Any) -> Any:
        job = build_job(args)
        plant(job.model.get_submodule(ATTENTION), "forward", [3]).__enter__()  # step 1 has two
        return job

    monkeypatch.setattr(train, "build_job", build_faulty_job)
    words = f"{WORDS} --sdc-check-action stop --sample-every 0 --steps 2 --run-dir {tmp_path}"
    assert train.run_rank(train.parse_arguments(words.split())) == 1
    assert capsys.readouterr().err == (
        "moecore: error: replays of step 2 (--sdc-check-every 2) must have equal bits, but rank 0 "
        f"on {HOST} has a transient error in forward, output of {ATTENTION}: replace the host, and "
        "start again from the last checkpoint\n"
    )
    assert [line["step"] for line in metrics(tmp_path)] == [1]


@pytest.mark.parametrize(
    "words",
    ["--cuda-graph", "--graph-dense", "--offload-params", "--dynamic-cp 32", "--pp 2"],
)
def test_options_without_replays_are_refused(words: str) -> None:
    args = pretrain.parse_arguments(f"{WORDS} {words}".split())
    flag = words.split()[0]
    with pytest.raises(ValueError, match=rf"--sdc-check-every \(2\) must not go with {flag}, "):
        args.sdc_check.check(args)


def test_gpus_need_deterministic_kernels(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = pretrain.parse_arguments(WORDS.split())
    with pytest.raises(ValueError, match=r"--sdc-check-every \(2\) must not go without --determin"):
        pretrain.check_options(args, 2)
    pretrain.check_options(replace(args, deterministic=True), 2)
