"""`moecore doctor`: reports problems of a job's hosts, GPUs and links, one line each.

Every rank collects facts about its host, its GPU and its environment, and measures its links. A
fact that a rank cannot read is reported in `RankFacts.failures`, so that the rank still takes part
in every collective. The facts are all-gathered. `find_problems` reads only these facts.
"""

import os
import platform
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moecore.base import __version__
from moecore.base.fabric import read_nvlink_domain_id
from moecore.base.fields import quote
from moecore.base.rank_checks import gather_objects, get_host_id
from moecore.base.text import escape_unprintable, format_ranges
from moecore.moe.dispatch.peer_memory import find_peer_store_problem
from moecore.parallel.mesh import read_launcher_number, start_process_group

T = TypeVar("T")

PACKAGES = ("torch", "triton", "transformers", "numpy")
PREFIXES = ("NCCL_", "TORCH_", "GLOO_", "CUDA_", "PYTORCH_", "OMP_")
PER_RANK_VARIABLES = ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID")  # may differ
CLOCK_S = 1.0  # allowed difference of clocks in seconds
OPEN_FILES = 4096
SHARED_MEMORY = 1 << 30
DISK = 10 << 30
SLOW = 0.5  # of the median rate
MESSAGE = 16 << 20  # bytes
MAX_ERROR_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """Measurements of one rank, its GPU and its host, in bytes, seconds and bytes per second."""

    host: str  # an id of the running operating system, equal on all ranks of a host
    name: str  # of the host, for messages
    ranks_per_host: int | None  # from the launcher; None = not set
    versions: Mapping[str, str]  # of Python, packages, CUDA, NCCL and the GPU's name
    environment: Mapping[str, str]  # the environment variables of `PREFIXES`
    clock: float  # Unix time after a barrier
    fabric: str | None = None  # the NVLink domain across hosts; None = no such domain
    gpu_memory: tuple[int, int] | None = None  # free and total; None = no GPU
    open_files: int = -1  # a limit, like locked_memory; -1 = unlimited
    locked_memory: int = -1
    shared_memory: int | None = None  # free bytes in /dev/shm; None = it does not exist
    has_checkpoints: bool = False  # whether --checkpoints is given on this rank
    disk: int | None = None  # free bytes in the directory of checkpoints; None = unknown
    sees_checkpoints: bool = True  # whether this rank sees the file that rank 0 has written there
    failures: Sequence[str] = ()  # an error text for each fact that this rank could not read
    # Why GPUs of this host have no access to each other's memory; None = no problem, or no GPU.
    peers: str | None = None
    # Of messages from the previous rank of a ring, by "inside a host" and "between hosts".
    rates: Mapping[str, float] = field(default_factory=dict)


def find_problems(facts: Sequence[RankFacts]) -> list[str]:
    """Return one line of text per problem of a job's hosts; `facts[i]` was measured by rank i."""
    finders = _find_differences, _find_host_problems, _find_rank_problems, _find_link_problems
    return [line for find_lines in finders for line in find_lines(facts)]


def _find_differences(facts: Sequence[RankFacts]) -> Iterator[str]:
    for kind in ("versions", "environment"):
        of_ranks = [getattr(rank_facts, kind) for rank_facts in facts]
        for name in sorted({name for values in of_ranks for name in values}):
            ranks_of = _group_ranks([values.get(name, "not set") for values in of_ranks])
            if len(ranks_of) > 1:
                texts = []
                for value, ranks in ranks_of.items():
                    is_short = len(value) <= 40 and value.isprintable()
                    texts.append(f"{value if is_short else quote(value)} on {_format_ranks(ranks)}")
                yield f"{name} ({', '.join(texts)}) must be the same on all ranks: set one"
    without = [rank for rank, rank_facts in enumerate(facts) if not rank_facts.has_checkpoints]
    if 0 < len(without) < len(facts):
        yield (
            f"--checkpoints (not given on {_format_ranks(without)}) must be given on all ranks: "
            "start every rank with the same command"
        )


