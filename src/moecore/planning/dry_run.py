"""A dry run: the peak memory and the launches of a step of one rank of a fake world.

    TrainingRun -> the model on meta, parallelized in a fake world -> two steps of its TrainStep
                -> WorkRecorder -> DryRun

A dry run executes the host's code of the real step down to the launches: units, dispatcher,
experts, recomputation, offload, the pipeline schedule, clipping and AdamW. Loads are balanced.
Tensors have shapes and no values.

A dry run does not count fragmentation of the allocator, workspace inside torch's operations and
NCCL's buffers. If dispatcher "nvlink" has capacity for more rows than are received, the capacity
decides the memory. A second dry run, with capacity for the received rows, then records the work.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.fields import CountOrZero, check_arguments
from moecore.base.options.precision import Precision
from moecore.base.streams import use_dry_streams
from moecore.base.torch_private import (
    NOTHING,
    allocate_as_host_memory,
    get_local_tensor,
    is_inside_backward,
)
from moecore.kernels.meta import record_launches_on_meta
from moecore.models.tp_products import compute_workspace_bytes
from moecore.moe.stored_weights import get_four_bit_blocks, get_host_matrix
from moecore.parallel.model.parallel_state import get_parallel_state
from moecore.planning.model import ModuleParts
from moecore.planning.record import END, SLICES, PartStart, QueuedLaunch, Work, WorkRecorder
from moecore.planning.run import (
    TrainingRun,
    build_model,
    build_optimizer,
    enter_run_world,
    pause_garbage_collection,
)
from moecore.train.memory.offload import Offload
from moecore.train.memory.on_meta import OnMeta, list_tensors
from moecore.train.memory.parts import BlockPart, find_parts
from moecore.train.memory.saved_bytes import NAMES
from moecore.train.memory.stash import Stash
from moecore.train.optim.adamw import AdamW
from moecore.train.step import TrainStep

ADAMW = "_adamw_kernel"
MAX_MICRO_BATCHES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """Memory and launches of one rank's training step, recorded in the second step of a dry run."""

    rank: int
    resident_bytes: int  # allocated between steps
    peak: int  # as `torch.cuda.max_memory_allocated` counts it
    # Bytes that other ranks read and write, which `peak` does not count: buffers of dispatcher
    # "nvlink", and torch's workspace of exchanges of tp slices.
    buffers: int
    pages: int  # bytes of the device pages of `MemoryOptions.stash`, a part of `resident_bytes`
    queued: tuple[QueuedLaunch, ...]  # in the order in which the host launches them
    # Beginnings of modules' passes (only without a pipeline), and of clipping and the optimizer.
    starts: tuple[PartStart, ...]
    # By part: saved bytes of a forward that are offloaded (of the last block, that could be), by
    # kind; only without a pipeline.
    offloads: Mapping[str, Mapping[str, int]]
    precision: Precision | None = None

    @property
    def forward_backward(self) -> tuple[Work, ...]:
        """The operations of forward and backward, in the order of launches."""
        return _list_launched_work(self.queued[: self.starts[-1].first])

    @property
    def optimizer(self) -> tuple[Work, ...]:
        """The operations of clipping and the optimizer, in the order of launches."""
        return _list_launched_work(self.queued[self.starts[-1].first :])


def _list_launched_work(launches: Iterable[QueuedLaunch]) -> tuple[Work, ...]:
    """Return the operation of each launch, repeated `launch.times` times."""
    return tuple(launch.work for launch in launches for _ in range(launch.times))


def dry_run(run: TrainingRun, rank: CountOrZero = 0) -> DryRun:
    """Return the memory and the launches of a step of `rank`. No GPU, no communication.

    Raises:
        ValueError: for more than 256 micro-batches.
        ValueError, NotImplementedError: as `parallelize_moe` and `fake_world`.
    """
    check_arguments(dry_run, locals())
    if run.num_micro_batches > MAX_MICRO_BATCHES:
        raise ValueError(
            f"TrainingRun.num_micro_batches ({run.num_micro_batches}) must be <= "
            f"{MAX_MICRO_BATCHES} for a dry run, which runs each of them: pass fewer, or use "
            "plan_memory and plan_time (moecore plan), which take any number"
        )
    return record_with_even_loads(run, partial(record_step, rank=rank))


def record_with_even_loads(run: TrainingRun, record_run: Callable[[TrainingRun], DryRun]) -> DryRun:
    """Return one dry run with the memory of `run` and the launches of `run.with_even_loads`."""
    capacity_step = record_run(run)
    if run.with_even_loads == run:
        return capacity_step
    even_step = record_run(run.with_even_loads)  # whose parts may have other numbers of launches
    pairs = zip(capacity_step.starts, even_step.starts, strict=True)
    starts = tuple(start._replace(first=even_start.first) for start, even_start in pairs)
    return replace(capacity_step, queued=even_step.queued, starts=starts)


