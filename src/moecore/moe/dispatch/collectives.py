"""Collectives of the dispatchers, and checks that their ranks agree.

On meta the collectives return tensors of the right shapes, and nothing is sent.

Legend: C rows of each rank, G ranks of the group, S = G * C rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.rank_checks import DTYPES, check_collective_headers
from moecore.base.torch_private import all_gather_single, assert_async, skips_communication
from moecore.moe.pairs import Pairs, run_exchanges

TensorCollective = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]


class EqualTokenCounts:
    """Checks that all ranks have equal numbers of tokens, which padded exchanges require."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._is_first = True

    def check_num_tokens(self, num_tokens: int, device: torch.device) -> None:
        """Raise ValueError if `num_tokens` differs between ranks. Collective.

        The first call synchronises the host; later calls assert on the device.
        """
        # Every forward compares, because collectives of unequal sizes hang, abort or mix up rows.
        # After the first call, the device asserts equality before rows are sent.
        if device.type == "meta":
            return
        local_size = torch.full((1,), num_tokens, device=device, dtype=torch.int64)
        (numbers_G,) = _gather_from_ranks((local_size,), self.group)
        fix = "with CapacityConfig.pad (True): pad the batches, or set pad=False"
        if self._is_first:
            counts = numbers_G.tolist()
            if len(set(counts)) > 1:
                raise ValueError(
                    f"number of tokens ({counts} by rank of the dispatch group) must be equal {fix}"
                )
            self._is_first = False
        else:
            assert_async(
                (numbers_G == num_tokens).all(),
                f"number of tokens must be equal on all ranks of the dispatch group {fix}",
            )


class LayerCheck:
    """Checks that ranks exchange tokens of the same layer, by a number that each rank sends.

    `layer` is the layer's number and name. If `joins` is True, this rank exchanges zero tokens for
    a layer that it skips. `is_skipped` is True if all ranks skipped the layer in the last exchange.
    """

    def __init__(self, group: dist.ProcessGroup, layer: tuple[int, str]) -> None:
        self._group, (self._layer, self._name) = group, layer
        self.joins = self.is_skipped = False

    def encode_layer(self, x_TD: Tensor) -> int:
        """Return an int that encodes layer number, dtype of `x_TD`, grad mode and `joins`."""
        dtype = DTYPES.index(x_TD.dtype) if x_TD.dtype in DTYPES else len(DTYPES)
        return self._layer << 6 | dtype << 2 | torch.is_grad_enabled() << 1 | self.joins

    def check_encoded_layers(self, encoded_layers: Sequence[int]) -> None:
        """Raise ValueError on all ranks if layer, dtype or grad mode differ; set `is_skipped`."""
        self.is_skipped = all(n & 1 for n in encoded_layers)
        if len({n >> 1 for n in encoded_layers}) > 1:
            notes = [(n >> 6, n >> 2 & 15, n >> 1 & 1) for n in encoded_layers]
            formats: dict[str, Callable[[int], str]] = {
                "the number of the MoE layer": str,
                "the dtype of tokens": lambda n: str([*DTYPES, "another"][n]),
                "torch.is_grad_enabled()": lambda n: str(bool(n)),
            }
            check_collective_headers(f"the exchange of {self._name}", notes, formats, self._group)


class _ExchangeWithGrad(torch.autograd.Function):
    """Runs one function on a tensor in forward, and another on its gradient in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        forward_collective: Callable[[Tensor], Tensor],
        backward_collective: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.back = backward_collective
        # A model's code may write to the result in place, which autograd refuses for a view or an
        # input that a function returns. `detach` shares the memory and is no view.
        return forward_collective(x).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


class _ExchangeTensors(torch.autograd.Function):
    """Runs one collective on tensors in forward, and another on their gradients in backward."""

    # torch.compile drops `ctx` if `forward` has one parameter less than arguments: hence `*args`,
    # both collectives and the inputs.
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Any, ...]:
        collective, opposite, *xs = args
        ctx.collectives = opposite, collective
        outs = tuple(collective(xs))
        ctx.mark_non_differentiable(*list_outputs_without_grad(outs, ctx.needs_input_grad[2:]))
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed_grads = drop_unneeded_grads(grads, ctx.needs_input_grad[2:])
        return None, None, *_ExchangeTensors.apply(*ctx.collectives, *needed_grads)


def exchange_tensors(
    inputs: Sequence[Tensor | None],
    forward_collective: TensorCollective,
    backward_collective: TensorCollective,
) -> tuple[Any, ...]:
    """Return forward_collective(inputs); backward runs `backward_collective` on the gradients."""
    return _ExchangeTensors.apply(forward_collective, backward_collective, *inputs)  # type: ignore[no-any-return]


def exchange_with_grad(
    x: Tensor,
    forward_collective: Callable[[Tensor], Tensor],
    backward_collective: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return forward_collective(x); backward runs `backward_collective` on the gradient."""
    return _ExchangeWithGrad.apply(x, forward_collective, backward_collective)  # type: ignore[no-any-return]


