"""Applies a `Precision` to the linears of a model, by role, and defers their weight gradients.

The experts of a `MoELayer` have no linears: the layer reads `Precision.find_recipe` itself.
"""

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from moecore.base.options.precision import Precision, Recipe, Role, find_fp8_exclusion_reason
from moecore.base.params import clean_name
from moecore.kernels.linear import PlainProducts
from moecore.kernels.rows.four_bit import FORMATS
from moecore.moe.experts import Experts
from moecore.moe.shared_experts import SharedExpert
from moecore.precision.emulated import EmulatedLinearProducts
from moecore.precision.linear import (
    Fp8Products,
    InputCastCache,
    QuantisedProducts,
    find_weight_problem,
)
from moecore.precision.plain import PLAIN_FORWARDS, ProductLinear, set_products
from moecore.precision.te import TELinearProducts

# Last parts of linears' names in moecore's decoder, transformers and torchtitan.
GROUPED = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "out_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_qkvz")
TITAN = ("wq", "wk", "wv", "wo", "wq_a", "wq_b", "wkv_a", "wkv_b")
ATTENTION = frozenset((*GROUPED, *LATENT, *LINEAR, *TITAN))
MLP = frozenset(("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"))
SHARED_NAMES = frozenset(("shared", "shared_expert", "shared_experts", "shared_mlp"))
ROUTED_NAMES = frozenset(("experts",))


class LinearPrecision(NamedTuple):
    """The role of a linear, and its FP8 or FP4 recipe or the reason why it is not quantised."""

    role: Role | None  # None = the linear has no role
    recipe: Recipe | None  # None = the linear is not changed
    reason: str | None  # why the linear is not changed


def find_linear_role(linear_name: str) -> Role | None:
    """Return a linear's role, such as "mlp", by its qualified name. None = never quantised."""
    *parents, leaf = linear_name.split(".")
    if leaf in ATTENTION:
        return "attention"
    if leaf not in MLP or ROUTED_NAMES & set(parents):
        return None
    return "mlp" if SHARED_NAMES.isdisjoint(parents) else "shared_experts"


def make_linear_products(recipe: Recipe, cache: InputCastCache | None = None) -> QuantisedProducts:
    """Create the object that computes y, dx and dw of one linear; `cache` None = a new cache."""
    if recipe.backend == "te":
        return TELinearProducts(recipe, cache)
    return (EmulatedLinearProducts if recipe.is_emulated else Fp8Products)(recipe, cache)


def apply_precision(
    model: nn.Module, precision: Precision, *, is_stage: bool = False
) -> dict[str, LinearPrecision]:
    """Quantise a model's linears by role, in place. Return the decision for each linear by name.

    Call it after tensor parallelism, and before FSDP and torch.compile. Parameters and state dict
    do not change. A second call replaces recipes and drops amax histories. Raises a ValueError for
    an override whose pattern matches no module that its recipe can quantise. In a pipeline stage
    (`is_stage`) an override may match nothing.
    """
    table = check_precision(model, precision, is_stage=is_stage)
    inputs: dict[tuple[str, int, Recipe], InputCastCache] = {}
    for name, module in _list_linears(model).items():
        recipe = table[name].recipe
        if recipe is not None:
            parent = _remove_peft_level(name).rpartition(".")[0]
            siblings = (parent, module.in_features, recipe)  # share their inputs
            cache = inputs.setdefault(siblings, InputCastCache())
            set_products(module, make_linear_products(recipe, cache))
    return table


def check_precision(
    model: nn.Module, precision: Precision, *, is_stage: bool = False
) -> dict[str, LinearPrecision]:
    """Return the result of `apply_precision` or raise its ValueError; the model does not change."""
    linears = _list_linears(model)
    table = {name: _decide_linear(name, linears[name], precision) for name in linears}
    if not is_stage:
        _check_overrides(model, precision, table)
    return table


def _list_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return a model's linears by module name, without the names of wrappers."""
    modules = model.named_modules()
    return {clean_name(name): m for name, m in modules if isinstance(m, nn.Linear)}


def _remove_peft_level(linear_name: str) -> str:
    """Return the name without "base_layer", which peft adds to a linear with adapters."""
    return linear_name.removesuffix(".base_layer")


