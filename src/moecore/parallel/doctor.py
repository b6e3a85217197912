"""`moecore doctor`: what is wrong with the machines of a job, one line each, before it trains.

Every rank collects facts about its host, GPU and environment, and measures its links; rank 0 reads
the facts of all. `problems` is a function of facts alone.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import statistics
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moecore.base import __version__
from moecore.base.agreement import gather
from moecore.moe.dispatch.peer_memory import find_problem, host_id, own_fabric
from moecore.parallel.mesh import start_process_group

PACKAGES = ("torch", "triton", "transformers", "numpy")
PREFIXES = ("NCCL_", "TORCH_", "GLOO_", "CUDA_", "PYTORCH_", "OMP_")
OF_A_RANK = ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID")  # may differ
CLOCK_S = 1.0  # apart, from which logs and timeouts mislead
OPEN_FILES = 4096
SHARED_MEMORY = 1 << 30
DISK = 10 << 30
SLOW = 0.5  # of the median rate
MESSAGE = 16 << 20  # bytes


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What one rank knows. Bytes, seconds, and bytes per second."""

    host: str  # an identity, equal for the ranks of a running kernel
    name: str  # of the host
    ranks_per_host: int | None  # as the launcher says; None = it says nothing
    versions: Mapping[str, str]  # of Python, packages, CUDA, NCCL and the GPU's name
    environment: Mapping[str, str]  # variables that libraries of a job read
    clock: float  # when all ranks have come
    fabric: str | None = None  # the NVLink domain between hosts; None = the GPU is in none
    gpu_memory: tuple[int, int] | None = None  # free and all of the GPU; None without one
    open_files: int = -1  # a limit, as the next one; -1 = none
    locked_memory: int = -1
    shared_memory: int | None = None  # free in /dev/shm; None = there is none
    disk: int | None = None  # free where checkpoints go; None = not asked
    sees_checkpoints: bool = True  # whether it reads there what rank 0 has written
    # Why GPUs of a host do not reach each other's memory; None = they do, or none are.
    peers: str | None = None
    # Of messages from the rank before, by "inside a host" and "between hosts".
    rates: Mapping[str, float] = field(default_factory=dict)


def problems(facts: Sequence[RankFacts]) -> list[str]:
    """Return what is wrong, one line each, of the facts of all ranks in order."""
    return [*_differences(facts), *_of_hosts(facts), *_of_ranks(facts), *_of_links(facts)]


def _differences(facts: Sequence[RankFacts]) -> Iterator[str]:
    for kind in ("versions", "environment"):
        names = sorted({name for one in facts for name in getattr(one, kind)})
        for name in names:
            values = defaultdict[str, list[int]](list)
            for rank, one in enumerate(facts):
                values[getattr(one, kind).get(name, "not set")].append(rank)
            if len(values) > 1:
                shown = ", ".join(f"{v} on {_ranks(ranks)}" for v, ranks in values.items())
                yield f"{name} ({shown}) must be the same on all ranks: set one"


