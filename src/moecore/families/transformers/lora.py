"""peft's LoRA in a parallelized transformers model: adapters on experts, names, refusals.

peft wraps a dense layer in a module of its own, which is sharded with its block as it is. Stacked
matrices of experts it wraps by parametrizing them in forward, which shards do not allow: here the
wrappers are taken off, and their A and B go to `Experts.lora` (`moe/low_rank.py`).

    peft's, in mlp.experts                           here, in mlp.experts
    base_layer.lora_A.default.weight [E * r, D]      lora.gate_up_proj.lora_A.default [E, r, D]
    lora_B.default.weight [D, r * E], experts last   lora.down_proj.lora_B.default [E, D, r]

Legend: E experts, D model dim, r rank, O what a matrix writes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moecore.base.params import clean_name
from moecore.base.peft_layers import is_tuner_layer
from moecore.families.adapters import CONVOLUTIONS
from moecore.families.transformers.stock import is_pretrained
from moecore.moe.layer import RoutedLayer
from moecore.moe.low_rank import LowRank

# Of a PeftModel and its tuner -> what takes the place of what reads or changes whole parameters.
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
# Those that would take merged adapters out of shards again.
MERGE_METHODS = dict.fromkeys(
    ("disable_adapter", "disable_adapter_layers", "set_adapter"),
    "the base weights and adapters anew (load_hf, load_adapters in a new model)",
)


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """Experts that peft has wrapped."""

    block: str  # name of the MoE block
    child: str  # name of the experts in it
    parent: nn.Module
    wrappers: tuple[Any, ...]  # of peft, from the outermost; each is for one matrix
    experts: nn.Module


@contextmanager
def experts_unwrapped(model: nn.Module) -> Iterator[list[_Wrapped]]:
    """Within, experts stand where peft's wrappers of them stood; after an error these are back."""
    wrappers = list(_find_wrapped(model)) if "peft" in sys.modules else []
    for wrapper in wrappers:
        wrapper.parent._modules[wrapper.child] = wrapper.experts
    try:
        yield wrappers
    except BaseException:
        for wrapper in wrappers:
            wrapper.parent._modules[wrapper.child] = wrapper.wrappers[0]
        raise


def adapt_experts(wrapped: list[_Wrapped], layers: Mapping[str, RoutedLayer]) -> None:
    """Give the experts of MoE layers the updates of peft's wrappers."""
    places = {f"{name}.{m.name_of('experts')}".rstrip("."): m for name, m in layers.items()}
    for wrap in wrapped:
        layer = places.get(f"{wrap.block}.{wrap.child}")
        if layer is None:
            raise ValueError(
                f"LoRA on parameters of {wrap.block}.{wrap.child} must be on a MoE layer's experts"
                ": use LoraConfig.target_modules, or register an adapter for the block, see "
                "docs/extending.md"
            )
        experts = layer.part("experts")
        for depth, wrapper in enumerate(wrap.wrappers):
            is_transposed = getattr(wrap.experts, "is_transposed", False)  # as peft reads it
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
            make: Any = _expert_lora_class()
            experts.adapt(wrapper.parameter_name, make(wrapper, depth))


def refuse_peft_methods(model: nn.Module) -> None:
    """Make methods of peft that read or replace whole parameters raise on every rank alike."""
    _replace_methods(model, REPLACED, "on a parallelized model, whose tensors are shards")
    outermost = next((m for m in model.modules() if is_pretrained(m)), None)  # peft is given it
    if outermost is not None and not hasattr(outermost, "peft_config"):
        outermost.register_forward_pre_hook(_refuse_late)


def refuse_unmerging(model: nn.Module) -> None:
    """Make methods of peft that would take merged adapters out of shards raise."""
    _replace_methods(model, MERGE_METHODS, "after merge_adapters")


def _replace_methods(model: nn.Module, replaced: Mapping[str, str], context: str) -> None:
    """Let methods of a PeftModel and its tuner raise: name -> what to use."""
    for module in model.modules():
        if is_pretrained(module):
            return  # what it holds are layers
        for name, instead in replaced.items():
            of_peft = getattr(type(module), name, None)
            if getattr(of_peft, "__module__", "").startswith("peft."):
                setattr(module, name, functools.partial(_refuse_method, name, context, instead))


