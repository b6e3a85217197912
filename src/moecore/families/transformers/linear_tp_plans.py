"""Tensor parallelism by heads for linear attention layers of transformers models.

Each tp rank has the states of its heads, so the rule and the exchange of states over cp ranks need
no tp communication. Besides the all-reduce of outputs, tp ranks exchange:

    projections of one kind, or in the order of heads         nothing
    several kinds of rows in one projection                   its outputs (`StackedRowsHook`)
    norms of groups that several ranks share                  sums of squares

The filters of short convolutions are small and replicated; each rank reads its channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from moecore.families.transformers.linear_attention import find_linear_rule
from moecore.families.transformers.module_plan import (
    ModulePlan,
    Stack,
    get_linears,
    iterate_local_rows,
    list_lora_adapters,
)

FILTERS = "conv1d"


@dataclass(frozen=True, slots=True)
class _LinearHeads:
    """Names and sizes of a linear attention layer's tensors that tp shards by heads."""

    heads: tuple[int, ...]  # numbers of heads that tp must divide
    columns: Mapping[str, Stack]  # column-parallel linears and the sections of their rows
    row: str  # the row-parallel linear
    values: Stack  # sections of the input of `row`
    channels: Stack  # sections of the convolution's channels
    params_by_head: Mapping[str, Stack]  # parameters that are sharded by heads
    counts: Mapping[str, int]  # attributes -> their value on a rank
    replicated: tuple[str, ...]  # modules and parameters without heads
    by_section: tuple[str, ...] = ()  # columns ordered by section, not by heads
    groups: Mapping[str, int] = field(default_factory=dict)  # norms of groups over several ranks


def plan_linear_attention(name: str, module: Any, tp: int) -> ModulePlan | str:
    """Return the plan to shard a linear attention layer by heads, or the reason to replicate it.

    ValueError if tp does not divide the numbers of heads.
    """
    layer = LAYERS[find_linear_rule(module) or ""](module, tp)
    groups = [heads for heads, _ in layer.channels]
    if any(n % tp for n in layer.heads) or any(n % tp and tp % n for n in groups):
        numbers = ", ".join(dict.fromkeys(map(str, (*layer.heads, *groups))))
        raise ValueError(
            f"{name}: heads of linear attention ({numbers}) must be multiples of "
            f"ParallelConfig.tp ({tp}): lower tp"
        )
    problem = _find_sharding_problem(module, layer)
    if problem is not None:
        return problem
    linears = get_linears(module)
    head_exchanges = {n: layer.columns[n] for n in layer.by_section if n in linears}
    for child in head_exchanges:
        if linears[child].out_features % tp:
            raise ValueError(
                f"{name}.{child}: outputs ({linears[child].out_features}) must be a multiple of "
                f"ParallelConfig.tp ({tp}): lower tp"
            )
    return ModulePlan(
        columns=tuple(n for n in layer.columns if n in linears),
        row=layer.row,
        head_exchanges=head_exchanges,
        local_reads={FILTERS: layer.channels},
        params_by_head=tuple(n for n, _ in module.named_parameters() if n in layer.params_by_head),
        groups=layer.groups,
        counts=layer.counts,
    )


def _find_sharding_problem(module: Any, heads: _LinearHeads) -> str | None:
    """Return the reason why `module` cannot be sharded as `heads` describes, or None."""
    linears, params = get_linears(module), dict(module.named_parameters())
    sizes = {n: _count_rows(stack) for n, stack in heads.columns.items()}
    for child, linear in linears.items():
        if child in sizes and linear.out_features != sizes[child]:
            return f"{child} ({linear.out_features} outputs) is not of {sizes[child]} rows of heads"
    if heads.row not in linears or linears[heads.row].in_features != _count_rows(heads.values):
        return f"{heads.row} does not read all heads"
    if linears[heads.row].bias is not None and heads.row in list_lora_adapters(module):
        return f"{heads.row} has a bias and adapters"
    filters = getattr(module, FILTERS, None)
    if type(filters) is not nn.Conv1d or filters.groups != _count_rows(heads.channels):
        return f"{FILTERS} is not plain"
    for child, stack in heads.params_by_head.items():
        if child in params and params[child].numel() != _count_rows(stack):
            return f"{child} may not have an element per head"
    if not all(_is_gated_norm(module.get_submodule(n), size) for n, size in heads.groups.items()):
        return "norm is not known"
    known_names = (
        *sizes.keys() & linears.keys(),
        heads.row,
        FILTERS,
        *heads.params_by_head,
        *heads.replicated,
    )
    for child in params:
        if not any(child == n or child.startswith(f"{n}.") for n in known_names):
            return f"{child} may read all heads"
    return None


def _count_rows(sections: Stack) -> int:
    """Return the number of matrix rows: the sum of heads * rows per head over all `sections`."""
    return sum(heads * size for heads, size in sections)


