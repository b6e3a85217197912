"""CostTable: the seconds of an operation on a GPU, interpolated between measured operations.

    seconds(work) = launch + roofline(work) / efficiency(work)

The roofline is the largest of FLOP, memory bytes and bytes of each link, over data-sheet rates. The
efficiency is a weighted mean over measured operations with the same name, or with the name that
stands for their kind. A weight is the inverse square of the distance between the logarithms of the
sizes below, so a measured operation has its measured seconds. A GPU without measurements has its
own data-sheet rates and the efficiencies of the measured GPU.

| kind | sizes |
|---|---|
| product | M, N, K |
| grouped product | rows per expert, N, K |
| attention | B H, T, d, v |
| rows, copy | bytes |
| collective | ranks, bytes |
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from moecore.base.fields import (
    Bound,
    CheckedRecord,
    CountOrZero,
    FieldErrors,
    check_arguments,
    quote,
)
from moecore.base.options.names import GpuName
from moecore.planning.gpus import Gpu, get_gpu, read_file
from moecore.planning.record import ALL_TO_ALL, SLICES, Kind, Work

KINDS = get_args(Kind)
# Numbers outside these bounds are not measurements, and could make a step's seconds 0 or inf.
Share = Annotated[float, Bound(">=", 1e-6), Bound("<=", 1)]
Seconds = Annotated[float, Bound(">", 0), Bound("<=", 1e6)]
MAX_TABLE_BYTES = 10**7
ShareOrZero = Annotated[float, Bound(">=", 0), Bound("<=", 1)]
Limit = Literal["launch", "compute", "memory", "nvlink", "network", "pcie"]
SHIPPED = "h200"  # the file in tables/
BACKWARD = re.compile("backward|bwd")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point(CheckedRecord):
    """A measured operation and its seconds on the device, with moecore's commit and the date."""

    work: Work
    seconds: Seconds
    commit: str = ""
    date: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExposedShare(CheckedRecord):
    """The exposed fraction of tp communication time if matmuls overlap it slice by slice."""

    share: ShareOrZero  # of the seconds of the same exchanges without overlap
    gpu: GpuName  # the measured GPU
    record: str  # the file under benchmarks/results


