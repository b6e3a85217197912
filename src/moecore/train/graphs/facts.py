"""GraphFacts: facts of a model on which its CUDA graph relies, compared before each replay.

A graph holds addresses and Python's decisions from its capture. Those that may change in a training
run are facts here. A change of any other decision has no effect on a replay and raises nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.base.torch_names import hooks_around, num_gradient_hooks
from moecore.moe.state import MoEState
from moecore.parallel.attached import attached


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphFacts:
    """The facts on which a graph relies.

    Attributes:
        values: the facts, in the order of `_names`, which is called only when one has changed.
        held: references to the objects whose addresses are values, so that no other object gets
            their addresses.
        exchanges: exchanges whose buffers the graph writes; this reference keeps them alive.
    """

    values: list[Any]
    held: list[Any]
    exchanges: tuple[Any, ...]

    def check(self, model: nn.Module, state: MoEState) -> None:
        """Raise a ValueError that names a changed fact; 3 ms of host time for 531 parameters."""
        now = facts_of(model, state)
        if now.values != self.values:
            named = zip(_names(model, state), now.values, self.values, strict=False)
            changed = (name for name, value, then in named if value != then)
            raise ValueError(
                f"{next(changed, 'the modules of the model')} must be what it was when the graph "
                "was captured: set it back, or call close(), after which the next calls warm up "
                "and capture anew"
            )
        # New exchanges may exist, but those that other ranks write to must still be there.
        if any(exchange not in now.exchanges for exchange in self.exchanges):
            raise ValueError(
                "the buffers of dispatcher ('nvlink') must be those of when the graph was "
                "captured: call close() of the graph, too, when you close them"
            )


@torch.no_grad()
def facts_of(model: nn.Module, state: MoEState) -> GraphFacts:
    """Return the current facts of a model."""
    values: list[Any] = [state.num_micro_batches]
    held: list[Any] = []
    for module in model.modules():
        config = vars(module).get("config")
        held.append(config)
        values += (module.training, len(hooks_around(module)), id(config))
        for _, tensor in _tensors(module):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
            held.append(local)
            values += (
                tensor.requires_grad,
                num_gradient_hooks(tensor),
                local.data_ptr(),
            )
    for layer in state.layers.values():
        held.append(layer.tracker.counts)
        values.append(id(layer.tracker.counts))
    held.append(state.loss_scale)
    values.append(id(state.loss_scale))
    record = attached(model)
    exchanges = () if record is None or record.exchanges is None else record.exchanges.held
    return GraphFacts(values=values, held=held, exchanges=exchanges)


def _names(model: nn.Module, state: MoEState) -> Iterator[str]:
    """Yield the names of the values of `facts_of`, in the same order."""
    yield "the number of micro-batches of a step"
    for name, module in model.named_modules():
        for what in ("train or eval mode", "the number of hooks", "the config"):
            yield f"{what} of {name or 'the model'}"
        for own, _ in _tensors(module):
            for what in ("requires_grad", "the number of hooks", "the memory"):
                yield f"{what} of {name}.{own}".replace(" .", " ")
    for name in state.layers:
        yield f"the balance config of {name}"
    yield "the loss scale"


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own parameters and buffers with their names."""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, tensor
