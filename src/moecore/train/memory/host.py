"""Host memory for copies of tensors, in slabs: pinning takes seconds for what a GPU holds.

torch rounds every pinned allocation up to a power of two, so slabs have such sizes, and what is
needed lies in them side by side.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moecore.base.torch_names import host_memory

SLAB_BYTES = 2**30  # large beside a tensor, so that little is left at its end
ALIGN_BYTES = 64  # a cache line; no dtype needs more


@dataclass(slots=True)
class Slab:
    """Memory that is handed out from front to back; uint8."""

    memory: Tensor
    used: int = 0

    @property
    def room(self) -> int:
        """Bytes that are left."""
        return self.memory.numel() - self.used

    def take(self, num_bytes: int) -> Tensor:
        """Return the next bytes; there must be room."""
        data = self.memory[self.used : self.used + num_bytes]
        self.used += aligned(num_bytes)
        return data


class Slabs:
    """Slabs that grow in number.

    Args:
        pinned: whether a GPU copies to and from them.
    """

    def __init__(self, *, pinned: bool, device: str = "cpu") -> None:
        self.pinned, self.device = pinned, device
        self.slabs: list[Slab] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.memory.numel() for slab in self.slabs)

    def fitting(self, num_bytes: int) -> Slab | None:
        """Return a slab with room for aligned bytes."""
        return next((slab for slab in self.slabs if slab.room >= num_bytes), None)

    def add(self, num_bytes: int) -> Slab:
        """Return a new slab. Slow where it pins.

        Raises:
            RuntimeError: when there is no memory.
        """
        where: dict[str, Any] = dict(device=self.device, pin_memory=self.pinned)
        with host_memory():
            memory = torch.empty(num_bytes, dtype=torch.uint8, **where)
        self.slabs.append(Slab(memory))
        return self.slabs[-1]

    def clear(self) -> None:
        """Free all slabs; torch keeps what was pinned for its next user."""
        self.slabs.clear()


@dataclass(frozen=True, slots=True)
class HostPiece:
    """Memory of a pool; uint8, at least as long as asked for.

    Attributes:
        of_graph: a CUDA graph writes it in every replay, so no eager code may have it.
    """

    memory: Tensor
    of_graph: bool


class HostPool:
    """Pieces of slabs, by size class: what is given back serves the next that needs its size.

    A size is rounded up to one of eight classes between two powers of two.

    Args:
        pinned: whether a GPU copies to and from them.
        max_bytes: of all slabs; None = as much as the host has.

    Attributes:
        used_bytes: of pieces that were taken and not given back.
    """

    def __init__(self, *, pinned: bool, max_bytes: int | None = None, device: str = "cpu") -> None:
        self.max_bytes = max_bytes
        self._slabs = Slabs(pinned=pinned, device=device)
        self.used_bytes = 0
        self._free: defaultdict[tuple[int, bool], list[Tensor]] = defaultdict(list)

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that the pool has made."""
        return self._slabs.num_bytes

    def take(self, num_bytes: int, *, in_capture: bool = False) -> HostPiece | None:
        """Return a piece; None where it would take more than `max_bytes`.

        Args:
            in_capture: for a CUDA graph that is being captured, which keeps it for its replays. No
                memory is pinned then, so None also where no free piece fits.

        Raises:
            RuntimeError: when the host has no memory left.
        """
        memory = self._find(size_class(num_bytes), in_capture)
        if memory is None:
            return None
        self.used_bytes += memory.numel()
        return HostPiece(memory, in_capture)

    def give(self, piece: HostPiece) -> None:
        """Take a piece back. Launched work may read it yet: see the note "streams" in `offload`."""
        self.used_bytes -= piece.memory.numel()
        self._free[piece.memory.numel(), piece.of_graph].append(piece.memory)

    def clear(self) -> None:
        """Free all memory."""
        self._free.clear()
        self._slabs.clear()

    def _find(self, size: int, in_capture: bool) -> Tensor | None:
        for of_graph in (True, False) if in_capture else (False,):
            if self._free[size, of_graph]:
                return self._free[size, of_graph].pop()
        slab = self._slabs.fitting(size)
        if slab is None and not in_capture:
            slab = self._grow(size)
        return None if slab is None else slab.take(size)

    def _grow(self, size: int) -> Slab | None:
        """Return a slab as large as all there are, up to `SLAB_BYTES`; or the least that fits."""
        made = self.num_bytes
        limit = float("inf") if self.max_bytes is None else self.max_bytes
        least = power_of_two(size)
        for num_bytes in (max(least, min(power_of_two(made), SLAB_BYTES)), least):
            if made + num_bytes > limit:
                continue
            try:
                return self._slabs.add(num_bytes)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                raise RuntimeError(
                    f"host memory for offloaded tensors ({made} bytes) could not grow by "
                    f"{num_bytes} ({reason}): set max_host_bytes to what the host has"
                ) from error
        return None


def size_class(num_bytes: int) -> int:
    """Return the size of the pieces for so many bytes.

    Example: 1000 -> 1024, 1025 -> 1152, 1153 -> 1280; 1 -> 64.
    """
    step = max(ALIGN_BYTES, power_of_two(num_bytes) // 16)
    return -(-max(num_bytes, 1) // step) * step


def aligned(num_bytes: int) -> int:
    """Return the bytes that a tensor of so many takes in a slab."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def power_of_two(num_bytes: int) -> int:
    """Return the least power of two that is not smaller."""
    return 1 << max(num_bytes - 1, 0).bit_length()
