"""The tensors of a model, its optimizer and this rank in a checkpoint, and their names.

Legend: E experts, D model dim, F expert hidden dim.

    model.<fqn>               parameters and persistent buffers
    optimizer.<slot>.<fqn>    optimizer state; the slot is the state key, such as exp_avg
    amax.<fqn>.<operand>      history of delayed scaling, fp32 [steps], the newest first
    rng.<device>.<rank>       generator state of one rank, uint8
    extra.<name>              the caller's tensors

torch.distributed.checkpoint reads the global position of a shard from DTensor placements. A
checkpoint can store only blocks, so gate and up in one dim are stored as a view (`split_halves`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.optim import Optimizer

from moecore.base.fields import format_name
from moecore.base.params import clean_name
from moecore.base.torch_private import StridedShard
from moecore.io.checkpoint.config_differences import find_model_config
from moecore.io.checkpoint.ranks import get_rank_and_world
from moecore.moe.amax_history import GRADIENTS, AmaxHistory
from moecore.moe.experts import Experts
from moecore.moe.stored_weights import get_four_bit_blocks
from moecore.parallel.model.parallel_state import list_parallel_states
from moecore.precision.amax import list_amax_histories
from moecore.precision.stored import refuse_fp8_storage

STAGE_KINDS = ("model", "optimizer", "amax")  # kinds of tensors that differ by pipeline stage
Optimizers = Optimizer | Sequence[Optimizer]


class ModelView:
    """The tensors of a model by name, and the views of these tensors that a checkpoint stores.

    `tensors` has parameters and persistent buffers. `stored_views` has the views. Frozen experts in
    4 bits are left out, because `load_hf` fills them. Construction raises ValueError for tensors on
    meta or stored only in FP8.
    """

    def __init__(self, model: nn.Module) -> None:
        refuse_fp8_storage(model, "saved or loaded")
        self.tensors: dict[str, Tensor] = {}  # tied tensors only under their first name
        self.config = find_model_config(model)
        self._names: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            name = clean_name(name)
            if not isinstance(tensor, Tensor):
                raise NotImplementedError(
                    f"model state {format_name(name)} ({type(tensor).__name__}) must be a tensor "
                    "to be saved"
                )
            if tensor.is_meta:
                raise ValueError(
                    f"{format_name(name)} (meta) must have storage to be saved or loaded: call "
                    "to_empty first"
                )
            if id(tensor) not in self._names and get_four_bit_blocks(tensor) is None:
                self._names[id(tensor)] = name
                self.tensors[name] = tensor
        halves: dict[int, int] = {}  # id of a parameter -> dim in which gate and up are stacked
        for module in model.modules():
            if isinstance(module, Experts) and module.is_strided:
                w1 = getattr(module, module.layout.w1)
                model_dim = module.get_model_dim_idx(w1)
                assert model_dim is not None, "FC1 is a matrix"
                halves[id(w1)] = 3 - model_dim
                if module.config.fc1_bias:
                    halves[id(getattr(module, module.layout.b1))] = 1
        self._halved_dims = {n: halves.get(id(t)) for n, t in self.tensors.items()}
        self.stored_views = {
            name: self.make_stored_view(name, t.detach()) for name, t in self.tensors.items()
        }

    def make_stored_view(self, name: str, tensor: Tensor) -> Tensor:
        """Return the view of a parameter or its optimizer state that a checkpoint stores.

        Gate and up projections in one matrix get a dim of size 2, so that each can be sharded.
        """
        dim = self._halved_dims[name]
        return tensor if dim is None else split_halves(tensor, dim)

    def get_name(self, param: Tensor) -> str:
        """Return a parameter's name; raise ValueError if the model does not have the parameter."""
        if id(param) not in self._names:
            raise ValueError(
                f"optimizer parameter {tuple(param.shape)} must be one of the model's: build the "
                "optimizer after parallelize_moe"
            )
        return self._names[id(param)]


def prepare_optimizers(optimizer: Optimizers | None, model: ModelView) -> list[Optimizer]:
    """Return the optimizers as a list, with offloaded state copied back; ValueError if invalid."""
    if optimizer is None:
        return []
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    if not optimizers:
        raise ValueError(
            "optimizer ([]) must be one of torch's, or a list of several: pass None where there is "
            "none"
        )
    owners: dict[str, int] = {}
    for i, owner in enumerate(optimizers):
        for name in (model.get_name(p) for group in owner.param_groups for p in group["params"]):
            if owners.setdefault(name, i) != i:
                raise ValueError(
                    f"{format_name(name)} must belong to one optimizer, but "
                    f"optimizer[{owners[name]}] and "
                    f"optimizer[{i}] hold it: give each its own parameters"
                )
    for owner in optimizers:  # a method of moecore.train.StateOffload
        getattr(owner, "bring_state_back", lambda: None)()
    return optimizers


