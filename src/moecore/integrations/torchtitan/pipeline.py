"""moecore's pipeline inside torchtitan's Trainer: a model with stages, and its schedule.

Every pipeline rank needs rows and labels. Each rank therefore reports to torchtitan that it has the
first and the last stage, so torchtitan passes rows and labels, and reads a loss, on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from moecore.integrations.torchtitan.models import (
    OwnDecoder,
    divide_loss_by_cp,
    make_document_inputs,
)
from moecore.integrations.torchtitan.step import STEP
from moecore.models.loss import count_labels
from moecore.train.step import TrainStep


class StageSchedule:
    """A pipeline schedule for torchtitan's Trainer: runs a step's micro-batches with backward."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def run(self, micro_batches: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Train a step on arguments of `Decoder.forward`; return each micro-batch's loss / cp.

        A loss is the sum over labels divided by the argument `num_tokens`.
        """
        step = getattr(self.model, STEP, None)
        if step is None:  # after the weights are there
            step = TrainStep(self.model, num_micro_batches=len(micro_batches))
            setattr(self.model, STEP, step)
        losses = step.forward_backward(micro_batches)
        return [divide_loss_by_cp(self.model, loss) for loss in losses]


class RowSchedule(StageSchedule):
    """Schedule for torchtitan 0.2, which cuts the sequences of a step into micro-batches.

    `data_group` has the data ranks (None = one), and `micro_batch_rows` is the number of sequences
    of a micro-batch.
    """

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

        `rows_BT` are this data rank's tokens; under cp they are slices, and `tokens` has the full
        rows.
        """
        all_rows_BT = rows_BT if tokens is None else tokens
        num_tokens = count_labels(labels)
        if self.data_group is not None:
            dist.all_reduce(num_tokens, group=self.data_group)
        micro_batches = []
        for first in range(0, len(all_rows_BT), self.rows):
            part = slice(first, first + self.rows)
            inputs = dict(
                tokens_BT=all_rows_BT[part], labels_BT=labels[part], num_tokens=num_tokens
            )
            if cu_seqlens is not None and positions is not None:
                row_inputs = make_document_inputs(positions[part] == 0)  # a host sync
                inputs |= {name: row_inputs[name] for name in ("cu_seqlens", "max_seqlen")}
            micro_batches.append(inputs)
        losses += [loss * num_tokens for loss in self.run(micro_batches)]


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
        """Run a step and append each micro-batch's loss / global number of labels to `losses`.

        `arg_mbs` and `kwarg_mbs` have (tokens,) and forward arguments of each micro-batch, and
        `loss_kwargs` the global number of labels.
        """
        num_tokens = loss_kwargs["global_valid_tokens"].long()
        micro_batches = []
        for (rows_BT,), keywords in zip(arg_mbs, kwarg_mbs, strict=True):
            rows_BT = keywords.get("tokens", rows_BT)
            inputs: dict[str, Any] = dict(tokens_BT=rows_BT, labels_BT=keywords["labels"])
            documents = {n: keywords[n] for n in ("cu_seqlens", "max_seqlen") if n in keywords}
            micro_batches.append(inputs | documents | {"num_tokens": num_tokens})
        losses += self.run(micro_batches)


def check_stages(model: nn.Module, pp: int) -> None:
    """Raise NotImplementedError for a model without stages, or with parameters in two stages.

    torchtitan sums the norms of all stages, so a shared parameter would count twice.
    """
    if not isinstance(model, OwnDecoder):
        raise NotImplementedError(
            f"parallelism.pipeline_parallel_degree ({pp}) must be 1 for {type(model).__name__}: "
            "use moecore's decoder, or moecore's own loop"
        )
    config = model.config
    for field, value in (
        ("num_mtp_layers", config.num_mtp_layers),
        ("tie_embeddings", config.tie_embeddings),
    ):
        if value:
            raise NotImplementedError(
                f"DecoderConfig.{field} ({value}) must be {type(value)(0)} with "
                f"pipeline_parallel_degree ({pp}), because torchtitan counts the gradient of the "
                "embedding once per stage that has it: use moecore's own loop"
            )