def _find_host_problems(facts: Sequence[RankFacts]) -> Iterator[str]:
    for fabric, ranks in _group_ranks([rank_facts.fabric for rank_facts in facts]).items():
        if fabric is not None and ranks[-1] - ranks[0] >= len(ranks):
            yield (
                f"ranks of one NVLink domain ({_format_ranks(ranks)}) must be neighbours, on which "
                "dispatcher 'hierarchical' counts: number hosts by rack"
            )
    ranks_of_hosts = _group_ranks([rank_facts.host for rank_facts in facts]).values()
    if len({len(ranks) for ranks in ranks_of_hosts}) > 1:
        counts = ", ".join(f"{facts[ranks[0]].name}: {len(ranks)}" for ranks in ranks_of_hosts)
        yield f"ranks of a host ({counts}) must be equally many: start as many on each"
    for ranks in ranks_of_hosts:
        yield from _find_single_host_problems([facts[rank] for rank in ranks], ranks, facts[0])


def _find_single_host_problems(
    facts: Sequence[RankFacts], ranks: Sequence[int], rank0_facts: RankFacts
) -> Iterator[str]:
    """Yield an error line per problem of one host; `facts[i]` describes its rank `ranks[i]`."""
    name = facts[0].name
    if list(ranks) != list(range(ranks[0], ranks[0] + len(ranks))):
        yield (
            f"ranks of {name} ({_format_ranks(ranks)}) must be neighbours, on which tp and ep "
            "count: number them by host"
        )
    for number in sorted({*_list_present_values(facts, "ranks_per_host")} - {len(ranks)}):
        yield (
            f"LOCAL_WORLD_SIZE ({number}) of {name} must be its number of ranks ({len(ranks)}): "
            "start them by one torchrun, or pass ranks_per_domain"
        )
    clock_offset = max((rank_facts.clock - rank0_facts.clock for rank_facts in facts), key=abs)
    if abs(clock_offset) > CLOCK_S:
        yield (
            f"clock of {name} ({clock_offset:+.1f} s from that of {rank0_facts.name}) must be "
            f"within {CLOCK_S:g} s: run an NTP client"
        )
    # Ranks of one host may run in different containers, so the smallest number counts.
    memory, disk = (
        min(_list_present_values(facts, field), default=None) for field in ("shared_memory", "disk")
    )
    if memory is not None and memory < SHARED_MEMORY:
        yield (
            f"/dev/shm of {name} ({_format_gib(memory)} free) must have "
            f"{_format_gib(SHARED_MEMORY)}, for NCCL and data loaders: --shm-size of its container"
        )
    if disk is not None and disk < DISK:
        yield (
            f"disk of checkpoints on {name} ({_format_gib(disk)} free) must have "
            f"{_format_gib(DISK)}: remove old ones by moecore checkpoint prune"
        )
    blind = [rank for rank, f in zip(ranks, facts, strict=True) if not f.sees_checkpoints]
    if blind:
        yield (
            f"directory of checkpoints on {name} (of {_format_ranks(blind)}) must be that of rank "
            "0, which all ranks write: give one on shared storage"
        )
    for peers in dict.fromkeys(_list_present_values(facts, "peers")):
        yield f"dispatcher 'nvlink' on {name} {peers}"


def _find_rank_problems(facts: Sequence[RankFacts]) -> Iterator[str]:
    num_hosts = len({rank_facts.host for rank_facts in facts})
    for rank, rank_facts in enumerate(facts):
        for failure in rank_facts.failures:
            yield f"rank {rank} on {rank_facts.name}: {failure}"
        if 0 <= rank_facts.open_files < OPEN_FILES:
            yield (
                f"open files of rank {rank} ({rank_facts.open_files}) must be >= {OPEN_FILES}: "
                f"ulimit -n {16 * OPEN_FILES}"
            )
        has_network = num_hosts > 1 and rank_facts.gpu_memory is not None
        if has_network and rank_facts.locked_memory >= 0:
            yield (
                f"locked memory of rank {rank} ({_format_gib(rank_facts.locked_memory)}) must be "
                "unlimited, for transfers between hosts: ulimit -l unlimited"
            )
        free_bytes, total_bytes = rank_facts.gpu_memory or (0, 0)
        if free_bytes < 0.9 * total_bytes:
            free, total = _format_gib(free_bytes), _format_gib(total_bytes)
            yield (
                f"GPU of rank {rank} ({free} of {total} free on {rank_facts.name}) must be empty: "
                "end what else runs there (nvidia-smi shows it)"
            )
        if rank_facts.environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
            yield (
                f"TORCH_NCCL_ASYNC_ERROR_HANDLING (0) of rank {rank} must be 1, else a rank that "
                "has died is waited for without an end: unset it"
            )


