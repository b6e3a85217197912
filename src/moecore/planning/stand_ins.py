"""What ranks that are not there would send, on a real device.

A fake world leaves the output of a collective as it finds it, so counts that a host reads would be
any number. Within `stand_ins` every other rank has what this one has and does the same:

    all-gather              own part, once for each rank
    all-to-all              own part for this rank itself, once from each rank
    reduce-scatter          own part of the input; all-reduce, broadcast: what is there
    receive                 normal numbers

With even loads these are the counts of an even world, and all rows belong to experts of this rank.
Values have no meaning, but are finite. Each costs a copy, which allocates nothing.

Operators of torch are replaced, so the host's code of a step is the real one, in every thread: a
mode would cost time for each operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.torch_names import all_gather_operator, reduce_scatter_operator


@contextmanager
def stand_ins() -> Iterator[None]:
    """Within, collectives of a fake world write what an even world would send."""
    library = torch.library.Library("c10d", "IMPL")
    for operator, fill in FILLS.items():
        for key in ("CPU", "CUDA"):
            library.impl(operator, _operator(fill), key)
    try:
        yield
    finally:
        del library  # what it has replaced is back


def _operator(fill: Any) -> Any:
    """Return the operator of a collective: it fills the output and is done."""

    @wraps(fill)
    def run(out: Any, *args: Any) -> Any:
        group = next(x for x in args if isinstance(x, torch.ScriptObject))
        found = dist.ProcessGroup.unbox(group)
        with torch.no_grad():
            fill(out, args, found.rank(), found.size())
        work = found.barrier().boxed()
        return (out, work) if fill in GIVES_OUTPUT else work

    return run


def _gather(out: Tensor, args: Any, rank: int, size: int) -> None:
    own, whole = args[0].reshape(-1), out.data.view(size, -1)
    in_place = own.data_ptr() == whole[rank].data_ptr()
    for parts in (whole[:rank], whole[rank + 1 :]) if in_place else (whole,):
        if len(parts):
            parts.copy_(own)


def _gather_all(outs: list[Tensor], args: Any, rank: int, size: int) -> None:
    for out, own in zip(outs, args[0], strict=True):
        _gather(out, (own,), rank, size)


def _gather_lists(outs: list[list[Tensor]], args: Any, rank: int, size: int) -> None:
    for parts, own in zip(outs, args[0], strict=True):
        for part in parts:
            part.data.copy_(own)


def _scatter(out: Tensor, args: Any, rank: int, size: int) -> None:
    out.data.view(-1).copy_(args[0].reshape(size, -1)[rank])


def _scatter_all(outs: list[Tensor], args: Any, rank: int, size: int) -> None:
    for out, whole in zip(outs, args[0], strict=True):
        _scatter(out, (whole,), rank, size)


def _all_to_all(out: Tensor, args: Any, rank: int, size: int) -> None:
    whole, _, _, splits, is_async = (*args, True)[:5]
    own: Tensor = whole.split(splits or len(whole) // size)[rank] if len(whole) else whole
    repeat_rows(out, own)
    if is_async and out.is_cuda:  # who waits does so on another stream than `Lanes.ahead`
        torch.cuda.default_stream(out.device).wait_stream(torch.cuda.current_stream(out.device))


def _receive(outs: list[Tensor], args: Any, rank: int, size: int) -> None:
    for out in outs:
        out.data.normal_() if out.is_floating_point() else out.data.zero_()


c10d = torch.ops.c10d
FILLS = {
    all_gather_operator: _gather,
    c10d.allgather_into_tensor_coalesced_.default: _gather_all,
    c10d.allgather_.default: _gather_lists,
    reduce_scatter_operator: _scatter,
    c10d.reduce_scatter_tensor_coalesced_.default: _scatter_all,
    c10d.alltoall_base_.default: _all_to_all,
    c10d.recv_.default: _receive,
}
GIVES_OUTPUT = (_gather, _gather_lists, _scatter)


def repeat_rows(out: Tensor, own: Tensor) -> None:
    """Fill `out` with the rows of `own`, again and again; with zeros where it has none.

    Autograd sees no change, as it sees none by a collective.

    Example, own [1, 2]: an out of 5 rows becomes [1, 2, 1, 2, 1].
    """
    out, rows = out.data, len(own)
    times = len(out) // rows if rows else 0
    if times:
        out[: times * rows].view(times, *own.shape).copy_(own)
    rest = out[times * rows :]
    if len(rest):
        rest.copy_(own[: len(rest)]) if rows else rest.zero_()
