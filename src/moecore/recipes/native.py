"""The native decoder on the ranks: what `moecore train` and `pretrain` share.

Legend: B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moecore.models import Decoder
from moecore.moe.layer import MoELayer
from moecore.packing.corpus.scheduled_batch import ScheduledBatch
from moecore.recipes.data import StepBatch, to_device
from moecore.recipes.graphs import Graphed
from moecore.recipes.job import TrainingJob
from moecore.recipes.metrics import Metrics, usage
from moecore.recipes.options import RunConfig
from moecore.train.step import TrainStep

ForwardBackward = Callable[..., Tensor]


@dataclass(kw_only=True)
class DecoderJob(TrainingJob[StepBatch | ScheduledBatch]):
    """A `Decoder` on rows of text; of a `ScheduledBatch` each micro-batch has its own cp.

    Attributes:
        run_micro_batches: see `make_forward_backward`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.run_micro_batches = make_forward_backward(self.model, self.owner, self.args)

    def forward_backward(self, num_labels: Tensor, batch: StepBatch | ScheduledBatch) -> Tensor:
        """Run the micro-batches and return this rank's part of the mean loss."""
        if isinstance(batch, ScheduledBatch):
            self.owner.num_micro_batches = len(batch.cps)
            return batch.loss_of(self.owner.forward_backward(batch.inputs(self.device)))
        if self.owner.num_micro_batches != len(batch.tokens_ABT):
            self.owner.num_micro_batches = len(batch.tokens_ABT)
        tensors = (to_device(tensor, self.device) for tensor in batch.tensors())
        return self.run_micro_batches(num_labels, *tensors)

    def more_metrics(self, counts: list[int], seconds: float) -> Metrics:
        """Return the share of padding and MFU."""
        return usage(counts, seconds, self.model.config, self.peak_tflops)


def make_forward_backward(model: Decoder, owner: TrainStep, args: RunConfig) -> ForwardBackward:
    """Return what runs a step's micro-batches: its part of the mean loss over all labels.

    It takes the number of labels of all ranks and the tensors of a `StepBatch`.
    """

    def forward_backward(num_labels: Tensor, *tensors: Tensor) -> Tensor:
        return owner.forward_backward(inputs_of(num_labels, tensors, args.seq_len)).sum()

    return Graphed(forward_backward, model) if args.cuda_graph else forward_backward


def inputs_of(num_labels: Tensor, tensors: Iterable[Tensor], seq_len: int) -> list[dict[str, Any]]:
    """Return the decoder's inputs of each micro-batch of a `StepBatch`'s tensors."""
    tensors = tuple(tensors)
    names = ["tokens_BT", "labels_BT"]
    of_all: dict[str, Any] = {"num_tokens": num_labels}
    if len(tensors) > len(names):
        names += ["padding_mask_BT", "cu_seqlens"]
        of_all["max_seqlen"] = seq_len
    return [dict(zip(names, row, strict=True)) | of_all for row in zip(*tensors, strict=True)]


def dispatcher_of(model: Decoder) -> str:
    """Return the dispatcher in use: "auto" has chosen by now."""
    names = {type(m.dispatcher).__name__ for m in model.modules() if isinstance(m, MoELayer)}
    return "".join(names).removesuffix("Dispatcher").lower() or "dense"
