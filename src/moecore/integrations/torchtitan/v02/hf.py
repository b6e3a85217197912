"""Hugging Face MoE models (transformers >= 5) as models of torchtitan 0.2."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import BaseModelArgs

from moecore.base.options.layer import BalanceConfig
from moecore.integrations.torchtitan.hf_model import (
    HFModel,
    Source,
    check_config,
    check_hf_degrees,
    model_size,
    read_config,
    swap_hf,
)
from moecore.integrations.torchtitan.options import moecore_options
from moecore.integrations.torchtitan.shared import refuse, titan_meshes
from moecore.integrations.torchtitan.v02.parallel import check_job, finish


class TitanHFArgs(BaseModelArgs):
    """What torchtitan knows of a transformers model.

    No dataclass: torchtitan logs the fields of those as JSON, which a config of transformers is
    not.

    Args:
        source: a config, or a directory with config.json; None = the job's `model.hf_assets_path`.

    Attributes:
        config: a copy of the transformers config; there after `update_from_config`.
        hf_weights: the job's `moecore.hf_weights`.
    """

    def __init__(self, source: Source | None = None) -> None:
        super().__init__()
        self.source = source
        self.config: Any = None
        self.hf_weights: str | None = None

    def update_from_config(self, job_config: JobConfig, **_: Any) -> None:
        """Read the config, and follow the job.

        Raises:
            ValueError: for no config or config.json, or for sequences that are too long.
            NotImplementedError: for a config that asks for transformers' own balance loss, or for
                one matrix as embedding and head; for validation, whose loss torchtitan would
                compute.
        """
        refuse([("validation.enable", True, job_config.validation.enable, "False")])
        source = job_config.model.hf_assets_path if self.source is None else self.source
        self.config = read_config(source, "model.hf_assets_path")
        self.hf_weights = moecore_options(job_config).hf_weights
        check_config(self.config, job_config.training.seq_len)

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return the number of parameters and the FLOPs per token of forward and backward.

        The formula is that of `moecore.models.flops_per_token`.
        """
        return model_size(self.config, model, seq_len)


class TitanHF(HFModel):
    """An HFModel as 0.2 builds it.

    Args:
        model_args: the config, after `update_from_config`.
    """

    def __init__(self, model_args: TitanHFArgs) -> None:
        super().__init__(model_args.config, model_args.hf_weights)
        self.model_args = model_args


def parallelize_hf(
    model: nn.Module,
    parallel_dims: ParallelDims,
    job_config: JobConfig,
    *,
    balance: BalanceConfig | None = None,
) -> nn.Module:
    """Swap the MoE blocks of a TitanHF and shard it by the job's config; a parallelize_fn.

    `debug.moe_force_load_balance` deals the experts out in turn.

    Args:
        balance: of every MoE layer; None = no auxiliary loss, and selection biases stay.

    Raises:
        ValueError, NotImplementedError: for tp; see `check_job` and `parallelize_moe`.
    """
    check_hf_degrees(parallel_dims)
    check_job(job_config, parallel_dims)
    swap_hf(model, job_config, balance)
    return finish(model, titan_meshes(parallel_dims), job_config)
