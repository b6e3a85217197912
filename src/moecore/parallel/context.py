"""A model takes its place among context parallel ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from moecore.attention.context_parallel.group import ContextParallel
from moecore.base.options.context import ContextOptions
from moecore.parallel.attached import Attached
from moecore.parallel.mesh import Meshes, context_groups, split_context


def apply_context(model: nn.Module, found: Attached) -> None:
    """Give a model its cp ranks. Collective where it makes groups."""
    request, meshes = found.request, found.request.meshes
    if not request.is_dynamic and meshes.parallel.cp == 1:
        return
    places: dict[int, ContextParallel] = {}
    for cp, options in request.context_options(model).items():
        if request.is_dynamic:
            group, found.shared_by[cp] = context_groups(meshes, cp)
        else:
            group = meshes.dense.get_group("cp")
        places[cp] = _place(meshes, options, group)
    owner = request.family.context(model)
    if request.is_dynamic:
        owner.apply_context_groups(places)
    else:
        owner.apply_context_parallel(places[meshes.parallel.cp])


def _place(meshes: Meshes, options: ContextOptions, group: dist.ProcessGroup) -> ContextParallel:
    """Return this rank's place among the cp ranks. Collective where it makes groups."""
    if options.way == "a2a+p2p":
        assert options.a2a_ranks is not None, "resolved options have the number"
        return ContextParallel(group, *split_context(meshes, group.size(), options.a2a_ranks))
    a2a, ring = (group if options.way == way else None for way in ("a2a", "p2p"))
    return ContextParallel(group, a2a, ring)
