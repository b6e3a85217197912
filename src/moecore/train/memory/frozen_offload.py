"""FrozenOffload: stores frozen experts in 4 bits in host memory; copies a layer at a time.

    experts of layer i read a matrix   the stream waits for the copy of layer i
                                       device memory of other layers is freed
                                       the copy of the next layer starts

The next layer is predicted: it is the layer that was last read after the same two layers, at first
the neighbour in a forward or backward of all layers. If another layer is read, such as in a
schedule of pipeline stages, its copy starts when it is read. At most two layers are on the device.
All layers are read on one stream, and the host waits for no copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moecore.kernels.rows.scaling import Blocks
from moecore.moe.experts import Experts
from moecore.moe.stored_weights import HostBlocks, get_four_bit_blocks, store_on_host
from moecore.train.memory.host import HostCopies, explain_memory_errors
from moecore.train.memory.streams import CopyEvent, CopyJob, CopyStream


class _Matrix:
    """The 4-bit blocks of a parameter in host memory, and on the device while they are read."""

    def __init__(self, offload: FrozenOffload, layer: _OffloadedLayer, blocks: Blocks) -> None:
        self._offload, self._layer = offload, layer
        self._places = [(t.shape, t.stride()) for t in blocks.tensors()]
        self._kind = blocks.kind
        # Contiguous values and scales, each with the elements in the order of their memory.
        self.host = [t.new_empty(t.numel(), device="meta") for t in blocks.tensors()]
        self.device: list[Tensor] = []

    def allocate(self, device: torch.device) -> HostBlocks:
        """Return the blocks in host memory, which is allocated for the first real `device`."""
        if device.type != "meta" and self.host[0].is_meta:
            self._offload.reserve_host_memory(device)
        values, scales = self._view(self.host)
        return HostBlocks(values, scales, self._kind, matrix=self)

    def fetch(self) -> Blocks:
        """Return the blocks on the device, for work of its current stream."""
        self._offload.fetch_layer(self._layer)
        values, scales = self._view(self.device)
        return Blocks(values, scales, self._kind)

    def drop_device_copies(self) -> None:
        """Free the device memory of all layers, whose host memory may then change. Host sync."""
        self._offload.drop_device_copies()

    def _view(self, flats: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield values and scales as views of `flats`."""
        for flat, place in zip(flats, self._places, strict=True):
            yield flat.as_strided(*place, int(flat.storage_offset()))


class _OffloadedLayer:
    """The matrices of a layer's experts, which are copied together."""

    def __init__(self) -> None:
        self.matrices: list[_Matrix] = []
        self.copy_event: CopyEvent | None = None  # the end of the copy; None = not on the device


class FrozenOffload:
    """Stores 4-bit matrices of frozen experts in host memory; copies a layer when it is read.

    Parameters on meta get host memory when they are moved to a device.
    """

    def __init__(self, layers: Sequence[Experts], device: torch.device) -> None:
        self._device, self._stream, self._copies = device, CopyStream(device), HostCopies()
        self._layers: list[_OffloadedLayer] = []
        self._resident: list[_OffloadedLayer] = []  # on the device
        self._last_two: tuple[_OffloadedLayer | None, _OffloadedLayer | None] = (None, None)
        for experts in layers:
            layer = _OffloadedLayer()
            self._layers.append(layer)
            for name in experts.summed_dims:
                blocks = get_four_bit_blocks(getattr(experts, name))
                assert blocks is not None, "the experts are stored in 4 bits"
                layer.matrices.append(_Matrix(self, layer, blocks))
        backward = self._layers[-2::-1]
        order = [None, *self._layers, *backward, *self._layers[1:2]]
        triples = zip(order, order[1:], order[2:], strict=False)
        # The last two layers -> the layer that was read next.
        self._next: dict[Any, Any] = {(first, second): third for first, second, third in triples}
        for experts, layer in zip(layers, self._layers, strict=True):
            for name, matrix in zip(experts.summed_dims, layer.matrices, strict=True):
                store_on_host(getattr(experts, name), matrix)

    def reserve_host_memory(self, device: torch.device) -> None:
        """Allocate the host memory of all matrices, pinned for copies to a "cuda" `device`."""
        matrices = [matrix for layer in self._layers for matrix in layer.matrices]
        flats = [flat for matrix in matrices for flat in matrix.host]
        likes = {
            str(i): flat.new_empty((), device=device).expand(flat.shape)
            for i, flat in enumerate(flats)
        }
        gib = sum(like.nbytes for like in likes.values()) / 2**30
        with explain_memory_errors(f"MemoryOptions.offload_frozen ({gib:.1f} GiB)"):
            memory = self._copies.reserve_like(likes)
        for i, matrix in enumerate(matrices):
            matrix.host = [memory[str(2 * i)], memory[str(2 * i + 1)]]

    @torch.no_grad()
    def fetch_layer(self, layer: _OffloadedLayer) -> None:
        """Make the current stream wait for a layer's copy, and start the copy of the next layer."""
        if self._stream.is_capturing():
            raise ValueError(
                "MemoryOptions.offload_frozen (True) must be False where experts are captured in a "
                "CUDA graph: set one of them to False"
            )
        if layer is not self._last_two[1]:
            self._next[self._last_two] = layer
            self._last_two = self._last_two[1], layer
        # Memory is freed and reused in the order of the current stream, which copies wait for.
        resident = [layer, self._next.get(self._last_two, layer)]
        self._free([other for other in self._resident if other not in resident])
        self._resident = resident
        for other in resident:
            if other.copy_event is None:
                for matrix in other.matrices:
                    device = "meta" if matrix.host[0].is_meta else self._device
                    matrix.device = [torch.empty_like(x, device=device) for x in matrix.host]
                other.copy_event = self._stream.start_copies(
                    CopyJob(target, source)
                    for matrix in other.matrices
                    for target, source in zip(matrix.device, matrix.host, strict=True)
                )
        assert layer.copy_event is not None
        self._stream.wait_for_event(layer.copy_event)

    def drop_device_copies(self) -> None:
        """Free the device memory of all layers. Host sync."""
        self._stream.synchronize()
        self._free(self._resident)

    def _free(self, layers: Iterable[_OffloadedLayer]) -> None:
        """Free the device memory of layers after running copies, on the current stream."""
        for layer in layers:
            if layer.copy_event is not None:
                self._stream.wait_for_event(layer.copy_event)
                layer.copy_event = None
                for matrix in layer.matrices:
                    matrix.device = []
