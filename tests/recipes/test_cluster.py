"""examples/cluster: each way to start a job starts the ranks of two hosts, here on one machine."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # transformers needs it

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
STUBS = {
    "scontrol": "echo localhost; echo other",
    # A task on each of two hosts, both of which are waited for.
    "srun": '"$@" & a=$!; "$@" & b=$!; wait $a; code=$?; wait $b && exit $code',
}
# In the place of moecore train, whose own tests start it on two hosts.
TRAIN = """
import os, sys
words = "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:]
os.write(1, (" ".join(words) + "\\n").encode())  # at once: two hosts share this output
"""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job in a folder with what it runs."""
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "moecore").mkdir()  # torchrun -m finds it first
    (tmp_path / "moecore" / "__init__.py").touch()
    (tmp_path / "moecore" / "__main__.py").write_text(TRAIN)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def both(first: str, second: str) -> str:
    """Return a script that runs two at one time."""
    return f"({first}) & a=$!\n({second}) & b=$!\nwait $a && wait $b"


def run(script: str, folder: Path, environ: dict[str, str]) -> str:
    """Run a script on this machine; return the arguments of its two ranks."""
    script = script.replace("29500", free_port())
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    words = found[0].removeprefix("rank 0 of 2 ") if found else ""
    assert found == [f"rank {rank} of 2 {words}" for rank in (0, 1)], done.stdout + done.stderr
    return words


def test_slurm(job: dict[str, str], tmp_path: Path) -> None:
    script = (CLUSTER / "train.sbatch").read_text()
    assert subprocess.run(["bash", "-n", CLUSTER / "train.sbatch"]).returncode == 0
    assert re.findall(r"^#SBATCH --(\S+)", script, re.MULTILINE)[1] == "nodes=2"
    slurm = dict(SLURM_JOB_NODELIST="two", SLURM_JOB_NUM_NODES="2", SLURM_JOB_ID="7")
    slurm |= dict(SLURM_JOB_NAME="mine", RANKS_PER_NODE="1", PORT=free_port())
    slurm |= dict(ARGS="--config plan.toml --data a.jsonl")
    found = run(script, tmp_path, job | slurm)
    assert found == "train --run-dir runs/mine --config plan.toml --data a.jsonl"


@pytest.mark.nightly  # the same options of torchrun as those of Slurm
def test_kubernetes(job: dict[str, str], tmp_path: Path) -> None:
    """The operator's variables are all that torchrun needs to know."""
    spec = yaml.safe_load((CLUSTER / "pytorchjob.yaml").read_text())["spec"]
    worker: Any = spec["pytorchReplicaSpecs"]["Worker"]
    (pod,) = worker["template"]["spec"]["containers"]
    assert spec["elasticPolicy"]["maxReplicas"] == worker["replicas"] == 2
    assert pod["name"] == "pytorch" and pod["command"] == ["bash", "-c"]
    mounts = {mount["name"] for mount in pod["volumeMounts"]}
    assert mounts == {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
    operator = dict(PET_RDZV_BACKEND="c10d", PET_NNODES="2", PET_NPROC_PER_NODE="1")
    operator["PET_RDZV_ENDPOINT"] = f"localhost:{free_port()}"
    environ = {each["name"]: str(each["value"]) for each in pod["env"]}
    found = run(both(*pod["args"] * 2), tmp_path, job | environ | operator)
    assert found == "train --run-dir /runs/moecore --preset qwen3-30b-a3b --ep 8 --compile-dense"
