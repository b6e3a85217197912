"""HostAdamW of parameters on a GPU: the CPU's bits, and no moments on the GPU.

python -m pytest -m gpu tests/train/optim
"""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore.train import AdamW, HostAdamW
from moecore.train.optim import host_step
from tests.train.optim.test_host_step import make_params, train

pytestmark = pytest.mark.gpu
SIZES = [(1000, 700), (7,), (5, 333, 41), (), (0, 4), (640,)]
SLEEP = 40_000_000  # cycles, about 20 ms


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_step, "CHUNK", 10_000)


@pytest.mark.parametrize("signals", [{}, {"grad_scale": 1.7, "found_inf": 1}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("late", [None, "copies", "model"])
def test_bits_of_the_cpu_and_of_the_gpu(late, dtype, signals, monkeypatch) -> None:
    """What the host steps equals HostAdamW of CPU tensors; all others AdamW of the GPU."""
    params, on_cpu, on_gpu = (
        make_params(dtype, device, SIZES) for device in ("cuda", "cpu", "cuda")
    )
    ours = HostAdamW(params, lr=1e-2, host_fraction=0.5)
    train(on_cpu, HostAdamW(on_cpu, lr=1e-2, host_fraction=0.5), **signals)
    train(on_gpu, AdamW(on_gpu, lr=1e-2), **signals)
    copy = host_step.CopyStream.copy

    def late_copy(stream: Any, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(stream.next_stream):
            torch.cuda._sleep(SLEEP // 10)
        copy(stream, target, source)

    def late_work(*_: Any) -> None:
        torch.cuda._sleep(SLEEP)

    if late == "copies":
        monkeypatch.setattr(host_step.CopyStream, "copy", late_copy)
    elif late == "model":
        ours.register_step_pre_hook(late_work)
    train(params, ours, **signals)
    assert 0 < len(ours.host_params) < len(params)
    for param, cpu, gpu in zip(params, on_cpu, on_gpu, strict=True):
        want = cpu.cuda() if param in ours.host_params else gpu
        assert torch.equal(param, want)
        tolerance = 2.0**-7 if dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(param, gpu, rtol=tolerance, atol=tolerance / 10)
    for param in ours.host_params:
        assert {value.device.type for value in ours.state[param].values()} == {"cpu"}


def test_one_step_errs_no_more_than_torch_on_the_gpu() -> None:
    """Both beside fp64: sums and roots round differently, none of them more than another."""
    size = [(1000, 1000)]
    ours, theirs, exact = (make_params(torch.float32, "cuda", size) for _ in range(3))
    exact = [nn.Parameter(param.detach().double()) for param in exact]
    train(ours, HostAdamW(ours, lr=1e-2, host_fraction=1), range(1))
    train(theirs, torch.optim.AdamW(theirs, lr=1e-2, fused=True), range(1))
    train(exact, torch.optim.AdamW(exact, lr=1e-2), range(1))
    errors = [(params[0].double() - exact[0]).abs().max() for params in (ours, theirs)]
    assert 0 < errors[0] <= 2 * errors[1]


def held_after_steps(host_fraction: float) -> float:
    """Return the bytes that an optimizer holds on the GPU over those of its fp32 parameters."""
    params = [nn.Parameter(torch.ones(1 << 20, device="cuda")) for _ in range(10)]
    gc.collect()
    before = torch.cuda.memory_allocated()
    optimizer = HostAdamW(params, host_fraction=host_fraction)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return (torch.cuda.memory_allocated() - before) / sum(param.nbytes for param in params)


@pytest.mark.parametrize(("host_fraction", "held"), [(0.0, 2.0), (0.6, 0.8), (1.0, 0.0)])
def test_moments_take_no_memory_of_the_gpu(host_fraction: float, held: float) -> None:
    assert held_after_steps(host_fraction) == pytest.approx(held, abs=0.1)
