"""parallelize_moe: find blocks -> swap -> tensor-parallel -> expert-parallel -> FSDP2.

The one place that knows every room. Order matters: expert and tensor sharding fix what a rank owns
(DTensors on ep, etp and tp), then FSDP2 shards that over the data ranks of each mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore._compat import HAS_SEPARATE_PIECES
from moecore.adapters.base import Adapter, swap_blocks
from moecore.adapters.hf import refuse_router_logits
from moecore.config import BalanceConfig
from moecore.fsdp.shard import FSDPOptions, shard_model
from moecore.mesh import Meshes
from moecore.moe.balance import BalanceGroups, MoEState
from moecore.moe.dispatch.allgather import AllGatherDispatcher
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.base import Dispatcher, ExpertPlacement
from moecore.moe.dispatch.local import LocalDispatcher
from moecore.moe.experts import ExpertBackend, Experts, check_alignment
from moecore.moe.layer import MoELayer

DispatcherName = Literal["auto", "local", "alltoall", "allgather"]
LossConvention = Literal["mean", "sum"]
STATE_NAME = "_moecore_state"


def parallelize_moe(
    model: nn.Module,
    meshes: Meshes,
    *,
    dispatcher: DispatcherName = "auto",
    experts: ExpertBackend = "grouped",
    balance: BalanceConfig | None = None,
    fsdp: FSDPOptions | None = None,
    loss: LossConvention = "mean",
    adapters: Mapping[type, Adapter] | None = None,
) -> nn.Module:
    """Shard a model over both meshes, in place, and return it.

    Works on meta-device models (materialise with `to_empty` and an init or a checkpoint
    afterwards) and on real ones, whose weights must be equal on every rank. Parameter names and
    global shapes stay: parameters become DTensors.

    Args:
        model: any module that holds MoELayers or MoE blocks with an adapter.
        meshes: from `build_meshes`.
        dispatcher: how tokens travel; "auto" is local without ep and etp, else alltoall.
        experts: "grouped" matmuls, or "sequential", the oracle.
        balance: replaces the balance config of every MoE layer; None keeps each one's own.
        fsdp: FSDP2 choices.
        loss: "mean": each rank's loss is the mean over its own tokens, and gradients are the mean
            over data ranks. "sum": each rank's loss is a sum over its tokens divided by the global
            token count, and gradients are summed (exact for uneven token counts).
        adapters: block class -> `(block, model) -> MoELayer`, for blocks that moecore does not
            know.

    Returns:
        The model. `moe_state(model)` gives its balance record.

    Raises:
        ValueError: when sizes and degrees do not fit, before any collective.
        NotImplementedError: for cp > 1, pp > 1, and tp > 1 on models without
            `apply_tensor_parallel(tp_mesh)`.
    """
    _check_request(model, meshes, dispatcher, loss)
    options = fsdp or FSDPOptions()
    layers = swap_blocks(model, adapters or {})
    for name, layer in layers.items():
        _check_layer(name, layer, meshes)
        layer.part("experts").set_backend(experts)
        if experts == "grouped":
            dtype = options.param_dtype or next(layer.part("experts").parameters()).dtype
            check_alignment(layer.config.dim, layer.config.hidden_dim // meshes.parallel.etp, dtype)
        if balance is not None:
            layer.set_balance(balance)
    _check_equal_weights(model)

    if meshes.parallel.tp > 1:
        cast(Any, model).apply_tensor_parallel(meshes.dense["tp"])
    for layer in layers.values():
        _place_experts(layer, meshes, dispatcher)
    shard_model(model, meshes, options, loss=loss)
    groups = BalanceGroups(
        micro_batch=meshes.micro_batch_group,
        global_batch=meshes.stage_group if meshes.stage_group.size() > 1 else None,
        data_ranks=meshes.data_ranks,
    )
    setattr(model, STATE_NAME, MoEState(layers, groups, loss=loss))
    return model


def moe_state(model: nn.Module) -> MoEState:
    """Return the balance record that a parallelized model owns.

    Raises:
        ValueError: when the model has not been parallelized.
    """
    state = getattr(model, STATE_NAME, None)
    if state is None:
        raise ValueError(
            f"model ({type(model).__name__}) must be parallelized to have a balance record: "
            "call parallelize_moe(model, meshes) first"
        )
    return state


def _check_request(model: nn.Module, meshes: Meshes, dispatcher: str, loss: str) -> None:
    p = meshes.parallel
    for name, value, choices in (
        ("dispatcher", dispatcher, get_args(DispatcherName)),
        ("loss", loss, get_args(LossConvention)),
    ):
        if value not in choices:
            shown = ", ".join(repr(c) for c in choices)
            raise ValueError(f"{name} ({value!r}) must be one of {shown}")
    if dispatcher == "local" and p.ep * p.etp > 1:
        raise ValueError(
            f"dispatcher ('local') must go with ep * etp ({p.ep * p.etp}) = 1: use 'alltoall'"
        )
    if getattr(model, STATE_NAME, None) is not None:
        raise ValueError(f"model ({type(model).__name__}) must not be parallelized already")
    for degree in ("cp", "pp"):
        if getattr(p, degree) > 1:
            raise NotImplementedError(
                f"ParallelConfig.{degree} ({getattr(p, degree)}) must be 1: meshes have the dim, "
                "but no model can use it yet"
            )
    if p.tp > 1 and not hasattr(model, "apply_tensor_parallel"):
        raise NotImplementedError(
            f"ParallelConfig.tp ({p.tp}) must be 1 for {type(model).__name__}: tensor parallelism "
            "needs a model with apply_tensor_parallel(tp_mesh), such as moecore.models.Decoder"
        )
    refuse_router_logits(model)


def _check_layer(name: str, layer: MoELayer, meshes: Meshes) -> None:
    p, config = meshes.parallel, layer.config
    rules = [("num_experts", config.num_experts, "ep", p.ep)]
    rules += [("hidden_dim", config.hidden_dim, "etp", p.etp)]
    if config.fc2_bias:
        rules += [("dim", config.dim, "etp", p.etp)]
    if layer.part("experts").is_strided and p.etp > 1:
        rules += [("dim", config.dim, "edp_shard", p.edp_shard)]
        if not HAS_SEPARATE_PIECES:
            raise NotImplementedError(
                f"{name}: ParallelConfig.etp ({p.etp}) must be 1 for concatenated gate and up "
                f"weights with torch {torch.__version__}: use torch >= 2.13, or ep instead of etp"
            )
    for field, value, degree, size in rules:
        if value % size:
            raise ValueError(
                f"{name}: MoEConfig.{field} ({value}) must be divisible by ParallelConfig.{degree} "
                f"({size}): choose another {degree}"
            )


@torch.no_grad()
def _check_equal_weights(model: nn.Module) -> None:
    """Real weights that differ between ranks would be mixed shard by shard, or drift silently."""
    tensors = [(n, t) for n, t in model.named_parameters() if not t.is_meta]
    if not tensors or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    sums = torch.stack([_fingerprint(t) for _, t in tensors])
    lowest, highest = sums.clone(), sums.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    different = (lowest != highest).nonzero().flatten().tolist()
    if different:
        raise ValueError(
            f"weights of {tensors[different[0]][0]} (and {len(different) - 1} more) must be equal "
            "on every rank before sharding: seed every rank alike or load one checkpoint"
        )


def _fingerprint(tensor: Tensor) -> Tensor:
    """Return an exact 64-bit hash of the tensor's bits, order included; no copy of the tensor."""
    bits = tensor.detach().contiguous().flatten().view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for i, chunk in enumerate(bits.split(1 << 22)):
        places = torch.arange(1, chunk.numel() + 1, device=tensor.device) % 65521 + 1 + i
        total += (places * chunk).sum()
    return total


def _place_experts(layer: MoELayer, meshes: Meshes, dispatcher: DispatcherName) -> None:
    p = meshes.parallel
    if p.ep * p.etp > 1:
        experts = layer.part("experts")
        assert isinstance(experts, Experts)
        experts.shard(meshes.expert["ep", "etp"])
    layer.dispatcher = _make_dispatcher(layer.config.num_experts, meshes, dispatcher)


def _make_dispatcher(num_experts: int, meshes: Meshes, name: DispatcherName) -> Dispatcher:
    p, group = meshes.parallel, meshes.dispatch_group
    if group is None:
        return LocalDispatcher(num_experts)
    placement = ExpertPlacement(group=group, num_experts=num_experts, ep=p.ep, etp=p.etp)
    classes: dict[str, Any] = {
        "auto": AllToAllDispatcher,
        "alltoall": AllToAllDispatcher,
        "allgather": AllGatherDispatcher,
    }
    return classes[name](placement)
