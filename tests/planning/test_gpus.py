import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from moecore import NVLinkOptions, ParallelConfig
from moecore.base.options.precision import Precision, Recipe
from moecore.cli import main
from moecore.models import preset
from moecore.planning import (
    CostTable,
    SearchRequest,
    TrainingRun,
    dry_run,
    plan_time,
    search,
    time_step,
)
from moecore.planning.flags import PlanConfig, parse_run
from moecore.planning.gpus import GPUS, count_peers, find_gpu_name, find_time_refusal, read_gpu
from moecore.planning.layouts import Layout, list_option_sets, make_run
from moecore.planning.recipe import format_run_flags
from moecore.recipes.parser import parse


def test_names_of_gpus_in_torch() -> None:
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GB200", "NVIDIA L4")
    assert [*map(find_gpu_name, names)] == ["h100-80", "h200-141", "gb200-186", None]


def test_a_file_has_what_differs(tmp_path: Path) -> None:
    file = tmp_path / "half.toml"
    file.write_text('like = "h100-80"\nmemory = 40_000_000_000\nbf16_flops = 5e14\n')
    gpu, like = read_gpu(file), GPUS["h100-80"]
    assert (gpu.memory, gpu.bf16_flops, gpu.nvlink) == (40_000_000_000, 5e14, like.nvlink)
    assert like.measured and not gpu.measured, "nobody has run on it"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("memory = 1", r"must have bf16_flops, fp32_flops, memory_bandwidth, nvlink"),
        ('like = "h100"', r"like \('h100'\) must be one of a100-80"),
        ('like = "h100-80"\nflops = 1', r"flops \(1\) must be a field of Gpu"),
        ('like = "h100-80"\nmemory = -1', r"Gpu.memory \(-1\) must be"),
        ("memory", "must be TOML"),
        ("like = []", r"like \(\[\]\) must be one of a100-80"),
        ('like = "h100-80"\nbf16_flops = 1e-300', r"Gpu.bf16_flops \(1e-300\) must be a finite n"),
        ('like = "h100-80"\npcie = nan', r"Gpu.pcie \(nan\) must be"),
        ('like = "h100-80"\nserver = 100000', r"Gpu.server \(100000\) must be"),
        (f'like = "{"h" * 10**5}"', r"like \('hhh.*\.\.\.\) must be one of"),
        (f'{"h" * 10**5} = "{"v" * 10**5}"', r"hhh.* \('vvv.*\.\.\.\) must be a field"),
        (".".join("a" * 2000) + " = 1", "must be"),
        ("a = " + "[" * 10**5, "must be TOML"),
        ("#" * 2**20 + "\n", "must be a file of at most 1048576 bytes"),
    ],
)
def test_a_wrong_file_is_one_line(text: str, error: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=error) as raised:
        read_gpu(file)
    assert len(str(raised.value)) < 500
    with pytest.raises(ValueError, match="must be a file"):
        read_gpu(tmp_path)


@pytest.mark.parametrize(
    ("gpu", "ep", "has_stores"),
    [
        ("h100-80", 8, True),
        ("h100-80", 16, False),
        ("gb200-186", 4, True),
        ("gb200-186", 8, False),  # two servers of a domain
        ("rtx5090-32", 4, False),  # without peer access
    ],
)
def test_stores_stay_among_the_peers_of_a_server(gpu: Any, ep: int, has_stores: bool) -> None:
    """In searches, by flags and in a run, whose ranks of two hosts refuse them."""
    request = SearchRequest(model=preset("tiny"), num_gpus=16, gpu=gpu, seq_len=64)
    run = make_run(request, Layout(ep=ep), list_option_sets(request)[0])
    flags = ["--preset", "tiny", "--gpus", "16", "--gpu", gpu, "--ep", str(ep), "--seq-len", "64"]
    options = parse(PlanConfig, flags, prog="moecore plan")
    for found in (run, parse_run(options)):
        assert (found.nvlink is not None) == has_stores
        assert found.num_peers == count_peers(gpu, request.ranks_per_domain)
    for changed in (
        replace(run, nvlink=None),
        replace(run, precision=Precision(frozen="nvfp4", frozen_dense=True)),
    ):
        options = parse(PlanConfig, [*flags[:6], *format_run_flags(changed)], prog="moecore plan")
        assert parse_run(options) == changed
    if not has_stores:
        unless = rf"unless it is > 1 and divides num_peers \({run.num_peers}\): leave it out"
        message = rf"nvlink .* be None with ep \* etp \({ep}\), {unless}"
        with pytest.raises(ValueError, match=message):
            replace(run, nvlink=NVLinkOptions())


