"""A process group of ranks on one host, which exchange CPU tensors through shared memory.

gloo passes each message through four threads and the loopback device, a fifth of the CPU time of
ranks on two cores. Here a rank writes what it sends to its slot, raises a counter, and reads what
the others wrote. An operation may be waited for before others that began earlier.

What an operation returns is written when it is waited for, or when `SLOTS` others have begun: a
result that is read before its `wait()` is wrong in every run. Sums add the ranks in their order, on
every rank: they do not depend on where a number lies in a message.

    counters int64: begun [n] | ended [n] | messages [n, n] from a rank to another
    slots    [SLOTS, n, SLOT_BYTES]: length of the head | head: shapes and dtypes | tensors
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import platform
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

SLOTS = 4  # operations of a group that may have begun and not ended
SLOT_BYTES = 1 << 28  # of addresses; a page that nobody touches takes no memory
HEAD_BYTES = 1 << 14
ALIGNMENT = 64
FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]  # number of the system call
FUTEX_WAIT, FUTEX_WAKE, EVERYBODY = 0, 1, 1 << 30
SYSCALL = ctypes.CDLL(None, use_errno=True).syscall
SYSCALL.argtypes = (  # number, address, action, value, seconds
    *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p),
    *(ctypes.c_void_p, ctypes.c_int),
)

# Dispatch modes, as selective checkpointing, see no operation of a backend in C++.
BELOW_MODES = torch._C._DisableTorchDispatch

Form = tuple[int, tuple[int, ...], torch.dtype]  # first byte in a slot, shape, dtype
Parts = list[Sequence[Tensor]]  # what each rank sent
Op = dist.ReduceOp
REDUCTIONS: dict[Any, Callable[[list[Tensor]], Tensor]] = {
    Op.SUM: lambda parts: _sum(parts),
    Op.AVG: lambda parts: _sum(parts) / len(parts),
    Op.PRODUCT: lambda parts: torch.stack(parts).prod(0),
    Op.MAX: lambda parts: torch.stack(parts).amax(0),
    Op.MIN: lambda parts: torch.stack(parts).amin(0),
}


class Memory:
    """Counters and slots of a group's ranks."""

    def __init__(self, path: Path, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout.total_seconds()
        num_counters = size * (2 + size)
        self._at_slots = -(-num_counters * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        with path.open("a+b") as file:
            file.truncate(self._at_slots + SLOTS * size * SLOT_BYTES)
            self._bytes = mmap.mmap(file.fileno(), 0)
        whole = torch.frombuffer(self._bytes, dtype=torch.uint8)
        self._counters = (ctypes.c_int64 * num_counters).from_buffer(self._bytes)
        self._address = whole.data_ptr()
        self._slots = whole[self._at_slots :].view(SLOTS, size, SLOT_BYTES)
        self._views: dict[tuple[int, int, Form], Tensor] = {}

    def raise_to(self, counter: int, value: int) -> None:
        """Set a counter of this rank, and wake who waits for it."""
        self._counters[counter] = value
        self._futex(counter, FUTEX_WAKE, EVERYBODY, None)

    def has_reached(self, counter: int, value: int) -> bool:
        return self._counters[counter] >= value

    def all_reach(self, counter: int, value: int) -> None:
        """Wait until the counters of all ranks from this one on have a value."""
        counters = range(counter, counter + self.size)
        if min(self._counters[counters.start : counters.stop]) < value:
            for each in counters:
                self.reach(each, value)

    def reach(self, counter: int, value: int) -> None:
        """Wait until a counter has a value; RuntimeError after the group's timeout."""
        if self._counters[counter] >= value:
            return
        end = time.monotonic() + self.timeout_s
        while (now := self._counters[counter]) < value:
            self._futex(counter, FUTEX_WAIT, now & 0xFFFFFFFF, ctypes.byref(_Seconds(1, 0)))
            if time.monotonic() > end:
                raise RuntimeError(
                    f"Timed out after {self.timeout_s} s: rank {self.rank} of {self.size} waits "
                    f"for counter {counter} to be {value}, it is {now}"
                )

    def write(self, slot: int, parts: Sequence[Tensor]) -> None:
        """Write tensors to this rank's slot."""
        at, forms = HEAD_BYTES, list[Form]()
        for part in parts:
            forms.append((at, tuple(part.shape), part.dtype))
            self.view(slot, self.rank, forms[-1]).copy_(
                part.detach() if part.requires_grad else part
            )
            at += -(-part.numel() * part.element_size() // ALIGNMENT) * ALIGNMENT
        head = _head(tuple(forms))
        assert len(head) + 8 <= HEAD_BYTES and at <= SLOT_BYTES, "SLOT_BYTES is too little"
        start = self._at_slots + (slot * self.size + self.rank) * SLOT_BYTES
        self._bytes[start : start + 8 + len(head)] = len(head).to_bytes(8, "little") + head

    def read(self, slot: int, rank: int) -> Sequence[Tensor]:
        """Return what a rank wrote."""
        start = self._at_slots + (slot * self.size + rank) * SLOT_BYTES
        length = int.from_bytes(self._bytes[start : start + 8], "little")
        forms = _forms(self._bytes[start + 8 : start + 8 + length])
        return _Written(self, slot, rank, forms)

    def view(self, slot: int, rank: int, form: Form) -> Tensor:
        """Return a view of a rank's slot; one for each form, because making one takes longest."""
        found = self._views.get((slot, rank, form))
        if found is None:
            at, shape, dtype = form
            flat = self._slots[slot, rank, at : at + prod(shape) * dtype.itemsize]
            found = self._views[slot, rank, form] = flat.view(dtype).view(shape)
        return found

    def _futex(self, counter: int, action: int, value: int, seconds: Any) -> None:
        SYSCALL(FUTEX, self._address + 8 * counter, action, value, seconds, None, 0)


class _Written(Sequence[Tensor]):
    """What a rank wrote; a view is made of what is read alone."""

    def __init__(self, memory: Memory, slot: int, rank: int, forms: Sequence[Form]) -> None:
        self._memory, self._slot, self._rank, self._forms = memory, slot, rank, forms

    def __len__(self) -> int:
        return len(self._forms)

    def __getitem__(self, index: Any) -> Any:
        return self._memory.view(self._slot, self._rank, self._forms[index])


class SharedMemoryGroup(dist.ProcessGroup):
    """One rank's side of a group; in place of torch's class of gloo groups."""

    folder: Path  # of all groups; `ranks.py` sets it

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: object
    ) -> None:
        super().__init__(rank, size)
        self.options = SimpleNamespace(_timeout=timeout)
        if rank == 0:
            store.set("folder", tempfile.mkdtemp(dir=self.folder))
        self._mail = Path(store.get("folder").decode())
        self.memory = Memory(self._mail / "memory", rank, size, timeout)
        self._begun = 0
        self.pending: deque[_Collective] = deque()
        self._num_sent = [0] * size
        self._num_received = [0] * size
        self.no_grad = torch.no_grad()  # one for all operations, which are not within another

    # What torch asks of a group, and of the backend that this one is, too.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, text: str) -> None:
        self._desc = text

    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._desc)

    def _get_backend(self, device: torch.device) -> SharedMemoryGroup:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout
        self.memory.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        pass

    def getBackendName(self) -> str:
        return "gloo"

    # Collectives

    def _begin(self, sent: Sequence[Tensor], receive: Callable[[Parts], None]) -> dist._Work:
        """Begin an operation; `receive` gets what all ranks sent."""
        memory, slot = self.memory, self._begun % SLOTS
        if len(self.pending) == SLOTS:
            self.pending[0].wait()
        memory.all_reach(memory.size, self._begun + 1 - SLOTS)
        with BELOW_MODES():
            memory.write(slot, sent)
        self._begun += 1
        memory.raise_to(memory.rank, self._begun)
        self.pending.append(_Collective(self, self._begun, receive))
        return self.pending[-1]

    def barrier(self, opts: Any = None) -> dist._Work:
        return self._begin([], lambda parts: None)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist._Work:
        def receive(parts: Parts) -> None:
            for x, sent in zip(tensors, parts[opts.rootRank], strict=True):
                x.copy_(sent)

        return self._begin(tensors if self.rank() == opts.rootRank else [], receive)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist._Work:
        def receive(parts: Parts) -> None:
            for x, sent in zip(tensors, zip(*parts, strict=True), strict=True):
                x.copy_(_reduced(list(sent), opts.reduceOp))

        return self._begin(tensors, receive)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist._Work:
        def receive(parts: Parts) -> None:
            if self.rank() == opts.rootRank:
                tensors[0].copy_(_reduced([sent for (sent,) in parts], opts.reduceOp))

        return self._begin(tensors, receive)

    def allgather(self, outs: list[list[Tensor]], xs: list[Tensor], opts: Any) -> dist._Work:
        def receive(parts: Parts) -> None:
            for rank, sent in enumerate(parts):
                for row, x in zip(outs, sent, strict=True):
                    row[rank].copy_(x)

        return self._begin(xs, receive)

    def all_gather_single_coalesced(
        self, outs: list[Tensor], xs: list[Tensor], opts: Any = None
    ) -> dist._Work:
        rows = [list(out.view(self.size(), *x.shape)) for out, x in zip(outs, xs, strict=True)]
        return self.allgather(rows, xs, opts)

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> dist._Work:
        return self.all_gather_single_coalesced([out], [x], opts)

    def reduce_scatter(self, outs: list[Tensor], xs: list[list[Tensor]], opts: Any) -> dist._Work:
        n, rank = self.size(), self.rank()

        def receive(parts: Parts) -> None:
            for i, out in enumerate(outs):
                out.copy_(_reduced([sent[i * n + rank] for sent in parts], opts.reduceOp))

        return self._begin([x for row in xs for x in row], receive)

    def reduce_scatter_single_coalesced(
        self, outs: list[Tensor], xs: list[Tensor], opts: Any
    ) -> dist._Work:
        rows = [list(x.view(self.size(), *out.shape)) for out, x in zip(outs, xs, strict=True)]
        return self.reduce_scatter(outs, rows, opts)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any) -> dist._Work:
        return self.reduce_scatter_single_coalesced([out], [x], opts)

    def alltoall(self, outs: list[Tensor], xs: list[Tensor], opts: Any = None) -> dist._Work:
        def receive(parts: Parts) -> None:
            for out, sent in zip(outs, parts, strict=True):
                out.copy_(sent[self.rank()])

        return self._begin(xs, receive)

    def all_to_all_single(
        self, out: Tensor, x: Tensor, out_sizes: list[int], in_sizes: list[int], opts: Any = None
    ) -> dist._Work:
        return self.alltoall(self._cut(out, out_sizes), self._cut(x, in_sizes))

    def _cut(self, x: Tensor, sizes: list[int]) -> list[Tensor]:
        return list(x.split(sizes or [x.shape[0] // self.size()] * self.size()))

    def gather(self, outs: list[list[Tensor]], xs: list[Tensor], opts: Any) -> dist._Work:
        def receive(parts: Parts) -> None:
            if self.rank() == opts.rootRank:
                for out, (sent,) in zip(outs[0], parts, strict=True):
                    out.copy_(sent)

        return self._begin(xs, receive)

    def scatter(self, outs: list[Tensor], xs: list[list[Tensor]], opts: Any) -> dist._Work:
        def receive(parts: Parts) -> None:
            outs[0].copy_(parts[opts.rootRank][self.rank()])

        return self._begin(xs[0] if self.rank() == opts.rootRank else [], receive)

    # Names of torch before 2.13.
    _allgather_base, allgather_into_tensor_coalesced = (
        all_gather_single,
        all_gather_single_coalesced,
    )
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages between two ranks: files, in the order in which they are sent.

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist._Work:
        assert tag == 0, "messages arrive in their order"
        self._num_sent[to] += 1
        message = self._message(self.rank(), to, self._num_sent[to])
        message.write_bytes(tensors[0].detach().contiguous().view(-1).view(torch.uint8).numpy())
        self.memory.raise_to(self._counter(self.rank(), to), self._num_sent[to])
        return _Sent()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist._Work:
        assert tag == 0, "messages arrive in their order"
        self._num_received[source] += 1
        number = self._num_received[source]
        path = self._message(source, self.rank(), number)
        counter = self._counter(source, self.rank())
        return _Received(self.memory, counter, number, path, tensors[0])

    def _message(self, source: int, to: int, number: int) -> Path:
        return self._mail / f"{source}-{to}-{number}"

    def _counter(self, source: int, to: int) -> int:
        return self.size() * (2 + source) + to


class _Collective(dist._Work):
    def __init__(
        self, group: SharedMemoryGroup, number: int, receive: Callable[[Parts], None]
    ) -> None:
        super().__init__()
        self._group, self._number, self._receive = group, number, receive
        self._is_done = False

    def is_completed(self) -> bool:
        """Return whether it has ended; ends it if every rank has begun it."""
        memory = self._group.memory
        if all(memory.has_reached(rank, self._number) for rank in range(memory.size)):
            self.wait()
        return self._is_done

    def wait(self, timeout: Any = None) -> bool:
        group, memory = self._group, self._group.memory
        while not self._is_done:
            first = group.pending[0]
            memory.all_reach(0, first._number)
            slot = (first._number - 1) % SLOTS
            with group.no_grad, BELOW_MODES():
                first._receive([memory.read(slot, rank) for rank in range(memory.size)])
            first._is_done = True
            group.pending.popleft()
            memory.raise_to(memory.size + memory.rank, first._number)
        return True

    def get_future(self) -> Any:
        self.wait()
        future: Any = Future()
        future.set_result(None)
        return future


class _Sent(dist._Work):
    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> bool:
        return True


class _Received(dist._Work):
    def __init__(self, memory: Memory, counter: int, number: int, path: Path, out: Tensor) -> None:
        super().__init__()
        self._memory, self._counter, self._number = memory, counter, number
        self._path, self._out = path, out
        self._is_done = False

    def is_completed(self) -> bool:
        if self._memory.has_reached(self._counter, self._number):
            self.wait()
        return self._is_done

    def wait(self, timeout: Any = None) -> bool:
        if not self._is_done:
            self._memory.reach(self._counter, self._number)
            if self._out.numel():
                sent = torch.frombuffer(bytearray(self._path.read_bytes()), dtype=self._out.dtype)
                with torch.no_grad():
                    self._out.copy_(sent.view(self._out.shape))
            os.unlink(self._path)
            self._is_done = True
        return True


class _Seconds(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


@cache
def _head(forms: tuple[Form, ...]) -> bytes:
    return pickle.dumps(forms)


@cache
def _forms(head: bytes) -> tuple[Form, ...]:
    found: tuple[Form, ...] = pickle.loads(head)
    return found


def _reduced(parts: list[Tensor], op: Any) -> Tensor:
    return next(reduce for known, reduce in REDUCTIONS.items() if op == known)(parts)


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
