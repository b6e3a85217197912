"""What a CUDA graph of a model takes for granted: compared with the present before each replay.

A graph holds addresses and decisions of the moment of its capture. Whatever of them may change in a
training run is a fact here; what else Python decides in a step stays as it was, unseen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.moe.dispatch.symmetric import Exchange
from moecore.moe.state import MoEState

HOOKS_OF_MODULES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a graph takes for granted.

    Attributes:
        values: (what, of whom) -> value.
        held: what values are addresses of; as long as it lives nothing else has them.
        exchanges: whose buffers the graph writes; they live as long as it.
    """

    values: dict[tuple[str, str], Any]
    held: list[Any]
    exchanges: tuple[Exchange, ...]

    def check(self, model: nn.Module, state: MoEState) -> None:
        """Raise when something is no longer what it was.

        Args:
            model: nothing of it gathered.
            state: of the model.

        Raises:
            ValueError: names what has changed.
        """
        now = facts_of(model, state)
        values = now.values
        if values != self.values:
            both = (*values, *self.values)
            what = next(key for key in both if values.get(key) != self.values.get(key))
            raise ValueError(
                f"{' '.join(what)} must be what it was when the graph was captured: set it back, "
                "or call close(), after which the next calls warm up and capture anew"
            )
        # Others may have been made since; those that other ranks write to must be there.
        if any(exchange not in now.exchanges for exchange in self.exchanges):
            raise ValueError(
                "the buffers of dispatcher ('nvlink') must be those of when the graph was "
                "captured: call close() of the graph, too, when you close them"
            )


def facts_of(model: nn.Module, state: MoEState) -> Facts:
    """Return the facts of the moment.

    Args:
        model: nothing of it gathered.
        state: of the model.
    """
    values: dict[tuple[str, str], Any] = {}
    held: list[Any] = []
    values["the number of micro-batches of", "a step"] = state.num_micro_batches
    for name, module in model.named_modules():
        whose = name or "the model"
        values["train or eval mode of", whose] = module.training
        values["the number of hooks of", whose] = _num_hooks(module, HOOKS_OF_MODULES)
        config = getattr(module, "config", None)
        if config is not None and not callable(config):  # a method would be another each time
            values["the config of", whose] = id(config)
            held.append(config)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        local = _local(tensor)
        values["requires_grad of", name] = tensor.requires_grad
        values["the number of hooks of", name] = _num_hooks(tensor, HOOKS_OF_TENSORS)
        values["the memory of", name] = local.data_ptr()
        held.append(local)
    for name, layer in state.layers.items():
        values["the balance config of", name] = id(layer.tracker.counts)
        held.append(layer.tracker.counts)
    exchanges = () if state.exchanges is None else state.exchanges.made
    return Facts(values=values, held=held, exchanges=exchanges)


def _num_hooks(owner: Any, kinds: tuple[str, ...]) -> int:
    return sum(len(getattr(owner, kind, None) or ()) for kind in kinds)


@torch.no_grad()
def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
