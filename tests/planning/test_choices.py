import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from moecore.cli import main
from moecore.planning.html import TOO_LARGE

MODEL = ["plan", "--preset", "tiny", "--gpus", "4"]


class Scripts(HTMLParser):
    """The text of a page's scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.feed(page)

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.texts.append(data)


def write_choices(tmp_path: Path, *options: str) -> dict[str, Any]:
    """Return the JSON of the page of a plan."""
    page = tmp_path / "plan.html"
    main([*MODEL, *options, "--html", str(page)])
    data, _ = Scripts(page.read_text()).texts
    choices: dict[str, Any] = json.loads(data)
    return choices


def check_choice(capsys: Any, choice: dict[str, Any], *options: str) -> None:
    """Assert that a choice has the figures of `moecore plan` with these options."""
    capsys.readouterr()
    code = main([*MODEL, *options, "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert choice["ranks"] == [rank["device"] for rank in plan["ranks"]]
    assert choice["fits"] == plan["fits"] == (code == 0)
    for name in ("seconds", "tokens_per_second"):
        assert choice[name] == plan[name] > 0


def test_choices_are_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moecore.planning.html.SCALES", (0.5, 1, 4))
    run = ["--pp", "2", "--micro-batches", "2"]
    data = write_choices(tmp_path, *run, "--seq-len", "1024", "--batch-size", "2")
    choices = data["choices"]
    assert data["given"] == "1024,2,nothing" and len(choices) == 3 * 3 * 4
    check_choice(capsys, choices[data["given"]], *run, "--seq-len", "1024", "--batch-size", "2")
    # Four times the sequence length is more than the preset's longest sequence.
    flags = ["--seq-len", "4096", "--batch-size", "1", "--recompute", "gemm_last"]
    check_choice(capsys, choices["4096,1,norm activation rope"], *run, *flags)
    recompute = "norm activation rope qkv_proj moe"
    flags = ["--seq-len", "512", "--batch-size", "8", "--recompute", *recompute.split()]
    check_choice(capsys, choices[f"512,8,{recompute}"], *run, *flags)


def test_invalid_choices_are_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moecore.planning.html.SCALES", (0.5, 1))
    # cp=2 divides a row into 4 chunks, which 18 tokens are not, and half a row is no row.
    run = ["--cp", "2", "--seq-len", "36", "--recompute", "norm"]
    keys = [key.split(",") for key in write_choices(tmp_path, *run)["choices"]]
    assert {key[0] for key in keys} == {"36"} and {key[1] for key in keys} == {"1"}
    assert keys[0][2] == "nothing" and ["36", "1", "norm"] in keys and len(keys) == 5


def test_choices_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moecore.planning.html.SCALES", (0.5, 1, 2))
    monkeypatch.setattr("moecore.planning.html.OPTIONS", ())  # no set of recomputed parts
    gpu = tmp_path / "gpu.toml"
    run = ["--ep", "2", "--seq-len", "1024", "--batch-size", "2", "--gpu-spec", str(gpu)]
    gpu.write_text('like = "h100-80"\n')
    main([*MODEL, *run, "--json"])
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    gpu.write_text(f'like = "h100-80"\nmemory = {rank["peak"] - 1}\n')
    choices = write_choices(tmp_path, *run)["choices"]
    check_choice(capsys, choices["1024,2,nothing"], *run)
    assert choices["1024,2,nothing"]["line"].endswith(": does not fit")
    assert choices["512,2,nothing"]["fits"] and choices["1024,1,nothing"]["fits"]
    larger = choices["2048,2,nothing"]
    assert (larger["line"], larger["fits"], larger["ranks"]) == (TOO_LARGE, False, [])
    assert main([*MODEL, *run, "--seq-len", "2048"]) == 1
