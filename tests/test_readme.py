"""The README's code runs as it stands there, in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs() -> None:
    pytest.importorskip("transformers")
    code = README.read_text().split("```python\n")[1].split("```")[0]
    code += "\nassert norm.finite and float(norm) > 0 and len(load) == 2, (norm, load)\n"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
