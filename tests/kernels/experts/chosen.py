"""`expert_mlp` by the products that experts of a layer would choose."""

from dataclasses import replace

from torch import Tensor

from moecore.kernels.experts import expert_mlp as experts
from moecore.kernels.experts.contract import ExpertSpec
from moecore.kernels.experts.products import choose_products


def expert_mlp(rows, weights, index, options, **more) -> Tensor:
    """Return what `expert_mlp` does; raise ValueError for experts that nothing multiplies."""
    spec = ExpertSpec.from_weights(rows, weights, options.activation, options.recipe)
    options = replace(options, products=choose_products(options.products, spec))
    return experts.expert_mlp(rows, weights, index, options, **more)