def collect_optimizer_tensors(
    optimizers: Sequence[Optimizer], model: ModelView
) -> dict[str, Tensor]:
    """Return views of all optimizer state by "<state key>.<fqn>", or raise NotImplementedError."""
    tensors: dict[str, Tensor] = {}
    seen: set[str] = set()
    for owner, param in ((o, param) for o in optimizers for param in o.state):
        name = model.get_name(param)
        state = _call_method(owner, "get_stored_state", owner.state[param], param)
        if name in seen:
            raise ValueError(
                f"{format_name(name)} must have state in one optimizer, but two have some: remove "
                "it from the one that does not step it"
            )
        seen.add(name)
        for slot, value in state.items():
            like = get_state_template(owner, param, slot)
            if not isinstance(value, Tensor) or not _is_storable(value, like):
                raise NotImplementedError(
                    f"optimizer state {slot} of {format_name(name)} must be a scalar tensor or "
                    f"have the shape and placements of the parameter, {tuple(like.shape)}"
                )
            tensors[f"{slot}.{name}"] = (
                value if value.ndim == 0 else model.make_stored_view(name, value)
            )
    return tensors


def allocate_optimizer_state(
    optimizer: Optimizer,
    model: ModelView,
    matrices: Mapping[str, torch.dtype],
    scalars: Mapping[str, torch.dtype],
) -> tuple[dict[Tensor, dict[str, Tensor]], dict[str, Tensor]]:
    """Return {parameter: {state key: reused or new tensor}}, and the stored view of each tensor.

    `matrices` and `scalars` have names "<state key>.<fqn>", as the views do. Scalars are 0-dim.
    """
    slots: dict[str, list[str]] = {}
    for key in (*matrices, *scalars):
        slot, name = key.split(".", 1)
        slots.setdefault(name, []).append(slot)
    state: dict[Tensor, dict[str, Tensor]] = {}
    views: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            name = model.get_name(param)
            current = optimizer.state.get(param, {})
            for slot in sorted(slots.get(name, ())):
                key = f"{slot}.{name}"
                if key in matrices:
                    dtype = _choose_moment_dtype(optimizer, param, matrices[key])
                    place = _call_method(optimizer, "get_state_device", param.device, param)
                    like = get_state_template(optimizer, param, slot)
                else:
                    # As in torch: step counts are on the CPU without these options.
                    is_on_device = group.get("fused") or group.get("capturable")
                    is_on_device = is_on_device or (param.ndim == 0 and slot != "step")
                    place = param.device if is_on_device else torch.device("cpu")
                    dtype, like = scalars[key], torch.empty((), dtype=torch.float32, device="cpu")
                value = _reuse_or_allocate(current.get(slot), like, dtype, place)
                state.setdefault(param, {})[slot] = value
                views[key] = value if key in scalars else model.make_stored_view(name, value)
    return state, views


def restore_optimizer_state(optimizer: Optimizer, state: dict[Tensor, dict[str, Tensor]]) -> None:
    """Move the state from `allocate_optimizer_state` into the optimizer; `state` is then empty."""
    restore = getattr(optimizer, "restore_state", None)
    while state:
        param, slots = state.popitem()
        if restore is not None:  # as moecore.train.AdamW declares
            restore(param, slots)
        else:
            optimizer.state[param] = slots


def get_state_template(optimizer: Optimizer, param: Tensor, slot: str) -> Tensor:
    """Return a tensor with the shape and placements of the state with key `slot` ("exp_avg")."""
    like: Tensor = _call_method(optimizer, "get_state_template", param, param, slot)
    return like


def _call_method(optimizer: Optimizer, method_name: str, default: Any, *args: Any) -> Any:
    """Call the optimizer's method `method_name`, or return `default` if it has no such method."""
    # AdamW has get_stored_state, get_moment_dtype, get_state_device; Muon get_state_template.
    method = getattr(optimizer, method_name, None)
    return default if method is None else method(*args)


def _choose_moment_dtype(
    optimizer: Optimizer, param: Tensor, stored_dtype: torch.dtype
) -> torch.dtype:
    """Return the dtype in which the optimizer stores a moment that was saved in `stored_dtype`."""
    if not stored_dtype.is_floating_point:
        return stored_dtype
    default = stored_dtype
    if type(optimizer).__module__.startswith("torch.optim."):  # not below the parameter's dtype
        default = torch.promote_types(stored_dtype, param.dtype)
    dtype: torch.dtype = _call_method(optimizer, "get_moment_dtype", default, param)
    return dtype


