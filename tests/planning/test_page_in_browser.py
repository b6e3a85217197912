"""The page of `moecore plan --html` in headless Chromium: what is on the screen is the plan.

Needs node, and `npm install --prefix tests/planning/browser`: `make test-extras`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moecore.base.tables import shown_bytes
from moecore.cli import main
from moecore.planning.gpus import GPUS
from moecore.planning.page import LABEL, WIDTH

BROWSER = Path(__file__).with_name("browser")
COMMAND = (
    "plan --preset qwen3-30b-a3b --gpus 16 --pp 2 --ep 8 --micro-batches 4 --schedule interleaved "
    "--chunks 2 --dense-strategy optim --json --html"
)

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (BROWSER / "node_modules").exists(),
    reason="no Chromium: npm install --prefix tests/planning/browser",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page") / "plan.html"


def test_the_screen_has_what_the_plan_has(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*COMMAND.split(), str(page)])
    plan = json.loads(capsys.readouterr().out)
    done = subprocess.run(
        ["node", BROWSER / "page.mjs", page], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["problems"] == [] and found["requests"] == [page.as_uri()]
    assert found["title"] == "qwen3-30b-a3b, 16 h100-80"
    assert (
        found["text"].startswith(found["title"]) and f"the wall is {plan['wall']}" in found["text"]
    )
    assert found["scrollWidth"] == found["clientWidth"]  # nothing is beyond the window
    memory, step, stages = found["pictures"]
    for rank, rects in zip(plan["ranks"], rows(memory), strict=True):
        titles = [rect["title"] for rect in rects]
        assert titles == [f"{k}: {shown_bytes(n)}" for k, n in rank["device"].items() if n > 0]
        assert sum(rect["width"] for rect in rects) == pytest.approx(
            WIDTH * rank["peak"] / max(GPUS["h100-80"].memory, *(r["peak"] for r in plan["ranks"])),
            abs=1,
        )
        for one, other in pairwise(rects):
            assert one["x"] + one["width"] == pytest.approx(other["x"], abs=0.1)
    (rects,) = rows(step)
    assert sum(rect["width"] for rect in rects) == pytest.approx(WIDTH, abs=0.5)
    # Four micro-batches forward and backward through two chunks on each rank.
    assert [len(rects) for rects in rows(stages)] == [16, 16]
    for picture in found["pictures"]:
        for label in picture["texts"]:
            assert label["width"] < LABEL and picture["y"] <= label["y"] + label["height"] / 2
        for rect in picture["rects"]:
            right = rect["x"] + rect["width"]
            assert (
                picture["x"] + LABEL <= rect["x"] and right <= picture["x"] + picture["width"] + 0.1
            )
            assert rect["color"] not in ("rgb(0, 0, 0)", "rgb(255, 255, 255)")


def rows(picture: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the bars of each row, from the top."""
    places = sorted({rect["y"] for rect in picture["rects"]})
    return [[rect for rect in picture["rects"] if rect["y"] == y] for y in places]
