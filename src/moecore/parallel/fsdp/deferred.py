"""`WeightGradients`: weight-gradient matmuls that a backward stores and `run` computes.

with engine.defer_weight_gradients(deferred):  computes input gradients; sinks store matmuls
    torch.autograd.backward(...)
deferred.run()                       computes the matmuls and reduces the gradients
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecore.base.torch_private import get_storage_key
from moecore.kernels.experts.contract import ComputeGrad


class WeightProduct(NamedTuple):
    """A matrix product that a backward has deferred; its result is the gradient of a weight."""

    number: int  # index of the parameter in its unit
    shape: torch.Size  # shape of the gradient
    compute: ComputeGrad  # compute and operands: arguments of `GradSink.accumulate`
    operands: tuple[Any, ...]
    stream: torch.cuda.Stream | None  # stream that made the operands; None on a CPU

    @classmethod
    def of(
        cls, number: int, shape: torch.Size, compute: ComputeGrad, operands: tuple[Any, ...]
    ) -> WeightProduct:
        """Return the deferred product for the weight gradient of parameter `number` of a unit.

        `shape` is the gradient's shape. `compute(*operands, target)` computes the gradient.
        The product's `stream` is the current stream, which made the operands.
        """
        device = next(iterate_tensors(operands)).device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        return cls(number, shape, compute, operands, stream)

    def join(self) -> None:
        """Make the current stream wait for the stream that made the operands."""
        if self.stream is None:
            return
        current = torch.cuda.current_stream(self.stream.device)
        if current != self.stream:
            current.wait_stream(self.stream)
            for tensor in iterate_tensors(self.operands):
                tensor.record_stream(current)


class WeightGradients:
    """Weight-gradient matmuls of one micro-batch and pipeline stage, deferred by its backward.

    After `run` the object can be used for another backward.
    """

    def __init__(self) -> None:
        self._products: dict[object, deque[WeightProduct]] = {}
        self._run: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the stored operands occupy; each storage counts once."""
        storages = {
            get_storage_key(tensor): tensor.untyped_storage().nbytes()
            for products in self._products.values()
            for product in products
            for tensor in iterate_tensors(product.operands)
        }
        return sum(storages.values())

    def run(self) -> None:
        """Compute the stored matrix products and reduce the gradients of their units. Collective.

        All ranks must call `run` in the same order of micro-batches and stages, between forwards
        and backwards, inside `TrainStep.micro_batch`.
        """
        self._run()

    def drop(self) -> None:
        """Discard the stored matrix products and their operands. No communication."""
        self._products.clear()

    def bind(self, run: Callable[[], None]) -> None:
        """Set the function that `run` calls, which computes and reduces the gradients."""
        self._run = run

    def store(self, unit: object, product: WeightProduct) -> None:
        """Append `product` to the matmuls stored for a unit; the key `unit` is its `Gradients`."""
        self._products.setdefault(unit, deque()).append(product)

    def has_products(self, unit: object) -> bool:
        """Return whether matmuls are stored for `unit`, the key that `store` received."""
        return unit in self._products

    def pop_products(self, unit: object) -> deque[WeightProduct]:
        """Remove the matmuls stored for `unit`, and return them in the order of `store`."""
        return self._products.pop(unit, deque())


def iterate_tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples and dataclasses; ignore objects of other types."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from iterate_tensors(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from iterate_tensors(getattr(value, field.name))
