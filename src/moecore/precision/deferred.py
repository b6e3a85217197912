"""Which linears of a model can leave gradients of their weights for later (`Engine.deferring`).

Routed experts always can. What is here is asked for, because it costs host time in each forward.
"""

from __future__ import annotations

from torch import Tensor, nn

from moecore.moe.shared import Multiply, SharedExpert
from moecore.precision.apply import FORWARDS
from moecore.precision.linear import Fp8Linear, Fp8Products
from moecore.precision.plain import deferred_linear


class DeferredLinear(nn.Linear):
    """An `nn.Linear` by `deferred_linear`; parameters, names and state dict are its own."""

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., N], as the linear that it was."""
        return deferred_linear(input, self.weight, self.bias)


def defer_linears(model: nn.Module) -> None:
    """Let linears, those in FP8 too, and moecore's shared experts defer, in place.

    Forwards, gradients and names stay. Linears with a forward of their own stay as they are. Call
    it after `apply_precision`, and before `shard_model`, `compile_blocks` and `apply_memory`.

    Args:
        model: any module.
    """
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            module.products.defers = True
        elif isinstance(module, nn.Linear) and type(module).forward in FORWARDS:
            module.__class__ = _deferred_class(type(module))
        elif isinstance(module, SharedExpert):
            by_w1, by_w2 = module.multiply
            module.multiply = (_deferred(by_w1), _deferred(by_w2))


def _deferred(multiply: Multiply) -> Multiply:
    if isinstance(multiply, Fp8Products):
        multiply.defers = True
        return multiply
    return deferred_linear


_CLASSES: dict[type[nn.Linear], type[DeferredLinear]] = {nn.Linear: DeferredLinear}


def _deferred_class(plain: type[nn.Linear]) -> type[DeferredLinear]:
    if plain not in _CLASSES:
        _CLASSES[plain] = type(f"Deferred{plain.__name__}", (DeferredLinear, plain), {})
    return _CLASSES[plain]