@dataclass(frozen=True, kw_only=True)
class CostTable(CheckedRecord):
    """A table of measured operations, which interpolates the seconds of any operation on a GPU.

    Attributes:
        gpu: the GPU for which the table returns seconds.
        measured_on: the GPU on which the points were measured.
        points_from: the source of the points, as text.
        launch_seconds: the fixed seconds of every operation on the device.
        host_seconds: the seconds in which the host launches an operation, with its Python code.
        points: the measured operations.
        stands_for: kind -> the name whose points are used if an operation's name has no points.
        efficiency: kind -> the fraction of the data-sheet rate that operations without points
            reach; "network" = collectives between nodes.
        network_seconds: the fixed seconds of a collective between nodes.
        pairs_hide: the fraction of inter-node exchange time that computation hides in schedules
            "overlapped" and "dualpipe-v". Exchanges within a node are not hidden.
        slices: the exposed fraction of tp communication that overlaps with matmuls slice by slice;
            None = not measured, all of it is exposed.
        assumed: sentences about numbers that were not measured.
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
    slices: ExposedShare | None = None
    assumed: tuple[str, ...] = ()

    def _find_field_errors(self) -> FieldErrors:
        missing = [kind for kind in (*KINDS, "network") if kind not in self.efficiency]
        if missing:
            yield "efficiency", f"have {', '.join(map(repr, missing))}: add a share for each"
        for point in self.points:
            if point.seconds <= self.launch_seconds or not point.work.num_bytes:
                rule = f"take longer than a launch and move bytes, not {quote(point)}: drop"
                yield "points", rule

    @classmethod
    def of(cls, gpu: GpuName | Gpu) -> "CostTable":
        """Return moecore's shipped table, measured on H200, with the data-sheet rates of `gpu`."""
        check_arguments(CostTable.of, locals())
        return _read_shipped_table().with_gpu(gpu)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "CostTable":
        """Read a table that `write` or `moecore measure` wrote; ValueError for an invalid file."""
        check_arguments(CostTable.read, locals())
        name = f"table ({quote(os.fspath(path))})"
        text = read_file(path, name, MAX_TABLE_BYTES, "`moecore measure` writes one")
        return _parse_table(text, os.fspath(path))

    def with_gpu(self, gpu: GpuName | Gpu) -> Self:
        """Return a copy with this table's efficiencies and the data-sheet rates of `gpu`."""
        check_arguments(CostTable.with_gpu, locals())
        return replace(self, gpu=gpu)

    @property
    def source(self) -> str:
        """The source of the table's seconds, as text."""
        if self.gpu == self.measured_on:
            return self.points_from
        return f"{self.points_from}, its efficiencies with the maker's rates of {self.gpu}"

    def extend(self, points: Sequence[Point], source: str) -> Self:
        """Return a copy of the table with `points` as additional operations measured on `self.gpu`.

        A new point replaces all points of the table with an equal name. The remaining points get
        the seconds that this table predicts for `self.gpu`. `source` is a text that describes
        `points`. ValueError if the table's GPU is a `Gpu` and not a name.
        """
        check_arguments(CostTable.extend, locals())
        names = {point.work.name for point in points}
        has_fp8 = get_gpu(self.gpu).fp8_flops is not None
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
        """Return the seconds of an operation on the device.

        `node_ranks` is the number of a collective's ranks in one NVLink domain; 0 = the maximum.
        ValueError for FP8 on a GPU without FP8, or for more ranks than a domain has.
        """
        check_arguments(CostTable.seconds, locals())
        launch, rates = self._compute_rate_seconds(work, node_ranks)
        return launch + max(rates.values())

    def find_limiting_rate(self, work: Work, node_ranks: CountOrZero = 0) -> Limit:
        """Return the rate that limits an operation, or "launch" if its fixed time is longer."""
        check_arguments(CostTable.find_limiting_rate, locals())
        launch, rates = self._compute_rate_seconds(work, node_ranks)
        longest = max(rates, key=lambda wall: rates[wall])
        return longest if rates[longest] > launch else "launch"

    def _compute_rate_seconds(
        self, work: Work, node_ranks: int
    ) -> tuple[float, dict[Limit, float]]:
        """Return fixed seconds, and {resource: seconds}: bytes or FLOP over the achieved rate."""
        rates = self._compute_roofline(work, self.gpu, node_ranks)
        reached, launch = self._interpolate_efficiency(work), self.launch_seconds
        if "network" in rates:
            launch += self.network_seconds
        shares = {"network": self.efficiency["network"]}
        exposed = 1.0 if self.slices is None or work.name not in SLICES else self.slices.share
        seconds = {wall: exposed * s / shares.get(wall, reached) for wall, s in rates.items()}
        return exposed * launch, seconds

    def _compute_roofline(
        self, work: Work, gpu: GpuName | Gpu, node_ranks: int
    ) -> dict[Limit, float]:
        """Return {resource: an operation's seconds at the resource's data-sheet rate} for a GPU."""
        rates = get_gpu(gpu)
        if work.kind == "copy":
            return {"pcie": work.num_bytes / rates.pcie}
        if work.kind == "collective":
            return _time_links(work, node_ranks, rates)
        peak: float | None
        peak = rates.fp32_flops if work.dtype in ("float32", "float64") else rates.bf16_flops
        if work.dtype.startswith(("float8", "float4")) and work.flops:
            bits = work.dtype[5]
            peak = rates.fp8_flops if bits == "8" else rates.fp4_flops
            if peak is None:
                raise ValueError(
                    f"dtype ({work.dtype}) must be of 16 bits on {gpu}: it has no FP{bits}"
                )
        return {"compute": work.flops / peak, "memory": work.num_bytes / rates.memory_bandwidth}

    def _interpolate_efficiency(self, work: Work) -> float:
        """Return the interpolated efficiency of an operation: its share of the data-sheet rate."""
        key, sizes = (work.kind, work.name, work.dtype), _compute_log_sizes(work)
        if key not in self._efficiencies:
            pairs = []
            for point in self._find_measured_points(work):
                rates = self._compute_roofline(point.work, self.measured_on, node_ranks=0)
                share = max(rates.values()) / (point.seconds - self.launch_seconds)
                pairs.append((_compute_log_sizes(point.work), math.log(share)))
            self._efficiencies[key] = pairs
        near = [(math.dist(sizes, other), log) for other, log in self._efficiencies[key]]
        if not near:
            return self.efficiency[work.kind]
        if min(near)[0] < 1e-9:
            return math.exp(min(near)[1])
        weights = [distance**-2 for distance, _ in near]
        logs = (weight * log for weight, (_, log) in zip(weights, near, strict=True))
        return math.exp(sum(logs) / sum(weights))

    @cached_property
    def _efficiencies(self) -> dict[tuple[str, str, str], list[tuple[tuple[float, ...], float]]]:
        """The (log sizes, log efficiency) of the points for each (kind, name, dtype)."""
        return {}

    def _find_measured_points(self, work: Work) -> list[Point]:
        """Return an operation's measured points, otherwise the points that stand for its kind."""
        # A point's name is part of the operation's name, without case and signs: "sum_rows" is part
        # of "_sum_rows_fwd_kernel". Points with the longest such name count, and of these points
        # those with the operation's dtype if there are any.
        kind_points = [point for point in self.points if point.work.kind == work.kind]
        other = self.stands_for.get(work.kind, "")
        backward = "backward" if BACKWARD.search(work.name) else ""
        for name in (work.name, other + backward):
            matches = [
                p for p in kind_points if _normalise_name(p.work.name) in _normalise_name(name)
            ]
            longest = max((len(_normalise_name(p.work.name)) for p in matches), default=0)
            name_points = [p for p in matches if len(_normalise_name(p.work.name)) == longest]
            dtype_points = [point for point in name_points if point.work.dtype == work.dtype]
            if name_points:
                return dtype_points or name_points
        return []


