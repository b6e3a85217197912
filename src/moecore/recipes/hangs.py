"""Hangs: a step that does not end becomes one report that says which rank the others wait for.

A thread of each rank compares the time in the current phase of a step with a timeout. When the
timeout of one rank has passed, the thread of every rank writes a record to the store: the phase,
the top frame of the main thread's Python stack, and the collectives in torch's flight recorder.
One rank merges the records into a report on stderr, and all ranks end.

The flight recorder numbers the collectives of each process group. A rank whose last number is below
the number for which another rank waits has not arrived. Without a flight recorder, or if all
records are equal, the rank whose Python stack does not wait has not arrived. If no stack waits,
the rank in the earliest phase has not arrived. A rank without a record is stopped, has ended, or
blocks Python.
"""

import http.client
import json
import os
import re
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.control_plane import worker_main

from moecore.base.torch_private import get_default_timeout
from moecore.recipes.stragglers import COMPUTE, DATA, OPTIMIZER

PEERS, METRICS = "data of other ranks", "metrics"
ORDER = (DATA, PEERS, COMPUTE, OPTIMIZER, METRICS)
KEY = "moecore/hang"  # in the store: the reporter, the records and the end of the report
SOCKET = "TORCH_WORKER_SERVER_SOCKET"
RECORDERS = ("fr_trace_json", "dump_nccl_trace_json")  # of gloo and of NCCL
SHARE = 0.9  # of the process group's timeout: a report comes before the backend's own error
GRACE_S = 10.0  # for the records of other ranks
POLL_S = 5.0
MAX_NAMED = 16  # ranks in one line
WAITS = re.compile(r"/torch/(cuda|distributed)/")  # a frame in which the host waits
Record = Mapping[str, Any]


class HangWatch:
    """A watchdog that ends all ranks if a phase of a step runs longer than `timeout` seconds.

    `timeout` None = nine tenths of the process group's timeout.
    """

    def __init__(self, timeout: float | None) -> None:
        group_timeout = get_default_timeout()
        self._timeout = timeout or (SHARE * group_timeout.total_seconds() if group_timeout else 0.0)
        self._step, self._phase, self._since = 0, "", 0.0
        self._main, self._is_over = threading.get_ident(), threading.Event()

    def enter(self, step: int, phase: str) -> None:
        """Record that this rank begins a phase of a step; "" = no phase, without a timeout."""
        self._step, self._phase, self._since = step, phase, time.monotonic()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Return a context in which a thread watches this rank; a single rank has no thread."""
        thread = threading.Thread(target=self._run, name="moecore-hang", daemon=True)
        if dist.get_world_size() > 1 and self._timeout:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()

    def _run(self) -> None:
        """Poll the phase of this rank, and the store for the timeout of another rank."""
        world: Any = dist.group.WORLD
        store = world.get_group_store().clone()  # the main thread may block the store
        with suppress(dist.DistError):  # the rank or launcher of the store has ended
            while not self._is_over.wait(min(POLL_S, self._timeout / 10)):
                phase, seconds = self._phase, time.monotonic() - self._since
                # A rank that reads its data waits for no other rank.
                if phase not in ("", DATA) and seconds > self._timeout:
                    store.set(KEY, "")
                if store.check([KEY]):
                    try:
                        self._report(store)
                    except Exception:  # without a report, too, no rank must hang
                        traceback.print_exc()
                    os._exit(1)

    def _report(self, store: dist.Store) -> None:
        """Write this rank's record; on one rank, print the report of all."""
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        record = {
            "rank": rank,
            "host": socket.gethostname(),
            "step": self._step,
            "phase": self._phase,
            "seconds": time.monotonic() - self._since,
            "frame": read_top_frame(self._main),
            **summarize_collectives(read_flight_recorder()),
        }
        store.set(f"{KEY}/{rank}", json.dumps(record))
        deadline = time.monotonic() + GRACE_S
        is_reporter = store.add(f"{KEY}/reporters", 1) == 1
        keys = [f"{KEY}/{r}" for r in range(num_ranks)] if is_reporter else [f"{KEY}/end"]
        while not store.check(keys) and time.monotonic() < deadline + GRACE_S * (not is_reporter):
            time.sleep(0.05)
        if is_reporter:
            records = [json.loads(store.get(key)) for key in keys if store.check([key])]
            print(format_report(records, num_ranks, self._timeout), file=sys.stderr, flush=True)
            store.set(f"{KEY}/end", "")


