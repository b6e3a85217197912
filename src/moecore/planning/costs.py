"""CostTable: how long one operation takes on a GPU, from operations that were measured.

    seconds(work) = launch + roofline(work) / efficiency(work)

Of an exchange beside products of tp ranks these seconds count by the share that is exposed.
The roofline is the longest of FLOP, bytes of memory and bytes of each link over the maker's rates.
The efficiency is that of measured operations of the same name (else of those that stand for its
kind), at sizes near by: weighted by the inverse square of the distance between logarithms of what
matters of a shape, so a measured operation takes what it took. A GPU without measurements has the
efficiencies of one that has some, and its own maker's rates.

| kind | what matters of a shape |
|---|---|
| product | M, N, K |
| grouped product | rows per expert, N, K |
| attention | B H, T, d, v |
| rows, copy | bytes |
| collective | ranks, bytes |
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from moecore.base.fields import (
    Bound,
    CheckedRecord,
    CountOrZero,
    Rules,
    check_arguments,
    quote,
)
from moecore.base.options.names import GpuName
from moecore.planning.gpus import Gpu, gpu_of, read_bytes
from moecore.planning.record import ALL_TO_ALL, SLICES, Kind, Work

KINDS = get_args(Kind)
# Numbers outside of these bounds are no measurements, and would make a step's seconds 0 or inf.
Share = Annotated[float, Bound(">=", 1e-6), Bound("<=", 1)]
Seconds = Annotated[float, Bound(">", 0), Bound("<=", 1e6)]
MAX_TABLE_BYTES = 10**7
ShareOrZero = Annotated[float, Bound(">=", 0), Bound("<=", 1)]
Wall = Literal["launch", "compute", "memory", "nvlink", "network", "pcie"]
SHIPPED = "h200"  # the table in tables/
BACKWARD = re.compile("backward|bwd")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point(CheckedRecord):
    """An operation that was measured."""

    work: Work
    seconds: Seconds
    commit: str = ""
    date: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exposed(CheckedRecord):
    """What products do not hide of exchanges that run beside them, as it was measured.

    Attributes:
        share: of the seconds of such exchanges in turn.
        gpu: where it was measured.
        record: the file under benchmarks/results.
    """

    share: ShareOrZero
    gpu: GpuName
    record: str


@dataclass(frozen=True, kw_only=True)
class CostTable(CheckedRecord):
    """What operations take on a kind of GPU.

    Attributes:
        gpu: whose seconds these are.
        measured_on: where the points were measured.
        points_from: where, as text.
        launch_seconds: of any operation, besides what it computes and moves.
        host_seconds: that the host takes to queue one, with the Python code around it.
        points: what was measured.
        stands_for: by kind, the name of points that operations without points of their own take.
        efficiency: by kind, and of "network": that of operations without any point.
        network_seconds: of a collective between nodes, besides its bytes.
        pairs_hide: the share of exchanges between nodes that the computation of a forward beside a
            backward hides, in stages that run "overlapped" or "dualpipe-v". Of exchanges within a
            node none is counted: dispatcher "nvlink" has them, which gives pairs no turn.
        slices: what of exchanges beside products of tp ranks is exposed; None = not measured, and
            they count whole.
        assumed: what of this was not measured, in sentences.
    """

    gpu: GpuName | Gpu
    measured_on: GpuName
    points_from: str
    launch_seconds: Seconds
    host_seconds: Seconds
    points: tuple[Point, ...]
    stands_for: Mapping[str, str]
    efficiency: Mapping[str, Share]
    network_seconds: Seconds
    pairs_hide: ShareOrZero = 0.93
    slices: Exposed | None = None
    assumed: tuple[str, ...] = ()

    def _rules(self) -> Rules:
        missing = [kind for kind in (*KINDS, "network") if kind not in self.efficiency]
        if missing:
            yield "efficiency", f"have {', '.join(map(repr, missing))}: add a share for each"
        for point in self.points:
            if point.seconds <= self.launch_seconds or not point.work.num_bytes:
                yield (
                    "points",
                    f"take longer than a launch and move bytes, not {quote(point)}: drop",
                )

    @classmethod
    def of(cls, gpu: GpuName | Gpu) -> CostTable:
        """Return the table that moecore ships, for a GPU that `moecore plan` knows, or your own."""
        check_arguments(CostTable.of, locals())
        return _shipped().on(gpu)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> CostTable:
        """Return the table of a file that `write` or `moecore measure` has written."""
        check_arguments(CostTable.read, locals())
        name = f"table ({quote(os.fspath(path))})"
        text = read_bytes(path, name, MAX_TABLE_BYTES, "`moecore measure` writes one")
        return _parsed(text, os.fspath(path))

    def on(self, gpu: GpuName | Gpu) -> CostTable:
        """Return this table for another GPU: the same efficiencies of its maker's rates."""
        check_arguments(CostTable.on, locals())
        return replace(self, gpu=gpu)

    @property
    def source(self) -> str:
        """Return where the seconds come from."""
        if self.gpu == self.measured_on:
            return self.points_from
        return f"{self.points_from}, its efficiencies with the maker's rates of {self.gpu}"

    def extended(self, points: Sequence[Point], source: str) -> CostTable:
        """Return a table with points measured on its GPU, in place of those so named.

        Args:
            points: what was measured.
            source: where, as text.
        """
        check_arguments(CostTable.extended, locals())
        names = {point.work.name for point in points}
        has_fp8 = gpu_of(self.gpu).fp8_flops is not None
        rescaled_points = [
            replace(point, seconds=self.seconds(point.work))
            for point in self.points
            if point.work.name not in names
            and (has_fp8 or not point.work.dtype.startswith("float8"))
        ]
        if isinstance(self.gpu, Gpu):
            raise ValueError("gpu (a record) must be a name of a table: measure on one of these")
        return replace(
            self,
            measured_on=self.gpu,
            points=(*points, *rescaled_points),
            points_from=f"{source}; what it does not have: {self.source}",
            launch_seconds=min(self.launch_seconds, *(point.seconds / 2 for point in points)),
        )

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the table as JSON, a line per point."""
        check_arguments(CostTable.write, locals())
        Path(path).write_text(self.text())

    def text(self) -> str:
        """Return the table as JSON, a line per point."""
        fields = asdict(self)
        points = [json.dumps(point) for point in fields.pop("points")]
        head = json.dumps(fields, indent=1).removesuffix("\n}")
        return f'{head},\n "points": [\n  ' + ",\n  ".join(points) + "\n ]\n}\n"

    def seconds(self, work: Work, node_ranks: CountOrZero = 0) -> float:
        """Return how long an operation takes.

        Args:
            work: the operation.
            node_ranks: of a collective: how many of its ranks one domain has; 0 = as many as fit.

        Raises:
            ValueError: for FP8 on a GPU without, and ranks that a domain cannot have.
        """
        check_arguments(CostTable.seconds, locals())
        launch, rates = self._parts(work, node_ranks)
        return launch + max(rates.values())

    def wall(self, work: Work, node_ranks: CountOrZero = 0) -> Wall:
        """Return what an operation's time is for the most part: which rate must grow."""
        check_arguments(CostTable.wall, locals())
        launch, rates = self._parts(work, node_ranks)
        longest = max(rates, key=lambda wall: rates[wall])
        return longest if rates[longest] > launch else "launch"

    def _parts(self, work: Work, node_ranks: int) -> tuple[float, dict[Wall, float]]:
        """Return seconds that depend on nothing, and those of what is computed and moved."""
        rates = self._roofline(work, self.gpu, _in_node(work, node_ranks, self.gpu))
        reached, launch = self._efficiency(work), self.launch_seconds
        if "network" in rates:
            launch += self.network_seconds
        shares = {"network": self.efficiency["network"]}
        exposed = 1.0 if self.slices is None or work.name not in SLICES else self.slices.share
        seconds = {wall: exposed * took / shares.get(wall, reached) for wall, took in rates.items()}
        return exposed * launch, seconds

    def _roofline(self, work: Work, name: GpuName | Gpu, inside: int) -> dict[Wall, float]:
        """Return the seconds that each of the maker's rates alone would take."""
        gpu = gpu_of(name)
        if work.kind == "copy":
            return {"pcie": work.num_bytes / gpu.pcie}
        if work.kind == "collective":
            return _links(work, inside, gpu.nvlink, gpu.network)
        peak = gpu.fp32_flops if work.dtype in ("float32", "float64") else gpu.bf16_flops
        if work.dtype.startswith("float8") and work.flops:
            if gpu.fp8_flops is None:
                raise ValueError(
                    f"dtype ({work.dtype}) must be of 16 bits on {name}: it has no FP8"
                )
            peak = gpu.fp8_flops
        return {"compute": work.flops / peak, "memory": work.num_bytes / gpu.memory_bandwidth}

    def _efficiency(self, work: Work) -> float:
        """Return the share of the roofline that operations like this one reach."""
        key, place = (work.kind, work.name, work.dtype), _place(work)
        if key not in self._efficiencies:
            self._efficiencies[key] = [(_place(p.work), self._reached(p)) for p in self._like(work)]
        near = [(math.dist(place, other), log) for other, log in self._efficiencies[key]]
        if not near:
            return self.efficiency[work.kind]
        if min(near)[0] < 1e-9:
            return math.exp(min(near)[1])
        weights = [distance**-2 for distance, _ in near]
        logs = (weight * log for weight, (_, log) in zip(weights, near, strict=True))
        return math.exp(sum(logs) / sum(weights))

    @cached_property
    def _efficiencies(self) -> dict[tuple[str, str, str], list[tuple[tuple[float, ...], float]]]:
        """Of kinds, names and dtypes: places of the points like them, and what these reached."""
        return {}

    def _reached(self, point: Point) -> float:
        """Return the logarithm of a point's share of the roofline."""
        inside = _in_node(point.work, 0, self.measured_on)
        rates = self._roofline(point.work, self.measured_on, inside)
        return math.log(max(rates.values()) / (point.seconds - self.launch_seconds))

    def _like(self, work: Work) -> list[Point]:
        """Return the points of its name, or of the one that stands for its kind; perhaps none."""
        # A point's name is within the operation's, without case and signs: "sum_rows" is that of
        # "_sum_rows_fwd_kernel". The longest counts, then those of its dtype if there are any.
        kind_points = [point for point in self.points if point.work.kind == work.kind]
        other = self.stands_for.get(work.kind, "")
        backward = "backward" if BACKWARD.search(work.name) else ""
        for name in (work.name, other + backward):
            lengths = {
                len(_plain(p.work.name)) for p in kind_points if _plain(p.work.name) in _plain(name)
            }
            name_points = [
                point
                for point in kind_points
                if _plain(point.work.name) in _plain(name)
                and len(_plain(point.work.name)) == max(lengths)
            ]
            dtype_points = [point for point in name_points if point.work.dtype == work.dtype]
            if name_points:
                return dtype_points or name_points
        return []


