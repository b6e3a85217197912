"""The exchange's kernels, compiled for an H200 at real sizes: what the machine code must hold."""

import re
from typing import Any

import pytest
import torch

from moecore.kernels.exchange import operations as exchange
from moecore.kernels.exchange.buffer import NUM_WORDS, ExchangeLayout, SymmetricBuffer
from moecore.kernels.exchange.operations import limit_rows
from tests.helpers.grids import beside
from tests.kernels.test_compile import MAX_SPILL_BYTES, compiled, spilled_bytes

pytestmark = pytest.mark.slow

__all__ = ["compiled"]

SHAPES = {  # G, C, D, K, dtype, programs that push, programs that receive
    "dsv3": (8, 4096, 7168, 8, torch.bfloat16, 66, 66),
    "dsv3, 24 SMs": (8, 4096, 7168, 8, torch.bfloat16, 12, 12),
    "qwen3-30b": (8, 16384, 2048, 8, torch.bfloat16, 66, 66),
    "qwen3-30b, 24 SMs": (8, 16384, 2048, 8, torch.bfloat16, 12, 12),
    "fp32": (2, 4096, 2048, 8, torch.float32, 66, 66),
    "six ranks, expert choice": (6, 1024, 1032, 128, torch.float16, 66, 66),
    "64 ranks": (64, 4096, 7168, 8, torch.bfloat16, 66, 66),
    "six ranks, expert choice, few SMs": (6, 8192, 1032, 128, torch.float16, 2, 2),
}


def make(shape: tuple[Any, ...]) -> tuple[SymmetricBuffer, torch.Tensor]:
    """Return a buffer without buffers, and rows: compiling reads no value."""
    G, C, D, K, dtype, push, receive = shape
    layout = ExchangeLayout(
        num_ranks=G,
        max_tokens=C,
        row_bytes=D * dtype.itemsize,
        top_k=K,
        num_push=push,
        num_receive=receive,
        sums_slot=True,
    )
    words = torch.zeros(NUM_WORDS, dtype=torch.int32)
    buffer = SymmetricBuffer(
        layout=layout,
        rank=1,
        bases=torch.zeros(4, G, dtype=torch.int64),
        state=words,
        report=words.clone(),
        timeout_ns=10**11,
    )
    return buffer, torch.empty(16, D, dtype=dtype)


def run(shape: tuple[Any, ...]) -> None:
    (buffer, x), K = make(shape), shape[3]
    peers, marks = torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.int32)
    ids, weights = torch.zeros(16, K, dtype=torch.int32), torch.zeros(16, K)
    exchange.dispatch_rows_and_choices(buffer, x, ids, weights, num_local_experts=16, etp=1)
    choices = (weights[:, 0].contiguous(), ids)
    exchange.combine_rows(buffer, x, peers, marks, marks[:, None], choices, has_sums=True)
    for slots in (marks[:, None], ids):  # of source rows, of expert rows
        exchange.dispatch_rows(buffer, x, peers, marks, slots, 16)
        exchange.combine_rows(buffer, x, peers, marks, slots, choices)
        exchange.combine_rows(buffer, x, peers, marks, slots)
    limit_rows(buffer.state, 8, buffer.state, buffer.report)


BY_DAY = ("dsv3", "six ranks, expert choice, few SMs")


@pytest.mark.parametrize("name", beside(SHAPES, [name for name in SHAPES if name not in BY_DAY]))
def test_compiles_without_spills_and_moves_16_bytes(name, compiled, tmp_path) -> None:
    run(SHAPES[name])
    assert len(compiled) == 9, sorted(compiled)
    check_spills(compiled, tmp_path)
    ptx = {k: kernel.asm["ptx"] for k, kernel in compiled.items() if "_limit" not in k}
    loads = [re.search(r"ld\.global\.v4\.b32", text) for text in ptx.values()]
    assert sum(map(bool, loads)) == len(ptx) - 1  # after copies, a reduce reads its buffer alone
    for kernel, text in ptx.items():
        check_moves(kernel, text)


def check_spills(compiled: dict[str, Any], tmp_path: Any) -> None:
    spills = {k: n for k, kernel in compiled.items() if (n := spilled_bytes(kernel, tmp_path))}
    assert all(n <= MAX_SPILL_BYTES for n in spills.values()), spills


def check_moves(kernel: str, ptx: str) -> None:
    """Rows move 16 bytes at a time, out of the buffer past the L1."""
    assert re.search(r"st\.global\.v4\.b32", ptx), kernel
    assert re.search(r"ld\.global\.cg\.v4\.b32", ptx), kernel
    assert not re.search(r"[ls][dt]\.global[.\w]*\.b16", ptx), f"{kernel} moves 2 bytes"


def test_flags_are_released_and_acquired_at_system_scope(compiled: dict[str, Any]) -> None:
    """Stores, barrier, release; acquire, barrier, loads."""
    run(SHAPES["dsv3"])
    for kernel, compiled_kernel in compiled.items():
        if "_limit" in kernel:
            continue
        lines = compiled_kernel.asm["ttgir"].splitlines()  # structured: in the order of execution
        where = {
            name: [i for i, line in enumerate(lines) if re.search(pattern, line)]
            for name, pattern in (
                ("stores", r"tt\.store "),
                ("barriers", r"(gpu|ttg)\.barrier"),
                ("release", r"tt\.atomic_rmw exch, release, sys"),
                ("acquire", r"ld\.acquire\.sys\.global"),
                ("loads", r"tt\.load .*(cacheModifier|cache_modifier) = cg"),
            )
        }
        (release,) = where["release"]
        last = max(i for i in where["stores"] if i < release)
        assert any(last < i < release for i in where["barriers"]), kernel
        assert "atom.global.sys.release.exch" in compiled_kernel.asm["ptx"]
        first = min(where["loads"])
        assert len(where["acquire"]) == 2 and release < max(where["acquire"]) < first, kernel
        assert any(max(where["acquire"]) < i < first for i in where["barriers"]), kernel
        assert "ld.acquire.sys.global" in compiled_kernel.asm["ptx"]
