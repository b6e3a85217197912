"""A step of one rank of a world that is not there: what it would hold at once, and what runs.

    TrainingRun -> the model on meta, parallelized in a fake world -> two steps of its TrainStep
                -> Recorder -> DryRun

The host's code is that of the real step, down to the launches: units, dispatcher, experts,
recompute, offload, the schedule of the stages, clipping, AdamW. So there is nothing to keep in
line with it. Loads are balanced, and what arrives from other ranks has sizes alone.

Not seen: memory that an allocator cannot use, workspace inside of torch's operations, buffers of
NCCL and of dispatcher "nvlink". Routing is that of "alltoall".
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moecore._fields import CountOrZero, check_arguments
from moecore.kernels.common import launches_on_meta
from moecore.memory.on_meta import OnMeta
from moecore.mesh import build_meshes
from moecore.models import Decoder
from moecore.optim.adamw import AdamW
from moecore.parallelize import parallelize_moe
from moecore.planning.recorder import Recorder
from moecore.planning.run import TrainingRun
from moecore.planning.work import Work
from moecore.planning.world import fake_world, in_own_thread, quiet
from moecore.step import TrainStep

ADAMW = "_adamw_kernel"


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """A step of one rank, the second of its run.

    Attributes:
        rank: of the world.
        held: bytes between steps.
        peak: most bytes at once, as `torch.cuda.max_memory_allocated` counts them.
        forward_backward: what the device does until all gradients are there, in order.
        optimizer: what it does behind that: clipping, AdamW.
    """

    rank: int
    held: int
    peak: int
    forward_backward: tuple[Work, ...]
    optimizer: tuple[Work, ...]


def dry_run(run: TrainingRun, rank: CountOrZero = 0) -> DryRun:
    """Return what a step of one rank holds and does. No GPU, no communication.

    Args:
        run: what is trained, and how.
        rank: of the world.

    Raises:
        ValueError, NotImplementedError: as `parallelize_moe` and `fake_world`.
    """
    check_arguments(dry_run, locals())
    return in_own_thread(_step_of, run, rank)


def _step_of(run: TrainingRun, rank: int) -> DryRun:
    recorder = Recorder()
    with fake_world(run.num_gpus, rank), quiet(), launches_on_meta(recorder.launched):
        model = Decoder(run.model, device="meta", dtype=run.dtype)
        parallelize_moe(
            model,
            build_meshes(run.parallel, "cpu"),
            dispatcher="alltoall",
            memory=run.memory,
            precision=run.precision,
            fsdp=run.fsdp,
            pipeline=run.pipeline,
        )
        for tensor in (*model.parameters(), *model.buffers()):
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            recorder.take(own)
        with OnMeta("cuda"), recorder, torch.enable_grad():
            optimizer = AdamW(
                model.parameters(),
                moment_dtype=getattr(torch, run.optimizer.moment_dtype),
                master_remainder=run.optimizer.master_remainder,
            )
            step = TrainStep(
                model, optimizer, max_norm=1.0, num_micro_batches=run.num_micro_batches
            )
            tokens_BT = torch.zeros(run.batch_size, run.seq_len, dtype=torch.int64)
            inputs = {"tokens_BT": tokens_BT, "labels_BT": tokens_BT}
            for _ in range(2):  # the first makes buffers and the optimizer's state
                gc.collect()
                recorder.mark()
                step.forward_backward([inputs] * run.num_micro_batches)
                forward_backward, recorder.works = recorder.works, []
                step.finish()
        moved = sum(_moved(optimizer, param) for param in model.parameters())
        return DryRun(
            rank=rank,
            held=recorder.level,
            peak=recorder.peak,
            forward_backward=tuple(forward_backward),
            optimizer=tuple(_with_bytes(recorder.works, moved)),
        )


def _moved(optimizer: AdamW, param: Tensor) -> int:
    """Return the bytes that a step reads and writes for a parameter: itself, gradient, state."""
    own = param.to_local() if isinstance(param, DTensor) else param
    state = [x for x in optimizer.state_of(param).values() if x.numel() > 1]
    kept = sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in state)
    return 3 * own.nbytes + 2 * kept


def _with_bytes(works: list[Work], moved: int) -> Iterator[Work]:
    """Yield works, AdamW's with the bytes of the tensors whose addresses it is given."""
    number = sum(work.name == ADAMW for work in works)
    for work in works:
        yield replace(work, num_bytes=moved // number) if work.name == ADAMW else work
