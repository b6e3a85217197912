"""Which matrix products of a model are computed in FP8 (`Precision`), and how (`Recipe`).

Records alone, without tensors. Routers, embeddings, heads, norms, attention scores, master weights
and gradients keep their precision whatever they hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal, get_args

from moecore.base.fields import Bound, CheckedRecord, OneOf, Rules, check_arguments, quote
from moecore.base.options.names import PrecisionName as PrecisionName
from moecore.base.registry import Registry

Scaling = Literal["blockwise", "rowwise", "tensorwise", "mxfp8", "nvfp4"]
Format = Literal["e4m3", "e5m2"]
Hidden = Literal["wide", "fp8"]
KeepHidden = Literal["auto", Hidden]
RecipeBackend = Literal["moecore", "te"]
Block = tuple[int | None, int | None]  # rows and columns of one scale; None = all of them

ACTIVATION_BLOCKS: dict[Scaling, Block] = {
    "blockwise": (1, 128),
    "rowwise": (1, None),
    "tensorwise": (None, None),
    "mxfp8": (1, 32),
    "nvfp4": (1, 16),
}
WEIGHT_BLOCKS: dict[Scaling, Block] = {
    **ACTIVATION_BLOCKS,
    "blockwise": (128, 128),
    "nvfp4": (16, 16),
}
EMULATED: tuple[Scaling, ...] = ("mxfp8", "nvfp4")  # multiplied wide where no tensor core can
# Rows of Transformer Engine's products, as its `get_align_size_for_quantization` has them.
TE_ROWS: dict[Scaling, int] = {"blockwise": 16, "tensorwise": 16, "mxfp8": 32, "nvfp4": 128}

History = Annotated[
    int, Bound(">=", 0), Bound("<=", 4096), "use 0 for scales of the tensor's own values"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(CheckedRecord):
    """How products of one role are quantised.

    A value is one FP8 number times its block's scale. Products are summed in fp32. Both operands
    are quantised in blocks along the dim that is summed, so what is multiplied along rows and along
    columns is quantised twice ("tensorwise", and weights of "nvfp4": once, and transposed).

    Attributes:
        scaling: "blockwise": activations and gradients have a scale per 1 x 128 elements along the
            summed dim, weights one per 128 x 128; "rowwise": one per row of either operand;
            "tensorwise": one per tensor. "mxfp8": E4M3 with an E8M0 scale per 1 x 32 of either
            operand. "nvfp4": E2M1 with an E4M3 scale per 1 x 16, weights one per 16 x 16, and an
            fp32 scale per tensor, of experts per expert. Before Blackwell these two are emulated:
            operands are rounded to what the format holds, and multiplied in bf16.
        power_of_two: whether scales are rounded up to powers of two, so that to quantise once more
            loses nothing but what underflows. Of "nvfp4" it is the fp32 scale, which then depends
            on how a tensor is cut over ranks in its exponent alone; those of "mxfp8" always are.
        grad_format: of gradients of outputs; activations and weights are always "e4m3". "e5m2" has
            two bits of mantissa and reaches 57344 ("hybrid"). Blocks of 128 leave no use for that
            range, so "blockwise" refuses it.
        amax_history: 0: a tensor's scale comes from its own largest value. n ("tensorwise"):
            delayed scaling, from the largest value of the last n optimizer steps, so that no pass
            over the tensor comes before its quantisation; what exceeds it saturates. Rows of all
            routed experts of a layer are one tensor of all ranks then; an expert's matrix keeps
            the scale of its own values. 0 is recommended: delayed scaling clips an outlier that no
            earlier step had.
        keep_hidden: how the experts keep FC1's output for backward: "wide", in the dtype of the
            products, or "fp8", in blocks of 1 x 128 ("blockwise"). "auto" is "fp8" where it can be.
        hadamard: of "nvfp4": whether both inputs of a weight gradient pass a random Hadamard
            transform over each 16 tokens before they are quantised, which spreads outliers.
        stochastic_rounding: of "nvfp4": whether gradients are rounded up or down at random, so that
            their mean stays. What is drawn depends on an element's place and value alone.
        backend: who quantises and multiplies: "moecore", or "te", Transformer Engine, by its own
            recipe of that scaling: Float8BlockScaling, Float8CurrentScaling ("tensorwise"),
            DelayedScaling (with `amax_history`), MXFP8BlockScaling, NVFP4BlockScaling. Its "mxfp8"
            and "nvfp4" are for Blackwell alone, and its random numbers are torch's.

    Source: blocks of 1 x 128 and 128 x 128 are DeepSeek-V3's (arXiv:2412.19437); e5m2 for gradients
    and delayed scaling are those of "FP8 formats for deep learning" (arXiv:2209.05433). "mxfp8" is
    of the OCP Microscaling Formats specification v1.0, with scales that round up, as in
    arXiv:2506.08027; "nvfp4" is that of "Pretraining large language models with NVFP4"
    (arXiv:2509.25149).
    """

    scaling: Scaling = "blockwise"
    power_of_two: bool = True
    grad_format: Format = "e4m3"
    amax_history: History = 0
    keep_hidden: KeepHidden = "auto"
    hadamard: bool = True
    stochastic_rounding: bool = True
    backend: RecipeBackend = "moecore"

    def _rules(self) -> Rules:
        rule = f"scaling ({self.scaling!r})"
        if self.scaling == "mxfp8" and not self.power_of_two:
            yield "power_of_two", f"be True with {rule}, whose scales are E8M0: drop it"
        if self.grad_format == "e5m2" and self.scaling in EMULATED:
            yield (
                "grad_format",
                f"be 'e4m3' with {rule}, which has one format for all operands: drop it, or use "
                "scaling='rowwise' or 'tensorwise'",
            )
        for field in ("hadamard", "stochastic_rounding"):
            if self.scaling != "nvfp4" and not getattr(self, field):
                yield field, f"be True with {rule}, which has none: drop it, or use scaling='nvfp4'"
        if self.grad_format == "e5m2" and self.scaling == "blockwise":
            yield (
                "grad_format",
                f"be 'e4m3' with {rule}, whose blocks need no wider range: drop it, or use "
                "scaling='rowwise' or 'tensorwise'",
            )
        if self.amax_history and self.scaling != "tensorwise":
            yield (
                "amax_history",
                f"be 0 with {rule}, whose scales come from the values they scale: drop it, or use "
                "scaling='tensorwise'",
            )
        if self.keep_hidden == "fp8" and self.scaling != "blockwise":
            yield (
                "keep_hidden",
                f"be 'wide' with {rule}, because what is kept has a scale per 128 columns: drop "
                "it, or use scaling='blockwise'",
            )
        if self.backend == "te":
            yield from self._rules_of_te(rule)

    def _rules_of_te(self, rule: str) -> Rules:
        if self.scaling not in TE_ROWS:
            yield "backend", f"be 'moecore' with {rule}, which Transformer Engine has not: drop it"
        if self.scaling == "nvfp4" and self.power_of_two:
            yield "power_of_two", f"be False with {rule} and backend ('te'), which rounds no scale"
        if self.keep_hidden == "fp8":
            yield (
                "keep_hidden",
                "be 'wide' with backend ('te'), whose products read H wide: drop it",
            )

    @property
    def hidden(self) -> Hidden:
        """How the experts keep FC1's output for backward."""
        if self.keep_hidden != "auto":
            return self.keep_hidden
        return "fp8" if (self.scaling, self.backend) == ("blockwise", "moecore") else "wide"

    @property
    def is_emulated(self) -> bool:
        """Whether GPUs without tensor cores for the format multiply rounded operands wide."""
        return self.scaling in EMULATED and self.backend == "moecore"

    @property
    def reads_blocks(self) -> bool:
        """Whether products take weights that are stored in FP8, in blocks of 128."""
        return self.scaling == "blockwise" and self.backend == "moecore"

    @property
    def gathers(self) -> bool:
        """Whether units may gather weights quantised: both operands are the same numbers."""
        scalings = ("blockwise", "tensorwise", "nvfp4")
        return self.scaling in scalings and self.backend == "moecore"

    @property
    def multiple(self) -> int:
        """Of which the summed sizes of a matrix are multiples; of experts "blockwise" 128."""
        if self.backend == "te" and self.scaling in EMULATED:
            return 32
        return self.activation_block[1] or 16 if self.is_emulated else 16

    @property
    def rows(self) -> int:
        """Of which the rows of each expert are a multiple: `ExpertIndex` pads them with zeros."""
        return TE_ROWS[self.scaling] if self.backend == "te" else 1

    @property
    def activation_block(self) -> Block:
        """Rows and columns of one scale of an activation or a gradient, summed over columns."""
        return ACTIVATION_BLOCKS[self.scaling]

    @property
    def weight_block(self) -> Block:
        """Rows and columns of one scale of a weight, summed over columns."""
        return WEIGHT_BLOCKS[self.scaling]

    def describe(self) -> str:
        """Return one line: scaling, formats, scales, and what else differs from the defaults."""
        # Example: "blockwise FP8: e4m3, 1x128 and weights 128x128, scales fp32 power of two".
        suffix = ", Transformer Engine" if self.backend == "te" else ""
        if self.scaling in EMULATED:
            suffix = suffix or ", emulated before Blackwell"
        if self.scaling == "mxfp8":
            return f"MXFP8{suffix}: e4m3, 1x32, scales e8m0"
        if self.scaling == "nvfp4":
            line = f"NVFP4{suffix}: e2m1, 1x16 and weights 16x16, scales e4m3 and per tensor fp32"
            line += " power of two" if self.power_of_two else ""
            line += "" if self.hadamard else ", no Hadamard transform"
            return line if self.stochastic_rounding else f"{line}, no stochastic rounding"
        formats = "e4m3" if self.grad_format == "e4m3" else "e4m3, gradients e5m2"
        blocks = {
            "blockwise": "1x128 and weights 128x128",
            "rowwise": "by row",
            "tensorwise": "by tensor",
        }[self.scaling]
        scales = "fp32 power of two" if self.power_of_two else "fp32"
        line = f"{self.scaling} FP8{suffix}: {formats}, {blocks}, scales {scales}"
        if self.amax_history:
            line += f" of the last {self.amax_history} steps"
        return line if self.hidden == "wide" else f"{line}, hidden kept in fp8"


