"""Router logits: transformers records the logits of moecore's routers (output_router_logits).

transformers registers hooks on the modules of its own router classes. A block with a MoELayer has
no such module, so `record_logits` adds one. Requests for logits that would not be recorded raise.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moecore.base.torch_private import HOOKS
from moecore.families.transformers.stock import bind_arguments, is_transformers_module
from moecore.moe.layer import MoELayer, RoutedLayer
from moecore.moe.records import Routing

OPTION = "output_router_logits"


def refuse_lost_router_logits(model: nn.Module) -> None:
    """Make forwards raise if they request router logits that would not be recorded."""
    for module in model.modules():
        if not is_transformers_module(module) or getattr(module, "base_model", None) is not module:
            continue  # transformers records in the base model, not in the model with the loss
        module.register_forward_hook(_check_router_logits, with_kwargs=True)


def _check_router_logits(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook: raise NotImplementedError if requested router logits were not recorded."""
    layers_of = (m for m in module.modules() if isinstance(m, RoutedLayer))
    # transformers records no logits of layers with hash routing.
    recordable = [m for m in layers_of if m.config.assignment != "hash"]
    keywords = bind_arguments(module, args, kwargs)
    if not recordable or not keywords.get(OPTION, getattr(module.config, OPTION, False)):
        return  # the model was not parallelized, or the caller requests no logits
    # A model whose layers are RoutedExperts still has its own routers.
    layers = len(recordable) if any(isinstance(m, MoELayer) for m in recordable) else 0
    recorded = len(getattr(output, "router_logits", None) or ())
    if layers and recorded != layers:
        raise NotImplementedError(
            f"router_logits recorded ({recorded}) must equal the MoE layers ({layers}) of "
            f"{type(module).__name__}: set {OPTION} to False and use "
            "parallelize_moe(moe={'balance': BalanceConfig(...)})"
        )


class _LogitRecorder(nn.Module):
    """A module without parameters whose forward returns a `Router`'s logits to transformers' hooks.

    transformers hooks its router classes and records the first output, or Llama 4's second output.
    The recorder is a subclass of the block's router class and returns the logits twice.
    """

    def __init__(self) -> None:
        nn.Module.__init__(self)  # not the router class, which would make parameters
        self._is_hf_initialized = True  # transformers then initialises no parameters

    def forward(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Return the routing's logits [T, E] twice."""
        assert routing.logits_TE is not None, "moecore's routers return logits"
        return routing.logits_TE, routing.logits_TE


def record_logits(layer: MoELayer, router: nn.Module) -> MoELayer:
    """Make transformers' hooks on the old `router` record the logits of `layer`; return `layer`."""
    recorder = type(f"{type(router).__name__}Recorder", (_LogitRecorder, type(router)), {})()
    for name in HOOKS:
        if "forward_hooks" in name:  # the hooks, and flags of their arguments
            vars(recorder)[name].update(vars(router)[name])
    router_module = layer.get_part("router")
    router_module.recorder = recorder
    router_module.register_forward_hook(_pass_to_recorder)
    return layer


def _pass_to_recorder(router: Any, args: tuple[Tensor], routing: Routing) -> None:
    """Forward hook of a router: call its recorder, whose hooks belong to transformers."""
    router.recorder(args[0], routing)
