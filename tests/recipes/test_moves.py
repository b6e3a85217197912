"""`--move-experts-every`: loads of all steps since the last move place experts, at a known cost."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecore import MoELayer, place_experts
from moecore.moe.forced_routing import force_ids
from moecore.moe.layer import RoutedLayer
from moecore.planning.gpus import GPUS
from moecore.recipes import loop, moves, pretrain, train
from moecore.recipes.report import make_run_dir
from tests.helpers.ranks import ranks_fixture

pytestmark = pytest.mark.slow

WORLD, EXPERTS, EVERY = 2, 8, 4
RUN = (
    "--preset tiny-qwen3 --tokens random --num-layers 1 --batch-size 2 --seq-len 16 --ep 2 "
    "--sample-every 0 --schedule-steps 8 --checkpoint-every 3"
)
MOVES = f"--move-experts-every {EVERY}"
USUAL = [[0, 1], [0, 2], [0, 1], [1, 3]]  # of tokens in turn: all on rank 0 of two
LAST = [[6, 7], [5, 6]]  # of the step before a move: all on rank 1
SHARES = torch.tensor([9, 9, 3, 3, 0, 2, 4, 2]) / 32  # of the steps 1 to 4, and 5 to 8


class Ranks:
    """Runs commands in this rank, with a router that prefers experts, and counts their rows."""

    def __init__(self, rank: int, patches: pytest.MonkeyPatch) -> None:
        self.rank, self.step, self.rows, self.is_moving = rank, 0, dict[int, int](), False
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", WORLD)):
            patches.setenv(name, str(value))
        build, train_step, run_experts = (
            pretrain.build_job,
            loop.train_step,
            RoutedLayer._run_experts,
        )

        def build_forced(args: Any) -> Any:
            job = build(args)
            for layer in (m for m in job.model.modules() if isinstance(m, MoELayer)):
                force_ids(layer, self.choose)
            return job

        def count_step(job: Any, step: int, **options: Any) -> Any:
            self.step, self.rows[step] = step, 0
            launched = train_step(job, step, **options)
            self.step = 0
            return launched

        def count_rows(layer: RoutedLayer, expert_input: Any) -> Any:
            self.rows[self.step] += int(expert_input.index.num_rows)
            return run_experts(layer, expert_input)

        end_step, exchange = moves.ExpertMoves.end_step, dist.batch_isend_irecv

        def keep_lines(*args: Any) -> list[str]:
            self.is_moving = True  # a checkpoint moves experts, too
            self.lines += (lines := end_step(*args))
            self.is_moving = False
            return lines

        def count_bytes(ops: list[dist.P2POp]) -> Any:
            sizes = [op.tensor.nbytes for op in ops if op.op is dist.irecv]
            self.received += sum(sizes) * self.is_moving
            return exchange(ops)

        patches.setattr(moves.ExpertMoves, "end_step", keep_lines)
        patches.setattr(dist, "batch_isend_irecv", count_bytes)
        patches.setattr(train, "build_job", build_forced)
        patches.setattr(loop, "train_step", count_step)
        patches.setattr(RoutedLayer, "_run_experts", count_rows)

    def choose(self, num_tokens: int, experts: int, top_k: int, device: torch.device) -> Tensor:
        assert (experts, top_k) == (EXPERTS, 2)
        ids = torch.tensor(LAST if self.step % EVERY == 0 else USUAL, dtype=torch.int32)
        return ids.repeat(num_tokens // len(ids), 1)

    def run(self, run_dir: Path, words: str) -> dict[str, Any]:
        """Run a command; return its losses and loads, and rank 0's share of each step's rows."""
        self.rows, self.lines, self.received = {0: 0}, list[str](), 0
        words_of_run = [*RUN.split(), *words.split(), "--run-dir", str(run_dir)]
        make_run_dir(run_dir)
        assert train.run_rank(train.parse_arguments(words_of_run)) == 0
        rows = torch.zeros(WORLD, max(self.rows) + 1)
        rows[self.rank] = torch.tensor([self.rows.get(i, 0) for i in range(rows.shape[1])])
        dist.all_reduce(rows)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return {
            "rows": rows,
            "lines": self.lines,
            "received": self.received,
            "losses": [line["loss"] for line in lines],
            "loads": [line["rank_load_max_over_mean"] for line in lines],
        }


def worker(rank: int, _: torch.device, folder: str) -> dict[str, Any]:
    root = Path(folder)
    with pytest.MonkeyPatch.context() as patches:
        ranks = Ranks(rank, patches)
        outcomes = {"still": ranks.run(root / "still", "--steps 8")}
        outcomes["moved"] = ranks.run(root / "moved", f"--steps 8 {MOVES}")
        ranks.run(root / "resumed", f"--steps 3 {MOVES}")
        outcomes["resumed"] = ranks.run(root / "resumed", f"--steps 8 {MOVES}")
    return outcomes


outcomes = ranks_fixture(WORLD, worker, in_folder=True, over_gloo=True)


@pytest.mark.parametrize("case", ["moved", "resumed"])
def test_the_busiest_rank_gets_the_planned_share(outcomes: dict[str, Any], case: str) -> None:
    order = place_experts(SHARES, num_ranks=WORLD)
    planned = float(SHARES[order].view(WORLD, -1).sum(1).max())
    still, rows = outcomes["still"]["rows"], outcomes[case]["rows"]
    for steps in (slice(1, 5), slice(5, 9)):
        sums = still[:, steps].sum(1)
        assert (sums / sums.sum()).tolist() == pytest.approx([0.75, 0.25])
    sums = rows[:, 5:].sum(1)
    assert float(sums.max() / sums.sum()) == pytest.approx(planned)
    assert planned == 17 / 32
    assert rows.sum(0)[5:].equal(still.sum(0)[5:])


def test_losses_are_those_without_moves(outcomes: dict[str, Any]) -> None:
    for case in ("moved", "resumed"):
        assert outcomes[case]["losses"] == pytest.approx(outcomes["still"]["losses"], rel=1e-5)


def test_metrics_have_the_loads_of_ranks_after_a_move(outcomes: dict[str, Any]) -> None:
    assert outcomes["still"]["loads"] == pytest.approx([2.0] * 8)
    rows = outcomes["moved"]["rows"][:, 1:]
    assert outcomes["moved"]["loads"] == pytest.approx((rows.max(0).values / rows.mean(0)).tolist())
    assert outcomes["moved"]["loads"][4:] != pytest.approx([2.0] * 4)


def test_the_line_of_a_move_has_its_plan_and_its_cost(outcomes: dict[str, Any]) -> None:
    assert outcomes["still"]["lines"] == []
    pattern = (
        r"experts moved after step (\d): load of the busiest rank / mean 1.50 -> (1.0\d), "
        r"([\d.]+) MiB to a rank in ([\d.e-]+) s \(unknown link\)"
    )
    (line,) = outcomes["moved"]["lines"]
    step, load, size, seconds = re.fullmatch(pattern, line).groups()  # type: ignore[union-attr]
    sums = outcomes["moved"]["rows"][:, 5:].sum(1)
    assert (step, load) == ("4", f"{float(sums.max() / sums.mean()):.2f}")
    assert float(size) * 2**20 == pytest.approx(outcomes["moved"]["received"], rel=0.01)
    assert 0 < float(seconds) < 100


def test_seconds_of_a_move_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, num_bytes = GPUS["h200-141"], 1 << 30
    plan = partial(moves.plan_move_seconds, num_bytes, 8, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert 1 < plan() / (2 * num_bytes / gpu.nvlink) < 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert plan() == pytest.approx(2 * num_bytes / (0.9 * gpu.network), rel=0.01)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA K80")
    assert plan() is None
