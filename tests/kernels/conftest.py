"""Where the kernel tests run: a GPU, or the CPU under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
    """Let the interpreter prepare a launch once.

    It replaces all functions of `triton.language` when a kernel starts, and looks for more of them
    at every call of another function by the kernel, which takes it longer than to interpret one.
    """
    if not INTERPRET:
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_lang"):  # another release, slower but as right
        yield
        return
    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()  # in this launch, which undoes it in the end

    def patch_once(fn: Any) -> Any:
        seen = {id(language), id(language.core)} & {id(v) for v in fn.__globals__.values()}
        if seen <= patched:
            return None
        patched.update(seen)
        return patch_lang(fn)

    def launch_anew(executor: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(executor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
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
