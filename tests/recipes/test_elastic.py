"""One command on two and three hosts that leave and return computes the losses of one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from moecore.io.checkpoint.host_memory import HOST_VARIABLE
from moecore.recipes.report import METRICS
from tests.recipes.launched import run_in_forks

pytestmark = pytest.mark.slow
STEPS, SECONDS = 100, 300
BATCH_SIZES = {2: 6, 3: 2}  # of a rank, by hosts: 12 rows for every number of ranks
# Otherwise ranks that start again without a failure read addresses of the ranks before them.
NEW_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
RUN = (
    f"--preset tiny --global-batch-size 12 "
    f"--seq-len 32 --steps {STEPS} --sample-every 0 --checkpoint-every 1000 "
    "--lr-schedule constant --warmup-steps 0 --aux-loss 0"
).split()
# An agent that has imported all that it needs waits for a line.
AGENT = (
    "import sys; from torch.distributed.run import main; sys.stdin.readline(); main(sys.argv[1:])"
)


def options(run_dir: Path, batch_size: int) -> list[str]:
    data = Path(__file__).parents[2] / "docs" / "findings.md"
    words = [*RUN, "--batch-size", str(batch_size), "--data", str(data)]
    return [*words, "--run-dir", str(run_dir)]


def start_agent(host: str, port: int, num_hosts: int, run_dir: Path) -> subprocess.Popen[bytes]:
    """Start torchrun for one rank, as on a host of its own; it waits for `join`."""
    nnodes, batch_size = f"{num_hosts - 1}:{num_hosts}", BATCH_SIZES[num_hosts]
    words = ["--nnodes", nnodes, "--nproc-per-node", "1", "--max-restarts", "20"]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    words += ["--rdzv-conf", "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3"]
    words += ["-m", "moecore", "pretrain", *options(run_dir, batch_size)]
    words += ["--memory-checkpoint-every", "5"]
    with open(run_dir.with_name(f"{host}.txt"), "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", AGENT, *words],
            env=os.environ | {HOST_VARIABLE: host, "OMP_NUM_THREADS": "1", **NEW_STORES},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def join(agent: subprocess.Popen[bytes]) -> None:
    assert agent.stdin is not None
    agent.stdin.close()


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]


def lose(agent: subprocess.Popen[bytes], host: str) -> None:
    """Kill a host: torchrun, its rank, and the files in its memory."""
    if agent.poll() is None:
        ranks = children_of(agent.pid)
        agent.kill()
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        agent.wait()
    shutil.rmtree(f"/dev/shm/moecore-{os.getuid()}-{host}", ignore_errors=True)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "the run stands still"
        time.sleep(0.05)


def count_steps(run_dir: Path) -> int:
    with suppress(FileNotFoundError):
        return (run_dir / METRICS).read_bytes().count(b"\n")
    return 0


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process, which nothing disturbs, of a micro-batch per step."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    run_in_forks("pretrain", options(run_dir, 12), num_ranks=1)
    return losses(run_dir)


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_a_host_leaves_and_returns(tmp_path: Path, num_hosts: int, straight: list[float]) -> None:
    hosts = [f"elastic{i}-{uuid.uuid4().hex[:8]}" for i in range(num_hosts)]
    run_dir = tmp_path / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents = {host: start_agent(host, port, num_hosts, run_dir) for host in hosts}
    spare = start_agent(hosts[-1], port, num_hosts, run_dir)
    try:
        join(agents[hosts[0]])  # has the store of the rendezvous
        wait_until(lambda: is_open(port))
        for host in hosts[1:]:
            join(agents[host])
        wait_until(lambda: count_steps(run_dir) >= 12)
        lose(agents[hosts[-1]], hosts[-1])
        agents[hosts[-1]] = spare
        before = count_steps(run_dir)
        wait_until(lambda: count_steps(run_dir) >= before + 15)
        join(spare)
        wait_until(lambda: bool(children_of(spare.pid)))
        assert count_steps(run_dir) < STEPS, "the host returns too late"
        codes = [agent.wait(SECONDS) for agent in agents.values()]
    finally:
        for host, agent in (*agents.items(), (hosts[-1], spare)):
            lose(agent, host)
    assert codes == [0] * num_hosts
    assert losses(run_dir) == pytest.approx(straight, rel=1e-4)
