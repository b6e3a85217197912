"""What the kernels save, allocate and launch in a dry run on meta tensors, by hand."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from moecore.base.streams import use_dry_streams
from moecore.kernels.linear_attention import DeltaRule, causal_convolution, gated_delta_rule
from moecore.kernels.linear_attention.chunked import CHUNK
from moecore.kernels.meta import record_launches_on_meta
from moecore.planning.record import WorkRecorder
from moecore.train.memory.on_meta import OnMeta

T, h, H, k, v, W = 512, 2, 6, 64, 128, 4


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


def per_dim() -> DeltaRule:
    return rule_of()._replace(g_THk=on_meta(T, H, k, dtype=torch.float32))


def without_rates() -> DeltaRule:
    return rule_of()._replace(beta_TH=None, scale=1.0, norm_qk=False)


# Multiply-adds per token and value head, of what backward computes again, and of the rest.
AGAIN = 2 * k * v + CHUNK * (3 * k + v) + 10 * CHUNK**2
REST = 7 * k * v + CHUNK * (4 * k + 5 * v)
AGAIN_PER_DIM = 2 * k * v + CHUNK * (13 * k + v) + 10 * CHUNK**2
REST_PER_DIM = 7 * k * v + CHUNK * (24 * k + 5 * v)
AGAIN_WITHOUT_RATES, REST_WITHOUT_RATES = k * v + CHUNK * k, 5 * k * v + CHUNK * (2 * k + 3 * v)


@pytest.mark.parametrize(
    ("make", "again", "rest"),
    [
        (rule_of, AGAIN, REST),
        (per_dim, AGAIN_PER_DIM, REST_PER_DIM),
        (without_rates, AGAIN_WITHOUT_RATES, REST_WITHOUT_RATES),
    ],
)
def test_a_rule_saves_its_inputs_and_records_its_products(make, again, rest) -> None:
    cu_seqlens = torch.empty(2, dtype=torch.int32, device="meta")
    found = recorded(lambda: gated_delta_rule(make(), cu_seqlens)[0])
    decays, rates = 4 * H * (k if make is per_dim else 1), 2 * H * (make is not without_rates)
    inputs = 2 * (2 * h * k + H * v) + decays + rates
    assert found.kept == pytest.approx(T * (inputs + 2 * H * v), abs=2**12)
    assert found.flops == 2 * T * H * (2 * again + rest)
    assert sum(found.launches.values()) == 3 + 2 + 4 + (make is per_dim)


class Unsent:
    """A chain without products or communication."""

    def compute_initial_states(self, transitions: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
        states = transitions.new_empty(*transitions.shape[:-1], value_dim)
        return states, transitions[..., value_dim:].contiguous()

    def compute_last_gradients(self, initial_gradients: Tensor, maps: Tensor) -> Tensor:
        return torch.empty_like(initial_gradients)


@pytest.mark.parametrize(("make", "map_columns"), [(rule_of, k), (per_dim, k), (without_rates, 0)])
def test_a_chain_adds_two_scans(make, map_columns) -> None:
    """Of last states and maps in forward, and of gradients in backward."""
    cu_seqlens = torch.empty(3, dtype=torch.int32, device="meta")
    alone, found = (
        recorded(lambda chain=chain: gated_delta_rule(make(), cu_seqlens, chain=chain)[0])
        for chain in (None, Unsent())
    )
    has_rates = make is not without_rates
    scans = (1 + has_rates) * k * (v + map_columns) + (2 + has_rates) * k * v + CHUNK * v
    assert sum(found.launches.values()) == sum(alone.launches.values()) + 2
    assert found.flops - alone.flops == 2 * T * H * scans
    states = 2 * H * k * 4 * (v + (map_columns or 1))  # and maps of two documents
    assert found.kept - alone.kept == pytest.approx(states, abs=2**12)


def test_a_convolution_saves_its_input() -> None:
    D = 2 * h * k + H * v
    cu_seqlens = torch.empty(2, dtype=torch.int32, device="meta")
    x, weight = on_meta(T, D), on_meta(D, W)
    found = recorded(lambda: causal_convolution(x, weight, None, cu_seqlens, apply_silu=True))
    assert found.kept == pytest.approx(2 * T * D + 8 * T, abs=2**12)
    assert sum(found.launches.values()) == 2
