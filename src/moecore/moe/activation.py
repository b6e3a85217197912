"""The layer's activation as the kernels know it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moecore.base.options.layer import MoEConfig
from moecore.kernels.rows.activation import ActivationOptions, activation


def activation_options(
    config: MoEConfig,
    *,
    interleaved: bool = False,
    function: Callable[[Tensor], Tensor] | None = None,
) -> ActivationOptions:
    """Return which activation the layer's experts use.

    Args:
        config: the layer.
        interleaved: whether gate and up columns alternate.
        function: as of `ActivationOptions`.
    """
    return ActivationOptions(
        kind=config.activation,
        limit=config.activation_limit,
        alpha=config.activation_alpha,
        interleaved=interleaved,
        function=function,
    )


def activate(h_RF: Tensor, config: MoEConfig, *, interleaved: bool = False) -> Tensor:
    """Return the activated hidden rows [R, F] in fp32, in plain PyTorch."""
    return activation(h_RF, activation_options(config, interleaved=interleaved))
