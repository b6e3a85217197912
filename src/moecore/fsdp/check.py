"""Parameters that FSDP2 could not shard and train, found before anything is sharded.

FSDP2 finds them in the first forward or backward, and does not name them.
"""

from __future__ import annotations

from torch import nn

from moecore.fsdp.shard import FSDPOptions, find_units, is_whole
from moecore.mesh import Meshes


def check_parameters(model: nn.Module, meshes: Meshes, options: FSDPOptions) -> None:
    """Raise for trainable parameters that are empty or of several dtypes in one unit.

    Args:
        model: its MoE blocks are MoELayers, whose experts are whole tensors still.
        meshes: both views.
        options: they set which modules are a unit.

    Raises:
        ValueError: names the parameters.
    """
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    for param, name in names.items():
        if not param.numel():
            raise ValueError(
                f"{name} {tuple(param.shape)} must hold values to be trained, or FSDP2 cannot "
                "reduce its gradient: freeze it, or take out what is empty (a block's shared "
                "expert: set it to None)"
            )
    units = find_units(model, options)
    experts: list[list[nn.Module]] = [[module] for module in units.experts]
    seen: set[nn.Parameter] = set()
    if is_whole(meshes):  # these are no units
        seen.update(p for (module,) in experts for p in module.parameters())
    heads = [[head] for head in units.heads]
    inner_first = [*units.routers, *experts, *units.groups, *heads, [model]]
    for unit in inner_first:
        params = [p for module in unit for p in module.parameters() if p in names]
        own = [p for p in params if p not in seen]
        seen.update(own)
        other = next((p for p in own if p.dtype != own[0].dtype), None)
        if other is not None:
            raise ValueError(
                f"{names[own[0]]} ({own[0].dtype}) and {names[other]} ({other.dtype}) must have "
                "one dtype, because FSDP2 reduces their gradients together: call model.to(dtype); "
                "only routers may keep another one, with FSDPOptions.param_dtype "
                f"({options.param_dtype}) set"
            )
