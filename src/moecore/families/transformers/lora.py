"""peft's LoRA in a transformers model: adapters on experts, names, refusals.

peft replaces a dense layer by a wrapper module, which is sharded with its block. peft parametrizes
stacked expert matrices in forward, which sharded parameters do not allow. This module removes these
wrappers and moves their A and B to `Experts.lora` (`moe/low_rank.py`).

    peft's, in mlp.experts                           here, in mlp.experts
    base_layer.lora_A.default.weight [E * r, D]      lora.gate_up_proj.lora_A.default [E, r, D]
    lora_B.default.weight [D, r * E], experts last   lora.down_proj.lora_B.default [E, D, r]

Legend: E experts, D model dim, r rank, O output dim of a matrix.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.params import clean_name
from moecore.base.peft_layers import is_tuner_layer
from moecore.families.adapters import CONVOLUTIONS
from moecore.families.transformers.stock import is_pretrained
from moecore.moe.layer import RoutedLayer
from moecore.moe.low_rank import LowRank

PEFT_PREFIX = "base_model.model."  # of the names of a base model's modules
# Methods of a PeftModel and its tuner that read or change full parameters -> the replacement.
REPLACED = {
    "save_pretrained": "moecore.io.save_adapters(model, path)",
    "load_adapter": "moecore.io.load_adapters(model, path)",
    "merge_and_unload": "moecore.io.merge_adapters(model), then export_hf(model, path)",
    "merge_adapter": "moecore.io.merge_adapters(model)",
    "unmerge_adapter": "the adapters as they were saved, on the base model",
    "unload": "model.disable_adapter()",
    "add_adapter": "it before parallelize_moe",
    "add_weighted_adapter": "it before parallelize_moe",
    "delete_adapter": "it before parallelize_moe",
}
# Methods that would unmerge adapters from sharded parameters.
MERGE_METHODS = dict.fromkeys(
    ("disable_adapter", "disable_adapter_layers", "set_adapter"),
    "the base weights and adapters anew (load_hf, load_adapters in a new model)",
)


@dataclass(frozen=True, slots=True)
class _WrappedExperts:
    """An experts module of a MoE block that peft has wrapped to add LoRA to its matrices."""

    block: str  # name of the MoE block
    child: str  # name of the experts in the block
    parent: nn.Module  # the block
    wrappers: tuple[Any, ...]  # peft's ParamWrappers, outermost first; one per matrix
    experts: nn.Module


@contextmanager
def unwrap_experts(model: nn.Module) -> Iterator[list[_WrappedExperts]]:
    """Return a context that replaces peft wrappers by their experts; an exception reverts this."""
    wrappers = list(_find_wrapped_experts(model)) if "peft" in sys.modules else []
    for wrapper in wrappers:
        wrapper.parent._modules[wrapper.child] = wrapper.experts
    try:
        yield wrappers
    except BaseException:
        for wrapper in wrappers:
            wrapper.parent._modules[wrapper.child] = wrapper.wrappers[0]
        raise


def adapt_experts(wrapped: list[_WrappedExperts], layers: Mapping[str, RoutedLayer]) -> None:
    """Move the LoRA matrices of experts that peft has wrapped to `Experts.lora`.

    `layers` maps names to MoE layers. Raises ValueError or NotImplementedError for adapters that
    the layers do not support.
    """
    places = {f"{name}.{m.get_part_name('experts')}".rstrip("."): m for name, m in layers.items()}
    for wrap in wrapped:
        layer = places.get(f"{wrap.block}.{wrap.child}")
        if layer is None:
            raise ValueError(
                f"LoRA on parameters of {wrap.block}.{wrap.child} must be on a MoE layer's experts"
                ": use LoraConfig.target_modules, or register an adapter for the block, see "
                "docs/extending.md"
            )
        experts = layer.get_part("experts")
        for depth, wrapper in enumerate(wrap.wrappers):
            is_transposed = getattr(wrap.experts, "is_transposed", False)  # peft's default
            if is_transposed != experts.layout.transposed:
                raise ValueError(
                    f"is_transposed ({is_transposed}) of {type(wrap.experts).__name__}, by which "
                    f"peft tells A from B, must be {experts.layout.transposed}: set it before "
                    "get_peft_model"
                )
            num_experts = layer.config.num_experts
            if wrapper.num_experts != num_experts:
                raise NotImplementedError(
                    f"LoRA on {wrap.block}.{wrap.child}.{wrapper.parameter_name} "
                    f"({wrapper.num_experts} matrices) must be on {num_experts} experts, since "
                    "experts that return their input have none: leave it out of "
                    "LoraConfig.target_parameters"
                )
            make: Any = _make_expert_lora_class()
            experts.add_low_rank_updates(wrapper.parameter_name, make(wrapper, depth))


def refuse_peft_methods(model: nn.Module) -> None:
    """Make peft methods that need full parameters raise; also adapters added after sharding."""
    _forbid_methods(model, REPLACED, "on a parallelized model, whose tensors are shards")
    # Users call get_peft_model on the outermost transformers model.
    outermost = next((m for m in model.modules() if is_pretrained(m)), None)
    if outermost is not None and not hasattr(outermost, "peft_config"):
        outermost.register_forward_pre_hook(_refuse_late_adapters)


def refuse_unmerging(model: nn.Module) -> None:
    """Make peft's methods that would unmerge adapters raise NotImplementedError."""
    _forbid_methods(model, MERGE_METHODS, "after merge_adapters")


