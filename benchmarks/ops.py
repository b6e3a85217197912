"""One op of kernels/ on random inputs of a layer's size, measured against torch.

Legend: T tokens, D model dim, F expert hidden dim, E experts, K experts per token, R = T * K, C =
2F columns of FC1. In formulas b is the 2 bytes of bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import harness, records
from benchmarks.records import Row
from benchmarks.session import Ceilings, Session
from benchmarks.shapes import Shape

LEAD_MS = 1.0  # these ops are shorter than their launches


class Inputs:
    """Random inputs of one layer's kernels, computed on access by plain PyTorch.

    Args:
        shape: of the layer.
        device: of the inputs.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        torch.manual_seed(0)
        self.shape, self.device = shape, device

    def random(self, *size: int) -> Tensor:
        """Return normal bf16 values."""
        return torch.randn(*size, device=self.device, dtype=torch.bfloat16)

    @cached_property
    def x_TD(self) -> Tensor:
        return self.random(self.shape.tokens, self.shape.dim)

    @cached_property
    def linear(self) -> tuple[Tensor, Tensor]:
        """x_TD and a router's initial weight [E, D]."""
        return self.x_TD, 0.02 * self.random(self.shape.num_experts, self.shape.dim)

    @cached_property
    def logits_TE(self) -> Tensor:
        """Router logits in fp32."""
        x_TD, weight_ED = self.linear
        return x_TD.float() @ weight_ED.float().T

    @cached_property
    def choice(self) -> tuple[Tensor, Tensor]:
        """Weights [T, K] fp32 and ids [T, K] int32."""
        weights_TK, ids_TK = self.logits_TE.softmax(-1).topk(self.shape.top_k, dim=-1)
        return weights_TK / weights_TK.sum(-1, keepdim=True), ids_TK.int()

    @cached_property
    def index(self) -> tuple[Tensor, Tensor, Tensor]:
        """row_ids_R and slots_TK (both int32), and num_rows (0-dim int32)."""
        ids_TK = self.choice[1]
        order_R = ids_TK.flatten().argsort(stable=True)
        slots = torch.empty_like(order_R)
        slots[order_R] = torch.arange(order_R.numel(), device=self.device)
        num_rows = torch.tensor(order_R.numel(), device=self.device, dtype=torch.int32)
        row_ids_R = order_R // self.shape.top_k
        return row_ids_R.int(), slots.view_as(ids_TK).int(), num_rows

    @cached_property
    def offsets_E(self) -> Tensor:
        """Running sum of the experts' rows, int32."""
        counts_E = torch.bincount(self.choice[1].flatten(), minlength=self.shape.num_experts)
        return counts_E.cumsum(0).to(torch.int32)

    @cached_property
    def weights_R(self) -> Tensor:
        return torch.rand(self.shape.rows, device=self.device)

    @cached_property
    def h_RC(self) -> Tensor:
        return self.random(self.shape.rows, 2 * self.shape.hidden_dim)


@dataclass(frozen=True, slots=True)
class Work:
    """An op on its inputs.

    Attributes:
        run: the op.
        plain: the baseline.
        num_bytes: the fewest bytes to move, or None if arithmetic is the limit.
        num_flops: number of floating-point operations if they are the limit.
        baseline: name of `plain`.
    """

    run: harness.Call
    plain: harness.Call
    num_bytes: int | None = None
    num_flops: int | None = None
    baseline: str = "plain torch"


@dataclass(frozen=True, slots=True)
class Op:
    """The setup of an op, and the test file that must pass before it is measured."""

    build: Callable[[Inputs], Work]
    file: str

    @property
    def name(self) -> str:
        """The op's name in records."""
        return self.build.__name__


def make_params(ops: tuple[Op, ...]) -> list[Any]:
    """Return the ops as parameters of a benchmark that is proven by their test files."""
    return [pytest.param(op, id=op.name, marks=pytest.mark.proven_by(op.file)) for op in ops]


def backward(op: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor) -> harness.Call:
    """Return a call that computes gradients of the inputs; the forward runs here, once."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        found = op(*leaves)
    outputs = [y for y in ([found] if isinstance(found, Tensor) else found) if y.requires_grad]
    grads = [torch.randn_like(y) for y in outputs]
    return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)


@torch.no_grad()
def run_op(op: Op, shape: Shape, routing: str, session: Session, ceilings: Ceilings) -> None:
    """Measure the op and its baseline in alternation, and report the op's row."""
    device = session.device
    backend = "triton" if device.type == "cuda" else "reference"
    if session.backends and backend not in session.backends:
        pytest.skip(f"kernels run as {backend} here")
    work = op.build(Inputs(shape, device))
    timings = harness.time_variants(
        {"run": work.run, "plain": work.plain},
        device=device,
        effort=replace(session.effort, seconds=session.effort.seconds / 4),
        lead_ms=LEAD_MS,
    )
    ms, baseline_ms = timings["run"].ms, timings["plain"].ms
    rates: dict[str, float] = {}
    if work.num_flops:
        tflops = work.num_flops / ms / 1e9
        rates = {"tflops": tflops, "fraction": tflops / ceilings.tflops}
    elif work.num_bytes:
        gbps = work.num_bytes / ms / 1e6
        rates = {"gbps": gbps, "fraction": gbps / ceilings.gbps}
    session.add(
        Row(
            op=op.name,
            shape=shape.name,
            routing=routing,
            backend=backend,
            peak_bytes=harness.measure_peak(work.run, device=device),
            launches=harness.count_launches(work.run, device=device),
            syncs=harness.count_syncs(work.run, device=device),
            **rates,
            **records.make_timing_fields(timings["run"], baseline=work.baseline, ms=baseline_ms),
        )
    )