def _of_hosts(facts: Sequence[RankFacts]) -> Iterator[str]:
    by_host = defaultdict[str, list[int]](list)
    for rank, one in enumerate(facts):
        by_host[one.host].append(rank)
    for fabric in dict.fromkeys(one.fabric for one in facts if one.fabric is not None):
        ranks = [rank for rank, one in enumerate(facts) if one.fabric == fabric]
        if ranks[-1] - ranks[0] >= len(ranks):
            yield (
                f"ranks of one NVLink domain ({_ranks(ranks)}) must be neighbours, on which "
                "dispatcher 'hierarchical' counts: number hosts by rack"
            )
    sizes = {len(ranks) for ranks in by_host.values()}
    if len(sizes) > 1:
        shown = ", ".join(f"{facts[r[0]].name}: {len(r)}" for r in by_host.values())
        yield f"ranks of a host ({shown}) must be equally many: start as many on each"
    for ranks in by_host.values():
        one = facts[ranks[0]]
        if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
            yield (
                f"ranks of {one.name} ({_ranks(ranks)}) must be neighbours, on which tp and ep "
                "count: number them by host"
            )
        if one.ranks_per_host not in (None, len(ranks)):
            yield (
                f"LOCAL_WORLD_SIZE ({one.ranks_per_host}) of {one.name} must be its number of "
                f"ranks ({len(ranks)}): start them by one torchrun, or pass ranks_per_domain"
            )
        apart = one.clock - facts[0].clock
        if abs(apart) > CLOCK_S:
            yield (
                f"clock of {one.name} ({apart:+.1f} s from that of {facts[0].name}) must be within "
                f"{CLOCK_S:g} s: run an NTP client"
            )
        if one.shared_memory is not None and one.shared_memory < SHARED_MEMORY:
            yield (
                f"/dev/shm of {one.name} ({_gib(one.shared_memory)} free) must have "
                f"{_gib(SHARED_MEMORY)}, for NCCL and data loaders: --shm-size of its container"
            )
        if one.disk is not None and one.disk < DISK:
            yield (
                f"disk of checkpoints on {one.name} ({_gib(one.disk)} free) must have "
                f"{_gib(DISK)}: remove old ones by moecore checkpoint prune"
            )
        if not one.sees_checkpoints:
            yield (
                f"directory of checkpoints on {one.name} must be that of rank 0, which all ranks "
                "write: give one on shared storage"
            )
        if one.peers is not None:
            yield f"dispatcher 'nvlink' on {one.name} {one.peers}"


def _of_ranks(facts: Sequence[RankFacts]) -> Iterator[str]:
    for rank, one in enumerate(facts):
        if 0 <= one.open_files < OPEN_FILES:
            yield (
                f"open files of rank {rank} ({one.open_files}) must be >= {OPEN_FILES}: "
                f"ulimit -n {16 * OPEN_FILES}"
            )
        has_network = len({other.host for other in facts}) > 1 and one.gpu_memory is not None
        if has_network and one.locked_memory >= 0:
            yield (
                f"locked memory of rank {rank} ({_gib(one.locked_memory)}) must be unlimited, for "
                "transfers between hosts: ulimit -l unlimited"
            )
        if one.gpu_memory is not None and one.gpu_memory[0] < 0.9 * one.gpu_memory[1]:
            free, total = map(_gib, one.gpu_memory)
            yield (
                f"GPU of rank {rank} ({free} of {total} free on {one.name}) must be empty: end "
                "what else runs there (nvidia-smi shows it)"
            )
        if one.environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
            yield (
                f"TORCH_NCCL_ASYNC_ERROR_HANDLING (0) of rank {rank} must be 1, else a rank that "
                "has died is waited for without an end: unset it"
            )


def _of_links(facts: Sequence[RankFacts]) -> Iterator[str]:
    for link in ("inside a host", "between hosts"):
        rates = {rank: one.rates[link] for rank, one in enumerate(facts) if link in one.rates}
        median = statistics.median(rates.values()) if rates else 0.0
        for rank, rate in rates.items():
            if rate < SLOW * median:
                yield (
                    f"messages {link} to rank {rank} on {facts[rank].name} ({rate / 1e9:.2g} GB/s) "
                    f"must be near the median ({median / 1e9:.2g} GB/s): look at its links"
                )


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, with ranges."""
    starts = [r for i, r in enumerate(ranks) if i == 0 or ranks[i - 1] != r - 1]
    ends = [r for i, r in enumerate(ranks) if i + 1 == len(ranks) or ranks[i + 1] != r + 1]
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


def run_doctor(args: Any) -> int:
    """Look at this job's machines; collective under torchrun."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    _join(device_type, timedelta(seconds=args.timeout))
    found = gather(_facts(device_type, args.checkpoints))
    lines = problems(found)
    if dist.get_rank() == 0:
        for line in lines:
            print(line, file=sys.stderr)
        names = ", ".join(dict.fromkeys(one.name for one in found))
        about = ", ".join(f"{name} {value}" for name, value in found[0].versions.items())
        print(f"{len(found)} rank(s) on {names}: {about}")
        print(f"{len(lines) or 'no'} problem(s) found")
    dist.barrier()
    dist.destroy_process_group()
    return int(bool(lines))  # on every rank: an agent whose ranks end well waits for the others


