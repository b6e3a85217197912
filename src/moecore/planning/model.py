"""PlannedModel: the sizes and layers of a model, and its module on meta for a dry run.

A DecoderConfig becomes a NativeModel, and a TransformersModel a StockModel
(`planning/transformers.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from moecore.base.options.context import ContextOptions
from moecore.base.options.layer import MoEConfig
from moecore.models import Decoder
from moecore.models.config import FEEDFORWARDS, MIXERS, DecoderConfig, Feedforward, Mixer
from moecore.models.presets import PRESETS
from moecore.models.tensor_parallel import check_tensor_parallel
from moecore.moe.experts import Experts


class ModuleParts(NamedTuple):
    """A model's modules in forward order, whose forwards and backwards divide a dry run."""

    embedding: nn.Module
    layers: Sequence[nn.Module]
    mtp: Sequence[nn.Module]
    head: nn.Module
    loss: nn.Module  # its output is the loss, or has a field of that name


class ModelSizes(NamedTuple):
    """Numbers of parameters of a model."""

    params: int
    experts: int  # parameters of routed experts
    tp_params: int  # parameters that are sharded over tp


def count_sizes(
    model: nn.Module, expert_params: Iterable[nn.Parameter], tp_params: Iterable[nn.Parameter]
) -> ModelSizes:
    """Count elements of all parameters, of `expert_params` and of `tp_params`."""
    groups = (model.parameters(), expert_params, tp_params)
    return ModelSizes(*(sum(param.numel() for param in group) for group in groups))


class ModelSource(NamedTuple):
    """Lines of Python that import and build a model, initialize its weights and make inputs."""

    imports: Sequence[str]
    build: Sequence[str]
    fill: str
    inputs: str  # keyword arguments of a forward, in words


@dataclass(frozen=True, kw_only=True)
class PlannedModel(ABC):
    """Base class of a model in plans: its sizes and layers, and how to build it on meta."""

    dim: int  # of hidden states
    vocab_size: int  # rows of the embedding
    max_seq_len: int | None  # the maximum number of tokens in a row; None = any number
    layers: tuple[Hashable, ...]  # kinds; layers of equal kinds have equal modules and costs
    dense: frozenset[int]  # the indices of the layers without experts
    num_mtp_layers: int  # modules of multi-token prediction
    moe: MoEConfig | None  # the config of its MoE layers; None = the model has none
    has_latents: bool  # whether attention projects latents to keys
    mtp_runs: int = 1  # how often a forward applies each module of multi-token prediction
    unmeasured: tuple[str, ...] = ()  # kinds of attention whose time has not been measured

    @property
    def num_layers(self) -> int:
        """The number of layers without the modules of multi-token prediction."""
        return len(self.layers)

    @property
    def num_moe_runs(self) -> int:
        """The number of MoE layers that a forward runs, including multi-token prediction."""
        mtp = self.num_mtp_layers * self.mtp_runs
        return 0 if self.moe is None else len(self.layers) - len(self.dense) + mtp

    def list_bound_layers(self) -> frozenset[int]:
        """Return the indices of layers at which no pipeline stage may begin."""
        return frozenset()

    @abstractmethod
    def select_layers(self, layer_idxs: Sequence[int]) -> Any:
        """Return the model with only the layers at `layer_idxs`, for `TrainingRun.model`."""

    @abstractmethod
    def build(self, dtype: torch.dtype) -> nn.Module:
        """Return the module on meta, with parameters of `dtype`."""

    @abstractmethod
    def merge_loss_chunks(self, model: nn.Module, num_tokens: int) -> None:
        """Make a module from `build` compute the loss of `num_tokens` tokens in one chunk."""

    @abstractmethod
    def collect_parts(self, model: nn.Module) -> ModuleParts:
        """Return the embedding, layers, MTP layers, head and loss of a module made by `build`."""

    @abstractmethod
    def make_inputs(self, tokens_BT: Tensor) -> Mapping[str, Any]:
        """Return the keyword arguments of a forward with loss; the tokens are also the labels."""

    @abstractmethod
    def count_parameters(self) -> ModelSizes:
        """Count all parameters, the routed experts' parameters and the tp-sharded parameters."""

    @abstractmethod
    def check_degrees(self, *, pp: int, tp: int, cp: int) -> None:
        """Raise ValueError or NotImplementedError for degrees that do not fit the model."""

    @abstractmethod
    def make_source(self, dtype: torch.dtype) -> ModelSource:
        """Return the Python that makes the model with parameters of `dtype`."""


