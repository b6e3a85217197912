"""What tests look up in the engine of a parallelized model, and what its units do."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn

from moecore.base.torch_private import get_local_tensor
from moecore.parallel.fsdp.transport import PackedTransport
from moecore.parallel.fsdp.unit import State, Unit
from moecore.parallel.model.parallel_state import list_engines


def units(model: nn.Module) -> list[Unit]:
    """Return the units of a model that have parameters, the root's last."""
    return [unit for engine in list_engines(model) for unit in engine.units if unit.params]


def unit_of(model: nn.Module, module: nn.Module) -> Unit | None:
    """Return the unit that a module runs; None for one whose parameters are another's."""
    return next((unit for unit in units(model) if module in unit.modules), None)


def is_unit(model: nn.Module, module: nn.Module) -> bool:
    """Return whether a module runs a unit."""
    return unit_of(model, module) is not None


def unit_names(model: nn.Module) -> list[str]:
    """Return the names of the modules that run units, in the order of the model."""
    return [name for name, module in model.named_modules() if is_unit(model, module)]


def resident_bytes(model: nn.Module) -> int:
    """Return the bytes of whole parameters whose values are there."""
    held = [unit for unit in units(model) if unit.state is not State.SHARDED]
    wholes = [
        param.unsharded for unit in held for param in unit.params if param.unsharded is not None
    ]
    return sum(get_local_tensor(whole).nbytes for whole in wholes)


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[str]]:
    """Record what units of a model on gloo do, in order, with the units' names.

    "gather" and "reduce" are collectives, "forward" and "backward" begin a use of whole parameters.
    """
    events: list[str] = []
    names: dict[Any, str] = {unit._transport: unit.options.name for unit in units(model)}
    register = Unit.register_params

    def use(unit: Unit, *, unsharded: bool) -> None:
        if unsharded:
            events.append(f"{'backward' if unit.backwards else 'forward'} {unit.options.name}")
        register(unit, unsharded=unsharded)

    with ExitStack() as stack:
        for verb, method in (("gather", "all_gather"), ("reduce", "reduce_scatter")):
            counted = _counted(verb, getattr(PackedTransport, method), names, events)
            stack.enter_context(patch.object(PackedTransport, method, counted))
        stack.enter_context(patch.object(Unit, "register_params", use))
        yield events


def _counted(verb: str, plain: Any, names: dict[Any, str], events: list[str]) -> Any:
    def call(transport: PackedTransport, *args: Any) -> Any:
        if transport in names:
            events.append(f"{verb} {names[transport]}")
        return plain(transport, *args)

    return call
