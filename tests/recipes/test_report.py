import importlib
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from moecore.models import flops_per_token
from moecore.recipes import report
from moecore.recipes.generate import read_samples
from moecore.recipes.train import TrainConfig

ARGUMENTS = (
    "--preset tiny-qwen3 --tokens random --num-layers 2 --batch-size 1 --seq-len 16 --steps 2"
)
WANDB = """
calls = []

class Run:
    def log(self, metrics, step): calls.append((step, metrics))
    def finish(self): calls.append("finish")

def init(**options):
    calls.append(options)
    return Run()
"""
MLFLOW = """
from types import SimpleNamespace

calls = []

def set_experiment(name): calls.append(("experiment", name))
def start_run(run_id=None, run_name=None):
    calls.append(("start", run_id, run_name))
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "new"))
def log_params(params): calls.append(("params", params["preset"]))
def log_metrics(metrics, step): calls.append((step, metrics))
def end_run(): calls.append("end")
"""


def run(train: ModuleType, run_dir: Path, arguments: str) -> int:
    words = f"{ARGUMENTS} --sample-every 0 --checkpoint-every 1 {arguments}"
    return train.run_rank(train.parse_arguments([*words.split(), "--run-dir", str(run_dir)]))


def unpack_loads(line: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a line, with a number in place of each entry of a list."""
    numbers = {name: value for name, value in line.items() if not isinstance(value, list)}
    del numbers["step"]
    lists = {name: value for name, value in line.items() if isinstance(value, list)}
    for name, loads_E in lists.items():
        layer = name.removeprefix("expert_loads/")
        numbers |= {f"expert_load/{layer}/{e}": load for e, load in enumerate(loads_E)}
    return numbers


def rounded(logged: tuple[int, dict[str, float]]) -> tuple[int, dict[str, float]]:
    """Return a step and its logged metrics, with loads of experts as in metrics.jsonl."""
    step, metrics = logged
    return step, {n: round(x, 3) if n.count("/") == 2 else x for n, x in metrics.items()}


def test_loads_of_layers_and_mfu_reach_every_log(train, tmp_path, monkeypatch) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    run_dir = tmp_path / "run"
    assert run(train, run_dir, "--wandb mine --peak-tflops 2") == 0
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    config = train.parse_arguments(ARGUMENTS.split()).make_decoder_config()
    flops = flops_per_token(config, 16)
    for line in lines:
        assert line["mfu"] == pytest.approx(line["tokens_per_second"] * flops / 2e12)
        loads = [line[f"expert_load/model.layers.{n}.mlp"] for n in range(2)]
        assert max(loads) == line["expert_load_max_over_mean"] and min(loads) >= 1
        assert line["memory_rss_gib"] > 0.1 and line["skipped"] == 0
    of_experts = {f"expert_loads/model.layers.{n}.mlp" for n in range(2)}
    assert of_experts <= lines[1].keys() and not of_experts & lines[0].keys()
    assert lines[1]["rank_load_max_over_mean"] == pytest.approx(1)  # of one rank
    start, *logged, end = sys.modules["wandb"].calls
    assert start["project"] == "mine" and start["config"]["preset"] == "tiny-qwen3"
    assert [(line["step"], unpack_loads(line)) for line in lines] == list(map(rounded, logged))
    assert end == "finish"
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert set(found.Tags()["scalars"]) == logged[1][1].keys()


def test_a_run_that_is_started_again_is_one_run_of_each_logger(train, tmp_path, monkeypatch):
    for name, content in (("wandb", WANDB), ("mlflow", MLFLOW)):
        (tmp_path / f"{name}.py").write_text(content)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    run_dir, words = tmp_path / "run", "--wandb mine --mlflow tries"
    assert run(train, run_dir, words) == 0 and run(train, run_dir, f"{words} --steps 4") == 0
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first, *_, second = [c for c in sys.modules["wandb"].calls if isinstance(c, dict)]
    assert first["id"] == second["id"] == (run_dir / "wandb.id").read_text()
    assert len(first["id"]) == 32 and first["resume"] == second["resume"] == "allow"
    logged = [call for call in sys.modules["wandb"].calls if isinstance(call, tuple)]
    assert [(line["step"], unpack_loads(line)) for line in lines] == list(map(rounded, logged))
    assert len(lines) == 4
    assert sys.modules["mlflow"].calls == [
        ("experiment", "tries"), ("start", None, "run"), ("params", "tiny-qwen3"),
        *logged[:2], "end",
        ("experiment", "tries"), ("start", "new", None), *logged[2:], "end",
    ]  # fmt: skip


def test_a_model_without_experts_is_logged_and_drawn(train: ModuleType, tmp_path: Path) -> None:
    """A dense one, or a pipeline stage whose layers are dense."""
    pytest.importorskip("matplotlib", reason="it draws the curves")
    from moecore.recipes import report
    from moecore.recipes.metrics import LaunchedStep, Moment

    now, cpu = Moment(torch.device("cpu")), torch.tensor(1.5)
    done = SimpleNamespace(to_dict=dict, metrics=SimpleNamespace(tokens_per_expert={}))
    launched = LaunchedStep(
        step=1, began=now, fetched=now, ended=now, loss=cpu, result=done, counts=cpu, ep=1,
        num_experts={}, logs_loads=True, reader=None, extra={"tokens_per_second": 2.0},
    )  # fmt: skip
    args = TrainConfig(run_dir=tmp_path, steps=2)
    with report.RunReport(args, start=0) as shown:
        shown.log(1, *launched.read_metrics())
        shown.log(2, *launched.read_metrics())
    assert len(report.read_metrics(tmp_path / "metrics.jsonl")[0]) == 2
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_load_of_ranks_and_of_experts(train: ModuleType) -> None:
    from moecore.recipes.metrics import (
        LaunchedStep,
        Moment,
        compute_rank_imbalance,
        take_expert_loads,
    )

    assert compute_rank_imbalance([2.0, 1.0, 0.5, 0.5], 2) == 1.5
    assert compute_rank_imbalance([0.0, 0.0], 2) == 0
    metrics = {"loss": 1.0, "expert_load/a": 11.0}
    loads = {f"expert_load/a/{e}": float(e) for e in range(12)}
    numel = dict.fromkeys("ab", torch.zeros(12))
    assert take_expert_loads(found := metrics | loads, numel) == {"a": list(range(12))}
    assert found == metrics
    values = {"expert_load/a": 9.0, **{f"expert_load/a/{e}": x for e, x in enumerate([2, 1, 1, 9])}}
    now, cpu = Moment(torch.device("cpu")), torch.tensor(1.5)
    numbers = SimpleNamespace(tokens_per_expert={"a": torch.zeros(4)})
    launched = LaunchedStep(
        step=1, began=now, fetched=now, ended=now, loss=cpu, counts=cpu, ep=2, logs_loads=True,
        result=SimpleNamespace(to_dict=lambda: values, metrics=numbers), reader=None,
        num_experts={"a": 2},  # the last two loads are of zero experts
    )  # fmt: skip
    assert launched.read_metrics()[0]["rank_load_max_over_mean"] == pytest.approx(4 / 3)


@pytest.mark.parametrize("every", [1, 2, 0])
def test_maps_have_the_loads_of_layers_and_of_the_least_even(every, train, tmp_path) -> None:
    """Step by layer, and step by expert of layer 3; or no map where there is nothing to draw."""
    figure = pytest.importorskip("matplotlib.figure")
    lines = []
    for step in range(1, 7):
        line = {"step": step, "loss": 3.0 / step, "expert_load_max_over_mean": 2.0}
        for n, worst in ((1, 1.25), (3, 1.5)):
            line |= {f"expert_load/model.layers.{n}.mlp": worst + step}
            if every and step % every == 0:
                line |= {f"expert_loads/model.layers.{n}.mlp": [worst + step, 0.0, 2.0 - step]}
        lines.append(json.dumps(line | ({"eval_loss": 2.0} if step % 3 == 0 else {})))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    drawn: list[Any] = []

    class Figure(figure.Figure):
        def savefig(self, path: Path, **how: object) -> None:
            drawn.append(self)
            super().savefig(path, **how)

    report.draw_curves(SimpleNamespace(Figure=Figure), tmp_path / "metrics.jsonl")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    axes = drawn[0].axes
    maps = {a.get_ylabel(): a.collections[0].get_array() for a in axes if len(a.collections)}
    maps = {name: values for name, values in maps.items() if name in ("MoE layer", "expert")}
    steps = range(1, 7)
    assert maps.pop("MoE layer").tolist() == [[w + s for s in steps] for w in (1.25, 1.5)]
    if every:
        steps = range(every, 7, every)
        rows = [[1.5 + s for s in steps], [0.0 for _ in steps], [2.0 - s for s in steps]]
        assert maps.pop("expert").tolist() == rows
    assert not maps and [len(line.get_xdata()) for line in axes[0].lines] == [6, 2]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_that_is_not_installed_is_refused(name, train, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(train, tmp_path, f"--{name} mine") == 2
    error = capsys.readouterr().err
    assert error == (
        f"moecore: error: --{name} (mine) must have {name} installed: pip install {name}\n"
    )


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", torch.bfloat16, 989.4),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 5090 D", torch.bfloat16, None),
        ("NVIDIA H100 80GB HBM3", torch.float32, None),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16, None),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA RTX A1000", torch.bfloat16, None),
    ],
)
def test_peaks_are_known_by_name(name, dtype, peak, train, monkeypatch) -> None:
    from moecore.recipes.metrics import find_peak_tflops

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert find_peak_tflops(torch.device("cuda"), dtype) == pytest.approx(peak)
    assert find_peak_tflops(torch.device("cpu"), dtype) is None


def test_damaged_lines_go_and_no_draft_is_written_through_a_link(train, tmp_path, capsys) -> None:
    precious, path = tmp_path / "precious", tmp_path / "metrics.jsonl"
    precious.write_text("mine")
    (tmp_path / "metrics.tmp").symlink_to(precious)
    damage = b'{"step": 7, "lo\n\n\0\0\0\n\xff\xfe\n{"step": 1}\n[1]\n' + b"[" * 100_000  # 7 lines
    path.write_bytes(b'{"step": 1, "loss": 2.0, "expert_load_max_over_mean": 1.0}\n' + damage)
    report.truncate_metrics(path, 1)
    assert capsys.readouterr().out == f"{path}: dropped 7 damaged line(s)\n"
    assert precious.read_text() == "mine" and not path.is_symlink()
    assert [line["step"] for line in report.read_metrics(path)[0]] == [1]


def test_a_file_with_a_hole_is_read_by_line(tmp_path: Path) -> None:
    """It has 40 GB of zeros behind its lines, as a crash may leave."""
    metrics, samples = tmp_path / "metrics.jsonl", tmp_path / "samples.jsonl"
    metrics.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    samples.write_text('{"step": 1, "text": "a"}\n{"step"\n[1]\n')
    for path in (metrics, samples):
        os.truncate(path, 40 << 30)
    lines, num_damaged = report.read_metrics(metrics)
    assert [line["step"] for line in lines] == [1, 2] and num_damaged == 1
    assert read_samples(samples, before=2) == ['{"step": 1, "text": "a"}']


@pytest.mark.parametrize(
    "wrong", [{"RANK": "x"}, {"WORLD_SIZE": None}, {"RANK": "1"}, {"LOCAL_RANK": "-1"}], ids=str
)
def test_a_wrong_environment_is_one_line(wrong, train, tmp_path, monkeypatch, capsys) -> None:
    ((name, value),) = wrong.items()
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    assert run(train, tmp_path, "") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"moecore: error: {name} (") and error.count("\n") == 1


@pytest.fixture
def full_disk() -> Iterator[Callable[[int], None]]:
    """Limits how far a file of this process may grow: EFBIG in place of ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 300, 20_000])
