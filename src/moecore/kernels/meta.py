"""Dry runs on meta tensors: whether meta counts as a GPU, and the recording of kernel launches."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from moecore.base.torch_private import enter_custom_ops

try:
    from triton.runtime.jit import JITFunction
except ImportError:
    JITFunction = None

OnLaunch = Callable[[str, Sequence[Any]], None]  # name and arguments of a kernel


class MetaSettings(threading.local):
    """Settings of this thread for dry runs (steps on meta tensors): GPU features and recorders."""

    is_gpu = False
    on_launch: OnLaunch | None = None
    num_peers = 1
    has_block_scales = False
    repeats = 1


meta_settings = MetaSettings()


@contextmanager
def _set_meta_settings(**settings: Any) -> Iterator[None]:
    """Return a context that sets fields of this thread's `MetaSettings`, and restores them."""
    before = {name: getattr(meta_settings, name) for name in settings}
    vars(meta_settings).update(settings)
    try:
        yield
    finally:
        vars(meta_settings).update(before)


def treat_meta_as(device_type: str) -> AbstractContextManager[None]:
    """Return a context in which meta tensors count as CUDA tensors iff `device_type` is "cuda"."""
    return _set_meta_settings(is_gpu=device_type == "cuda")


def meta_is_gpu() -> bool:
    """Return whether this thread treats meta tensors as CUDA tensors, for a dry run."""
    return meta_settings.is_gpu


@contextmanager
def record_launches_on_meta(
    on_launch: OnLaunch, num_peers: int = 1, *, has_block_scales: bool = False
) -> Iterator[None]:
    """Return a context for dry runs, in which kernels on meta tensors are recorded, not launched.

    The context calls `on_launch` with each kernel's name and arguments. Meta stands for a Hopper
    GPU. If `has_block_scales`, meta stands for a GPU that also multiplies MXFP8 and NVFP4
    (Blackwell). `num_peers` ranks can access each other's memory.
    """
    settings = _set_meta_settings(
        on_launch=on_launch, num_peers=num_peers, is_gpu=True, has_block_scales=has_block_scales
    )
    with settings, enter_custom_ops():
        if JITFunction is None:  # under the interpreter kernels are of another class
            yield
            return
        run = JITFunction.run

        def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            """Record a launch, or launch the kernel if this thread records nothing."""
            if meta_settings.on_launch is None:
                return run(self, *args, grid=grid, warmup=warmup, **options)
            return record_launch(self.fn.__name__, *args)

        JITFunction.run = record
        try:
            yield
        finally:
            JITFunction.run = run


def get_num_meta_peers() -> int:
    """Return how many ranks a dry run assumes to have access to each other's memory."""
    return meta_settings.num_peers


def repeat_on_meta(num_repeats: int) -> AbstractContextManager[None]:
    """Return a context in which dry-run recorders count each operation `num_repeats` times."""
    return _set_meta_settings(repeats=num_repeats)


def get_meta_repeats() -> int:
    """Return how many times dry-run recorders count each operation now: see `repeat_on_meta`."""
    return meta_settings.repeats


def record_launch(name: str, *args: Any, **_: Any) -> None:
    """Report a kernel launch to the active `record_launches_on_meta`; without one, do nothing."""
    if meta_settings.on_launch is not None:
        meta_settings.on_launch(name, args)
