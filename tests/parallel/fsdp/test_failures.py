"""Ranks that end, fail or read alone: no other rank waits for ever, and what all survive continues.

Each case is a group of its own, whose collectives end after TIMEOUT_S; all cases run at one time.
A rank writes how it ended. One that has not ended after HARD_S is a failure.
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore import (
    FSDPOptions,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
)
from tests.helpers.parts import on_parts
from tests.helpers.ranks import _share_gloo_device, forks
from tests.parallel.small_decoder import parallel_decoder, small_decoder

TIMEOUT_S, HARD_S = 12, 75
LATE = 1  # the rank that something happens to
STEPS = 2
CONFIG = small_decoder(32, 24, num_layers=3)


class Rank:
    """A model on one rank, and its steps of two micro-batches."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank = folder, dist.get_rank()
        # The root, and blocks but for experts, stay; dense meshes are larger than expert ones.
        fsdp = FSDPOptions(
            param_dtype=torch.bfloat16,
            dense_strategy="optim",
            experts_strategy="optim_grads_params",
        )
        self.model: Any = parallel_decoder(CONFIG, ParallelConfig(ep=2), fsdp=fsdp)
        self.optimizer = on_parts(torch.optim.AdamW)(self.model.parameters(), lr=0.05, eps=1e-3)
        self.step = TrainStep(self.model, self.optimizer, num_micro_batches=2)

    def loss(self, n: int) -> Tensor:
        g = torch.Generator().manual_seed(10 * n + self.rank)
        tokens = torch.randint(0, CONFIG.vocab_size, (2, 13), generator=g)
        loss: Tensor = self.model(tokens[:, :-1], tokens[:, 1:].contiguous()) / 2
        return loss

    def train(self, between: Callable[[], Any] = lambda: None) -> None:
        """Run steps with both micro-batches in flight, and something between any two calls."""
        for _ in range(STEPS):
            with self.step.micro_batches():
                losses = [self.loss(0)]
                between()
                losses.append(self.loss(1))
                between()
                losses[0].backward()
                between()
                losses[1].backward()
            between()
            self.step.finish()

    def weights(self) -> dict[str, Tensor]:
        state = self.model.state_dict()
        return {n: t.to_local().clone() for n, t in state.items() if isinstance(t, DTensor)}

    def at_forward(self, act: Callable[[], Any]) -> None:
        self.model.model.layers[1].register_forward_pre_hook(lambda *_: act() and None)

    def at_backward(self, act: Callable[[], Any]) -> None:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: act() and None)

        self.model.model.layers[1].register_forward_hook(hook)

    def note(self) -> None:
        (self.folder / "began").write_text(str(time.monotonic()))

    def fail(self) -> None:
        self.note()
        raise FloatingPointError

    def is_over(self) -> bool:
        """Whether all others have ended."""
        return len(list(self.folder.glob("rank*"))) == dist.get_world_size() - 1


def end_in_forward(rank: Rank) -> None:
    if rank.rank == LATE:
        rank.at_forward(lambda: (rank.note(), os.kill(os.getpid(), signal.SIGKILL)))
    rank.train()


def end_in_backward(rank: Rank) -> None:
    if rank.rank == LATE:
        rank.at_backward(lambda: (rank.note(), os.kill(os.getpid(), signal.SIGKILL)))
    rank.train()


def fail_in_forward(rank: Rank) -> None:
    """An exception that ends the process, as in a script that does not catch it."""
    if rank.rank == LATE:
        rank.at_forward(rank.fail)
    rank.train()


def wait_after_a_failed_forward(rank: Rank) -> None:
    """The process goes on, and communicates no more."""
    if rank.rank == LATE:
        rank.at_forward(rank.fail)
        with suppress(FloatingPointError):
            rank.train()
        while not rank.is_over():
            time.sleep(0.1)
        raise FloatingPointError
    rank.train()


def fewer_given(rank: Rank) -> None:
    """The others run their micro-batches, and this one raises before its first."""
    batches = [{"tokens_BT": torch.zeros(2, 12, dtype=torch.int64)}] * (2 - (rank.rank == LATE))
    rank.note()
    rank.step.forward_backward([{**one, "labels_BT": one["tokens_BT"]} for one in batches])


def data_ended(rank: Rank) -> None:
    """A loop over micro-batches ends early."""
    for _ in range(1 if rank.rank == LATE else 2):
        with rank.step.micro_batch():
            rank.loss(0).backward()
    rank.note()
    rank.step.finish()


def fail_on_all(rank: Rank) -> None:
    """Forwards that fail in flight on all ranks alike: dropped with their step, or left out."""
    clean = Rank(rank.folder)
    clean.train()
    fails = [True]

    def fail() -> None:
        if fails[0]:
            raise FloatingPointError

    rank.at_forward(fail)
    with pytest.raises(FloatingPointError), rank.step.micro_batches():
        fails[0] = False
        first = rank.loss(0)
        rank.loss(1)
        first.backward()
        fails[0] = True
        rank.loss(1)
    rank.step.drop()

    def fail_alone() -> None:
        fails[0] = True
        with pytest.raises(FloatingPointError):
            rank.loss(2)
        fails[0] = False

    fails[0] = False
    rank.train(fail_alone)
    assert_equal(rank, clean)


def read_alone(rank: Rank) -> None:
    """One rank reads, and the others train on: gloo would wait for it, or find other messages."""
    clean = Rank(rank.folder)
    clean.train()

    def read() -> None:
        if rank.rank == LATE:
            values, params = rank.weights(), dict(rank.model.named_parameters())
            norms = {n: p.to_local().norm() for n, p in params.items()}
            assert len(norms) > 20 and all(norm.isfinite() for norm in norms.values())
            assert all(torch.equal(values[n], p.to_local()) for n, p in params.items())

    rank.train(read)
    assert_equal(rank, clean)