def _forbid_methods(model: nn.Module, alternatives: Mapping[str, str], context: str) -> None:
    """Make methods {name: alternative} of a PeftModel and its tuner raise NotImplementedError."""
    for module in model.modules():
        if is_pretrained(module):
            return  # its children are layers
        for name, instead in alternatives.items():
            of_peft = getattr(type(module), name, None)
            if getattr(of_peft, "__module__", "").startswith("peft."):
                setattr(module, name, functools.partial(_refuse_method, name, context, instead))


def _refuse_method(method: str, context: str, fix: str, /, *args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(f"{method} of peft must not be called {context}: use {fix}")


def _refuse_late_adapters(module: nn.Module, args: Any) -> None:
    if hasattr(module, "peft_config"):
        raise ValueError(
            f"adapters of {type(module).__name__} must be attached before parallelize_moe, or "
            "every rank would train its own: get_peft_model first, then parallelize_moe"
        )


def unwrap_peft(model: nn.Module) -> nn.Module:
    """Return the base model of a PeftModel, and any other model unchanged."""
    if "peft" in sys.modules:
        from peft import PeftModel

        if isinstance(model, PeftModel) and not model.active_peft_config.is_prompt_learning:
            base_model: nn.Module = model.get_base_model()
            return base_model
    return model


@contextmanager
def disable_adapters(model: Any) -> Iterator[None]:
    """Disable a PeftModel's adapters in this context; restore `requires_grad` at its end."""
    trained = [(param, param.requires_grad) for param in model.parameters()]
    try:
        with model.disable_adapter():
            yield
    finally:
        for param, is_trained in trained:
            param.requires_grad_(is_trained)


def get_base_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that existed before peft was added, by their names without peft."""
    added_prefixes, moved_prefixes = _list_peft_prefixes(model)
    base_tensors = {n: t for n, t in tensors.items() if not n.startswith(added_prefixes)}
    return {_rename_without_peft(n, moved_prefixes): t for n, t in base_tensors.items()}


def select_trained_copies(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of peft's trained module copies (`modules_to_save`) by the original name."""
    _, moved_prefixes = _list_peft_prefixes(model)
    copy_of = {}
    for path, module in model.named_modules():
        copies = getattr(module, "modules_to_save", None)
        if not isinstance(copies, nn.ModuleDict) or not hasattr(module, "original_module"):
            continue
        path = clean_name(path)
        active = f"{path}.modules_to_save.{module.active_adapters[0]}"
        for name, tensor in tensors.items():
            if name.startswith(f"{active}."):
                original = path + name.removeprefix(active)
                copy_of[_rename_without_peft(original, moved_prefixes)] = tensor
    return copy_of


def _list_peft_prefixes(model: nn.Module) -> tuple[tuple[str, ...], list[str]]:
    """Return name prefixes of tensors that peft added, and of modules that peft moved."""
    added_prefixes, moved_prefixes = [], []
    for path, module in model.named_modules():
        path = clean_name(path)
        if is_tuner_layer(module):
            names = (*module.adapter_layer_names, *module.other_param_names)
            added_prefixes += [f"{path}.{name}." for name in names]
            moved_prefixes += [f"{path}.base_layer."] if "base_layer" in module._modules else []
        elif "modules_to_save" in module._modules and "original_module" in module._modules:
            added_prefixes.append(f"{path}.modules_to_save.")
            moved_prefixes.append(f"{path}.original_module.")
    return tuple(added_prefixes), sorted(moved_prefixes, key=len, reverse=True)


def find_file_names(model: Any, names: Iterable[str]) -> dict[str, str | None]:
    """Return {name of a LoRA tensor: its name in a file that peft loads}; None = there is no name.

    peft renames a file's tensors as transformers renames those of published checkpoints. This may
    change a name that is already transformers' name. Then the published name is returned.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import (
        convert_peft_adapter_state_dict_for_transformers,
    )
    from transformers.core_model_loading import revert_weight_conversion

    def make_tensors(*names: str) -> dict[str, Tensor]:
        return {name: torch.empty(1, 1, dtype=torch.float32, device="meta") for name in names}

    def load_names(*names: str) -> dict[str, Tensor]:
        tensors = make_tensors(*names)
        loaded: Any = convert_peft_adapter_state_dict_for_transformers
        return loaded(model, LoraConfig(), tensors)  # type: ignore[no-any-return]

    file_names: dict[str, str | None] = {name: name for name in names}
    loaded = load_names(*file_names)
    for name in [name for name in file_names if name not in loaded]:
        path, _, kind = name.removeprefix(PEFT_PREFIX).partition(".lora_")
        published = revert_weight_conversion(unwrap_peft(model), make_tensors(f"{path}.weight"))
        home = next(iter(published)).removesuffix(".weight")
        file_name = f"{PEFT_PREFIX}{home}.lora_{kind}"
        file_names[name] = file_name if name in load_names(file_name) else None
    return file_names


def _rename_without_peft(name: str, moved_prefixes: list[str]) -> str:
    """Remove peft's level of a module name, such as "base_layer", from a tensor's name."""
    for home in moved_prefixes:  # sorted: the longest prefix first
        if name.startswith(home):
            name = home[:-1].rpartition(".")[0] + name[len(home) - 1 :]
    return name


def _find_wrapped_experts(model: nn.Module) -> Iterator[_WrappedExperts]:
    """Yield experts modules inside peft's `ParamWrapper`s; NotImplementedError for other LoRA."""
    from peft.tuners.lora.layer import ParamWrapper
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, parent in model.named_modules():
        if isinstance(parent, AuxiliaryTrainingWrapper):
            _refuse_block_copy(name, parent, model)
        if isinstance(parent, ParamWrapper):
            continue
        for child, wrapper in parent._modules.items():
            wrappers = []
            while isinstance(wrapper, ParamWrapper):
                wrappers.append(wrapper)
                wrapper = wrapper.base_layer
            if wrappers and wrapper is not None:
                _refuse_lora_on_matrices(f"{name}.{child}", wrappers)
                yield _WrappedExperts(name, child, parent, tuple(wrappers), wrapper)


def _refuse_lora_on_matrices(name: str, wrappers: list[Any]) -> None:
    """Raise NotImplementedError if LoRA is on a parameter with less than 3 dims, as of a router."""
    for wrapper in wrappers:
        param = wrapper.get_param()
        if param.ndim < 3:
            raise NotImplementedError(
                f"LoRA on {name}.{wrapper.parameter_name} {tuple(param.shape)} must be on stacked "
                "matrices of experts: adapt dense layers by LoraConfig.target_modules; a router is "
                "trained whole (requires_grad_) or not at all"
            )


def _refuse_block_copy(name: str, wrapper: Any, model: nn.Module) -> None:
    """Raise NotImplementedError for peft's trainable copy `wrapper` of a MoE block or its parts."""
    block = model.get_submodule(name.rpartition(".")[0])
    siblings = [m for m in block.children() if m is not wrapper]
    parts = [*wrapper.modules(), *(p for m in siblings for p in (m, getattr(m, "base_layer", m)))]
    if not hasattr(wrapper, "modules_to_save") or any(map(_has_stacked_parameters, parts)):
        raise NotImplementedError(
            f"{name} ({type(wrapper).__name__}) must not be of a MoE block or a part of one, nor "
            "of single tokens: take it out of LoraConfig.modules_to_save and "
            "trainable_token_indices; a router is trained whole by requires_grad_"
        )


def _has_stacked_parameters(module: nn.Module) -> bool:
    """Whether a module, without peft's wrappers, has parameters with 3 or more dims."""
    while is_tuner_layer(module) and "base_layer" in module._modules:
        module = module.base_layer  # type: ignore[assignment]
    is_conv = isinstance(module, CONVOLUTIONS)
    return not is_conv and any(p.ndim >= 3 for p in module.parameters(recurse=False))


@functools.cache
def _make_expert_lora_class() -> type[LowRank]:
    """Return a `LowRank` subclass that peft's set_adapter and disable_adapter find in a model."""
    from peft.tuners.lora.layer import LoraLayer

    class ExpertLora(LowRank, LoraLayer):  # type: ignore[misc]
        """The LoRA updates of one stack of expert matrices."""

        adapter_layer_names = ("lora_A", "lora_B")
        other_param_names = ()

        def __init__(self, wrapper: Any, depth: int) -> None:
            E = wrapper.num_experts
            pairs = {}
            for name in wrapper.lora_A:
                a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
                trained = a.requires_grad
                b_EOr = b.detach().unflatten(1, (-1, E)).permute(2, 0, 1)  # from [O, r * E]
                pairs[name] = (
                    nn.Parameter(a.detach().unflatten(0, (E, -1)), requires_grad=trained),
                    nn.Parameter(b_EOr.contiguous(), requires_grad=trained),
                )
            LowRank.__init__(self, pairs, {name: wrapper.scaling[name] for name in pairs})
            self.r = {name: wrapper.r[name] for name in pairs}
            self.depth = depth  # number of peft wrappers outside of this matrix's wrapper
            self.merged_adapters = list(wrapper.merged_adapters)
            self._active_adapter = wrapper.active_adapter
            self._disable_adapters = wrapper.disable_adapters

        @property
        def active(self) -> Sequence[str]:
            """Return the names of active LoRA adapters; [] if disabled or merged."""
            return [] if self.disable_adapters or self.merged else self.active_adapters

    return ExpertLora
