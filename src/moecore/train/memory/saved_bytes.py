"""Bytes that a model's blocks save for backward, counted before anything is allocated.

saved_bytes = count_saved_bytes(model, blocks, lambda copy: copy(tokens), options=options, ...)
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from moecore.base.copies import copy_modules
from moecore.base.options.memory import MemoryOptions, StashOptions
from moecore.base.saved_tensors import find_used_rows, use_packer
from moecore.base.torch_private import get_storage_key
from moecore.kernels.common import cdiv
from moecore.kernels.meta import treat_meta_as
from moecore.moe.balance import BalanceGroups, LoadTracker
from moecore.moe.experts import Experts
from moecore.moe.layer import RoutedLayer
from moecore.moe.param_reader import ParamReader
from moecore.train.memory.apply import apply_memory_options
from moecore.train.memory.on_meta import META, OnMeta
from moecore.train.memory.parts import find_parts

# Mesh dims whose ranks compute with a part of a parameter.
SHARDED_DIMS = ("ep", "etp", "tp")
OBSERVERS = ("tape", "observe_scores")  # attributes that would record what did not happen
NAMES = {"moe": "routing"}  # an MoE layer without its experts counts as routing
OUTER = ("", "rest", "routing")  # parts that contain other parts
Parts = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Bytes that the forward of one block saves for backward, on the device and in host memory.

    The keys of both dicts are names of the block's parts, such as "attention". A storage that
    several parts save is counted only for the first part.
    """

    device: Parts
    host: Parts

    @property
    def num_bytes(self) -> int:
        """Bytes in device memory, summed over all parts."""
        return sum(self.device.values())


@dataclass(frozen=True, slots=True)
class ModelSavedBytes:
    """Bytes that a forward saves, per block; `outside` counts storages of no or several blocks."""

    blocks: tuple[SavedBytes, ...]
    outside: SavedBytes


def count_saved_bytes(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    run_forward: Callable[[Any], Any],
    *,
    options: MemoryOptions,
    device_type: str,
    get_compute_dtype: Callable[[Tensor], torch.dtype] = lambda param: param.dtype,
    compiled_modules: Set[nn.Module] = frozenset(),
) -> ModelSavedBytes:
    """Return the bytes that a training forward saves for backward, counted on a copy on meta.

    The count allocates no device memory, does not communicate and does not change the model. It is
    exact for eager code, with two exceptions: uneven expert loads, and attention kernels that save
    other tensors than `OnMeta` assumes. Compiled code is counted as eager code, because the
    compiler chooses the tensors that it saves.

    Args:
        model: a plain or parallelized model on any device.
        blocks: the model's transformer blocks.
        run_forward: calls the copy of the model that it receives, with tensors on any device.
        options: recomputation and offload, which replace the model's current options.
        device_type: the device whose kernels save tensors, "cuda" or "cpu".
        get_compute_dtype: maps a parameter to the dtype in which forward computes.
        compiled_modules: modules in compiled code, to which `options` do not apply.
    """
    copies = _copy_to_meta(model, get_compute_dtype)
    inner = [copies[block] for block in blocks]
    for module in copies.values():
        if isinstance(module, Experts):
            module.recompute_fc1 = "expert_fc1" in options.parts
    on_meta = OnMeta(device_type)
    weights = {get_storage_key(p) for p in copies[model].parameters()}
    count = _StorageCounter(weights, on_meta.move_to_meta, options.stash)
    without = {copies[module] for module in compiled_modules}
    with warnings.catch_warnings():  # which the model's own options gave
        warnings.simplefilter("ignore")
        offload = apply_memory_options(inner, options, META, compiled_modules=without)
    if offload is not None:
        offload.observe = count
    for i, block in enumerate(inner):
        for _, kind, module in list(find_parts(block)):
            count.wrap_forward(module, i, NAMES.get(kind, kind))
        count.wrap_forward(block, i, "rest")
    with treat_meta_as(device_type), use_packer(count), on_meta, torch.enable_grad():
        out = run_forward(copies[model])
    saved_bytes = count.sum_by_block(len(blocks), set() if offload is None else offload.stored_keys)
    del out  # its graph has kept the saved storages until here
    return saved_bytes


@dataclass(slots=True)
class _Storage:
    """A saved storage (or its pages), with its part and the blocks that save it; -1 = no block."""

    num_bytes: int
    ref: StorageWeakRef  # while it is there no other storage has its key
    part: str
    blocks: list[int]


