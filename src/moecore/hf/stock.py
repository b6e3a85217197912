"""Whether a transformers MoE block computes what it did when it was released.

An adapter takes a block's tensors and computes what transformers' own classes compute. A
subclass, a wrapper, a patched method or one more child would so become the stock maths without a
word: `refuse_customised` finds them.

Note "origin": a method is transformers' own when its code, and that of all it wraps, stands in a
module of transformers or torch, whose decorators wrap forwards. Its globals identify a
function; its `__module__` does not, because `functools.wraps` copies it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from moecore.moe.layer import LayerLayout

OWNERS = ("transformers", "torch")
ACTIVATION_MODULES = ("transformers.activations", "torch.nn.modules.activation")


def refuse_customised(block: nn.Module, layout: LayerLayout) -> None:
    """Raise unless what a block computes is what transformers' own class does.

    Args:
        block: of a class that an adapter knows by its name.
        layout: the names of the children that the adapter takes over.

    Raises:
        NotImplementedError: names the part that is not transformers' own.
    """
    home = (type(block).__module__,)
    parts = (layout.router, layout.experts, layout.shared, layout.shared_gate)
    _check(block, "", home, children=parts)
    _check(block, layout.router, home)
    _check(block, layout.experts, home, children=("act_fn",))
    if hasattr(block.get_submodule(layout.experts), "act_fn"):
        _check(block, f"{layout.experts}.act_fn", ACTIVATION_MODULES)
    _check_implementation(block, layout.experts)


def _check(
    block: nn.Module, path: str, homes: tuple[str, ...], children: tuple[str, ...] = ()
) -> None:
    """Check one part of a block.

    Args:
        block: whose part it is.
        path: of the part; "" is the block itself.
        homes: modules of which the part's class must be.
        children: names of submodules that are known.
    """
    part = block.get_submodule(path)
    cls = type(part)
    name = f"{path} ({cls.__name__}) of {type(block).__name__}" if path else cls.__name__
    way_out = "or pass an adapter of yours, see docs/adapters.md"
    if cls.__module__ not in homes:
        raise NotImplementedError(
            f"{name} must be of {homes[0]}, whose maths its adapter knows: take off subclasses and "
            f"wrappers (LoRA of peft works on dense layers and experts), {way_out}"
        )
    for method in _own_methods(cls):
        function = getattr(cls, method)
        patched = vars(part).get(method)
        if not is_stock(function) or (patched and getattr(patched, "__func__", 0) is not function):
            raise NotImplementedError(
                f"{method} of {name} must be transformers' own, whose maths its adapter knows: "
                f"undo the patch, {way_out}"
            )
    members: dict[str, Any] = dict(part._modules)
    if not path:  # `adopt` knows those of routers and experts
        members |= {**part._parameters, **part._buffers}
    extra = [n for n, member in members.items() if member is not None and n not in children]
    if extra:
        raise NotImplementedError(
            f"{extra[0]} of {name} must not exist, because a MoELayer would not run it: remove it, "
            f"{way_out}"
        )


def _own_methods(cls: type) -> Iterator[str]:
    """Names of the methods that a module class adds to `nn.Module`, or overrides."""
    for base in cls.__mro__:
        if base is nn.Module:
            return
        yield from (n for n, x in vars(base).items() if callable(x) and n != "__init__")


def is_stock(function: Any) -> bool:
    """Whether a function is transformers' or torch's own: see the note "origin"."""
    while function is not None:
        module = getattr(function, "__globals__", {}).get("__name__", "")
        if module.partition(".")[0] not in OWNERS:
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _check_implementation(block: nn.Module, experts: str) -> None:
    """Check by which function transformers runs the experts: users can register their own."""
    config = getattr(block.get_submodule(experts), "config", None)
    name = getattr(config, "_experts_implementation", None)
    module = sys.modules.get("transformers.integrations.moe")
    function = getattr(module, "ALL_EXPERTS_FUNCTIONS", {}).get(name)
    if function is not None and not is_stock(function):
        raise NotImplementedError(
            f"config._experts_implementation ({name!r}) of {type(block).__name__} must be one of "
            "transformers' own, whose maths its adapter knows: call "
            'set_experts_implementation("eager"), or pass an adapter of yours, see docs/adapters.md'
        )
