"""StateOffload: stores optimizer state in host memory while forward and backward run.

    forward of the first block      the copy of all parts of the state to the host starts
    end of block i, forward         device memory of part i is freed, once its copy is done
    last micro-batch's backward     after each block, the copy of a part to the device starts
    optimizer.step()                waits for the last part

The state is every tensor of `optimizer.state` that is not a scalar, in one part per block. Parts
are copied to the host in the first forward of a step, while activations grow, and back in the last
micro-batch's backward, while activations are freed. The host waits for no copy. If copies take
longer than blocks, the GPU waits: lower `fraction`. A PCIe 5 bus copies 55e9 bytes per second.
"""

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moecore.base.fields import Bound, check_arguments
from moecore.base.torch_private import (
    get_local_tensor,
    get_storage_key,
    is_inside_backward,
    tree_leaves,
)
from moecore.parallel.fsdp.units import find_blocks
from moecore.parallel.model.parallel_state import list_engines
from moecore.train.memory.host import HostCopies, MovedStorage, explain_memory_errors
from moecore.train.memory.streams import CopyEvent, CopyJob, CopyStream

Key = TypeVar("Key", bound=Hashable)
Fraction = Annotated[float, Bound(">=", 0), Bound("<=", 1)]


@dataclass(slots=True)
class _StatePart:
    """Storages of optimizer state that are copied together; `last_copy` is the last copy's end."""

    storages: list[MovedStorage]
    place: Literal["leaving", "away", "coming"]  # to the host, on the host, to the device
    last_copy: CopyEvent


class StateOffload:
    """Offloads an optimizer's state to host memory between its steps, until `close()`.

    Steps have the same bits as without an offload. No host sync, no collective. The first forward
    with state pins host memory, which takes seconds, and later forwards reuse this memory. Its size
    is usually little above the offloaded bytes, and at most twice as large.

    Args:
        optimizer: a torch optimizer whose parameters are on one device.
        model: the model, plain or parallelized; its forward and backward start the copies. With a
            `TrainStep`, state is copied back in the last micro-batch's backward.
        fraction: maximum share of the state's bytes that is offloaded, 0 to 1; the largest tensors
            that fit are chosen.

    Raises:
        ValueError: when an argument has a wrong type or range, the optimizer has an offload
            already, or `step` is captured in a CUDA graph.
        MemoryError: in forward, when host memory is insufficient. All state is then on the device.

    Example:
        step = TrainStep(model, optimizer)
        offload = StateOffload(optimizer, model, fraction=0.5)
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, *, fraction: Fraction = 1.0) -> None:
        check_arguments(StateOffload.__init__, locals())
        if hasattr(optimizer, "bring_state_back"):
            raise ValueError(
                f"optimizer ({type(optimizer).__name__}) must not have a StateOffload already: "
                "close() that one"
            )
        self._optimizer, self._fraction = optimizer, fraction
        params = [param for group in optimizer.param_groups for param in group["params"]]
        # A pipeline stage that trains nothing has an optimizer without parameters.
        self._device = get_local_tensor((*params, *model.parameters())[0]).device
        self._copies, self._stream = HostCopies(), CopyStream(self._device)
        self._parts: list[_StatePart] = []  # none while all state is on the device
        self._blocks = find_blocks(model) or [model]
        self._engines = list_engines(model)
        self._hooks: list[Any] = [
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_state_dict_pre_hook(lambda *_: self.bring_state_back()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.bring_state_back()),
        ]
        self._hooks.append(self._blocks[0].register_forward_pre_hook(self._before_blocks))
        for number, block in enumerate(self._blocks):
            self._hooks.append(block.register_forward_hook(partial(self._after_block, number)))
        vars(optimizer)["bring_state_back"] = self.bring_state_back  # `moecore.io` calls it

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are reserved."""
        return self._copies.count_bytes()

    def bring_state_back(self) -> None:
        """Copy all state back to the device, where it stays until the next forward.

        Later work on the device's current stream may use the state. After an OutOfMemoryError, all
        state is still on the host.
        """
        for part in self._parts:
            self._copy_part_back(part)
        for part in self._parts:
            if part.place == "coming":
                self._stream.wait_for_event(part.last_copy)
                for storage in part.storages:
                    storage.move_to_device()
        self._parts = []

    def close(self) -> None:
        """Copy the state back to the device, remove all hooks, and free the host memory."""
        self.bring_state_back()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        vars(self._optimizer).pop("bring_state_back", None)
        self._copies.clear()

    def _before_step(self) -> None:
        if self._stream.is_capturing():
            raise ValueError(
                "step() must not be captured, because state moves between steps: capture forward "
                "and backward, and step outside, or close() the StateOffload"
            )
        self.bring_state_back()

    @torch.compiler.disable
    def _before_blocks(self, *_: Any) -> None:
        """Before block 0, start copies to the host, and free parts that were copied back unused."""
        if self._stream.is_capturing() or is_inside_backward():
            return
        if not self._parts:
            self._start_copies_to_host()
        for part in self._parts:
            if part.place == "coming":
                self._stream.wait_for_event(part.last_copy)
                for storage in part.storages:
                    storage.free_device_memory()
                part.place = "away"

    @torch.compiler.disable
    def _after_block(self, block_idx: int, _: nn.Module, __: Any, output: Any) -> None:
        """After a block's forward, free state parts up to `block_idx`; backward copies back."""
        if self._stream.is_capturing():
            return
        for part in self._parts[: block_idx + 1]:
            if part.place == "leaving":
                # The model's stream waits for a copy out before it frees the source, and for a
                # copy back before `step`. So memory is freed and reused in the order of one
                # stream, and the allocator needs no event of another.
                self._stream.wait_for_event(part.last_copy)
                for storage in part.storages:
                    storage.move_to_host()
                part.place = "away"
        tensors = (x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad)
        first = next(tensors, None)
        if first is not None:
            first.register_hook(lambda _: self._start_next_copy_back(block_idx))

    def _start_next_copy_back(self, block_idx: int) -> None:
        """In the last micro-batch, start to copy a part to the GPU before block `block_idx`."""
        progress = next((p for p in (r.progress() for r in self._engines) if p is not None), None)
        if self._stream.is_capturing() or (progress is not None and not progress.is_last):
            return
        num_parts = len(self._blocks) - 1 - block_idx
        with suppress(torch.OutOfMemoryError):  # `step` then fetches the part
            for part in self._parts if block_idx == 0 else self._parts[:num_parts]:
                self._copy_part_back(part)

    @torch.no_grad()
    def _start_copies_to_host(self) -> None:
        """Choose state tensors by `fraction`, and start copies of them to pinned host memory."""
        movable = _find_movable_storages(self._optimizer, self._device)
        nbytes = {name: tensors[0].untyped_storage().nbytes() for name, tensors in movable.items()}
        selection = select_largest(self._fraction, nbytes)
        sizes = {name: size for name, size in nbytes.items() if name in selection}
        if not sizes:  # before the first step
            return
        gib = sum(sizes.values()) / 2**30
        subject = f"fraction ({self._fraction}) of the optimizer's state, {gib:.1f} GiB,"
        with explain_memory_errors(subject):
            storages = self._copies.reserve_storages({name: movable[name] for name in sizes})
        by_name = dict(zip(sizes, storages, strict=True))
        # All copies of an optimizer run on one stream: no copy reads memory that an earlier one
        # still writes, on either side.
        for names in _divide_into_parts(sizes, len(self._blocks)):
            part = [by_name[name] for name in names]
            event = self._stream.start_copies(CopyJob(x.host, x.memory) for x in part)
            self._parts.append(_StatePart(part, "leaving", event))

    def _copy_part_back(self, part: _StatePart) -> None:
        """If a part is on the host, allocate its device memory and start the copy back."""
        if part.place != "away":
            return
        try:
            for storage in part.storages:
                storage.allocate_device_memory()
        except torch.OutOfMemoryError:
            for storage in part.storages:
                storage.free_device_memory()
            raise
        # The copies wait for earlier work that used the same memory.
        part.last_copy = self._stream.start_copies(CopyJob(x.memory, x.host) for x in part.storages)
        part.place = "coming"