class _StorageCounter:
    """Counts the bytes of saved storages by block and part, each storage once, without weights.

    `weight_keys` are the keys of storages that are not counted. `move_to_meta` returns a tensor's
    copy on meta. With `stash_options`, the used rows of experts are counted as full pages.
    """

    def __init__(
        self,
        weight_keys: Set[int],
        move_to_meta: Callable[[Tensor], Tensor],
        stash_options: StashOptions | None,
    ) -> None:
        self.weights, self.move, self.stash = weight_keys, move_to_meta, stash_options
        self.storages: dict[int, _Storage] = {}  # by `StorageWeakRef.cdata`
        self._place: tuple[int, str] = (-1, "")

    def __call__(self, tensor: Tensor) -> None:
        """Count a saved tensor's storage, unless it is a weight, for the running block and part."""
        rows = None if self.stash is None else find_used_rows(tensor)
        tensor, (block, part) = self.move(tensor), self._place
        if get_storage_key(tensor) in self.weights:
            return
        storage = tensor.untyped_storage()
        ref = StorageWeakRef(storage)
        if ref.cdata not in self.storages:
            num_bytes = storage.nbytes()
            if self.stash is not None and rows is not None and rows.balanced is not None:
                pages = cdiv(rows.balanced, self.stash.page_rows)
                num_bytes = num_bytes // rows.length * self.stash.page_rows * pages
            self.storages[ref.cdata] = _Storage(num_bytes, ref, part, [])
        self.storages[ref.cdata].blocks.append(block)

    def wrap_forward(self, module: nn.Module, block_idx: int, part_name: str) -> None:
        """Wrap a module's forward: its saved tensors count for this part of block `block_idx`."""
        forward = module.forward

        def forward_in_part(*args: Any, **kwargs: Any) -> Any:
            if self._place[1] not in OUTER:
                return forward(*args, **kwargs)
            before, self._place = self._place, (block_idx, part_name)
            try:
                return forward(*args, **kwargs)
            finally:
                self._place = before

        module.forward = forward_in_part

    def sum_by_block(self, num_blocks: int, host_keys: Set[int]) -> ModelSavedBytes:
        """Return the bytes by block and part; storages in `host_keys` count as host memory."""
        sums: list[tuple[Counter[str], Counter[str]]]
        sums = [(Counter(), Counter()) for _ in range(num_blocks + 1)]
        for address, storage in self.storages.items():
            if storage.ref.expired() and address not in host_keys:
                continue
            first, *other_blocks = dict.fromkeys(storage.blocks)
            place = (-1, "outside") if other_blocks or first < 0 else (first, storage.part)
            sums[place[0]][address in host_keys][place[1]] += storage.num_bytes
        *blocks, outside = (SavedBytes(dict(device), dict(host)) for device, host in sums)
        return ModelSavedBytes(tuple(blocks), outside)


def _copy_to_meta(
    model: nn.Module, get_compute_dtype: Callable[[Tensor], torch.dtype]
) -> dict[nn.Module, nn.Module]:
    """Return module -> copy on meta, without wrappers, with parameters in their compute dtype."""

    def compute_param(param: nn.Parameter) -> nn.Parameter:
        shape = list(param.shape)
        if isinstance(param, DTensor):  # local over ep, etp and tp, otherwise full
            names = param.device_mesh.mesh_dim_names or ()
            for i, (name, placement) in enumerate(zip(names, param.placements, strict=True)):
                if name in SHARDED_DIMS and not placement.is_replicate():
                    shape[placement.dim] //= param.device_mesh.size(i)  # type: ignore[attr-defined]
        empty = torch.empty(shape, dtype=get_compute_dtype(param), device=META)
        return nn.Parameter(empty, requires_grad=param.requires_grad)

    copies = copy_modules(model, compute_param, removes_wrappers=True)
    for module in copies.values():
        state = vars(module)
        state |= {name: None for name in OBSERVERS if name in state}
        state["training"] = True
        if isinstance(module, Experts):
            state["reader"] = ParamReader()
        if isinstance(module, RoutedLayer):
            cp = module.tracker.groups.cp
            state["tracker"] = LoadTracker(module.config, runs=module.runs)
            state["tracker"].groups = BalanceGroups(cp=cp)  # alone
    return copies
