"""How the experts' matrices are multiplied: one signature, one choice by name.

    (ExpertInput, ExpertWeights) -> y_SD

"triton"      moecore's kernels for Hopper; keeps X and H; no host sync
"torch"       torch's grouped product, moecore's row movers; keeps X and H; no host sync in bf16
              on Hopper and datacenter Blackwell, where that product has none
"te"          Transformer Engine's grouped linear; keeps what that keeps; one host sync
"sequential"  one product per expert, the oracle; keeps what autograd keeps; one host sync
"auto"        "triton" for gated experts that it can multiply, else "torch": it was faster at every
              shape of docs/benchmarks.md

With "triton" a NaN in one expert's first rows reaches the weight gradient of the expert before it,
too (`kernels/grouped/wgrad.py`).

Legend: S source rows, R expert rows, D model dim, F hidden dim of this rank, C columns of FC1 (2F
with a gate, else F), e local experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from moecore._compat import grouped_mm
from moecore.config import MoEConfig
from moecore.kernels.common import INTERPRET, has_hopper_kernels, warn_plain
from moecore.kernels.experts.expert_mlp import ExpertMLPOptions, ExpertRows, GradSinks, expert_mlp
from moecore.kernels.rows.move import gather_rows, sum_rows
from moecore.moe.activation import activate, activation_options
from moecore.moe.dispatch.base import ExpertInput, UnsummedRows, own_sums, with_rows
from moecore.moe.experts_te import check_te, te_experts
from moecore.moe.plain_rows import gather_plain, sum_plain

ExpertBackend = Literal["auto", "triton", "torch", "te", "sequential"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights:
    """One rank's experts, in the dtype of compute.

    Attributes:
        w1_eCD: FC1, gate rows then up rows, or the two alternating.
        w2_eDF: FC2.
        b1_eC, b2_eD: biases, or None.
        interleaved: gate and up rows of FC1 alternate.
        main_grads: what the weights' gradients are added to instead of reaching autograd.
        sinks: what may take the two matrices' gradients past autograd ("triton" and "torch", no
            biases); shaped like the weights.
    """

    w1_eCD: Tensor
    w2_eDF: Tensor
    b1_eC: Tensor | None = None
    b2_eD: Tensor | None = None
    interleaved: bool = False
    main_grads: tuple[Tensor | None, Tensor | None] = (None, None)
    sinks: GradSinks = (None, None)


def check_backend(
    name: str, config: MoEConfig, *, transposed: bool = False, interleaved: bool = False
) -> None:
    """Raise a ValueError for a backend that does not exist or cannot compute these experts.

    Args:
        name: the backend.
        config: the layer.
        transposed: matrices are stored as [e, in, out].
        interleaved: gate and up rows of FC1 alternate.
    """
    if name not in get_args(ExpertBackend):
        shown = ", ".join(repr(n) for n in get_args(ExpertBackend))
        raise ValueError(f"experts ({name!r}) must be one of {shown}")
    if name == "triton":
        for field, refused in (
            ("MoEConfig.fc1_bias", config.fc1_bias),
            ("MoEConfig.fc2_bias", config.fc2_bias),
            ("ExpertLayout.transposed", transposed),
            ("interleaved ExpertLayout.gate_up", interleaved and config.gated),
        ):
            if refused:
                raise ValueError(
                    f"{field} (True) must be False for experts ('triton'): use experts='torch'"
                )


def check_compute(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise a ValueError when a backend cannot multiply in this dtype or on this device.

    Args:
        name: the backend.
        dtype: of rows and weights in compute.
        device: of both.
    """
    if name == "te":
        check_te(dtype, device)
    if name == "triton":
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"dtype of the experts ({dtype}) must be torch.bfloat16 or torch.float16 for "
                "experts ('triton'): convert the model or use experts='torch'"
            )
        if not (INTERPRET or has_hopper_kernels(device)):
            raise ValueError(
                f"device of the experts ({device}) must be a Hopper GPU with Triton for experts "
                "('triton'): use experts='torch'"
            )


def run_experts(
    name: ExpertBackend,
    inp: ExpertInput,
    weights: ExpertWeights,
    config: MoEConfig,
    *,
    recompute_fc1: bool = False,
) -> Tensor | UnsummedRows:
    """Return y_SD, the weighted sum over the local experts of each source row.

    "triton" and "torch" without biases leave the sum to a dispatcher that does it itself.

    Args:
        name: which backend.
        inp: what a dispatcher gives.
        weights: this rank's experts.
        config: names the activation.
        recompute_fc1: keep X alone for backward ("triton" and "torch" without biases).

    Raises:
        ValueError: when the backend cannot multiply matrices of this size, dtype or layout.
    """
    if name == "auto":
        name = "triton" if _suits_triton(inp, weights, config) else "torch"
    biased = weights.b1_eC is not None or weights.b2_eD is not None
    if name in ("sequential", "te") or biased:
        if inp.again is not None:
            raise ValueError(
                f"NVLinkOptions.keep_rows (False) must be True for experts ({name!r}, with biases: "
                f"{biased}), which keep their rows: set it, or use 'triton' or 'torch' without "
                "biases"
            )
        inp = own_sums(inp)
    if torch.compiler.is_compiling():
        inp = with_rows(inp)
    if name == "sequential":
        return _sequential(inp, weights, config)
    if name == "triton":  # te_experts checks for itself
        check_compute(name, inp.dtype, inp.rows_SD.device)
    _, dim, hidden_dim = weights.w2_eDF.shape
    check_alignment(dim, hidden_dim, weights.w2_eDF.dtype)
    if name == "te":
        fc1, fc2 = (weights.w1_eCD, weights.b1_eC), (weights.w2_eDF, weights.b2_eD)
        return te_experts(inp, fc1, fc2, config, weights.interleaved)
    if biased:
        return _with_biases(inp, weights, config)
    rows = ExpertRows(
        row_ids_R=inp.row_ids_R,
        weights_R=inp.weights_R,
        slots_SK=inp.slots_SK,
        offsets_e=inp.offsets_e,
    )
    options = ExpertMLPOptions(
        activation=activation_options(config, interleaved=weights.interleaved),
        products="triton" if name == "triton" else "torch",
        keep_h=not recompute_fc1,
    )
    matrices = (weights.w1_eCD, weights.w2_eDF)
    y = expert_mlp(
        inp.rows_SD,
        *matrices,
        rows,
        options,
        main_grads=weights.main_grads,
        sinks=weights.sinks,
        expert_rows_RD=inp.expert_rows_RD,
        sender=inp.sender,
        again=inp.again,
    )
    return y if inp.expert_rows_RD is None else UnsummedRows(y)


