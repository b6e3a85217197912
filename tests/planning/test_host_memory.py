"""The table of docs/quantised_base.md for experts in host memory has the plans of its command."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks.hf_configs import make_hf_config

from moecore.cli import main

pytest.importorskip("peft", minversion="0.21", reason="plans have its adapters")
PAGE = (Path(__file__).parents[2] / "docs" / "quantised_base.md").read_text()
(COMMAND,) = re.findall(r"^moecore (plan --config DIR [^`]*--precision mxfp4[^`]*)$", PAGE, re.M)
ROWS = re.findall(r"^\| (mxfp4|nf4) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.M)
HOST = 128e9  # bytes


@pytest.mark.parametrize(("kind", "peak", "host", "seconds"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_the_plan_of_the_command(
    kind: str, peak: str, host: str, seconds: str, tmp_path: Path, capsys: Any
) -> None:
    config = make_hf_config("qwen3-235b-a22b").to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = COMMAND.replace("\\\n", " ").replace("DIR", str(tmp_path)).replace("mxfp4", kind)
    assert main([*command.split(), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (rank,) = plan["ranks"]
    assert rank["peak"] / 1e9 == pytest.approx(float(peak), abs=0.06)
    assert list(rank["host"]) == ["frozen experts"]
    pinned = rank["host"]["frozen experts"]
    assert pinned / 1e9 == pytest.approx(float(host), abs=0.06)
    assert plan["seconds"] == pytest.approx(float(seconds), abs=0.006)
    assert plan["wall"] == "pcie"
    assert (pinned <= HOST - 7e9) == (kind == "mxfp4")


def test_the_page_has_both_formats() -> None:
    assert [row[0] for row in ROWS] == ["mxfp4", "nf4"]
