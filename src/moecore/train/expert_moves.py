"""move_experts: moves experts to other ranks between two optimizer steps, to balance rank loads.

    loads -> place_experts -> order of a layer's experts -> weights and optimizer state move
    router -> expert ids -> slots (`RoutedLayer.slots_E1`) -> dispatch

A slot is a position in the stacked expert parameters of a layer, which are in the order of slots
after a move. All other parts of the layer use the model's order: router, biases, losses, counts and
recorded routing. Code that reads or writes parameters by expert runs in `restore_expert_order`, or
`RoutedLayer.check_expert_order` raises.

Legend: E experts, P ranks of ep, r rows of dim 0 of this rank's shard.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moecore.base.failures import share_call_errors, share_errors
from moecore.base.fields import check_arguments
from moecore.base.params import compute_global_indices
from moecore.base.rank_checks import check_equal
from moecore.base.torch_private import get_local_tensor
from moecore.kernels.adamw_formats import MOMENT_BLOCK
from moecore.moe.expert_order import place_experts
from moecore.moe.layer import RoutedLayer
from moecore.moe.param_reader import get_fp8_blocks
from moecore.parallel.model.parallel_state import (
    ParallelState,
    get_parallel_state,
    get_progress,
    reshard_units,
)

P = ParamSpec("P")
T = TypeVar("T")
Optimizers = Optimizer | Sequence[Optimizer]
_guarded: weakref.WeakSet[RoutedLayer] = weakref.WeakSet()
Orders = Mapping[RoutedLayer, Tensor]  # int64 [E] on the CPU: the expert in each slot
OrdersByName = Mapping[str, Tensor]  # the same by the layer's name


@torch.no_grad()
@share_call_errors
def move_experts(
    model: nn.Module, optimizers: Optimizers | None, loads: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Move experts between expert-parallel ranks so that ranks have even loads. Collective.

    Weights, master weights and moments move with their experts, so training continues as without
    the call: only the order of sums over a token's experts changes. Outputs, biases, losses,
    metrics, checkpoints and exports keep the model's order of experts. `save`, `load`, `Saver`,
    `export_hf`, `load_hf`, `save_adapters` and `load_adapters` move experts to this order and back.
    Other calls that access experts by number, such as `state_dict`, raise NotImplementedError.

    Args:
        model: a parallelized model with ep > 1, between two optimizer steps.
        optimizers: all optimizers of the experts' parameters; None = the experts are frozen.
        loads: layer name -> [E] tokens per expert or shares of tokens, such as
            `MoEMetrics.tokens_per_expert`. A layer without loads keeps its order, and so does a
            layer whose busiest rank would not get fewer tokens. None = restore the model's order.

    Returns:
        Layer name -> int64 [E] on the CPU. Entry i is the expert in slot i, and rank p of ep owns
        slots p * E / ep to (p + 1) * E / ep.

    Raises:
        ValueError: on every rank, before anything moves: if the model is not parallelized with
            ep > 1, gradients exist, loads have other names or shapes or differ between ranks, or a
            trained expert is in none of the optimizers.
        NotImplementedError: on every rank, before anything moves: with etp, pp, expert clones, CUDA
            graphs, experts that are stored only in FP8 or 4 bits, FP8 moments that share a scale
            between two experts, or optimizer state that is not a DTensor like its parameter.
    """
    arguments = locals()
    with share_errors():
        check_arguments(move_experts, arguments)
        record = _check_model(model)
        owners = _list_optimizers(optimizers)
        trained = {p for owner in owners for group in owner.param_groups for p in group["params"]}
        for name, layer in record.layers.items():
            for param_name, param in layer.get_part("experts").named_parameters():
                if param.grad is not None or (param.requires_grad and param not in trained):
                    raise ValueError(
                        f"{param_name} of {name} must have no gradient and an optimizer to move: "
                        "call move_experts after finish(), with all optimizers"
                    )
        orders = _plan_orders(record, loads)
        tensors = [name for x in record.layers.values() for name in _check_state(x, owners)]
        entries = {f"order of {name}": order_E.tolist() for name, order_E in orders.items()}
    device_type = record.request.meshes.device.type
    check_equal({**entries, "state of experts": tensors}, device_type)
    _apply_orders(model, owners, {record.layers[name]: x for name, x in orders.items()})
    return orders


def count_moved_bytes(
    model: nn.Module, optimizers: Optimizers | None, before: OrdersByName, after: OrdersByName
) -> int:
    """Return the bytes of weights and optimizer state that a move sends to this rank.

    `before` and `after` are results of `move_experts`. A layer without an order before has the
    model's order. The call sends nothing.
    """
    record, owners, num_bytes = get_parallel_state(model), _list_optimizers(optimizers), 0
    assert record is not None, "experts of a parallelized model move"
    for name, order_E in after.items():
        order_before_E = before.get(name, torch.arange(len(order_E), device="cpu"))
        sources_E = order_before_E.argsort()[order_E]
        for param in record.layers[name].get_part("experts").parameters():
            states = [_get_state(owner, param) for owner in owners if owner.state.get(param)]
            for tensor in (param, *(x for state in states for x in state.values() if x.ndim)):
                rows_r = compute_global_indices(tensor)[0]
                num_rows = int((~torch.isin(sources_E[rows_r], rows_r)).sum())
                num_bytes += num_rows * get_local_tensor(tensor)[:1].nbytes
    return num_bytes


