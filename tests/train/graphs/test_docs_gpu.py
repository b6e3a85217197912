"""The CUDA graph example of docs/memory.md replays a graph, in a fresh process."""

import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "memory.md"


@pytest.mark.gpu
def test_the_example_replays_a_graph() -> None:
    section = PAGE.read_text().partition("\n## CUDA graphs\n")[2]
    (code,) = [part.split("```")[0] for part in section.split("```python\n")[1:]]
    end = "forward_backward.close()"
    assert code.count(end) == 1
    check = "assert forward_backward._captured and done.norm.finite and loss.isfinite()"
    code = code.replace(end, f"{check}\n{end}")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
