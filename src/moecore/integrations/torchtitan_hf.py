"""Hugging Face MoE models (transformers >= 5) as torchtitan models.

Legend: B sequences, T tokens of a sequence, D model dim, V vocabulary, E experts, K experts per
token.

A `TitanHF` holds the transformers model under `hf`; there every parameter has the name that it has
in Hugging Face's files. The head and its loss run in chunks as in moecore's decoder: labels come
through the data loader, and logits of all tokens never exist in training.

transformers and safetensors are imported where they are used: jobs of other models need neither.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import BaseModelArgs
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.tools.logging import logger

from moecore.adapters.base import swap_blocks
from moecore.config import BalanceConfig
from moecore.integrations.torchtitan_options import moecore_options
from moecore.integrations.torchtitan_parallel import check_job, dealt, finish, titan_meshes
from moecore.models.loss import linear_cross_entropy
from moecore.moe.layer import MoELayer
from moecore.moe.params import clean_name, init_normal_

Source = Any  # a transformers PreTrainedConfig, or the path of a directory with a config.json
PREFIX = "hf."  # of the names in torchtitan's checkpoints


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
                one matrix as embedding and head.
        """
        source = job_config.model.hf_assets_path if self.source is None else self.source
        self.config = _read_config(source)
        self.hf_weights = moecore_options(job_config).hf_weights
        seq_len, longest = job_config.training.seq_len, self.config.max_position_embeddings
        if seq_len > longest:
            raise ValueError(
                f"training.seq_len ({seq_len}) must be <= max_position_embeddings ({longest}) of "
                "the model's config: shorten it"
            )
        if getattr(self.config, "output_router_logits", False):
            raise NotImplementedError(
                "output_router_logits (True) of the model's config must be False, because its "
                "balance loss is not part of torchtitan's: use hf_spec(flavors, "
                "balance=BalanceConfig(micro_batch_coef=...))"
            )
        if self.config.tie_word_embeddings:
            raise NotImplementedError(
                "tie_word_embeddings (True) of the model's config must be False: torchtitan "
                "makes two parameters of embedding and head"
            )

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return the number of parameters and the FLOPs per token of forward and backward.

        The formula is that of `moecore.models.flops_per_token`.

        Args:
            model: a TitanHF.
            seq_len: tokens per sequence.
        """
        config, total, idle = self.config, 0, 0.0
        for name, param in model.named_parameters():
            total += param.numel()
            if ".experts." in name:
                idle += param.numel() * (1 - config.num_experts_per_tok / param.shape[0])
        table = config.vocab_size * config.hidden_size
        head_dim = getattr(config, "head_dim", None)
        key_dim = head_dim or config.hidden_size // config.num_attention_heads
        value_dim = getattr(config, "v_head_dim", key_dim)
        key_dim = getattr(config, "qk_head_dim", key_dim)
        heads = config.num_hidden_layers * config.num_attention_heads
        attention = heads * (key_dim + value_dim) * seq_len
        return total, int(6 * (total - idle - table) + 3 * attention)


class TitanHF(nn.Module):
    """A transformers model that torchtitan builds (on meta), fills and calls.

    Args:
        model_args: the config, after `update_from_config`.
    """

    def __init__(self, model_args: TitanHFArgs) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        self.model_args = model_args
        # The config's dtype is that of the files; torchtitan's default here is `training.dtype`.
        self.hf = AutoModelForCausalLM.from_config(
            model_args.config, dtype=torch.get_default_dtype()
        )

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks, first to last."""
        return self.hf.base_model.layers

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Load `moecore.hf_weights`, or fill from the seed that torchtitan gave every rank.

        Args:
            buffer_device: not used; buffers follow the model.

        Raises:
            ValueError: on every rank, for files that do not fit the model.
        """
        if self.model_args.hf_weights is None:
            fill(self.hf, torch.initial_seed())
        else:
            load_weights(self.model_args.hf_weights, self.hf)

    def forward(self, tokens_BT: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the cross-entropy summed over the labels that count, or the logits without labels.

        Args:
            tokens_BT: int64 ids.
            labels: int64 [B, T], -100 where nothing counts.
        """
        x_BTD = self.hf.base_model(input_ids=tokens_BT, use_cache=False).last_hidden_state
        weight_VD = self.hf.get_output_embeddings().weight
        if labels is None:
            return F.linear(x_BTD, weight_VD)
        return linear_cross_entropy(x_BTD.flatten(0, 1), weight_VD, labels.flatten(), num_tokens=1)


