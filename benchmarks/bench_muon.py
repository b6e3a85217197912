"""A step of Muon over a whole model, against AdamW and against torch's Muon matrix by matrix.

    muon         moecore.train.Muon for the matrices, moecore.train.AdamW for the rest
    adamw        moecore.train.AdamW for all
    torch_muon   torch.optim.Muon, with gate, up and down of each expert as parameters; torch's
                 fused AdamW for the rest

All of them step the same fp32 weights with the same fp32 gradients, of 6 layers of Qwen3-30B-A3B on
a GPU, in the same rounds. TFLOP/s count Newton-Schulz: 2 m^2 (2 l + m) per step and matrix, with
shorter side m and longer side l. `peak_bytes` is memory allocated during a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks import harness, records
from benchmarks.records import Row
from benchmarks.session import Ceilings, Session
from moecore.models import Decoder, DecoderConfig, preset
from moecore.train import AdamW, Muon, assign_matrices
from moecore.train.optim.matrices import MatrixAssignment, MatrixLayout

LAYERS = {"cuda": 6, "cpu": 2}
PRESET = {"cuda": "qwen3-30b-a3b", "cpu": "tiny"}
LR = 1e-6  # weights stay where they are over hundreds of steps
NS_STEPS = 5
Step = Callable[[], None]


def make_model(session: Session) -> tuple[str, Decoder]:
    """Return the name of the model, and the model with gradients."""
    kind = session.device.type
    config: DecoderConfig = replace(preset(PRESET[kind]), num_layers=LAYERS[kind])
    model = Decoder(config, device=session.device)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    return f"{PRESET[kind]}-{LAYERS[kind]}-layers", model


def split_matrices(param: Tensor, layout: MatrixLayout) -> Iterable[nn.Parameter]:
    """Yield the matrices of a parameter as parameters with two dims that share its memory."""
    assert param.grad is not None
    values, grads = layout.view_as_matrices(param.detach()), layout.view_as_matrices(param.grad)
    for part in layout.list_parts(param):
        rows = slice(int(part.rows[0]), int(part.rows[-1]) + 1)
        columns = slice(int(part.columns[0]), int(part.columns[-1]) + 1)
        for value, grad in zip(values[:, rows, columns], grads[:, rows, columns], strict=True):
            matrix = nn.Parameter(value)
            matrix.grad = grad
            yield matrix


def make_steps(model: Decoder, assignment: MatrixAssignment) -> dict[str, Step]:
    """Return the step of each optimizer by name."""
    matrices = [m for p, layout in assignment.matrices.items() for m in split_matrices(p, layout)]
    torch_muon = torch.optim.Muon(
        matrices, lr=LR, ns_steps=NS_STEPS, adjust_lr_fn="match_rms_adamw"
    )
    ways: dict[str, list[torch.optim.Optimizer]] = {
        "muon": [Muon(assignment, lr=LR, ns_steps=NS_STEPS), AdamW(assignment.adamw_params, lr=LR)],
        "adamw": [AdamW(model.parameters(), lr=LR)],
        "torch_muon": [torch_muon, torch.optim.AdamW(assignment.adamw_params, lr=LR, fused=True)],
    }

    def step_of(optimizers: list[torch.optim.Optimizer]) -> Step:
        def step() -> None:
            for optimizer in optimizers:
                optimizer.step()

        return step

    return {name: step_of(optimizers) for name, optimizers in ways.items()}


def count_newton_schulz_flops(assignment: MatrixAssignment) -> int:
    """Return the FLOP of Newton-Schulz in one step."""
    total = 0
    for layout in assignment.matrices.values():
        for shape in layout.shapes:
            short, long = sorted(shape)
            total += layout.batch * NS_STEPS * 2 * short**2 * (2 * long + short)
    return total


@pytest.mark.proven_by("tests/train/optim/test_muon.py")
def test_muon_step(session: Session, ceilings: Ceilings) -> None:
    name, model = make_model(session)
    assignment = assign_matrices(model)
    steps = make_steps(model, assignment)
    for step in steps.values():
        step()  # makes state
    timings = harness.time_variants(steps, device=session.device, effort=session.effort)
    base = timings["torch_muon"]
    flops = count_newton_schulz_flops(assignment)
    for way, step in steps.items():
        has_matrices = way != "adamw"
        tflops = flops / timings[way].ms / 1e9 if has_matrices else None
        row = Row(
            op=f"step_{way}",
            shape=name,
            routing="-",
            backend=way,
            **records.make_timing_fields(timings[way]),
            baseline="torch.optim.Muon",
            baseline_ms=base.ms,
            ratio=timings[way].ms / base.ms,
            tflops=tflops,
            fraction=None if tflops is None else tflops / ceilings.tflops,
            peak_bytes=harness.measure_peak(step, device=session.device),
            launches=harness.count_launches(step, device=session.device),
            syncs=harness.count_syncs(step, device=session.device),
        )
        session.add(row)
    assert all(param.isfinite().all() for param in model.parameters())
