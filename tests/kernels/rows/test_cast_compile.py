"""The casts' kernels compile for an H200 without one, store vectors and spill nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moecore.kernels.common import INTERPRET
from moecore.kernels.rows import cast as casts
from moecore.kernels.rows.cast import _CastOptions as Options

pytest.importorskip("triton")
if INTERPRET:
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)
from tests.kernels.test_compile import compiled, spilled_bytes

__all__ = ["compiled"]  # a fixture


@pytest.mark.parametrize("kind", ["tile", "block", "row", "tensor"])
@pytest.mark.parametrize(("fmt", "power_of_two"), [("e4m3", True), ("e4m3", False), ("e5m2", True)])
def test_cast(
    kind: str,
    fmt: str,
    power_of_two: bool,
    compiled: dict[str, Any],
    tmp_path: Path,
) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(512, 2048, dtype=dtype)
        for rows, columns in ((True, True), (True, False), (False, True)):
            casts._cast(x, None, None, Options(kind, fmt, power_of_two, rows, columns))
    if kind == "tensor":
        one = torch.zeros(1)
        casts._cast(x, one, one, Options(kind, fmt, power_of_two, True, True))
    for name, kernel in compiled.items():
        assert spilled_bytes(kernel, tmp_path) == 0, name
        if name.startswith("cast"):
            assert "ld.global.v4.b32" in kernel.asm["ptx"] and "st.global.v4" in kernel.asm["ptx"]
            assert f"satfinite.{fmt}x2" in kernel.asm["ptx"]
