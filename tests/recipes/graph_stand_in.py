"""GraphedForwardBackward on CPU ranks: what it demands of a script, and tensors that stay."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn


class GraphStandIn:
    """Two calls run as they are; later ones copy into the inputs of the third, and run on those.

    Raises AssertionError for a step whose shapes are not those of other ranks, or of the call
    before without `close`.
    """

    captures: ClassVar[list[list[tuple[int, ...]]]] = []  # shapes of inputs

    def __init__(self, forward_backward: Callable[..., Any], model: nn.Module) -> None:
        self._run, self._model = forward_backward, model
        self.close()

    def close(self) -> None:
        self._calls, self._inputs = 0, list[Tensor]()

    def __call__(self, *inputs: Tensor) -> Any:
        shapes = [tuple(x.shape) for x in inputs]
        if dist.is_initialized():
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, shapes)
            assert all(other == shapes for other in of_ranks), of_ranks
        assert all(p.grad is None for p in self._model.parameters())
        self._calls += 1
        if self._calls == 3:
            self._inputs = [x.clone() for x in inputs]
            self.captures.append(shapes)
        elif self._calls > 3:
            assert shapes == [tuple(x.shape) for x in self._inputs]
            for mine, given in zip(self._inputs, inputs, strict=True):
                mine.copy_(given)
        return self._run(*(self._inputs or inputs))
