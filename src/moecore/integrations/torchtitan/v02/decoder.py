"""moecore's own decoder as a torchtitan model.

Legend: B sequences, T tokens of a sequence.

torchtitan calls `model(tokens, **extra)` and `loss_fn(output, labels)`. Here the data loader puts
the labels into `extra` as well, the model returns the summed cross-entropy, and the loss function
passes it on. So the head and its loss run in chunks, and multi-token prediction has its labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import BaseModelArgs

from moecore.integrations.torchtitan.options import moecore_options
from moecore.integrations.torchtitan.shared import (
    check_length,
    load_weights,
    refuse,
    titan_meshes,
)
from moecore.integrations.torchtitan.v02.parallel import check_job, finish
from moecore.models import Decoder, DecoderConfig, flops_per_token, num_params, preset
from moecore.moe.forced import force_even_load

LABELS = "labels"  # key of a batch beside "input"


@dataclass
class TitanDecoderArgs(BaseModelArgs):
    """What torchtitan knows of a decoder.

    Attributes:
        hf_weights: the job's `moecore.hf_weights`.
        even_load: the job's `debug.moe_force_load_balance`.
    """

    config: DecoderConfig = field(default_factory=lambda: preset("tiny"))
    hf_weights: str | None = None
    even_load: bool = False

    def update_from_config(self, job_config: JobConfig, **_: Any) -> None:
        """Follow the job.

        Raises:
            ValueError: for sequences that are too long.
            NotImplementedError: for validation, whose loss torchtitan would compute.
        """
        refuse([("validation.enable", True, job_config.validation.enable, "False")])
        check_length(job_config.training.seq_len, self.config.max_seq_len)
        self.hf_weights = moecore_options(job_config).hf_weights
        self.even_load = job_config.debug.moe_force_load_balance

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return the number of parameters and the FLOPs per token of forward and backward."""
        return num_params(self.config), int(flops_per_token(self.config, seq_len))


class TitanDecoder(Decoder):
    """A Decoder that torchtitan builds (on meta), fills and calls."""

    def __init__(self, model_args: TitanDecoderArgs) -> None:
        super().__init__(model_args.config, device="meta")
        self.model_args = model_args
        if model_args.even_load:
            force_even_load(self)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:  # type: ignore[override]
        """Load `moecore.hf_weights`, or fill from the seed that torchtitan gave every rank.

        Args:
            buffer_device: not used; buffers follow the model.

        Raises:
            ValueError: on every rank, for files that do not fit the model.
        """
        if self.model_args.hf_weights is None:
            super().init_weights(torch.initial_seed())
        else:
            load_weights(self.model_args.hf_weights, self)

    def forward(self, tokens_BT: Tensor, labels: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Return the cross-entropy summed over the labels that count, or the logits without labels.

        Args:
            tokens_BT: int64 ids.
            labels: int64 [B, T], -100 where nothing counts.
        """
        return super().forward(tokens_BT, labels, num_tokens=None if labels is None else 1)


def parallelize_decoder(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> nn.Module:
    """Shard a TitanDecoder by the job's config; a parallelize_fn.

    Raises:
        ValueError, NotImplementedError: see `check_job` and `parallelize_moe`.
    """
    check_job(job_config, parallel_dims)
    return finish(model, titan_meshes(parallel_dims), job_config)


def build_sum_loss(job_config: JobConfig, **_: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss function of a model that returned its summed loss."""
    return _sum_loss


def _sum_loss(loss: Tensor, labels: Tensor) -> Tensor:
    return loss


def with_labels(build: Callable[..., BaseDataLoader]) -> Callable[..., BaseDataLoader]:
    """Return a build_dataloader_fn whose batches carry their labels to the model too."""

    def build_labelled(**kwargs: Any) -> BaseDataLoader:
        return LabelledDataLoader(build(**kwargs))

    return build_labelled


class LabelledDataLoader(BaseDataLoader):
    """Another data loader's batches with the labels among the model's inputs, and its state."""

    def __init__(self, loader: BaseDataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for inputs, labels_BT in self.loader:
            yield {**inputs, LABELS: labels_BT}, labels_BT

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the data loader inside."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the data loader inside."""
        self.loader.load_state_dict(state_dict)
