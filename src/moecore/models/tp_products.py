"""Matmuls fused with the all-gather or reduce-scatter of tensor parallelism.

Legend: B sequences, T tokens of a sequence, G tp ranks, t = T / G tokens of one rank, D model dim,
N features of this rank's part of a weight.

    apply_column_linears   x_BtD -> all-gather -> x_BTD @ w_ND^T of each weight -> y_BTN
    apply_row_linear       x_BTN @ w_DN^T -> partial y_BTD -> sum of all ranks' parts -> y_BtD

Sequentially, `TensorParallel.gather_tokens` ends before the matmul begins, or `reduce_scatter`
starts after the matmul. Sliced, collective and matmul overlap in slices of a rank's t tokens: copy
engines transfer one slice, without SMs, while the matmul of the previous slice runs. This needs
torch's symmetric memory and large slices. Collective and matmuls are then one autograd function,
and the backward of each function communicates as the forward of the other:

    apply_column_linears   dx_BtD = sum of all ranks' dy_BTN @ w_ND  dw_ND = dy_BTN^T @ x_BTD, saved
    apply_row_linear       dx_BTN = gathered dy_BTD @ w_DN           dw_DN = dy_BTD^T @ x_BTN, saved

Both variants save the same tensors for backward, round each rank's partial result to the dtype, sum
in fp32 and round once. The sliced variant adds the partial results of several weights before it
sends them.

Sequences are exchanged one after the other, so their slices need no copy to be contiguous.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moecore.base.params import get_local_param
from moecore.base.regions import is_recomputing, run_and_save
from moecore.base.torch_private import (
    all_gather_and_consume,
    get_autocast_dtype,
    is_plain_eager,
    list_module_hooks,
    produce_and_all_to_all,
)
from moecore.kernels.common import is_gpu
from moecore.kernels.experts.contract import GradSink, GradTarget, find_sink
from moecore.kernels.linear import PlainProducts
from moecore.kernels.meta import record_launch
from moecore.models.tensor_parallel import TensorParallel
from moecore.moe.dispatch.peer_memory import can_meta_peers_access_memory
from moecore.precision.plain import PLAIN_FORWARDS, ProductLinear

# The least bytes of a sequence's slice [t, D] that a sliced exchange moves: below, its barriers and
# smaller products take longer than what it hides.
MIN_SLICE_BYTES = 32 << 20


class SlicedExchange(NamedTuple):
    """Two collectives that run the caller's matmul on one rank's slice during transfers.

    all_gather(x_tD, consume, x_TD, group) all-gathers x_tD into x_TD, and calls consume(slice_tD,
    rank) for each rank's slice. all_to_all(produce, parts_TD, group) calls produce(rank, slice_tD),
    which fills the slice to send to that rank. The received slices are written to parts_TD.
    """

    all_gather: Callable[[Tensor, Callable[[Tensor, int], None], Tensor, dist.ProcessGroup], None]
    all_to_all: Callable[[Callable[[int, Tensor], None], Tensor, dist.ProcessGroup], None]


# Exchanges of a dry run, by the names of their launches.
GATHER_SLICES, SEND_SLICES = "all_gather of slices", "all_to_all of slices"
# Of torch's workspace, which a group has once, as large as its largest exchange asks.
WORKSPACE_SLICES = {GATHER_SLICES: 1, SEND_SLICES: 2}


def compute_workspace_bytes(launch_name: str, num_ranks: int, exchange_bytes: int) -> int:
    """Return the bytes of symmetric memory that a rank needs for a sliced exchange.

    `launch_name` is a key of `WORKSPACE_SLICES`. `exchange_bytes` is the number of bytes that the
    launch records in a dry run: 2 * (num_ranks - 1) slices.
    """
    return WORKSPACE_SLICES[launch_name] * exchange_bytes // (2 * (num_ranks - 1))


def _gather_on_meta(
    x_tD: Tensor, consume: Callable[[Tensor, int], None], x_TD: Tensor, group: dist.ProcessGroup
) -> None:
    """In a dry run, record the launch of an all-gather, then call `consume` for each slice."""
    record_launch(GATHER_SLICES, group.size(), 2 * (x_TD.nbytes - x_tD.nbytes))
    for rank, slice_tD in enumerate(x_TD.chunk(group.size())):
        consume(slice_tD, rank)


def _send_on_meta(
    produce: Callable[[int, Tensor], None], parts_TD: Tensor, group: dist.ProcessGroup
) -> None:
    """In a dry run, call `produce(rank, out)` for each slice; record an all-to-all's launch."""
    slices = parts_TD.chunk(group.size())
    for rank, slice_tD in enumerate(slices):
        produce(rank, slice_tD)
    record_launch(SEND_SLICES, group.size(), 2 * (parts_TD.nbytes - slices[0].nbytes))


ON_META = SlicedExchange(_gather_on_meta, _send_on_meta)
SYMMETRIC_MEMORY = SlicedExchange(all_gather_and_consume, produce_and_all_to_all)


