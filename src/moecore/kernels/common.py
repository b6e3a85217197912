"""What every kernel file needs: Triton where it is installed, and when to use a kernel.

CPU builds of torch bring no Triton: then `triton` and `tl` are stand-ins that let the files be
imported, and only the references can run.
"""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:

    class _NoTriton:
        """Decorators become identities, annotations None."""

        def __getattr__(self, name: str) -> Any:
            return None if name == "constexpr" else (lambda *args, **kwargs: args[0])

    triton = tl = _NoTriton()

HAS_TRITON = not type(triton).__name__.startswith("_")
INTERPRET = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def use_kernel(*tensors: Tensor) -> bool:
    """Return whether Triton kernels can run on these tensors."""
    return HAS_TRITON and (INTERPRET or all(t.is_cuda for t in tensors))


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors (4 for a CPU that interprets)."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
