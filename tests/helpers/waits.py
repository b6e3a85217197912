"""Whether the host waits for the GPU: what is launched while the GPU sleeps must return before.

Copies of memory that is not pinned wait, too, which torch's own check for waits does not see.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SLEEP = 1_000_000_000  # cycles, about 0.5 s


@contextmanager
def asleep(what: str) -> Iterator[None]:
    """Return a context that raises if the host waits within for the stream, which sleeps."""
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    end = torch.cuda.current_stream().record_event()
    yield
    assert not end.query(), f"{what} has waited for the GPU"


@contextmanager
def syncs_are_errors() -> Iterator[None]:
    """Return a context in which torch raises where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def launched(what: str) -> Iterator[None]:
    """Return a context that raises if the host waits within for any of the GPU's streams."""
    with asleep(what), syncs_are_errors():
        yield
