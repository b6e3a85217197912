"""Models that compute their own loss: moecore's decoder, and MoE models of transformers >= 5.

Legend: B sequences, T tokens of a sequence, D model dim, V vocabulary.

A model receives the labels and returns its summed loss. Head and cross-entropy run in chunks, so
training allocates no logits of all tokens. transformers is imported on use.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.tools.logging import logger

from moecore.attention.context_parallel.local_tokens import ContextParallel
from moecore.base.options.context import ContextOptions
from moecore.base.options.layer import BalanceConfig
from moecore.families.family import swap_blocks
from moecore.families.transformers.context import CausalContext
from moecore.integrations.torchtitan.options import get_moecore_options
from moecore.integrations.torchtitan.parallelize import Version, parallelize_own_loss_model
from moecore.kernels.zigzag import find_positions_in_documents
from moecore.models import Decoder, DecoderConfig, flops_per_token, num_params
from moecore.moe.forced_routing import force_even_load
from moecore.parallel.model.parallel_state import get_request

LABELS = "labels"  # keyword of a model's forward
Source = Any  # a transformers PreTrainedConfig, or the path of a directory with a config.json
PREFIX = "hf."  # of names in torchtitan's checkpoints


@dataclass(kw_only=True)
class DecoderArgs:
    """torchtitan's model arguments of moecore's decoder."""

    decoder: DecoderConfig
    hf_weights: str | None = None  # the job's `moecore.hf_weights`
    even_load: bool = False  # the job's `debug.moe_force_load_balance`

    def update_from_config(self, config: Any, **_: Any) -> None:
        """Set `hf_weights` and `even_load` from torchtitan's job config, in place."""
        seq_len, max_seq_len = config.training.seq_len, self.decoder.max_seq_len
        if seq_len > max_seq_len:
            raise ValueError(
                f"training.seq_len ({seq_len}) must be <= DecoderConfig.max_seq_len "
                f"({max_seq_len}): shorten it, or register a flavor with a larger max_seq_len"
            )
        self.hf_weights = get_moecore_options(config).hf_weights
        self.even_load = config.debug.moe_force_load_balance

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return the number of parameters and the FLOPs per token of forward and backward."""
        return num_params(self.decoder), int(flops_per_token(self.decoder, seq_len))


class LossDecoder(Decoder):
    """A Decoder with the constructor, initialisation and forward that torchtitan calls."""

    def __init__(self, config: DecoderArgs) -> None:
        super().__init__(config.decoder, device="meta")
        self.hf_weights = config.hf_weights
        if config.even_load:
            force_even_load(self)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:  # type: ignore[override]
        """Load the job's weights, or if `hf_weights` is not set, initialise from torch's seed."""
        _load_or_init_parameters(self, self, self.hf_weights, super().init_weights)

    def forward(  # type: ignore[override]
        self,
        tokens_BT: Tensor,
        positions: Tensor | None = None,
        labels: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Return the loss summed over labels, divided by cp, or logits if there are no labels."""
        if labels is None:
            return super().forward(tokens_BT, **inputs)
        return divide_by_cp(self, super().forward(tokens_BT, labels, num_tokens=1, **inputs))


def make_document_inputs(starts_BT: Tensor) -> dict[str, Any]:
    """Return documents' positions [B, T], cu_seqlens and max_seqlen from start flags. Host sync."""
    starts_BT = starts_BT.clone()
    starts_BT[:, 0] = True
    (first_n,) = starts_BT.flatten().nonzero(as_tuple=True)
    ends = first_n.new_tensor([starts_BT.numel()])
    cu_seqlens = torch.cat([first_n, ends])
    positions_N = find_positions_in_documents(cu_seqlens, starts_BT.numel())
    return {
        "positions": positions_N.view(starts_BT.shape),
        "cu_seqlens": cu_seqlens.int(),
        "max_seqlen": int(cu_seqlens.diff().max()),
    }


def divide_by_cp(model: nn.Module, loss: Tensor) -> Tensor:
    """Return loss / cp with the gradient of `loss`, because torchtitan sums losses over cp."""
    request = get_request(model)
    cp = 1 if request is None else request.meshes.parallel.cp
    return loss if cp == 1 else loss + (loss / cp - loss).detach()


