"""A context in which the bits of a row do not depend on other rows of the batch.

Inside the context, torch's kernels on one device type are replaced below autograd, in all threads
of the process. `invariant_product` computes matrix products, and sums over a row's elements. On a
CPU elementwise functions run on padded vectors, because torch computes the last elements of an
array by other code. Fused norms and softmax are batch-invariant in torch. Backward inside the
context uses the same products, and a recomputed forward has the bits of the first forward.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.base.torch_private import grouped_mm_overload
from moecore.kernels.common import KERNEL_DTYPES, has_hopper_kernels, iterate_expert_slices
from moecore.kernels.grouped.gemm import grouped_gemm
from moecore.kernels.invariant.product import invariant_product

Kernel = Callable[..., Any]  # of torch; its first argument is the set of dispatch keys

VECTORS = 128  # elements: a multiple of the vector length of any CPU
SERIAL = 128 * VECTORS  # elements: few enough that torch does not split them over threads

_active: set[str] = set()  # device types


def is_batch_invariant() -> bool:
    """Whether a context of `batch_invariant` is active."""
    return bool(_active)


@contextmanager
def batch_invariant(device_type: str) -> Iterator[None]:
    """Return a context in which a row's results have the same bits in any batch.

    Operations that depend on other rows are replaced, in all threads, but not in compiled modules
    and captured CUDA graphs. `device_type` is "cpu" or "cuda". A nested context changes nothing.
    """
    if device_type in _active:
        yield
        return
    key = {"cpu": "CPU", "cuda": "CUDA"}[device_type]
    library = torch.library.Library("aten", "IMPL")
    mm = torch.library.get_kernel("aten::mm", key).call_boxed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that kernels are replaced
        for name, function in OPERATIONS[key].items():
            kernel = torch.library.get_kernel(f"aten::{name}", key).call_boxed
            implementation = partial(_call_for_floats, function, _TorchKernels(kernel, mm))
            library.impl(name, implementation, key, with_keyset=True)
    _active.add(device_type)
    try:
        yield
    finally:
        _active.remove(device_type)
        del library  # torch's own kernels are back


class _TorchKernels(NamedTuple):
    """Torch's original kernels of a replaced operation and of `mm`; both take a keyset first."""

    kernel: Kernel  # of the operation
    mm: Kernel

    def compute_product(self, keyset: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return invariant_product(*args, **kwargs); on a CPU it multiplies by torch's `mm`."""
        return invariant_product(*args, **kwargs, multiply=partial(self.mm, keyset))


def _call_for_floats(
    replacement: Kernel, kernels: _TorchKernels, keyset: Any, x: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Call `replacement` if x is float, otherwise torch's kernel, because integers sum exactly."""
    if not x.is_floating_point():
        return kernels.kernel(keyset, x, *args, **kwargs)
    return replacement(kernels, keyset, x, *args, **kwargs)


def _mm(
    kernels: _TorchKernels, keyset: Any, a: Tensor, b: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Replace `aten::mm`, `mm.dtype` and `bmm` by `invariant_product`."""
    return kernels.compute_product(keyset, a, b, dtype=dtype)


def _mm_out(kernels: _TorchKernels, keyset: Any, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Replace `aten::mm.out` by `invariant_product`, copied to `out`."""
    return out.copy_(kernels.compute_product(keyset, a, b))


def _addmm(
    kernels: _TorchKernels,
    keyset: Any,
    c: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    beta: Any = 1,
    alpha: Any = 1,
) -> Tensor:
    """Replace `aten::addmm` and `aten::baddbmm`: beta * c + alpha * a @ b."""
    return kernels.compute_product(keyset, a, b, c, beta=beta, alpha=alpha)


def _mv(kernels: _TorchKernels, keyset: Any, a: Tensor, v: Tensor) -> Tensor:
    """Replace `aten::mv`, a matrix times a vector."""
    return kernels.compute_product(keyset, a, v[:, None])[:, 0]


def _grouped_mm(
    kernels: _TorchKernels,
    keyset: Any,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Replace `aten::_grouped_mm` of rows [rows, K]; torch's kernel computes weight gradients."""
    if a.ndim == 3 or b.ndim == 2 or offs is None:
        return kernels.kernel(keyset, a, b, offs, bias, out_dtype)  # type: ignore[no-any-return]
    if has_hopper_kernels(a.device) and a.dtype != torch.float32:
        return grouped_gemm(a.contiguous(), b, offs, dtype=out_dtype)  # its tiles are fixed
    out = a.new_empty(a.shape[0], b.shape[2], dtype=out_dtype or a.dtype)
    for matrix, rows in zip(b, iterate_expert_slices(offs), strict=True):  # a host sync
        out[rows] = kernels.compute_product(keyset, a[rows], matrix, dtype=out_dtype)
    return out


def _sum(
    kernels: _TorchKernels,
    keyset: Any,
    x: Tensor,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Return sums of rows, times `factor`, by a product with ones; other cases by torch."""
    is_of_rows = x.ndim > 1 and dim is not None and list(dim) in ([-1], [x.ndim - 1])
    is_wide = x.dtype not in KERNEL_DTYPES or dtype not in (None, *KERNEL_DTYPES)
    if not is_of_rows or not x.numel() or is_wide:
        return kernels.kernel(keyset, x, dim, keepdim, dtype=dtype)  # type: ignore[no-any-return]
    column = x.new_ones(x.shape[-1], 1, dtype=torch.float32)
    rows = x.reshape(-1, x.shape[-1]).float()
    total = kernels.compute_product(keyset, rows, column, alpha=factor, dtype=dtype or x.dtype)
    return total.view(*x.shape[:-1], 1) if keepdim else total.view(x.shape[:-1])


def _mean(kernels: _TorchKernels, keyset: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the mean of each row by the batch-invariant `_sum`; other cases as in `_sum`."""
    return _sum(
        kernels, keyset, x, *args, **kwargs, factor=1 / max(1, x.shape[-1] if x.ndim else 1)
    )


def _compute_in_full_vectors(
    kernels: _TorchKernels, keyset: Any, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Call torch's elementwise function on x, padded to a multiple of the CPU's vector length."""
    n = x.numel()
    vector = F.pad(x.flatten(), (0, -n % VECTORS), value=1.0)
    parts = [kernels.kernel(keyset, part, *args, **kwargs) for part in vector.split(SERIAL)]
    return torch.cat(parts)[:n].view(x.shape)


def _compute_in_full_vectors_(
    kernels: _TorchKernels, keyset: Any, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Write the result of `_compute_in_full_vectors` to x, and return x."""
    return x.copy_(_compute_in_full_vectors(kernels, keyset, x, *args, **kwargs))


# Operations that forwards of models use. Weight gradients may use others, too.
ROWS: dict[str, Callable[..., Tensor]] = {
    "mm": _mm,
    "mm.out": _mm_out,
    "addmm": _addmm,
    "bmm": _mm,
    "baddbmm": _addmm,
    "mv": _mv,
    "sum.dim_IntList": _sum,
    "mean.dim": _mean,
    grouped_mm_overload.name().removeprefix("aten::"): _grouped_mm,
}
OPERATIONS: dict[str, dict[str, Callable[..., Tensor]]] = {
    "CUDA": ROWS | {"mm.dtype": _mm},
    # These elementwise functions of torch compute an array's last elements by other code.
    "CPU": ROWS
    | dict.fromkeys(("rsqrt", "sigmoid", "silu", "softplus"), _compute_in_full_vectors)
    | dict.fromkeys(("rsqrt_", "sigmoid_", "silu_"), _compute_in_full_vectors_),
}
