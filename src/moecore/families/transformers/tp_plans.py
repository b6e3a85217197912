"""Plans how tensor parallelism shards the modules of a transformers model.

`plan_attention` and `plan_mlp` infer from names, sizes and code which modules can run on a shard of
their weights. Other modules are replicated, which costs memory and time. If the tp degree does not
fit the numbers of heads, an error is raised.

Legend: H heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from moecore.base.torch_private import HAS_SEPARATE_PIECES
from moecore.families.transformers import stock
from moecore.families.transformers.linear_attention import find_linear_rule
from moecore.families.transformers.linear_tp_plans import plan_linear_attention
from moecore.families.transformers.module_plan import ModulePlan, get_linears, list_lora_adapters
from moecore.moe.layer import MoELayer
from moecore.parallel.fsdp.units import find_blocks

BY_HEAD = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "g_proj")  # columns of query heads
BY_KV_HEAD = ("k_proj", "v_proj")
OF_ALL_HEADS = ("q_a_proj", "kv_a_proj_with_mqa", "indexer")  # replicated: latents, selected keys
OUTPUTS = ("o_proj", "out_proj")
COUNTS = frozenset(("num_heads", "num_attention_heads", "num_key_value_heads"))
# Linears of an MLP; the last linear reads an elementwise function of the outputs of the others.
MLPS = (("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj"), ("w1", "w3", "w2"))
FUSED_MLPS = (("gate_up_proj", "down_proj"), ("input_linear", "output_linear"))  # gate above up

# Attention with one linear whose rows are all queries, then all keys, then all values.
STACKED = ("Phi3Attention", "Phi4MultimodalAttention")
# Attention with one linear whose rows are queries, keys and values of one head after the other.
FUSED_BY_HEAD = {
    "MiniMaxLightningAttention": ModulePlan(
        columns=("qkv_proj", "output_gate"),
        row="out_proj",
        norms=("norm",),
        buffers={"slope_rate": 0, "query_decay": 0, "key_decay": 0, "diagonal_decay": 1},
    )
}


def plan_modules(model: nn.Module, tp: int) -> tuple[dict[nn.Module, ModulePlan], list[str]]:
    """Return {module: plan} to shard, and a line of reason per class that stays replicated."""
    plans, replicated_types = dict[nn.Module, ModulePlan](), dict[type, str]()
    names = {module: name for name, module in model.named_modules()}
    layers = [m for m in model.modules() if isinstance(m, MoELayer)]
    layer_modules = {m for layer in layers for m in layer.modules()}
    for block in find_blocks(model):
        for module in block.modules():
            if module in layer_modules or not stock.is_transformers_module(module):
                continue
            is_attention = not module._modules.keys().isdisjoint(OUTPUTS)
            make_plan = plan_attention if is_attention else plan_mlp
            make_plan = plan_linear_attention if find_linear_rule(module) else make_plan
            plan = make_plan(names[module], module, tp)
            if isinstance(plan, ModulePlan):
                plans[module] = plan
            elif plan is not None:
                of = f"{names[module]} ({type(module).__name__})"
                replicated_types.setdefault(type(module), f"{of}, whose {plan}")
    return plans, list(replicated_types.values())


def plan_attention(name: str, module: Any, tp: int) -> ModulePlan | str:
    """Return how an attention module is sharded by heads, or why it stays replicated."""
    if type(module).__name__ in FUSED_BY_HEAD:
        return _plan_qkv_by_head(name, module, tp)
    if type(module).__name__ in STACKED:
        return _plan_stacked_qkv(name, module, tp)
    if hasattr(getattr(module, "indexer", None), "build_block_mask"):  # MiniMax-M3
        return "indexer selects keys for each group of heads"
    linears = get_linears(module)
    value_dim = getattr(module, "v_head_dim", None) or getattr(module, "head_dim", None)
    key_dim = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
    row = next((n for n in OUTPUTS if n in linears), None)
    if row is None or not value_dim or not key_dim or linears[row].in_features % value_dim:
        return "heads have no known size"
    H = linears[row].in_features // value_dim
    kv_heads = linears["k_proj"].out_features // key_dim if "k_proj" in linears else H
    sizes: dict[str, tuple[int, ...]] = {
        "q_proj": (H * key_dim, *_list_gated_query_rows(module, H * key_dim)),
        "q_b_proj": (H * key_dim,),
        "kv_b_proj": (H * (getattr(module, "qk_nope_head_dim", 0) + value_dim),),
        "gate_proj": (H, H * value_dim),
        "g_proj": (H, H * value_dim),
        "k_proj": (kv_heads * key_dim,),
        "v_proj": (kv_heads * value_dim,),
    }
    for child, linear in linears.items():
        if child in sizes and linear.out_features not in sizes[child]:
            return f"{child} ({linear.out_features} outputs) is not {H} heads"
    norms = tuple(n for n in ("q_norm", "k_norm") if _is_norm_over_all_heads(module, n, linears))
    problem = _find_sharding_problem(module, {*sizes, *OF_ALL_HEADS, row}, H)
    if problem is not None:
        return problem
    if linears[row].bias is not None and row in list_lora_adapters(module):
        return f"{row} has a bias and adapters"
    if not linears.keys() & {"q_proj", "q_b_proj"}:
        return "queries are made in another module"
    if not linears.keys() & {"k_proj", "kv_b_proj"}:
        return "keys are those of another layer"
    if "k_norm" in norms and kv_heads % tp:
        return "norm compares all key heads, of which there are fewer than ranks"
    _check_head_counts(name, H, kv_heads, tp)
    shared = {} if kv_heads % tp == 0 else {"k_proj": key_dim, "v_proj": value_dim}
    columns = tuple(n for n in (*BY_HEAD, *BY_KV_HEAD) if n in linears and n not in shared)
    param_names = tuple(module._parameters)
    shared = {n: d for n, d in shared.items() if n in linears}
    num_shared = kv_heads if shared else 0
    return ModulePlan(
        columns, row, params_by_head=param_names, norms=norms, shared=shared, num_shared=num_shared
    )


def _check_head_counts(name: str, num_heads: int, num_kv_heads: int, tp: int) -> None:
    """Raise ValueError unless tp divides the heads, and divides or is a multiple of kv heads."""
    if num_heads % tp or (num_kv_heads % tp and tp % num_kv_heads):
        raise ValueError(
            f"{name}: heads ({num_heads}) and key/value heads ({num_kv_heads}) must be multiples "
            f"of ParallelConfig.tp ({tp}), or the latter a divisor of it: lower tp"
        )


def _plan_qkv_by_head(name: str, module: Any, tp: int) -> ModulePlan | str:
    """Return the plan (or why it is replicated) of a linear with rows q, k, v of each head."""
    fused_plan = FUSED_BY_HEAD[type(module).__name__]
    if not {*fused_plan.columns, fused_plan.row} <= get_linears(module).keys():
        return "linears are not plain"
    H = module.num_attention_heads
    _check_head_counts(name, H, H, tp)
    return replace(fused_plan, counts={"num_attention_heads": H // tp})


def _plan_stacked_qkv(name: str, module: Any, tp: int) -> ModulePlan | str:
    """Return the plan (or why it is replicated) of a linear with rows of all q, all k, all v."""
    linears, d, kv_heads = get_linears(module), module.head_dim, module.num_key_value_heads
    if linears.keys() != {"qkv_proj", "o_proj"}:
        return "linears are not plain"
    H = linears["o_proj"].in_features // d
    _check_head_counts(name, H, kv_heads, tp)
    stacks = {"qkv_proj": ((H, d), (kv_heads, d), (kv_heads, d))}
    counts = {"num_key_value_heads": max(1, kv_heads // tp)}
    num_shared = kv_heads if kv_heads % tp else 0
    return ModulePlan((), "o_proj", counts=counts, stacks=stacks, num_shared=num_shared)


def _list_gated_query_rows(module: Any, num_query_rows: int) -> tuple[int, ...]:
    """Return (2 * num_query_rows,), the rows of `q_proj` with output gates; () = no gates."""
    # The size does not show the order of gates, so transformers' tp plan must shard them by heads.
    plan = getattr(getattr(module, "config", None), "base_model_tp_plan", None) or {}
    is_by_head = any(n.endswith(".q_proj") and style == "colwise" for n, style in plan.items())
    return (2 * num_query_rows,) if is_by_head else ()


def _is_norm_over_all_heads(module: nn.Module, name: str, linears: Mapping[str, nn.Linear]) -> bool:
    """Whether the norm `name` ("q_norm") has a weight per output of its linear in `linears`."""
    norm, linear = getattr(module, name, None), linears.get(f"{name[0]}_proj")
    weight = getattr(norm, "weight", None)
    return linear is not None and weight is not None and weight.numel() == linear.out_features


def _find_sharding_problem(module: nn.Module, known_names: set[str], num_heads: int) -> str | None:
    """Return why attention with other parts than `known_names` cannot be sharded by heads."""
    for child, part in module.named_children():
        is_norm = "Norm" in type(part).__name__ and not list(part.children())
        if not (child in known_names or is_norm) and next(part.parameters(), None) is not None:
            return f"{child} ({type(part).__name__}) may read all heads"
    for child, tensor in (*module._parameters.items(), *module._buffers.items()):
        if child in module._buffers or (tensor is not None and tensor.shape != (num_heads,)):
            return f"{child} may not have an element per head"
    for method in stock.list_overridden_methods(type(module)):
        code = getattr(inspect.unwrap(getattr(type(module), method)), "__code__", None)
        counts = COUNTS.intersection(getattr(code, "co_names", ()))
        if counts:
            return f"{method} reads {min(counts)}"
    return None


def plan_mlp(name: str, module: nn.Module, tp: int) -> ModulePlan | None:
    """Return how an MLP's hidden dim is sharded, or None if the MLP stays replicated."""
    parts = {n: m for n, m in module.named_children() if next(m.parameters(), None) is not None}
    names = next((names for names in (*MLPS, *FUSED_MLPS) if set(names) == parts.keys()), None)
    if names is None or any(p is not None for p in module._parameters.values()):
        return None
    *columns, row = names
    halves = tuple(columns) if names in FUSED_MLPS else ()
    linears = get_linears(module)
    if linears.keys() != parts.keys():
        return None
    # Alternating columns (gate, up, gate, ..) are not halves. FSDP shards dim 1 of such a weight. A
    # bias has no dim 1, and the dim 1 of a LoRA factor is small.
    for child in halves:
        linear = module.get_submodule(child)
        has_halves = HAS_SEPARATE_PIECES and "chunk" in stock.find_names_in_forward(module)
        if not has_halves or type(linear) is not nn.Linear or linear.bias is not None:
            return None
    if linears[row].bias is not None and row in list_lora_adapters(module):
        return None
    size = linears[row].in_features
    if any(linears[n].out_features != size * (1 + (n in halves)) for n in columns):
        return None
    if size % tp:
        raise ValueError(
            f"{name}: the hidden dim ({size}) of {type(module).__name__} must be a multiple of "
            f"ParallelConfig.tp ({tp}): lower tp"
        )
    return ModulePlan(tuple(columns), row, halves)