def _refuse_method(name: str, context: str, instead: str, *args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(f"{name} of peft must not be called {context}: use {instead}")


def _refuse_late(module: nn.Module, args: Any) -> None:
    """Forward pre-hook of a transformers model that had no adapters."""
    if hasattr(module, "peft_config"):
        raise ValueError(
            f"adapters of {type(module).__name__} must be attached before parallelize_moe, or "
            "every rank would train its own: get_peft_model first, then parallelize_moe"
        )


def adapted(model: nn.Module) -> nn.Module:
    """Return the model in a PeftModel, which `generate` of both calls; any other model itself."""
    if "peft" in sys.modules:
        from peft import PeftModel

        if isinstance(model, PeftModel) and not model.active_peft_config.is_prompt_learning:
            base_model: nn.Module = model.get_base_model()
            return base_model
    return model


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Within, a PeftModel runs without its adapters; what is trained is the same afterwards."""
    trained = [(param, param.requires_grad) for param in model.parameters()]
    try:
        with model.disable_adapter():
            yield
    finally:
        for param, is_trained in trained:
            param.requires_grad_(is_trained)


def without_adapters(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors, by name in a model, under their names before peft adapted it."""
    holders, homes = _peft_paths(model)
    base_tensors = {n: t for n, t in tensors.items() if not n.startswith(holders)}
    return {_renamed(n, homes): t for n, t in base_tensors.items()}


def trained_copies(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those tensors, by name in a model, that `modules_to_save` trains, by original name."""
    _, homes = _peft_paths(model)
    copy_of = {}
    for path, module in model.named_modules():
        copies = getattr(module, "modules_to_save", None)
        if not isinstance(copies, nn.ModuleDict) or not hasattr(module, "original_module"):
            continue
        path = clean_name(path)
        active = f"{path}.modules_to_save.{module.active_adapters[0]}"
        for name, tensor in tensors.items():
            if name.startswith(f"{active}."):
                copy_of[_renamed(path + name.removeprefix(active), homes)] = tensor
    return copy_of


def _peft_paths(model: nn.Module) -> tuple[tuple[str, ...], list[str]]:
    """Return the paths of what peft has added, and those of what it has moved deeper."""
    holders, homes = [], []
    for path, module in model.named_modules():
        path = clean_name(path)
        if is_tuner_layer(module):
            names = (*module.adapter_layer_names, *module.other_param_names)
            holders += [f"{path}.{name}." for name in names]
            homes += [f"{path}.base_layer."] if "base_layer" in module._modules else []
        elif "modules_to_save" in module._modules and "original_module" in module._modules:
            holders.append(f"{path}.modules_to_save.")
            homes.append(f"{path}.original_module.")
    return tuple(holders), sorted(homes, key=len, reverse=True)


def _renamed(name: str, homes: list[str]) -> str:
    for home in homes:  # the deepest first
        if name.startswith(home):
            name = home[:-1].rpartition(".")[0] + name[len(home) - 1 :]
    return name


def _find_wrapped(model: nn.Module) -> Iterator[_Wrapped]:
    from peft.tuners.lora.layer import ParamWrapper
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, parent in model.named_modules():
        if isinstance(parent, AuxiliaryTrainingWrapper):
            _check_copy(name, parent, model)
        if isinstance(parent, ParamWrapper):
            continue
        for child, wrapper in parent._modules.items():
            wrappers = []
            while isinstance(wrapper, ParamWrapper):
                wrappers.append(wrapper)
                wrapper = wrapper.base_layer
            if wrappers and wrapper is not None:
                _check_stacked(f"{name}.{child}", wrappers)
                yield _Wrapped(name, child, parent, tuple(wrappers), wrapper)


def _check_stacked(name: str, wrappers: list[Any]) -> None:
    for wrapper in wrappers:
        param = wrapper.get_param()
        if param.ndim < 3:
            raise NotImplementedError(
                f"LoRA on {name}.{wrapper.parameter_name} {tuple(param.shape)} must be on stacked "
                "matrices of experts: adapt dense layers by LoraConfig.target_modules; a router is "
                "trained whole (requires_grad_) or not at all"
            )


def _check_copy(name: str, wrapper: Any, model: nn.Module) -> None:
    """Refuse a trained copy of a MoE block or of a part of one, which a MoELayer takes over."""
    block = model.get_submodule(name.rpartition(".")[0])
    siblings = [m for m in block.children() if m is not wrapper]
    parts = [*wrapper.modules(), *(p for m in siblings for p in (m, getattr(m, "base_layer", m)))]
    if not hasattr(wrapper, "modules_to_save") or any(_is_stack(part) for part in parts):
        raise NotImplementedError(
            f"{name} ({type(wrapper).__name__}) must not be of a MoE block or a part of one, nor "
            "of single tokens: take it out of LoraConfig.modules_to_save and "
            "trainable_token_indices; a router is trained whole by requires_grad_"
        )


def _is_stack(module: nn.Module) -> bool:
    while is_tuner_layer(module) and "base_layer" in module._modules:
        module = module.base_layer  # type: ignore[assignment]
    is_conv = isinstance(module, CONVOLUTIONS)
    return not is_conv and any(p.ndim >= 3 for p in module.parameters(recurse=False))


@functools.cache
def _expert_lora_class() -> type[LowRank]:
    """Return a `LowRank` that peft's walks over a model find: set_adapter, disable_adapter."""
    from peft.tuners.lora.layer import LoraLayer

    class ExpertLora(LowRank, LoraLayer):  # type: ignore[misc]
        """The updates of one stack of matrices."""

        adapter_layer_names = ("lora_A", "lora_B")
        other_param_names = ()

        def __init__(self, wrapper: Any, depth: int) -> None:
            E = wrapper.num_experts
            pairs = {}
            for name in wrapper.lora_A:
                a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
                trained = a.requires_grad
                b_EOr = b.detach().unflatten(1, (-1, E)).permute(2, 0, 1)  # of [O, r * E]
                pairs[name] = (
                    nn.Parameter(a.detach().unflatten(0, (E, -1)), requires_grad=trained),
                    nn.Parameter(b_EOr.contiguous(), requires_grad=trained),
                )
            LowRank.__init__(self, pairs, {name: wrapper.scaling[name] for name in pairs})
            self.r = {name: wrapper.r[name] for name in pairs}
            self.depth = depth  # how many wrappers of peft stood around this matrix's
            self.merged_adapters = list(wrapper.merged_adapters)
            self._active_adapter = wrapper.active_adapter
            self._disable_adapters = wrapper.disable_adapters

        @property
        def in_use(self) -> list[str]:
            if self.disable_adapters or self.merged:
                return []
            return [name for name in self.active_adapters if name in self.lora_A]

    return ExpertLora
