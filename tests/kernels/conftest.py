"""Where the kernel tests run: a GPU, or the CPU under Triton's interpreter (TRITON_INTERPRET=1)."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from moecore.kernels.triton_api import INTERPRET
from tests.helpers.waits import syncs_are_errors

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


def check_twice(ours: Tensor, plain: Tensor, truth: Tensor, name="", *, floor=1e-3) -> None:
    """At most twice the error of plain PyTorch, over all and in the worst row; relative floors."""
    assert ours.isfinite().all(), name
    if not truth.numel():
        return
    width = truth.shape[-1] if truth.ndim > 1 else 1
    rows = truth.reshape(-1, width).norm(dim=1)
    error, allowed = ((t.double() - truth).reshape(-1, width).norm(dim=1) for t in (ours, plain))
    assert error.norm() <= 2 * allowed.norm() + floor * rows.norm(), name
    assert error.max() <= 2 * allowed.max() + floor * rows.max(), name


def check_without_host(step, inputs, others=None) -> Sequence[Tensor]:
    """Return a step's outputs; no host sync, and the same bits in repeats and a replayed graph.

    The CUDA graph is captured with `others`, or zeros, in place of the inputs.
    """
    expected = step(*inputs)
    with syncs_are_errors():
        repeats = [step(*inputs) for _ in range(3)]
    # Leaves of their own: inputs in graphs that `expected` keeps are bound to those graphs' stream.
    static = [t.detach().clone() for t in others or map(torch.zeros_like, inputs)]
    for to, t in zip(static, inputs, strict=True):
        to.requires_grad_(t.requires_grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*static)
    with torch.no_grad():
        for to, t in zip(static, inputs, strict=True):
            to.copy_(t)
    graph.replay()
    for found in (*repeats, captured):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return expected