def list_storable_linears(model: nn.Module, precision: Precision | None) -> dict[str, nn.Linear]:
    """Return the linears that `Precision.frozen_dense` stores in 4 bits, by clean module name.

    These linears have a role, no FP8 recipe and an unshared weight, and their input dim is a
    multiple of the number of values per scale. `out_proj` of `nn.MultiheadAttention` and of Mamba
    layers is excluded, because fused operations read its weight.
    """
    if precision is None or precision.frozen is None or not precision.frozen_dense:
        return {}
    modules = {clean_name(name): module for name, module in model.named_modules()}
    linears, group = _list_linears(model), FORMATS[precision.frozen].group
    uses = Counter(m.weight for m in modules.values() if isinstance(m, nn.Linear | nn.Embedding))
    storable = {}
    for name, module in linears.items():
        parent, _, leaf = _remove_peft_level(name).rpartition(".")
        has_forward = type(module).forward in (*PLAIN_FORWARDS, ProductLinear.forward)
        if (
            find_linear_role(f"{parent}.{leaf}") is not None
            and not _is_quantised(module)  # FSDP may have sharded a weight that has a recipe
            and _decide_linear(name, module, precision).recipe is None
            and has_forward
            and module.in_features % group == 0
            and uses[module.weight] == 1
            and not isinstance(modules[parent], nn.MultiheadAttention)
            and not (leaf == "out_proj" and hasattr(modules[parent], "ssm_state_size"))
        ):
            storable[name] = module
    return storable


def defer_linears(model: nn.Module) -> None:
    """Change linears and shared experts in place, so that their weight gradients can be deferred.

    The `GradSink` of a weight, which receives the gradient from kernels, may then compute it later.
    Linears whose class overrides forward do not change. Call it after `apply_precision`, and before
    `shard_model`, `compile_blocks` and `apply_memory_options`.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module).forward in PLAIN_FORWARDS:
            set_products(module, PlainProducts())
        if isinstance(module, ProductLinear):
            module.products.defers = True
        elif isinstance(module, SharedExpert):
            for products in module.products:
                products.defers = True


def list_quantised_linears(model: nn.Module) -> Iterator[tuple[nn.Linear, QuantisedProducts]]:
    """Yield each quantised linear of a model, and the object that computes its matmuls."""
    for module in model.modules():
        if isinstance(module, ProductLinear) and isinstance(module.products, QuantisedProducts):
            yield module, module.products


def _is_quantised(module: nn.Linear) -> bool:
    """Return whether `apply_precision` has set a recipe on this linear."""
    return isinstance(module, ProductLinear) and isinstance(module.products, QuantisedProducts)


def _decide_linear(name: str, module: nn.Linear, precision: Precision) -> LinearPrecision:
    """Return the role of a linear, and its recipe or the reason why it is not quantised."""
    name = _remove_peft_level(name)
    role = find_linear_role(name)
    recipe = precision.find_recipe(name, role)
    if role is None:
        exclusion = find_fp8_exclusion_reason(name) or "its name has no role"
        return LinearPrecision(role, None, exclusion)
    if recipe is None:
        return LinearPrecision(role, None, "the precision leaves it out")
    reason = find_weight_problem(module.weight, recipe)
    if type(module).forward not in (*PLAIN_FORWARDS, ProductLinear.forward):
        reason = f"{type(module).__name__} has a forward of its own"
    return LinearPrecision(role, None if reason else recipe, reason)


def _check_overrides(
    model: nn.Module, precision: Precision, decisions: dict[str, LinearPrecision]
) -> None:
    """Raise a ValueError for an override that matches no module that its recipe can quantise.

    `decisions` maps the name of each linear to its decision.
    """
    modules = {clean_name(name): module for name, module in model.named_modules()}
    decisions = {_remove_peft_level(name): decided for name, decided in decisions.items()}
    experts = {n for n, m in modules.items() if isinstance(m, Experts | SharedExpert)}
    quantised = {name for name, decided in decisions.items() if decided.recipe is not None}
    for pattern, recipe in precision.overrides:
        matched = [name for name in modules if fnmatchcase(name, pattern)]
        if recipe is None:
            continue
        has_experts = any(isinstance(modules[name], Experts) for name in matched)
        if recipe.keep_hidden == "fp8" and not has_experts:
            raise ValueError(
                f"Precision.overrides ({pattern!r}) must match routed experts with "
                "Recipe.keep_hidden ('fp8'): use 'auto'"
            )
        if not (experts | quantised).isdisjoint(matched):
            continue
        linears = [name for name in matched if name in decisions]
        problem = "matches no linear and no experts"
        if linears:
            problem = f"matches {linears[0]}, which stays as it is: {decisions[linears[0]].reason}"
        raise ValueError(
            f"Precision.overrides ({pattern!r}) must match what can be quantised, but it "
            f"{problem}: correct the pattern"
        )
