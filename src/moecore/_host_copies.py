"""Host memory that a rank's tensors are copied into: made once, pinned for CUDA tensors.

Background saves and optimizer states that leave the GPU use it. Pinning takes seconds for what a
GPU holds, and torch rounds every pinned allocation up to a power of two. So tensors lie side by
side in slabs whose sizes are powers of two already, and every later copy uses the same slabs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

SLAB_BYTES = 2**30  # large beside a tensor, so that little is left at its end
ALIGN_BYTES = 64  # a cache line; no dtype needs more


@dataclass(slots=True)
class _Slab:
    """Memory that is handed out from front to back; uint8."""

    memory: Tensor
    used: int = 0

    def room(self) -> int:
        return self.memory.numel() - self.used

    def take(self, like: Tensor) -> Tensor:
        data = self.memory[self.used : self.used + like.nbytes]
        self.used += _aligned(like.nbytes)
        return data.view(like.dtype).view(like.shape)


class HostCopies:
    """Copies of named tensors in host memory, all overwritten by the next `fill`."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._slabs: dict[bool, list[_Slab]] = {False: [], True: []}  # key: pinned
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def reserve(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name -> memory for a host copy; make what is missing, slowly where it must pin.

        Args:
            tensors: name -> plain tensor on any device; only shape, dtype and device are read.

        Raises:
            RuntimeError: when there is no memory.
        """
        new: dict[bool, list[str]] = {False: [], True: []}
        for name, tensor in tensors.items():
            copy = self._copies.get(name)
            if copy is None:
                new[tensor.is_cuda].append(name)
            elif (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                # On its own it can be given back; in a slab each change would cost another place.
                self._copies[name] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                )
        for pinned, names in new.items():
            names.sort(key=lambda name: -tensors[name].nbytes)
            left = sum(_aligned(tensors[name].nbytes) for name in names)
            for name in names:
                size = _aligned(tensors[name].nbytes)
                slab = self._slab_with(size, left, pinned=pinned)
                self._copies[name] = slab.take(tensors[name])
                left -= size
        return {name: self._copies[name] for name in tensors}

    def fill(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name -> host copy, of what the current streams have made of the tensors so far.

        Waits once, for the copies and the work before them; so the tensors may change as soon as
        this returns. What other streams do goes on. The copies hold until the next `fill`.

        Args:
            tensors: name -> plain tensor on any device.

        Raises:
            RuntimeError: when there is no memory for copies that `reserve` has not made.
        """
        copies = self.reserve(tensors)
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        streams = {device: self._side_stream(device) for device in devices}
        try:
            for device, stream in streams.items():
                with torch.cuda.stream(stream):
                    for name, tensor in tensors.items():
                        if tensor.device == device:
                            copies[name].copy_(tensor, non_blocking=True)
            for name, tensor in tensors.items():
                if not tensor.is_cuda:  # meanwhile
                    copies[name].copy_(tensor)
        finally:  # also after an error: nothing may be on its way into memory that is given back
            for stream in streams.values():
                stream.synchronize()
        return copies

    def num_bytes(self) -> int:
        """Return the bytes of all slabs."""
        return sum(slab.memory.numel() for slabs in self._slabs.values() for slab in slabs)

    def clear(self) -> None:
        """Let go of all memory; torch keeps what was pinned for its next user."""
        self._copies.clear()
        self._slabs = {False: [], True: []}

    def _slab_with(self, size: int, left: int, *, pinned: bool) -> _Slab:
        """Return a slab with room for `size` bytes; a new one has room for all that is left.

        But for `SLAB_BYTES` at most, or a single tensor.
        """
        for slab in self._slabs[pinned]:
            if slab.room() >= size:
                return slab
        num_bytes = _power_of_two(max(size, min(left, SLAB_BYTES)))
        slab = _Slab(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned))
        self._slabs[pinned].append(slab)
        return slab

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of the copies; it first waits for the current one."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _power_of_two(num_bytes: int) -> int:
    return 1 << max(num_bytes - 1, 0).bit_length()
