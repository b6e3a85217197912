"""Steps of a MoETrainer with `ContextOptions.dynamic`: a DataLoader batch is one optimizer step.

Trainer                    with `ContextOptions.dynamic`
data_collator              a `ScheduledCollator`; every rank reads the same documents
get_batch_samples          one batch, which ranks compare
training_step              forward and backward of all micro-batches of the plan
prediction_step            their forwards
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
    """Whether each forward of a parallelized model selects its own cp degree."""
    request = get_request(model)
    return request is not None and request.is_dynamic


class ScheduledSteps:
    """Runs `ScheduledBatch`es, each a full optimizer step, for a Trainer with dynamic cp.

    The construction is collective: each rank constructs one.

    Raises:
        ValueError: if the trainer's collator or arguments do not fit `ContextOptions.dynamic`.
    """

    def __init__(self, trainer: Trainer) -> None:
        request = get_request(trainer.model)
        assert request is not None, "the trainer has checked it"
        _check_trainer(trainer, request.meshes.data_rank, request.meshes.data_ranks)
        self._device = request.meshes.device
        self._is_hf = isinstance(request.family, TransformersFamily)
        self._copies = dist.get_world_size() // request.meshes.data_ranks  # ranks per data rank
        self._group: dist.ProcessGroup | None = None
        if request.meshes.data_ranks > 1:
            self._group = dist.new_group(backend="gloo")  # hosts compare without a GPU sync

    def train(self, batch: ScheduledBatch, owner: TrainStep) -> Tensor:
        """Run forward and backward of a step; return the mean loss over all ranks' labels.

        `owner` is the model's TrainStep; the caller runs the optimizer.
        """
        owner.model.train()
        self._check_equal_batches(batch)
        owner.num_micro_batches = len(batch.cps)
        return self._compute_mean_loss(batch, owner.forward_backward)

    @torch.no_grad()
    def evaluate(self, batch: ScheduledBatch, model: nn.Module) -> Tensor:
        """Return the mean loss over all ranks' labels of a step, without gradients."""
        self._check_equal_batches(batch)
        return self._compute_mean_loss(
            batch,
            lambda batches: torch.stack([get_loss(model(**batch_)).float() for batch_ in batches]),
        )

    def _compute_mean_loss(
        self, batch: ScheduledBatch, run: Callable[[list[dict[str, Any]]], Tensor]
    ) -> Tensor:
        """Return the mean loss over the step's labels of all ranks. Collective.

        `run` maps the keyword arguments of the micro-batches to their losses.
        """
        loss = batch.compute_local_loss(run(batch.inputs(self._device, transformers=self._is_hf)))
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


def _check_trainer(trainer: Trainer, data_rank: int, data_ranks: int) -> None:
    """Raise ValueError if the trainer's collator or arguments do not fit scheduled batches.

    `data_rank` and `data_ranks` are the index and number of data ranks in the model's meshes.
    """
    args, collator = trainer.args, trainer.data_collator
    if not isinstance(collator, ScheduledCollator):
        raise ValueError(
            f"data_collator ({type(collator).__name__}) must be a ScheduledCollator with "
            "ContextOptions.dynamic: it plans the micro-batches of a step"
        )
    meshes = "take it from the meshes"
    requirements = [
        ("ScheduledCollator.data_rank", collator.data_rank, data_rank, meshes),
        ("ScheduledCollator.data_ranks", collator.data_ranks, data_ranks, meshes),
        (
            "gradient_accumulation_steps",
            args.gradient_accumulation_steps,
            1,
            "raise the batch size",
        ),
    ]
    if isinstance(trainer.train_dataset, IterableDataset):  # else rank 0 reads for all
        dispatch = args.accelerator_config.dispatch_batches
        requirements.append(("accelerator_config.dispatch_batches", dispatch, False, "set it"))
    for name, value, requirement, fix in requirements:
        if value != requirement:
            raise ValueError(
                f"{name} ({value}) must be {requirement} with ContextOptions.dynamic, where a "
                f"batch is a step that every rank reads: {fix}"
            )