class HFNames(StateDictAdapter):
    """Names of a TitanHF's parameters <-> those of its Hugging Face files with stacked experts.

    `from_pretrained` reads such files; the published ones, with one matrix per expert, are loaded
    by `moecore.hf_weights`.
    """

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the same tensors under their names in the files."""
        return {name.removeprefix(PREFIX): tensor for name, tensor in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the same tensors under their names in a TitanHF."""
        return {f"{PREFIX}{name}": tensor for name, tensor in hf_state_dict.items()}


def parallelize_hf(
    model: nn.Module,
    parallel_dims: ParallelDims,
    job_config: JobConfig,
    *,
    balance: BalanceConfig | None = None,
) -> nn.Module:
    """Swap the MoE blocks of a TitanHF and shard it as the job says; a parallelize_fn.

    `debug.moe_force_load_balance` deals the experts out in turn.

    Args:
        model: on meta.
        parallel_dims: the degrees.
        job_config: the job.
        balance: of every MoE layer; None = no auxiliary loss, and selection biases stay.

    Raises:
        ValueError, NotImplementedError: for tp; see `check_job` and `parallelize_moe`.
    """
    if parallel_dims.tp > 1:
        raise NotImplementedError(
            f"parallelism.tensor_parallel_degree ({parallel_dims.tp}) must be 1 for a Hugging Face "
            "model, which has no plan for it: use expert_parallel_degree"
        )
    check_job(job_config, parallel_dims)
    for layer in swap_blocks(model, {}).values():
        if balance is not None:
            layer.set_balance(balance)
        if job_config.debug.moe_force_load_balance:
            layer.config = dealt(layer.config)
            layer.set_balance(layer.config.balance)  # its parts follow
    return finish(model, titan_meshes(parallel_dims), job_config)


def load_weights(path: str, model: nn.Module) -> None:
    """Fill a model from a Hugging Face directory; each rank reads its own shards. Collective.

    Values are rounded to the dtype of the parameters, which is the job's `training.dtype`.

    Args:
        path: see `load_hf`.
        model: a transformers model or a moecore decoder, with storage.

    Raises:
        ValueError, OSError: see `load_hf`.
    """
    from moecore.checkpoint.hf import load_hf

    report = load_hf(path, model, cast=True)
    logger.info(
        f"{report.tensors} tensors from {path}: {report.bytes_read / 1e9:.2f} GB read by this rank "
        f"in {report.seconds:.1f} s"
    )


@torch.no_grad()
def fill(model: nn.Module, seed: int) -> None:
    """Fill every parameter and buffer of a transformers model, the same on every layout.

    Norms are 1, biases 0 (gpt-oss's router bias too), everything else is N(0, s^2) with s the
    config's `initializer_range`. No communication.

    Args:
        model: plain or parallelized, with storage.
        seed: different seeds give independent models.
    """
    from moecore.checkpoint.hf.load import fresh_buffers

    std = cast(Any, model).config.initializer_range
    for name, param in model.named_parameters():
        key = clean_name(name)
        if key.endswith("bias"):
            param.zero_()
        elif param.ndim == 1 and key.endswith("weight"):  # only norms have such weights
            param.fill_(1)
        else:
            init_normal_(param, std=std, key=key, seed=seed)
    for layer in (m for m in model.modules() if isinstance(m, MoELayer)):
        if (bias_E := layer.part("router").selection_bias) is not None:
            bias_E.zero_()
    for buffer, value in fresh_buffers(model):
        buffer.copy_(value)


def _read_config(source: Source) -> Any:
    from transformers import AutoConfig, PreTrainedConfig

    if isinstance(source, PreTrainedConfig):
        return copy.deepcopy(source)
    if not isinstance(source, str | os.PathLike):
        raise ValueError(
            f"flavor ({type(source).__name__}) must be a transformers config or a directory with a "
            "config.json: correct hf_spec(flavors)"
        )
    if not (Path(source) / "config.json").is_file():
        raise ValueError(
            f"model.hf_assets_path or flavor ({source}) must be a directory with a config.json: "
            "download the model's repository there"
        )
    return AutoConfig.from_pretrained(source)