def _read_delta_net_heads(module: Any, tp: int) -> _LinearHeads:
    k, v = (module.num_k_heads, module.head_k_dim), (module.num_v_heads, module.head_v_dim)
    per_head = (module.num_v_heads, 1)
    counts = ("num_k_heads", "num_v_heads", "key_dim", "value_dim")
    return _LinearHeads(
        heads=(module.num_k_heads, module.num_v_heads),
        columns={
            "in_proj_qkvz": (k, k, v, v),  # as `in_proj_ba` in the order of key heads
            "in_proj_ba": (per_head, per_head),
            "in_proj_qkv": (k, k, v),
            "in_proj_z": (v,),
            "in_proj_b": (per_head,),
            "in_proj_a": (per_head,),
        },
        by_section=("in_proj_qkv",),
        row="out_proj",
        values=(v,),
        channels=(k, k, v),
        params_by_head={"A_log": (per_head,), "dt_bias": (per_head,)},
        counts={n: getattr(module, n) // tp for n in counts},
        replicated=("norm",),
    )


def _read_kimi_delta_heads(module: Any, tp: int) -> _LinearHeads:
    x, per_head = (module.num_heads, module.head_dim), (module.num_heads, 1)
    counts = {n: getattr(module, n) // tp for n in ("num_heads", "qkv_dim")}
    linears = ("q_proj", "k_proj", "v_proj", "g_proj", "g_b_proj")
    gate = ("forget_gate.f_proj", "forget_gate.f_b_proj")
    return _LinearHeads(
        heads=(module.num_heads,),
        columns={**dict.fromkeys((*linears, *gate), (x,)), "b_proj": (per_head,)},
        row="o_proj",
        values=(x,),
        channels=(x, x, x),
        params_by_head={"forget_gate.A_log": (per_head,), "forget_gate.dt_bias": (x,)},
        counts=counts | {f"forget_gate.{n}": number for n, number in counts.items()},
        replicated=("o_norm", "g_a_proj", "forget_gate.f_a_proj"),
    )


def _read_mamba2_heads(module: Any, tp: int) -> _LinearHeads:
    x, per_head = (module.num_heads, module.head_dim), (module.num_heads, 1)
    group = (module.n_groups, module.ssm_state_size)  # of B, as of C
    channels = (x, group, group)
    is_shared = module.n_groups % tp > 0
    local_x, local_group, _ = (s.stop - s.start for s in iterate_local_rows(channels, 0, tp))
    return _LinearHeads(
        heads=(module.num_heads,),
        columns={"in_proj": (x, *channels, per_head)},  # gates first
        by_section=("in_proj",),
        row="out_proj",
        values=(x,),
        channels=channels,
        params_by_head={
            "A_log": (per_head,),
            "D": (per_head,),
            "dt_bias": (per_head,),
            "norm.weight": (x,),
        },
        counts=dict(
            num_heads=module.num_heads // tp,
            intermediate_size=local_x,
            n_groups=max(1, module.n_groups // tp),
            conv_dim=local_x + local_group + local_group,
        ),
        replicated=(),
        groups={"norm": _count_rows((x,)) // module.n_groups} if is_shared else {},
    )


LAYERS = {
    "torch_chunk_gated_delta_rule": _read_delta_net_heads,
    "chunk_kimi_delta_attention": _read_kimi_delta_heads,
    "mamba2_chunk_scan": _read_mamba2_heads,
}


def _is_gated_norm(norm: Any, group_size: int) -> bool:
    """Whether a norm over groups of `group_size` elements equals `apply_gated_norm` on samples."""
    eps = getattr(norm, "variance_epsilon", None)
    if eps is None or getattr(norm, "group_size", None) != group_size:
        return False
    with torch.no_grad(), torch.device("cpu"):
        g = torch.Generator().manual_seed(0)
        weight, x, gate = torch.randn(
            3, norm.weight.numel(), generator=g, dtype=torch.float32, device="cpu"
        )

        def mean(squares: torch.Tensor) -> torch.Tensor:
            return squares.view(-1, group_size).mean(-1).repeat_interleave(group_size)

        reference = apply_gated_norm(x[None], gate[None], weight, eps, mean)
        y = functional_call(norm, {"weight": weight}, (x[None], gate[None]))
    return torch.allclose(y, reference, rtol=1e-5, atol=1e-5)


def apply_gated_norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    compute_mean: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return weight * h / sqrt(compute_mean(h^2) + eps), where h = x * silu(gate), or x.

    `compute_mean` maps fp32 squares to their mean over each element's group.
    """
    h = x.float() if gate is None else x.float() * F.silu(gate.float())
    return weight * (h * torch.rsqrt(compute_mean(h.pow(2)) + eps)).to(x.dtype)
