"""TrainingOffload: moves a training's device memory to the host between two steps, and back.

    part          contents                                                  place during offload
    "weights"     parameters (shards, FP8 blocks) and buffers of modules    host memory
    "grads"       gradients of parameters                                   host memory
    "optimizer"   tensors of the optimizers' state                          host memory
    "buffers"     memory without values between steps: unsharded            none: freed
                  parameters, sums of gradients, exchanges of "nvlink",
                  pages, graphs
    "all"         all parts, and the cache of torch's allocator

A tensor stays the same object, and so does its storage, which has no bytes during the offload.
Other views of the storage (FSDP's, the caller's) are valid again after `onload`. The moved
tensors are views of pinned host memory, where checkpoints and weight transfer read and write them.
A forward without "weights" or "buffers" raises, and so does an optimizer's step without any part.
"""

import gc
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moecore.base.fields import check_arguments
from moecore.base.torch_private import get_storage_key, get_stored_local_tensor, tree_leaves
from moecore.moe.param_reader import get_fp8_blocks
from moecore.moe.stored_weights import get_host_matrix
from moecore.parallel.fsdp.buffers import Buffer
from moecore.parallel.model.parallel_state import (
    get_progress,
    list_engines,
    list_parallel_states,
    reshard_units,
)
from moecore.train.graphs.regions import drop_graphs
from moecore.train.memory.host import HostCopies, MovedStorage, explain_memory_errors
from moecore.train.memory.stash import Stash

Part = Literal["weights", "grads", "optimizer", "buffers"]
PartOrAll = Literal["weights", "grads", "optimizer", "buffers", "all"]
PARTS: tuple[Part, ...] = get_args(Part)
GARBAGE_BYTES = 64 * 2**20  # left of a training: perhaps what reference cycles alone refer to


