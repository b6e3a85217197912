"""Ring attention: keys and values are sent from rank to rank, and partial outputs are merged.

Legend: B rows, t tokens of a row of this rank, G ranks, H query heads, d and v dims of a head.

In step s a rank computes with the keys of the rank s places before it, and sends them to the next
rank meanwhile. Rank r stores chunks r and 2 * G - 1 - r. Its queries see

    local keys (step 0)       causal
    keys of a lower rank      the early half, by all queries
    keys of a higher rank     all, by the late half of queries

Each step after the first therefore computes half a block without a mask, on every rank. Each new
partial output is merged into the total (note "final o and lse" of `kernels/attention/contract.py`).

Backward sends keys and values around the ring again, and uses the final o and lse. Their fp32
gradients follow one step behind and reach the owner of the keys after G - 1 sends. The products
with local keys overlap the first send of keys and the last send of gradients: `split_local_block`.

Source: Ring Attention (arXiv:2310.01889), balanced as zig-zag rings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.attention.context_parallel.local_tokens import ChunkLayout, Half
from moecore.base.torch_private import skips_communication
from moecore.kernels.attention import (
    AttentionMask,
    add_sinks,
    attention_backward,
    attention_forward,
    compute_sinks_grad,
    merge_blocks,
)


class _RingBlock(NamedTuple):
    """One attention call of a ring step: halves of the queries and of the keys, and their mask."""

    queries: Half
    keys: Half
    mask: AttentionMask


def select_ring_block(layout: ChunkLayout, rank: int, source_rank: int) -> _RingBlock:
    """Return the chunks and mask of `rank`'s attention to the keys of the rank `source_rank`."""
    if source_rank == rank:
        return _RingBlock("all", "all", layout.make_mask(2, 2))
    if source_rank < rank:
        return _RingBlock("all", "early", layout.make_mask(2, 1, causal=False))
    return _RingBlock("late", "all", layout.make_mask(1, 2, causal=False))


def split_local_block(layout: ChunkLayout) -> tuple[list[_RingBlock], list[_RingBlock]]:
    """Return backward's attention calls on local keys: of its first step and of its last."""
    # The first block overlaps the first send of keys, the last blocks overlap the last send of
    # gradients. Without a first block, 1 / (3 * (G - 1)) of the traffic is exposed: 0.33 in a ring
    # of 2, 0.11 of 4, 0.05 of 8. Three small blocks take longer than one: 6% at 8 ranks and 65,536
    # tokens (H200). So only rings up to 4 split the block.
    if layout.size > 4:
        return [], [_RingBlock("all", "all", layout.make_mask(2, 2))]
    halves: tuple[Half, ...] = ("early", "late")
    squares = [_RingBlock(half, half, layout.make_mask(1, 1)) for half in halves]
    return [_RingBlock("late", "early", layout.make_mask(1, 1, causal=False))], squares


