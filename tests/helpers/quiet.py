"""Imported by the servers that ranks fork from: ignores the warnings that pyproject.toml names.

pytest applies its filters to tests of its own process only. A rank would print the warnings of
torch, transformers and peft into the rows of dots. Warnings that pyproject.toml does not name are
printed, and its errors for moecore's own deprecated calls stay those of pytest's process.
"""

import tomllib
import warnings
from pathlib import Path

from _pytest.config import parse_warning_filter


def ignore_named_warnings() -> None:
    """Ignore what [tool.pytest.ini_options] ignores."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    for line in project["tool"]["pytest"]["ini_options"]["filterwarnings"]:
        if line.startswith("ignore:"):
            warnings.filterwarnings(*parse_warning_filter(line, escape=False))


ignore_named_warnings()