def _reuse_or_allocate(
    current: object, template: Tensor, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return `current` if it has this dtype, device and `template`'s layout, or a new tensor."""
    if (
        isinstance(current, Tensor)
        and (current.shape, current.dtype, current.device) == (template.shape, dtype, device)
        and getattr(current, "device_mesh", None) == getattr(template, "device_mesh", None)
        and getattr(current, "placements", None) == getattr(template, "placements", None)
    ):
        return current
    return torch.empty_like(template, dtype=dtype, device=device, requires_grad=False)


def map_amax_operands(model: nn.Module) -> dict[str, tuple[AmaxHistory, str]]:
    """Return "<fqn>.<operand>" -> (amax history of the FP8 module, operand), for delayed scaling.

    Names of gradient operands end in the parallel degrees, such as ".dp4.cp1.tp2", because the
    magnitude of gradients depends on the assignment of tokens to ranks.
    """
    degrees = "dp1.cp1.tp1"
    for state in list_parallel_states(model):
        parallel = state.request.meshes.parallel
        num_data = parallel.dp_replicate * parallel.dp_shard
        degrees = f"dp{num_data}.cp{parallel.cp}.tp{parallel.tp}"
    return {
        f"{name}.{operand}.{degrees}" if operand in GRADIENTS else f"{name}.{operand}": (
            history,
            operand,
        )
        for name, history in list_amax_histories(model).items()
        for operand in history.operands
    }


@torch.no_grad()
def restore_amax_histories(model: nn.Module, saved_histories: Mapping[str, Tensor]) -> None:
    """Set amax histories to saved fp32 tensors [steps]; histories without a tensor are cleared."""
    steps_by_history: dict[AmaxHistory, dict[str, Tensor]] = {}
    for name, (history, operand) in map_amax_operands(model).items():
        steps = steps_by_history.setdefault(history, {})
        if name in saved_histories:
            steps[operand] = saved_histories[name]
    for history, steps in steps_by_history.items():
        history.load_recorded_amax(steps, next(model.parameters()).device)


def copy_rng_states() -> dict[str, Tensor]:
    """Copy this rank's CPU and CUDA generator states, by "rng.<device>.<rank>"."""
    rank, _ = get_rank_and_world()
    states = {f"rng.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def restore_rng_states(states: Mapping[str, Tensor]) -> None:
    """Set this rank's CPU and CUDA generators to states from `copy_rng_states`."""
    for name, state in states.items():
        set_state = torch.set_rng_state if name.startswith("rng.cpu.") else torch.cuda.set_rng_state
        set_state(state)


def _is_storable(value: Tensor, template: Tensor) -> bool:
    """Whether optimizer state is a plain scalar, or has `template`'s shape and kind (DTensor)."""
    if value.ndim == 0:
        return not isinstance(value, DTensor)
    return value.shape == template.shape and isinstance(value, DTensor) == isinstance(
        template, DTensor
    )


def split_halves(tensor: Tensor, dim: int) -> Tensor:
    """Return a view of a tensor in which `dim` (gate, then up) is split into two dims (2, half)."""
    # An expert tensor parallel rank has a piece of both halves, which is a block only in the view.
    # Full tensors are split too, so that checkpoints do not depend on the parallel layout. Example:
    # [E, 8, D] over etp=2 with _StridedShard(1, split_factor=2): rank 1 has rows 2 3 6 7. The view
    # is [E, 2, 4, D] with Shard(2): rank 1 has the block [:, :, 2:4].
    if not isinstance(tensor, DTensor):
        view: Tensor = tensor.unflatten(dim, (2, tensor.shape[dim] // 2))
        return view
    local = tensor.to_local()
    shape = torch.Size((*tensor.shape[:dim], 2, tensor.shape[dim] // 2, *tensor.shape[dim + 1 :]))
    return DTensor.from_local(
        local.unflatten(dim, (2, local.shape[dim] // 2)),
        tensor.device_mesh,
        tuple(_shift_placement(p, dim) for p in tensor.placements),
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta", dtype=torch.float32).stride(),
    )


def _shift_placement(placement: Placement, dim: int) -> Placement:
    """Convert a DTensor's placement to the placement after `split_halves` has split `dim`."""
    axis = getattr(placement, "dim", None)
    if axis is None or axis < dim:
        return placement
    parts = getattr(placement, "split_factor", 1)
    if axis > dim:
        return Shard(axis + 1) if parts == 1 else StridedShard(axis + 1, split_factor=parts)
    if parts != 2:
        raise NotImplementedError(
            f"FC1 of gated experts with placement {placement} cannot be saved: its dim {dim} must "
            "be cut as gate and up, _StridedShard(dim, split_factor=2)"
        )
    return Shard(dim + 1)
