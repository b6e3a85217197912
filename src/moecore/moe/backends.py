"""Backends that multiply the experts' matrices, selected by name.

X are the source rows and H is FC1's output.

"triton"      moecore's kernels for Hopper; saves X and H for backward; no host sync
"torch"       torch's grouped_mm, moecore's row movers; saves X and H; no host sync in bf16 on
              Hopper and datacenter Blackwell, where grouped_mm has no host sync
"te"          Transformer Engine's product, moecore's row movers; saves X and H; one host sync
"sequential"  one product per expert, the reference; saves what autograd saves; one host sync
"auto"        "te" for Transformer Engine recipes. "triton" for gated experts that it can multiply,
              otherwise "torch": "triton" was faster at every shape of benchmarks/results. In a
              layer without parallelize_moe, "sequential" if neither can multiply the experts
              (fp64, rows that are not a multiple of 16 bytes). parallelize_moe refuses these.

"triton", "torch", "te" and "auto" run `kernels/experts/expert_mlp.py`. For experts with biases or
an `own_activation` they run torch's products under autograd instead ("te" refuses these experts).
With "triton" a NaN in one expert's first rows also reaches the weight gradient of the preceding
expert (`kernels/grouped/wgrad.py`).

Legend: S source rows, R expert rows, D model dim, F hidden dim of this rank, C columns of FC1 (2F
with a gate, otherwise F), e local experts. "sequential" and experts with biases move rows in plain
PyTorch (`gather_rows_by_index`, `sum_rows_by_index`). `kernels/rows/move.py` is faster.
"""

import warnings
from collections.abc import Callable
from typing import Annotated, Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from moecore.base.fields import OneOf, check_arguments
from moecore.base.registry import Registry
from moecore.base.streams import record_host_wait
from moecore.kernels.common import warn_on_fallback
from moecore.kernels.experts.contract import ExpertSpec, ExpertWeights, LowRankUpdate, ProductsName
from moecore.kernels.experts.products import find_products_problem, make_recipe_error
from moecore.kernels.rows.activation import ActivationOptions, activate_rows, weighted_activation
from moecore.kernels.rows.index import ExpertIndex
from moecore.kernels.rows.move import gather_rows, sum_rows
from moecore.moe.records import ExpertInput, convert_to_summed_input

Computation = Callable[[ExpertInput, ExpertWeights, ActivationOptions], Tensor]


def register_expert_backend(name: str, computation: Computation) -> None:
    """Register a function that computes a rank's experts, as a value of `expert_backend`.

    Call it on every rank.

    Args:
        name: a new name.
        computation: called with the `ExpertInput`, the local experts' matrices and the activation;
            returns y_SD, each source row's sum over local experts. Autograd computes its backward.
            CUDA graphs do not capture it, because it may synchronise with the host. FP8 and
            recomputation of FC1 are not supported.

    Raises:
        ValueError: when the name is already registered, or the computation is not a function.
    """
    check_arguments(register_expert_backend, locals())

    def compute(inp: ExpertInput, weights: ExpertWeights, options: ActivationOptions) -> Tensor:
        return computation(convert_to_summed_input(inp), weights, options)

    EXPERT_BACKENDS.register(name, compute)


def check_backend(backend: str, spec: ExpertSpec) -> None:
    """Raise ValueError if no backend has this name, or the backend cannot compute these experts."""
    if backend not in EXPERT_BACKENDS:
        names = ", ".join(map(repr, EXPERT_BACKENDS))
        raise ValueError(f"expert_backend ({backend!r}) must be one of {names}")
    if EXPERT_BACKENDS[backend] is None:
        problem = find_products_problem(cast(ProductsName, backend), spec)
    else:
        problem = None if spec.recipe is None else make_recipe_error(backend, spec.recipe)
    if problem is not None:
        raise ValueError(problem)


