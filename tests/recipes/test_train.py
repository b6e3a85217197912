import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from moecore.io import read_manifest, set_latest
from tests.helpers.grids import beside
from tests.helpers.ranks import run_ranks
from tests.recipes.launched import launched, metrics
from tests.recipes.launched import run_in_forks as launched_forks
from tests.recipes.odd_ranks import run_with_late_word

STEPS = 8
MICRO = (
    "--num-layers 2 --batch-size 1 --seq-len 32 --grad-accum 2 --checkpoint-every 4 --expert-bias"
    " --bias-update-rate 0.01 --sample-tokens 8 --workers 0"
)
WHOLE = f"--steps {STEPS} --eval-every 3 --expert-loads-every 2"


def run_in_forks(run_dir: Path, arguments: str, **options: Any) -> str:
    """Run the ranks of the command; return what rank 0 prints."""
    words = ["--run-dir", str(run_dir), *f"{MICRO} {arguments}".split()]
    return launched_forks("train", words, **options)


def tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Every block of a checkpoint: parameters, moments, expert bias, generators."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted((run_dir / "checkpoints" / f"step-{step:06d}").glob("*.safetensors")):
        found |= {f"{file.stem}: {key}": block for key, block in load_file(file).items()}
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One run that never stops, and what rank 0 prints."""
    run_dir = tmp_path_factory.mktemp("straight")
    return run_dir, run_in_forks(run_dir, WHOLE)


@pytest.mark.slow
def test_a_run_leaves_its_files_and_a_sample(straight: tuple[Path, str]) -> None:
    run_dir, printed = straight
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    loads = {"expert_load_max_over_mean", "rank_load_max_over_mean"}
    wanted = {"loss", *loads, "grad_norm", "lr", "balance_loss", "router_entropy"}
    name = "model.layers.1.mlp"  # the only layer with experts
    layers = {f"expert_load/{name}"}
    assert all(wanted | layers <= line.keys() for line in lines)
    assert not any(name.startswith("z_loss") for line in lines for name in line)  # not in use
    of_experts = {f"expert_loads/{name}"}
    for line in lines:
        assert of_experts & line.keys() == (set() if line["step"] % 2 else of_experts)
        assert all(sum(line[name]) == pytest.approx(8, abs=0.01) for name in of_experts & {*line})
    evaluated = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert list(evaluated) == [3, 6, 8]
    assert all(abs(loss - lines[step - 1]["loss"]) < 0.5 for step, loss in evaluated.items())
    assert all(max(line[n] for n in layers) == line["expert_load_max_over_mean"] for line in lines)
    assert lines[0]["loss"] == pytest.approx(5.6, abs=0.3) and lines[-1]["loss"] < 5.0
    assert f"sample of step {STEPS}: 'def " in printed
    saved = {p.name for p in (run_dir / "checkpoints").iterdir()}
    assert saved == {"latest", "step-000004", "step-000008"}
    pytest.importorskip("matplotlib")
    assert (run_dir / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_run_resumes_from_a_url_on_a_host_without_its_directory(straight, tmp_path) -> None:
    store, arguments = tmp_path / "store", f"{WHOLE} --checkpoint-dir file://{tmp_path}/store"
    run_in_forks(tmp_path / "first", arguments)
    set_latest(f"file://{store}/step-000004")
    run_in_forks(tmp_path / "second", arguments)
    assert [line["step"] for line in metrics(tmp_path / "second")] == list(range(5, STEPS + 1))
    for name in ("first", "second"):
        assert not (tmp_path / name / "checkpoints").exists()
    path = store / f"step-{STEPS:06d}"
    names = read_manifest(path).files
    found = {f"{n[:10]}: {k}": block for n in names for k, block in load_file(path / n).items()}
    wanted = tensors(straight[0], STEPS)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(block, wanted[key]) for key, block in found.items())


@pytest.mark.slow
def test_own_data_and_another_folding_with_torch_alone(tmp_path: Path) -> None:
    """Two ranks, tp=2 against etp=2, text and jsonl, and no optional package."""
    texts, plain = tmp_path / "texts.jsonl", tmp_path / "plain.txt"
    texts.write_text("".join(json.dumps({"text": "naïve words " * 9}) + "\n" for _ in range(3)))
    plain.write_text("plain words " * 9)
    run_dir, data = tmp_path / "run", f"--data {texts} {plain}"
    degrees = "--tp 2 --etp 2 --aux-loss 0 --steps 2"
    packages = ("tqdm", "tensorboard", "matplotlib")
    printed = run_in_forks(run_dir, f"{degrees} {data}", without=packages)
    assert "2 cpu ranks (tp=2 etp=2, alltoall)" in printed
    assert printed.count("going on without tqdm, tensorboard, matplotlib (pip install") == 1
    assert "balance_loss" not in metrics(run_dir)[0] and not (run_dir / "curves.png").exists()
    for more in (f"{data} --seed 1", f"--data {plain}"):
        changed = run_in_forks(run_dir, f"--steps 2 {more}", num_ranks=1, code=2)
        assert "--data, --seq-len, --seed, --cp and the options of [corpus] must be as" in changed


ERRORS = {
    "--row-factor 0": "--row-factor (0.0) must be a finite number > 0 or 'exact'",
    "--lr fast": "--lr: could not convert string to float: 'fast'",
    "--dtype int8": "invalid choice 'int8' for argument '--dtype'",
    "--preset huge": "preset ('huge') must be one of",
    "--ep 3": "must divide the world size (2)",
    "--run-dir /dev/null/run": "--run-dir (/dev/null/run) must be a directory to write: Not a dir",
    "--checkpoint-dir no://x/y": "--checkpoint-dir (no://x/y) must be of a file system that fsspec",
    "--seed 18446744073709551616": "--seed (18446744073709551616) must be a whole",
    "--preset tiny-qwen3 --tokens random --sample-prompts é": "must have ids < vocab_size (128)",
    "--eval-every 2 --tokens random": "--tokens (random) must be text with --eval-every",
    "--recompute gemm_last norm": "MemoryOptions.recompute (",
}


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The script as a module: its errors come before any rank starts, and need no process."""
    yield importlib.import_module("moecore.recipes.train")


