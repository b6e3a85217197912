"""Router logits, which transformers records while a model runs.

transformers hooks the modules of its own classes. Router logits of adopted blocks are handed to
it; what it would not find is refused.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from torch import Tensor, nn

from moecore.base.torch_private import HOOKS
from moecore.families.transformers.stock import is_hf, named
from moecore.moe.layer import MoELayer, RoutedLayer
from moecore.moe.records import Routing

OPTION = "output_router_logits"


def refuse_lost_outputs(model: nn.Module) -> None:
    """Raise when router logits are asked for that transformers would not record."""
    for module in model.modules():
        if not is_hf(module) or getattr(module, "base_model", None) is not module:
            continue  # transformers records in the base model, below the head that has the loss
        refusal = _refusal()
        if refusal is not None and getattr(module.config, OPTION, False):
            raise NotImplementedError(refusal)
        module.register_forward_hook(partial(_check_recorded, refusal), with_kwargs=True)


def _refusal() -> str | None:
    """Return why the installed transformers' router logits would be wrong, if they would."""
    version = sys.modules["transformers"].__version__
    if tuple(int(n) for n in version.split(".")[:2]) >= (5, 6):
        return None
    return (
        f"{OPTION} (True) must be False with transformers ({version}), whose balance loss reads "
        "probabilities as logits: use transformers >= 5.6"
    )


def _check_recorded(
    refusal: str | None, module: Any, args: Any, kwargs: dict[str, Any], output: Any
) -> None:
    """Forward hook of a base model; its output's `router_logits` has one tensor per MoE layer."""
    layers_of = (m for m in module.modules() if isinstance(m, RoutedLayer))
    recordable = [
        m for m in layers_of if m.config.assignment != "hash"
    ]  # stock records none of those
    keywords = named(module, args, kwargs)
    if not recordable or not keywords.get(OPTION, getattr(module.config, OPTION, False)):
        return  # not parallelized in the end, or not asked for
    if refusal is not None:
        raise NotImplementedError(refusal)
    # Routers that the model keeps are recorded as ever.
    layers = len(recordable) if any(isinstance(m, MoELayer) for m in recordable) else 0
    recorded = len(getattr(output, "router_logits", None) or ())
    if layers and recorded != layers:
        raise NotImplementedError(
            f"router_logits recorded ({recorded}) must equal the MoE layers ({layers}) of "
            f"{type(module).__name__}: set {OPTION} to False and use "
            "parallelize_moe(moe={'balance': BalanceConfig(...)})"
        )


class _LogitRecorder(nn.Module):
    """What transformers takes for the router of an adapted block; it has no parameters.

    transformers hooks the modules of its own router classes and keeps one output: the first, or
    Llama 4's second. `Router` returns a record instead, so it holds a recorder, made a subclass of
    the block's router class, and passes it what it routed. The recorder returns the logits as both.
    """

    def __init__(self) -> None:
        nn.Module.__init__(self)  # not the router class, which would make parameters
        self._is_hf_initialized = True  # so that transformers does not look for them

    def forward(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        assert routing.logits_TE is not None, "moecore's routers return logits"
        return routing.logits_TE, routing.logits_TE


def record_logits(layer: MoELayer, router: nn.Module) -> MoELayer:
    """Let transformers find the layer's router logits where it found those of `router`."""
    recorder = type(f"{type(router).__name__}Recorder", (_LogitRecorder, type(router)), {})()
    for name in HOOKS:
        if "forward_hooks" in name:  # and how to call them
            vars(recorder)[name].update(vars(router)[name])
    router_module = layer.part("router")
    router_module.recorder = recorder
    router_module.register_forward_hook(_pass_to_recorder)
    return layer


def _pass_to_recorder(router: Any, args: tuple[Tensor], routing: Routing) -> None:
    router.recorder(args[0], routing)
