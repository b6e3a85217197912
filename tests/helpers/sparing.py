"""Imported first by the servers that ranks fork from, and by pytest: what memory would cost them.

Imports make no garbage, and a rank lives for seconds, so collections are rare. A rank keeps the
memory that it frees: the next tensor then needs no new pages of the system. And torch notes no
stack of its callers, for messages that no test reads: each time that it seeds GPUs that might come,
and for each mode of fake tensors.
"""

import ctypes
import gc
from types import SimpleNamespace

import torch
from torch._subclasses import fake_tensor

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # of glibc's mallopt
BYTES = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 1 << 30, TOP_PAD: 8 << 20}

gc.set_threshold(100_000, 20, 20)
LIBC = ctypes.CDLL(None)
if hasattr(LIBC, "mallopt"):  # no other C library has it
    for option, value in BYTES.items():
        LIBC.mallopt(option, value)

NO_STACK = SimpleNamespace(extract_stack=list, format_stack=list, format_list=list)
for module in (torch.cuda, torch.mtia, torch.xpu, fake_tensor):
    module.traceback = NO_STACK  # type: ignore[attr-defined]
