"""The exchange's kernels, compiled for an H200 at real sizes: what the machine code must hold."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from moecore.kernels import exchange
from moecore.kernels.exchange_port import NUM_WORDS, ExchangeLayout, ExchangePort
from moecore.kernels.limit_rows import limit_rows
from tests.kernels.test_compile import MAX_SPILL_BYTES, compiled, spilled_bytes

__all__ = ["compiled"]

SHAPES = {  # G, C, D, K, dtype, programs that push, programs that receive
    "dsv3": (8, 4096, 7168, 8, torch.bfloat16, 88, 44),
    "dsv3, 24 SMs": (8, 4096, 7168, 8, torch.bfloat16, 16, 8),
    "qwen3-30b": (8, 16384, 2048, 8, torch.bfloat16, 88, 44),
    "fp32": (2, 4096, 2048, 8, torch.float32, 88, 44),
    "six ranks, expert choice": (6, 1024, 1032, 128, torch.float16, 88, 44),
}


def run(shape: tuple[Any, ...]) -> None:
    G, C, D, K, dtype, push, receive = shape
    layout = ExchangeLayout(
        num_ranks=G,
        capacity=C,
        dim=D,
        top_k=K,
        dtype=dtype,
        num_push=push,
        num_receive=receive,
    )
    words = torch.zeros(NUM_WORDS, dtype=torch.int32)
    port = ExchangePort(
        layout=layout,
        rank=1,
        bases=torch.zeros(4, G, dtype=torch.int64),
        state=words,
        report=words.clone(),
        timeout_ns=10**11,
    )
    x, marks = torch.empty(16, D, dtype=dtype), torch.zeros(16, dtype=torch.int32)
    ids, weights = torch.zeros(16, K, dtype=torch.int32), torch.zeros(16, K)
    exchange.spread_choices(port, x, ids, weights, num_local=16, etp=1)
    exchange.spread(port, x, marks, marks)
    exchange.reduce(port, x, marks, marks, weights)
    exchange.reduce(port, x, marks, marks)
    limit_rows(marks, 8, words, words)


@pytest.mark.parametrize("name", SHAPES)
def test_compiles_without_spills_and_moves_16_bytes(
    name: str, compiled: dict[str, Any], tmp_path: Any
) -> None:
    run(SHAPES[name])
    assert len(compiled) == 5, sorted(compiled)
    spills = {k: n for k, kernel in compiled.items() if (n := spilled_bytes(kernel, tmp_path))}
    assert all(n <= MAX_SPILL_BYTES for n in spills.values()), spills
    ptx = {k: kernel.asm["ptx"] for k, kernel in compiled.items() if "_limit" not in k}
    for kernel, text in ptx.items():
        assert re.search(r"ld\.global\.v4\.b32", text), kernel
        assert re.search(r"st\.global\.v4\.b32", text), kernel
        assert re.search(r"ld\.global\.cg\.v4\.b32", text), kernel
        assert not re.search(r"[ls][dt]\.global[.\w]*\.b16", text), f"{kernel} moves 2 bytes"


def test_flags_are_released_and_acquired_at_system_scope(compiled: dict[str, Any]) -> None:
    """Stores, barrier, release; acquire, barrier, loads."""
    run(SHAPES["dsv3"])
    for kernel, compiled_kernel in compiled.items():
        if "_limit" in kernel:
            continue
        lines = compiled_kernel.asm["ptx"].splitlines()
        where = {
            name: [i for i, line in enumerate(lines) if re.search(pattern, line)]
            for name, pattern in (
                ("row stores", r"st\.global\.v4\.b32"),
                ("barriers", r"bar\.sync"),
                ("release", r"atom\.global\.sys\.release\.exch"),
                ("acquire", r"ld\.acquire\.sys\.global"),
                ("row loads", r"ld\.global\.cg\.v4"),
            )
        }
        (release,) = where["release"]
        pushed = [i for i in where["row stores"] if i < release]
        assert pushed and any(max(pushed) < i < release for i in where["barriers"]), kernel
        loads = min(where["row loads"])
        assert len(where["acquire"]) == 2 and release < max(where["acquire"]) < loads, kernel
        assert any(max(where["acquire"]) < i < loads for i in where["barriers"]), kernel