def list_outputs_without_grad(
    outputs: Sequence[Tensor | None], needs_grad: Sequence[bool]
) -> list[Tensor]:
    """Return the outputs at whose index `needs_grad` (`ctx.needs_input_grad`) is False."""
    return [y for y, need in zip(outputs, needs_grad, strict=False) if y is not None and not need]


def drop_unneeded_grads(
    grads: Sequence[Tensor | None], needs_grad: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients, with None where `needs_grad` (`ctx.needs_input_grad`) is False."""
    return [grad if need else None for grad, need in zip(grads, needs_grad, strict=False)]


def run_collectives(
    collective: Callable[..., Any],
    outputs: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
    pairs: Pairs | None,
    *,
    may_overlap: bool = False,
    **arguments: Any,
) -> None:
    """Run `collective(output, input, **arguments)` for each pair, concurrently; skip None."""
    starts = [
        partial(collective, out, x.contiguous(), **arguments)
        for out, x in zip(outputs, inputs, strict=True)
        if x is not None and not skips_communication(x)
    ]
    run_exchanges(starts, pairs, may_overlap=may_overlap)


def _gather_from_ranks(
    xs_C: Sequence[Tensor | None], group: dist.ProcessGroup, pairs: Pairs | None = None
) -> list[Any]:
    """All-gather each [C, ...] of G ranks along dim 0 to [G * C, ...]; None stays None."""
    outs = [
        None if x_C is None else x_C.new_empty((group.size() * x_C.shape[0], *x_C.shape[1:]))
        for x_C in xs_C
    ]
    run_collectives(all_gather_single, outs, xs_C, pairs, group=group)
    return outs


def _sum_over_ranks(
    ys_S: Sequence[Tensor | None], group: dist.ProcessGroup, pairs: Pairs | None
) -> list[Any]:
    """Reduce-scatter each [G * C, ...] over G ranks to [C, ...] by an all-to-all, in fp32."""
    # An all-to-all sends as many bytes as a reduce-scatter, which would round a 16-bit dtype after
    # every addition.
    pieces = [
        None if y_S is None else torch.empty_like(y_S, memory_format=torch.contiguous_format)
        for y_S in ys_S
    ]
    run_collectives(dist.all_to_all_single, pieces, ys_S, pairs, group=group)
    sums_C: list[Any] = []
    for x_S in pieces:
        if x_S is None:
            sums_C.append(None)
            continue
        parts_GC = x_S.unflatten(0, (group.size(), x_S.shape[0] // group.size()))
        wide = torch.promote_types(x_S.dtype, torch.float32)
        sums_C.append(parts_GC.sum(0, dtype=wide).to(x_S.dtype))
    return sums_C


def all_gather_tensors(
    xs_C: Sequence[Tensor], group: dist.ProcessGroup, pairs: Pairs | None = None
) -> tuple[Tensor, ...]:
    """All-gather each [C, ...] of G ranks to [G * C, ...] concurrently. Differentiable."""
    options: Any = dict(group=group, pairs=pairs)
    return exchange_tensors(
        xs_C, partial(_gather_from_ranks, **options), partial(_sum_over_ranks, **options)
    )


def all_gather_rows(x_C: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather C rows of each of G ranks to [G * C, ...]; all C are equal. Differentiable."""
    return all_gather_tensors((x_C,), group)[0]


def reduce_scatter_rows(
    y_S: Tensor, group: dist.ProcessGroup, pairs: Pairs | None = None
) -> Tensor:
    """Reduce-scatter [G * C, ...] to [C, ...], in fp32, in rank order. Backward all-gathers."""
    options: Any = dict(group=group, pairs=pairs)
    gather, add = partial(_gather_from_ranks, **options), partial(_sum_over_ranks, **options)
    return exchange_tensors((y_S,), add, gather)[0]  # type: ignore[no-any-return]
