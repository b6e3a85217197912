"""Tensor parallelism for attention and dense MLPs of a transformers model.

Every tp rank has the same tokens, and runs transformers' code with its shards of the weights:

    attention, MLPs    the weights of the rank's heads or hidden dims. The outputs of `o_proj` and
                       `down_proj` are all-reduced before their biases are added.
    MoE layers         the input is this rank's slice of each sequence; the output is all-gathered
    other modules      replicated

Activations are therefore identical on all ranks. A rank's gradient is the gradient of the mean of
all ranks' losses with respect to the rank's tensors. Gradients of replicated weights are partial
sums over tp, as in the native decoder (`moecore.base.params.make_grad_placements`).

Legend: B rows, T tokens of a row, G tp ranks, D model dim, H heads, E experts.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from moecore.base.params import shard_parameter
from moecore.base.regions import run_and_save
from moecore.base.torch_private import skips_communication, tree_map_only
from moecore.families.transformers.head import hook_vocabulary
from moecore.families.transformers.linear_attention import disable_fused_layer
from moecore.families.transformers.linear_tp_plans import apply_gated_norm
from moecore.families.transformers.module_plan import (
    ModulePlan,
    Stack,
    find_owner,
    iterate_local_rows,
    list_output_linears,
    list_placements,
)
from moecore.families.transformers.stock import Arguments, bind_arguments, find_outermost_models
from moecore.families.transformers.tp_plans import plan_modules
from moecore.models.tensor_parallel import TensorParallel
from moecore.moe.dispatch.collectives import exchange_with_grad
from moecore.moe.layer import MoELayer, RoutedLayer
from moecore.parallel.pipeline.stages import AbsentModule

logger = logging.getLogger("moecore.parallelize")


class TensorParallelTransformer:
    """A wrapper of a transformers model that implements `TensorParallelModel` for the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def apply_tensor_parallel(self, tp_mesh: DeviceMesh) -> None:
        """Shard all supported modules except routed experts over a 1-D mesh, in place."""
        tp = TensorParallel(tp_mesh.get_group(), tp_mesh.get_local_rank(), tp_mesh.size())
        if tp.size == 1:
            return
        plans, replicated_types = plan_modules(self.model, tp.size)
        for reason in replicated_types:
            logger.info("tp leaves whole %s", reason)
        places = dict[tuple[nn.Module, str], Placement]()
        for module, plan in plans.items():
            places |= dict(list_placements(module, plan))
        places |= {(module, "weight"): Shard(0) for module in hook_vocabulary(self.model, tp)}
        for layer in self.model.modules():
            if isinstance(layer, RoutedLayer):
                TokenSliceHooks(tp, layer)
        _shard_parameters(self.model, tp_mesh, places)
        for module, plan in plans.items():
            _hook_module(tp, module, plan)
        GradientShareHooks(tp, self.model)

    def check_degree(self, tp: int) -> None:
        """Raise ValueError or NotImplementedError if `tp` ranks cannot shard an unsharded model."""
        drawn = {f"{n}.p": m.p for n, m in self.model.named_modules() if isinstance(m, nn.Dropout)}
        for outer in find_outermost_models(self.model):
            fields = vars(outer.config.get_text_config()) if hasattr(outer, "config") else {}
            drawn |= {n: x for n, x in fields.items() if "drop" in n or "jitter" in n}
        for name, value in drawn.items():
            if isinstance(value, float) and value > 0:
                raise ValueError(
                    f"{name} ({value}) must be 0 under ParallelConfig.tp ({tp}), whose ranks "
                    "compute equal tokens: set it in the config"
                )
        plans, replicated_types = plan_modules(self.model, tp)
        if not (plans or any(isinstance(m, MoELayer) for m in self.model.modules())):
            raise NotImplementedError(
                f"ParallelConfig.tp ({tp}) must be 1 for {type(self.model).__name__}, of "
                "which no module can be cut: "
                f"{'; '.join(replicated_types) or 'no attention is known'}"
            )


