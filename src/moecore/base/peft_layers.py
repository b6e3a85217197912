"""Access to the LoRA modules of peft, which compute y = W x + s B A x.

Legend: W base linear, A and B factors of an adapter, s its scale.
"""

import sys
from typing import Any

from torch import nn


def is_tuner_layer(module: nn.Module) -> bool:
    """Whether a module is a peft tuner layer: a base layer with adapters, such as LoRA's."""
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def find_lora_base(module: Any) -> nn.Module | None:
    """Return the base linear of a peft LoRA module; None for other modules and LoRA variants."""
    if not is_tuner_layer(module):
        return None
    from peft.tuners.lora import Linear

    is_variant = any(getattr(module, "lora_variant", {}).values()) or any(
        getattr(module, "lora_bias", {}).values()
    )
    if type(module) is not Linear or is_variant or module.fan_in_fan_out:
        return None
    base_layer: nn.Module = module.get_base_layer()
    return base_layer


def is_dora_linear(module: Any, adapter: str) -> bool:
    """Whether a peft layer is a linear [out, in] on which `adapter` has DoRA."""
    from peft.tuners.lora import Linear

    vectors = getattr(module, "lora_magnitude_vector", {})
    return type(module) is Linear and adapter in vectors and not module.fan_in_fan_out


def list_lora_pairs(module: Any) -> list[tuple[nn.Linear, nn.Linear]]:
    """Return the linears (A, B) of each LoRA adapter of a peft module, active or inactive."""
    return [(module.lora_A[name], module.lora_B[name]) for name in module.lora_A]