def record_step(run: TrainingRun, rank: int = 0) -> DryRun:
    """Run two training steps of a rank on meta tensors; return the recording of the second step."""
    recorder = WorkRecorder(run.ranks_per_domain)
    launches = record_launches_on_meta(
        recorder.record_kernel, run.num_peers, has_block_scales=run.has_block_scales
    )
    with (
        enter_run_world(run, rank),
        pause_garbage_collection(),
        launches,
        use_dry_streams(recorder.queues),
    ):
        model = build_model(run, "cpu")
        recorder.params = list(model.parameters())
        on_host = run.memory.offload_params
        for tensor in (*recorder.params, *model.buffers()):
            with (
                allocate_as_host_memory()
                if on_host and isinstance(tensor, nn.Parameter)
                else NOTHING
            ):
                recorder.count_storage(get_local_tensor(tensor))
            blocks = get_four_bit_blocks(tensor) if get_host_matrix(tensor) is None else None
            for part in blocks.tensors() if blocks is not None else ():
                recorder.count_storage(part)
        tokens_BT = run.make_tokens()  # which the caller of a step has allocated
        with OnMeta("cuda"), recorder, torch.enable_grad():
            optimizer = build_optimizer(run, model)
            record = get_parallel_state(model)
            assert record is not None
            if run.pipeline is None:
                if isinstance(record.offload, Offload):
                    record.offload.observe = recorder.count_offload
                register_recorder_hooks(model, run.planned_model.collect_parts(model), recorder)
            step = TrainStep(model, optimizer, max_norm=1.0)
            inputs = run.planned_model.make_inputs(tokens_BT)
            first = 1 if run.pipeline is None else run.num_micro_batches
            for number in (first, run.num_micro_batches):  # the first makes buffers and state
                step.num_micro_batches = number
                gc.collect()
                recorder.start_recording()
                step.forward_backward([inputs] * number)
                recorder.begin_part("B", END)
                with allocate_as_host_memory() if on_host else NOTHING:
                    step.finish()
                recorder.end_part()
        exchanges, stash = record.exchanges, record.stash
        trained = (p for p in model.parameters() if p.requires_grad)
        if on_host:  # clipping and the optimizer run on the CPU, whose time has no cost
            del recorder.queued[recorder.starts[-1].first :]
        optimizer_bytes = sum(_count_optimizer_bytes(optimizer, p) for p in trained)
        return DryRun(
            rank=rank,
            resident_bytes=recorder.level,
            peak=recorder.peak,
            buffers=(0 if exchanges is None else exchanges.planned_bytes)
            + _compute_workspace_bytes(recorder),
            pages=stash.pages.num_bytes if isinstance(stash, Stash) else 0,
            queued=tuple(_set_adamw_bytes(recorder.queued, optimizer_bytes)),
            starts=tuple(recorder.starts),
            offloads=recorder.offloads,
            precision=run.precision,
        )


def _compute_workspace_bytes(recorder: WorkRecorder) -> int:
    """Return the bytes of torch's workspace for exchanges of tp slices; 0 without exchanges."""
    works = (launch.work for launch in recorder.queued if launch.work.name in SLICES)
    sizes = (compute_workspace_bytes(work.name, work.shape[0], work.num_bytes) for work in works)
    return max(sizes, default=0)


def register_recorder_hooks(model: nn.Module, parts: ModuleParts, recorder: WorkRecorder) -> None:
    """Register hooks that tell `recorder` when a module of `parts` begins a forward or backward."""
    calls: dict[str, int] = {}

    def watch(module: nn.Module, part: str, last: nn.Module | None = None) -> None:
        """Record forwards and backwards of a part; its last module is `last` (None = `module`)."""

        def begin_forward(*_: Any) -> None:
            if is_inside_backward():  # a recomputed forward is a part of the backward
                return
            calls[part] = calls.get(part, 0) + 1
            recorder.begin_part("F", name())

        def watch_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = list_tensors(getattr(output, "loss", output))[0]
            if tensor.requires_grad and not is_inside_backward():
                part_name = name()
                tensor.register_hook(lambda _: recorder.begin_part("B", part_name))

        def name() -> str:
            """Return the part's name; "predictions" (MTP) for a forward's later embedding calls."""
            return "predictions" if part == "embedding" and calls[part] > 1 else part

        module.register_forward_pre_hook(begin_forward)
        (last or module).register_forward_hook(watch_output)

    model.register_forward_pre_hook(lambda *_: calls.clear())
    watch(parts.embedding, "embedding")
    for i, layer in enumerate(parts.layers):
        watch(layer, f"layer {i}")
    for layer in parts.mtp:
        watch(layer, "predictions")
    watch(parts.head, "head", parts.loss)
    for layer in (*parts.layers, *parts.mtp):
        for _, kind, module in [*find_parts(layer), BlockPart("", "moe", layer)]:
            name = "rest" if module is layer else NAMES.get(kind, kind)
            module.forward = recorder.attribute_allocations(name)(module.forward)


def _count_optimizer_bytes(optimizer: AdamW, param: Tensor) -> int:
    """Return the bytes that a step of `optimizer` reads and writes for a parameter."""
    state = [x for x in optimizer.prepare_state(param).values() if x.numel() > 1]
    return 3 * get_local_tensor(param).nbytes + 2 * sum(get_local_tensor(x).nbytes for x in state)


def _set_adamw_bytes(launches: list[QueuedLaunch], num_bytes: int) -> Iterator[QueuedLaunch]:
    """Yield the launches with the bytes of AdamW's kernels: equal shares of `num_bytes`."""
    share = num_bytes // max(1, sum(launch.work.name == ADAMW for launch in launches))
    for launch in launches:
        is_adamw = launch.work.name == ADAMW
        yield launch._replace(work=replace(launch.work, num_bytes=share)) if is_adamw else launch
