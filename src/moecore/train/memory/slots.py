"""HostSlots: a few pinned buffers through which chunks of tensors pass to the host and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from moecore.train.memory.host import Slabs, round_up_to_alignment
from moecore.train.memory.streams import CopyEvent, CopyStream

Row = tuple[Tensor, ...]  # flat tensors with equal numbers of elements, then a scalar
Columns = Sequence[Sequence[Tensor]]  # flat tensors; each column has one dtype


def cut_into_chunks(rows: Iterable[Row], max_elements: int, multiple: int) -> Iterator[list[Row]]:
    """Yield lists of rows; the first tensors of a list have at most `max_elements` elements in all.

    A row is a tuple of 1-D tensors of equal size, then a scalar. If a row does not fit, its tensors
    are cut at a multiple of `multiple` elements.
    """
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
    """Host buffers (slots), pinned for a GPU; a slot has the copies of one chunk of tensors."""

    def __init__(self, stream: CopyStream, num_slots: int) -> None:
        self.stream, self._num_slots = stream, num_slots
        self._slabs = Slabs(stream.device.type)

    def reserve_slots(self, chunks: Iterable[Columns]) -> None:
        """Allocate slots that fit the largest of `chunks`, unless the slots are large enough."""
        num_bytes = 0
        for columns in chunks:  # a slot has an equally large part for each column
            part_bytes = max(sum(tensor.nbytes for tensor in column) for column in columns)
            num_bytes = max(num_bytes, len(columns) * round_up_to_alignment(part_bytes))
        if self._slabs.num_bytes < num_bytes * self._num_slots:
            self._slabs.clear()
            for _ in range(self._num_slots):
                self._slabs.allocate_slab(num_bytes)

    def start_copies(self, chunks: Iterable[Columns]) -> Iterator[list[list[Tensor]]]:
        """Start the first copies to the host; return an iterator over each chunk's host copies.

        An item has one list per column of the chunk (such as gradients), with one tensor per
        parameter. The host waits for each chunk's copy. Copies are valid until the next iteration.
        """
        # Copies that the caller starts before it takes the next chunk precede the slot's next use.
        remaining, filled = iter(chunks), deque[tuple[Tensor, list[list[Tensor]], CopyEvent]]()

        def fill(memory: Tensor) -> None:
            """Start to copy the next chunk, if any, to a slot's memory."""
            columns = next(remaining, None)
            if columns is not None:
                copies: list[list[Tensor]] = []
                for part, sources in zip(memory.chunk(len(columns)), columns, strict=True):
                    flat = part[: sum(x.nbytes for x in sources)].view(sources[0].dtype)
                    copies.append(list(flat.split([x.numel() for x in sources])))
                    for target, source in zip(copies[-1], sources, strict=True):
                        self.stream.copy(target, source)
                filled.append((memory, copies, self.stream.record_event()))

        def pass_through() -> Iterator[list[list[Tensor]]]:
            """Yield the host copies of each chunk; then reuse their memory for a later chunk."""
            while filled:
                memory, copies, event = filled.popleft()
                event.synchronize()
                yield copies
                fill(memory)

        for slab in self._slabs.slabs:
            fill(slab.memory)
        return pass_through()