def end_in_a_stage(rank: Rank) -> None:
    """A pipeline rank ends in its second micro-batch."""
    pipeline = PipelineConfig(layout="Et|t|t|tL")
    model: Any = parallel_decoder(
        replace(CONFIG, num_layers=4), ParallelConfig(pp=4), pipeline=pipeline
    )
    ran: list[int] = []

    def count(*_: object) -> None:
        ran.append(1)
        if len(ran) == 2 and rank.rank == LATE:
            os.kill(os.getpid(), signal.SIGKILL)

    model.model.layers[rank.rank].register_forward_pre_hook(count)
    tokens = torch.arange(13).expand(2, -1)
    step = TrainStep(model, num_micro_batches=6)
    step.forward_backward([{"tokens_BT": tokens, "labels_BT": tokens}] * 6)


def assert_equal(rank: Rank, clean: Rank) -> None:
    wanted = clean.weights()
    assert all(torch.equal(t, wanted[n]) for n, t in rank.weights().items())


BROKEN = ("end_in_forward", "end_in_backward", "fail_in_forward", "wait_after_a_failed_forward")
UNSHARDED = ("fail_on_all", "read_alone")
STAGE = "end_in_a_stage"
# Those in which a rank raises, and what the others read of its error.
TOLD = {
    "fail_in_forward": "FloatingPointError: ",
    "wait_after_a_failed_forward": "FloatingPointError: ",
    "fewer_given": "ValueError: micro_batches (1) must be num_micro_batches (2)",
    "data_ended": "ValueError: finish() must follow num_micro_batches (2) micro-batches",
}
CASES = [
    *((name, 4) for name in (*BROKEN, *UNSHARDED, STAGE)),
    *((name, 2) for name in (BROKEN[1], BROKEN[3], "fewer_given", "data_ended")),
]


def main(rank: int, world: int, name: str, folder: Path) -> None:
    """Run a case on one rank and write how it ended; in a process of its own."""
    signal.alarm(HARD_S)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    _share_gloo_device()
    init = f"file://{folder / 'store'}"
    dist.init_process_group(
        "gloo", init_method=init, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S)
    )
    error = ""
    try:
        globals()[name](Rank(folder))
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    written = folder / f"part{rank}"
    written.write_text(json.dumps({"error": error, "at": time.monotonic()}))
    written.rename(folder / f"rank{rank}")
    os._exit(0)  # its connections end now, whatever gloo's threads do


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Any, Any]]:
    """How each rank of each case ended: its exit code, its error, and how long after the event."""
    groups = {}
    for name, world in CASES:
        folder = tmp_path_factory.mktemp(name)
        args = [(rank, world, name, folder) for rank in range(world)]
        processes = [forks().Process(target=main, args=each) for each in args]
        for process in processes:
            process.start()
        groups[name, world] = (folder, processes)
    deadline, found = time.monotonic() + HARD_S, {}
    for case, (folder, processes) in groups.items():
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        found[case] = [report(folder, rank, code) for rank, code in enumerate(codes)]
    yield found


def report(folder: Path, rank: int, code: int | None) -> tuple[int | None, str, float]:
    path, began = folder / f"rank{rank}", folder / "began"
    if not path.exists():
        return code, "", 0.0
    written = json.loads(path.read_text())
    late = written["at"] - float(began.read_text()) if began.exists() else 0.0
    return code, written["error"], late


@pytest.mark.parametrize(
    ("name", "world"), [case for case in CASES if case[0] not in (*UNSHARDED, STAGE)]
)
def test_no_rank_waits_for_one_that_is_gone(name: str, world: int, ended: dict[Any, Any]) -> None:
    """Within the timeout of the group, by which meshes have made theirs."""
    for rank, (code, error, late) in enumerate(ended[name, world]):
        is_killed = rank == LATE and is_killed_in(name)
        assert code == (-signal.SIGKILL if is_killed else 0)
        if rank == LATE:
            assert error.startswith(TOLD.get(name, "")) and bool(error) is not is_killed
        else:
            assert error.startswith("RankError: ") and "\n" not in error, error
            assert name not in TOLD or f"rank {LATE} failed in " in error, error
            assert TOLD.get(name, "recorded no error") in error or is_named(error), error
            if is_killed_in(name) and not is_named(error):
                assert f", but rank {LATE} has ended" in error or " one of " in error, error
            assert late < 2 * TIMEOUT_S


def is_killed_in(name: str) -> bool:
    return name.startswith("end")


def is_named(error: str) -> bool:
    """Whether it names what this rank and another one ran when a third one was gone."""
    return " runs " in error and " and rank " in error


@pytest.mark.parametrize("name", UNSHARDED)
def test_training_continues(name: str, ended: dict[Any, Any]) -> None:
    assert [(code, error) for code, error, _ in ended[name, 4]] == [(0, "")] * 4


def test_stages_name_the_message_that_they_miss(ended: dict[Any, Any]) -> None:
    missed = r"PipelineError: (output|gradient) of stage \d of micro-batch \d (for|from) "
    for rank, (code, error, _) in enumerate(ended[STAGE, 4]):
        assert code == (-signal.SIGKILL if rank == LATE else 0)
        assert error.startswith("PipelineError: " if rank != LATE else ""), error
        assert abs(rank - LATE) != 1 or re.match(
            f"{missed}pipeline rank {LATE}, which is gone", error
        ), error
