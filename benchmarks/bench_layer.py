"""The whole MoELayer, forward and forward + backward, against its matrix products alone.

Rows `layer_fwd` (baseline: the two grouped matmuls of a forward) and `layer_fwd_bwd` (baseline: all
six), per backend, in the same rounds as the baseline. Backends have separate rounds: a backend that
leaves the GPU idle would cool it, and raise the clocks of the others. Routing happens inside the
layer; gradients of input, weights and router are computed into new tensors. A forward is a training
forward, which saves tensors for the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import harness, layers, records
from benchmarks.records import Row
from benchmarks.session import Ceilings, Session
from benchmarks.shapes import Shape
from moecore import MoELayer
from moecore.kernels.common import has_hopper_kernels

TESTS = list(layers.GPU_TESTS if torch.cuda.is_available() else layers.CPU_TESTS)
TESTS += layers.TE_TESTS

# Backends must agree with "torch" to a few bf16 roundings: a fast wrong one gets no row.
AGREEMENT = 0.02
COMPETITOR, TRANSFORMER_ENGINE = "transformers", "te"


class Contender:
    """The layer with one backend.

    Args:
        layer: the layer; all contenders share its weights.
        backend: of its experts, or `COMPETITOR`.
        x_TD: tokens.
        dy_TD: gradient of the output.
    """

    def __init__(self, layer: MoELayer, backend: str, x_TD: Tensor, dy_TD: Tensor) -> None:
        self.layer, self.backend = layer, backend
        self.module: nn.Module = layer
        self.experts = layer.get_part("experts")
        self.x, self.dy = x_TD, dy_TD
        if backend == COMPETITOR:
            self.module = layers.make_transformers_block(layer)
            self.x, self.dy = x_TD.detach()[None].requires_grad_(), dy_TD[None]

    def prepare(self) -> None:
        """Put the experts into the layer, set their backend and drop all gradients."""
        self.layer.experts = self.experts
        if self.backend != COMPETITOR:
            self.experts.set_backend(self.backend)
        for tensor in (self.x, *self.module.parameters()):
            tensor.grad = None

    def list_existing(self) -> list[Tensor]:
        """Return the tensors, except the input, that exist before a forward."""
        return [*self.module.parameters(), *self.module.buffers()]

    def forward(self) -> Tensor:
        return self.module(self.x)

    def forward_backward(self) -> None:
        self.forward().backward(self.dy)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the output and the input's gradient."""
        self.prepare()
        y = self.forward()
        y.backward(self.dy)
        assert self.x.grad is not None
        return y.detach(), self.x.grad


def list_backends(device: torch.device) -> Iterator[str]:
    """Yield the backends that can run on this machine."""
    if has_hopper_kernels(device):
        yield "triton"
    yield "torch"
    if device.type == "cuda" and layers.HAS_TE:
        yield TRANSFORMER_ENGINE
    if layers.has_transformers():
        yield COMPETITOR


@pytest.mark.proven_by(*TESTS)
def test_layer(shape: Shape, routing: str, session: Session, ceilings: Ceilings) -> None:
    layer, x_TD = layers.make_layer(shape, routing, device=session.device)
    dy_TD = torch.randn_like(x_TD)
    with torch.no_grad():
        ids_TK = layer.get_part("router")(x_TD).expert_ids_TK
        six = layers.SixProducts(layer, x_TD, ids_TK)
    reached = layers.compute_hottest(ids_TK, shape.num_experts)
    if routing == "skewed" and abs(reached / shape.skew - 1) > layers.SKEW_TOLERANCE:
        pytest.fail(f"skewed routing reached {reached:.2f} times the mean, not {shape.skew:.2f}")
    x_TD.requires_grad_()
    contenders = {
        name: Contender(layer, name, x_TD, dy_TD)
        for name in list_backends(session.device)
        if (not session.backends or name in session.backends)
        and (routing == "learned" or name not in (COMPETITOR, TRANSFORMER_ENGINE))
    }
    if not contenders:
        pytest.skip(f"no backend of {', '.join(session.backends)} runs here with this routing")
    check_agreement(contenders)
    for contender in contenders.values():
        timings = time_calls(contender, six, session)
        for fields in measure(contender, timings, shape, ceilings.tflops):
            session.add(Row(shape=shape.name, routing=routing, hottest=reached, **fields))


def check_agreement(contenders: dict[str, Contender]) -> None:
    """Fail if a backend's output or input gradient differs from "torch"."""
    if "torch" not in contenders:
        return
    expected = contenders["torch"].result()
    for name, contender in contenders.items():
        if name in ("torch", COMPETITOR):
            continue
        for tensor, found, right in zip("yx", contender.result(), expected, strict=True):
            error = float((found.float() - right.float()).norm() / right.float().norm())
            if not error < AGREEMENT:
                pytest.fail(f"{name} differs from torch by {error:.3g} in {tensor}: no numbers")


def time_calls(
    contender: Contender, six: layers.SixProducts, session: Session
) -> dict[str, harness.Timing]:
    """Time the baselines "two" and "six", and the contender's "fwd" and "fwd+bwd"."""
    calls: dict[str, harness.Call] = {
        "two": six.forward,
        "six": six.all,
        "fwd": contender.forward,
        "fwd+bwd": contender.forward_backward,
    }

    def prepare(name: str) -> None:
        if name.startswith("fwd"):
            contender.prepare()

    return harness.time_variants(
        calls, device=session.device, effort=session.effort, prepare=prepare
    )


def measure(
    contender: Contender, timings: dict[str, harness.Timing], shape: Shape, ceiling: float
) -> Iterator[dict[str, Any]]:
    """Yield the fields of the forward row and of the forward + backward row."""
    device = contender.x.device
    contender.prepare()
    saved = harness.measure_saved(
        contender.forward, parameters=contender.list_existing(), inputs=[contender.x]
    )
    for op, suffix, baseline, call, flops in (
        ("layer_fwd", "fwd", "two", contender.forward, shape.forward_flops),
        ("layer_fwd_bwd", "fwd+bwd", "six", contender.forward_backward, shape.total_flops),
    ):
        timing = timings[suffix]
        baseline_ms = timings[baseline].ms
        tflops = flops / timing.ms / 1e9
        found = {}
        for name, count in (
            ("peak_bytes", harness.measure_peak),
            ("launches", harness.count_launches),
            ("syncs", harness.count_syncs),
        ):
            contender.prepare()
            found[name] = count(call, device=device)
        yield records.make_timing_fields(
            timing, baseline=f"{baseline} grouped_mm", ms=baseline_ms
        ) | {
            "op": op,
            "backend": contender.backend,
            "tflops": tflops,
            "fraction": tflops / ceiling,
            "saved_bytes": saved.hook_bytes,
            "saved_allocated_bytes": saved.allocated_bytes,
            "saved_ratio": saved.hook_bytes / shape.least_saved_bytes,
            **found,
        }