@contextmanager
def restore_expert_order(model: nn.Module, optimizers: Optimizers | None) -> Iterator[None]:
    """Return a context in which experts have the model's order. Collective if experts were moved.

    `optimizers` are the optimizers whose state is read or written inside the context.
    """
    orders = {
        m: _get_order(m)
        for m in model.modules()
        if isinstance(m, RoutedLayer) and m.slots_E1 is not None
    }
    owners = _list_optimizers(optimizers) if orders else []
    _apply_orders(model, owners, {m: torch.arange(len(x), device="cpu") for m, x in orders.items()})
    try:
        yield
    finally:
        _apply_orders(model, owners, orders)


def run_in_expert_order(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function with arguments `model` and maybe `optimizer` in `restore_expert_order`."""
    parameters = signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            values = parameters.bind(*args, **kwargs).arguments
        except TypeError:  # `function` raises it on all ranks
            return function(*args, **kwargs)
        if not isinstance(values["model"], nn.Module):  # `function` raises an error
            return function(*args, **kwargs)
        with restore_expert_order(values["model"], values.get("optimizer")):
            return function(*args, **kwargs)

    return call


def _list_optimizers(optimizers: Optimizers | None) -> list[Optimizer]:
    """Return the optimizers as a list, with offloaded state copied back."""
    owners = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers or [])
    for owner in owners:  # a method of moecore.train.StateOffload
        getattr(owner, "bring_state_back", lambda: None)()
    return owners


def _check_model(model: nn.Module) -> ParallelState:
    """Return the model's record, or raise an error if its experts cannot move now."""
    record = get_parallel_state(model)
    parallel = None if record is None else record.request.meshes.parallel
    if record is None or parallel is None or parallel.ep == 1:
        raise ValueError(
            f"model ({type(model).__name__}) must be parallelized with ep > 1 to move experts: "
            "pass what parallelize_moe returned"
        )
    progress = get_progress(model)
    if progress is not None:
        progress.check_not_in_micro_batch("move_experts()")
    capacity = record.capacity
    features = {
        "etp": parallel.etp > 1,
        "pp": parallel.pp > 1,
        "DispatchOptions.clones": any(x.cloner is not None for x in record.layers.values()),
        "a captured CUDA graph": capacity is not None and capacity.graph_steps is not None,
    }
    for feature, is_used in features.items():
        if is_used:
            raise NotImplementedError(
                f"move_experts with {feature} is not supported: leave out one of them"
            )
    return record


def _check_state(layer: RoutedLayer, owners: Sequence[Optimizer]) -> list[str]:
    """Return names of the tensors that move; raise NotImplementedError if any cannot move."""
    names = []
    for name, param in layer.get_part("experts").named_parameters():
        if get_fp8_blocks(param) is not None:
            raise NotImplementedError(
                f"{name} of experts (stored only in FP8 or 4 bits) cannot move: keep their values"
            )
        num_rows = max(len(get_local_tensor(param)), 1)
        names.append(name)
        for owner in (o for o in owners if param in o.state):
            names += [f"{name}.{key}" for key in sorted(owner.state[param])]
            is_blocked = "exponents" in owner.state[param]
            if is_blocked and get_local_tensor(param).numel() // num_rows % MOMENT_BLOCK:
                raise NotImplementedError(
                    f"FP8 moments of {name} have blocks of {MOMENT_BLOCK} values of two experts: "
                    "use moment_dtype=torch.bfloat16"
                )
            for key, value in _get_state(owner, param).items():
                is_like = isinstance(value, DTensor) and len(value) == len(param)
                if not isinstance(value, Tensor) or (value.ndim and not is_like):
                    raise NotImplementedError(
                        f"optimizer state {key} of {name} must be a DTensor of the experts to "
                        "move: use another optimizer"
                    )
    return names


def _get_state(owner: Optimizer, param: Tensor) -> dict[str, Tensor]:
    """Return a parameter's optimizer state as checkpoints store it."""
    state: dict[str, Tensor] = getattr(owner, "get_stored_state", owner.state.__getitem__)(param)
    return state


def _get_order(layer: RoutedLayer) -> Tensor:
    """Return int64 [E] on the CPU: the expert in each slot of a layer."""
    if layer.slots_E1 is None:
        return torch.arange(layer.config.num_experts, device="cpu")
    return layer.slots_E1[:-1].cpu().argsort()


def _plan_orders(record: ParallelState, loads: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return the new order of each layer's experts by name."""
    ep, orders = record.request.meshes.parallel.ep, dict[str, Tensor]()
    for name in (loads or {}).keys() - record.layers.keys():
        raise ValueError(
            f"loads ({name}) must be of the model's MoE layers: pass tokens_per_expert"
        )
    for name, layer in record.layers.items():
        E, order_E = layer.config.num_experts, _get_order(layer)
        orders[name] = order_E if loads is not None else torch.arange(E, device="cpu")
        if loads is None or name not in loads:
            continue
        # Entries after E count zero experts.
        loads_E = loads[name].cpu().double()[:E]
        if loads_E.shape != (E,) or not bool(torch.isfinite(loads_E).all()):
            raise ValueError(
                f"loads of {name} {tuple(loads[name].shape)} must be {E} finite numbers: pass "
                "tokens_per_expert"
            )
        plan_E = place_experts(loads_E, num_ranks=ep)
        load, plan_load = (loads_E[x].view(ep, -1).sum(1).max() for x in (order_E, plan_E))
        if plan_load < load:
            orders[name] = plan_E
    return orders


@torch.no_grad()
def _apply_orders(model: nn.Module, owners: Sequence[Optimizer], orders: Orders) -> None:
    """Move weights and optimizer state to these orders, and set the layers' slots. Collective."""
    if not orders:
        return
    reshard_units(model)
    for layer, order_E in orders.items():
        experts, E = layer.get_part("experts"), len(order_E)
        # Slot i has expert order_E[i], which is now in slot sources_E[i].
        sources_E = _get_order(layer).argsort()[order_E]
        if sources_E.equal(torch.arange(E, device="cpu")):
            continue
        for param in experts.parameters():
            _move_rows_(param, sources_E, param.device)
            for owner in (o for o in owners if o.state.get(param)):
                state = _get_state(owner, param)
                for key in sorted(state):  # a loaded state has another order on each rank
                    if state[key].ndim:
                        _move_rows_(state[key], sources_E, param.device)
                getattr(owner, "restore_state", owner.state.__setitem__)(param, state)
        experts.reader.drop_copies()  # quantised weights in the last order
        slots_E1 = torch.cat(
            [order_E.argsort(), torch.full((1,), -1, dtype=torch.int64, device="cpu")]
        )
        is_identity = order_E.equal(torch.arange(E, device="cpu"))
        layer.slots_E1 = None if is_identity else slots_E1.to(param.device, torch.int32)
        if layer not in _guarded:  # `state_dict` and `load_state_dict` raise an error
            layer.register_state_dict_pre_hook(_check_expert_order)
            layer.register_load_state_dict_pre_hook(_check_expert_order)
            _guarded.add(layer)


def _check_expert_order(layer: nn.Module, *_: Any) -> None:
    assert isinstance(layer, RoutedLayer), "the hook is of a layer"
    layer.check_expert_order()


def _move_rows_(tensor: Tensor, sources_E: Tensor, device: torch.device) -> None:
    """Set row i of a DTensor's dim 0 to its row `sources_E[i]`, in place. Collective.

    Rows are sent between ranks whose coordinates differ only in mesh axes that shard dim 0.
    Messages are on `device`.
    """
    assert isinstance(tensor, DTensor), "experts are sharded over ep"
    mesh, local = tensor.device_mesh, get_local_tensor(tensor).detach()
    coordinate, this_rank = mesh.get_coordinate(), dist.get_rank()
    assert coordinate is not None, "this rank has a shard"
    axes = [i for i, p in enumerate(tensor.placements) if getattr(p, "dim", None) == 0]
    rows_of: dict[int, Tensor] = {}  # rank -> its rows, sorted
    for part in itertools.product(*(range(mesh.size(axis)) for axis in axes)):
        peer = list(coordinate)
        for axis, idx in zip(axes, part, strict=True):
            peer[axis] = idx
        rows_of[int(mesh.mesh[tuple(peer)])] = compute_global_indices(tensor, peer)[0]
    rows_r = rows_of[this_rank]
    sources_r, ops = sources_E[rows_r], list[dist.P2POp]()
    arrivals: list[tuple[Tensor, Tensor]] = []  # places in the shard, and their rows as bytes
    for rank, peer_rows in rows_of.items():
        peer_sources = sources_E[peer_rows]
        local_idx = torch.searchsorted(rows_r, peer_sources[torch.isin(peer_sources, rows_r)])
        message = local[local_idx.to(local.device)].to(device).reshape(-1).view(torch.uint8)
        places = torch.isin(sources_r, peer_rows).nonzero().flatten()
        if rank == this_rank:
            arrivals.append((places, message))
            continue
        if len(local_idx):
            ops.append(dist.P2POp(dist.isend, message, rank))
        if len(places):
            row_bytes = local[:1].numel() * local.itemsize
            buffer = message.new_empty(len(places) * row_bytes)
            arrivals.append((places, buffer))
            ops.append(dist.P2POp(dist.irecv, buffer, rank))
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
    for places, message in arrivals:
        values = message.view(local.dtype).view(len(places), *local.shape[1:])
        local[places.to(local.device)] = values.to(local.device)