Role = Literal["experts", "shared_experts", "mlp", "attention"]
ROLES: tuple[Role, ...] = get_args(Role)
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)

Roles = Annotated[tuple[Role, ...], f"pass a tuple of {', '.join(map(repr, ROLES))}"]
Overrides = Annotated[
    tuple[tuple[str, Recipe | None], ...],
    'pass a tuple of pairs, like (("model.layers.0.*", None),)',
]

# Parts of a module's name, and what is computed there.
NEVER = {
    "router": "a router decides by differences that FP8 rounds away",
    "embed": "an embedding multiplies nothing",
    "lm_head": "the head's logits keep their precision: Precision(fp8_head=True) is about its loss",
    "norm": "a norm multiplies no matrices",
    "sdpa": "attention scores keep their precision",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision(CheckedRecord):
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
        fp8_head: the head's three products of a loss that is made in chunks of tokens
            (`linear_cross_entropy`) are in FP8 too, by `recipe` ("blockwise"); logits are then
            rounded to the dtype of the products. Logits that are asked for, and log-probabilities
            of reinforcement learning, stay as they are.

    Raises:
        ValueError: when a field is of the wrong type, a role or a pattern is there twice, or a
            pattern asks for the quantisation of what is never quantised; without "experts", for
            a recipe that is about their hidden activations.
    """

    recipe: Recipe
    roles: Roles = ROLES
    overrides: Overrides = ()
    only_faster: bool = False
    fp8_head: bool = False

    def _rules(self) -> Rules:
        if self.fp8_head and not self.recipe.reads_blocks:
            yield (
                "fp8_head",
                f"be False with {self.recipe.describe()}, which has no products for a head: use "
                "Recipe(scaling='blockwise')",
            )
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

        "auto" is blockwise for routed experts where that is faster; the name of a scaling, or a
        recipe, is for all roles. Anything else raises a ValueError.
        """
        if precision is None or isinstance(precision, Precision):
            return precision
        if isinstance(precision, Recipe):
            return cls(recipe=precision)
        if isinstance(precision, str) and precision in PRECISIONS:
            return PRECISIONS[precision]
        raise ValueError(
            f"precision ({quote(precision)}) must be one of "
            f"{', '.join(map(repr, PRECISIONS))}, a Recipe, a Precision or None: use 'auto'"
        )

    @property
    def recipes(self) -> list[Recipe]:
        """All recipes that a module may have."""
        return [self.recipe, *(recipe for _, recipe in self.overrides if recipe is not None)]

    def recipe_of(self, name: str, role: Role | None) -> Recipe | None:
        """Return the recipe of a module by its clean name and its role; None = no quantisation."""
        # The name is like "model.layers.3.mlp.experts", without what wrappers add. A role of None
        # is none of the roles, which no pattern changes.
        if role is None:
            return None
        for pattern, recipe in self.overrides:
            if fnmatchcase(name, pattern):
                return recipe
        return self.recipe if role in self.roles else None


PRECISIONS = Registry(
    "precision",
    {
        "auto": Precision(recipe=Recipe(), roles=("experts",), only_faster=True),
        **{scaling: Precision(recipe=Recipe(scaling=scaling)) for scaling in SCALINGS},
    },
)
NamedPrecision = Annotated[PrecisionName | str, OneOf(PRECISIONS)]


def register_precision(name: str, precision: Precision) -> None:
    """Let `precision` name a record, on every rank; raise a ValueError if the name is taken."""
    check_arguments(register_precision, locals())
    PRECISIONS.register(name, precision)


def never_quantised(part: str) -> str | None:
    """Return why a part of a name is never quantised; None = it may be."""
    return next((reason for word, reason in NEVER.items() if word in part.lower()), None)
