from functools import partial
from typing import Any

import pytest
import torch
from benchmarks import harness
from benchmarks.harness import Effort
from benchmarks.shapes import CPU_SHAPES, GPU_SHAPES, SHAPES

CPU = torch.device("cpu")
THREE_ROUNDS = Effort(seconds=0.0, least=3, most=3, warm_up_s=0.0)


def test_percentile_interpolates_between_ordered_values() -> None:
    values = [40.0, 10.0, 20.0]
    assert harness.percentile(values, 0.0) == 10 and harness.percentile(values, 0.5) == 20
    assert harness.percentile(values, 0.75) == 30 and harness.percentile(values, 1.0) == 40
    assert harness.percentile([7.0], 0.2) == 7
    with pytest.raises(ValueError, match="must not be empty"):
        harness.percentile([], 0.5)


def test_every_round_runs_each_variant_once_in_an_order_of_its_own() -> None:
    logs: list[list[str]] = []
    for _ in range(2):
        log: list[str] = []
        harness.time_variants(
            {name: partial(log.append, name) for name in "abcd"},
            device=CPU,
            effort=Effort(seconds=0.0, least=6, most=6, warm_up_s=0.0),
            prepare=lambda name, log=log: log.append(f"prepare {name}"),
        )
        logs.append(log)
    pairs = list(zip(logs[0][::2], logs[0][1::2], strict=True))
    assert all(before == f"prepare {name}" for before, name in pairs)
    rounds = [tuple(name for _, name in pairs[i : i + 4]) for i in range(0, len(pairs), 4)]
    assert len(rounds) == 2 + 6, "two rounds of warm-up, then six"
    assert all(sorted(names) == list("abcd") for names in rounds)
    assert len(set(rounds)) > 2, "what ran before must not always be the same"
    assert logs[0] == logs[1], "the orders are the same in every run"


def test_a_timing_is_median_and_percentiles(monkeypatch: Any) -> None:
    # The first two of each are warm-up.
    times = {"a": iter([1.0, 9.0, 3.0, 1.0, 2.0]), "b": iter([1.0, 9.0, 30.0, 10.0, 20.0])}
    monkeypatch.setattr(harness._HostClock, "span", lambda self, call: next(times[call()]))
    found = harness.time_variants(
        {"a": lambda: "a", "b": lambda: "b"}, device=CPU, effort=THREE_ROUNDS
    )
    assert (found["a"].ms, found["a"].repeats, found["a"].host_ms) == (2.0, 3, None)
    assert (found["a"].p20, found["a"].p80) == pytest.approx((1.4, 2.6))
    assert (found["b"].ms, found["b"].p20) == pytest.approx((20.0, 14.0))


def test_warm_up_takes_its_time_and_rounds_fit_the_effort() -> None:
    calls: list[int] = []
    effort = Effort(seconds=100.0, least=1, most=7, warm_up_s=0.05)
    found = harness.time_variants({"a": lambda: calls.append(1)}, device=CPU, effort=effort)
    assert found["a"].repeats == 7, "a fast call stops at the most rounds"
    assert len(calls) > 9


def test_saved_bytes_are_live_storages_without_parameters() -> None:
    x = torch.randn(4, 8, requires_grad=True)  # 128 bytes
    w = torch.nn.Parameter(torch.randn(8))

    def forward() -> torch.Tensor:
        product = x * w  # keeps x and w
        (product**2).sum()  # keeps product, but nobody holds this graph
        halves = product.view(2, 16)[:, :4]
        return halves.exp()  # keeps its result, [2, 4] = 32 bytes

    saved = harness.measure_saved(forward, parameters=[w], inputs=[x])
    assert saved.hook_bytes == 128 + 32
    assert saved.allocated_bytes is None or torch.cuda.is_available()


def test_a_storage_kept_twice_counts_once_and_whole() -> None:
    x = torch.randn(64, requires_grad=True)  # 256 bytes

    def forward() -> torch.Tensor:
        a, b = x[:8], x[8:16]
        return a * b

    assert harness.measure_saved(forward, parameters=[], inputs=[x]).hook_bytes == 256


def test_nothing_is_counted_on_a_cpu() -> None:
    for count in (harness.measure_peak, harness.count_launches, harness.count_syncs):
        assert count(lambda: pytest.fail("must not run"), device=CPU) is None


def test_formulas_at_the_shapes() -> None:
    qwen, dsv3 = SHAPES["qwen3-30b"], SHAPES["dsv3-32e"]
    assert qwen.least_saved_bytes == 28_672 * 32768 and dsv3.least_saved_bytes == 79_872 * 16384
    assert qwen.total_flops == 18 * 32768 * 8 * 2048 * 768
    assert qwen.forward_flops * 3 == qwen.total_flops
    assert (qwen.skew, dsv3.skew) == (5.0, pytest.approx(3.2))
    for shape in (*GPU_SHAPES, *CPU_SHAPES):
        assert shape.skew < shape.num_experts / shape.top_k, "a token picks an expert once"


@pytest.mark.gpu
def test_launches_and_syncs_are_counted() -> None:
    device = torch.device("cuda")
    x = torch.randn(1 << 20, device=device)

    def three_kernels() -> None:
        x.sin().cos().exp()

    def two_syncs() -> None:
        x[0].item()
        x[1].item()

    three_kernels()
    assert harness.count_launches(three_kernels, device=device) == 3
    assert harness.count_syncs(three_kernels, device=device) == 0
    assert harness.count_syncs(two_syncs, device=device) == 2


@pytest.mark.gpu
def test_syncs_in_backward_are_counted() -> None:
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, dy):  # type: ignore[no-untyped-def]
            dy.sum().item()
            return dy

    x = torch.randn(8, device="cuda", requires_grad=True)
    call = lambda: Waits.apply(x).sum().backward()  # noqa: E731
    call()
    assert harness.count_syncs(call, device=torch.device("cuda")) == 1


@pytest.mark.gpu
def test_hooks_and_allocator_agree_on_kept_bytes() -> None:
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    w = torch.nn.Parameter(torch.randn(1 << 20, device="cuda"))

    def forward() -> torch.Tensor:
        return (x * w).exp().sin()  # keeps x, w and the exponential

    forward()
    saved = harness.measure_saved(forward, parameters=[w], inputs=[x])
    assert saved.hook_bytes == saved.allocated_bytes == 2 * x.nbytes
    peak = harness.measure_peak(lambda: torch.empty_like(x), device=torch.device("cuda"))
    assert peak == x.nbytes


@pytest.mark.gpu
def test_gpu_times_are_of_the_device() -> None:
    a = torch.randn(4096, 4096, device="cuda")
    found = harness.time_variants(
        {"one": lambda: a @ a, "four": lambda: [a @ a for _ in range(4)]},
        device=torch.device("cuda"),
        effort=harness.QUICK,
        lead_ms=0.5,
    )
    assert 3.4 < found["four"].ms / found["one"].ms < 4.6
    assert found["one"].host_ms is not None and found["one"].host_ms < found["four"].ms
