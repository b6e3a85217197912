"""Which linears of a model are computed in FP8, by role, and which defer weight gradients.

The routed and shared experts of a `MoELayer` have no linears: the layer asks `Precision.recipe_of`.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.options.precision import Precision, Recipe, Role, never_quantised
from moecore.base.params import clean_name
from moecore.kernels.linear import PlainProducts
from moecore.moe.amax_history import AmaxHistory, advance_histories, history_of
from moecore.moe.experts import Experts
from moecore.moe.shared import SharedExpert
from moecore.precision.emulated import EmulatedLinearProducts
from moecore.precision.linear import Fp8Products, InputCast, QuantisedProducts, weight_problem
from moecore.precision.plain import PLAIN_FORWARDS, ProductLinear, set_products
from moecore.precision.te import TELinearProducts

# Last parts of names, of moecore's decoder, transformers and torchtitan.
GROUPED = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "out_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_qkvz")
TITAN = ("wq", "wk", "wv", "wo", "wq_a", "wq_b", "wkv_a", "wkv_b")
ATTENTION = frozenset((*GROUPED, *LATENT, *LINEAR, *TITAN))
MLP = frozenset(("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"))
SHARED_NAMES = frozenset(("shared", "shared_expert", "shared_experts", "shared_mlp"))
ROUTED_NAMES = frozenset(("experts",))


class LinearPrecision(NamedTuple):
    """What `apply_precision` decided about one linear."""

    role: Role | None  # None = none of the roles
    recipe: Recipe | None  # None = it stays as it is
    reason: str | None  # why it stays as it is


def role_of(name: str) -> Role | None:
    """Return the role of a linear by its qualified name alone; None = it is never quantised."""
    *parents, leaf = name.split(".")
    if leaf in ATTENTION:
        return "attention"
    if leaf not in MLP or ROUTED_NAMES & set(parents):
        return None
    return "shared_experts" if SHARED_NAMES & set(parents) else "mlp"


def linear_products(recipe: Recipe, inputs: InputCast | None = None) -> QuantisedProducts:
    """Return products of one weight by a recipe."""
    if recipe.backend == "te":
        return TELinearProducts(recipe, inputs)
    return (EmulatedLinearProducts if recipe.is_emulated else Fp8Products)(recipe, inputs)


def apply_precision(model: nn.Module, precision: Precision) -> dict[str, LinearPrecision]:
    """Let a model's linears compute in FP8, in place: each becomes a `ProductLinear`."""
    # Parameters, their names, hooks and state dict stay what they are, on meta too. Call it after
    # tensor parallelism, whose cut must leave multiples of 16 ("mxfp8": 32), and before sharding
    # and compiling.
    # To call it once more replaces recipes and drops histories. Linears under one parent that get
    # the same input quantise it once. Names, those of the result too, are without wrappers'
    # prefixes.
    linears, table = _linears(model), check_precision(model, precision)
    inputs: dict[tuple[str, int, Recipe], InputCast] = {}
    for name, module in linears.items():
        recipe = table[name].recipe
        if recipe is None:
            continue
        siblings = (name.rpartition(".")[0], module.in_features, recipe)
        set_products(module, linear_products(recipe, inputs.setdefault(siblings, InputCast())))
    return table


def check_precision(model: nn.Module, precision: Precision) -> dict[str, LinearPrecision]:
    """Return and raise what `apply_precision` does; change nothing."""
    table = {name: _decide(name, module, precision) for name, module in _linears(model).items()}
    _check_overrides(model, precision, table)
    return table


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return a model's linears by name, without what wrappers add to it."""
    return {
        clean_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }


def defer_linears(model: nn.Module) -> None:
    """Let linears, also in FP8, and moecore's shared experts defer weight gradients, in place."""
    # Forwards, gradients and names stay. Linears with a forward of their own stay as they are. Call
    # it after `apply_precision`, and before `shard_model`, `compile_blocks` and `apply_memory`.
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module).forward in PLAIN_FORWARDS:
            set_products(module, PlainProducts())
        if isinstance(module, ProductLinear):
            module.products.defers = True
        elif isinstance(module, SharedExpert):
            for products in module.products:
                products.defers = True


def fp8_linears(model: nn.Module) -> Iterator[tuple[nn.Linear, QuantisedProducts]]:
    """Yield each linear of a model that is in FP8, and its products."""
    for module in model.modules():
        if isinstance(module, ProductLinear) and isinstance(module.products, QuantisedProducts):
            yield module, module.products


def amax_histories(model: nn.Module) -> dict[str, AmaxHistory]:
    """Return the histories of linears and of routed experts by the names of their modules."""
    histories = {}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            history = module.history
        else:
            history = history_of(module) if isinstance(module, ProductLinear) else None
        if history is not None:
            histories[clean_name(name)] = history
    return histories


def advance_amax(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    is_skipped: bool | Tensor = False,
) -> None:
    """Start the next step of delayed scaling, once after each optimizer step. No host sync."""
    # `group` has the ranks among which a layer's parts and tokens are spread; None = there is one.
    histories = amax_histories(model)
    if histories:
        device = next(model.parameters()).device
        advance_histories(list(histories.values()), device, group, is_skipped=is_skipped)


def drop_amax(model: nn.Module) -> None:
    """Drop what delayed scaling has seen since the last step."""
    for history in amax_histories(model).values():
        history.drop()


def has_history(model: nn.Module) -> bool:
    """Return whether `advance_amax` has something to do."""
    return bool(amax_histories(model))


def _decide(name: str, module: nn.Linear, precision: Precision) -> LinearPrecision:
    role = role_of(name)
    recipe = precision.recipe_of(name, role)
    if role is None:
        return LinearPrecision(role, None, never_quantised(name) or "its name has no role")
    if recipe is None:
        return LinearPrecision(role, None, "the precision leaves it out")
    reason = weight_problem(module.weight, recipe)
    if type(module).forward not in (*PLAIN_FORWARDS, ProductLinear.forward):
        reason = f"{type(module).__name__} has a forward of its own"
    return LinearPrecision(role, None if reason else recipe, reason)


def _check_overrides(
    model: nn.Module, precision: Precision, table: dict[str, LinearPrecision]
) -> None:
    """Raise for patterns with a recipe that reach nothing, or nothing that reads it."""
    modules = {clean_name(name): module for name, module in model.named_modules()}
    experts = {n for n, m in modules.items() if isinstance(m, Experts | SharedExpert)}
    quantised = {name for name, decided in table.items() if decided.recipe is not None}
    for pattern, recipe in precision.overrides:
        matched = [name for name in modules if fnmatchcase(name, pattern)]
        if recipe is None:
            continue
        has_experts = any(isinstance(modules[name], Experts) for name in matched)
        if recipe.keep_hidden == "fp8" and not has_experts:
            raise ValueError(
                f"Precision.overrides ({pattern!r}) must match routed experts with "
                "Recipe.keep_hidden ('fp8'), which is about them: use 'auto'"
            )
        if not (experts | quantised).isdisjoint(matched):
            continue
        linears = [name for name in matched if name in table]
        problem = "matches no linear and no experts"
        if linears:
            problem = f"matches {linears[0]}, which stays as it is: {table[linears[0]].reason}"
        raise ValueError(
            f"Precision.overrides ({pattern!r}) must match what can be quantised, but it "
            f"{problem}: correct the pattern"
        )
