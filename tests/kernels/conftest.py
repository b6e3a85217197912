"""Where the kernel tests run: a GPU, or the CPU under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moecore.kernels.common import INTERPRET

# The interpreter replaces the compiler that this file is about.
collect_ignore = ["test_compile.py"] if INTERPRET else []

PARAMS = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.interpret),
]


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> Iterator[None]:
    """Let the interpreter do its bookkeeping once."""
    if not INTERPRET:
        yield
        return
    from tests.kernels import interpreter

    with interpreter.patched():
        yield


@pytest.fixture(params=PARAMS)
def device(request: pytest.FixtureRequest) -> str:
    """The device on which kernels run in this process; poisoned memory on a GPU."""
    if request.param == "cuda":
        poison()
    return request.param


def poison() -> None:
    """Leave NaN in freed GPU memory, where outputs that nobody writes would find it."""
    blocks = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 28, 1 << 20, 1 << 12)]
    del blocks
