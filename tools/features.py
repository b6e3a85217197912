"""Write the map of features into docs/from_megatron.md: `python -m tools.features`."""

from __future__ import annotations

import dataclasses
import importlib
import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "from_megatron.md"
BEGIN = (
    "## Features and their tests\n\nNames begin with `moecore.`. Records are measurements or test "
    "runs on a GPU.\n\n"
)


def read_features() -> dict[str, Any]:
    """Return the tables of docs/features.toml, which describes its fields."""
    return tomllib.loads((DOCS / "features.toml").read_text())


def find_name(name: str) -> object:
    """Return the object with a dotted name: a module, its attributes, or a field of a dataclass.

    Raises:
        ImportError, AttributeError: for a name that does not exist.
    """
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        fields = dataclasses.fields(found) if dataclasses.is_dataclass(found) else ()
        named = next((field for field in fields if field.name == part), None)
        if named is None and not hasattr(found, part):
            named = importlib.import_module(".".join(parts[:i]))  # type: ignore[assignment]
        found = getattr(found, part) if named is None else named
    return found


def make_page(features: dict[str, Any]) -> str:
    """Return docs/from_megatron.md with the map as its last section."""
    lines = [f"- **{key}**: {text}" for key, text in features["sources"].items()]
    lines += ["", "| source | feature | option or function | test, record |", "|---" * 4 + "|"]
    for row in features["feature"]:
        names = ", ".join(f"`{name.removeprefix('moecore.')}`" for name in row["option"])
        test = f"[{Path(row['test']).stem}](../tests/{row['test']})"
        path = row["record"]
        record = f", [{path.split('/')[0][:10]}](../benchmarks/results/{path})" if path else ""
        lines.append(f"| {row['source']} | {row['asks']} | {names} | {test}{record} |")
    lines += ["", "These features were decided against. Each link has the reason:", ""]
    lines += [
        f"- [{row['asks']}]({row['reason']}) ({row['source']})" for row in features["missing"]
    ]
    return PAGE.read_text().partition(BEGIN)[0] + BEGIN + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(make_page(read_features()))