@cache
def _normalise_name(name: str) -> str:
    """Return a name in lower case, with its letters and digits only."""
    return re.sub("[^a-z0-9]", "", name.lower())


def _compute_log_sizes(work: Work) -> tuple[float, ...]:
    """Return the logarithms of the sizes that the table in the module docstring names."""
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


def _time_links(work: Work, node_ranks: int, rates: Gpu) -> dict[Limit, float]:
    """Return {link: seconds of a collective} at data-sheet rates; `node_ranks` as in `seconds`."""
    ranks, domain = work.shape[0], rates.domain
    if node_ranks > min(ranks, domain):
        raise ValueError(
            f"node_ranks ({node_ranks}) must be <= the collective's ranks ({ranks}) and "
            f"{domain}: count those of one domain"
        )
    domain_ranks = node_ranks or min(ranks, domain)
    if domain_ranks == ranks:
        return {"nvlink": work.num_bytes / rates.nvlink}
    network_bytes = work.num_bytes * (ranks - domain_ranks) / (ranks - 1)
    if ALL_TO_ALL.search(work.name.lower()) or domain_ranks == 1:
        nvlink_bytes = work.num_bytes - network_bytes
        return {"nvlink": nvlink_bytes / rates.nvlink, "network": network_bytes / rates.network}
    # Each node receives and forwards the result of an all-gather or a sum once, over all its cards.
    return {
        "nvlink": work.num_bytes / rates.nvlink,
        "network": network_bytes / (domain_ranks * rates.network),
    }


@cache
def _read_shipped_table() -> CostTable:
    """Return moecore's cost table, measured on H200 (cached)."""
    file = files("moecore.planning") / "tables" / f"{SHIPPED}.json"
    return _parse_table(file.read_bytes(), SHIPPED)


def _parse_table(text: bytes, path: str) -> CostTable:
    """Return the cost table of JSON `text`; ValueError, which names file `path`, for other text."""
    try:
        fields: dict[str, Any] = json.loads(text)
        for point in fields["points"]:
            point["work"] = Work(**point["work"] | {"shape": tuple(point["work"]["shape"])})
        fields["points"] = tuple(Point(**point) for point in fields["points"])
        fields["assumed"] = tuple(fields["assumed"])
        if (slices := fields.get("slices")) is not None:
            fields["slices"] = ExposedShare(**slices)
        return CostTable(**fields)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"table ({quote(path)}) must be one of `moecore measure`, found {quote(error)}: "
            "measure again"
        ) from error