class _RingTransfer(NamedTuple):
    """A send to the next rank and a receive from the previous rank, both in flight."""

    send_buffer: Tensor
    recv_buffer: Tensor
    works: list[dist.Work]

    def wait_for_tensor(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.recv_buffer


def _send_to_next(x: Tensor, group: dist.ProcessGroup) -> _RingTransfer:
    """Start to send x to the next rank, and to receive a tensor like x from the previous rank."""
    buffer = torch.empty_like(x)
    if skips_communication(x):
        return _RingTransfer(x, buffer, [])
    G, rank = group.size(), group.rank()
    after, before = (dist.get_global_rank(group, (rank + way) % G) for way in (1, -1))
    ops = [dist.P2POp(dist.isend, x, after, group), dist.P2POp(dist.irecv, buffer, before, group)]
    if x.is_meta:  # `batch_isend_irecv` needs a backend for the device
        works = [op.op(op.tensor, op.peer, group) for op in ops]
        return _RingTransfer(x, buffer, works)
    return _RingTransfer(x, buffer, dist.batch_isend_irecv(ops))


def _iterate_ring(kv: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield (source, flat keys and values of rank `source`), local ones first. Collective."""
    G, rank = group.size(), group.rank()
    for step in range(G):
        travelling = _send_to_next(kv, group) if step < G - 1 else None
        yield (rank - step) % G, kv
        if travelling is not None:
            kv = travelling.wait_for_tensor()


def _unpack_kv(kv: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the flat `kv` in the shapes of k and v, whose values are not read."""
    ks, vs = kv.split((k.numel(), v.numel()))
    return ks.view(k.shape), vs.view(v.shape)


def _add_half(
    layout: ChunkLayout, totals: tuple[Tensor, ...], half: Half, parts: list[Tensor]
) -> None:
    """Add `parts`, which have only the tokens of `half`, to these tokens of `totals`, in place."""
    for total, part in zip(totals, parts, strict=True):
        layout.write_half(total, half, layout.select_half(total, half) + part)


class RingAttention(torch.autograd.Function):
    """The autograd node of causal attention of local queries to the keys of all ranks of a ring."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        layout: ChunkLayout,
        group: dist.ProcessGroup,
        scale: float,
    ) -> Tensor:
        """Return o_BtHv, merged over the keys of all ranks."""
        qs, ks, vs = (layout.flatten_rows(x) for x in (q, k, v))
        o, lse = q, q
        local_kv = torch.cat((ks.reshape(-1), vs.reshape(-1)))
        for source, kv in _iterate_ring(local_kv, group):
            queries, keys, mask = select_ring_block(layout, group.rank(), source)
            k_half, v_half = (layout.select_half(x, keys) for x in _unpack_kv(kv, ks, vs))
            q_half = layout.select_half(qs, queries)
            o_new, lse_new = attention_forward(q_half, k_half, v_half, mask, scale)
            if source == group.rank():
                o, lse = o_new.to(lse_new.dtype, copy=True), lse_new.clone()
                continue
            old = layout.select_half(o, queries), layout.select_half(lse, queries, dim=2)
            o_sum, lse_sum = merge_blocks(*old, o_new, lse_new)
            layout.write_half(o, queries, o_sum)
            layout.write_half(lse, queries, lse_sum, dim=2)
        if sinks is not None:
            o, lse = add_sinks(o, lse, sinks)
        o = o.to(q.dtype).reshape(*q.shape[:3], v.shape[-1])
        ctx.options = layout, group, scale
        ctx.save_for_backward(q, k, v, o, lse, sinks)
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of q, k, v and sinks."""
        q, k, v, o, lse, sinks = ctx.saved_tensors
        layout, group, scale = ctx.options
        do, qs, ks, vs, os = (layout.flatten_rows(x) for x in (grads[0], q, k, v, o))
        dq = torch.zeros_like(qs, dtype=lse.dtype, memory_format=torch.contiguous_format)
        rank, local_kv = group.rank(), torch.cat((ks.reshape(-1), vs.reshape(-1)))

        def run_block_backward(block: _RingBlock, ks: Tensor, vs: Tensor) -> list[Tensor]:
            """Add one attention call's gradient of queries to dq; return [dk, dv] of its keys."""
            queries, keys, mask = block
            do_half, q_half, o_half = (layout.select_half(x, queries) for x in (do, qs, os))
            lse_half = layout.select_half(lse, queries, dim=2)
            k_half, v_half = (layout.select_half(x, keys) for x in (ks, vs))
            dq_half, *dkv = attention_backward(
                do_half, q_half, k_half, v_half, o_half, lse_half, mask, scale
            )
            _add_half(layout, (dq,), queries, [dq_half])
            return dkv

        first, last = split_local_block(layout)
        travelling, parts = None, []
        for source, kv in _iterate_ring(local_kv, group):
            if source == rank:
                parts = [(b.keys, run_block_backward(b, ks, vs)) for b in first]
                continue
            block = select_ring_block(layout, rank, source)
            new = run_block_backward(block, *_unpack_kv(kv, ks, vs))
            if travelling is None:
                dkv = torch.zeros_like(local_kv, dtype=lse.dtype)
            else:
                dkv = travelling.wait_for_tensor()
            _add_half(layout, _unpack_kv(dkv, ks, vs), block.keys, new)
            travelling = _send_to_next(dkv, group)
        assert travelling is not None, "a ring has other ranks"
        parts += [(b.keys, run_block_backward(b, ks, vs)) for b in last]
        dk, dv = _unpack_kv(travelling.wait_for_tensor(), ks, vs)
        for keys, new in parts:
            _add_half(layout, (dk, dv), keys, new)
        dsinks = None if sinks is None else compute_sinks_grad(do, os, lse, sinks)
        grads_qkv = (x.to(like.dtype).view(like.shape) for x, like in ((dq, q), (dk, k), (dv, v)))
        return *grads_qkv, dsinks, None, None, None
