"""Hugging Face MoE models (transformers >= 5) for any version of torchtitan.

Legend: B sequences, T tokens of a sequence, D model dim, V vocabulary.

An `HFModel` holds the transformers model under `hf`; there every parameter has the name that it has
in Hugging Face's files. The head and its loss run in chunks as in moecore's decoder: labels are
given to the model, and logits of all tokens never exist in training.

transformers and safetensors are imported where they are used: jobs of other models need neither.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from moecore.base.options.layer import BalanceConfig
from moecore.families.family import swap_blocks
from moecore.integrations.torchtitan.shared import load_weights
from moecore.models.loss import linear_cross_entropy
from moecore.moe.forced import force_even_load

Source = Any  # a transformers PreTrainedConfig, or the path of a directory with a config.json
PREFIX = "hf."  # of the names in torchtitan's checkpoints


class HFModel(nn.Module):
    """A transformers model that torchtitan builds (on meta), fills and calls.

    Args:
        config: of transformers, from `read_config`.
        hf_weights: the job's `moecore.hf_weights`.
    """

    def __init__(self, config: Any, hf_weights: str | None) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        self.hf_weights = hf_weights
        # The config's dtype is that of the files; torchtitan's default here is `training.dtype`.
        self.hf = AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype())

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
        if self.hf_weights is None:
            from moecore.io.hf.load import init_hf

            init_hf(self.hf, torch.initial_seed())
        else:
            load_weights(self.hf_weights, self.hf)

    def forward(
        self, tokens_BT: Tensor, positions: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        """Return the cross-entropy summed over the labels that count, or the logits without labels.

        Args:
            tokens_BT: int64 ids.
            positions: not used: tokens see earlier documents of their sequence.
            labels: int64 [B, T], -100 where nothing counts.
        """
        x_BTD = self.hf.base_model(input_ids=tokens_BT, use_cache=False).last_hidden_state
        weight_VD = self.hf.get_output_embeddings().weight
        if labels is None:
            return F.linear(x_BTD, weight_VD)
        return linear_cross_entropy(x_BTD.flatten(0, 1), weight_VD, labels.flatten(), num_tokens=1)


class HFNames(StateDictAdapter):
    """Names of an HFModel's parameters <-> those of its Hugging Face files with stacked experts.

    `from_pretrained` reads such files; the published ones, with one matrix per expert, are loaded
    by `moecore.hf_weights`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # That of a published directory names the files of each expert's matrices: not these.
        self.fqn_to_index_mapping = None

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the same tensors under their names in the files."""
        return {name.removeprefix(PREFIX): tensor for name, tensor in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the same tensors under their names in an HFModel."""
        return {f"{PREFIX}{name}": tensor for name, tensor in hf_state_dict.items()}


def swap_hf(model: nn.Module, job: Any, balance: BalanceConfig | None) -> None:
    """Swap the MoE blocks of an HFModel. In place.

    Args:
        job: its `debug.moe_force_load_balance` deals the experts out in turn.
        balance: of every MoE layer; None = no auxiliary loss, and selection biases stay.

    Raises:
        ValueError: for a model without MoE blocks, see `swap_blocks`.
    """
    for layer in swap_blocks(model, {}).values():
        if balance is not None:
            layer.set_balance(balance)
        if job.debug.moe_force_load_balance:
            force_even_load(layer)


def read_config(source: Source, field: str) -> Any:
    """Return a copy of a transformers config, or the one of a directory.

    Args:
        source: a config, or a directory with a config.json.
        field: of the job, which names the directory.

    Raises:
        ValueError: for no config or config.json.
    """
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
            f"{field} or flavor ({source}) must be a directory with a config.json: "
            "download the model's repository there"
        )
    return AutoConfig.from_pretrained(source)


def check_config(config: Any, seq_len: int) -> None:
    """Check that a transformers config can be trained by torchtitan.

    Args:
        config: from `read_config`.

    Raises:
        ValueError: for sequences that are too long.
        NotImplementedError: for a config that asks for transformers' own balance loss, or for one
            matrix as embedding and head.
    """
    longest = config.max_position_embeddings
    if seq_len > longest:
        raise ValueError(
            f"training.seq_len ({seq_len}) must be <= max_position_embeddings ({longest}) of "
            "the model's config: shorten it"
        )
    if getattr(config, "output_router_logits", False):
        raise NotImplementedError(
            "output_router_logits (True) of the model's config must be False, because its "
            "balance loss is not part of torchtitan's: give hf_spec or hf_job "
            "balance=BalanceConfig(micro_batch_coef=...)"
        )
    if config.tie_word_embeddings:
        raise NotImplementedError(
            "tie_word_embeddings (True) of the model's config must be False: torchtitan "
            "makes two parameters of embedding and head"
        )


def check_hf_degrees(parallel_dims: ParallelDims) -> None:
    """Check a job's degrees for a Hugging Face model.

    Raises:
        NotImplementedError: for tp.
    """
    if parallel_dims.tp > 1:
        raise NotImplementedError(
            f"parallelism.tensor_parallel_degree ({parallel_dims.tp}) must be 1 for a Hugging Face "
            "model, which has no plan for it: use expert_parallel_degree"
        )


def model_size(config: Any, model: nn.Module, seq_len: int) -> tuple[int, int]:
    """Return the number of parameters and the FLOPs per token of forward and backward.

    The formula is that of `moecore.models.flops_per_token`.
    """
    total, idle = 0, 0.0
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
