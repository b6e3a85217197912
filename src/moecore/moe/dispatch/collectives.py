"""The collectives that dispatchers share.

On meta they make shapes and nothing is sent.

Legend: C rows of each rank, G ranks of the group, S = G * C rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore._torch import all_gather_single, assert_async


class EqualSizes:
    """Refuses static shapes for ranks that bring different numbers of tokens.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._is_first = True

    def check(self, num_tokens: int, device: torch.device) -> None:
        """Compare with the other ranks; one tiny collective, and a host sync the first time only.

        At every forward: a rank that met its number before can not know that another did not, and
        collectives of unequal sizes hang, abort or mix rows up.

        Raises:
            ValueError: when the first numbers differ.
            RuntimeError: when later ones do; on CUDA the device asserts, before rows travel.
        """
        if device.type == "meta":
            return
        mine = torch.full((1,), num_tokens, device=device)
        numbers_G = _gather_from_ranks(mine, self.group)
        fix = "with CapacityConfig.pad (True): pad the batches, or set pad=False"
        if self._is_first:
            numbers = numbers_G.tolist()
            if len(set(numbers)) > 1:
                raise ValueError(
                    f"number of tokens ({numbers} by rank of the dispatch group) must be equal "
                    f"{fix}"
                )
            self._is_first = False
        else:
            assert_async(
                (numbers_G == num_tokens).all(),
                f"number of tokens must be equal on all ranks of the dispatch group {fix}",
            )


class _GatherRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_C: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather_from_ranks(x_C, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _SumRanks.apply(grads[0], ctx.group), None


class _SumRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_S: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum_over_ranks(y_S, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _GatherRanks.apply(grads[0], ctx.group), None


def _gather_from_ranks(x_C: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x_C.new_empty((group.size() * x_C.shape[0], *x_C.shape[1:]))
    if not out.is_meta:
        all_gather_single(out, x_C.contiguous(), group=group)
    return out


def _sum_over_ranks(y_S: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(y_S, memory_format=torch.contiguous_format)
    if not received.is_meta:
        dist.all_to_all_single(received, y_S.contiguous(), group=group)
    parts_GC = received.unflatten(0, (group.size(), y_S.shape[0] // group.size()))
    dtype = torch.promote_types(y_S.dtype, torch.float32)
    return parts_GC.sum(0, dtype=dtype).to(y_S.dtype)


def gather_ranks(x_C: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the C rows of every rank, in rank order: [G * C, ...]. Backward is `sum_ranks`.

    Collective; every rank must bring the same number of rows.
    """
    return _GatherRanks.apply(x_C, group)


def sum_ranks(y_S: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks of the g-th C rows to rank g: [S / G, ...]. Backward is a gather.

    Added in fp32 and in rank order. An all-to-all carries as many bytes as a reduce-scatter, which
    would round after every addition of a 16-bit dtype. Collective.
    """
    return _SumRanks.apply(y_S, group)