@dataclass(frozen=True, kw_only=True)
class NativeModel(PlannedModel):
    """The sizes and layers of a `Decoder`, moecore's model."""

    config: DecoderConfig

    @classmethod
    def from_config(cls, config: DecoderConfig) -> Self:
        """Return the sizes and layers of the decoder that a config describes."""
        kinds = tuple(find_layer_kind(config, i) for i in range(config.num_layers))
        unmeasured = ["linear"] * (config.linear_attention is not None)
        unmeasured += ["sparse"] * (config.mla is not None and config.mla.sparse is not None)
        return cls(
            dim=config.dim,
            vocab_size=config.vocab_size,
            max_seq_len=config.max_seq_len,
            layers=kinds,
            dense=frozenset(i for i, kind in enumerate(kinds) if kind.feedforward != "moe"),
            num_mtp_layers=config.num_mtp_layers,
            mtp_runs=config.mtp_repeats,
            moe=config.moe,
            has_latents=config.mla is not None,
            unmeasured=tuple(unmeasured),
            config=config,
        )

    @override
    def select_layers(self, layer_idxs: Sequence[int]) -> DecoderConfig:
        config, kinds = self.config, [find_layer_kind(self.config, i) for i in layer_idxs]
        linear = tuple(i for i, kind in enumerate(kinds) if kind.mixer == "linear")
        dense = tuple(i for i, kind in enumerate(kinds) if kind.feedforward == "dense")
        is_named = not config.pattern
        return replace(
            config,
            num_layers=len(kinds),
            hash_layers=0,  # tables of a few megabytes are not counted
            pattern="" if is_named else "".join(HALVES[kind[:2]] for kind in kinds),
            dense_layers=dense if is_named and config.moe is not None else (),
            linear_attention=config.linear_attention if linear else None,
            linear_layers=linear if is_named else (),
            windows=tuple(kind.window or 0 for kind in kinds) if config.windows else (),
            mlp_hidden_dim=config.mlp_hidden_dim if dense else 0,
        )

    @override
    def build(self, dtype: torch.dtype) -> nn.Module:
        return Decoder(self.config, device="meta", dtype=dtype)

    @override
    def merge_loss_chunks(self, model: Any, num_tokens: int) -> None:
        model.lm_head.config = replace(self.config, ce_chunk_tokens=num_tokens)

    @override
    def collect_parts(self, model: Any) -> ModuleParts:
        head = model.lm_head
        return ModuleParts(model.model.embed_tokens, model.layers, model.mtp, head, head)

    @override
    def make_inputs(self, tokens_BT: Tensor) -> Mapping[str, Any]:
        return {"tokens_BT": tokens_BT, "labels_BT": tokens_BT}

    @override
    def count_parameters(self) -> ModelSizes:
        model = self.build(torch.float32)
        experts, tp_params = set[nn.Parameter](), set[nn.Parameter]()
        for module in model.modules():
            if isinstance(module, Experts):
                experts.update(module.parameters())
            elif getattr(module, "tp_shard_dim", None) is not None:
                tp_params.update(module.parameters(recurse=False))
        return count_sizes(model, experts, tp_params)

    @override
    def check_degrees(self, *, pp: int, tp: int, cp: int) -> None:
        config = self.config
        check_tensor_parallel(config, tp)
        if cp > 1:
            heads = config.num_heads // tp, config.num_kv_heads // tp
            ContextOptions().resolve(cp, *heads, has_latents=self.has_latents)

    @override
    def make_source(self, dtype: torch.dtype) -> ModelSource:
        config, preset = repr(self.config), find_preset(self.config)
        if preset is not None:
            name, changes = preset
            texts = "".join(f", {field}={value}" for field, value in changes.items())
            config = f"replace(preset({name!r}){texts})" if changes else f"preset({name!r})"
        return ModelSource(
            ["from moecore.models import *"],
            [f"config = {config}", f'model = Decoder(config, device="meta", dtype={dtype})'],
            "model.init_weights(0)",
            "tokens_BT and labels_BT",
        )


class LayerKind(NamedTuple):
    """The kind of a decoder layer: attention kind, feed-forward kind (None = missing), window."""

    mixer: Mixer | None
    feedforward: Feedforward | None
    window: int | None  # the maximum number of keys that a token attends to; None = all


# Letters of `DecoderConfig.pattern` by the half that a layer has.
HALVES: Mapping[tuple[Mixer | None, Feedforward | None], str] = {
    **{(mixer, None): letter for letter, mixer in MIXERS.items()},
    **{(None, feedforward): letter for letter, feedforward in FEEDFORWARDS.items()},
}


def find_layer_kind(config: DecoderConfig, layer: int) -> LayerKind:
    """Return the attention kind, feed-forward kind and window of layer `layer` of a decoder."""
    mixer = config.get_mixer(layer)
    window = config.get_window(layer) if mixer == "attention" else None
    return LayerKind(mixer, config.get_feedforward(layer), window)


def find_preset(config: DecoderConfig) -> tuple[str, dict[str, int]] | None:
    """Return (name, {}) of the preset that equals `config`; None = no preset is equal.

    If only the maximum sequence length differs, the dict is {"max_seq_len": n}.
    """
    for name, entry in PRESETS.items():
        pairs = ((f.name, getattr(entry, f.name), getattr(config, f.name)) for f in fields(config))
        changes = {field: value for field, preset, value in pairs if value != preset}
        if changes.keys() <= {"max_seq_len"}:
            return name, changes
    return None