def read_top_frame(thread: int) -> str:
    """Return 'File "a.py", line 3 in f', the top of the Python stack of the thread with this id."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "an unknown place"
    return f'File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'


def read_flight_recorder() -> list[dict[str, Any]]:
    """Return the entries of torch's flight recorder, oldest first; [] if disabled or empty."""
    entries: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, suppress(OSError, ValueError, RuntimeError):
        os.environ[SOCKET] = os.path.join(folder, "socket")
        server: Any = worker_main()
        with server:
            for handler in RECORDERS:
                connection = http.client.HTTPConnection("worker")
                connection.sock = socket.socket(socket.AF_UNIX)
                connection.sock.settimeout(GRACE_S / 2)
                connection.sock.connect(os.environ[SOCKET])
                connection.request("POST", f"/handler/{handler}")
                response = connection.getresponse()
                content = response.read()
                if response.status == 200:  # torch 2.15 leaves out empty "entries"
                    entries += json.loads(content).get("entries", [])
    return entries


def summarize_collectives(entries: Sequence[Record]) -> dict[str, Any]:
    """Return "last", {process group: sequence number of its last collective}, and "waits".

    "waits" is the first incomplete collective as [group, sequence number, operation], or None.
    """
    last: dict[str, int] = {}
    waits = None
    for entry in entries:
        operation, is_p2p = entry["profiling_name"], entry["is_p2p"]
        name, description = entry["process_group"]
        group = f"{operation.partition(':')[0]} group {name}"
        group += f" ({description})" if description not in ("", "undefined") else ""
        number = int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"])
        if not is_p2p:  # messages are numbered between two ranks
            last[group] = max(number, last.get(group, 0))
        if waits is None and not entry["retired"]:
            waits = [group, number, operation]
    return {"last": last, "waits": waits}


def find_missing_ranks(records: Sequence[Record], num_ranks: int) -> list[int]:
    """Return the ranks for which other ranks wait; [] = all ranks wait in the same collective."""
    silent = sorted(set(range(num_ranks)) - {record["rank"] for record in records})
    if silent:
        return silent
    is_late = {record["rank"]: _list_late_ranks(record, records) for record in records}
    late = {rank for ranks in is_late.values() for rank in ranks}
    active = [r["rank"] for r in records if not (r["waits"] or WAITS.search(r["frame"]))]
    candidates = [rank for rank in active if rank in late]
    if candidates or (late and not active):
        return candidates or [rank for rank in sorted(late) if not is_late[rank]] or sorted(late)
    if len(active) < len(records):
        return active
    places = {r["rank"]: (r["step"], ORDER.index(r["phase"] or DATA)) for r in records}
    first = min(places.values())
    return [r for r, place in places.items() if place == first < max(places.values())]


def _list_late_ranks(record: Record, records: Sequence[Record]) -> list[int]:
    """Return the ranks that have not entered the collective for which `record`'s rank waits."""
    if record["waits"] is None:
        return []
    group, number, _ = record["waits"]
    return [other["rank"] for other in records if other["last"].get(group, number) < number]


def format_report(records: Sequence[Record], num_ranks: int, timeout: float) -> str:
    """Return the report: missing ranks, then a line per group of ranks with equal records."""
    missing = find_missing_ranks(records, num_ranks)
    cause = f"other ranks wait for {_format_ranks(missing)}" if missing else "all ranks wait"
    lines = [
        f"moecore: error: a step must end within --hang-timeout ({timeout:g} s), but {cause}: see "
        "where each rank is, or raise the timeout"
    ]
    groups: dict[str, list[Record]] = {}
    for record in records:
        phase = f"in phase {record['phase']!r}" if record["phase"] else "between phases"
        place = f"step {record['step']}, {phase}, at {record['frame']}"
        if record["waits"] is not None:
            group, number, operation = record["waits"]
            place += f", waits in {operation}, number {number} of {group}"
        groups.setdefault(place, []).append(record)
    for place, members in groups.items():
        hosts = ", ".join(sorted({record["host"] for record in members})[:MAX_NAMED])
        ranks = _format_ranks([record["rank"] for record in members])
        seconds = max(record["seconds"] for record in members)
        lines.append(f"  {ranks} on {hosts} for {seconds:.0f} s: {place}")
    silent = sorted(set(range(num_ranks)) - {record["rank"] for record in records})
    if silent:
        lines.append(f"  {_format_ranks(silent)}: stopped, ended, or blocked outside of Python")
    return "\n".join(lines)


def _format_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 0, 2", or "20 ranks, first of all 0, 1, 2" of many ranks."""
    if len(ranks) > MAX_NAMED:
        return f"{len(ranks)} ranks, first of all {', '.join(map(str, ranks[:3]))}"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
