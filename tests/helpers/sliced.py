"""Products of tensor parallelism as parts of their exchanges, whatever the size of slices."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.torch_private import all_gather_single
from moecore.models import tp_products
from moecore.models.tensor_parallel import TensorParallel
from moecore.models.tp_products import SlicedExchange


def all_gather_ref(
    x_tD: Tensor, consume: Callable[[Tensor, int], None], x_TD: Tensor, group: dist.ProcessGroup
) -> None:
    """Reference of `SlicedExchange.all_gather`: all-gather first, then consume each slice."""
    all_gather_single(x_TD, x_tD, group=group)
    for rank, slice_tD in enumerate(x_TD.chunk(group.size())):
        consume(slice_tD, rank)


def all_to_all_ref(
    produce: Callable[[int, Tensor], None], parts_TD: Tensor, group: dist.ProcessGroup
) -> None:
    """Reference of `SlicedExchange.all_to_all`: produce all slices first, then one all-to-all."""
    products_TD = torch.empty_like(parts_TD)
    for rank, slice_tD in enumerate(products_TD.chunk(group.size())):
        produce(rank, slice_tD)
    dist.all_to_all_single(parts_TD, products_TD, group=group)


REFERENCE = SlicedExchange(all_gather_ref, all_to_all_ref)


@contextmanager
def sliced() -> Iterator[Counter[str]]:
    """Within, exchange slices of any size, on CPUs by the reference; count them."""
    counts: Counter[str] = Counter()
    of_device = tp_products.select_sliced_exchange

    def counting(name: str, function: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            counts[name] += 1
            function(*args)

        return run

    def choose(tp: TensorParallel, x: Tensor) -> SlicedExchange | None:
        found = REFERENCE if x.device.type == "cpu" else of_device(tp, x)
        if found is None:
            return None
        return SlicedExchange(*map(counting, found._fields, found))

    with (
        patch.object(tp_products, "MIN_SLICE_BYTES", 0),
        patch.object(tp_products, "select_sliced_exchange", choose),
    ):
        yield counts
