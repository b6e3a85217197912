"""What stands for flash-linear-attention on meta saves, allocates and launches what it does.

The package runs on meta too, with its kernels recorded in place of launched.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from moecore.base.streams import use_dry_streams
from moecore.kernels.linear_attention import (
    DeltaRule,
    causal_convolution,
    fla_on_meta,
    gated_delta_rule,
)
from moecore.kernels.linear_attention.fla_on_meta import CHUNK
from moecore.kernels.meta import record_launch, record_launches_on_meta
from moecore.planning.record import WorkRecorder
from moecore.train.memory.on_meta import OnMeta

T, h, H, k, v, W = 512, 2, 6, 64, 128, 4
CU_SEQLENS = (0, T)


class Found(NamedTuple):
    """Bytes that a forward keeps, the most of it and of its backward, and what is launched."""

    kept: int
    forward: int
    backward: int
    launches: Counter[tuple[str, int]]
    flops: int


def recorded(run: Callable[[], Tensor]) -> Found:
    """Run forward and backward of an operation on meta."""
    recorder = WorkRecorder(8)
    dry = record_launches_on_meta(recorder.record_kernel), use_dry_streams(recorder.queues)
    with dry[0], dry[1], OnMeta("cuda"), recorder:
        recorder.start_recording()
        before, out = recorder.level, run()
        kept, forward = recorder.level, recorder.peak
        grad = torch.empty_like(out)
        recorder.peak = recorder.level
        out.backward(gradient=grad)
    works = [one.work for one in recorder.queued]
    kernels = Counter((w.name, w.num_bytes) for w in works if "kernel" in w.name)
    sizes = (size - before for size in (kept, forward, recorder.peak))
    return Found(*sizes, kernels, sum(w.flops for w in works))


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta").requires_grad_()


def rule_of() -> DeltaRule:
    mixed = on_meta(T, 2 * h * k + H * v).split((h * k, h * k, H * v), dim=-1)
    q, keys, values = (x.unflatten(1, (-1, d)) for x, d in zip(mixed, (k, k, v), strict=True))
    decays, rates = on_meta(T, H, dtype=torch.float32), on_meta(T, H)
    return DeltaRule(q, keys, values, decays, rates, k**-0.5, True)


def without_rates() -> DeltaRule:
    return rule_of()._replace(beta_TH=None, scale=1.0, norm_qk=False)


def ours(make: Callable[[], DeltaRule] = rule_of) -> Tensor:
    return gated_delta_rule(make(), torch.empty(2, dtype=torch.int32, device="meta"))[0]


def convolved(convolve: Callable[..., Tensor], *others: Any) -> Tensor:
    return convolve(on_meta(T, 2 * h * k + H * v), on_meta(2 * h * k + H * v, W), *others)


def test_a_rule_saves_and_multiplies_what_its_kernels_do() -> None:
    """By hand: normed q and k, v, fp32 decays and lengths, and a triangle of each chunk."""
    found = recorded(ours)
    bf16, fp32 = 2 * h * k + H * v + H * CHUNK, 2 * h + H
    inputs, results = 2 * (2 * h * k + H * v + H) + 4 * H, 2 * H * v
    assert found.kept == T * (2 * bf16 + 4 * fp32 + results + inputs)
    products = 6 * k * v + 2 * CHUNK * (3 * k + 2 * v)
    products += 16 * k * v + 2 * CHUNK * (9 * k + 5 * v + 2 * CHUNK)
    assert found.flops == T * H * products


def test_a_rule_without_rates_saves_and_multiplies_what_its_kernels_do() -> None:
    """By hand: q and k of each value head, v, fp32 sums of decays."""
    found = recorded(partial(ours, without_rates))
    bf16, inputs, results = H * (2 * k + v), 2 * (2 * h * k + H * v) + 4 * H, 2 * H * v
    assert found.kept == T * (2 * bf16 + 4 * H + inputs + results)
    products = 4 * k * v + 2 * CHUNK * (k + v) + 10 * k * v + 2 * CHUNK * (3 * k + 2 * v)
    assert found.flops == T * H * products


def test_the_package_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With flash-linear-attention installed, which needs no GPU for it."""
    pytest.importorskip("fla", reason="flash-linear-attention is what is compared with")
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.simple_gla import chunk_simple_gla
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    def launched(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        while not isinstance(kernel, JITFunction):
            kernel = kernel.fn
        record_launch(kernel.fn.__name__, *args, *named.values())

    for kind in (Autotuner, Heuristics, JITFunction):
        monkeypatch.setattr(kind, "run", launched)
    monkeypatch.setattr(fla_on_meta, "KEY_DIMS", 32)  # as the package takes it without a GPU

    def theirs() -> Tensor:
        *qkvg, beta = (x[None] for x in rule_of()[:5])
        how = dict(scale=k**-0.5, output_final_state=True, use_qk_l2norm_in_kernel=True)
        return chunk_gated_delta_rule(*qkvg, beta, **how)[0].view(T, H, v)

    def theirs_without_rates() -> Tensor:
        *qk, values, decays = without_rates()[:4]
        q, keys = (x.repeat_interleave(H // h, dim=1)[None] for x in qk)
        how = dict(scale=1.0, output_final_state=True)
        return chunk_simple_gla(q, keys, values[None], decays[None], **how)[0].view(T, H, v)

    def their_convolution(x_TD: Tensor, weight_DW: Tensor) -> Tensor:
        return causal_conv1d(x_TD[None], weight_DW, activation="silu")[0].view(x_TD.shape)

    borders = torch.empty(2, dtype=torch.int32, device="meta")
    plain = partial(causal_convolution, apply_silu=True)
    pairs = (
        (ours, theirs),
        (partial(ours, without_rates), theirs_without_rates),
        (partial(convolved, plain, None, borders), partial(convolved, their_convolution)),
    )
    for own, package in pairs:
        mine, found = recorded(own), recorded(package)
        assert mine.launches == found.launches and mine[:3] == pytest.approx(found[:3], abs=2**12)