def find_backend_computation(
    backend: str, spec: ExpertSpec, *, needs_autograd: bool
) -> Computation | None:
    """Return the function that a backend name selects for these experts; None = `expert_mlp`."""
    is_floating = all(dtype.is_floating_point for dtype in spec.dtypes or ())
    may_group = backend == "auto" and spec.recipe is None and is_floating
    if may_group and (problem := spec.find_grouped_problem()) is not None:
        warnings.warn(f"experts are multiplied one by one, slowly: {problem}", stacklevel=2)
        return _compute_expert_by_expert
    return EXPERT_BACKENDS[backend] or (_compute_under_autograd if needs_autograd else None)


def _compute_under_autograd(
    inp: ExpertInput, weights: ExpertWeights, activation_options: ActivationOptions
) -> Tensor:
    """Return y_SD by torch's grouped_mm, row moves and activation under autograd."""
    inp = convert_to_summed_input(inp)
    rows_SD, index = inp.rows.values, inp.index
    assert index.row_ids_R is not None
    check_backend("torch", ExpertSpec.from_weights(inp.rows, weights, activation_options))
    warn_on_fallback(rows_SD, "an expert with biases or an activation of its own")
    row_map = (index.row_ids_R, index.slots_SK, index.num_rows)
    rows_R = torch.arange(index.row_ids_R.numel(), device=rows_SD.device)
    is_row_R1 = (rows_R < index.num_rows)[:, None]
    last = index.offsets_e.numel() - 1
    expert_R = torch.searchsorted(index.offsets_e, rows_R.int(), right=True).clamp(max=last)

    # grouped_mm leaves rows past num_rows uninitialised, in forward and in the gradient of its
    # input; a `where` on all sides keeps that garbage, NaN included, out of every result.
    x_RD = gather_rows(rows_SD, *row_map)
    x_RD = torch.where(is_row_R1, x_RD, 0)
    h_RC = _compute_grouped_matmul(x_RD, weights.w1_eCD, weights.update1, index)
    h_RC = torch.where(is_row_R1, h_RC, 0)
    if weights.b1_eC is not None:
        h_RC = h_RC + gather_rows_by_index(weights.b1_eC, expert_R)
    a_RF = weighted_activation(h_RC, index.weights_R, index.num_rows, activation_options)
    y_RD = _compute_grouped_matmul(a_RF, weights.w2_eDF, weights.update2, index)
    y_RD = torch.where(is_row_R1, y_RD, 0)
    if weights.b2_eD is not None:
        weights_R1 = index.weights_R[:, None]
        y_RD = y_RD + (gather_rows_by_index(weights.b2_eD, expert_R) * weights_R1).to(y_RD.dtype)
    return sum_rows(y_RD, *row_map)


def _compute_grouped_matmul(
    x_RI: Tensor, w_eOI: Tensor, lora_update: LowRankUpdate | None, index: ExpertIndex
) -> Tensor:
    """Return [R, O]: x @ (w + b @ a)^T with each row's expert, with b @ a from `lora_update`.

    Rows from `index.num_rows` on are uninitialised.
    """
    y_RO = grouped_mm(x_RI, w_eOI.transpose(1, 2), offs=index.offsets_e)
    if lora_update is None:
        return y_RO
    offs = index.offsets_e if index.offsets_g is None else index.offsets_g
    u_Rr = grouped_mm(x_RI, lora_update.a_erI.transpose(1, 2), offs=offs)
    return y_RO + grouped_mm(u_Rr, lora_update.b_eOr.transpose(1, 2), offs=offs)


