"""WeightGradients: what one backward left to compute, the gradients of weights.

with engine.deferring(deferred):       gradients of inputs; sinks keep the products of weights here
    torch.autograd.backward(...)
deferred.run()                         the products, and the reductions of their units
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecore.base.torch_private import storage_key
from moecore.kernels.experts.contract import ComputeGrad


class WeightProduct(NamedTuple):
    """One gradient of a weight that is not computed yet."""

    number: int  # of the parameter in its unit
    shape: torch.Size  # of the gradient, in the parameter's order
    compute: ComputeGrad  # and operands: as of `GradSink.put`
    operands: tuple[Any, ...]
    stream: torch.cuda.Stream | None  # on which the operands were made; None on a CPU

    @classmethod
    def of(
        cls, number: int, shape: torch.Size, compute: ComputeGrad, operands: tuple[Any, ...]
    ) -> WeightProduct:
        """Return the product of operands that the current stream has made."""
        device = next(tensors_in(operands)).device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        return cls(number, shape, compute, operands, stream)

    def join(self) -> None:
        """Let the current stream read the operands."""
        if self.stream is None:
            return
        current = torch.cuda.current_stream(self.stream.device)
        if current != self.stream:
            current.wait_stream(self.stream)
            for tensor in tensors_in(self.operands):
                tensor.record_stream(current)


class WeightGradients:
    """Those of the backwards of one micro-batch and stage. It may be used again once it has run."""

    def __init__(self) -> None:
        self._products: dict[object, deque[WeightProduct]] = {}
        self._run: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the products hold, each storage once."""
        storages = {
            storage_key(tensor): tensor.untyped_storage().nbytes()
            for products in self._products.values()
            for product in products
            for tensor in tensors_in(product.operands)
        }
        return sum(storages.values())

    def run(self) -> None:
        """Compute what is kept, and reduce its units; nothing where nothing is. Collective."""
        # All ranks run those of the same micro-batches and stages in the same order, between
        # forwards and backwards, within the micro-batches of the model's `TrainStep`.
        self._run()

    def drop(self) -> None:
        """Drop what is kept. No communication."""
        self._products.clear()

    def bind(self, run: Callable[[], None]) -> None:
        """Take what `run` calls: the engine that defers to it."""
        self._run = run

    def keep(self, unit: object, product: WeightProduct) -> None:
        """Keep a product of a unit's parameter."""
        self._products.setdefault(unit, deque()).append(product)

    def holds(self, unit: object) -> bool:
        """Whether there are products of a unit."""
        return unit in self._products

    def take(self, unit: object) -> deque[WeightProduct]:
        """Return the products of a unit in the order in which they came, and leave none."""
        return self._products.pop(unit, deque())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of operands: of tuples and records, not of other objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_in(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
