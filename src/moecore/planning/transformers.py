"""TransformersModel: a class of transformers as the model of a plan, by its config.json.

    config.json -> the class on meta, with MoE blocks swapped as `parallelize_moe` swaps them
                -> StockModel

Layers, experts and attention are read from modules, without code for a family. A model of few
layers is the complete model without its other layers, so each layer keeps its index-dependent kind.
"""

import copy
import inspect
import json
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from moecore.base import get_install_command
from moecore.base.fields import CheckedRecord, check_arguments, quote
from moecore.base.options.context import ContextOptions
from moecore.families import use_causal_attention
from moecore.families.family import find_family, swap_blocks
from moecore.families.transformers.lora_options import LoRAOptions, add_adapters
from moecore.families.transformers.packing import find_packing_problem
from moecore.families.transformers.stock import enable_activation_checkpointing
from moecore.families.transformers.tensor_parallel import plan_modules
from moecore.io.hf.config_fields import HFConfig, read_config
from moecore.io.hf.files import format_error_with_source
from moecore.io.hf.stock import build_meta_model
from moecore.moe.layer import RoutedLayer
from moecore.parallel.fsdp.units import find_blocks
from moecore.planning.model import ModelSizes, ModelSource, ModuleParts, PlannedModel, count_sizes
from moecore.train.memory.parts import UP

VALUES = (int, float, str, bool, type(None))
PLACE = "layer_idx"  # attribute of modules


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformersModel(CheckedRecord):
    """A transformers model class with a config, made by `TransformersModel.of(config)`.

    Attributes:
        values: config.json, as JSON with sorted keys.
        source: the path of config.json.
        layers: the indices of the layers that the model has; None = all.
        recompute: whether transformers recomputes each layer in backward.
        lora: LoRA adapters; all other weights are then frozen and in bf16. None = no adapters.
    """

    values: str
    source: str
    layers: tuple[int, ...] | None = None
    recompute: bool = False
    lora: LoRAOptions | None = None

    @classmethod
    def of(cls, config: HFConfig) -> Self:
        """Return the model of a directory, a config.json, or the contents of a config.json.

        Raises:
            ValueError: if transformers has no class for the config.
            NotImplementedError: for a family that `parallelize_moe` does not support.
        """
        check_arguments(TransformersModel.of, locals())
        values = read_config(config)
        path = "DIR" if isinstance(config, Mapping) else os.fspath(config)
        model = cls(values=json.dumps(values, sort_keys=True), source=path)
        with convert_model_errors(model):
            _build_structure(model)
        return model


@contextmanager
def convert_model_errors(model: object) -> Iterator[None]:
    """Return a context in which errors of a `TransformersModel` become one-line ValueErrors."""
    # A config.json may have any values, and the code of the class that reads them is not moecore's.
    try:
        yield
    except (ValueError, NotImplementedError, MemoryError):
        raise
    except Exception as error:
        if not isinstance(model, TransformersModel):
            raise
        model_type = json.loads(model.values).get("model_type")
        raise ValueError(
            f"config.json of model_type ({quote(model_type)}) must have values with which a step "
            f"runs, not {type(error).__name__} ({format_error_with_source(error)}): correct them"
        ) from error


MAX_SCAN = 64  # tokens of a Mamba-1 layer: 32 layers of more take minutes on the host
# Mamba-1's A_log is a matrix, and A_log of later versions is a vector.
WIDTHS = torch.empty(0, dtype=torch.float32, device="cpu")


class Structure(NamedTuple):
    """A meta model whose MoE layers are moecore's, and lists of decoder layers and MoE layers."""

    model: Any
    blocks: list[nn.Module]
    experts: list[RoutedLayer]