def _compute_expert_by_expert(
    inp: ExpertInput, weights: ExpertWeights, activation_options: ActivationOptions
) -> Tensor:
    """Return y_SD, computed by one matmul per expert and matrix: the reference. One host sync."""
    inp = convert_to_summed_input(inp)
    rows_SD, index = inp.rows.values, inp.index
    assert index.row_ids_R is not None
    offsets_g = index.offsets_e if index.offsets_g is None else index.offsets_g
    g, R = offsets_g.shape[0], index.row_ids_R.shape[0]
    adapters = g // index.offsets_e.shape[0]
    if offsets_g.is_meta:  # loads are even
        record_host_wait()
        stops = [R * i // g for i in range(1, g + 1)]
    else:
        stops = offsets_g.tolist()
    parts = []
    for i, (start, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True)):
        e = i // adapters
        x_RD = gather_rows_by_index(rows_SD, index.row_ids_R[start:stop])
        weights_R1 = index.weights_R[start:stop, None]
        h_RC = x_RD @ _compute_expert_matrix(weights.w1_eCD[e], weights.update1, i).T
        if weights.b1_eC is not None:
            h_RC = h_RC + weights.b1_eC[e]
        a_RF = activate_rows(h_RC, activation_options) * weights_R1
        y_RD = a_RF.to(x_RD.dtype) @ _compute_expert_matrix(weights.w2_eDF[e], weights.update2, i).T
        if weights.b2_eD is not None:
            y_RD = y_RD + (weights.b2_eD[e] * weights_R1).to(y_RD.dtype)
        parts.append(y_RD)
    return sum_rows_by_index(torch.cat(parts), index.row_ids_R[: stops[-1]], rows_SD.shape[0])


# None = products of `kernels/experts/products.py`.
EXPERT_BACKENDS: Registry[Computation | None] = Registry(
    "expert_backend",
    {**dict.fromkeys(("auto", "triton", "torch", "te")), "sequential": _compute_expert_by_expert},
)
ExpertBackend = Annotated[
    Literal["auto", "triton", "torch", "te", "sequential"] | str, OneOf(EXPERT_BACKENDS)
]


def _compute_expert_matrix(w_OI: Tensor, update: LowRankUpdate | None, group_idx: int) -> Tensor:
    if update is None:
        return w_OI
    return w_OI + update.b_eOr[group_idx] @ update.a_erI[group_idx]


class _GatherOrSumRows(torch.autograd.Function):
    """Gathers rows by index, or adds rows to sums by index; each is the other's backward.

    Autograd would save the fp32 rows that `index_add` reads; this function saves only the index.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, row_ids_R: Tensor, num_sums: int | None) -> Tensor:
        """Return x[row_ids_R], or with `num_sums` the sums of the rows of x by index."""
        ctx.save_for_backward(row_ids_R)
        ctx.num_sums = x.shape[0] if num_sums is None else None
        return _gather_or_sum_rows(x, row_ids_R, num_sums)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gather_or_sum_rows(grads[0], ctx.saved_tensors[0], ctx.num_sums), None, None


def _gather_or_sum_rows(x: Tensor, row_ids_R: Tensor, num_sums: int | None) -> Tensor:
    """Return x[row_ids_R]; with `num_sums`, sums [num_sums, ...]: out[row_ids_R[r]] += x[r]."""
    if num_sums is None:
        return x.index_select(0, row_ids_R)
    dtype = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(num_sums, *x.shape[1:], dtype=dtype, device=x.device)
    return out.index_add_(0, row_ids_R, x.to(dtype)).to(x.dtype)


def gather_rows_by_index(x_SD: Tensor, row_ids_R: Tensor) -> Tensor:
    """Return a copy of the rows x_SD[row_ids_R]; backward sums their gradients in fp32."""
    return _GatherOrSumRows.apply(x_SD, row_ids_R, None)  # type: ignore[no-any-return]


def sum_rows_by_index(y_RD: Tensor, row_ids_R: Tensor, num_rows: int) -> Tensor:
    """Return [num_rows, D]: out[s] is the fp32 sum of y_RD[r] over all r with row_ids_R[r] == s."""
    # Not bit-reproducible on CUDA: the adds are atomic.
    return _GatherOrSumRows.apply(y_RD, row_ids_R, num_rows)  # type: ignore[no-any-return]
