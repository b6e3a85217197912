"""`Recipe` and `Precision`: which matrix products run in FP8, and with which scales.

The records contain no tensors. Routers, embeddings, norms, attention scores, master weights and
gradients keep their dtype. Heads keep their dtype unless `Precision.fp8_head` is set.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal, get_args

from moecore.base.fields import Bound, CheckedRecord, FieldErrors, OneOf, check_arguments, quote
from moecore.base.options.names import PrecisionName as PrecisionName
from moecore.base.registry import Registry

Scaling = Literal["blockwise", "rowwise", "tensorwise", "mxfp8", "nvfp4"]
Format = Literal["e4m3", "e5m2"]
Hidden = Literal["wide", "fp8", "microscaled"]
KeepHidden = Literal["auto", "wide", "fp8"]
RecipeBackend = Literal["moecore", "te"]
FrozenFormat = Literal["nf4", "mxfp4", "nvfp4"]
Block = tuple[int | None, int | None]  # rows and columns that share a scale; None = all

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
EMULATED: tuple[Scaling, ...] = ("mxfp8", "nvfp4")  # emulated on GPUs before Blackwell
# The row alignment of Transformer Engine's products (`get_align_size_for_quantization`).
TE_ROWS: dict[Scaling, int] = {"blockwise": 16, "tensorwise": 16, "mxfp8": 32, "nvfp4": 128}

History = Annotated[
    int, Bound(">=", 0), Bound("<=", 4096), "use 0 for scales of the tensor's own values"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(CheckedRecord):
    """The scales and formats of FP8 matrix products.

    Both operands of a matrix product are quantised in blocks along the summed dim, and summed in
    fp32. An operand that one product sums along rows and another along columns is quantised twice.
    Operands of "tensorwise" and weights of "nvfp4" are quantised once, then transposed.

    Attributes:
        scaling: the values that share a scale. "blockwise": 1 x 128 of activations and gradients,
            128 x 128 of weights; "rowwise": a row; "tensorwise": a tensor; "mxfp8": 1 x 32 with
            E8M0 scales; "nvfp4": E2M1 values, 1 x 16 (weights 16 x 16) with E4M3 scales and an
            fp32 scale per tensor. Before Blackwell "mxfp8" and "nvfp4" are emulated in bf16.
        power_of_two: round scales up to powers of two. For "nvfp4" only the fp32 scale is rounded;
            scales of "mxfp8" are always powers of two.
        grad_format: format of output gradients; activations and weights are always "e4m3". "e5m2"
            has two mantissa bits and a maximum of 57344, only for "rowwise" and "tensorwise".
        amax_history: 0 = the scale is computed from the tensor's maximum (recommended). n = delayed
            scaling for "tensorwise", from the maximum of the last n steps: no extra pass over the
            tensor, but larger values are clipped. All experts of a layer share one history.
        keep_hidden: format of FC1's output that the experts save for backward: "wide" = the compute
            dtype, "fp8" = 1 x 128 blocks ("blockwise" only). "auto" = "fp8" if allowed. For "mxfp8"
            and "nvfp4" the field also applies to FC1's input. "auto" then saves both in the format
            of the recipe, in blocks along a row, if `power_of_two`.
        hadamard: for "nvfp4": apply a random Hadamard transform over groups of 16 tokens to both
            operands of a weight gradient before quantisation, which spreads outliers.
        stochastic_rounding: for "nvfp4": round gradients stochastically, so that their mean is
            unbiased. The random bits depend only on an element's position and value.
        backend: the library that quantises and multiplies: "moecore", or "te" = Transformer Engine
            with the same scaling. "mxfp8" and "nvfp4" of "te" require Blackwell.

    Source: blocks of 128 DeepSeek-V3 (arXiv:2412.19437); e5m2 and delayed scaling
    arXiv:2209.05433; "mxfp8" the OCP Microscaling Formats specification v1.0 with the rounding of
    arXiv:2506.08027; "nvfp4" arXiv:2509.25149.
    """

    scaling: Scaling = "blockwise"
    power_of_two: bool = True
    grad_format: Format = "e4m3"
    amax_history: History = 0
    keep_hidden: KeepHidden = "auto"
    hadamard: bool = True
    stochastic_rounding: bool = True
    backend: RecipeBackend = "moecore"

    def _find_field_errors(self) -> FieldErrors:
        rule = f"scaling ({self.scaling!r})"
        if self.scaling == "mxfp8" and not self.power_of_two:
            yield "power_of_two", f"be True with {rule}, whose scales are E8M0: drop it"
        if self.grad_format == "e5m2" and self.scaling not in ("rowwise", "tensorwise"):
            yield "grad_format", f"be 'e4m3' with {rule}: drop it, or use 'rowwise' or 'tensorwise'"
        for field in ("hadamard", "stochastic_rounding"):
            if self.scaling != "nvfp4" and not getattr(self, field):
                yield field, f"be True with {rule}, which has none: drop it, or use scaling='nvfp4'"
        if self.amax_history and self.scaling != "tensorwise":
            yield "amax_history", f"be 0 with {rule}: drop it, or use scaling='tensorwise'"
        if self.keep_hidden == "fp8" and self.scaling != "blockwise":
            yield "keep_hidden", f"be 'wide' with {rule}: drop it, or use scaling='blockwise'"
        if self.backend == "moecore":
            return
        if self.scaling not in TE_ROWS:
            yield "backend", f"be 'moecore' with {rule}, which Transformer Engine has not: drop it"
        if self.scaling == "nvfp4" and self.power_of_two:
            yield "power_of_two", f"be False with {rule} and backend ('te'), which rounds no scale"
        if self.keep_hidden == "fp8":
            yield ("keep_hidden", "be 'wide' with backend ('te'), which has no FP8 hidden: drop it")

    @property
    def hidden_format(self) -> Hidden:
        """The format in which experts save FC1's output for backward; never "auto"."""
        if self.keep_hidden != "auto":
            return self.keep_hidden
        if self.is_emulated and self.power_of_two:  # other scales round a second time
            return "microscaled"
        return "fp8" if (self.scaling, self.backend) == ("blockwise", "moecore") else "wide"

    @property
    def is_emulated(self) -> bool:
        """Whether GPUs older than Blackwell multiply the quantised values in bf16."""
        return self.scaling in EMULATED and self.backend == "moecore"

    @property
    def reads_blocks(self) -> bool:
        """Whether matmuls can read weights that are stored in FP8 with one scale per 128 x 128."""
        return self.scaling == "blockwise" and self.backend == "moecore"

    @property
    def can_gather_weights(self) -> bool:
        """Whether weights can be all-gathered in FP8: all matmuls read one quantised copy."""
        scalings = ("blockwise", "tensorwise", "nvfp4")
        return self.scaling in scalings and self.backend == "moecore"

    @property
    def weight_multiple(self) -> int:
        """The required divisor of both dims of a weight; "blockwise" experts need 128 instead."""
        if self.backend == "te" and self.scaling in EMULATED:
            return 32
        return self.activation_block[1] or 16 if self.is_emulated else 16

    @property
    def row_multiple(self) -> int:
        """The multiple to which each expert's number of token rows is padded with zero rows."""
        return TE_ROWS[self.scaling] if self.backend == "te" else 1

    @property
    def activation_block(self) -> Block:
        """(rows, summed columns) that share a scale in activations and gradients; None = all."""
        return ACTIVATION_BLOCKS[self.scaling]

    @property
    def weight_block(self) -> Block:
        """(rows, columns) of a weight that share a scale; None = all rows or all columns."""
        return WEIGHT_BLOCKS[self.scaling]

    def describe(self) -> str:
        """Return a one-line description: scaling, formats, scales and non-default options."""
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
        return f"{line}, hidden kept in fp8" if self.hidden_format == "fp8" else line


