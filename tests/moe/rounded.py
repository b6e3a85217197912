"""What tokens that travel as FP8 must equal: any dispatcher behind the same rounding."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moecore.kernels.rows.packed import pack_rows_ref
from moecore.kernels.rows.record import Rows
from moecore.moe.records import Dispatcher, ExpertInput, Routing


class Rounded(torch.autograd.Function):
    """Tokens as they are after they were packed; the gradient of an identity."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor) -> Tensor:
        return Rows.from_bytes(pack_rows_ref(x_TD), x_TD.shape[1], x_TD.dtype).widen()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@dataclass(frozen=True)
class RoundedDispatcher:
    """Another dispatcher, after the rounding."""

    inner: Dispatcher

    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertInput:
        return self.inner.dispatch(Rounded.apply(x_TD), routing)

    def combine(self, y_SD: Any, plan: Any) -> Tensor:
        return self.inner.combine(y_SD, plan)
