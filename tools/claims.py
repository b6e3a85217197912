"""Print the figures that pages claim, or compare them with their records: `python -m tools.claims`.

`docs/claims.toml` describes its own fields. A figure is a number with a unit of speed, memory or
ratio, in a sentence or in a table, where the unit may end the header of the column or of the row.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
STATUSES = ("measured", "planned", "published", "superseded")
UNITS = ("tokens/s", "TFLOP/s", "GB/s", "TB/s", "GiB", "MiB", "GB", "ms", "s", "%", "times")
NUMBER = r"(?<![\w.,-])(\d[\d,]*(?:\.\d+)?)"
WITH_UNIT = re.compile(rf"{NUMBER}\s?({'|'.join(map(re.escape, UNITS))})(?![\w/])")
UNCLAIMED = re.compile(r"```.*?```|<!-- plans -->.*?<!-- end of plans -->", re.DOTALL)
Figure = tuple[Decimal, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """An entry of `docs/claims.toml`, which describes the fields."""

    id: str
    value: str
    unit: str
    status: str
    record: str | None = None
    row: dict[str, Any] | None = None
    field: str | None = None
    quote: str | None = None
    quote_below: str | None = None
    over: tuple[str, str] | None = None
    per: float = 1
    baseline: str | None = None

    @property
    def figure(self) -> Figure:
        """Return value and unit."""
        return Decimal(self.value), self.unit


def read_claims() -> dict[str, Claim]:
    """Return the claims by id.

    Raises:
        ValueError: for an id that two entries have.
    """
    entries = tomllib.loads((ROOT / "docs" / "claims.toml").read_text())["claim"]
    claims = {entry["id"]: Claim(**entry) for entry in entries}
    if len(claims) < len(entries):
        raise ValueError("docs/claims.toml must have every id once: rename the second one")
    return claims


def read_settings() -> dict[str, set[Figure]]:
    """Return by page the figures that are no measurements: limits, defaults, inputs, arithmetic."""
    pages = tomllib.loads((ROOT / "docs" / "claims.toml").read_text())["settings"]
    return {
        page: {(_decimal(v), u) for v, u in map(str.split, texts)} for page, texts in pages.items()
    }


def find_figures(text: str) -> Iterator[tuple[int, Figure]]:
    """Yield the figures of a page with their line numbers; code blocks and plans have none."""
    text = UNCLAIMED.sub(lambda block: "\n" * block[0].count("\n"), text)
    units: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        is_row = line.startswith("|")
        cells = [cell.strip() for cell in line.strip("|").split("|")] if is_row else [line]
        if not is_row:
            units = []
        elif not units:
            units = [cell.rpartition(", ")[2].removesuffix(" per GPU") for cell in cells]
            continue
        row_unit = cells[0].rpartition(", ")[2] if is_row else ""
        for cell, unit in zip(cells, units or [""], strict=False):
            for value, own_unit in WITH_UNIT.findall(cell):
                yield number, (_decimal(value), "ratio" if own_unit == "times" else own_unit)
            unit = next((name for name in (unit, row_unit) if name in (*UNITS, "ratio")), "")
            if re.fullmatch(NUMBER, cell) and unit:
                yield number, (_decimal(cell), unit)


def record_row(claim: Claim) -> dict[str, Any]:
    """Return the row of a claim's record; a printed record has the commit that its text names."""
    path = RESULTS / str(claim.record)
    if path.suffix != ".jsonl":
        commit = re.search(r"commit ([0-9a-f]{7,}(?:-dirty)?)", path.read_text())
        return {"commit": commit[1] if commit else "unknown", "date": path.name[:10]}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    wanted = claim.row or {}
    return next(row for row in reversed(rows) if all(row.get(k) == v for k, v in wanted.items()))


def recorded_value(claim: Claim, claims: dict[str, Claim]) -> float:
    """Return the number that the record has in place of the claim's value."""
    if claim.over is not None:
        above, below = (recorded_value(claims[name], claims) for name in claim.over)
        return above / below
    if claim.quote is not None:
        text = (RESULTS / str(claim.record)).read_text()
        value = _quoted(text, claim.quote, claim.unit)
        return value / _quoted(text, claim.quote_below, claim.unit) if claim.quote_below else value
    value = float(record_row(claim)[str(claim.field)]) / claim.per
    return 100 * value if claim.unit == "%" else value


def claim_problem(claim: Claim, claims: dict[str, Claim]) -> str | None:
    """Return what is wrong with a claim, or None."""
    if claim.status not in STATUSES:
        return f"status ({claim.status}) must be one of {STATUSES}"
    if claim.baseline is not None and claim.baseline not in claims:
        return f"baseline ({claim.baseline}) must be the id of a claim"
    if claim.over is None and "dirty" in (commit := record_row(claim)["commit"]):
        return f"its record is of a tree with uncommitted changes ({commit}): measure it again"
    if claim.over is None and commit == "unknown":
        return f"record ({claim.record}) must name its commit"
    digits = -int(Decimal(claim.value).as_tuple().exponent)
    value = recorded_value(claim, claims)
    if abs(value - float(claim.value)) > 0.5001 * 10**-digits:
        return f"value ({claim.value}) must be that of its record ({value:.6g})"
    return None


def _quoted(text: str, quote: str, unit: str) -> float:
    """Return the number that ends a quote: its tokens/s in a row that goes on with seconds."""
    if quote not in text:
        raise ValueError(f"quote ({quote}) must occur in its record")
    numbers = re.findall(r"\d[\d,]*(?:\.\d+)?(?:e\+\d+)?", quote)
    return float(numbers[-2 if unit == "tokens/s" else -1].replace(",", ""))


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


if __name__ == "__main__":
    entries = read_claims()
    for entry in entries.values():
        at = record_row(entry) if entry.over is None else {"date": "", "commit": "", "gpu": ""}
        facts = (at.get("gpu", ""), str(at["date"])[:10], str(at["commit"])[:8], entry.record or "")
        line = f"{entry.id:<36} {entry.value:>8} {entry.unit:<9} {entry.status}"
        print(line, *facts, claim_problem(entry, entries) or "", sep="  ")
