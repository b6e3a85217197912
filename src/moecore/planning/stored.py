"""What each pipeline rank of a run stores: parameters, gradients, buffers, optimizer state.

TrainingRun -> ShardPlan of each pipeline rank -> RankBytes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import nn

from moecore.base.options.memory import MemoryOptions
from moecore.models import Decoder
from moecore.parallel.mesh import build_meshes
from moecore.parallel.pipeline.layout import Stage
from moecore.parallel.pipeline.schedule import make_schedule
from moecore.parallel.shard.size import RankBytes, rank_bytes
from moecore.parallelize import plan_sharding
from moecore.planning.run import OptimizerOptions, TrainingRun, fake_world, quiet
from moecore.train.optim.adamw import AdamW

WHOLE = Stage(index=0, embedding=True, layers=(), mtp=(), loss=True)


SAMPLE = 1 << 20  # elements whose optimizer state is counted


def stages_of(run: TrainingRun) -> Sequence[Stage]:
    """Return the stages of a run, in the order of forward."""
    if run.pipeline is None:
        return [WHOLE]
    model = run.model
    layout = run.pipeline.stages(run.resolved.pp, model.num_layers, model.num_mtp_layers)
    layout.chunks(run.resolved.pp)  # refused where these do not divide
    return layout.stages


def stored_bytes(run: TrainingRun) -> int:
    """Return the bytes of parameters that the pipeline rank with the most of them stores."""
    return max(size.parameters for size in sizes_of(run))


def held_bytes(run: TrainingRun) -> tuple[int, ...]:
    """Return what each pipeline rank holds between steps, with all state on the device."""
    return tuple(sum(held_kinds(run, size).values()) for size in sizes_of(run))


def sizes_of(run: TrainingRun) -> tuple[RankBytes, ...]:
    """Return what each pipeline rank stores."""
    is_fc1 = "expert_fc1" in run.memory.parts  # which experts may refuse
    plain = replace(
        run,
        seq_len=min(run.seq_len, run.model.num_mtp_layers + 1),
        batch_size=1,
        num_micro_batches=1,
        memory=MemoryOptions(recompute=("expert_fc1",) if is_fc1 else ()),
        optimizer=OptimizerOptions(master_remainder=run.optimizer.master_remainder),
        nvlink=None,
    )
    return _sizes(plain)


@lru_cache(maxsize=1024)
def _sizes(run: TrainingRun) -> tuple[RankBytes, ...]:
    """Return what each pipeline rank stores; ranks whose stages have the same parts once."""
    stages, rank_of, found = stages_of(run), ranks_of(run), dict[Any, RankBytes]()
    by_name = run.precision is not None and run.precision.overrides  # layers may differ
    kind_of: Callable[[int], int] = (lambda i: i) if by_name else run.model.is_dense
    keys = []
    for rank in range(run.resolved.pp):
        key = tuple(
            (s.embedding, s.loss, s.mtp, tuple(map(kind_of, s.layers)))
            for s in stages
            if rank_of[s.index] == rank
        )
        keys.append(key)
        if key not in found:
            found[key] = _rank_size(run, rank)
    return tuple(found[key] for key in keys)


def _rank_size(run: TrainingRun, pp_rank: int) -> RankBytes:
    rank = pp_rank * run.num_gpus // run.resolved.pp
    with fake_world(run.num_gpus, rank), quiet():
        plan = plan_sharding(
            Decoder(run.model, device="meta", dtype=run.dtype),
            build_meshes(run.parallel, "cpu"),
            dispatcher="alltoall",
            memory=run.memory,
            precision=run.precision,
            fsdp=run.fsdp,
            pipeline=run.pipeline,
        )
    return rank_bytes(plan, rank)


def ranks_of(run: TrainingRun) -> Sequence[int]:
    """Return the pipeline rank of each stage."""
    if run.pipeline is None:
        return (0,)
    pp = run.resolved.pp
    chunks = len(stages_of(run)) // pp
    return make_schedule(run.pipeline.schedule, pp=pp, chunks=chunks, num_micro_batches=1).rank_of


def held_kinds(run: TrainingRun, size: RankBytes) -> dict[str, int]:
    """Return what a rank holds between steps, by kind."""
    found = {f"parameters: {role.role}": role.parameters for role in size.roles}
    found |= {"gathered weights": size.weights, "sums of gradients": size.sums}
    per_element = state_bytes(run.optimizer, run.dtype)
    found["optimizer state"] = int(size.parameters // run.dtype.itemsize * per_element)
    return found


@cache
def state_bytes(options: OptimizerOptions, dtype: torch.dtype) -> float:
    """Return bytes that AdamW keeps per element of a parameter."""
    param = nn.Parameter(torch.empty(SAMPLE, dtype=dtype, device="meta"))
    optimizer = AdamW(
        [param],
        moment_dtype=getattr(torch, options.moment_dtype),
        master_remainder=options.master_remainder,
    )
    state = optimizer.state_of(param)
    return sum(t.nbytes for name, t in state.items() if name != "step") / SAMPLE