def apply_column_linears(
    x_BtD: Tensor, linears: Sequence[nn.Linear], tp: TensorParallel | None
) -> list[Tensor]:
    """All-gather tokens over tp (None = off); return each linear's y_BTN, sharded by features."""
    if tp is None:
        return [linear(x_BtD) for linear in linears]
    exchange = find_sliced_exchange(tp, x_BtD, x_BtD.shape[1], x_BtD.shape[2], linears)
    if exchange is None:
        x_BTD = tp.gather_tokens(x_BtD)
        return [linear(x_BTD) for linear in linears]
    ys_BTN = run_and_save(_apply_sliced, _ColumnProducts, exchange, tp, x_BtD, linears)
    return list(ys_BTN)


def apply_row_linear(x_BTN: Tensor, linear: nn.Linear, tp: TensorParallel | None) -> Tensor:
    """Apply a linear, sharded by input features over tp (None = off); reduce-scatter to y_BtD."""
    if tp is None:
        y_BTD: Tensor = linear(x_BTN)
        return y_BTD
    num_tokens = x_BTN.shape[1] // tp.size
    exchange = find_sliced_exchange(tp, x_BTN, num_tokens, linear.out_features, (linear,))
    if exchange is None:
        return tp.reduce_scatter(linear(x_BTN))
    y_BtD: Tensor = run_and_save(_apply_sliced, _RowProduct, exchange, tp, x_BTN, (linear,))
    return y_BtD


def find_sliced_exchange(
    tp: TensorParallel, x: Tensor, num_tokens: int, dim: int, linears: Sequence[nn.Linear]
) -> SlicedExchange | None:
    """Return collectives that overlap the linears' matmuls slice by slice; None = no overlap.

    Each rank sends [num_tokens, dim] per sequence of x. The result is equal on all ranks.
    """
    if not is_plain_eager() or is_recomputing():
        return None
    if not is_slice_large_enough(num_tokens * dim * x.element_size()):
        return None
    if any(find_overlap_problem(linear, x) is not None for linear in linears):
        return None
    return select_sliced_exchange(tp, x)


def is_slice_large_enough(slice_bytes: int) -> bool:
    """Whether the overlap of transfer and matmul saves time for a slice of `slice_bytes` bytes."""
    return slice_bytes >= MIN_SLICE_BYTES


def select_sliced_exchange(tp: TensorParallel, x: Tensor) -> SlicedExchange | None:
    """Return the overlapping collectives for the device of x; None = no overlap is possible.

    On GPUs the first call for a group is collective. While a CUDA graph is captured the result is
    None, because a longer sequence would replace the workspace whose address the graph contains.
    """
    if x.is_meta:  # without `peer_problem`, which a group remembers
        return ON_META if is_gpu(x) and can_meta_peers_access_memory(tp.group) else None
    if not x.is_cuda or torch.cuda.is_current_stream_capturing() or tp.peer_problem is not None:
        return None
    return SYMMETRIC_MEMORY


def find_overlap_problem(linear: nn.Linear, x: Tensor) -> str | None:
    """Return the reason why a linear's matmul cannot overlap with a `SlicedExchange`, or None."""
    forward = type(linear).forward
    is_plain = forward in PLAIN_FORWARDS
    if isinstance(linear, ProductLinear):
        is_plain = forward is ProductLinear.forward and type(linear.products) is PlainProducts
    if not is_plain or "forward" in vars(linear) or list_module_hooks(linear):
        return "its forward is not a plain product alone"
    if linear.bias is not None:
        return "it has a bias"
    if x.dtype != linear.weight.dtype or get_autocast_dtype(x) is not None:
        return "its input and its weight differ in dtype, or autocast is on"
    return None


def _apply_sliced(
    autograd_function: type[torch.autograd.Function],
    exchange: SlicedExchange,
    tp: TensorParallel,
    x: Tensor,
    linears: Sequence[nn.Linear],
) -> Any:
    """Apply `autograd_function`, which overlaps collective and matmul, to x and local weights."""
    weights, sinks = [], list[GradSink | None]()
    for linear in linears:
        weights.append(get_local_param(linear.weight))
        defers = isinstance(linear, ProductLinear) and linear.products.defers
        sinks.append(find_sink(linear.weight, weights[-1].shape) if defers else None)
    return autograd_function.apply(_SlicedProducts(exchange, tp.group, sinks), x, *weights)