class TrainingOffload:
    """Frees a training's device memory for other code, such as an inference engine.

    Training steps have the same bits as without an offload. Call the methods between steps, on
    every rank. With dispatcher "nvlink" or `FSDPOptions.nccl_ub`, offload and onload of "buffers"
    are collective. The host waits for copies. The first call pins host memory, which takes seconds;
    later calls reuse it. CUDA contexts, NCCL communicators and loaded kernels stay on the device.

    Args:
        model: a model; it may be parallelized.
        optimizer: one or several optimizers of the model; None = only weights, gradients and
            buffers are moved.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None
    ) -> None:
        check_arguments(TrainingOffload.__init__, locals())
        several = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        self._model, self._optimizers = model, list(several or ())
        self._device = get_stored_local_tensor(next(model.parameters())).device
        self._copies = HostCopies()
        self._host_parts: dict[Part, list[MovedStorage]] = {}
        self._freed: list[Buffer[Any]] = []
        self._guards: list[Any] = []

    @property
    def offloaded_parts(self) -> frozenset[Part]:
        """The parts, such as "weights", whose memory is not on the device."""
        return frozenset(self._host_parts)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are reserved."""
        return self._copies.count_bytes()

    @torch.no_grad()
    def offload(self, selection: PartOrAll = "all") -> None:
        """Free device memory of "weights", "grads", "optimizer", "buffers" or "all" of these parts.

        Raises:
            ValueError: within a step; while a `GraphedForwardBackward` of the model is captured;
                for memory that torch did not allocate. No tensor of the part was moved.
            MemoryError: when host memory is insufficient. The part is then on the device.
        """
        check_arguments(TrainingOffload.offload, locals())
        self._check_may_offload(selection)
        reshard_units(self._model)
        for part in PARTS if selection == "all" else (selection,):
            if part in self._host_parts:
                continue
            if part == "buffers":
                self._free_buffers()
            self._host_parts[part] = self._move_part_to_host(part)
        if not self._guards:
            # Hooks that raise in forward and optimizer steps while parts are offloaded.
            check_forward = partial(self._check_parts_on_device, "forward", {"weights", "buffers"})
            check_step = partial(self._check_parts_on_device, "optimizer.step()", set(PARTS))
            self._guards.append(self._model.register_forward_pre_hook(check_forward, prepend=True))
            self._guards += [o.register_step_pre_hook(check_step) for o in self._optimizers]
            # Before a schedule, because later stages wait for the first before their forward.
            pipelines = (state.pipeline for state in list_parallel_states(self._model))
            self._guards += [p.register_pre_hook(check_forward) for p in pipelines if p is not None]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            if selection == "all" and torch.cuda.memory_allocated(self._device) > GARBAGE_BYTES:
                gc.collect()  # 0.1 s
            torch.cuda.empty_cache()

    @torch.no_grad()
    def onload(self, selection: PartOrAll = "all") -> None:
        """Move one part or "all" back to the device, in the order of its current stream.

        Raises:
            torch.OutOfMemoryError: when device memory is insufficient. Storages that were moved
                stay on the device, and the remaining storages on the host. Call `onload` again.
        """
        check_arguments(TrainingOffload.onload, locals())
        for part in PARTS if selection == "all" else (selection,):
            storages = self._host_parts.get(part, [])
            while storages:
                storages[-1].allocate_device_memory()
                storages[-1].memory.copy_(storages[-1].host, non_blocking=True)
                storages.pop().move_to_device()
            while part == "buffers" and self._freed:
                self._freed[-1].reallocate()
                self._freed.pop()
            self._host_parts.pop(part, None)
        if not self._host_parts:
            for guard in self._guards:
                guard.remove()
            self._guards.clear()

    def _check_may_offload(self, selection: PartOrAll) -> None:
        """Raise ValueError within a step, or while a captured graph relies on tensor addresses."""
        progress = get_progress(self._model)
        if progress is not None:
            progress.check_no_open_micro_batch("offload()")
            if progress.num_done:
                raise ValueError(
                    f"offload() must be between steps, but {progress.num_done} micro-batches of "
                    "this one are done: call finish() or drop() first"
                )
        for record in list_parallel_states(self._model) if selection != "optimizer" else ():
            if record.capacity is not None and record.capacity.graph_steps is not None:
                raise ValueError(
                    "GraphedForwardBackward (captured) must not rely on addresses that change: "
                    "call its close() before offload(), after which it captures anew"
                )

    def _check_parts_on_device(self, caller: str, required_parts: set[str], *_: Any) -> None:
        lacks = self.offloaded_parts & required_parts
        if lacks:
            raise ValueError(
                f"{caller} must not run while {', '.join(sorted(lacks))} of the training are off "
                "the device: call onload() first"
            )

    def _move_part_to_host(self, part: Part) -> list[MovedStorage]:
        """Copy a part's storages to the host, free their device memory, and return the storages."""
        groups: dict[int, list[Tensor]] = {}
        local_tensors = map(get_stored_local_tensor, self._list_part_tensors(part))
        for tensor in {id(x): x for x in local_tensors}.values():
            if tensor.device == self._device and tensor.untyped_storage().nbytes():
                groups.setdefault(get_storage_key(tensor), []).append(tensor)
        for tensors in groups.values():
            if not tensors[0].untyped_storage().resizable():
                raise ValueError(
                    f"memory of {part} (of a tensor {tuple(tensors[0].shape)}) must be torch's own "
                    "to be freed: clone what comes from files, other processes or libraries"
                )
        gib = sum(tensors[0].untyped_storage().nbytes() for tensors in groups.values()) / 2**30
        with explain_memory_errors(f"{part} ({gib:.1f} GiB)"):
            named = {f"{part}.{i}": tensors for i, tensors in enumerate(groups.values())}
            storages = self._copies.reserve_storages(named)
            self._copies.copy_and_wait((storage.host, storage.memory) for storage in storages)
        for storage in storages:
            storage.move_to_host()
        return storages

    def _list_part_tensors(self, part: Part) -> Iterator[Tensor]:
        params = list(self._model.parameters())
        if part == "weights":
            yield from params
            yield from self._model.buffers()
            for blocks in filter(None, map(get_fp8_blocks, params)):
                yield from blocks.tensors()
        elif part == "grads":
            yield from (param.grad for param in params if param.grad is not None)
        elif part == "optimizer":
            leaves = tree_leaves([dict(optimizer.state) for optimizer in self._optimizers])
            yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))

    def _free_buffers(self) -> None:
        """Free CUDA graphs, exchange buffers, pages and FSDP buffers. Collective, see the class."""
        drop_graphs(self._model)
        for record in list_parallel_states(self._model):
            if record.exchanges is not None:
                record.exchanges.close()
            if isinstance(record.stash, Stash):
                record.stash.free_pages()
        for matrix in filter(None, map(get_host_matrix, self._model.parameters())):
            matrix.drop_device_copies()
        units = [unit for engine in list_engines(self._model) for unit in engine.units]
        self._freed = list(dict.fromkeys(b for unit in units for b in unit.list_buffers()))
        for buffer in self._freed:
            buffer.free()