class HFArgs:
    """torchtitan's model arguments of a transformers model."""  # no dataclass: 0.2 would log it

    assets = "hf_assets_path"  # the job's field with the directory

    def __init__(self, source: Source | None = None) -> None:
        super().__init__()
        self.source = source  # None = the job's directory
        self.hf_config: Any = None  # a copy, set by `update_from_config`
        self.hf_weights: str | None = None  # the job's `moecore.hf_weights`

    def update_from_config(self, config: Any, **_: Any) -> None:
        """Set `hf_config` and `hf_weights` from a job's config; raises for unsupported models."""
        source = attrgetter(self.assets)(config) if self.source is None else self.source
        self.hf_config = _read_config(source, self.assets)
        self.hf_weights = get_moecore_options(config).hf_weights
        seq_len, max_seq_len = config.training.seq_len, self.hf_config.max_position_embeddings
        if seq_len > max_seq_len:
            raise ValueError(
                f"training.seq_len ({seq_len}) must be <= max_position_embeddings ({max_seq_len}) "
                "of the model's config: shorten it"
            )
        for name, reason in (
            (
                "output_router_logits",
                ", because its balance loss is not part of torchtitan's: give hf_spec or hf_job "
                "balance=BalanceConfig(micro_batch_coef=...)",
            ),
            ("tie_word_embeddings", ": torchtitan makes two parameters of embedding and head"),
        ):
            if getattr(self.hf_config, name, False):
                raise NotImplementedError(
                    f"{name} (True) of the model's config must be False{reason}"
                )

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return the number of parameters and the FLOPs per token of forward and backward."""
        config, total, idle = self.hf_config, 0, 0.0
        for name, param in model.named_parameters():
            total += param.numel()
            if ".experts." in name:
                idle += param.numel() * (1 - config.num_experts_per_tok / param.shape[0])
        table = config.vocab_size * config.hidden_size
        key_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        value_dim = getattr(config, "v_head_dim", key_dim)
        key_dim = getattr(config, "qk_head_dim", key_dim)
        heads = config.num_hidden_layers * config.num_attention_heads
        attention = heads * (key_dim + value_dim) * seq_len
        return total, int(6 * (total - idle - table) + 3 * attention)


class HFModel(nn.Module):
    """A transformers model with the constructor, initialisation and forward of torchtitan."""

    def __init__(self, config: HFArgs) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        self.hf_weights = config.hf_weights
        dtype = torch.get_default_dtype()  # `training.dtype`; the config has the files' dtype
        self.hf = AutoModelForCausalLM.from_config(config.hf_config, dtype=dtype)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, first to last."""
        result: nn.ModuleList = self.hf.base_model.layers
        return result

    def context_options(self, options: ContextOptions, cp: int, tp: int) -> ContextOptions:
        """Return `options` with the communication method of attention for `cp` and `tp` ranks."""
        return CausalContext(self.hf).context_options(options, cp, tp)

    def apply_context_parallel(self, cp: ContextParallel) -> None:
        """Make later forwards accept full rows and compute only this cp rank's tokens."""
        CausalContext(self.hf).apply_context_parallel(cp)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Load the job's weights, or if `hf_weights` is not set, initialise from torch's seed."""
        from moecore.io.hf.load import init_hf

        _load_or_init_parameters(self.hf, self, self.hf_weights, partial(init_hf, self.hf))

    def forward(
        self,
        tokens_BT: Tensor,
        positions: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Return the loss summed over labels, divided by cp, or logits if there are no labels."""
        inputs: dict[str, Any] = {"input_ids": tokens_BT, "use_cache": False}
        if cu_seqlens is not None:
            inputs["position_ids"] = positions
        if labels is None:
            logits_BTV: Tensor = self.hf(**inputs).logits
            return logits_BTV
        inputs |= {"labels": labels, "shift_labels": labels, "num_tokens": 1}
        loss: Tensor = self.hf(**inputs).loss
        return divide_by_cp(self, loss)


def _load_or_init_parameters(
    model: nn.Module, owner: nn.Module, hf_weights: str | None, init_from_seed: Callable[[int], Any]
) -> None:
    """Load `hf_weights` into `model`, or initialise it from torch's seed, equal in all stages."""
    if hf_weights is None:
        seed = torch.tensor(torch.initial_seed() % 2**63, dtype=torch.int64, device="cpu")
        request = get_request(owner)
        if request is not None and request.meshes.pipeline_groups is not None:
            # torchtitan sets another seed for each pipeline stage.
            group = request.meshes.pipeline_groups[0]
            on_device = seed.to(request.meshes.device)
            dist.broadcast(on_device, group=group, group_src=0)
            seed = on_device.cpu()
        init_from_seed(int(seed))
        return
    from moecore.io import load_hf

    report = load_hf(hf_weights, model, cast=True)
    logger.info(
        f"{report.tensors} tensors from {hf_weights}: {report.bytes_read / 1e9:.2f} GB read by "
        f"this rank in {report.seconds:.1f} s"
    )


class HFNames(StateDictAdapter):
    """Converts names of parameters between an HFModel and Hugging Face files."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The index of a published directory lists a file per expert matrix, not stacked matrices.
        self.fqn_to_index_mapping = None

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors by their names in Hugging Face files."""
        return {name.removeprefix(PREFIX): tensor for name, tensor in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors by their names in an HFModel."""
        return {f"{PREFIX}{name}": tensor for name, tensor in hf_state_dict.items()}


def parallelize_hf_model(
    model: nn.Module,
    parallel_dims: ParallelDims,
    job: Any,
    *,
    version: Version,
    balance: BalanceConfig | None,
    **_: Any,
) -> nn.Module:
    """Replace MoE blocks of an HFModel, set `balance` unless None, and shard: a parallelize_fn."""
    if parallel_dims.tp > 1:
        raise NotImplementedError(
            f"parallelism.tensor_parallel_degree ({parallel_dims.tp}) must be 1 for a Hugging Face "
            "model, which has no plan for it: use expert_parallel_degree"
        )
    for layer in swap_blocks(model, {}).values():
        if balance is not None and layer.config.assignment != "hash":
            layer.set_balance(balance)
        if job.debug.moe_force_load_balance:
            force_even_load(layer)
    return parallelize_own_loss_model(model, parallel_dims, job, version=version)


def _read_config(source: Source, option_name: str) -> Any:
    """Return a copy of a transformers config, or the config in a directory."""
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
            f"{option_name} or flavor ({source}) must be a directory with a config.json: "
            "download the model's repository there"
        )
    return AutoConfig.from_pretrained(source)
