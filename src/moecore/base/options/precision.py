"""Precision: which matrix products of a model are computed in FP8, and by which recipe.

A record alone, without tensors. Routers, embeddings, heads, norms, attention scores, master weights
and gradients keep their precision whatever it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal, get_args

from moecore.base.fields import Rules, check_fields, shown
from moecore.base.options.recipe import Recipe, Scaling

Role = Literal["experts", "shared_experts", "mlp", "attention"]
ROLES: tuple[Role, ...] = get_args(Role)
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
PrecisionName = Literal["auto", "blockwise", "rowwise", "tensorwise"]

Roles = Annotated[tuple[Role, ...], f"pass a tuple of {', '.join(map(repr, ROLES))}"]
Overrides = Annotated[
    tuple[tuple[str, Recipe | None], ...],
    'pass a tuple of pairs, like (("model.layers.0.*", None),)',
]

# Parts of a module's name, and what is computed there.
NEVER = {
    "router": "a router decides by differences that FP8 rounds away",
    "embed": "an embedding multiplies nothing",
    "lm_head": "the head's logits keep their precision",
    "norm": "a norm multiplies no matrices",
    "sdpa": "attention scores keep their precision",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Which roles of a model are computed in FP8, by which recipe, and what differs by name.

        Precision(recipe=Recipe(), overrides=(("model.layers.0.*", None),))

    Attributes:
        recipe: of all products of the roles.
        roles: subset of "experts" (routed), "shared_experts", "mlp" (dense), and "attention"
            (its projections).
        overrides: pairs of a pattern, as `fnmatch` reads it, over a module's qualified name, and
            the recipe of the modules that it matches; None = they keep their precision. The first
            pattern that matches counts, whether the module's role is in `roles` or not.
        only_faster: routed experts keep their precision where FP8 was measured to be slower, or
            has no products for them, instead of being refused; a log line says why.

    Raises:
        ValueError: when a field is of the wrong type, a role or a pattern is there twice, or a
            pattern asks for the quantisation of what is never quantised; without "experts", for
            a recipe that is about their hidden activations.
    """

    recipe: Recipe
    roles: Roles = ROLES
    overrides: Overrides = ()
    only_faster: bool = False

    def __post_init__(self) -> None:
        check_fields(self, self._rules)

    def _rules(self) -> Rules:
        if len(set(self.roles)) < len(self.roles):
            yield "roles", "have each role once: drop the repeated one"
        if not self.roles and not any(recipe for _, recipe in self.overrides):
            yield "roles", "have a role where no override has a recipe: use precision=None"
        if self.roles and "experts" not in self.roles and self.recipe.keep_hidden == "fp8":
            yield (
                "roles",
                "have 'experts' with Recipe.keep_hidden ('fp8'), which is about them: use 'wide'",
            )
        patterns = [pattern for pattern, _ in self.overrides]
        if len(set(patterns)) < len(patterns):
            yield "overrides", "have each pattern once, because the first counts: drop the second"
        for pattern, recipe in self.overrides:
            reason = never_quantised(pattern.rpartition(".")[2])
            if recipe is not None and reason is not None:
                yield "overrides", f"give no recipe to {pattern!r}, because {reason}: drop it"

    @classmethod
    def of(cls, precision: Precision | Recipe | str | None) -> Precision | None:
        """Return the record that an argument stands for; None = nothing is quantised.

        Args:
            precision: "auto", which is blockwise for routed experts where that is faster;
                "blockwise", "rowwise", "tensorwise" or a recipe for all roles; or a record.

        Raises:
            ValueError: for anything else.
        """
        if precision is None or isinstance(precision, Precision):
            return precision
        if isinstance(precision, Recipe):
            return cls(recipe=precision)
        if isinstance(precision, str) and precision == "auto":
            return cls(recipe=Recipe(), roles=("experts",), only_faster=True)
        for scaling in SCALINGS:
            if isinstance(precision, str) and precision == scaling:
                return cls(recipe=Recipe(scaling=scaling))
        raise ValueError(
            f"precision ({shown(precision)}) must be one of 'auto', "
            f"{', '.join(map(repr, SCALINGS))}, a Recipe, a Precision or None: use 'auto'"
        )

    def recipe_of(self, name: str, role: Role | None) -> Recipe | None:
        """Return the recipe of a module; None = it keeps its precision.

        Args:
            name: qualified name of the module, like "model.layers.3.mlp.experts", without what
                wrappers add (`moe.params.clean_name`).
            role: what it is; None = none of the roles, which no pattern changes.
        """
        if role is None:
            return None
        for pattern, recipe in self.overrides:
            if fnmatchcase(name, pattern):
                return recipe
        return self.recipe if role in self.roles else None


def never_quantised(part: str) -> str | None:
    """Return why a part of a name is never quantised; None = it may be."""
    return next((reason for word, reason in NEVER.items() if word in part.lower()), None)
