"""Experts(ExpertInput) -> y_SD: gather, FC1, activation x weight, FC2, sum per source row.

Legend: S source rows, R expert rows, D model dim, F hidden dim of this rank (hidden_dim / etp),
E experts, e local experts (E / ep).

The routing weight is applied before FC2, so a backward needs only the rows and FC1's output.
Two backends share the module: "grouped" (one grouped matmul per matrix) and "sequential" (a loop
over experts; the oracle, with a host sync).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from moecore._compat import grouped_mm
from moecore.config import MoEConfig
from moecore.moe.activation import activate
from moecore.moe.dispatch.base import ExpertInput, gather_rows, sum_rows
from moecore.moe.params import init_normal_, local_param, shard_parameter

ExpertBackend = Literal["grouped", "sequential"]
GateUp = Literal["split", "concatenated", "interleaved"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayout:
    """How a model stores its experts; the default is moecore's own.

    Attributes:
        w1, w2, b1, b2: parameter names of FC1, FC2 and their biases.
        transposed: matrices are [E, in, out] instead of [E, out, in].
        gate_up: where a gated FC1 keeps gate and up: "split" has a dim for them, [E, 2, F, D];
            "concatenated" stores all of gate, then all of up, [E, 2F, D]; "interleaved" alternates
            columns, [E, 2F, D]. With etp, "concatenated" needs a strided placement, which torch
            2.11 cannot gather with `full_tensor` and plain DCP refuses.
    """

    w1: str = "w1"
    w2: str = "w2"
    b1: str = "b1"
    b2: str = "b2"
    transposed: bool = False
    gate_up: GateUp = "split"

    def __post_init__(self) -> None:
        if self.transposed and self.gate_up == "split":
            raise ValueError(
                "ExpertLayout.transposed (True) must go with gate_up ('split') = 'concatenated' or "
                "'interleaved': no model stores split and transposed matrices"
            )


class Experts(nn.Module):
    """E feed-forward networks with stacked weights.

    Parameters (names and other orders from the layout): w1 [E, 2, F, D], or [E, F, D] without a
    gate; w2 [E, D, F]; with `fc1_bias` b1 [E, 2, F] or [E, F]; with `fc2_bias` b2 [E, D].

    Args:
        config: the layer.
        backend: how the matrices are multiplied.
        layout: names and order of the stored weights.
        device: device of the parameters; "meta" allocates nothing.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        backend: ExpertBackend = "grouped",
        layout: ExpertLayout | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.layout = layout or ExpertLayout()
        self.set_backend(backend)
        self.etp_rank = 0  # which slice of D this rank's part of b2 covers; set when sharded
        for name, shape in expert_shapes(config, self.layout).items():
            parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, parameter)

    def set_backend(self, backend: ExpertBackend) -> None:
        """Choose how the matrices are multiplied.

        Raises:
            ValueError: for an unknown name.
        """
        if backend not in get_args(ExpertBackend):
            names = ", ".join(repr(n) for n in get_args(ExpertBackend))
            raise ValueError(f"experts ({backend!r}) must be one of {names}")
        self.backend = backend

    def shard(self, mesh: DeviceMesh) -> None:
        """Keep this rank's experts (ep) and its part of each (etp), as DTensors. No communication.

        ep cuts the expert dim; etp cuts the hidden dim of both matrices, so that the output of FC2
        is a partial sum. b2 is cut along D instead, so that the sum over etp counts it once.

        Args:
            mesh: dims "ep" and "etp"; one of size 1 leaves no trace in the placements.
        """
        names = mesh.mesh_dim_names or ()
        kept = tuple(n for n in names if mesh.size(names.index(n)) > 1)
        for role, dim in self._hidden_dims().items():
            strided = role in ("w1", "b1") and self.is_strided
            etp = _StridedShard(dim, split_factor=2) if strided else Shard(dim)
            placements = {"ep": Shard(0), "etp": etp}
            name = getattr(self.layout, role)
            shard_parameter(self, name, mesh[kept], tuple(placements[n] for n in kept))
        self.etp_rank = mesh.get_local_rank("etp")

    @property
    def is_strided(self) -> bool:
        """Whether etp keeps a piece of gate and one of up that are no neighbours in FC1."""
        return self.config.gated and self.layout.gate_up == "concatenated"

    def _hidden_dims(self) -> dict[str, int]:
        """Role -> the dim that etp cuts, for the parameters that exist."""
        split = int(self.config.gated and self.layout.gate_up == "split")
        transposed = self.layout.transposed
        dims = {"w1": 2 if transposed else 1 + split, "w2": 1 if transposed else 2}
        if self.config.fc1_bias:
            dims["b1"] = 1 + split
        if self.config.fc2_bias:
            dims["b2"] = 1
        return dims

    def model_dim_of(self, param: nn.Parameter) -> int | None:
        """Return the dim of a matrix that runs over the model dim D; None for a bias."""
        transposed = self.layout.transposed
        if param is getattr(self, self.layout.w1):
            return 1 if transposed else param.ndim - 1
        if param is getattr(self, self.layout.w2):
            return 2 if transposed else 1
        return None

    def init_weights(self, *, std: float, key: str, seed: int) -> None:
        """Fill the weights with N(0, std^2), the same on every layout; biases become 0."""
        for name, parameter in self.named_parameters(recurse=False):
            if name in (self.layout.b1, self.layout.b2):
                nn.init.zeros_(parameter)
            else:
                init_normal_(parameter, std=std, key=f"{key}.{name}", seed=seed)

    def forward(self, inp: ExpertInput) -> Tensor:
        """Return y_SD, the weighted sum over the local experts of each source row.

        Args:
            inp: what a dispatcher gives.

        Returns:
            dtype of `inp.rows_SD`; added in fp32, rounded once. Under etp and ep a partial sum.

        Raises:
            ValueError: when "grouped" cannot multiply matrices of this size.
        """
        dtype, layout = inp.rows_SD.dtype, self.layout
        w1 = self._weight("w1", dtype).flatten(1, -2)  # split gate and up are neighbours in memory
        w2 = self._weight("w2", dtype)
        if not layout.transposed:
            w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
        b1 = self._weight("b1", dtype).flatten(1) if self.config.fc1_bias else None
        b2 = self._fc2_bias(dtype) if self.config.fc2_bias else None
        forward = _grouped if self.backend == "grouped" else _sequential
        interleaved = layout.gate_up == "interleaved"
        return forward(inp, (w1, b1), (w2, b2), self.config, interleaved)

    def _weight(self, role: str, dtype: torch.dtype) -> Tensor:
        """This rank's part of a parameter; cast only under autocast, where rows are cast too."""
        return local_param(getattr(self, getattr(self.layout, role))).to(dtype)

    def _fc2_bias(self, dtype: torch.dtype) -> Tensor:
        """b2 with zeros outside this etp rank's slice of D, so that adding over etp counts once."""
        b2_eD = self._weight("b2", dtype)
        before = self.etp_rank * b2_eD.shape[1]
        return F.pad(b2_eD, (before, self.config.dim - before - b2_eD.shape[1]))


