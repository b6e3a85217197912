"""Heads for tokens: an all-to-all that gives each rank all tokens of some heads, and one back.

Legend: B rows, t tokens of a row of one rank, G ranks, T = G * t, H heads.

    x_BtH -> parts of heads [G, B, t, H / G] -> all-to-all -> parts of tokens -> order -> x_BT(H/G)

Several tensors go one after the other: the first is put in order while the second travels.
Rank r gets heads r * H / G and on, so key/value heads stay with their query heads.

Source: DeepSpeed-Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.attention.context_parallel.layout import ChunkLayout
from moecore.base.regions import run_and_save
from moecore.base.torch_private import is_silent


def scatter_heads(
    tensors: tuple[Tensor, ...], group: dist.ProcessGroup, layout: ChunkLayout
) -> tuple[Tensor, ...]:
    """Return each x_BtHd as x_BThd: all tokens in order, of this rank's heads. Collective."""
    scattered: tuple[Tensor, ...] = run_and_save(_Travel.apply, group, layout, True, *tensors)
    return scattered


def gather_heads(x_BThd: Tensor, group: dist.ProcessGroup, layout: ChunkLayout) -> Tensor:
    """Return x_BtHd: this rank's tokens of all heads; undoes `scatter_heads`. Collective."""
    outputs: tuple[Tensor] = run_and_save(_Travel.apply, group, layout, False, x_BThd)
    return outputs[0]


def _exchange(
    tensors: tuple[Tensor, ...],
    group: dist.ProcessGroup,
    before: Callable[[Tensor], Tensor],
    after: Callable[[Tensor], Tensor],
) -> tuple[Tensor, ...]:
    """Return `after` of what ranks sent of `before`, which is [G, ...], tensor after tensor."""
    arrived: list[Tensor] = []
    transfer = None
    for x in tensors:
        send_buffer = before(x).contiguous()
        recv_buffer = torch.empty_like(send_buffer)
        if is_silent(send_buffer):  # where bytes are counted
            arrived.append(after(recv_buffer))
            continue
        work = dist.all_to_all_single(recv_buffer, send_buffer, group=group, async_op=True)
        if transfer is not None:
            arrived.append(_arrive(*transfer, after))
        transfer = (work, recv_buffer, send_buffer)  # what is sent lives until it has arrived
    if transfer is not None:
        arrived.append(_arrive(*transfer, after))
    return tuple(arrived)


def _arrive(
    work: dist.Work, recv_buffer: Tensor, _: Tensor, after: Callable[[Tensor], Tensor]
) -> Tensor:
    work.wait()
    return after(recv_buffer)


def _travel(
    tensors: tuple[Tensor, ...], group: dist.ProcessGroup, layout: ChunkLayout, to_tokens: bool
) -> tuple[Tensor, ...]:
    def by_heads(x_BtHd: Tensor) -> Tensor:
        G = group.size()
        result: Tensor = x_BtHd.unflatten(2, (G, x_BtHd.shape[2] // G)).movedim(2, 0)
        return result

    def beside(x_GBthd: Tensor) -> Tensor:
        return x_GBthd.movedim(0, 2).flatten(2, 3)

    before, after = (by_heads, layout.join) if to_tokens else (layout.split, beside)
    return _exchange(tensors, group, before, after)


class _Travel(torch.autograd.Function):
    """apply(group, layout, to_tokens, *tensors): all tokens of some heads, or the other way."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, layout: ChunkLayout, to_tokens: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back = group, layout, not to_tokens
        # No views, to which a model's code could not write in place.
        return tuple(x.detach() for x in _travel(tensors, group, layout, to_tokens))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, *_travel(grads, *ctx.back)