@dataclass(frozen=True, kw_only=True)
class StockModel(PlannedModel):
    """The sizes and layers of a `TransformersModel`, read from its modules on meta."""

    model: TransformersModel

    @classmethod
    def from_model(cls, model: TransformersModel) -> Self:
        """Build the model on meta and return the sizes and layers of its modules."""
        hf, blocks, experts = _build_structure(model)
        config = hf.config.get_text_config()
        with_experts = [any(isinstance(m, RoutedLayer) for m in b.modules()) for b in blocks]
        names = (n for block in blocks for m in block.modules() for n in m._modules)
        return cls(
            dim=config.hidden_size,
            vocab_size=config.vocab_size,
            max_seq_len=None,
            layers=tuple(_find_block_kinds(hf, blocks)),
            dense=frozenset(i for i, has in enumerate(with_experts) if not has),
            num_mtp_layers=0,
            moe=experts[0].config if experts else None,
            has_latents=not UP.isdisjoint(names),
            model=model,
        )

    @override
    def list_bound_layers(self) -> frozenset[int]:
        hf = _build_structure(self.model).model
        return find_family(hf).make_staged_model(hf).stage_parts().bound_layers

    @override
    def select_layers(self, layer_idxs: Sequence[int]) -> TransformersModel:
        numbers = self.model.layers or range(self.num_layers)
        return replace(self.model, layers=tuple(numbers[i] for i in layer_idxs))

    @override
    def build(self, dtype: torch.dtype) -> nn.Module:
        lora = self.model.lora
        model: nn.Module = _build_model(self.model, dtype if lora is None else torch.bfloat16)
        if find_packing_problem(model) is None:
            use_causal_attention(model)
        if self.model.recompute:
            enable_activation_checkpointing(model)
        if lora is not None:
            model = add_adapters(model, lora)
        return model.train()

    @override
    def merge_loss_chunks(self, model: nn.Module, num_tokens: int) -> None:
        """Change nothing: the loss of transformers models has chunks of a constant size."""

    @override
    def collect_parts(self, model: Any) -> ModuleParts:
        head = model.get_output_embeddings() or list(model.children())[-1]
        return ModuleParts(model.get_input_embeddings(), find_blocks(model), (), head, model)

    @override
    def make_inputs(self, tokens_BT: Tensor) -> Mapping[str, Any]:
        hf = _build_structure(self.model).model
        scan = next((m for m in hf.modules() if getattr(m, "A_log", WIDTHS).ndim == 2), None)
        if scan is not None and tokens_BT.shape[1] > MAX_SCAN:
            raise ValueError(
                f"seq_len ({tokens_BT.shape[1]}) must be at most {MAX_SCAN} for a plan of "
                f"{type(scan).__name__}, whose scan is a Python loop over tokens: lower it"
            )
        arguments = {"input_ids": tokens_BT, "labels": tokens_BT, "use_cache": False}
        if find_packing_problem(hf) is not None:
            # Not on meta: transformers reads on the host that no row has two sequences.
            arguments["position_ids"] = torch.arange(tokens_BT.shape[1], device="cpu")[None]
        return arguments

    @override
    def count_parameters(self) -> ModelSizes:
        hf, _, layers = _build_structure(self.model)
        experts = {p for layer in layers for p in layer.get_part("experts").parameters()}
        cuts = ((m, (*split.columns, split.row)) for m, split in plan_modules(hf, 1)[0].items())
        tp_params = {p for m, names in cuts for n in names for p in m.get_submodule(n).parameters()}
        return count_sizes(hf, experts, tp_params)

    @override
    def check_degrees(self, *, pp: int, tp: int, cp: int) -> None:
        hf, _, _ = _build_structure(self.model)
        family = find_family(hf)
        if tp > 1:
            family.check_tensor_parallel(hf, tp)
        if cp > 1:
            family.make_context_parallel_model(hf).context_options(ContextOptions(), cp, tp)
        if pp > 1:
            family.make_staged_model(hf)

    @override
    def make_source(self, dtype: torch.dtype) -> ModelSource:
        hf, path = _build_structure(self.model).model, self.model.source
        packs = find_packing_problem(hf) is None
        imports = ["from transformers import AutoConfig, " + type(hf).__name__]
        imports += ["from moecore.families import use_causal_attention"] if packs else []
        return ModelSource(
            [*imports, "from moecore.io import init_hf"],
            [
                f"config = AutoConfig.from_pretrained({path!r})",
                'with torch.device("meta"):',
                f"    model = {type(hf).__name__}._from_config(config, dtype={dtype})",
                *(["use_causal_attention(model)"] if packs else []),
                "model.train()",
            ],
            f"init_hf(model, 0)  # or load_hf({path!r}, model, cast=True)",
            "input_ids and labels",
        )


@lru_cache(maxsize=8)
def _build_structure(model: TransformersModel) -> Structure:
    """Build a model on meta with moecore's MoE layers (cached: callers must not change it)."""
    hf = _build_model(model, torch.float32)
    swap_blocks(hf, {})
    layers = [m for m in hf.modules() if isinstance(m, RoutedLayer)]
    return Structure(hf, find_blocks(hf), layers)