class Bars(HTMLParser):
    """Widths of bars by picture and row, and lines across them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.pictures: list[dict[str, list[float]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if tag == "svg":
            self.pictures.append({})
        if tag == "rect":
            self.pictures[-1].setdefault(found["y"], []).append(float(found["width"]))
        if tag not in ("meta", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "path":
            assert self.open.pop() == tag


@pytest.fixture
def few_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of plans have choices of recompute only, which test_choices.py has in full."""
    monkeypatch.setattr("moecore.planning.html.SCALES", (1,))


@pytest.mark.usefixtures("few_choices")
def test_page_has_what_the_plan_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "gpu.toml", tmp_path / "plan.html"
    file.write_text('like = "h100-80"')
    call = ["plan", "--preset", "tiny", "--gpus", "4", "--seq-len", "64", "--pp", "2"]
    call += ["--ep", "2", "--micro-batches", "4", "--gpu-spec", str(file), "--html", str(page)]
    assert main([*call, "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    bars = Bars()
    bars.feed(page.read_text())
    assert bars.open == []
    memory, time, stages = bars.pictures
    for widths, rank in zip(memory.values(), ranks, strict=True):
        held = sum(rank["device"].values()) / GPUS["h100-80"].memory
        assert sum(widths) == pytest.approx(1000 * held, abs=0.005 * len(widths))
    (widths,) = time.values()
    assert sum(widths) == pytest.approx(1000, abs=0.1)
    # Four micro-batches forward and backward on each of two ranks.
    assert [len(widths) for widths in stages.values()] == [8, 8]


# What no GPU of these has run: formats that are emulated on Hopper, and FP8 elsewhere.
UNTIMED = [
    ("gb200-186", "blockwise"),
    ("h200-141", "mxfp8"),
    ("h100-80", "nvfp4"),
    ("rtx5090-32", "tensorwise"),
    ("a100-80", "auto"),
]
UNTIMED_LINE = "time: not modelled for {} on {}: no kernel of it has been measured"
MODEL = ["--preset", "tiny", "--gpus", "4", "--seq-len", "64"]
DEGREES = ["--pp", "2", "--ep", "2", "--micro-batches", "4"]


@pytest.mark.usefixtures("few_choices")
@pytest.mark.parametrize(("gpu", "precision"), UNTIMED)
def test_a_time_that_is_not_modelled_is_no_number(gpu, precision, tmp_path, capsys) -> None:
    scaling = "blockwise" if precision == "auto" else precision
    line, page = UNTIMED_LINE.format(scaling, gpu), tmp_path / "plan.html"
    options = [*MODEL, "--gpu", gpu, "--precision", precision]
    assert main(["plan", *options, *DEGREES, "--html", str(page)]) == 0
    text, html = capsys.readouterr().out, page.read_text()
    assert text.splitlines()[-1] == line and "pipeline rank" in text
    assert line in html and html.count("<svg") == 1  # of memory
    for number in ("tokens/s", "s a step", " ms"):
        assert number not in text and number not in html
    assert main(["plan", *options, *DEGREES, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["time_refusal"] == line and all(rank["peak"] > 0 for rank in found["ranks"])
    names = ("seconds", "tokens_per_second", "parts", "wall", "next")
    assert [found[name] for name in names] == [None] * 5
    timeline = ["--timeline", str(tmp_path / "timeline.png")]
    for more in ([*DEGREES, *timeline], [], ["--explain", "ep=2"]):  # no folding is ranked
        assert main(["plan", *options, *more]) == 1
        out, err = capsys.readouterr()
        assert line in err and out == ""


def test_a_dry_run_has_no_time_that_is_not_modelled(tmp_path, capsys) -> None:
    command = ["dry-run", *MODEL, "--precision", "mxfp8", "--ep", "2"]
    assert main([*command, "--gpu", "h200-141"]) == 0
    out = capsys.readouterr().out
    line = UNTIMED_LINE.format("mxfp8", "h200-141")
    assert line in out.splitlines() and "ms a step" not in out
    file = tmp_path / "gpu.toml"
    file.write_text('like = "h200-141"')
    assert main([*command, "--gpu-spec", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["time_refusal"] == UNTIMED_LINE.format("mxfp8", "this GPU")
    assert found["seconds"] is None and found["peak"] > 0
    assert all(row[3] is None for row in found["works"].values())


@pytest.mark.parametrize(("precision", "dtype"), [("mxfp8", "float8_e4m3fn"), ("nvfp4", "float4")])
def test_blackwell_formats_have_the_time_of_their_tensor_cores(precision: str, dtype: str) -> None:
    """A dry run for a Blackwell GPU has packed operands and no product of their emulation."""
    run = TrainingRun(
        model=preset("tiny-deepseek-v3"),
        num_gpus=2,
        seq_len=128,
        parallel=ParallelConfig(ep=2),
        precision=Precision.of(precision),
        has_block_scales=True,
    )
    works = [launch.work for launch in dry_run(run).queued if "block_scaled" in launch.work.name]
    assert len({work.name for work in works}) >= 2
    assert all(work.dtype.startswith(dtype) and work.flops > 0 for work in works)
    emulated = dry_run(replace(run, has_block_scales=False)).queued
    assert not any("block_scaled" in launch.work.name for launch in emulated)
    large = max(works, key=lambda work: work.flops)
    large = replace(large, flops=large.flops * 10**6)
    slow, fast = (CostTable.of(gpu).seconds(large) for gpu in ("b200-180", "gb200-186"))
    assert slow > fast
    if precision == "nvfp4":
        with pytest.raises(ValueError, match="it has no FP4"):
            CostTable.of("h200-141").seconds(large)


def test_the_time_of_a_part_in_mxfp8_is_refused() -> None:
    """A recipe of one layer alone counts; bf16 and blockwise FP8 on Hopper have a time."""
    first = Precision(recipe=Recipe(), overrides=(("model.layers.0.*", Recipe(scaling="mxfp8")),))
    run = TrainingRun(model=preset("tiny"), num_gpus=2, seq_len=64, precision=first)
    table, request = CostTable.of("h100-80"), SearchRequest(model=run.model, num_gpus=2, seq_len=64)
    for call in (lambda: plan_time(run, table), lambda: time_step(dry_run(run), table)):
        with pytest.raises(NotImplementedError, match="not modelled for mxfp8 on h100-80"):
            call()
    with pytest.raises(NotImplementedError, match="cannot be ranked"):
        search(replace(request, precision=first))
    assert find_time_refusal(Precision.of("blockwise"), "h100-80") is None
    assert find_time_refusal(None, "gb200-186") is None
    assert find_time_refusal(first, "gb200-186") == UNTIMED_LINE.format("blockwise", "gb200-186")
    assert find_time_refusal(Precision.of("nvfp4"), "b200-180") is None


@pytest.mark.parametrize("option", ["png", "timeline", "html", "write"])
def test_a_missing_directory_of_an_output_is_one_line(option: str, tmp_path, capsys) -> None:
    path = tmp_path / "none" / "file"
    assert (
        main(["plan", "--preset", "tiny", "--gpus", "1", *DEGREES, f"--{option}", str(path)]) == 1
    )
    assert (
        f"--{option} ({path}) must be in an existing directory: create" in capsys.readouterr().err
    )