def test_a_full_disk_is_one_line(size, train, tmp_path, full_disk, capsys) -> None:
    """No event of TensorBoard fits, no line of metrics, or no shard of a checkpoint."""
    full_disk(size)
    code = run(train, tmp_path, "")
    full_disk(-1)
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line and "%|" not in line]  # of the bar
    assert code == 1 and len(lines) == 1, error
    assert lines[0].startswith(f"moecore: error: --run-dir ({tmp_path}) must be writable, with")
    assert "File too large" in lines[0] and lines[0].endswith("again from the last checkpoint")


def test_without_a_bar_the_first_step_is_printed_at_once(train, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "_import_if_installed", lambda name: None)
    times = iter([0.0, 4.9, 5.0, 5.0])
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: next(times)))
    args = TrainConfig(run_dir=tmp_path, steps=50)
    measured = {"loss": 1.0, "tokens_per_second": 2.0, "expert_load_max_over_mean": 1.5}
    with report.RunReport(args, start=7) as shown:
        for step in (8, 9, 20):
            shown.log(step, {**measured, "eval_loss": 3.25}, {})
    _, *lines, goodput = capsys.readouterr().out.splitlines()
    assert goodput.startswith("goodput ")
    numbers = "of 50: loss 1.000, tok/s 2, load 1.50, eval 3.250"
    assert lines == [f"step 8 {numbers}", f"step 20 {numbers}"]


