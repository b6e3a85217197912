"""Inspection of transformers' classes: forwards, losses, routers, towers, customised blocks.

An adapter's layer has a block's tensors and computes the same function as transformers' class. It
would silently drop changes by a subclass, a wrapper, a patched method or an additional child, so
`refuse_customised_block` raises for such a block.

A tower is any part of a multimodal base model outside of the text decoder: vision and audio
encoders, projectors and resamplers. A forward without images, audio and video does not run towers,
so packed documents, context parallelism and pipeline stages support text-only rows.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn

from moecore.base.torch_private import call_after_backward, tree_leaves
from moecore.moe.layer import LayerLayout
from moecore.parallel.pipeline.stages import AbsentModule

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a forward: positional, and by name
OWNERS = ("transformers", "torch")
WAY_OUT = "or pass an adapter of yours, see docs/extending.md"
CAUSAL_LOSS = "ForCausalLMLoss"  # transformers' function of the loss of a causal language model
CACHES = ("past_key_values", "cache")  # arguments of forwards; the second since transformers 5.24
LINEAR_MODULE = ("torch.nn.modules.linear",)
ACTIVATION_MODULES = ("transformers.activations", "torch.nn.modules.activation")


def is_transformers_module(module: nn.Module) -> bool:
    """Whether a module's class is defined in `transformers.models`."""
    return type(module).__module__.startswith("transformers.models.")


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is a transformers `PreTrainedModel`."""
    return any(cls.__module__ == "transformers.modeling_utils" for cls in type(module).__mro__)


def find_modules(model: nn.Module, *class_names: str) -> list[Any]:
    """Return the modules of a model whose class in transformers has one of `class_names`."""
    named = (m for m in model.modules() if type(m).__name__ in class_names)
    return [module for module in named if is_transformers_module(module)]


def find_outermost_models(module: nn.Module) -> Iterator[Any]:
    """Yield each outermost `PreTrainedModel` in a module; the module itself if it is a model."""
    if is_pretrained(module):
        yield module
        return
    for child in module.children():
        yield from find_outermost_models(child)


def get_base_model(model: Any) -> Any:
    """Return the module below a model's head, or the model if it has no head."""
    # `base_model` of Llama4ForCausalLM is the model itself.
    base, inner = model.base_model, getattr(model, "model", None)
    return inner if base is model and inner is not None and is_pretrained(inner) else base