def _build_model(model: TransformersModel, dtype: torch.dtype) -> Any:
    """Return the class of transformers on meta, with the selected layers; ValueError if missing."""
    values = json.loads(model.values)
    if find_spec("transformers") is None:
        raise ValueError(
            f"config.json model_type ({quote(values.get('model_type'))}) must have transformers "
            f"installed to be planned: {get_install_command('hf')}"
        )
    hf: Any = build_meta_model(values, dtype=dtype)
    if hf is None:
        raise ValueError(
            f"config.json model_type ({quote(values.get('model_type'))}) must be of a causal "
            "language model of transformers: name its class in architectures, or install a "
            "transformers that has it"
        )
    if model.layers is not None:
        full = _build_structure(replace(model, layers=None))
        module_names = {module: name for name, module in full.model.named_modules()}
        names = [module_names[block] for block in full.blocks]
        blocks = [hf.get_submodule(names[i]) for i in model.layers]
        for holder in dict.fromkeys(hf.get_submodule(name.rpartition(".")[0]) for name in names):
            members = [module for module in blocks if module in holder.children()]
            holder._modules.clear()
            holder.extend(members)
        for place, (idx, block) in enumerate(zip(model.layers, blocks, strict=True)):
            for module in block.modules():  # an index of the config's lists
                if getattr(module, PLACE, None) == idx:
                    setattr(module, PLACE, place)
        _shorten_config(hf.config.get_text_config(), len(names), model.layers)
    return hf


def _shorten_config(config: Any, num_layers: int, layer_idxs: Sequence[int]) -> None:
    """Reduce a config of `num_layers` layers to the layers at these indices, in place."""
    lists = {
        name: [value[i] for i in layer_idxs]
        for name, value in _find_layer_lists(config, num_layers)
    }
    # The config may count attentions, of which a layer has several.
    config.num_hidden_layers = config.num_hidden_layers * len(layer_idxs) // max(1, num_layers)
    if (spec := vars(config).get("_heterogeneity_spec")) is not None:  # fields by layer index
        of_layers = spec.per_layer_overrides
        overrides = {
            i: of_layers[layer] for i, layer in enumerate(layer_idxs) if layer in of_layers
        }
        config._heterogeneity_spec = replace(spec, per_layer_overrides=overrides)
    kind = type(config)  # whose properties may compute a list
    properties = {name: value for name, value in lists.items() if name not in vars(config)}
    vars(config).update({name: lists[name] for name in lists.keys() & vars(config).keys()})
    if properties:
        config.__class__ = type(kind.__name__, (kind,), properties)


def _find_layer_lists(config: Any, num_layers: int) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield (name, value) of config fields with one item for each of `num_layers` layers."""
    names = (n for n, x in inspect.getmembers(type(config)) if isinstance(x, property))
    for name, value in {**{n: getattr(config, n, None) for n in names}, **vars(config)}.items():
        is_listed = isinstance(value, list | tuple) and len(value) == num_layers
        if is_listed and list(value) != list(range(num_layers)):
            yield name, value


def _find_block_kinds(hf: Any, blocks: Sequence[nn.Module]) -> Iterator[Hashable]:
    """Yield a hashable kind of each block; blocks of one kind have equal modules and configs."""
    config = hf.config.get_text_config()
    lists = list(_find_layer_lists(config, len(blocks)))
    is_distinct = not _keeps_other_params_with_fewer_layers(hf, blocks)
    for i, block in enumerate(blocks):
        if is_distinct:
            yield i
            continue
        kind: list[Hashable] = [(name, str(value[i])) for name, value in lists]
        for name, module in block.named_modules():
            named = sorted(vars(module).items())
            values = ((n, v) for n, v in named if type(v) in VALUES and n != PLACE)
            shapes = ((n, tuple(p.shape)) for n, p in module.named_parameters(recurse=False))
            kind += [name, type(module).__name__, *values, *shapes]
        yield tuple(kind)


def _keeps_other_params_with_fewer_layers(hf: Any, blocks: Sequence[nn.Module]) -> bool:
    """Return whether a model with one layer less has the same parameters outside its layers."""
    config = copy.deepcopy(hf.config)
    inner = {p for block in blocks for p in block.parameters()}
    _shorten_config(config.get_text_config(), len(blocks), range(len(blocks) - 1))
    try:
        with torch.device("meta"):
            fewer = type(hf)._from_config(config)
    except Exception:  # of any kind: a config of so few layers that transformers refuses
        return False
    shapes = {name: param.shape for name, param in fewer.named_parameters()}
    return all(shapes.get(n) == p.shape for n, p in hf.named_parameters() if p not in inner)