@torch.no_grad()
def _find_movable_storages(optimizer: Optimizer, device: torch.device) -> dict[str, list[Tensor]]:
    """Return "<param number>.<state name>" -> state tensors of each storage that can be freed."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    storages: dict[int, dict[str, Tensor]] = {}
    for number, param in enumerate(params):
        for slot, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor):
                local = get_local_tensor(value)
                storages.setdefault(get_storage_key(local), {})[f"{number}.{slot}"] = local
    groups = {next(iter(views)): list(views.values()) for views in storages.values()}
    movable = {}
    for name, tensors in groups.items():
        storage = tensors[0].untyped_storage()
        has_scalar = not all(tensor.ndim for tensor in tensors)  # optimizers read it on the host
        is_full = storage.nbytes() == max(tensor.nbytes for tensor in tensors) > 0
        is_local = tensors[0].device == device
        if is_local and is_full and not has_scalar and storage.resizable():
            movable[name] = tensors
    return movable


def select_largest(max_fraction: float, sizes: dict[Key, int]) -> set[Key]:
    """Return the keys of the largest sizes whose sum is at most `max_fraction` of the total."""
    room, keys = max_fraction * sum(sizes.values()), set()
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        if sizes[key] <= room:
            keys.add(key)
            room -= sizes[key]
    return keys


def compute_shard_bytes(param: Tensor) -> int:
    """Return the size in bytes of a parameter's largest shard, equal on all ranks."""
    num_parts = 1
    if isinstance(param, DTensor):
        for dim, placement in enumerate(param.placements):
            num_parts *= 1 if placement.is_replicate() else param.device_mesh.size(dim)
    return -(-param.numel() // num_parts) * param.element_size()


def _divide_into_parts(sizes: dict[str, int], num_parts: int) -> list[list[str]]:
    """Divide names in order into parts of similar bytes: {a: 1, b: 6, c: 3} in 2 is [a, b], [c]."""
    parts: list[list[str]] = [[] for _ in range(num_parts)]
    total, before = sum(sizes.values()), 0
    for name, size in sizes.items():
        parts[before * num_parts // total].append(name)
        before += size
    return parts
