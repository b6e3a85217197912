"""The kernels of clones, compiled for an H200 at real sizes: what the machine code must hold."""

import re
from typing import Any

import pytest
import torch

from moecore.kernels.exchange import clones
from moecore.kernels.exchange.buffer import NUM_WORDS
from moecore.kernels.exchange.clones import CloneBuffer, CloneLayout, ClonePlaces
from tests.kernels.exchange.test_exchange_compile import check_spills
from tests.kernels.test_compile import compiled

__all__ = ["compiled"]

SHAPES = {  # G, e, c, elements of an expert
    "qwen3-30b": (8, 16, 2, 3 << 20),
    "dsv3, more than a piece": (8, 32, 2, 29 << 20),
    "64 ranks": (64, 4, 3, 1 << 20),
}


def run(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    G, e, c, width = shape
    words = torch.zeros(NUM_WORDS, dtype=torch.int32)
    buffer = CloneBuffer(
        layout=CloneLayout(num_ranks=G),
        rank=1,
        bases=torch.zeros(4, G, dtype=torch.int64),
        state=words,
        report=words.clone(),
        timeout_ns=10**11,
    )
    places = ClonePlaces(experts_N=words[:1], num_clones=c, num_local=e)
    rows = torch.empty(1, 1, dtype=dtype).expand(e + c, width)  # compiling reads no value
    piece = next(clones.split_into_pieces(buffer.layout, rows, c))
    grads = (buffer, rows, places, piece)
    clones.store_grads(*grads)
    clones.receive_grads(*grads)
    whole = torch.empty(1, 1, dtype=torch.int32).expand(rows.shape)
    weights = (buffer, whole, places, piece)
    clones.store_weights(*weights)
    clones.receive_weights(*weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_compiles_without_spills_and_moves_16_bytes(name, dtype, compiled, tmp_path) -> None:
    run(SHAPES[name], dtype)
    assert len(compiled) == 4, sorted(compiled)
    check_spills(compiled, tmp_path)
    for kernel, of_kernel in compiled.items():
        ptx = of_kernel.asm["ptx"]
        past_l1 = r"\.cg" if "_receive" in kernel else ""
        assert re.search(rf"ld\.global{past_l1}\.v4\.b32", ptx), kernel
        assert re.search(r"st\.global\.v4\.b32", ptx), kernel
        assert not re.search(r"[ls][dt]\.global[.\w]*\.b16", ptx), f"{kernel} moves 2 bytes"


def test_flags_are_released_and_acquired_at_system_scope(compiled: dict[str, Any]) -> None:
    """Stores, barrier, release in one launch; acquire, barrier, loads in the next."""
    run(SHAPES["qwen3-30b"], torch.float32)
    for kernel, of_kernel in compiled.items():
        lines = of_kernel.asm["ttgir"].splitlines()  # structured: in the order of execution
        barriers = [i for i, x in enumerate(lines) if re.search(r"(gpu|ttg)\.barrier", x)]
        if "_store" in kernel:
            last = max(i for i, x in enumerate(lines) if re.search(r"tt\.store ", x))
            (release,) = (i for i, x in enumerate(lines) if "atomic_rmw exch, release, sys" in x)
            assert any(last < i < release for i in barriers), kernel
        else:
            acquires = [i for i, x in enumerate(lines) if "ld.acquire.sys.global" in x]
            first = min(i for i, x in enumerate(lines) if re.search(r"(cacheM|cache_m)\w+ = cg", x))
            assert len(acquires) == 2, kernel
            assert any(max(acquires) < i < first for i in barriers), kernel
