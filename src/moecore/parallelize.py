"""parallelize_moe: find blocks -> swap -> tensor-parallel -> expert-parallel -> FSDP2.

The one place that knows every room. Order matters: expert and tensor sharding fix what a rank owns
(DTensors on ep, etp and tp), then FSDP2 shards that over the data ranks of each mesh.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from moecore._autograd import has_gradient_hooks
from moecore._distributed import HAS_SEPARATE_PIECES
from moecore.adapters.base import Adapter, swap_blocks
from moecore.config import BalanceConfig
from moecore.fsdp.added import refuse_added
from moecore.fsdp.check import check_parameters
from moecore.fsdp.shard import (
    FSDPOptions,
    find_blocks,
    is_tied,
    is_whole,
    keeps_precision,
    shard_model,
)
from moecore.graphs.regions import compile_blocks
from moecore.hf.blocks import refuse_lost_outputs, refuse_save_pretrained, warn_about_cache
from moecore.mesh import Meshes
from moecore.moe.backends import ExpertBackend, check_backend
from moecore.moe.balance import BalanceGroups
from moecore.moe.dispatch.allgather import AllGatherDispatcher
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.exchange import ExchangePool
from moecore.moe.dispatch.local import LocalDispatcher
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.dispatch.nvlink_options import NVLinkOptions
from moecore.moe.dispatch.peer_memory import find_problem
from moecore.moe.experts import Experts, expert_shapes
from moecore.moe.layer import MoELayer
from moecore.moe.placement import ExpertPlacement
from moecore.moe.records import Dispatcher
from moecore.moe.state import STATE_NAME, MoEState

logger = logging.getLogger("moecore.parallelize")

DispatcherName = Literal["auto", "local", "alltoall", "allgather", "nvlink"]
LossConvention = Literal["mean", "sum"]


def parallelize_moe(
    model: nn.Module,
    meshes: Meshes,
    *,
    dispatcher: DispatcherName = "auto",
    nvlink: NVLinkOptions | None = None,
    experts: ExpertBackend = "auto",
    recompute_fc1: bool = False,
    overlap_shared: bool = False,
    compile: bool = False,
    balance: BalanceConfig | None = None,
    fsdp: FSDPOptions | None = None,
    loss: LossConvention = "mean",
    adapters: Mapping[type, Adapter] | None = None,
) -> nn.Module:
    """Shard a model over both meshes, in place, and return it.

    Works on meta-device models (materialise with `to_empty` and an init or a checkpoint
    afterwards) and on real ones, whose weights must be equal on every rank. Parameter names and
    global shapes stay: parameters become DTensors. Those that are added later nobody reduces:
    `clip_grad_norm_` and `finish_step` refuse them. With gradient accumulation, say so:
    `moe_state(model).set_num_micro_batches(n)`, or auxiliary losses have the wrong scale.

    Args:
        model: any module that holds MoELayers or MoE blocks with an adapter.
        meshes: from `build_meshes`.
        dispatcher: how tokens travel; "auto" is local without ep and etp; nvlink where the ep x
            etp ranks are one host's GPUs with peer access and `nvlink` has a capacity factor
            (without one each layer keeps room for every routing: up to ep times the memory); else
            alltoall. Logged once, with why. See docs/dispatchers.md.
        nvlink: sizes and times of the nvlink dispatcher; with dispatcher "nvlink" or "auto".
        experts: how the experts' matrices are multiplied: "auto", "triton", "torch", "te" or
            "sequential", the oracle (see `moe/backends.py`).
        recompute_fc1: keep only the experts' input for backward and run FC1 again there: one
            product more for 4KF bytes per token less (bf16). Not with "te", "sequential" or biases.
        overlap_shared: on GPUs run shared experts on a stream of their own while tokens travel to
            the routed ones. Other devices have no streams: there it is refused. Experimental: no
            measurement yet.
        compile: run attention, norms and residual adds of each block through torch.compile, at
            static shapes; MoE layers have kernels of their own and stay as they are.
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
        ValueError: when sizes and degrees do not fit, experts share a parameter with another
            module, or trainable parameters of one FSDP2 unit have several dtypes or no values,
            before any collective (MoE blocks may then be swapped for MoELayers already); when
            blocks have hooks; when ranks hold different models.
        NotImplementedError: for cp > 1, pp > 1, and tp > 1 on models without
            `apply_tensor_parallel(tp_mesh)`; for blocks of transformers that were customised.
    """
    _check_request(model, meshes, dispatcher, nvlink, loss)
    if overlap_shared and meshes.device_type != "cuda":
        raise ValueError(
            f"overlap_shared (True) must go with device_type ({meshes.device_type!r}) = 'cuda', "
            "the only one with streams: drop it"
        )
    options = fsdp or FSDPOptions()
    layers = swap_blocks(model, adapters or {})
    _refuse_shared_experts(layers)
    for name, layer in layers.items():
        _check_layer(name, layer, meshes)
        if is_tied(layer.part("experts"), model):  # they are cut next, each module its own
            raise ValueError(
                f"{name}: parameters of experts must not be shared with another module, because "
                "experts live on a mesh of their own: untie them"
            )
        _configure(layer, meshes, experts, recompute_fc1, balance, options)
    _refuse_rounded_routers(model, layers, options)
    check_parameters(model, meshes, options)
    dispatcher = _choose_dispatcher(meshes, dispatcher, nvlink)
    _check_equal_weights(model, meshes.device_type)

    if meshes.parallel.tp > 1:
        cast(Any, model).apply_tensor_parallel(meshes.dense["tp"])
    stream = torch.cuda.Stream() if overlap_shared else None
    exchanges = None
    if dispatcher == "nvlink" and meshes.dispatch_group is not None:
        ep = meshes.parallel.ep
        exchanges = ExchangePool(meshes.dispatch_group, ep=ep, options=nvlink)
    for layer in layers.values():
        layer.tracker.reset()  # what ran before is no part of a step
        _place_experts(layer, meshes, dispatcher, exchanges)
        if layer.layout.shared in layer._modules:
            layer.shared_stream = stream
    shard_model(model, meshes, options, loss=loss)
    refuse_save_pretrained(model)
    if compile:
        compile_blocks(find_blocks(model), dynamic=False)
        warn_about_cache(model)
    groups = BalanceGroups(
        micro_batch=meshes.micro_batch_group,
        global_batch=meshes.stage_group if meshes.stage_group.size() > 1 else None,
        data_ranks=meshes.data_ranks,
    )
    check = partial(refuse_added, model)
    state = MoEState(layers, groups, loss=loss, exchanges=exchanges, check_parameters=check)
    setattr(model, STATE_NAME, state)
    return model


def _check_request(
    model: nn.Module, meshes: Meshes, dispatcher: str, nvlink: NVLinkOptions | None, loss: str
) -> None:
    p = meshes.parallel
    for name, value, choices in (
        ("dispatcher", dispatcher, get_args(DispatcherName)),
        ("loss", loss, get_args(LossConvention)),
    ):
        if value not in choices:
            shown = ", ".join(repr(c) for c in choices)
            raise ValueError(f"{name} ({value!r}) must be one of {shown}")
    if nvlink is not None and dispatcher not in ("auto", "nvlink"):
        raise ValueError(
            f"nvlink ({nvlink}) must go with dispatcher ({dispatcher!r}) = 'nvlink' or 'auto': "
            "drop it"
        )
    if dispatcher in ("alltoall", "allgather", "nvlink") and p.ep * p.etp == 1:
        warnings.warn(f"dispatcher ({dispatcher!r}) is not used: ep * etp is 1", stacklevel=3)
    if dispatcher == "local" and p.ep * p.etp > 1:
        raise ValueError(
            f"dispatcher ('local') must go with ep * etp ({p.ep * p.etp}) = 1: use 'alltoall'"
        )
    for name, module in model.named_modules():
        is_unit = isinstance(module, FSDPModule)
        has_layers = is_unit and any(isinstance(m, MoELayer) for m in module.modules())  # type: ignore[attr-defined]
        if has_layers or getattr(module, STATE_NAME, None) is not None:
            raise ValueError(
                f"{name or 'model'} ({type(module).__name__}) must not be parallelized already: "
                "call parallelize_moe once, on the whole"
            )
    for name, param in model.named_parameters():
        if has_gradient_hooks(param):
            raise ValueError(
                f"{name} must have no hooks, which its sharded parameter would not have: after "
                "parallelize_moe use register_post_accumulate_grad_hook"
            )
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
    refuse_lost_outputs(model)


def _refuse_shared_experts(layers: Mapping[str, MoELayer]) -> None:
    owners: dict[nn.Module, str] = {}
    for name, layer in layers.items():
        first = owners.setdefault(layer.part("experts"), name)
        if first != name:
            raise ValueError(
                f"{name} and {first} must not share one experts module, which is sharded and "
                "counted with its layer: share the whole MoELayer, or untie them"
            )


def _refuse_rounded_routers(
    model: nn.Module, layers: Mapping[str, MoELayer], options: FSDPOptions
) -> None:
    """A router that keeps its precision is an FSDP2 unit: two of them would train two copies."""
    routers = [layer.part("router") for layer in layers.values()]
    for name, router in zip(layers, routers, strict=True):
        is_shared = routers.count(router) > 1 or is_tied(router, model)
        if is_shared and keeps_precision(router, options):
            raise ValueError(
                f"router of {name} must not be shared with param_dtype ({options.param_dtype}), "
                "which would round it with the root's parameters: untie it"
            )


def _check_layer(name: str, layer: MoELayer, meshes: Meshes) -> None:
    p, config = meshes.parallel, layer.config
    experts = layer.part("experts")
    expected = set(expert_shapes(config, layer.layout.expert_layout))
    found = {n for n, _ in experts.named_parameters()}
    if not isinstance(experts, Experts) or found != expected:
        raise ValueError(
            f"{name}: experts ({type(experts).__name__} with {sorted(found)}) must be Experts with "
            f"{sorted(expected)}: leave out wrappers and parametrizations"
        )
    rules = [("num_experts", config.num_experts, "ep", p.ep)]
    rules += [("hidden_dim", config.hidden_dim, "etp", p.etp)]
    if config.fc2_bias:
        rules += [("dim", config.expert_dim, "etp", p.etp)]
    if layer.part("experts").is_strided and p.etp > 1:
        rules += [("dim", config.expert_dim, "edp_shard", p.edp_shard)]
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


def _configure(
    layer: MoELayer,
    meshes: Meshes,
    backend: ExpertBackend,
    recompute_fc1: bool,
    balance: BalanceConfig | None,
    options: FSDPOptions,
) -> None:
    module = layer.part("experts")
    module.set_backend(backend, recompute_fc1=recompute_fc1)
    spec = module.spec(
        dim=layer.config.expert_dim,
        hidden_dim=layer.config.hidden_dim // meshes.parallel.etp,
        dtypes=frozenset([options.param_dtype or next(module.parameters()).dtype]),
        device=torch.device(meshes.device_type),
    )
    check_backend(backend, spec)
    if balance is not None:
        layer.set_balance(balance)


@torch.no_grad()
def _check_equal_weights(model: nn.Module, device_type: str) -> None:
    """Weights that differ between ranks would be mixed shard by shard, or drift silently.

    First one number, so that ranks with different tensors (one meta, one loaded) still meet.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    summary = repr([(n, tuple(t.shape), str(t.dtype), t.is_meta) for n, t in tensors])
    digest = int.from_bytes(hashlib.sha256(summary.encode()).digest()[:8], "little", signed=True)
    if _differ(torch.tensor([digest], device=device_type)):
        raise ValueError(
            "model must have the same tensors, all meta or all real, on every rank before "
            "sharding: build it alike everywhere, also where nothing is loaded"
        )
    real = [(n, t) for n, t in tensors if not t.is_meta and t.numel()]
    if not real:
        return
    different = _differ(torch.stack([_checksum(t).to(device_type) for _, t in real]))
    if different:
        raise ValueError(
            f"weights of {real[different[0]][0]} (and {len(different) - 1} more) must be equal "
            "on every rank before sharding: seed every rank alike or load one checkpoint"
        )


