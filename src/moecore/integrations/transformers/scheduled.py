"""Steps of a MoETrainer with `ContextOptions.dynamic`: a DataLoader batch is one optimizer step.

A `ScheduledCollator` plans the micro-batches of a step. Every rank reads the same documents, and
`training_step` runs all micro-batches of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer

from moecore.base.rank_checks import find_difference
from moecore.families.family import TransformersFamily
from moecore.packing import ScheduledCollator
from moecore.packing.corpus.scheduled_batch import ScheduledBatch
from moecore.parallel.model.parallel_state import get_request
from moecore.parallel.pipeline.stages import get_loss
from moecore.train.step import TrainStep


def is_dynamic(model: nn.Module) -> bool:
    """Whether the cp degree of a parallelized model may differ between forwards."""
    request = get_request(model)
    return request is not None and request.is_dynamic


class ScheduledSteps:
    """Runs steps of a Trainer, one `ScheduledBatch` each. The constructor is collective."""

    def __init__(self, trainer: Trainer) -> None:
        request = get_request(trainer.model)
        assert request is not None, "`check_model` requires it"
        _check_trainer(trainer, request.meshes.data_rank, request.meshes.data_ranks)
        self._device = request.meshes.device
        self._is_hf = isinstance(request.family, TransformersFamily)
        self._copies = dist.get_world_size() // request.meshes.data_ranks  # ranks per data rank
        self._group: dist.ProcessGroup | None = None
        if request.meshes.data_ranks > 1:
            self._group = dist.new_group(backend="gloo")  # to compare batches without a GPU sync

    def run_training_step(self, batch: ScheduledBatch, train_step: TrainStep) -> Tensor:
        """Run forward and backward of a step; return the mean loss over all ranks' labels."""
        train_step.model.train()
        self._check_equal_batches(batch)
        train_step.num_micro_batches = len(batch.cps)
        return self._compute_mean_loss(batch, train_step.forward_backward)

    @torch.no_grad()
    def evaluate(self, batch: ScheduledBatch, model: nn.Module) -> Tensor:
        """Return the mean loss of a batch over all ranks' labels, without gradients."""
        self._check_equal_batches(batch)

        def run(batches: list[dict[str, Any]]) -> Tensor:
            return torch.stack([get_loss(model(**inputs)).float() for inputs in batches])

        return self._compute_mean_loss(batch, run)

    def _compute_mean_loss(
        self, batch: ScheduledBatch, compute_losses: Callable[[list[dict[str, Any]]], Tensor]
    ) -> Tensor:
        """Return the mean of micro-batch losses, from `compute_losses`, over all ranks' labels."""
        loss = batch.compute_local_loss(
            compute_losses(batch.inputs(self._device, transformers=self._is_hf))
        )
        dist.all_reduce(loss)
        return loss / self._copies

    def _check_equal_batches(self, batch: ScheduledBatch) -> None:
        """Raise ValueError if data ranks have different documents or schedules. Collective."""
        if self._group is None:
            return
        problem = find_difference({"documents or plan": batch.digest}, "cpu", group=self._group)
        if problem is not None:
            raise ValueError(
                f"{problem} on every rank: give all ranks the same dataset, seed and "
                "ScheduledCollator but for its data_rank"
            )


def _check_trainer(trainer: Trainer, data_rank: int, num_data_ranks: int) -> None:
    args, collator = trainer.args, trainer.data_collator
    if not isinstance(collator, ScheduledCollator):
        raise ValueError(
            f"data_collator ({type(collator).__name__}) must be a ScheduledCollator with "
            "ContextOptions.dynamic: it plans the micro-batches of a step"
        )
    meshes, steps = "take it from the meshes", args.gradient_accumulation_steps
    requirements = [
        ("ScheduledCollator.data_rank", collator.data_rank, data_rank, meshes),
        ("ScheduledCollator.data_ranks", collator.data_ranks, num_data_ranks, meshes),
        ("gradient_accumulation_steps", steps, 1, "raise the batch size"),
    ]
    if isinstance(trainer.train_dataset, IterableDataset):  # of which rank 0 reads all batches
        dispatch = args.accelerator_config.dispatch_batches
        requirements.append(("accelerator_config.dispatch_batches", dispatch, False, "set it"))
    for name, value, requirement, fix in requirements:
        if value != requirement:
            raise ValueError(
                f"{name} ({value}) must be {requirement} with ContextOptions.dynamic, where a "
                f"batch is a step that every rank reads: {fix}"
            )