@cache
def get_forward_parameters(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of an unbound forward by name, in order, without self."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return {parameter.name: parameter for parameter in parameters}


def bind_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a forward's positional and keyword arguments by name, without defaults."""
    names = get_forward_parameters(type(module).forward)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def has_cache(kwargs: Mapping[str, Any]) -> bool:
    """Whether a forward's keyword arguments have a cache of keys or states."""
    return any(kwargs.get(name) is not None for name in CACHES)


def has_extra_keywords(model: nn.Module) -> bool:
    """Whether a model's forward has `**kwargs`."""
    parameters = get_forward_parameters(type(model).forward).values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def restore_in_backward(output: Any, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of `owner` to `value` during the backward of `output`, then to None."""

    def restore(_grad: Tensor) -> None:
        setattr(owner, name, value)
        call_after_backward(lambda: setattr(owner, name, None))

    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(restore)


def find_names_in_forward(module: nn.Module) -> frozenset[str]:
    """Return the names of globals and attributes in the code of a module's forward."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return frozenset(getattr(code, "co_names", ()))


def get_loss_name(model: Any) -> str | None:
    """Return the name of a model's loss, by its `loss_type`; None if forward has no loss."""
    if "loss_function" not in find_names_in_forward(model):
        return None
    from transformers.loss.loss_utils import LOSS_MAPPING

    function = LOSS_MAPPING.get(getattr(model, "loss_type", None), LOSS_MAPPING["ForCausalLM"])
    return str(function.__name__)


def has_causal_loss(model: Any) -> bool:
    """Whether a model's forward computes transformers' `ForCausalLMLoss`."""
    if get_loss_name(model) != CAUSAL_LOSS:
        return False
    function = model.loss_function
    return is_stock(function) and getattr(function, "__name__", "") == CAUSAL_LOSS


def is_stock_forward(module: nn.Module, class_name: str) -> bool:
    """Whether a module is of transformers' class `class_name` with an unpatched forward."""
    is_class = is_transformers_module(module) and type(module).__name__ == class_name
    return is_class and "forward" not in vars(module) and is_stock(type(module).forward)


def get_router(block: nn.Module, layout: LayerLayout) -> Any:
    """Return the module of a block whose forward selects experts."""
    # Where its matrix is a linear's, `layout.router` is that linear.
    return block.get_submodule(layout.router.partition(".")[0])


def refuse_customised_block(
    block: nn.Module, layout: LayerLayout, child_names: tuple[str, ...] = ()
) -> None:
    """Raise NotImplementedError for a block with code or children that are not of transformers."""
    home = (type(block).__module__,)
    kind = type(block).__name__
    holder, _, linear = layout.router.rpartition(".")
    parts = (holder or linear, layout.experts, layout.shared, layout.shared_gate)
    latent = (layout.latent_down, layout.latent_up)
    _refuse_custom_code(block, kind, home, child_names=(*parts, *latent, *child_names))
    for name, tensor in {**block._parameters, **block._buffers}.items():
        if tensor is not None and (layout.bias_owner, layout.expert_bias) != ("", name):
            _refuse_extra_member(kind, name)
    homes = dict.fromkeys((layout.router, layout.experts, layout.bias_owner or ""), home)
    if holder:
        homes = {holder: home, **homes, layout.router: LINEAR_MODULE}
    for path in filter(None, homes):
        part = block.get_submodule(path)
        names = ("act_fn", "identity_expert") if path == layout.experts else ("score_fn",)
        inner = [p.rpartition(".")[2] for p in homes if p.rpartition(".")[0] == path]
        name = f"{path} ({type(part).__name__}) of {kind}"
        _refuse_custom_code(part, name, homes[path], child_names=(*names, *inner))
        if (replacement := part._modules.get(names[0])) is not None:
            name = f"{path}.{names[0]} ({type(replacement).__name__}) of {kind}"
            for m in replacement.modules():  # Inkling's activation has a child
                _refuse_custom_code(m, name, (*ACTIVATION_MODULES, *home), tuple(m._modules))
    _refuse_custom_implementation(block.get_submodule(layout.experts), kind)


def refuse_customised_experts(experts: nn.Module, child_names: tuple[str, ...]) -> None:
    """Raise NotImplementedError for experts that moecore cannot compute.

    Such experts have a patched method, a custom `_experts_implementation`, a norm of each expert's
    output, or a child module that is not in `child_names`.
    """
    kind = type(experts).__name__
    if getattr(experts, "has_post_expert_norm", False):
        raise NotImplementedError(
            f"has_post_expert_norm (True) of {kind} must be False: moecore weights rows before "
            "FC2, and a norm of each expert's output is not built yet"
        )
    _refuse_custom_code(experts, kind, (type(experts).__module__,), child_names=child_names)
    _refuse_custom_implementation(experts, kind)


def _refuse_custom_code(
    module: nn.Module,
    part_name: str,
    module_names: tuple[str, ...],
    child_names: tuple[str, ...] = (),
) -> None:
    """Raise NotImplementedError for a module with another computation than its adapter expects.

    The class must be defined in one of `module_names`. Methods must be from transformers or torch.
    Children must be in `child_names`.
    """
    cls = type(module)
    if cls.__module__ not in module_names:
        raise NotImplementedError(
            f"{part_name} must be of {module_names[0]}, whose maths its adapter knows: take off "
            f"subclasses and wrappers (LoRA of peft works on dense layers and experts), {WAY_OUT}"
        )
    for method in list_overridden_methods(cls):
        function = getattr(cls, method)
        patched = vars(module).get(method)
        if not is_stock(function) or (patched and getattr(patched, "__func__", 0) is not function):
            raise NotImplementedError(
                f"{method} of {part_name} must be transformers' own, whose maths its adapter "
                f"knows: undo the patch, {WAY_OUT}"
            )
    extra = [n for n, m in module._modules.items() if m is not None and n not in child_names]
    if extra:
        _refuse_extra_member(part_name, extra[0])


def _refuse_extra_member(owner_name: str, member_name: str) -> None:
    raise NotImplementedError(
        f"{member_name} of {owner_name} must not exist, because moecore's layer would not run it: "
        f"remove it, {WAY_OUT}"
    )


def list_overridden_methods(cls: type) -> Iterator[str]:
    """Yield names of methods, except __init__, that a class or a base below `nn.Module` defines."""
    for base in cls.__mro__:
        if base is nn.Module:
            return
        yield from (n for n, x in vars(base).items() if callable(x) and n != "__init__")


def is_stock(function: Any) -> bool:
    """Whether a function, and all functions that it wraps, are from transformers or torch."""
    # torch is an owner because its decorators wrap forwards. Globals identify a function;
    # `__module__` does not, because `functools.wraps` copies it.
    while function is not None:
        module = getattr(function, "__globals__", {}).get("__name__", "")
        if module.partition(".")[0] not in OWNERS:
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _refuse_custom_implementation(experts: nn.Module, class_name: str) -> None:
    name = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    module = sys.modules.get("transformers.integrations.moe")
    function = getattr(module, "ALL_EXPERTS_FUNCTIONS", {}).get(name)
    is_known = function is None or is_stock(function) or function.__module__.startswith("moecore.")
    if not is_known:
        raise NotImplementedError(
            f"config._experts_implementation ({name!r}) of {class_name} must be 'moecore' or one "
            "of transformers' own, whose maths its adapter knows: call "
            f'set_experts_implementation("eager"), {WAY_OUT}'
        )


def enable_activation_checkpointing(model: Any) -> None:
    """Enable activation checkpointing of a transformers model."""
    new = getattr(model, "activation_checkpointing_enable", None)
    (new or model.gradient_checkpointing_enable)()


def get_text_decoder(model: Any) -> Any:
    """Return the module with the decoder layers; for text-only models, the base model."""
    base = get_base_model(model)
    return base.get_decoder() if hasattr(base, "get_decoder") else base


def find_local_layer_types(model: Any) -> dict[int, str]:
    """Return {i: `layer_types[i]`} of the layers that this rank's pipeline stages hold."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    layers = getattr(get_text_decoder(model), "layers", None)
    modules = layers if isinstance(layers, nn.ModuleList) else ()
    absent = {i for i, module in enumerate(modules) if isinstance(module, AbsentModule)}
    return {i: kind for i, kind in enumerate(kinds) if i not in absent}


def find_towers(model: Any) -> dict[str, nn.Module]:
    """Return the outermost modules with parameters outside of the text decoder, by name."""
    base, decoder = get_base_model(model), get_text_decoder(model)
    names = {module: name for name, module in model.named_modules()}
    towers = dict[str, nn.Module]()

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if decoder in child.modules():
                if child is not decoder:
                    visit(child)
            elif next(child.parameters(), None) is not None:
                towers[names[child]] = child

    if decoder is not base:
        visit(base)
    return towers


def refuse_tower_inputs(model: Any, inputs: Mapping[str, Any], option_names: str) -> None:
    """Raise ValueError for arguments that only image or audio encoders read, by name.

    `position_ids` with three dims are such an argument. `option_names` names options in the error.
    """
    base, decoder = get_base_model(model), get_text_decoder(model)
    if decoder is base:
        return
    positions = inputs.get("position_ids")
    if positions is not None and positions.ndim != 2:
        raise ValueError(
            f"position_ids {tuple(positions.shape)} must be [B, T] with {option_names}, where rows "
            "have only text: leave them out"
        )
    of_towers = get_forward_parameters(type(base).forward).keys() - get_forward_parameters(
        type(decoder).forward
    )
    for name in sorted(of_towers & inputs.keys()):
        if isinstance(inputs[name], Tensor | Mapping):
            raise ValueError(
                f"{name} must be None for {type(base).__name__} with {option_names}, which do not "
                "run its towers: pass text-only rows, or leave these options out"
            )
