"""moecore's own decoder as a model of torchtitan 0.3.

Legend: B sequences, T tokens of a sequence.

Labels come through `OwnLossTrainer`: the model returns its summed loss, made in chunks, so logits
of all tokens never exist and multi-token prediction has its labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.protocols.model import BaseModel
from torchtitan.trainer import Trainer

from moecore.integrations.torchtitan.options import moecore_options
from moecore.integrations.torchtitan.shared import check_length, load_weights
from moecore.models import Decoder, DecoderConfig, flops_per_token, num_params
from moecore.moe.forced import force_even_load


class TitanDecoder(Decoder, BaseModel):
    """A Decoder that torchtitan builds (on meta), fills and calls.

    Args:
        config: see `Config`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """What torchtitan knows of a decoder.

        Attributes:
            hf_weights: the job's `moecore.hf_weights`.
            even_load: the job's `debug.moe_force_load_balance`.
        """

        decoder: DecoderConfig
        hf_weights: str | None = None
        even_load: bool = False

        def update_from_config(self, *, config: Trainer.Config, **_: Any) -> None:
            """Follow the job.

            Raises:
                ValueError: for sequences that are too long.
            """
            check_length(config.training.seq_len, self.decoder.max_seq_len)
            self.hf_weights = moecore_options(config).hf_weights
            self.even_load = config.debug.moe_force_load_balance

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Return the number of parameters and the FLOPs per token of forward and backward."""
            return num_params(self.decoder), int(flops_per_token(self.decoder, seq_len))

    def __init__(self, config: Config) -> None:
        super().__init__(config.decoder, device="meta")
        self.hf_weights = config.hf_weights
        if config.even_load:
            force_even_load(self)

    def verify_module_protocol(self) -> None:
        """Nothing to verify: moecore's modules are plain, and `init_weights` fills them all."""

    def init_weights(self, buffer_device: torch.device | None = None) -> None:  # type: ignore[override]
        """Load `moecore.hf_weights`, or fill from the seed that torchtitan gave every rank.

        Args:
            buffer_device: not used; buffers follow the model.

        Raises:
            ValueError: on every rank, for files that do not fit the model.
        """
        if self.hf_weights is None:
            super().init_weights(torch.initial_seed())
        else:
            load_weights(self.hf_weights, self)

    def forward(  # type: ignore[override]
        self, tokens_BT: Tensor, positions: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        """Return the cross-entropy summed over the labels that count, or the logits without labels.

        Args:
            tokens_BT: int64 ids.
            positions: not used: tokens see earlier documents of their sequence.
            labels: int64 [B, T], -100 where nothing counts.
        """
        return super().forward(tokens_BT, labels, num_tokens=None if labels is None else 1)
