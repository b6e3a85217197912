"""All-to-alls that exchange heads for tokens, as DeepSpeed-Ulysses does.

Legend: B rows, t tokens of a row of one rank, G ranks, T = G * t, H heads.

    x_BtH -> parts by heads [G, B, t, H / G] -> all-to-all -> parts by tokens -> x_BT(H / G)

Rank r receives heads r * H / G to (r + 1) * H / G, so key/value heads stay with their query heads.
With several tensors, the reordering of one overlaps the all-to-all of the next.

Source: DeepSpeed-Ulysses (arXiv:2309.14509).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.attention.context_parallel.local_tokens import ChunkLayout
from moecore.base.regions import run_and_save
from moecore.base.torch_private import skips_communication


def scatter_heads(
    tensors: tuple[Tensor, ...], group: dist.ProcessGroup, layout: ChunkLayout
) -> tuple[Tensor, ...]:
    """Redistribute x [B, t, H, d] to [B, T, H / G, d], all tokens of H / G heads. Collective."""
    return run_and_save(_HeadExchange.apply, group, layout, True, *tensors)  # type: ignore[no-any-return]


def gather_heads(x_BThd: Tensor, group: dist.ProcessGroup, layout: ChunkLayout) -> Tensor:
    """Redistribute x [B, T, H / G, d] to [B, t, H, d], all heads of t tokens. Collective."""
    return run_and_save(_HeadExchange.apply, group, layout, False, x_BThd)[0]  # type: ignore[no-any-return]


def _exchange_heads(
    tensors: tuple[Tensor, ...], group: dist.ProcessGroup, layout: ChunkLayout, is_scatter: bool
) -> tuple[Tensor, ...]:
    """Run `scatter_heads`, or its inverse. The packing of a tensor overlaps the last all-to-all."""

    def split_heads(x_BtHd: Tensor) -> Tensor:
        """Return [G, B, t, H / G, d], the heads of each rank."""
        return x_BtHd.unflatten(2, (group.size(), -1)).movedim(2, 0)  # type: ignore[no-any-return]

    def join_heads(x_GBthd: Tensor) -> Tensor:
        return x_GBthd.movedim(0, 2).flatten(2, 3)

    pack, unpack = (
        (split_heads, layout.join_ranks) if is_scatter else (layout.split_by_rank, join_heads)
    )
    outputs: list[Tensor] = []
    pending: tuple[dist.Work, Tensor, Tensor] | None = None
    for x in (*tensors, None):
        transfer = None
        if x is not None:
            send_buffer = pack(x).contiguous()
            recv_buffer = torch.empty_like(send_buffer)
            if skips_communication(send_buffer):
                outputs.append(unpack(recv_buffer))
                continue
            work = dist.all_to_all_single(recv_buffer, send_buffer, group=group, async_op=True)
            transfer = work, recv_buffer, send_buffer  # the send buffer must outlive the collective
        if pending is not None:
            pending[0].wait()
            outputs.append(unpack(pending[1]))
        pending = transfer
    return tuple(outputs)


class _HeadExchange(torch.autograd.Function):
    """The autograd node of `_exchange_heads`, whose backward runs the inverse exchange."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, layout: ChunkLayout, is_scatter: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.inverse_args = group, layout, not is_scatter
        # No views, to which a model's code could not write in place.
        return tuple(x.detach() for x in _exchange_heads(tensors, group, layout, is_scatter))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, *_exchange_heads(grads, *ctx.inverse_args)