def _join(device_type: str, timeout: timedelta) -> None:
    """Start the process group, or raise a ValueError of one line."""
    try:
        start_process_group(device_type, timeout)
    except (dist.DistError, RuntimeError) as error:
        raise ValueError(
            f"ranks must find each other within {timeout.seconds} s: check MASTER_ADDR, ports and "
            f"that all have started ({str(error).splitlines()[0]})"
        ) from None


def _facts(device_type: str, checkpoints: Path | None) -> RankFacts:
    hosts = gather(host_id())
    local = os.environ.get("LOCAL_WORLD_SIZE")
    disk, sees = _disk(checkpoints)
    dist.barrier()
    shm = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None
    return RankFacts(
        clock=time.time(),
        host=hosts[dist.get_rank()],
        name=socket.gethostname(),
        ranks_per_host=None if local is None else int(local),
        versions=_versions(device_type),
        environment={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(PREFIXES) and name not in OF_A_RANK
        },
        fabric=own_fabric() if device_type == "cuda" else None,
        gpu_memory=torch.cuda.mem_get_info() if device_type == "cuda" else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shared_memory=shm,
        disk=disk,
        sees_checkpoints=sees,
        peers=_peers(hosts, device_type),
        rates=_rates(hosts, device_type),
    )


def _versions(device_type: str) -> dict[str, str]:
    found = {"moecore": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    if device_type == "cuda":
        nccl = torch.cuda.nccl.version()
        found |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl))}
        found["GPU"] = torch.cuda.get_device_name()
    return found


def _disk(directory: Path | None) -> tuple[int | None, bool]:
    """Return the free bytes, and whether this rank sees what rank 0 writes. Collective."""
    if directory is None:
        return None, True
    name: list[Any] = [f".doctor-{uuid.uuid4().hex}"]
    dist.broadcast_object_list(name, src=0)
    file = directory / name[0]
    directory.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        file.write_text(name[0])
    dist.barrier()
    sees = file.exists()
    dist.barrier()
    if dist.get_rank() == 0:
        file.unlink()
    return shutil.disk_usage(directory).free, sees


def _peers(hosts: Sequence[str], device_type: str) -> str | None:
    """Return why GPUs of this host do not reach each other's memory. Collective."""
    if device_type != "cuda":
        return None
    own = hosts[dist.get_rank()]
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        group = dist.new_group(ranks)
        if host == own:
            found = find_problem(group, device_type) if len(ranks) > 1 else None
    return found


def _rates(hosts: Sequence[str], device_type: str) -> dict[str, float]:
    """Return the rates of messages from the rank before, in hosts and between. Collective."""
    rank, found = dist.get_rank(), dict[str, float]()
    by_host = [[r for r, h in enumerate(hosts) if h == host] for host in dict.fromkeys(hosts)]
    rings = {"inside a host": by_host, "between hosts": _columns(by_host)}
    data = torch.empty(2, MESSAGE, dtype=torch.uint8, device=device_type)
    for link, all_rings in rings.items():
        (ring,) = [ring for ring in all_rings if rank in ring] or [[rank]]
        place, best = ring.index(rank), float("inf")
        for _ in range(3 if len(all_rings[0]) > 1 else 0):
            dist.barrier()
            start = time.perf_counter()
            if len(ring) > 1:
                ahead, behind = ring[(place + 1) % len(ring)], ring[place - 1]
                ends = [dist.P2POp(dist.isend, data[0], ahead)]
                ends.append(dist.P2POp(dist.irecv, data[1], behind))
                for work in dist.batch_isend_irecv(ends):
                    work.wait()
                if device_type == "cuda":
                    torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        if len(ring) > 1:
            found[link] = MESSAGE / best
    return found


def _columns(by_host: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the ranks of one place in all hosts, by place."""
    most = max(map(len, by_host))
    return [[ranks[i] for ranks in by_host if i < len(ranks)] for i in range(most)]