@cache
def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _place(work: Work) -> tuple[float, ...]:
    """Return where an operation stands among those of its kind: logarithms of its sizes."""
    sizes: tuple[float, ...] = (work.num_bytes,)
    if work.kind == "product":
        sizes = work.shape
    elif work.kind == "grouped product":
        experts, rows, N, K = work.shape
        sizes = (rows / max(experts, 1), N, K)
    elif work.kind == "attention":
        B, H, T, d, v = work.shape
        sizes = (B * H, T, d, v)
    elif work.kind == "collective":
        sizes = (work.shape[0], work.num_bytes)
    return tuple(math.log(max(size, 1)) for size in sizes)


def _in_node(work: Work, node_ranks: int, gpu: GpuName | Gpu) -> int:
    """Return how many ranks of a collective one domain has."""
    if work.kind != "collective":
        return 0
    ranks, domain = work.shape[0], gpu_of(gpu).domain
    if node_ranks > min(ranks, domain):
        raise ValueError(
            f"node_ranks ({node_ranks}) must be <= the collective's ranks ({ranks}) and "
            f"{domain}: count those of one domain"
        )
    return node_ranks or min(ranks, domain)


def _links(work: Work, inside: int, nvlink: float, network: float) -> dict[Wall, float]:
    """Return the seconds of a collective's bytes on each link."""
    ranks = work.shape[0]
    if inside == ranks:
        return {"nvlink": work.num_bytes / nvlink}
    network_bytes = work.num_bytes * (ranks - inside) / (ranks - 1)
    if ALL_TO_ALL.search(work.name.lower()) or inside == 1:
        return {
            "nvlink": (work.num_bytes - network_bytes) / nvlink,
            "network": network_bytes / network,
        }
    # What all ranks get, or sum, each node but one takes in and passes on, over all its cards.
    return {"nvlink": work.num_bytes / nvlink, "network": network_bytes / (inside * network)}


@cache
def _shipped() -> CostTable:
    file = files("moecore.planning") / "tables" / f"{SHIPPED}.json"
    return _parsed(file.read_bytes(), SHIPPED)


def _parsed(text: bytes, path: str) -> CostTable:
    try:
        fields: dict[str, Any] = json.loads(text)
        fields["points"] = tuple(_points(fields["points"]))
        fields["assumed"] = tuple(fields["assumed"])
        if (slices := fields.get("slices")) is not None:
            fields["slices"] = Exposed(**slices)
        return CostTable(**fields)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"table ({quote(path)}) must be one of `moecore measure`, found {quote(error)}: "
            "measure again"
        ) from error


def _points(points: list[dict[str, Any]]) -> Iterator[Point]:
    for fields in points:
        work = fields["work"]
        yield Point(**fields | {"work": Work(**work | {"shape": tuple(work["shape"])})})