@pytest.mark.parametrize(
    ("part", "kind", "wanted"),
    [
        *((part, "fifo", "a plain file") for part in ("metrics.jsonl", "config.toml")),
        *((part, "folder", "a plain file") for part in ("curves.png", "metrics.tmp")),
        *((part, "file", "a directory") for part in ("checkpoints", "tensorboard", "export")),
        ("checkpoints", "broken link", "a directory"),
        ("export", "link", "a directory as export, not a link"),
        (".export.draft", "fifo", "a directory"),
    ],
)
def test_what_a_run_cannot_write_is_refused_before_it_trains(part, kind, wanted, train, tmp_path):
    make_run_dir = importlib.import_module("moecore.recipes.report").make_run_dir
    run_dir, place = tmp_path / "run", tmp_path / "run" / part
    make_run_dir(run_dir)  # a new one
    make = {
        "fifo": lambda: os.mkfifo(place),
        "folder": place.mkdir,
        "file": place.touch,
        "link": lambda: place.symlink_to(tmp_path),
        "broken link": lambda: place.symlink_to(tmp_path / "nothing"),
    }
    make[kind]()
    with pytest.raises(ValueError, match=rf"--run-dir \(.*/run\) must have {wanted}") as error:
        make_run_dir(run_dir)
    assert "\n" not in str(error.value)
    place.unlink() if kind != "folder" else place.rmdir()
    make_run_dir(run_dir)


@pytest.mark.parametrize("name", ["a/file", "a/file/run", "x" * 300, "nul\0"])
def test_a_run_directory_that_cannot_be_made_is_named(name, train, tmp_path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    with pytest.raises(ValueError, match=r"^--run-dir \(.*\) must be a directory to write: "):
        importlib.import_module("moecore.recipes.report").make_run_dir(tmp_path / name)


def test_every_gpu_of_the_planner_has_a_peak() -> None:
    from moecore.planning.gpus import GPUS, find_bf16_flops

    for name, gpu in GPUS.items():
        model = name.partition("-")[0].upper().replace("RTX", "GeForce RTX ")
        assert find_bf16_flops(f"NVIDIA {model}") == gpu.bf16_flops, name