def _differ(values: Tensor) -> list[int]:
    """Return the positions at which ranks hold different numbers. Two collectives, a host sync."""
    lowest, highest = values.clone(), values.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return (lowest != highest).nonzero().flatten().tolist()


def _checksum(tensor: Tensor) -> Tensor:
    """Return an int64 sum of the tensor's bytes, each times a number that depends on its place."""
    bits = tensor.detach().contiguous().flatten().view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for i, chunk in enumerate(bits.split(1 << 22)):
        places = torch.arange(1, chunk.numel() + 1, device=tensor.device)
        total += (places * places % 1000003 * (i + 1) * (chunk.to(torch.int64) + 1)).sum()
    return total


def _choose_dispatcher(
    meshes: Meshes, name: DispatcherName, options: NVLinkOptions | None
) -> DispatcherName:
    """Return the dispatcher that "auto" means here; refuse nvlink where it can not work.

    Collective on GPUs for "nvlink", and for "auto" with a capacity factor.
    """
    group = meshes.dispatch_group
    if name not in ("auto", "nvlink") or group is None:
        return "local" if group is None else name
    problem = None
    if name == "auto" and meshes.device_type == "cuda":
        problem = _memory_problem(meshes, options or NVLinkOptions())
    problem = problem or find_problem(group, meshes.device_type)
    if name == "nvlink" and problem is not None:
        raise ValueError(f"dispatcher ('nvlink') {problem}")
    chosen: DispatcherName = "nvlink" if problem is None else "alltoall"
    if name == "auto" and dist.get_rank() == 0:
        why = "peer access among all GPUs of the group"
        if problem is not None:
            why = f"'nvlink' {problem.partition(': ')[0]}"
        logger.info("dispatcher 'auto' is %r: %s", chosen, why)
    return chosen


