"""`expert_mlp` by the products that experts of a layer would choose, and what a forward saves."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moecore.kernels.experts import expert_mlp as experts
from moecore.kernels.experts.contract import ExpertSpec
from moecore.kernels.experts.products import choose_products


def expert_mlp(rows, weights, index, options, **more) -> Tensor:
    """Return what `expert_mlp` does; raise ValueError for experts that nothing multiplies."""
    spec = ExpertSpec.from_weights(rows, weights, options.activation, options.recipe)
    options = replace(options, products=choose_products(options.products, spec))
    return experts.expert_mlp(rows, weights, index, options, **more)


def list_saved(run: Callable[[], Any]) -> list[Tensor]:
    """Return the tensors that a forward saves for backward."""
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run()
    return saved
