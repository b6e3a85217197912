"""Which experts live together: an order of a layer's experts in which ranks have even loads.

Rank p owns experts p * E / ep onwards, so their order places them. A layer whose experts are in
another order computes the same function, if its router is in that order too.

    order_E = place_experts(loads_E, num_ranks=8)    # loads of some steps, of a trained router
    reorder_experts(layer, order_E)                  # of a whole model, before parallelize_moe

That is for loads that stay: of finetuning, evaluation, data of one kind. Loads that change from
step to step are what clones are for (`moe/clones.py`).

Legend: E experts.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moecore.base.fields import Count, check_arguments
from moecore.moe.layer import MoELayer


def place_experts(
    loads_E: Annotated[Tensor, "pass tokens_per_expert of a layer"], *, num_ranks: Count
) -> Tensor:
    """Return an order of experts in which ranks have even loads, each E / num_ranks of them.

    From the largest load down, each expert goes to the rank with the least that has room.

    Args:
        loads_E: [E], tokens or shares, such as `MoEMetrics.tokens_per_expert` of a layer.
        num_ranks: ep.

    Returns:
        int64 [E]: which expert becomes number i; those of a rank in rising order.

    Raises:
        ValueError: for loads of another shape, and experts that ranks cannot share evenly.

    Example, two ranks, loads [9, 7, 1, 1]: [0, 3, 1, 2] has loads 10 and 8.
    """
    check_arguments(place_experts, locals())
    if loads_E.ndim != 1 or loads_E.numel() % num_ranks or not loads_E.numel():
        raise ValueError(
            f"loads_E {tuple(loads_E.shape)} must be [E] with E a multiple of num_ranks "
            f"({num_ranks}): pass those of one layer, and its ep"
        )
    loads, room = loads_E.double().tolist(), loads_E.numel() // num_ranks
    sums, owned = [0.0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    for expert in sorted(range(len(loads)), key=lambda e: -loads[e]):
        free = (rank for rank in range(num_ranks) if len(owned[rank]) < room)
        rank = min(free, key=sums.__getitem__)
        owned[rank].append(expert)
        sums[rank] += loads[expert]
    return torch.tensor([expert for of_rank in owned for expert in sorted(of_rank)])


@torch.no_grad()
def reorder_experts(
    layer: Annotated[MoELayer, "pass a layer of the model"],
    order_E: Annotated[Tensor, "pass what place_experts returns"],
) -> None:
    """Put the experts of a layer, and its router, in another order, in place.

    The layer computes what it computed. Optimizers and checkpoints know numbers of experts alone,
    so do it before them: a checkpoint of the result has the new order.

    Args:
        layer: whole, before `parallelize_moe`.
        order_E: integer [E], which expert becomes number i.

    Raises:
        ValueError: for a sharded layer, and an order that is none of its experts.
        NotImplementedError: for a router that chooses among groups of experts.
    """
    check_arguments(reorder_experts, locals())
    E = layer.config.num_experts
    if sorted(order_E.tolist()) != list(range(E)):
        raise ValueError(
            f"order_E {tuple(order_E.shape)} must have each of the {E} experts once: pass what "
            "place_experts returns for this layer"
        )
    if layer.config.top_groups < layer.config.num_groups:
        raise NotImplementedError(
            f"top_groups ({layer.config.top_groups}) must equal num_groups "
            f"({layer.config.num_groups}) for another order, which would mix groups"
        )
    router, experts = layer.part("router"), layer.part("experts")
    # All have one entry per expert in dim 0, routers also for those that return their input.
    order_E = torch.cat([order_E, torch.arange(E, layer.config.num_candidates).to(order_E)])
    tensors = [t for module in (router, experts) for t in (*module.parameters(), *module.buffers())]
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        raise ValueError(
            "layer (MoELayer) must be whole for another order of its experts: call "
            "reorder_experts before parallelize_moe"
        )
    for tensor in tensors:
        tensor.copy_(tensor[order_E[: len(tensor)].to(tensor.device)])
