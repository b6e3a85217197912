"""Tables of benchmarks/results/memory/README.md, from the last record of each variant."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.bench_memory import OPTIONS
from benchmarks.gate import ROOT

RECORDS = ROOT / "benchmarks" / "results" / "memory"
PAGE = RECORDS / "README.md"
MODEL = ("preset", "layers", "num_experts", "dense_layers", "batch_size", "seq_len", "compile")
STEP = ("preset", "layers", "batch_size", "seq_len", "micro_batches")
Row = dict[str, Any]


def write_tables() -> None:
    """Write the tables between their markers."""
    PAGE.write_text(fill_tables(PAGE.read_text()))


def fill_tables(page: str) -> str:
    """Return the page with current tables."""
    for name, table in TABLES.items():
        begin, end = f"<!-- records: {name} -->\n", "<!-- end of records -->"
        head, found, rest = page.partition(begin)
        if not found:
            raise ValueError(f"{PAGE.name} must have the mark {begin.strip()!r}: add it")
        _, _, tail = rest.partition(end)
        page = f"{head}{begin}\n{table()}\n{end}{tail}"
    return page


def recompute_table() -> str:
    """Return a row per model and option, relative to a run without recomputation."""
    header = ("model", "recompute", "saved bytes", "relative", "relative time")
    models = _find_last(MODEL, ("memory",))
    return _markdown(header, (row for model in models for row in _format_model(model)))


def offload_table() -> str:
    """Return time and memory of a step by the offloaded share of saved bytes."""
    header = ("share of saved bytes offloaded", "GB", "forward and backward", "step")
    (found,) = _find_last(("preset", "layers", "batch_size", "seq_len"), ("offload_fwd_bwd",))
    (steps,) = _find_last(("preset", "layers", "batch_size", "seq_len"), ("offload_step",))
    away = {row["out_bytes"]: row for row in found.values()}
    rows = (
        (
            f"{row['out_bytes'] / row['kept_bytes']:.1%}",
            f"{row['out_bytes'] / 1e9:.2f}",
            f"{row['ratio']:.3f}",
            f"{steps[name]['ratio']:.3f}",
        )
        for name, row in sorted(found.items(), key=lambda item: item[1]["out_bytes"])
        if away[row["out_bytes"]] is row
    )
    return _markdown(header, rows)


def state_table() -> str:
    """Return time and memory of a step with state or optimizer steps on the host."""
    header = ("tokens per step", "state", "step, s", "relative", "added, s", "peak, GiB")
    names = {"away": "`StateOffload`, 16 GB", "host": "`HostAdamW`, half"}
    rows = []
    for model in _find_last(STEP, ("state_offload",)):
        plain = model["plain"]
        tokens = plain["batch_size"] * plain["seq_len"] * plain["micro_batches"]
        shape = f"{tokens:,} in {plain['micro_batches']}"
        rows += [
            (
                shape,
                names.get(name, name),
                f"{row['step_ms'] / 1e3:.2f}",
                f"{row['step_ms'] / plain['step_ms']:.3f}",
                f"{(row['step_ms'] - plain['step_ms']) / 1e3:.2f}",
                f"{row['peak_gib']:.1f}",
            )
            for name, row in model.items()
            if name in ("plain", *names)
        ]
    return _markdown(header, rows)


def fit_table() -> str:
    """Return the number of layers that fit, by options for state and activations."""
    header = ("run", "layers", "relative")
    (found,) = _find_last(("preset", "batch_size", "seq_len"), ("fit",))
    plain = found["plain"]["layers"]
    return _markdown(
        header,
        ((name, str(r["layers"]), f"{r['layers'] / plain:.2f}") for name, r in found.items()),
    )


TABLES: dict[str, Callable[[], str]] = {
    "recompute": recompute_table,
    "offload": offload_table,
    "state": state_table,
    "fit": fit_table,
}


def _find_last(keys: tuple[str, ...], ops: tuple[str, ...]) -> list[dict[str, Row]]:
    """Return the last record of each variant, grouped by `keys`."""
    lines = [json.loads(line) for f in sorted(RECORDS.glob("*.jsonl")) for line in f.open()]
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in lines:
        if row["op"] in ops:
            found.setdefault(tuple(row[name] for name in keys), {})[row["variant"]] = row
    return list(found.values())


def _markdown(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return (
        "".join(f"| {' | '.join(line)} |\n" for line in lines)
        .replace("| --- ", "|---")
        .replace("--- |", "---|")
    )


def _format_model(of_model: dict[str, Row]) -> Iterable[tuple[str, ...]]:
    """Yield the cells of a model's rows, relative to its row without recomputation."""
    first = of_model["nothing"]
    kept = "kept_bytes_per_token_and_layer"
    experts = f", {first['num_experts']} experts" if first["num_experts"] else ""
    compiled = ", compiled" if first["compile"] else ""
    tokens = first["batch_size"] * first["seq_len"]
    name = f"{first['preset']}, {first['layers']} layers{experts}, {tokens:,} tokens{compiled}"
    for variant, row in of_model.items():
        if variant not in OPTIONS:  # of an option that is gone
            continue
        share, time = row[kept] / first[kept], row["ms"] / first["ms"]
        yield name, variant, f"{row[kept]:,.0f}", f"{share:.3f}", f"{time:.3f}"
        name = ""  # only the first row names the model


if __name__ == "__main__":
    write_tables()