def error_of(script, run_dir, arguments, monkeypatch, capsys) -> str:
    """Return what the script prints to stderr when it ends with code 2."""
    words = f"--run-dir {run_dir} {MICRO} {arguments}".split()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert script.main(words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("arguments", ERRORS)
def test_wrong_arguments_are_one_line(arguments, script, tmp_path, monkeypatch, capsys) -> None:
    printed = error_of(script, tmp_path, arguments, monkeypatch, capsys)
    assert ERRORS[arguments] in printed
    assert re.match("moecore: error: ", printed.strip().splitlines()[-1])


def rank_without_agent(rank, device, words, folder, no_report) -> None:
    """Be a rank that srun has started; write what it prints, and fail where it waits."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    script = importlib.import_module("moecore.recipes.train")
    errors = sys.modules["moecore.recipes.errors"]
    said = StringIO()
    waits = patch.object(errors.time, "sleep", side_effect=AssertionError("a rank waits"))
    report = patch.object(
        sys.modules["moecore.recipes.loop"],
        "RunReport",
        side_effect=OSError("no space") if no_report else None,
    )
    with redirect_stdout(StringIO()), redirect_stderr(said), waits, report:
        code = script.run_rank(script.parse_arguments(words))
    (folder / f"{rank}.txt").write_text(f"{code} {said.getvalue()}")


@pytest.mark.slow
@pytest.mark.parametrize("no_report", beside([False, True], [False]))
def test_ranks_without_an_agent_end_with_the_same_line(tmp_path: Path, no_report: bool) -> None:
    """Of what rank 0 finds alone: a pointer to a checkpoint, and files of the report."""
    (tmp_path / "checkpoints").mkdir()
    if not no_report:
        (tmp_path / "checkpoints" / "latest").write_text("damaged")
    words = ["--run-dir", str(tmp_path), *MICRO.split()]
    run_ranks(2, rank_without_agent, words, tmp_path, no_report)
    lines = [(tmp_path / f"{rank}.txt").read_text().strip() for rank in range(2)]
    assert lines[0] == lines[1] and "\n" not in lines[0]
    assert re.match(r"1 .*no space" if no_report else "2 .*latest", lines[0]), lines[0]


@pytest.mark.parametrize("under_agent", [False, True])
def test_one_rank_prints_where_an_agent_ends_the_others(under_agent, script, monkeypatch, capsys):
    errors, waited = importlib.import_module("moecore.recipes.errors"), list[float]()
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if under_agent:  # torchrun and `launch` set it
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    for rank in range(2):
        assert errors.print_rank_error(ValueError("all ranks"), rank) == 2
        assert errors.print_rank_error(OSError("this rank"), rank) == 2
    assert waited == ([errors.RANK_0_PRINTS_S] if under_agent else [])
    assert capsys.readouterr().err.count("\n") == 4


@pytest.mark.slow
def test_an_error_found_by_the_ranks_is_one_line(tmp_path: Path) -> None:
    words = f"--preset tiny-qwen3 --tokens random --precision blockwise {MICRO}".split()
    words += ["--run-dir", str(tmp_path / "run")]
    code, said = launched(run_with_late_word, "train.py", words, tmp_path / "said.txt")
    assert code == 2 and "MoEConfig.dim (64)" in said and len(said.strip().splitlines()) == 1


def test_too_little_memory_gives_advice(monkeypatch: Any, capsys: Any) -> None:
    from moecore.recipes.errors import RUN_ERRORS, print_run_error

    monkeypatch.setenv("RANK", "3")
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has")
    assert print_run_error(error, SimpleNamespace(checkpoint_every=0)) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("moecore: error: rank 3: CUDA out of memory: lower --batch-size")
    assert MemoryError in RUN_ERRORS
    assert print_run_error(MemoryError(), SimpleNamespace(checkpoint_every=0)) == 2
    printed = capsys.readouterr().err
    assert printed == (
        "moecore: error: rank 3: this machine has too little memory for it (MemoryError)\n"
    )
