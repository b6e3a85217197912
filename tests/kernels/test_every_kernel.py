"""`every_kernel.py` runs what it says: each kernel of the package at least once."""

import importlib
import pkgutil
from typing import Any

import pytest

import moecore.kernels
from moecore.moe import backends

pytest.importorskip("triton")
from tests.kernels.every_kernel import every_kernel, run_all


def test_no_kernel_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are recorded instead of done, so this needs no GPU; values mean nothing."""
    from triton.runtime.jit import JITFunction

    launched: set[str] = set()

    def run(self: JITFunction, *args: Any, **kwargs: Any) -> None:
        launched.add(self.__name__)

    monkeypatch.setattr(JITFunction, "run", run)
    infos = pkgutil.walk_packages(moecore.kernels.__path__, "moecore.kernels.")
    modules = [importlib.import_module(info.name) for info in infos]
    for module in (*modules, backends):
        for name in ("can_use_kernel", "has_hopper_kernels", "can_multiply_fp8"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *_: True)
    run_all("cpu")
    assert every_kernel() - launched == set()