def _find_link_problems(facts: Sequence[RankFacts]) -> Iterator[str]:
    for link in ("inside a host", "between hosts"):
        rates = {rank: f.rates[link] for rank, f in enumerate(facts) if link in f.rates}
        median = statistics.median(rates.values()) if rates else 0.0
        for rank, rate in rates.items():
            if rate < SLOW * median:
                yield (
                    f"messages {link} to rank {rank} on {facts[rank].name} ({rate / 1e9:.2g} GB/s) "
                    f"must be near the median ({median / 1e9:.2g} GB/s): look at its links"
                )


def _group_ranks(rank_values: Sequence[T]) -> dict[T, list[int]]:
    ranks_of: dict[T, list[int]] = {}
    for rank, value in enumerate(rank_values):
        ranks_of.setdefault(value, []).append(rank)
    return ranks_of


def _format_ranks(ranks: Sequence[int]) -> str:
    """Format sorted rank numbers as text, such as "ranks 0-3, 6"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranges(ranks, '-')}"


def _list_present_values(facts: Sequence[RankFacts], field: str) -> list[Any]:
    return [value for row in facts if (value := getattr(row, field)) is not None]


def _format_error(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_ERROR_CHARS] or type(error).__name__


def _format_gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


def run_doctor(args: Any) -> int:
    """Print the problems of this job's hosts; return 1 if any, otherwise 0. Collective."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    rule = f"ranks must find each other within {args.timeout} s"
    with _convert_collective_errors(rule), _discard_stderr_on_error():
        start_process_group(device_type, timedelta(seconds=args.timeout))
    rule = "ranks must all take part until the end"
    try:
        with _convert_collective_errors(rule):
            facts = gather_objects(_collect_facts(device_type, args.checkpoints))
        lines = find_problems(facts)
        if dist.get_rank() == 0:
            for line in lines:
                print(escape_unprintable(line), file=sys.stderr)
            names = ", ".join(dict.fromkeys(rank_facts.name for rank_facts in facts))
            about = ", ".join(f"{name} {value}" for name, value in facts[0].versions.items())
            print(f"{len(facts)} rank(s) on {names}: {about}")
            print(f"{len(lines) or 'no'} problem(s) found")
        with _convert_collective_errors(rule):
            dist.barrier()
    finally:
        dist.destroy_process_group()
    return int(bool(lines))  # equal on all ranks, because torchrun waits for ranks of other hosts


@contextmanager
def _convert_collective_errors(error_prefix: str) -> Iterator[None]:
    """Return a context that raises a collective's error as a ValueError, after `error_prefix`."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        raise ValueError(
            f"{error_prefix}: check that all have started and still run, MASTER_ADDR and ports "
            f"({_format_error(error)})"
        ) from None


@contextmanager
def _discard_stderr_on_error() -> Iterator[None]:
    # c10d logs each failed attempt to connect, and these lines would hide the error's one line.
    # An environment variable sets the level of this log, but only before torch is imported.
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
            sys.stderr.flush()
            file.seek(0)
            os.write(stderr, file.read())
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


class _FactReader:
    """Calls functions that measure this rank, and collects the error texts of failed calls."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def read_fact(
        self,
        fact: str,
        function: Callable[[], T],
        default: T,
        condition: str = "readable by this rank",
    ) -> T:
        """Return function(); if it fails, record the error and return `default`.

        The text of an OSError says that `fact` must be `condition`.
        """
        try:
            return function()
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, OSError) and error.strerror:
                self.failures.append(f"{fact} must be {condition}, which failed: {error.strerror}")
            else:
                self.failures.append(_format_error(error))
            return default


