"""Writes README.md and benchmarks.png of benchmarks/results from the committed records.

    python -m benchmarks.report

The same records always give the same text. The plot contains a digest of its data, because its
bytes also depend on matplotlib and its fonts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.gate import ROOT
from benchmarks.memory_page import write_tables
from benchmarks.records import RESULTS, find_latest, load
from benchmarks.shapes import ROUTINGS, SHAPES, SKEW, SKEW_ROOM

PAGE = RESULTS / "README.md"
PLOT = RESULTS / "benchmarks.png"
Record = dict[str, Any]

HEAD = f"""# Benchmarks

Written by `make bench-docs` from the records in `benchmarks/results/`; edit neither table nor plot.

    pytest benchmarks                          # on a GPU: all shapes, rows appended to the records
    pytest benchmarks --shape dsv3-32e --backend triton --quick
    torchrun --nproc-per-node 8 -m benchmarks.bench_dispatch --out benchmarks/results --ep 8 4 2
    make bench-docs                            # this page, from the records

A benchmark gives no number unless the tests of its op are green on the same machine: the first run
also runs them, and remembers green ones until a file changes. Records go elsewhere with
`--results DIR` or `MOECORE_RESULTS`; a host without git names the commit in `MOECORE_COMMIT`.
A tree with uncommitted changes has no records: with `MOECORE_TRIALS=DIR` the rows of a trial are
written to DIR.
Without a GPU `pytest benchmarks` is a smoke test of the harness and keeps no record.

How to read the rows:

- Rows are bf16 but for those of FP8, and of one GPU where no number of GPUs is named. `fwd` is a
  training forward, `fwd+bwd` adds gradients of input, weights and router. Times are medians.
  Variants and baselines run in the same rounds, in changing order.
- `two` and `six grouped_mm` are the bare grouped matmuls of a forward, and of forward and backward,
  on the layer's own routing with rows already gathered. The ratio to them is the layer's overhead.
- TFLOP/s count 6 T K D F for a forward and 18 T K D F for both: matrix products alone.
- `saved` is what the forward keeps for backward without parameters. The column beside it is its
  ratio to X and FC1's output, (2D + 4KF) T bytes. `peak` is the most allocated during fwd+bwd above
  weights and input; gradients of the weights are in it.
- `launches` counts kernels of a forward, `syncs` the waits of the host in fwd+bwd.
- Routing: `learned` is a random router on random tokens, `even` deals tokens out in turn, `skewed`
  biases the router until the hottest expert has {SKEW:g} times the mean load, or {SKEW_ROOM} E / K
  times it where that is less. `hottest` is the load that was reached; E / K is the most possible.
- `te` and `transformers` are measured with `learned` alone. `te` is `expert_backend="te"`, whose
  products are Transformer Engine's. Rows before 2026-11-26 had its permutation, too.
