"""Optimizers of torch on this rank's parts of the parameters: the same bits, sooner.

For each layout torch plans every operation on DTensors anew, a step of an optimizer for about a
second per rank. Tests that step but are not about optimizers step parts.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Optimizer = torch.optim.Optimizer


@cache
def on_parts(kind: type[Optimizer]) -> type[Optimizer]:
    """Return `kind` with a step whose parameters, gradients and state are local tensors."""

    class OnParts(kind):  # type: ignore[valid-type, misc]
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            wholes = [group["params"] for group in self.param_groups]
            for group in self.param_groups:
                group["params"] = [self._part(param) for param in group["params"]]
            try:
                super().step(closure)
            finally:
                for group, whole in zip(self.param_groups, wholes, strict=True):
                    group["params"] = whole

        def _part(self, param: Tensor) -> Tensor:
            self._parts = getattr(self, "_parts", {})
            part = self._parts.setdefault(param, nn.Parameter(_local(param)))
            part.data = _local(param)  # it may have moved
            part.grad = None
            if param.grad is not None:
                assert _placements(param.grad) == _placements(param)
                part.grad = _local(param.grad)
            return part

    return OnParts


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _placements(tensor: Tensor) -> Any:
    return tensor.placements if isinstance(tensor, DTensor) else None
