"""Outputs that transformers records while a model runs: router logits, hidden states, attentions.

transformers hooks the modules of its own classes. Router logits of adopted blocks are handed to
it; what it would not find is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from moecore.hf.stock import is_hf
from moecore.moe.layer import MoELayer, RoutedLayer
from moecore.moe.records import Routing

RECORDED = ("output_router_logits", "output_hidden_states", "output_attentions")


def refuse_lost_outputs(model: nn.Module) -> None:
    """Raise when outputs are asked for that transformers would not record.

    Hidden states, attentions or router logits would be None without a word, and the balance loss
    be computed from fewer layers, or from none. Asked for in the config: raises now. In a later
    forward: raises before its loss.

    Raises:
        NotImplementedError: for a base model parallelized itself, while one of `RECORDED` is asked
            for; with transformers before 5.6, while router logits are; in forward also when router
            logits of not every layer were recorded.
    """
    for module in model.modules():
        if not is_hf(module) or getattr(module, "base_model", None) is not module:
            continue  # transformers records in the base model, below the head that has the loss
        refusals = _refusals(module, is_root=module is model)
        for option, refusal in refusals.items():
            if getattr(module.config, option, False):
                raise NotImplementedError(refusal)
        module.register_forward_hook(partial(_check_recorded, refusals), with_kwargs=True)


def _refusals(module: nn.Module, *, is_root: bool) -> dict[str, str]:
    """Return why outputs of the base model would be wrong or missing, by their option."""
    refusals = {}
    if is_root:
        # It looks up what to record by the name of the class, which FSDP2 changes at the root.
        for option in RECORDED:
            refusals[option] = (
                f"{option} (True) must be False for {type(module).__name__}, which transformers "
                "does not recognise once it is FSDP2's root: parallelize the model that holds it, "
                "such as ...ForCausalLM"
            )
    version = sys.modules["transformers"].__version__
    if tuple(int(n) for n in version.split(".")[:2]) < (5, 6):
        refusals["output_router_logits"] = (
            f"output_router_logits (True) must be False with transformers ({version}), whose "
            "balance loss reads probabilities as logits: use transformers >= 5.6"
        )
    return refusals


def _check_recorded(
    refusals: Mapping[str, str], module: Any, args: Any, kwargs: dict[str, Any], output: Any
) -> None:
    """Forward hook of a base model; its output's `router_logits` has one tensor per MoE layer."""
    asked = [o for o in RECORDED if kwargs.get(o, getattr(module.config, o, False))]
    found = [m for m in module.modules() if isinstance(m, RoutedLayer)]
    # Routers that the model keeps are recorded as ever.
    layers = len(found) if any(isinstance(m, MoELayer) for m in found) else 0
    if not layers and not isinstance(module, FSDPModule):
        return  # not parallelized in the end
    for option in asked:
        if option in refusals:
            raise NotImplementedError(refusals[option])
    recorded = len(getattr(output, "router_logits", None) or ())
    if layers and "output_router_logits" in asked and recorded != layers:
        raise NotImplementedError(
            f"router_logits recorded ({recorded}) must equal the MoE layers ({layers}) of "
            f"{type(module).__name__}: set output_router_logits to False and use "
            "parallelize_moe(balance=BalanceConfig(...))"
        )


class _Recorder(nn.Module):
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
    """Let transformers find the layer's router logits where it found those of `router`.

    Its hooks come along: transformers installs them only once, maybe before this call. Nobody
    else's can be there, `swap_blocks` refuses them.
    """
    recorder = type(f"{type(router).__name__}Recorder", (_Recorder, type(router)), {})()
    for key, hook in router._forward_hooks.items():
        with_kwargs = key in router._forward_hooks_with_kwargs
        recorder.register_forward_hook(hook, with_kwargs=with_kwargs)
    own = layer.part("router")
    own.recorder = recorder
    own.register_forward_hook(_pass_to_recorder)
    return layer


def _pass_to_recorder(router: Any, args: tuple[Tensor], routing: Routing) -> None:
    router.recorder(args[0], routing)
