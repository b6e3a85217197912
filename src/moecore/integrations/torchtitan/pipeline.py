"""moecore's pipeline where torchtitan's Trainer has one: a model with stages, and its schedule.

Every pipeline rank gets the rows and their labels, so each one is a first and a last stage to
torchtitan: it passes both, and reads a loss, on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from moecore.integrations.torchtitan.models import OwnDecoder, document_inputs, share_of_loss
from moecore.integrations.torchtitan.step import STEP
from moecore.models.loss import count_labels
from moecore.train.step import TrainStep


class StageSchedule:
    """What torchtitan's Trainer steps: all micro-batches of a step, forward and backward."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def run(self, micro_batches: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Return this rank's share of each loss, divided by the micro-batches' `num_tokens`."""
        step = getattr(self.model, STEP, None)
        if step is None:  # after the weights are there
            step = TrainStep(self.model, num_micro_batches=len(micro_batches))
            setattr(self.model, STEP, step)
        losses = step.forward_backward(micro_batches)
        return [share_of_loss(self.model, loss) for loss in losses]


class RowSchedule(StageSchedule):
    """The schedule of 0.2, which gets the rows of a step and cuts them to micro-batches."""

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
        """Add the summed loss of each micro-batch to `losses`."""
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
                row_inputs = document_inputs(positions[part] == 0)  # a host sync
                inputs |= {name: row_inputs[name] for name in ("cu_seqlens", "max_seqlen")}
            micro_batches.append(inputs)
        losses += [loss * num_tokens for loss in self.run(micro_batches)]


class MicroBatchSchedule(StageSchedule):
    """The schedule of 0.3, which gets micro-batches and the global number of tokens."""

    def step(
        self,
        *,
        kwarg_mbs: list[dict[str, Any]],
        losses: list[Tensor],
        loss_kwargs: Mapping[str, Any],
        arg_mbs: list[tuple[Tensor]],
        **_: Any,
    ) -> None:
        """Add the loss of each micro-batch, divided by the global number of tokens, to `losses`."""
        num_tokens = loss_kwargs["global_valid_tokens"].long()
        micro_batches = []
        for (rows_BT,), keywords in zip(arg_mbs, kwarg_mbs, strict=True):
            rows_BT = keywords.get("tokens", rows_BT)
            inputs: dict[str, Any] = dict(tokens_BT=rows_BT, labels_BT=keywords["labels"])
            documents = {n: keywords[n] for n in ("cu_seqlens", "max_seqlen") if n in keywords}
            micro_batches.append(inputs | documents | {"num_tokens": num_tokens})
        losses += self.run(micro_batches)


def check_stages(model: nn.Module, pp: int) -> None:
    """Raise a NotImplementedError for a model without stages, or with one parameter on several.

    torchtitan adds up the norms of all stages.
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