def _hook_module(tp: TensorParallel, module: Any, plan: ModulePlan) -> None:
    """Make a module with sharded parameters compute with this rank's shards, in place."""
    row: Any = module.get_submodule(plan.row)
    if row.bias is None:
        row.register_forward_hook(lambda _linear, _args, y: tp.all_reduce(y))
    else:
        row.__class__, row.tp = RowParallelLinear, tp
    for name in plan.norms:
        norm = module.get_submodule(name)
        norm.register_forward_pre_hook(lambda _norm, x: (tp.gather_last_dim(x[0]), *x[1:]))
        size = norm.weight.numel() // tp.size
        norm.register_forward_hook(partial(_slice_columns, tp.rank, size))
    for name, head_dim in (plan.shared or {}).items():
        linear = module.get_submodule(name)
        head = tp.rank * (linear.out_features // head_dim) // tp.size
        linear.register_forward_hook(partial(_slice_columns, head, head_dim))
    for name, stack in (plan.stacks or {}).items():
        for linear in list_output_linears(module.get_submodule(name)):
            linear.__class__ = FullRowsLinear
            linear.rows = list(iterate_local_rows(stack, tp.rank, tp.size))
        module.config = LocalHeadsConfig(module.config, stack[0][0] // tp.size)
    if plan.num_shared and hasattr(module, "num_key_value_groups"):
        module.num_key_value_groups = module.num_key_value_groups * plan.num_shared // tp.size
    for name, stack in plan.head_exchanges.items():
        module.get_submodule(name).register_forward_hook(StackedRowsHook(tp, stack))
    for name, stack in plan.local_reads.items():
        part = module.get_submodule(name)
        _replace_attributes(
            part, {n: partial(_select_weight_rows, tp, n, stack) for n in part._parameters}
        )
    if plan.local_reads:
        disable_fused_layer(module)
    for name, size in plan.groups.items():
        norm = module.get_submodule(name)
        norm.forward = partial(_apply_group_norm, tp, size, norm)
    for name, number in plan.counts.items():
        setattr(*find_owner(module, name), number)
    if plan.buffers:
        _replace_attributes(
            module, {n: partial(_slice_buffer, tp, n, dim) for n, dim in plan.buffers.items()}
        )


def _replace_attributes(
    module: nn.Module, getters: Mapping[str, Callable[[nn.Module], Any]]
) -> None:
    """Replace attributes by properties {name: getter}: change the module's class, in place."""
    base, properties = type(module), {name: property(getter) for name, getter in getters.items()}
    module.__class__ = type(base.__name__, (base,), properties | {"__module__": base.__module__})


def _slice_buffer(tp: TensorParallel, buffer_name: str, dim: int, module: nn.Module) -> Tensor:
    buffer = module._buffers[buffer_name]
    assert buffer is not None, "it has a number per head"
    return buffer.chunk(tp.size, dim)[tp.rank]


class FullRowsLinear(nn.Linear):
    """A linear with a replicated weight that computes only output columns (weight rows) `rows`."""

    rows: list[slice]

    def forward(self, input: Tensor) -> Tensor:
        """Return the output columns `rows` (slices), in their order."""
        bias = None if self.bias is None else torch.cat([self.bias[part] for part in self.rows])
        return F.linear(input, torch.cat([self.weight[part] for part in self.rows]), bias)


class LocalHeadsConfig:
    """A proxy of a config whose `num_attention_heads` is the number of this tp rank's heads."""

    def __init__(self, config: Any, num_attention_heads: int) -> None:
        self._config, self.num_attention_heads = config, num_attention_heads

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # read by `copy`
            raise AttributeError(name)
        return getattr(self._config, name)


def _select_weight_rows(tp: TensorParallel, name: str, sections: Stack, module: nn.Module) -> Any:
    """Return this tp rank's rows of a module's parameter, in sections such as q, k and v."""
    param = module._parameters[name]
    if param is None or isinstance(param, DTensor):  # outside of forward, such as initialisation
        return param
    return torch.cat([param[rows] for rows in iterate_local_rows(sections, tp.rank, tp.size)])


class StackedRowsHook:
    """Forward hook of a column-parallel linear: all-to-all that gives each rank its heads' columns.

    The linear shards its rows, which are in sections, contiguously and without regard to heads.
    Example: heads 0 and 1 have one row of q and two rows of v each. The linear has rows q0 q1 v0 v0
    v1 v1. Two ranks compute q0 q1 v0 and v0 v1 v1, and receive q0 v0 v0 and q1 v1 v1.
    """

    def __init__(self, tp: TensorParallel, stack: Stack) -> None:
        self._group, ranks = tp.group, range(tp.size)
        self._num_local = sum(heads * size for heads, size in stack) // tp.size

        def find_common_ranges(maker: int, taker: int) -> list[tuple[int, int]]:
            """Return (start, stop) of the columns of rank `maker` that rank `taker` needs."""
            start = maker * self._num_local
            rows = list(iterate_local_rows(stack, taker, tp.size))
            ranges = [(max(r.start - start, 0), min(r.stop - start, self._num_local)) for r in rows]
            return [(a, b) for a, b in ranges if a < b]

        self._send_ranges = [find_common_ranges(tp.rank, taker) for taker in ranks]
        self._receive_ranges = [find_common_ranges(maker, tp.rank) for maker in ranks]

    def __call__(self, _linear: nn.Module, _args: Any, y: Tensor) -> Tensor:
        """Exchange columns `y` for the columns of this rank's heads; backward sums gradients."""
        return run_and_save(exchange_with_grad, y, self._exchange_outputs, self._exchange_grads)  # type: ignore[no-any-return]

    def _exchange_outputs(self, y: Tensor) -> Tensor:
        """All-to-all of forward: send columns of `y`; return the columns of this rank's heads."""
        y_TN = y.flatten(0, -2)
        pieces = [[y_TN[:, a:b] for a, b in to] for to in self._send_ranges]
        local_parts = self._exchange_pieces(pieces, self._receive_ranges)
        result: Tensor = torch.cat(local_parts, 1).unflatten(0, y.shape[:-1])
        return result

    def _exchange_grads(self, grad: Tensor) -> Tensor:
        """All-to-all of backward: return the gradient of the local columns, summed over ranks."""
        grad_TN = grad.flatten(0, -2)
        widths = [b - a for maker in self._receive_ranges for a, b in maker]
        pieces = iter(grad_TN.split(widths, 1))
        back = self._exchange_pieces(
            [[next(pieces) for _ in to] for to in self._receive_ranges], self._send_ranges
        )
        dtype = torch.promote_types(grad.dtype, torch.float32)  # for sums over ranks
        sums_TN = grad_TN.new_zeros(len(grad_TN), self._num_local, dtype=dtype)
        for (a, b), piece in zip(itertools.chain(*self._send_ranges), back, strict=True):
            sums_TN[:, a:b] += piece
        result: Tensor = sums_TN.to(grad.dtype).unflatten(0, grad.shape[:-1])
        return result

    def _exchange_pieces(
        self, pieces: list[list[Tensor]], ranges: list[list[tuple[int, int]]]
    ) -> list[Tensor]:
        """Send `pieces` [T, columns] to each rank; return received blocks of the `ranges`."""
        send_buffer = torch.cat([piece.flatten() for to in pieces for piece in to])
        T = next(len(piece) for to in pieces for piece in to)
        receives = [sum(T * (b - a) for a, b in maker) for maker in ranges]
        receive_buffer = send_buffer.new_empty(sum(receives))
        if not skips_communication(send_buffer):
            sends = [sum(piece.numel() for piece in to) for to in pieces]
            dist.all_to_all_single(receive_buffer, send_buffer, receives, sends, group=self._group)
        widths = [b - a for maker in ranges for a, b in maker]
        parts = receive_buffer.split([T * width for width in widths])
        return [part.view(T, width) for part, width in zip(parts, widths, strict=True)]


def _apply_group_norm(
    tp: TensorParallel,
    group_size: int,
    norm: Any,
    hidden_states: Tensor,
    gate: Tensor | None = None,
) -> Tensor:
    """Gated RMS norm of this rank's columns, whose groups span several tp ranks. Collective."""

    def mean(squares: Tensor) -> Tensor:
        ranks = group_size // squares.shape[-1]
        sums = tp.gather_last_dim(squares.sum(-1, keepdim=True)).unflatten(-1, (-1, ranks))
        means: Tensor = sums[..., tp.rank // ranks, :].sum(-1, True) / group_size
        return means

    return apply_gated_norm(hidden_states, gate, norm.weight, norm.variance_epsilon, mean)


class RowParallelLinear(nn.Linear):
    """A row-parallel linear: y = all-reduce(x @ weight^T) + bias."""

    tp: TensorParallel

    def forward(self, input: Tensor) -> Tensor:
        """Return the all-reduced output; `input` has this rank's slice of features. Collective."""
        return self.tp.all_reduce(F.linear(input, self.weight)) + self.bias


def _slice_columns(block: int, size: int, _module: nn.Module, _args: Any, y: Tensor) -> Tensor:
    """Forward hook: return block number `block` of the last dim of `y`, in blocks of `size`."""
    # Not `chunk`: autograd refuses an in-place write to one of its several views.
    return y.narrow(-1, block * size, size)


def _shard_parameters(
    model: nn.Module, tp_mesh: DeviceMesh, placements: Mapping[tuple[nn.Module, str], Placement]
) -> None:
    """Replace all parameters except routed experts by DTensors; others are replicated."""
    layers = [m for m in model.modules() if isinstance(m, RoutedLayer)]
    expert_modules = {m for layer in layers for m in layer.get_part("experts").modules()}
    sharded_of = dict[nn.Parameter, nn.Parameter]()
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is None or module in expert_modules:
                continue
            if param in sharded_of:
                module.register_parameter(name, sharded_of[param])
                continue
            placement = placements.get((module, name), Replicate())
            shard_parameter(module, name, tp_mesh, (placement,), reads_local_tensor=True)
            sharded_of[param] = module._parameters[name]  # type: ignore[assignment]


class TokenSliceHooks:
    """Hooks that slice a MoE layer's padded input over tp in dim T, and all-gather its output."""

    def __init__(self, tp: TensorParallel, layer: RoutedLayer) -> None:
        self._tp, self._state = tp, threading.local()
        layer.register_forward_pre_hook(self._slice_inputs, with_kwargs=True)
        layer.register_forward_hook(self._gather_output)
        router: Any = layer.get_part("router")
        if hasattr(router, "recorder"):  # before transformers' hooks read the logits
            router.recorder.register_forward_hook(self._gather_logits, prepend=True)

    def _slice_inputs(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Arguments:
        """Forward pre-hook: pad all per-token arguments and slice them to this tp rank's tokens."""
        inputs = bind_arguments(layer, args, kwargs)
        x = inputs.pop("x" if isinstance(layer, MoELayer) else "hidden_states")
        self._state.shape = shape = x.shape[:-1]
        padding = -shape[-1] % self._tp.size
        if isinstance(layer, MoELayer):
            if padding and inputs.get("cu_seqlens") is not None:
                raise ValueError(
                    f"rows of documents ({shape[-1]} tokens) must be multiples of tp "
                    f"({self._tp.size}): pad the rows"
                )
            mask = inputs.get("padding_mask")
            if padding and mask is None:
                mask = x.new_zeros(shape, dtype=bool)
            for name, of_tokens, fill in (
                ("padding_mask", mask, True),
                ("input_ids", inputs.get("input_ids"), 0),
            ):
                if of_tokens is not None:
                    inputs[name] = self._slice_rows(of_tokens[..., None], padding, fill)[..., 0]
            return (self._slice_rows(x, padding),), inputs
        ids, weights = inputs["top_k_index"], inputs["top_k_weights"]
        local_ids = self._slice_rows(ids, padding, -1)
        local_weights = self._slice_rows(weights, padding)
        local_inputs = {"top_k_index": local_ids, "top_k_weights": local_weights}
        return (self._slice_rows(x, padding),), local_inputs

    def _slice_rows(self, x_TD: Tensor, num_padding: int, fill_value: float = 0) -> Tensor:
        """Append `num_padding` tokens of `fill_value` in dim -2; return this tp rank's tokens."""
        x_TD = F.pad(x_TD, (0, 0, 0, num_padding), value=fill_value) if num_padding else x_TD
        size = x_TD.shape[-2] // self._tp.size
        return x_TD.narrow(-2, self._tp.rank * size, size).contiguous()

    def _gather_rows(self, y_tD: Tensor) -> Tensor:
        """All-gather dim -2 over tp, remove padding, return the layer's [B, T, D] or [T, D]."""
        *B, T = self._state.shape
        y_BtD = y_tD.view(*B, -1, y_tD.shape[-1]) if B else y_tD[None]
        y_BTD = self._tp.gather_tokens(y_BtD)[:, :T].reshape(*B, T, -1)
        # No view: an in-place write by the model's code would drop the hook of its FSDP unit.
        return exchange_with_grad(y_BTD, lambda x: x, lambda grad: grad)

    def _gather_output(self, layer: nn.Module, _args: Any, output: Any) -> Any:
        """Forward hook of a MoE layer: all-gather the output, a tensor or a tuple's first entry."""
        is_tuple = isinstance(output, tuple)
        y = self._gather_rows(output[0] if is_tuple else output)
        return (y, *output[1:]) if is_tuple else y

    def _gather_logits(self, recorder: nn.Module, _args: Any, logits: tuple[Tensor, ...]) -> Any:
        """Forward hook of a module that transformers hooks for logits: all-gather [B * T, E]."""
        if len(recorder._forward_hooks) == 1:  # transformers records no logits
            return logits
        logits_TE = self._gather_rows(logits[0]).flatten(0, -2)
        return tuple(logits_TE for _ in logits)


class GradientShareHooks:
    """Hooks on a model's output that divide its gradient by tp on each tp rank."""

    def __init__(self, tp: TensorParallel, model: nn.Module) -> None:
        self._size, self._state = tp.size, threading.local()
        model.register_forward_pre_hook(self._count_running_forward)
        model.register_forward_hook(self._divide_output_grads, always_call=True)
        for outer in find_outermost_models(model):
            if outer is not model or outer.base_model is not model:
                outer.base_model.register_forward_pre_hook(self._refuse_base_call)

    def _count_running_forward(self, _model: nn.Module, _args: Any) -> None:
        self._state.depth = self._num_running_forwards + 1

    def _divide_output_grads(self, model: nn.Module, _args: Any, output: Any) -> Any:
        """Forward hook: divide the output's gradient by tp, except in a stage without the head."""
        # An earlier hook may have raised.
        self._state.depth = max(self._num_running_forwards - 1, 0)
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if isinstance(head, AbsentModule):  # a pipeline stage whose gradient is received
            return output
        return self._divide_grads(output)

    def _divide_grads(self, output: Any) -> Any:
        """Apply `_divide_grad` to the tensors of an output; in place if it is a mapping."""
        # Some classes of transformers' outputs cannot be made again of the keys that they have.
        if not isinstance(output, dict):
            return tree_map_only(Tensor, self._divide_grad, output)
        for key, value in output.items():
            output[key] = self._divide_grads(value)
        return output

    @property
    def _num_running_forwards(self) -> int:
        return getattr(self._state, "depth", 0)

    def _refuse_base_call(self, base: nn.Module, _args: Any) -> None:
        """Forward pre-hook: refuse a call with gradients outside of the full model's forward."""
        if not self._num_running_forwards and torch.is_grad_enabled():
            raise ValueError(
                f"{type(base).__name__} must be called by its whole model under tensor "
                f"parallelism ({self._size}), which begins backward: call the model"
            )

    def _divide_grad(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x
        return exchange_with_grad(x, lambda x: x, lambda grad: grad / self._size)
