"""Rows of what `explain` lists: parameters that are alike, folded and in columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

MOST_ROWS = 4  # of one kind
MOST_NAMES = 3  # in one row
HEADER = ("kind", "parameters", "global shape", "on this rank", "placement", "bytes here")
Shape = tuple[int, ...]
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(slots=True, eq=False)
class TableRow:
    """Parameters that are alike, of all layers."""

    kind: str  # attention, router, experts and so on
    shapes: tuple[Shape, Shape]  # global, and of this rank's part
    placement: str  # which mesh dims cut which dims
    names: list[str] = field(default_factory=list)
    number: int = 0
    num_bytes: int = 0

    def cells(self) -> tuple[str, ...]:
        """Return what stands under `HEADER`."""
        names = ", ".join(self.names[:MOST_NAMES]) + ", .." * (len(self.names) > MOST_NAMES)
        global_shape, local_shape = ("x".join(map(str, shape)) or "1" for shape in self.shapes)
        count = f"{self.number} x " if self.number > 1 else ""
        size = shown_bytes(self.num_bytes)
        return self.kind, names, count + global_shape, local_shape, self.placement, size


def shown_axes(axes: Iterable[tuple[str, int | None]]) -> str:
    """Return mesh dims and the dims that they cut, None = replicated, as text."""
    texts = (f"{axis}: {'replicated' if dim is None else f'dim {dim}'}" for axis, dim in axes)
    return ", ".join(texts) or "whole"


def folded(rows: Iterable[TableRow]) -> list[TableRow]:
    """Return the rows, those of one kind together, and the smallest of many shapes as one."""
    of_kind: dict[str, list[TableRow]] = {}
    for row in rows:
        of_kind.setdefault(row.kind, []).append(row)
    table: list[TableRow] = []
    for kind, group in of_kind.items():
        limit = MOST_ROWS if len(group) <= MOST_ROWS else MOST_ROWS - 1
        largest = sorted(group, key=lambda row: -row.num_bytes)[:limit]
        table += [row for row in group if row in largest]
        if rest := [row for row in group if row not in largest]:
            numels = tuple((sum(prod(r.shapes[i]) * r.number for r in rest),) for i in range(2))
            num_bytes = sum(row.num_bytes for row in rest)
            names = [f"{len(rest)} more shapes"]
            table.append(TableRow(kind, (numels[0], numels[1]), "", names, 1, num_bytes))
    return table


def columns(lines: list[tuple[str, ...]]) -> list[str]:
    """Return the cells in columns; the first line is their header."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded_lines = ([cell.ljust(n) for cell, n in zip(line, widths, strict=True)] for line in lines)
    return ["  ".join(line).rstrip() for line in padded_lines]


def shown_count(number: float) -> str:
    """Return a number in thousands, millions and so on."""
    return next(
        (f"{number / size:.3g} {unit}" for unit, size in _SIZES if number >= size), f"{number:.0f}"
    )


def shown_bytes(number: float) -> str:
    """Return a number of bytes in decimal units."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    texts = (f"{number / size:.3g} {unit}" for unit, size in units if abs(number) >= size)
    return next(texts, f"{number:.0f} B")


_SIZES = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))


def printable(text: str) -> str:
    """Return a text with escapes for what a terminal would act on, and for lone surrogates."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def bounded_line(text: str, limit: int = 2000) -> str:
    """Return a text as commands print it: printable, in one line, cut in its middle."""
    line = printable(" ".join(text.split()))  # the fix is at the end of an error
    return line if len(line) <= limit else f"{line[: limit // 2]}...{line[-(limit // 2) :]}"
