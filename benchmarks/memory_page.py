"""The table of docs/memory.md, from the records of `bench_memory`: the last of each model."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.gate import ROOT

PAGE = ROOT / "docs" / "memory.md"
RECORDS = ROOT / "benchmarks" / "results" / "memory"
BEGIN, END = "<!-- records -->\n", "<!-- end of records -->"
MODEL = ("preset", "layers", "num_experts", "dense_layers", "batch_size", "seq_len", "compile")


def write_table() -> None:
    """Put the table between its marks."""
    PAGE.write_text(with_table(PAGE.read_text()))


def with_table(page: str) -> str:
    """Return the page with the table of now."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}{table()}{END}{tail}"


def table() -> str:
    """Return a row per model and option beside what keeps everything."""
    lines = [json.loads(line) for f in sorted(RECORDS.glob("*.jsonl")) for line in f.open()]
    lines = [row for row in lines if row["op"] == "memory"]
    models: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in lines:
        models.setdefault(tuple(row[name] for name in MODEL), {})[row["variant"]] = row
    header = "| model | recompute | kept bytes | of all | time of forward and backward |\n"
    return "\n" + header + "|---|---|---|---|---|\n" + "".join(map(_rows, models.values())) + "\n"


def _rows(of_model: dict[str, dict[str, Any]]) -> str:
    first = of_model["nothing"]
    kept = "kept_bytes_per_token_and_layer"
    experts = f", {first['num_experts']} experts" if first["num_experts"] else ""
    compiled = ", compiled" if first["compile"] else ""
    tokens = first["batch_size"] * first["seq_len"]
    name = f"{first['preset']}, {first['layers']} layers{experts}, {tokens:,} tokens{compiled}"
    return "".join(
        f"| {name} | {variant} | {row[kept]:,.0f} | {row[kept] / first[kept]:.3f} "
        f"| {row['ms'] / first['ms']:.3f} |\n"
        for variant, row in of_model.items()
    )


if __name__ == "__main__":
    write_table()
