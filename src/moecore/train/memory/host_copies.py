"""HostCopies: copies of named tensors in host memory, pinned for CUDA tensors.

Background saves and `StateOffload` use it. Tensors lie side by side in slabs
(`train/memory/host.py`); later copies use the slabs of the first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moecore.train.memory import host
from moecore.train.memory.host import Slab, Slabs, aligned, power_of_two


class HostCopies:
    """Copies of named tensors in host memory, all overwritten by the next `fill`."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        # By the type of the source's device: pinned for a GPU, without memory for meta.
        self._slabs = {of: Slabs(pinned=of == "cuda") for of in ("cpu", "cuda")}
        self._slabs["meta"] = Slabs(pinned=False, device="meta")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def reserve(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name -> memory for a host copy; allocate missing memory, which is slow to pin.

        Args:
            tensors: name -> plain tensor on any device; only shape, dtype and device are read.

        Raises:
            RuntimeError: when the host has no memory left.
        """
        new: dict[str, list[str]] = {of: [] for of in self._slabs}
        for name, tensor in tensors.items():
            copy = self._copies.get(name)
            if copy is None:
                new[tensor.device.type].append(name)
            elif (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                # Memory of its own can be freed; in a slab each change would take further bytes.
                self._copies[name] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                )
        for of, names in new.items():
            names.sort(key=lambda name: -tensors[name].nbytes)
            left = sum(aligned(tensors[name].nbytes) for name in names)
            for name in names:
                like, size = tensors[name], aligned(tensors[name].nbytes)
                data = _slab_with(self._slabs[of], size, left).take(like.nbytes)
                self._copies[name] = data.view(like.dtype).view(like.shape)
                left -= size
        return {name: self._copies[name] for name in tensors}

    def fill(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name -> host copy of the tensors, after the current streams' work so far.

        One host sync waits for the copies and the work before them, so the tensors may change as
        soon as this returns. Other streams go on. The copies are valid until the next `fill`.

        Args:
            tensors: name -> plain tensor on any device.

        Raises:
            RuntimeError: when `reserve` has not made all memory and the host has none left.
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
        finally:  # also after an error: no copy may write into memory that the caller frees
            for stream in streams.values():
                stream.synchronize()
        return copies

    def num_bytes(self) -> int:
        """Return the bytes of all slabs."""
        return sum(slabs.num_bytes for slabs in self._slabs.values())

    def clear(self) -> None:
        """Free all memory; torch caches pinned memory for its next user."""
        self._copies.clear()
        for slabs in self._slabs.values():
            slabs.clear()

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of the copies; it first waits for the current one."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]


def _slab_with(slabs: Slabs, size: int, left: int) -> Slab:
    """Return a slab with `size` free bytes; a new slab has `left` bytes, up to `SLAB_BYTES`."""
    found = slabs.fitting(size)
    return found or slabs.add(power_of_two(max(size, min(left, host.SLAB_BYTES))))