def _collect_facts(device_type: str, checkpoints: Path | None) -> RankFacts:
    """Measure this rank, its GPU, host and links, and the disk of `checkpoints`. Collective."""
    facts, is_gpu = _FactReader(), device_type == "cuda"
    # The file's name is made by rank 0. All ranks exchange it, with or without a directory.
    local_key = get_host_id(), f".doctor-{uuid.uuid4().hex}"
    hosts, names = zip(*gather_objects(local_key), strict=True)
    disk, sees = _measure_checkpoint_disk(facts, checkpoints, names[0])
    dist.barrier()
    clock, peer_problem = time.time(), None
    for ranks in _group_ranks(hosts).values() if is_gpu else ():
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks and len(ranks) > 1:
            peer_problem = find_peer_store_problem(group, device_type)
    return RankFacts(
        clock=clock,
        host=hosts[dist.get_rank()],
        name=socket.gethostname(),
        ranks_per_host=facts.read_fact(
            "LOCAL_WORLD_SIZE", lambda: read_launcher_number("LOCAL_WORLD_SIZE", 0) or None, None
        ),
        versions=facts.read_fact("versions", lambda: _read_versions(device_type), {}),
        environment={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(PREFIXES) and name not in PER_RANK_VARIABLES
        },
        fabric=facts.read_fact("NVLink domain", read_nvlink_domain_id, None) if is_gpu else None,
        gpu_memory=facts.read_fact("GPU memory", torch.cuda.mem_get_info, None) if is_gpu else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shared_memory=(
            facts.read_fact("/dev/shm", lambda: shutil.disk_usage("/dev/shm").free, None)
            if os.path.isdir("/dev/shm")
            else None
        ),
        has_checkpoints=checkpoints is not None,
        disk=disk,
        sees_checkpoints=sees,
        failures=tuple(facts.failures),
        peers=peer_problem,
        rates=_measure_receive_rates(hosts, device_type),
    )


def _read_versions(device_type: str) -> dict[str, str]:
    versions = {"moecore": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    if device_type == "cuda":
        nccl = torch.cuda.nccl.version()
        versions |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl))}
        versions["GPU"] = torch.cuda.get_device_name()
    return versions


def _measure_checkpoint_disk(
    reader: _FactReader, directory: Path | None, file_name: str
) -> tuple[int | None, bool]:
    """Return free bytes (None = unknown), and False if rank 0's file is not visible. Collective.

    Without a directory, or if this rank or rank 0 cannot write to it, the second result is True.
    """
    shown_path = f"--checkpoints ({quote(str(directory))})"
    rule = "a directory that every rank can write"

    def write_file() -> bool:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory) as file:
                file.write(b"moecore doctor")
            if dist.get_rank() == 0:
                (directory / file_name).touch()
        return True

    try:
        is_writable = reader.read_fact(shown_path, write_file, False, rule)
        (has_file, *_) = gather_objects(is_writable and directory is not None)
        sees = directory is None or not has_file or os.path.exists(directory / file_name)
        dist.barrier()
    finally:
        if directory is not None:
            with suppress(OSError):  # the file is gone, or this rank cannot write
                (directory / file_name).unlink()
    if directory is None or not is_writable:
        return None, sees or not is_writable
    return reader.read_fact(shown_path, lambda: shutil.disk_usage(directory).free, None, rule), sees


def _measure_receive_rates(hosts: Sequence[str], device_type: str) -> dict[str, float]:
    """Return this rank's receive rates in a ring, in bytes per second, by link. Collective."""
    rank, rates = dist.get_rank(), dict[str, float]()
    by_host = list(_group_ranks(hosts).values())
    by_index = [[r for r in ranks if r is not None] for ranks in zip_longest(*by_host)]
    rings = {"inside a host": by_host, "between hosts": by_index}
    data = torch.empty(2, MESSAGE, dtype=torch.uint8, device=device_type)
    for link, all_rings in rings.items():
        (ring,) = [ring for ring in all_rings if rank in ring] or [[rank]]
        place, best = ring.index(rank), float("inf")
        for _ in range(3 if any(len(ranks) > 1 for ranks in all_rings) else 0):
            dist.barrier()
            start = time.perf_counter()
            if len(ring) > 1:
                send = dist.P2POp(dist.isend, data[0], ring[(place + 1) % len(ring)])
                receive = dist.P2POp(dist.irecv, data[1], ring[place - 1])
                for work in dist.batch_isend_irecv([send, receive]):
                    work.wait()
                if device_type == "cuda":
                    torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        if len(ring) > 1:
            rates[link] = MESSAGE / best
    return rates
