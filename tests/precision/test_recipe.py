import re

import pytest

from moecore.base.options.precision import Precision, Recipe

MXFP8, NVFP4 = dict(scaling="mxfp8"), dict(scaling="nvfp4")
EMULATED = (dict(grad_format="e5m2"), dict(amax_history=2), dict(keep_hidden="fp8"))
REFUSED = [
    dict(grad_format="e5m2"),
    dict(amax_history=4),
    dict(keep_hidden="fp8", scaling="tensorwise"),
    dict(power_of_two=False, **MXFP8),
    dict(hadamard=False, **MXFP8),
    dict(stochastic_rounding=False),
    dict(backend="te", scaling="rowwise"),
    dict(power_of_two=True, backend="te", **NVFP4),
    dict(keep_hidden="fp8", backend="te"),
    *(field | scaling for scaling in (MXFP8, NVFP4) for field in EMULATED),
]


def refused(message: str, make, **fields) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        make(**fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fields", REFUSED, ids=str)
def test_fields_that_do_not_go_together(fields: dict) -> None:
    refused(f"Recipe.{next(iter(fields))} (", Recipe, **fields)


def test_of() -> None:
    assert Precision.of(None) is None
    assert Precision.of("rowwise") == Precision(recipe=Recipe(scaling="rowwise"))
    assert Precision.of(Recipe()) == Precision.of("blockwise")
    one = Precision(recipe=Recipe(), roles=("experts",))
    assert Precision.of(one) is one
    for bad in ("fp8", 8, Recipe):
        refused(f"precision ({bad!r}"[:20], Precision.of, precision=bad)


def test_the_first_override_counts() -> None:
    rowwise = Recipe(scaling="rowwise")
    precision = Precision(
        recipe=Recipe(),
        roles=("experts", "mlp"),
        overrides=(
            ("layers.0.*", None),
            ("*.mlp.experts", rowwise),
            ("*.q_proj", rowwise),
            ("layers.*", None),
        ),
    )
    assert precision.find_recipe("layers.0.mlp.experts", "experts") is None
    assert precision.find_recipe("layers.1.mlp.experts", "experts") == rowwise
    assert precision.find_recipe("layers.1.mlp.gate_proj", "mlp") is None
    assert precision.find_recipe("layers.1.self_attn.q_proj", "attention") == rowwise
    assert precision.find_recipe("mtp.mlp.gate_proj", "mlp") == Recipe()
    assert precision.find_recipe("mtp.self_attn.o_proj", "attention") is None
    assert precision.find_recipe("layers.1.anything.q_proj", None) is None


@pytest.mark.parametrize(
    "pattern", ["*.router", "lm_head", "model.embed_tokens", "*.q_a_layernorm", "*norm*"]
)
def test_what_is_never_quantised(pattern: str) -> None:
    refused(
        f"must give no recipe to {pattern!r}, because",
        Precision,
        recipe=Recipe(),
        overrides=((pattern, Recipe()),),
    )
    assert Precision(recipe=Recipe(), overrides=((pattern, None),)).overrides


def test_precision_refusals() -> None:
    refused("Precision.recipe ('blockwise') must be a Recipe", Precision, recipe="blockwise")
    for roles in ("experts", ("router",), ["mlp"]):
        refused("Precision.roles (", Precision, recipe=Recipe(), roles=roles)
    refused("have each role once", Precision, recipe=Recipe(), roles=("mlp", "mlp"))
    refused("use precision=None", Precision, recipe=Recipe(), roles=())
    assert Precision(recipe=Recipe(), roles=(), overrides=(("*", Recipe()),)).roles == ()
    hidden = Recipe(keep_hidden="fp8")
    refused("have 'experts' with Recipe.keep_hidden", Precision, recipe=hidden, roles=("mlp",))
    assert Precision(recipe=hidden, roles=("experts",)).roles == ("experts",)
    twice = (("a.*", None), ("a.*", Recipe()))
    refused("have each pattern once", Precision, recipe=Recipe(), overrides=twice)
    refused("Precision.overrides (", Precision, recipe=Recipe(), overrides=(("a", "blockwise"),))