def _memory_problem(meshes: Meshes, options: NVLinkOptions) -> str | None:
    """Return why nvlink must be asked for by name: its shapes are static, so its room is too."""
    if options.capacity_factor is not None or options.exact_rows:
        return None
    ep = meshes.parallel.ep
    return (
        "must have NVLinkOptions.capacity_factor (None), or every layer keeps room for any "
        f"routing, up to ep ({ep}) times the expert rows of a balanced one: set it, 2.0 say"
    )


def _place_experts(
    layer: MoELayer, meshes: Meshes, dispatcher: DispatcherName, exchanges: ExchangePool | None
) -> None:
    p = meshes.parallel
    if p.ep * p.etp > 1 or is_whole(meshes):
        experts = layer.part("experts")
        assert isinstance(experts, Experts)
        experts.shard(meshes.expert["ep", "etp"])
    layer.dispatcher = _make_dispatcher(layer.config.num_experts, meshes, dispatcher, exchanges)


def _make_dispatcher(
    num_experts: int, meshes: Meshes, name: DispatcherName, exchanges: ExchangePool | None
) -> Dispatcher:
    p, group = meshes.parallel, meshes.dispatch_group
    if group is None:
        return LocalDispatcher(num_experts)
    placement = ExpertPlacement(group=group, num_experts=num_experts, ep=p.ep, etp=p.etp)
    if exchanges is not None:
        return NVLinkDispatcher(placement, exchanges)
    classes: dict[str, Any] = {"alltoall": AllToAllDispatcher, "allgather": AllGatherDispatcher}
    return classes[name](placement)
