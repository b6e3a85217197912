"""Placement of a layer's experts on ranks, by an order of experts in which ranks have even loads.

Rank p owns the experts from p * E / ep on, so the order decides each expert's rank. A layer with
reordered experts computes the same function, if its router is reordered too.

    order_E = place_experts(loads_E, num_ranks=8)    # loads of some steps, of a trained router
    reorder_experts(layer, order_E)                  # of a full model, before parallelize_moe

Use an order if loads are stable, as in finetuning or evaluation, or with data of one kind. Use
clones (`moe/clones.py`) if loads change from step to step.

Legend: E experts.
"""

from typing import Annotated

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moecore.base.fields import Count, check_arguments
from moecore.moe.layer import MoELayer


def place_experts(
    loads_E: Annotated[Tensor, "pass tokens_per_expert of a layer"], *, num_ranks: Count
) -> Tensor:
    """Return an order of experts in which ranks of E / num_ranks experts have even loads.

    Experts are assigned to ranks by descending load. Each expert is assigned to the rank with the
    smallest load among ranks that have fewer than E / num_ranks experts.

    Args:
        loads_E: [E], number or share of tokens, such as `MoEMetrics.tokens_per_expert` of a layer.
        num_ranks: ep.

    Returns:
        int64 [E]: entry i is the expert that becomes number i. The experts of a rank are sorted.

    Raises:
        ValueError: if loads have another shape, or E is not a multiple of num_ranks.

    Example, two ranks, loads [9, 7, 1, 1]: the order [0, 3, 1, 2] gives the ranks loads 10 and 8.
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
    return torch.tensor(
        [expert for of_rank in owned for expert in sorted(of_rank)], dtype=torch.int64, device="cpu"
    )


@torch.no_grad()
def reorder_experts(
    layer: Annotated[MoELayer, "pass a layer of the model"],
    order_E: Annotated[Tensor, "pass what place_experts returns"],
) -> None:
    """Reorder the experts of a layer and its router in place.

    The layer computes the same function as before. Call this before optimizers exist: their states
    and checkpoints identify experts only by number. A later checkpoint has the new order.

    Args:
        layer: an unsharded layer, before `parallelize_moe`.
        order_E: integer [E]; entry i is the expert that becomes number i.

    Raises:
        ValueError: for a sharded layer, or an order that is not a permutation of its experts.
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
    router, experts = layer.get_part("router"), layer.get_part("experts")
    # All have one entry per expert in dim 0, routers also for those that return their input.
    candidates = torch.arange(E, layer.config.num_candidates, device="cpu")
    order_E = torch.cat([order_E, candidates.to(order_E)])
    tensors = [t for module in (router, experts) for t in module.parameters()]
    tensors += [*router.buffers(recurse=False), *experts.buffers()]
    if router.bias_owner is not router:
        tensors.append(router.selection_bias)
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        raise ValueError(
            "layer (MoELayer) must be whole for another order of its experts: call "
            "reorder_experts before parallelize_moe"
        )
    for tensor in tensors:
        tensor.copy_(tensor[order_E[: len(tensor)].to(tensor.device)])
