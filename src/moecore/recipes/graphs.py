"""Forward and backward of a step as one CUDA graph: --cuda-graph of all scripts that train.

Packed documents are in it: their borders are an input, as many in every micro-batch as in any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.recipes.data import StepBatch, with_borders
from moecore.train import GraphedForwardBackward


class Graphed:
    """Replays a graph; where a step has other shapes, on every rank, it is captured anew."""

    def __init__(self, forward_backward: Callable[..., Tensor], model: nn.Module) -> None:
        self._graph = GraphedForwardBackward(forward_backward, model)
        self._shapes: list[torch.Size] = []

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Return the loss of a step."""
        shapes = [tensor.shape for tensor in tensors]
        if shapes != self._shapes:
            self._graph.close()
            self._shapes = shapes
        loss: Tensor = self._graph(*tensors)
        return loss


def pad_borders(batch: StepBatch) -> StepBatch:
    """Return the batch with as many borders as that of any rank. Collective, waits on the host."""
    if batch.cu_seqlens_An is None:
        return batch
    num_borders = torch.tensor(batch.cu_seqlens_An.shape[1])
    dist.all_reduce(num_borders, op=dist.ReduceOp.MAX)
    return replace(batch, cu_seqlens_An=with_borders(batch.cu_seqlens_An, int(num_borders)))
