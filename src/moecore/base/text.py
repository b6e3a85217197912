"""Text for users: tables, numbers with units, error lines, and the parameter table of `explain`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

MAX_ROWS = 4  # of one kind
MAX_NAMES = 3  # in one row
HEADER = ("kind", "parameters", "global shape", "on this rank", "placement", "bytes here")
Shape = tuple[int, ...]
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(slots=True, eq=False)
class TableRow:
    """A row of the parameter table: number of parameters of equal kind, shapes and placement."""

    kind: str  # attention, router, experts and so on
    shapes: tuple[Shape, Shape]  # global shape, and shape of this rank's shard
    placement: str  # for each mesh axis the dim that it shards
    names: list[str] = field(default_factory=list)
    number: int = 0
    num_bytes: int = 0

    def cells(self) -> tuple[str, ...]:
        """Return the text of each column of `HEADER`."""
        names = ", ".join(self.names[:MAX_NAMES]) + ", .." * (len(self.names) > MAX_NAMES)
        global_shape, local_shape = ("x".join(map(str, shape)) or "1" for shape in self.shapes)
        count = f"{self.number} x " if self.number > 1 else ""
        size = format_bytes(self.num_bytes)
        return self.kind, names, count + global_shape, local_shape, self.placement, size


def format_axes(axes: Iterable[tuple[str, int | None]]) -> str:
    """Return "ep: dim 0, tp: replicated" for (mesh axis, dim or None) pairs; "whole" if no axes."""
    texts = (f"{axis}: {'replicated' if dim is None else f'dim {dim}'}" for axis, dim in axes)
    return ", ".join(texts) or "whole"


def merge_table_rows(rows: Iterable[TableRow]) -> list[TableRow]:
    """Return at most `MAX_ROWS` table rows per kind; the smallest rows of a kind are merged."""
    of_kind: dict[str, list[TableRow]] = {}
    for row in rows:
        of_kind.setdefault(row.kind, []).append(row)
    table: list[TableRow] = []
    for kind, group in of_kind.items():
        limit = MAX_ROWS if len(group) <= MAX_ROWS else MAX_ROWS - 1
        largest = sorted(group, key=lambda row: -row.num_bytes)[:limit]
        table += [row for row in group if row in largest]
        if rest := [row for row in group if row not in largest]:
            numels = tuple((sum(prod(r.shapes[i]) * r.number for r in rest),) for i in range(2))
            num_bytes = sum(row.num_bytes for row in rest)
            names = [f"{len(rest)} more shapes"]
            table.append(TableRow(kind, (numels[0], numels[1]), "", names, 1, num_bytes))
    return table


def format_columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Return each line's cells as one string, padded so that the columns align."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded_lines = ([cell.ljust(n) for cell, n in zip(line, widths, strict=True)] for line in rows)
    return ["  ".join(line).rstrip() for line in padded_lines]


def format_ranges(numbers: Sequence[int], joiner: str) -> str:
    """Return ascending numbers as text, such as "0, 2-5" if `joiner` is "-"."""
    starts = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    ends = [n for i, n in enumerate(numbers) if i + 1 == len(numbers) or numbers[i + 1] != n + 1]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(a) if a == b else f"{a}{joiner}{b}" for a, b in pairs)


def format_count(number: float) -> str:
    """Return a number with the suffix k, M, B or T, such as "1.23 M"."""
    return _format_number(number, (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)), "")


def format_bytes(number: float) -> str:
    """Return a number of bytes in decimal units, such as "1.23 GB"."""
    return _format_number(number, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)), " B")


def _format_number(number: float, units: Iterable[tuple[str, float]], suffix: str) -> str:
    """Return a number in the first of `units`, (name, size), that is not larger than the number."""
    texts = (f"{number / size:.3g} {unit}" for unit, size in units if abs(number) >= size)
    return next(texts, f"{number:.0f}{suffix}")


def escape_unprintable(text: str) -> str:
    """Return a text in which control characters and lone surrogates are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def format_error_line(text: str, max_chars: int = 2000) -> str:
    """Return a text as one printable line; above `max_chars`, "..." replaces its middle."""
    line = escape_unprintable(" ".join(text.split()))  # the fix is at the end of an error
    half = max_chars // 2
    return line if len(line) <= max_chars else f"{line[:half]}...{line[-half:]}"
