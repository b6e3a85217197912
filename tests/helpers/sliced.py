"""Products of tensor parallelism as parts of their exchanges, whatever the size of slices."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from moecore.models import tp_products
from moecore.models.tensor_parallel import TensorParallel
from moecore.models.tp_products import REFERENCE, SlicedExchange


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
