import sys
from pathlib import Path

import pytest
from benchmarks.bench_train import split_arguments
from benchmarks.whole_host import CALLS, LIMIT, Run, make_command, start

from moecore.recipes.train import parse_arguments

TRAIN = "benchmarks.bench_train"


@pytest.mark.parametrize("name", CALLS)
def test_a_call_fits_its_time_and_its_steps_exist(name: str) -> None:
    runs = CALLS[name]
    assert sum(run.seconds for run in runs) <= LIMIT
    assert len({run.name for run in runs}) == len(runs), "outputs would be overwritten"
    for run, tiny in [(run, tiny) for run in runs for tiny in (False, True)]:
        typed = make_command(run, 8, Path("records"), tiny=tiny)
        if typed is not None and TRAIN in typed:
            _, rest = split_arguments(typed[typed.index(TRAIN) + 1 :])
            parse_arguments([*rest, "--checkpoint-every", "0", "--sample-every", "0"])


def test_what_takes_more_gpus_is_left_out() -> None:
    found = [make_command(run, 2, Path("records"), tiny=False) for run in CALLS["scaling"]]
    ranks = [typed[typed.index("--nproc-per-node") + 1] for typed in found if typed is not None]
    assert ranks == ["1", "2"]


def test_a_run_that_fails_or_lasts_too_long_is_told(tmp_path: Path) -> None:
    run = Run(name="slow", command="", seconds=1)
    assert start([sys.executable, "-c", "raise SystemExit(3)"], run, tmp_path / "a") == 3
    apart = "trap 'kill $rank; wait $rank; exit' TERM; setsid sleep 60 & rank=$!; echo $rank; wait"
    assert start(["sh", "-c", apart], run, tmp_path / "b") == 124
    rank = (tmp_path / "b").read_text().split()[-1]
    assert not Path("/proc", rank).exists(), "a rank goes on beside the next run"
