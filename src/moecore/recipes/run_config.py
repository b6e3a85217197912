"""RUN_DIR/config.toml: the options of a run, with which the run can be started again."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from moecore.io import latest
from moecore.io.checkpoint.ranks import on_first_rank
from moecore.recipes.options import DEGREES, RunConfig
from moecore.recipes.parser import flatten, read_toml
from moecore.recipes.report import CONFIG
from moecore.recipes.resume import checkpoint_dir

# Keys and tables that change no numbers, except that a layout has other sums in another order.
LAYOUT = {*DEGREES, "parallel", "ranks", "layout", "pipeline"}
SAME_NUMBERS = LAYOUT | {
    *("run_dir", "checkpoint_every", "expert_loads_every", "profile", "peak_tflops", "logging"),
    *("plain_host", "workers", "sample_bytes", "prompt", "samples"),
    *("memory", "recompute", "offload", "offload_fraction"),
}


def print_changes(args: RunConfig, toml: str) -> None:
    """Print the options that a run continues with other values. Collective."""
    path = args.run_dir / CONFIG

    def compare() -> None:
        if not path.exists() or latest(checkpoint_dir(args)) is None:
            return
        try:
            lines = changes(read_toml(path, "--run-dir"), tomllib.loads(toml))
        except ValueError as error:
            lines = [f"changes since the last start are unknown: {error}"]
        for line in lines:
            print(line, flush=True)

    on_first_rank(compare)


def save_config(args: RunConfig, toml: str) -> None:
    """Write the options of a run to its directory, as --config reads them. Collective."""
    on_first_rank(lambda: (args.run_dir / CONFIG).write_text(toml, errors="surrogateescape"))


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return a line for each key whose value differs between two config.toml."""
    old, new = (dict(flatten(by_stage(content))) for content in (before, after))
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r} ({effect_of(key)})"
        for key in old | new
        if old.get(key) != new.get(key)
    ]


def by_stage(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file in which each of [[stages]] is a table by its name."""
    stages = {f"stages.{stage['name']}": stage for stage in content.get("stages", [])}
    return {name: value for name, value in content.items() if name != "stages"} | stages


def effect_of(key: str) -> str:
    """Return whether another value of an option changes the numbers of a run."""
    table, _, field = key.rpartition(".")
    name = field.replace("-", "_") if table.startswith("stages.") else table or field
    if name not in SAME_NUMBERS:
        return "changes the numbers"
    note = " if a step has as many rows" if name in LAYOUT else ""
    return f"does not change the numbers{note}"