- A `transformers` row is the Qwen3-MoE block of transformers with its grouped_mm experts.
"""

FP8_BACKENDS = ("blockwise", "blockwise+weights", "blockwise-wide", "rowwise", "tensorwise")
FP8_BACKENDS += ("tensorwise-e5m2", "te-blockwise", "te-tensorwise")
BACKENDS = ("triton", "torch", "te", "transformers", *FP8_BACKENDS)
MOVES = ("dispatch", "combine")
REMOVED = ("nvlink-experts",)  # docs/findings.md#tokens-that-arrive-while-experts-multiply
SHAPE_HEADER = ("shape", "T", "D", "F", "E", "K")


def make_page(records: list[Record]) -> str:
    """Return the page, from the last record of each (gpu, op, shape, routing, backend)."""
    rows = [[s.name, s.tokens, s.dim, s.hidden_dim, s.num_experts, s.top_k] for s in _gpu_shapes()]
    parts = [HEAD, table(SHAPE_HEADER, rows)]
    current = find_latest(records)
    if not current:
        parts.append("No records yet.\n")
    for gpu in dict.fromkeys(r["gpu"] for r in current):
        here = [r for r in current if r["gpu"] == gpu]
        parts.append(f"## {gpu}\n")
        if _make_bars(here):
            parts.append("![fwd+bwd time over six grouped_mm](benchmarks.png)\n")
        for title, make in SECTIONS:
            text = make(here)
            if text:
                parts.append(f"### {title}\n\n{text}")
        parts.append(_list_runs(here))
    return "\n".join(parts)


def table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a Markdown table; None becomes "-"."""
    header = list(header)
    lines = [header, ["---"] * len(header)]
    lines += [["-" if cell is None else str(cell) for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _gpu_shapes() -> list[Any]:
    return [shape for shape in SHAPES.values() if shape.name != "tiny"]


def _get_sort_key(record: Record) -> list[int]:
    """Return the positions of shape, routing and backend in their lists; unknown ones are last."""
    known = {"shape": list(SHAPES), "routing": list(ROUTINGS), "backend": list(BACKENDS)}
    return [[*v, record[k]].index(record[k]) for k, v in known.items()]


def _find(records: list[Record], **fields: str) -> Record | None:
    return next((r for r in records if all(r.get(k) == v for k, v in fields.items())), None)


def _format_number(value: float | None, form: str, unit: str = "") -> str | None:
    return None if value is None else f"{value:{form}}{unit}"


def _make_layer_table(records: list[Record]) -> str:
    """Return the table of layers in bf16."""
    header = ("shape", "routing", "backend", "fwd ms", "/ two", "fwd+bwd ms (p20-p80)", "/ six")
    header += ("six ms", "TFLOP/s", "saved GiB", "/ least", "peak GiB", "launches", "syncs")
    rows = []
    for both in sorted(filter(_is_bf16_layer, records), key=_get_sort_key):
        names = {k: both[k] for k in ("shape", "routing", "backend")}
        forward = _find(records, op="layer_fwd", date=both["date"], **names) or {}
        rows.append(
            [
                *names.values(),
                _format_number(forward.get("ms"), ".2f"),
                _format_number(forward.get("ratio"), ".3f"),
                f"{both['ms']:.2f} ({both['p20']:.2f}-{both['p80']:.2f})",
                _format_number(both.get("ratio"), ".3f"),
                _format_number(both.get("baseline_ms"), ".2f"),
                _format_number(both.get("tflops"), ".0f"),
                _format_gib(both.get("saved_bytes")),
                _format_number(both.get("saved_ratio"), ".3f"),
                _format_gib(both.get("peak_bytes")),
                forward.get("launches"),
                both.get("syncs"),
            ]
        )
    return table(header, rows) if rows else ""


def _is_bf16_layer(record: Record) -> bool:
    return record["op"] == "layer_fwd_bwd" and record["backend"] not in FP8_BACKENDS


def _make_fp8_table(records: list[Record]) -> str:
    """Return the table of layers in FP8, with comparisons within one run."""
    header = ("shape", "routing", "FP8", "fwd+bwd ms (p20-p80)", "bf16 ms", "bf16 / FP8")
    header += ("of blockwise", "TFLOP/s", "saved GiB", "/ bf16's", "peak GiB", "launches", "syncs")
    found = [r for r in records if r["op"] == "layer_fwd_bwd" and r["backend"] in FP8_BACKENDS]
    rows = []
    for both in sorted(found, key=_get_sort_key):
        same = {k: both[k] for k in ("op", "shape", "routing", "date")}
        blockwise = _find(records, backend="blockwise", **same) or {}
        names = {k: both[k] for k in ("shape", "routing", "backend", "date")}
        forward = _find(records, op="layer_fwd", **names) or {}
        rows.append(
            [
                *(both[k] for k in ("shape", "routing", "backend")),
                f"{both['ms']:.2f} ({both['p20']:.2f}-{both['p80']:.2f})",
                _format_number(both.get("bf16_ms"), ".2f"),
                _format_number(both.get("speedup"), ".3f"),
                _format_ratio(both["ms"], blockwise.get("ms")),
                _format_number(both.get("tflops"), ".0f"),
                _format_gib(both.get("saved_bytes")),
                _format_number(both.get("saved_over_bf16"), ".3f"),
                _format_gib(both.get("peak_bytes")),
                forward.get("launches"),
                both.get("syncs"),
            ]
        )
    note = (
        "`bf16 ms` is moecore's own bf16 in the same rounds. What each row is:\n"
        "`benchmarks/bench_layer_fp8.py`; `te-blockwise` has rounds of its own.\n\n"
    )
    return note + table(header, rows) if rows else ""


def _format_gib(num_bytes: int | None) -> str | None:
    return _format_number(None if num_bytes is None else num_bytes / 2**30, ".2f")


def _make_skew_table(records: list[Record]) -> str:
    """Return the table of skewed over even routing, if one run measured both."""
    header = ("shape", "backend", "hottest (learned)", "hottest (skewed)", "learned / even")
    header += ("skewed / even", "skewed / even, six grouped_mm alone")
    rows = []
    for even in sorted(filter(_is_bf16_layer, records), key=_get_sort_key):
        if even["routing"] != "even":
            continue
        same = dict(op="layer_fwd_bwd", shape=even["shape"], backend=even["backend"])
        learned, skewed = (
            _find(records, routing=name, date=even["date"], **same) or {}
            for name in ("learned", "skewed")
        )
        rows.append(
            [
                even["shape"],
                even["backend"],
                _format_number(learned.get("hottest"), ".2f"),
                _format_number(skewed.get("hottest"), ".2f"),
                _format_ratio(learned.get("ms"), even["ms"]),
                _format_ratio(skewed.get("ms"), even["ms"]),
                _format_ratio(skewed.get("baseline_ms"), even.get("baseline_ms")),
            ]
        )
    note = "`-`: learned and even routing were not measured in one run.\n\n"
    return note + table(header, rows) if rows else ""


def _format_ratio(a: float | None, b: float | None) -> str | None:
    return f"{a / b:.3f}" if a and b else None


def _make_kernel_table(records: list[Record]) -> str:
    """Return the table of single ops."""
    header = ("op", "shape", "us", "GB/s", "TFLOP/s", "of ceiling", "plain torch us", "speedup")
    header += ("launches",)
    others = ("layer_", "ceiling_", "ep_", *MOVES)
    found = [r for r in records if not r["op"].startswith(others)]
    order = list(dict.fromkeys(r["op"] for r in found))
    rows = [
        [
            r["op"],
            r["shape"],
            f"{r['ms'] * 1e3:.0f}",
            _format_number(r.get("gbps"), ".0f"),
            _format_number(r.get("tflops"), ".0f"),
            _format_number(r.get("fraction"), ".0%"),
            _format_number(r["baseline_ms"] * 1e3 if r.get("baseline_ms") else None, ".0f"),
            _format_ratio(r.get("baseline_ms"), r["ms"]),
            r.get("launches"),
        ]
        for r in sorted(found, key=lambda r: (order.index(r["op"]), _get_sort_key(r)))
    ]
    note = (
        "GB/s count the fewest bytes that the op must move; the formulas are in "
        "`benchmarks/bench_kernels.py`.\n`of ceiling` is the share of a rate of the next table. "
        "That product runs until the GPU is\nat its power limit, so a short kernel on a cool GPU "
        "may exceed it.\n\n"
    )
    return note + table(header, rows) if rows else ""


def _make_parallel_table(records: list[Record]) -> str:
    """Return the table of exchanges between ranks, and of layers with experts on several ranks."""
    header = ("shape", "routing", "op", "backend", "ms (p20-p80)", "GB/s", "TFLOP/s", "against")
    header += ("its ms", "ratio", "saved GiB", "peak GiB", "syncs")
    found = [r for r in records if r["op"] in MOVES or r["op"].startswith("ep_")]
    found = [r for r in found if r["backend"] not in REMOVED]
    order = list(dict.fromkeys(r["shape"] for r in found))
    rows = [
        [
            *(r[k] for k in ("shape", "routing", "op", "backend")),
            f"{r['ms']:.3f} ({r['p20']:.3f}-{r['p80']:.3f})",
            _format_number(r.get("gbps"), ".0f"),
            _format_number(r.get("tflops"), ".0f"),
            r.get("baseline"),
            _format_number(r.get("baseline_ms"), ".3f"),
            _format_number(r.get("ratio"), ".3f"),
            _format_gib(r.get("saved_bytes")),
            _format_gib(r.get("peak_bytes")),
            r.get("syncs"),
        ]
        for r in sorted(found, key=lambda r: order.index(r["shape"]))
    ]
    note = (
        "What each op is: `benchmarks/bench_dispatch.py`. `nvlink-24` has 24 SMs instead of all.\n"
        "dsv3 is T 4096, D 7168, F 2048, E 256, K 8 and qwen3-30b T 16384, D 2048, F 768, E 128,\n"
        "K 8, with T tokens per rank; `-epN` is over N GPUs.\n"
    )
    note += "The slowest rank of each round counts; GB/s are of the rank that moves most.\n\n"
    return note + table(header, rows) if rows else ""


def _make_ceiling_table(records: list[Record]) -> str:
    """Return the table of measured ceilings."""
    rows = [
        [r["op"].removeprefix("ceiling_"), r["shape"], _format_rate(r), r["date"][:10]]
        for r in records
        if r["op"].startswith("ceiling_")
    ]
    return table(("what", "size", "reached", "day"), rows) if rows else ""


def _format_rate(record: Record) -> str:
    if record.get("tflops"):
        return f"{record['tflops']:.0f} TFLOP/s"
    return f"{record['gbps']:.0f} GB/s"


def _list_runs(records: list[Record]) -> str:
    """Return a line per run with a row on the page."""
    lines = ["Measured:\n\n"]
    for date in sorted({r["date"] for r in records}):
        r = _find(records, date=date) or {}
        versions = [f"{k} {r[k]}" for k in ("torch", "triton", "cuda", "driver") if r.get(k)]
        lines.append(
            f"- {date}, commit {r.get('commit')}, {', '.join(versions)}: `{r.get('command')}`\n"
        )
    return "".join(lines)


SECTIONS: tuple[tuple[str, Callable[[list[Record]], str]], ...] = (
    ("Whole layer", _make_layer_table),
    ("Whole layer in FP8", _make_fp8_table),
    ("Skew", _make_skew_table),
    ("Kernels", _make_kernel_table),
    ("Expert parallelism", _make_parallel_table),
    ("Ceilings of the machine", _make_ceiling_table),
)


def _make_bars(records: list[Record]) -> dict[str, dict[str, float]]:
    """Return backend -> shape -> fwd+bwd time over six grouped_mm, with learned routing."""
    found: dict[str, dict[str, float]] = {}
    for r in sorted(records, key=_get_sort_key):
        if _is_bf16_layer(r) and r["routing"] == "learned" and r.get("ratio"):
            found.setdefault(r["backend"], {})[r["shape"]] = r["ratio"]
    return found


def compute_plot_digest(records: list[Record]) -> str:
    """Return a digest of the plot's data."""
    current = find_latest(records)
    shown = {
        gpu: _make_bars([r for r in current if r["gpu"] == gpu]) for gpu in _list_plotted(current)
    }
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def _list_plotted(current: list[Record]) -> list[str]:
    gpus = dict.fromkeys(r["gpu"] for r in current)
    return [gpu for gpu in gpus if _make_bars([r for r in current if r["gpu"] == gpu])]


def draw(records: list[Record], path: Path) -> None:
    """Draw one panel of grouped bars per GPU; no file without data."""
    current = find_latest(records)
    gpus = _list_plotted(current)
    if not gpus:
        path.unlink(missing_ok=True)
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6 * len(gpus)), layout="constrained")
    for panel, gpu in enumerate(gpus):
        axes = figure.add_subplot(len(gpus), 1, panel + 1)
        bars = _make_bars([r for r in current if r["gpu"] == gpu])
        shapes = list(dict.fromkeys(shape for ratios in bars.values() for shape in ratios))
        width = 0.8 / len(bars)
        for i, (backend, ratios) in enumerate(bars.items()):
            places = [shapes.index(shape) + (i - (len(bars) - 1) / 2) * width for shape in ratios]
            drawn = axes.bar(places, list(ratios.values()), width, label=backend)
            axes.bar_label(drawn, fmt="%.2f", fontsize=7)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(shapes)), shapes)
        axes.set_ylabel("fwd+bwd time / six grouped_mm")
        axes.set_title(f"{gpu}, bf16, learned routing (lower is better)")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(
        path, dpi=110, metadata={"Software": None, "Description": compute_plot_digest(records)}
    )


def main() -> None:
    """Write the page and the plot."""
    records = load(RESULTS)
    PAGE.write_text(make_page(records))
    draw(records, PLOT)
    write_tables()
    print(f"{len(records)} records -> {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
