"""Imported last by the servers that ranks fork from: what costs a rank less if it is so at a fork.

What the servers have imported is never garbage: a collection in a rank would walk all of it, and
copy its pages while it counts. A rank lives for seconds, so it collects seldom, and it keeps the
memory that it frees: the next tensor then needs no new pages of the system.
"""

import ctypes
import gc

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # of glibc's mallopt
BYTES = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 1 << 30, TOP_PAD: 8 << 20}

gc.collect()
gc.freeze()
gc.set_threshold(100_000, 20, 20)
LIBC = ctypes.CDLL(None)
if hasattr(LIBC, "mallopt"):  # no other C library has it
    for option, value in BYTES.items():
        LIBC.mallopt(option, value)
