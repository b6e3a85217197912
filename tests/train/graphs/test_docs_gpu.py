"""The example of docs/cuda_graphs.md replays a graph, as it stands there, in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "cuda_graphs.md"


@pytest.mark.gpu
def test_the_example_replays_a_graph() -> None:
    (code,) = [part.split("```")[0] for part in PAGE.read_text().split("```python\n")[1:]]
    end = "forward_backward.close()"
    assert code.count(end) == 1
    check = "assert forward_backward._captured and done.norm.finite and loss.isfinite()"
    code = code.replace(end, f"{check}\n{end}")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