def _suits_triton(inp: ExpertInput, weights: ExpertWeights, config: MoEConfig) -> bool:
    """Whether "triton" computes these experts, in the form in which it was measured."""
    matrices = (weights.w1_eCD, weights.w2_eDF)
    dtypes = {t.dtype for t in (inp, *matrices)}
    return (
        has_hopper_kernels(inp.rows_SD.device)
        and config.gated
        and not weights.interleaved
        and weights.b1_eC is None
        and weights.b2_eD is None
        and dtypes in ({torch.bfloat16}, {torch.float16})
        and all(m.is_contiguous() for m in matrices)
        and not any(size % 8 for size in weights.w2_eDF.shape[1:])
    )


def _with_biases(inp: ExpertInput, weights: ExpertWeights, config: MoEConfig) -> Tensor:
    """The "torch" backend under autograd, which keeps more than X and H."""
    warn_plain(inp.rows_SD, "an expert with biases")
    index = (inp.row_ids_R, inp.slots_SK, inp.num_rows)
    rows_R = torch.arange(inp.row_ids_R.numel(), device=inp.rows_SD.device)
    used_R1 = (rows_R < inp.num_rows)[:, None]
    last = inp.offsets_e.numel() - 1
    expert_R = torch.searchsorted(inp.offsets_e, rows_R.int(), right=True).clamp(max=last)

    # grouped_mm leaves rows past num_rows uninitialised, in forward and in the gradient of its
    # input; a `where` on all sides keeps that garbage, NaN included, out of every result.
    x_RD = gather_rows(inp.rows_SD, *index)
    x_RD = torch.where(used_R1, x_RD, 0)
    h_RC = grouped_mm(x_RD, weights.w1_eCD.transpose(1, 2), offs=inp.offsets_e)
    h_RC = torch.where(used_R1, h_RC, 0)
    if weights.b1_eC is not None:
        h_RC = h_RC + gather_plain(weights.b1_eC, expert_R)
    weights_R1 = inp.weights_R[:, None]
    a_RF = activate(h_RC, config, interleaved=weights.interleaved) * weights_R1
    a_RF = torch.where(used_R1, a_RF.to(x_RD.dtype), 0)
    y_RD = grouped_mm(a_RF, weights.w2_eDF.transpose(1, 2), offs=inp.offsets_e)
    y_RD = torch.where(used_R1, y_RD, 0)
    if weights.b2_eD is not None:
        y_RD = y_RD + (gather_plain(weights.b2_eD, expert_R) * weights_R1).to(y_RD.dtype)
    return sum_rows(y_RD, *index)


def _sequential(inp: ExpertInput, weights: ExpertWeights, config: MoEConfig) -> Tensor:
    stops = inp.offsets_e.tolist()  # host sync: the oracle slices by expert
    parts = []
    for i, (start, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True)):
        x_RD = gather_plain(inp.rows_SD, inp.row_ids_R[start:stop])
        weights_R1 = inp.weights_R[start:stop, None]
        h_RC = x_RD @ weights.w1_eCD[i].T
        if weights.b1_eC is not None:
            h_RC = h_RC + weights.b1_eC[i]
        a_RF = activate(h_RC, config, interleaved=weights.interleaved) * weights_R1
        y_RD = a_RF.to(x_RD.dtype) @ weights.w2_eDF[i].T
        if weights.b2_eD is not None:
            y_RD = y_RD + (weights.b2_eD[i] * weights_R1).to(y_RD.dtype)
        parts.append(y_RD)
    return sum_plain(torch.cat(parts), inp.row_ids_R[: stops[-1]], inp.rows_SD.shape[0])


def check_alignment(dim: int, hidden_dim: int, dtype: torch.dtype) -> None:
    """Raise a ValueError when grouped products cannot multiply experts of this size.

    Args:
        dim: model dim D.
        hidden_dim: hidden dim of this rank, hidden_dim / etp.
        dtype: dtype of the weights in compute.
    """
    for name, size in (("dim", dim), ("hidden_dim / etp", hidden_dim)):
        if size * dtype.itemsize % 16:
            raise ValueError(
                f"MoEConfig.{name} ({size}) must be a multiple of {16 // dtype.itemsize} in "
                f"{dtype} for grouped matmuls (16 bytes): pad it or use experts='sequential'"
            )
