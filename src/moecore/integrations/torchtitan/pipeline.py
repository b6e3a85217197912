"""Pipeline schedules for torchtitan's Trainer, which run moecore's pipeline.

Every pipeline rank needs tokens and labels. Each rank therefore reports to torchtitan that it has
the first and the last stage, so torchtitan passes both, and reads a loss, on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from moecore.integrations.torchtitan.models import LossDecoder, divide_by_cp, make_document_inputs
from moecore.integrations.torchtitan.step import STEP
from moecore.models.loss import count_labels
from moecore.train.step import TrainStep


class StageSchedule:
    """Base class of pipeline schedules for torchtitan's Trainer, which run a `TrainStep`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def run_micro_batches(self, micro_batches: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Run forward and backward; a micro-batch is {argument: value}. Return losses / cp."""
        step = getattr(self.model, STEP, None)
        if step is None:  # in the first step, because the constructor runs before initialisation
            step = TrainStep(self.model, num_micro_batches=len(micro_batches))
            setattr(self.model, STEP, step)
        losses = step.forward_backward(micro_batches)
        return [divide_by_cp(self.model, loss) for loss in losses]


class RowSchedule(StageSchedule):
    """Schedule for torchtitan 0.2: splits a step into micro-batches of `micro_batch_rows` rows."""

    def __init__(
        self, model: nn.Module, data_group: dist.ProcessGroup | None, *, micro_batch_rows: int
    ) -> None:
        super().__init__(model)
        self.data_group, self.rows = data_group, micro_batch_rows

    def step(
        self,
        rows_BT: Tensor,
        *,
        labels: Tensor,
        losses: list[Tensor],
        tokens: Tensor | None = None,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **_: Any,
    ) -> None:
        """Run a step and append each micro-batch's summed loss to `losses`.

        Under cp, `tokens` has the full rows. Documents begin where `positions` are 0.
        """
        all_rows_BT = rows_BT if tokens is None else tokens
        num_tokens = count_labels(labels)
        if self.data_group is not None:
            dist.all_reduce(num_tokens, group=self.data_group)
        micro_batches = []
        for first in range(0, len(all_rows_BT), self.rows):
            part = slice(first, first + self.rows)
            inputs = dict(tokens_BT=all_rows_BT[part], labels_BT=labels[part])
            inputs["num_tokens"] = num_tokens
            if cu_seqlens is not None and positions is not None:
                row_inputs = make_document_inputs(positions[part] == 0)  # a host sync
                inputs |= {name: row_inputs[name] for name in ("cu_seqlens", "max_seqlen")}
            micro_batches.append(inputs)
        losses += [loss * num_tokens for loss in self.run_micro_batches(micro_batches)]


class MicroBatchSchedule(StageSchedule):
    """Schedule for torchtitan 0.3, which passes micro-batches and the global number of labels."""

    def step(
        self,
        *,
        kwarg_mbs: list[dict[str, Any]],
        losses: list[Tensor],
        loss_kwargs: Mapping[str, Any],
        arg_mbs: list[tuple[Tensor]],
        **_: Any,
    ) -> None:
        """Run a step and append each micro-batch's loss / global number of labels to `losses`."""
        num_tokens = loss_kwargs["global_valid_tokens"].long()
        micro_batches = []
        for (rows_BT,), keywords in zip(arg_mbs, kwarg_mbs, strict=True):
            rows_BT = keywords.get("tokens", rows_BT)
            inputs: dict[str, Any] = dict(tokens_BT=rows_BT, labels_BT=keywords["labels"])
            documents = {n: keywords[n] for n in ("cu_seqlens", "max_seqlen") if n in keywords}
            micro_batches.append(inputs | documents | {"num_tokens": num_tokens})
        losses += self.run_micro_batches(micro_batches)


def check_stages(model: nn.Module, pp: int) -> None:
    """Raise NotImplementedError unless the model is a LossDecoder with no MTP or tied weights."""
    if not isinstance(model, LossDecoder):
        raise NotImplementedError(
            f"parallelism.pipeline_parallel_degree ({pp}) must be 1 for {type(model).__name__}: "
            "use moecore's decoder, or moecore's own loop"
        )
    for field in ("num_mtp_layers", "tie_embeddings"):
        if value := getattr(model.config, field):
            raise NotImplementedError(
                f"DecoderConfig.{field} ({value}) must be {type(value)(0)} with "
                f"pipeline_parallel_degree ({pp}), because torchtitan counts the gradient of the "
                "embedding once per stage that has it: use moecore's own loop"
            )