def expert_shapes(config: MoEConfig, layout: ExpertLayout) -> dict[str, tuple[int, ...]]:
    """Return the global shape of each expert parameter by name."""
    E, D, F_ = config.num_experts, config.dim, config.hidden_dim
    columns: tuple[int, ...] = (config.fc1_dim,)
    if config.gated and layout.gate_up == "split":
        columns = (2, F_)
    w1 = (E, D, *columns) if layout.transposed else (E, *columns, D)
    w2 = (E, F_, D) if layout.transposed else (E, D, F_)
    shapes: dict[str, tuple[int, ...]] = {layout.w1: w1, layout.w2: w2}
    if config.fc1_bias:
        shapes[layout.b1] = (E, *columns)
    if config.fc2_bias:
        shapes[layout.b2] = (E, D)
    return shapes


Linear = tuple[Tensor, Tensor | None]  # weight [e, in, out] and bias [e, out]


def _grouped(
    inp: ExpertInput, fc1: Linear, fc2: Linear, config: MoEConfig, interleaved: bool
) -> Tensor:
    (w1, b1), (w2, b2) = fc1, fc2
    check_alignment(w2.shape[2], w2.shape[1], w2.dtype)
    rows_R = torch.arange(inp.row_ids_R.numel(), device=inp.rows_SD.device)
    used_R1 = (rows_R < inp.num_rows)[:, None]
    expert_R = None
    if b1 is not None or b2 is not None:
        last = inp.offsets_e.numel() - 1
        expert_R = torch.searchsorted(inp.offsets_e, rows_R.int(), right=True).clamp(max=last)

    # grouped_mm leaves rows past num_rows uninitialised, in forward and in the gradient of its
    # input; a `where` on all sides keeps that garbage, NaN included, out of every result.
    x_RD = torch.where(used_R1, gather_rows(inp.rows_SD, inp.row_ids_R), 0)
    h_RF = torch.where(used_R1, grouped_mm(x_RD, w1, offs=inp.offsets_e), 0)
    if b1 is not None and expert_R is not None:
        h_RF = h_RF + gather_rows(b1, expert_R)
    weights_R1 = inp.weights_R[:, None]
    a_RF = (activate(h_RF, config, interleaved=interleaved) * weights_R1).to(x_RD.dtype)
    a_RF = torch.where(used_R1, a_RF, 0)
    y_RD = torch.where(used_R1, grouped_mm(a_RF, w2, offs=inp.offsets_e), 0)
    if b2 is not None and expert_R is not None:
        y_RD = y_RD + (gather_rows(b2, expert_R) * weights_R1).to(y_RD.dtype)
    return sum_rows(y_RD, inp.row_ids_R, inp.rows_SD.shape[0])


def _sequential(
    inp: ExpertInput, fc1: Linear, fc2: Linear, config: MoEConfig, interleaved: bool
) -> Tensor:
    (w1, b1), (w2, b2) = fc1, fc2
    stops = inp.offsets_e.tolist()  # host sync: the oracle slices by expert
    parts = []
    for i, (start, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True)):
        x_RD = gather_rows(inp.rows_SD, inp.row_ids_R[start:stop])
        weights_R1 = inp.weights_R[start:stop, None]
        h_RF = x_RD @ w1[i]
        if b1 is not None:
            h_RF = h_RF + b1[i]
        a_RF = (activate(h_RF, config, interleaved=interleaved) * weights_R1).to(x_RD.dtype)
        y_RD = a_RF @ w2[i]
        if b2 is not None:
            y_RD = y_RD + (b2[i] * weights_R1).to(y_RD.dtype)
        parts.append(y_RD)
    return sum_rows(torch.cat(parts), inp.row_ids_R[: stops[-1]], inp.rows_SD.shape[0])


def check_alignment(dim: int, hidden_dim: int, dtype: torch.dtype) -> None:
    """Raise a ValueError when "grouped" cannot multiply experts of this size.

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
