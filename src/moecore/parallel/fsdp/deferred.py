"""`WeightGradients`: weight-gradient matmuls that a backward stores and `run` computes.

with engine.defer_weight_gradients(deferred):  computes input gradients; sinks store matmuls
    torch.autograd.backward(...)
deferred.run()                       computes the matmuls and reduces the gradients
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from moecore.base.torch_private import get_storage_key
from moecore.kernels.experts.contract import ComputeGrad


class WeightProduct(NamedTuple):
    """A deferred matmul (function and operands) whose result is the gradient of a weight."""

    param_idx: int  # index of the parameter in its unit
    grad_shape: torch.Size  # shape of the gradient
    compute_grad: ComputeGrad  # compute_grad and operands: arguments of `GradSink.accumulate`
    operands: tuple[Any, ...]
    stream: torch.cuda.Stream | None  # stream that made the operands; None on a CPU

    @classmethod
    def from_operands(
        cls,
        param_idx: int,
        grad_shape: torch.Size,
        compute_grad: ComputeGrad,
        operands: tuple[Any, ...],
    ) -> Self:
        """Return the record of a matmul whose operands were computed on the current stream."""
        device = next(iterate_tensors(operands)).device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        return cls(param_idx, grad_shape, compute_grad, operands, stream)

    def wait_for_operands(self) -> None:
        """Make the current stream wait for the stream that computed the operands."""
        if self.stream is None:
            return
        current = torch.cuda.current_stream(self.stream.device)
        if current != self.stream:
            current.wait_stream(self.stream)
            for tensor in iterate_tensors(self.operands):
                tensor.record_stream(current)


class WeightGradients:
    """Stores the weight-gradient matmuls that the backward of a micro-batch and stage defers."""

    def __init__(self) -> None:
        self.products: dict[object, deque[WeightProduct]] = {}  # by the `Gradients` of a unit
        self.compute_and_reduce: Callable[[], None] = lambda: None  # set by the `UnitEngine`

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the stored operands occupy; each storage counts once."""
        storages = {
            get_storage_key(tensor): tensor.untyped_storage().nbytes()
            for products in self.products.values()
            for product in products
            for tensor in iterate_tensors(product.operands)
        }
        return sum(storages.values())

    def run(self) -> None:
        """Compute the stored matmuls and reduce the gradients of their units. Collective.

        All ranks must call `run` in the same order of micro-batches and stages, between forwards
        and backwards, inside `TrainStep.micro_batch`.
        """
        self.compute_and_reduce()

    def drop(self) -> None:
        """Discard the stored matmuls and their operands. No communication."""
        self.products.clear()

    def store_product(self, unit_gradients: object, product: WeightProduct) -> None:
        """Append `product` to the matmuls of the unit with the `Gradients` `unit_gradients`."""
        self.products.setdefault(unit_gradients, deque()).append(product)


def iterate_tensors(nested: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples and dataclasses; ignore objects of other types."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, tuple):
        for part in nested:
            yield from iterate_tensors(part)
    elif is_dataclass(nested):
        for field in fields(nested):
            yield from iterate_tensors(getattr(nested, field.name))
