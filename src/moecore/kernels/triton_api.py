"""Triton's and Gluon's modules and names, for kernel files.

CPU builds of torch have no Triton. Then these names are stand-ins that let the files be imported,
and only the references can run.
"""

import os
import re
from functools import partial
from typing import Any

from moecore.kernels.meta import record_launch

try:
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
except ImportError:

    class _NoTriton:
        """Stands for a missing Triton module, so that files of kernels can be imported."""

        def __init__(self, name: str = "") -> None:
            self.name = name

        def __getattr__(self, name: str) -> Any:
            return self

        def __getitem__(self, grid: Any) -> Any:
            """Return a launcher that only reports this kernel to `record_launch`."""
            return partial(record_launch, self.name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Decorate a kernel; otherwise return the first argument, or self if there is none."""
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
