"""Shared helpers of kernel files: Triton if it is installed, and when to use a kernel.

CPU builds of torch have no Triton. Then `triton`, `tl` and Gluon's names are stand-ins that let the
files be imported, and only the references can run.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moecore.base.torch_private import inside_operations
from moecore.kernels.prepared import descriptor, launch_prepared
from moecore.kernels.prepared import keep as keep_prepared

try:
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.runtime.jit import JITFunction
except ImportError:

    class _NoTriton:
        """Decorators become identities, constants themselves; kernels know their names alone."""

        def __init__(self, name: str = "") -> None:
            self.name = name

        def __getattr__(self, name: str) -> Any:
            return self

        def __getitem__(self, grid: Any) -> Any:
            return partial(record_launch, self.name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if args and callable(args[0]) and hasattr(args[0], "__name__"):
                return _NoTriton(args[0].__name__)
            return args[0] if args else self

    triton = tl = gluon = gl = hopper = _NoTriton()

# Names of Gluon that differ between Triton 3.6 and 3.9.
thread_barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier
_copies, _tma = hopper.async_copy, hopper.tma
async_load: Any = getattr(_copies, "async_load", None) or _copies.async_copy_global_to_shared
tma_load: Any = getattr(_tma, "async_load", None) or _tma.async_copy_global_to_shared
tma_store: Any = getattr(_tma, "async_store", None) or _tma.async_copy_shared_to_global

HAS_TRITON = not type(triton).__name__.startswith("_")
INTERPRET = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
TRITON = tuple(map(int, re.findall(r"\d+", triton.__version__)[:3])) if HAS_TRITON else ()

BLOCK_SCALED_TRITON = (3, 9)  # older ones cannot compile NVFP4
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of values that kernels take
Launched = Callable[[str, Sequence[Any]], None]  # name and arguments of a kernel


class _Meta(threading.local):
    """The device and launches that meta tensors stand for in this thread."""

    is_gpu = False
    launched: Launched | None = None
    num_peers = 1
    times = 1


_meta = _Meta()


@contextmanager
def meta_as(device_type: str) -> Iterator[None]:
    """Context in which meta tensors saved for backward are those of a device of this type."""
    before, _meta.is_gpu = _meta.is_gpu, device_type == "cuda"
    try:
        yield
    finally:
        _meta.is_gpu = before


def meta_is_gpu() -> bool:
    """Return whether meta stands for a GPU in this thread."""
    return _meta.is_gpu


@contextmanager
def launches_on_meta(launched: Launched, num_peers: int = 1) -> Iterator[None]:
    """Context in which meta stands for a Hopper GPU: host code runs, and kernels are recorded."""
    # Modes see what operations allocate, as if each were its kernels. `launched` is called in place
    # of each kernel of this package. So many neighbouring ranks reach each other's memory.
    before = _meta.launched, _meta.num_peers
    _meta.launched, _meta.num_peers = launched, num_peers
    with meta_as("cuda"), inside_operations(), _record_launches():
        try:
            yield
        finally:
            _meta.launched, _meta.num_peers = before


def num_peers_on_meta() -> int:
    """Return the number of neighbouring ranks with shared memory that meta stands for."""
    return _meta.num_peers


@contextmanager
def repeated(times: int) -> Iterator[None]:
    """Context in which an operation on meta stands for `times` operations."""
    before, _meta.times = _meta.times, times
    try:
        yield
    finally:
        _meta.times = before


def times_on_meta() -> int:
    """Return the number of operations that one operation on meta stands for."""
    return _meta.times


def record_launch(name: str, *args: Any, **_: Any) -> None:
    """Pass a kernel to the recorder of `launches_on_meta`, if there is one."""
    if _meta.launched is not None:
        _meta.launched(name, args)


@contextmanager
def _record_launches() -> Iterator[None]:
    """Context in which Triton launches nothing in this thread."""
    if not HAS_TRITON or INTERPRET:
        yield
        return
    run = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if _meta.launched is None:
            return run(self, *args, grid=grid, warmup=warmup, **options)
        return record_launch(self.fn.__name__, *args)

    JITFunction.run = record
    try:
        yield
    finally:
        JITFunction.run = run


def use_kernel(*tensors: Tensor) -> bool:
    """Return whether Triton kernels can run on these tensors."""
    # On meta none can, but an operation that autograd records has a form without one.
    if tensors[0].is_meta:
        return _meta.is_gpu and (torch.is_grad_enabled() or _meta.launched is not None)
    if not HAS_TRITON or INTERPRET:
        return INTERPRET
    return tensors[0].is_cuda and all(t.is_cuda for t in tensors)


def warn_plain(x: Tensor, operation: str) -> None:
    """Warn, once per `operation`, that plain PyTorch computes it on a GPU that has kernels."""
    if HAS_TRITON and x.is_cuda and not torch.compiler.is_compiling():
        warnings.warn(f"{operation} has no kernel: plain PyTorch computes it, slower", stacklevel=2)


def can_skip_masks(num_rows: Tensor, length: int) -> bool:
    """Return whether a reference on the CPU may skip its masks; False where reading would sync."""
    if torch.compiler.is_compiling() or type(num_rows) is not Tensor:  # a fake one has no value
        return False
    return num_rows.device.type == "cpu" and int(num_rows) >= length


def is_gpu(x: Tensor) -> bool:
    """Return whether a tensor is on a GPU, or on meta that stands for a GPU."""
    return x.is_cuda or (x.is_meta and _meta.is_gpu)


def has_hopper_kernels(device: torch.device) -> bool:
    """Return whether Gluon kernels for Hopper can run on this device, without interpreter."""
    return _meta.launched is not None if device.type == "meta" else _is_hopper(device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    if not HAS_TRITON or INTERPRET or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def has_block_scaled_kernels(device: torch.device) -> bool:
    """Return whether Triton has instructions on this device that multiply scales of blocks."""
    if not HAS_TRITON or INTERPRET or device.type != "cuda":
        return False
    return (
        TRITON >= BLOCK_SCALED_TRITON and torch.cuda.get_device_capability(device)[0] >= 10
    )  # Blackwell


_NO_CONTEXT = nullcontext()


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Context in which a tensor's device is current, on which Triton launches."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _NO_CONTEXT
    return torch.cuda.device(x.device)


def launch(kernel: Any, grid: int | tuple[int, int], /, *args: Any, **constants: Any) -> None:
    """Launch a kernel on the device of its first tensor, unless the grid is empty."""
    grid = (grid, 1) if isinstance(grid, int) else grid
    if not (grid[0] and grid[1]) or launch_prepared(kernel, grid, args, constants):
        return
    with on_device(next(arg for arg in args if isinstance(arg, Tensor))):
        compiled = kernel[grid](*args, **constants)
    keep_prepared(kernel, args, constants, compiled)


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Context without autocast, in a backward too; autocast does not support meta."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return _NO_CONTEXT
    return torch.autocast(x.device.type, enabled=False)


def rows_of_experts(offsets_e: Tensor) -> Iterator[slice]:
    """Yield the slice of rows of each expert, from their running sum. Host sync."""
    start = 0
    for stop in offsets_e.tolist():
        yield slice(start, stop)
        start = stop


# Triton has both, but each call from the host costs it microseconds.


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up, of positive b."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two >= n, 1 for n < 1."""
    return 1 << max(0, n - 1).bit_length()


def gluon_descriptor(x: Tensor, block: tuple[int, ...]) -> Any:
    """Return the TMA descriptor of blocks of an FP8, bf16, fp16 or fp32 tensor."""
    # Leading dims that the block does not have are as one. Only for launches while it lives.
    return descriptor(x, block, _shared_layout)


@functools.cache
def _shared_layout(dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    gluon_dtypes = {
        torch.float8_e4m3fn: gl.float8e4nv,
        torch.bfloat16: gl.bfloat16,
        torch.float16: gl.float16,
    }
    return gl.NVMMASharedLayout.get_default_for(list(block), gluon_dtypes.get(dtype, gl.float32))


@gluon.jit
def halves(x):
    """Return the left and the right half of a tile's columns."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors (4 for a CPU that interprets, and on meta)."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
