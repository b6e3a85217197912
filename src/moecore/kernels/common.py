"""Shared helpers of kernel files: when to use a kernel, and how to launch it."""

import functools
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from moecore.kernels.meta import meta_settings, record_launch
from moecore.kernels.prepared import launch_prepared, make_descriptor, store_launch
from moecore.kernels.triton_api import HAS_TRITON, INTERPRET, TRITON, gl, gluon

NVFP4_TRITON = (3, 9)  # Triton 3.6 spills registers of NVFP4 products
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_use_kernel(*tensors: Tensor) -> bool:
    """Return whether Triton kernels can run on these tensors: on CUDA, or interpreted on a CPU.

    For meta tensors that stand for CUDA tensors in a dry run, the result is True if autograd is
    enabled or if launches are recorded.
    """
    if tensors[0].is_meta:
        return meta_settings.is_gpu and (
            torch.is_grad_enabled() or meta_settings.on_launch is not None
        )
    if not HAS_TRITON or INTERPRET:
        return INTERPRET
    return tensors[0].is_cuda and all(t.is_cuda for t in tensors)


def warn_on_fallback(tensor: Tensor, operation: str) -> None:
    """Warn that an operation has no kernel if `tensor` is on CUDA. Python shows each text once."""
    if HAS_TRITON and tensor.is_cuda and not torch.compiler.is_compiling():
        warnings.warn(f"{operation} has no kernel: plain PyTorch computes it, slower", stacklevel=2)


def can_skip_row_masks(num_rows: Tensor, max_rows: int) -> bool:
    """Return whether `num_rows`, a CPU scalar, is at least `max_rows`, so that no row needs a mask.

    False while compiling, and on a GPU, where reading it would synchronise. A meta tensor of a dry
    run gives True if it stands for a CPU tensor.
    """
    if torch.compiler.is_compiling() or type(num_rows) is not Tensor:  # a fake one has no value
        return False
    if num_rows.is_meta:
        return not meta_settings.is_gpu
    return num_rows.device.type == "cpu" and int(num_rows) >= max_rows


def is_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on a GPU, or stands for such a tensor on meta in a dry run."""
    return tensor.is_cuda or (tensor.is_meta and meta_settings.is_gpu)


def has_hopper_kernels(device: torch.device) -> bool:
    """Return whether Gluon kernels for Hopper can run on a device, or a dry run records them."""
    if device.type == "meta":
        return meta_settings.on_launch is not None
    return _get_capability(device) == (9, 0)


def can_multiply_fp8(device: torch.device) -> bool:
    """Return whether a device's tensor cores multiply FP8; True on meta and in the interpreter."""
    return INTERPRET or device.type == "meta" or _get_capability(device) >= (8, 9)


def has_block_scaled_kernels(device: torch.device, scaling: str) -> bool:
    """Return whether a device multiplies "mxfp8" or "nvfp4" operands, or a dry run records this."""
    if device.type == "meta":
        return meta_settings.has_block_scales
    can_compile = scaling == "mxfp8" or TRITON >= NVFP4_TRITON
    return can_compile and _get_capability(device)[0] >= 10


@functools.cache
def has_torch_mxfp8(device: torch.device) -> bool:
    """Return whether torch's grouped product multiplies MXFP8 operands on a device."""
    libraries = "USE_FBGEMM_GENAI", "USE_MSLK"  # kernels for sm_100 that torch is built with
    is_sm100 = _get_capability(device) == (10, 0)
    return is_sm100 and any(name in torch.__config__.show() for name in libraries)


@functools.cache
def _get_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU that runs compiled kernels, otherwise (0, 0)."""
    can_run = HAS_TRITON and not INTERPRET and device.type == "cuda"
    return torch.cuda.get_device_capability(device) if can_run else (0, 0)


_NO_CONTEXT = nullcontext()


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which the tensor's device is current, because Triton launches on it."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _NO_CONTEXT
    return torch.cuda.device(tensor.device)


def launch(kernel: Any, grid: int | tuple[int, int], /, *args: Any, **constants: Any) -> None:
    """Launch a Triton kernel on the device of its first tensor argument, unless the grid is empty.

    `constants` are the kernel's `tl.constexpr` parameters and Triton's launch options.
    """
    grid = (grid, 1) if isinstance(grid, int) else grid
    if not (grid[0] and grid[1]) or launch_prepared(kernel, grid, args, constants):
        return
    with device_of(next(arg for arg in args if isinstance(arg, Tensor))):
        compiled = kernel[grid](*args, **constants)
    store_launch(kernel, args, constants, compiled)


def launch_or_record(kernel: Any, grid: tuple[int, int], /, *args: Any, **constants: Any) -> None:
    """Call `launch`; on meta tensors only report the launch to the dry run, if one is active."""
    if next(arg for arg in args if isinstance(arg, Tensor)).is_meta:
        record_launch(kernel.fn.__name__ if HAS_TRITON else kernel.name, *args)
    else:
        launch(kernel, grid, *args, **constants)


def disable_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context that disables autocast on the tensor's device; it does nothing on meta."""
    if tensor.is_meta or not torch.is_autocast_enabled(tensor.device.type):
        return _NO_CONTEXT
    return torch.autocast(tensor.device.type, enabled=False)


def iterate_expert_slices(offsets_e: Tensor) -> Iterator[slice]:
    """Yield the slice of rows of each expert; `offsets_e` is the running sum of rows. Host sync."""
    start = 0
    for stop in offsets_e.tolist():
        yield slice(start, stop)
        start = stop


# Triton has both, but each call from the host costs it microseconds.


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up, for positive b."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two >= n, 1 for n < 1."""
    return 1 << max(0, n - 1).bit_length()


def make_gluon_descriptor(tensor: Tensor, block_shape: tuple[int, ...]) -> Any:
    """Return a TMA descriptor for blocks of a tensor, with Gluon's default layout."""
    return make_descriptor(tensor, block_shape, _choose_shared_layout)


@functools.cache
def _choose_shared_layout(dtype: torch.dtype, block_shape: tuple[int, ...]) -> Any:
    """Return Gluon's default shared-memory layout of a block; other dtypes as fp32."""
    dtypes = {
        torch.float8_e4m3fn: gl.float8e4nv,
        torch.bfloat16: gl.bfloat16,
        torch.float16: gl.float16,
    }
    return gl.NVMMASharedLayout.get_default_for(list(block_shape), dtypes.get(dtype, gl.float32))


@gluon.jit
def split_halves(tile):
    """Return the left and the right half of the columns of a tile [rows, columns]."""
    return tile.reshape([tile.shape[0], 2, tile.shape[1] // 2]).permute([0, 2, 1]).split()


@functools.cache
def count_sms(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors; 4 for Triton's interpreter and for meta."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
