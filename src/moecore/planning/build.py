"""A TrainingRun's model and optimizer: on meta for a dry run, on a GPU for a record of it."""

from __future__ import annotations

import torch
from torch import nn

from moecore.models import Decoder
from moecore.parallel.mesh import build_meshes
from moecore.parallelize import parallelize_moe
from moecore.planning.run import TrainingRun
from moecore.train.optim.adamw import AdamW
from moecore.train.optim.state_offload import StateOffload


def model_of(run: TrainingRun, device_type: str) -> Decoder:
    """Return the model of a run, parallelized on meta. A process group must be there."""
    model = Decoder(run.model, device="meta", dtype=run.dtype)
    parallelize_moe(
        model,
        build_meshes(run.parallel, device_type),
        dispatcher="alltoall" if run.nvlink is None else "nvlink",
        nvlink=run.nvlink,
        memory=run.memory,
        precision=run.precision,
        fsdp=run.fsdp,
        pipeline=run.pipeline,
    )
    return model


def optimizer_of(run: TrainingRun, model: nn.Module) -> AdamW:
    """Return the AdamW of a run's model, its state offloaded where the run says so."""
    options = run.optimizer
    optimizer = AdamW(
        model.parameters(),
        lr=1e-6,
        moment_dtype=getattr(torch, options.moment_dtype),
        master_remainder=options.master_remainder,
    )
    if options.offload_fraction:
        StateOffload(optimizer, model, fraction=options.offload_fraction)
    return optimizer
