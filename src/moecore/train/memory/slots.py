"""HostSlots: a few pinned slots for chunks of tensors, so that few chunks are on the host.

chunks = [list(zip(*rows)) for rows in cut(all_rows, max_elements, multiple)]
slots.reserve(chunks)
for copies in slots.start(chunks):     # copies of the next chunks run meanwhile
...                                # may start copies back on `slots.stream`
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from moecore.train.memory.host import Slabs, aligned
from moecore.train.memory.streams import CopyMark, CopyStream

Row = tuple[Tensor, ...]  # flat tensors with equal numbers of elements, then a scalar
Columns = Sequence[Sequence[Tensor]]  # flat tensors; each column has one dtype


def cut(rows: Iterable[Row], max_elements: int, multiple: int) -> Iterator[list[Row]]:
    """Yield chunks of rows of at most `max_elements`; rows are cut at multiples of `multiple`."""
    chunk, room = list[Row](), max_elements
    for *tensors, scalar in rows:
        start, end = 0, tensors[0].numel()
        while start < end:
            stop = min(end, start + room // multiple * multiple)
            if stop > start:
                chunk.append((*(tensor[start:stop] for tensor in tensors), scalar))
            room, start = room - (stop - start), stop
            if start < end:
                yield chunk
                chunk, room = [], max_elements
    if chunk:
        yield chunk


class HostSlots:
    """A few pieces of host memory, pinned for a GPU; each stores the copies of one chunk."""

    def __init__(self, stream: CopyStream, num_slots: int) -> None:
        self.stream, self._num_slots = stream, num_slots
        self._slabs = Slabs(stream.device.type)

    def reserve(self, chunks: Iterable[Columns]) -> None:
        """Allocate memory for the largest chunk in each slot, unless the slots are large enough."""
        num_bytes = max(map(_slot_bytes, chunks), default=0)
        if self._slabs.num_bytes < num_bytes * self._num_slots:
            self._slabs.clear()
            for _ in range(self._num_slots):
                self._slabs.add(num_bytes)

    def start(self, chunks: Iterable[Columns]) -> Iterator[list[list[Tensor]]]:
        """Start the first copies to the host; return an iterator over the chunks' copies."""
        # Copies that the caller starts before it takes the next chunk precede the slot's next use.
        remaining, filled = iter(chunks), deque[tuple[Tensor, list[list[Tensor]], CopyMark]]()

        def fill(memory: Tensor) -> None:
            columns = next(remaining, None)
            if columns is not None:
                parts = memory.chunk(len(columns))
                copies = [_views(part, column) for part, column in zip(parts, columns, strict=True)]
                for targets, sources in zip(copies, columns, strict=True):
                    for target, source in zip(targets, sources, strict=True):
                        self.stream.copy(target, source)
                filled.append((memory, copies, self.stream.mark()))

        def pass_through() -> Iterator[list[list[Tensor]]]:
            while filled:
                memory, copies, mark = filled.popleft()
                mark.synchronize()
                yield copies
                fill(memory)

        for slab in self._slabs.slabs:
            fill(slab.memory)
        return pass_through()


def _slot_bytes(columns: Columns) -> int:
    """Return the bytes of a slot, divided equally among its columns."""
    sizes = (sum(tensor.nbytes for tensor in column) for column in columns)
    return len(columns) * aligned(max(sizes))


def _views(memory: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive flat views of memory for tensors of one dtype."""
    num_bytes = sum(tensor.nbytes for tensor in like)
    views = memory[:num_bytes].view(like[0].dtype).split([tensor.numel() for tensor in like])
    return list(views)