class _SlicedProducts(NamedTuple):
    """The collectives and group of one overlapped matmul, and the receivers of weight gradients."""

    exchange: SlicedExchange
    group: dist.ProcessGroup
    sinks: list[GradSink | None]  # of each weight's gradient, where linears defer it

    def gather_and_multiply(
        self, x_BtD: Tensor, weights_DN: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """All-gather x_BtD, multiply each slice by each weight; return x_BTD and all y_BTN."""
        B, t, D = x_BtD.shape
        x_BtD, G = x_BtD.contiguous(), self.group.size()
        x_BTD = x_BtD.new_empty(B, t * G, D)
        ys_BTN = [x_BtD.new_empty(B, t * G, w.shape[1]) for w in weights_DN]
        for b in range(B):
            slices = [y_BTN[b].chunk(G) for y_BTN in ys_BTN]
            multiply = partial(_multiply_slice, weights_DN, slices)
            self.exchange.all_gather(x_BtD[b], multiply, x_BTD[b], self.group)
        return x_BTD, ys_BTN

    def multiply_and_scatter(self, xs_BTN: Sequence[Tensor], ws_ND: Sequence[Tensor]) -> Tensor:
        """Multiply each x by its weight; return the reduce-scattered sum of the products, y_BtD."""
        (B, T, _), G = xs_BTN[0].shape, self.group.size()
        parts_BTD = xs_BTN[0].new_empty(B, T, ws_ND[0].shape[1])
        for b in range(B):
            slices = [x_BTN[b].chunk(G) for x_BTN in xs_BTN]
            self.exchange.all_to_all(
                partial(_sum_products, slices, ws_ND), parts_BTD[b], self.group
            )
        # torch adds 16-bit numbers in fp32.
        y_BtD: Tensor = parts_BTD.unflatten(1, (G, T // G)).sum(1)
        return y_BtD

    def compute_weight_grad(self, weight_idx: int, dy: Tensor, x: Tensor) -> Tensor | None:
        """Return dy^T @ x, the gradient of a weight; None = its `GradSink` computes it later."""
        sink, operands = self.sinks[weight_idx], (dy.flatten(0, 1), x.flatten(0, 1))
        if sink is not None and sink.defer(PlainProducts.compute_weight_grad, *operands):
            return None
        return PlainProducts.compute_weight_grad(*operands, GradTarget())


def _multiply_slice(
    weights_DN: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]], x_tD: Tensor, rank: int
) -> None:
    """Multiply rank `rank`'s slice x_tD by each weight w, into outputs[w][rank]."""
    for weight_DN, slices in zip(weights_DN, outputs, strict=True):
        torch.mm(x_tD, weight_DN, out=slices[rank])


def _sum_products(
    inputs: Sequence[Sequence[Tensor]], weights_ND: Sequence[Tensor], rank: int, y_tD: Tensor
) -> None:
    """Write to y_tD the sum of inputs[w][rank] @ weights_ND[w] over all weights w."""
    for number, (slices, weight_ND) in enumerate(zip(inputs, weights_ND, strict=True)):
        if number:
            y_tD.addmm_(slices[rank], weight_ND)
        else:
            torch.mm(slices[rank], weight_ND, out=y_tD)


class _ColumnProducts(torch.autograd.Function):
    """Autograd function of `apply_column_linears` with a sliced exchange."""

    @staticmethod
    def forward(
        ctx: Any, call: _SlicedProducts, x_BtD: Tensor, *weights_ND: Tensor
    ) -> tuple[Tensor, ...]:
        x_BTD, ys_BTN = call.gather_and_multiply(x_BtD, [w_ND.t() for w_ND in weights_ND])
        _, wants_x, *wants_weights = ctx.needs_input_grad
        saved_weights = weights_ND if wants_x else [None] * len(weights_ND)
        ctx.save_for_backward(x_BTD if any(wants_weights) else None, *saved_weights)
        ctx.call = call
        return tuple(ys_BTN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys_BTN: Tensor) -> tuple[Tensor | None, ...]:
        call, (x_BTD, *weights_ND) = ctx.call, ctx.saved_tensors
        _, wants_x, *wants_weights = ctx.needs_input_grad
        dys_BTN = tuple(dy_BTN.contiguous() for dy_BTN in dys_BTN)
        dx_BtD = call.multiply_and_scatter(dys_BTN, weights_ND) if wants_x else None
        dweights = [
            call.compute_weight_grad(i, dy_BTN, x_BTD) if wants_weights[i] else None
            for i, dy_BTN in enumerate(dys_BTN)
        ]
        return None, dx_BtD, *dweights


class _RowProduct(torch.autograd.Function):
    """Autograd function of `apply_row_linear` with a sliced exchange."""

    @staticmethod
    def forward(ctx: Any, call: _SlicedProducts, x_BTN: Tensor, weight_DN: Tensor) -> Tensor:
        _, wants_x, wants_weight = ctx.needs_input_grad
        ctx.save_for_backward(x_BTN if wants_weight else None, weight_DN if wants_x else None)
        ctx.call = call
        return call.multiply_and_scatter([x_BTN], [weight_DN.t()])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BtD: Tensor) -> tuple[Tensor | None, ...]:
        call, (x_BTN, weight_DN) = ctx.call, ctx.saved_tensors
        weights_DN = [] if weight_DN is None else [weight_DN]
        dy_BTD, dxs_BTN = call.gather_and_multiply(dy_BtD, weights_DN)
        dweight_DN = None if x_BTN is None else call.compute_weight_grad(0, dy_BTD, x_BTN)
        return None, dxs_BTN[0] if dxs_BTN else None, dweight_DN


_ColumnProducts.__name__, _RowProduct.__name__ = "moecore::column_products", "moecore::row_product"
