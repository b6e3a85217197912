"""Hugging Face MoE models (transformers >= 5) as models of torchtitan 0.3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model import BaseModel

from moecore.base.options.layer import BalanceConfig
from moecore.integrations.torchtitan.hf_model import (
    HFModel,
    check_config,
    check_hf_degrees,
    model_size,
    read_config,
    swap_hf,
)
from moecore.integrations.torchtitan.options import moecore_options
from moecore.integrations.torchtitan.v03.parts import MoETrainer, parallelize_own_loss


class TitanHF(HFModel, BaseModel):
    """An HFModel as 0.3 builds it.

    Args:
        config: see `Config`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """What torchtitan knows of a transformers model.

        Attributes:
            source: a config, or a directory with config.json; None = the job's `hf_assets_path`.
            hf_config: a copy of the transformers config; there after `update_from_config`.
            hf_weights: the job's `moecore.hf_weights`.
        """

        source: Any = None
        hf_config: Any = None
        hf_weights: str | None = None

        def update_from_config(self, *, config: MoETrainer.Config, **_: Any) -> None:
            """Read the config, and follow the job.

            Raises:
                ValueError, NotImplementedError: see `read_config` and `check_config`.
            """
            source = config.hf_assets_path if self.source is None else self.source
            self.hf_config = read_config(source, "hf_assets_path")
            self.hf_weights = moecore_options(config).hf_weights
            check_config(self.hf_config, config.training.seq_len)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Return the number of parameters and the FLOPs per token of forward and backward."""
            return model_size(self.hf_config, model, seq_len)

    def __init__(self, config: Config) -> None:
        super().__init__(config.hf_config, config.hf_weights)

    def verify_module_protocol(self) -> None:
        """Nothing to verify: transformers' modules are plain, and `init_weights` fills them all."""


def parallelize_hf(
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    job: MoETrainer.Config,
    balance: BalanceConfig | None,
    **_: Any,
) -> nn.Module:
    """Swap the MoE blocks of a TitanHF and shard it by the job's config; a parallelize_fn.

    Args:
        job: bound by `MoETrainer`.
        balance: see `swap_hf`.

    Raises:
        ValueError, NotImplementedError: see `check_job`, `swap_hf` and `parallelize_moe`.
    """
    check_hf_degrees(parallel_dims)
    swap_hf(model, job, balance)
    return parallelize_own_loss(model, parallel_dims=parallel_dims, job=job)