Role = Literal["experts", "shared_experts", "mlp", "attention"]
ROLES: tuple[Role, ...] = get_args(Role)
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)

Roles = Annotated[tuple[Role, ...], f"pass a tuple of {', '.join(map(repr, ROLES))}"]
Overrides = Annotated[
    tuple[tuple[str, Recipe | None], ...],
    'pass a tuple of pairs, like (("model.layers.0.*", None),)',
]

# Parts of module names that never run in FP8, and the reason.
NEVER = {
    "router": "a router decides by differences that FP8 rounds away",
    "embed": "an embedding multiplies nothing",
    "lm_head": "the head's logits keep their precision: Precision(fp8_head=True) is about its loss",
    "norm": "a norm multiplies no matrices",
    "sdpa": "attention scores keep their precision",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision(CheckedRecord):
    """The modules whose matrix products run in FP8, and the format of frozen experts.

        Precision(recipe=Recipe(), overrides=(("model.layers.0.*", None),))

    Attributes:
        recipe: recipe of all modules with a role in `roles`; None = no FP8.
        roles: subset of "experts" (routed), "shared_experts", "mlp" (dense), and "attention"
            (its projections).
        overrides: pairs of an `fnmatch` pattern for qualified module names and a recipe; None = no
            FP8. The first pattern that matches a module is used, also for roles not in `roles`.
        only_faster: routed experts keep their dtype if FP8 was measured to be slower or has no
            kernel; a log line gives the reason. By default, a missing kernel is an error.
        fp8_head: run the head's three products of the chunked loss (`linear_cross_entropy`) in FP8,
            in the "blockwise" recipe. Returned logits and log-probabilities are not affected.
        frozen: 4-bit format in which frozen routed experts are stored: "nf4", "mxfp4" or "nvfp4".
            Their matrix products are in the compute dtype. None = experts keep their dtype.
        frozen_dense: also store the frozen linears of attention, dense MLPs and shared experts in
            the format `frozen`, replicated over data ranks. Linears with a recipe keep their dtype.
    """

    recipe: Recipe | None = None
    roles: Roles = ROLES
    overrides: Overrides = ()
    only_faster: bool = False
    fp8_head: bool = False
    frozen: FrozenFormat | None = None
    frozen_dense: bool = False

    def _find_field_errors(self) -> FieldErrors:
        recipe = self.recipe
        if self.fp8_head and (recipe is None or not recipe.reads_blocks):
            name = "recipe (None)" if recipe is None else recipe.describe()
            relation = f"be False with {name}, which has no products for a head"
            yield "fp8_head", f"{relation}: use Recipe(scaling='blockwise')"
        if self.frozen is not None and recipe is not None and "experts" in self.roles:
            relation = "be None with a recipe for 'experts', whose products read their dtype"
            yield "frozen", f"{relation}: leave 'experts' out of roles"
        if self.frozen_dense and self.frozen is None:
            yield "frozen_dense", "be False with frozen (None): set frozen='nf4'"
        if len(set(self.roles)) < len(self.roles):
            yield "roles", "have each role once: drop the repeated one"
        has_recipe = self.roles and recipe is not None
        if not (has_recipe or self.frozen or any(recipe for _, recipe in self.overrides)):
            yield "roles", "have a role where no override has a recipe: use precision=None"
        keeps_hidden = recipe is not None and recipe.keep_hidden == "fp8"
        if self.roles and "experts" not in self.roles and keeps_hidden:
            yield "roles", "have 'experts' with Recipe.keep_hidden ('fp8'): use 'wide'"
        patterns = [pattern for pattern, _ in self.overrides]
        if len(set(patterns)) < len(patterns):
            yield "overrides", "have each pattern once, because the first counts: drop the second"
        for pattern, recipe in self.overrides:
            reason = find_fp8_exclusion_reason(pattern.rpartition(".")[2])
            if recipe is not None and reason is not None:
                yield "overrides", f"give no recipe to {pattern!r}, because {reason}: drop it"

    @classmethod
    def of(cls, precision: Precision | Recipe | str | None) -> Precision | None:
        """Convert the argument `precision` of a call to a `Precision`; None = no FP8.

        "auto" = "blockwise" for routed experts if it is faster. A name of `Recipe.scaling`, or a
        `Recipe`, applies to all roles. "nf4" and "mxfp4" are formats of frozen experts, and "nvfp4"
        is a scaling. An unknown value raises a ValueError.
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
        """The default recipe if there is one, followed by the recipes of `overrides`."""
        recipes = (self.recipe, *(recipe for _, recipe in self.overrides))
        return [recipe for recipe in recipes if recipe is not None]

    def find_recipe(self, name: str, role: Role | None) -> Recipe | None:
        """Return the FP8 recipe of a module by its qualified name and role; None = no FP8."""
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
        **{kind: Precision(frozen=kind) for kind in get_args(FrozenFormat) if kind not in SCALINGS},
    },
)
NamedPrecision = Annotated[PrecisionName | str, OneOf(PRECISIONS)]


def register_precision(name: str, precision: Precision) -> None:
    """Register `precision` for `parallelize_moe(precision=name)`; call it on every rank."""
    check_arguments(register_precision, locals())
    PRECISIONS.register(name, precision)


def find_fp8_exclusion_reason(module_name: str) -> str | None:
    """Return why modules with names ending in `module_name` never run in FP8; None = they can."""
    return next((reason for word, reason in NEVER.items() if word in module_name.lower()), None)
