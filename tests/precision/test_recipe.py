import re
from dataclasses import FrozenInstanceError

import pytest

from moecore.base.options.precision import Precision, Recipe

MXFP8, NVFP4 = dict(scaling="mxfp8"), dict(scaling="nvfp4")
REFUSED = {
    "grad_format": dict(grad_format="e5m2"),
    "amax_history": dict(amax_history=4),
    "keep_hidden": dict(keep_hidden="fp8", scaling="tensorwise"),
    "power_of_two": dict(MXFP8, power_of_two=False),
    "hadamard": dict(MXFP8, hadamard=False),
    "stochastic_rounding": dict(stochastic_rounding=False),
}


def refused(message: str, make, **fields) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        make(**fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", REFUSED)
def test_fields_that_do_not_go_together(field: str) -> None:
    refused(f"Recipe.{field} (", Recipe, **REFUSED[field])


def test_fields_of_the_wrong_kind() -> None:
    refused("Recipe.scaling ('mxfp4') must be one of", Recipe, scaling="mxfp4")
    refused("Recipe.amax_history (-1) must be", Recipe, scaling="tensorwise", amax_history=-1)
    refused("Recipe.power_of_two (1) must be True or False", Recipe, power_of_two=1)
    with pytest.raises(FrozenInstanceError):
        Recipe().scaling = "rowwise"  # type: ignore[misc]


def test_blocks() -> None:
    blocks = {
        scaling: (Recipe(scaling=scaling).activation_block, Recipe(scaling=scaling).weight_block)
        for scaling in ("blockwise", "rowwise", "tensorwise", "mxfp8", "nvfp4")
    }
    assert blocks == {
        "blockwise": ((1, 128), (128, 128)),
        "rowwise": ((1, None), (1, None)),
        "tensorwise": ((None, None), (None, None)),
        "mxfp8": ((1, 32), (1, 32)),
        "nvfp4": ((1, 16), (16, 16)),
    }
    multiples = [Recipe(scaling=scaling).weight_multiple for scaling in blocks]
    assert multiples == [16, 16, 16, 32, 16]


@pytest.mark.parametrize("scaling", [MXFP8, NVFP4], ids=str)
@pytest.mark.parametrize(
    "field", [dict(grad_format="e5m2"), dict(amax_history=2), dict(keep_hidden="fp8")], ids=str
)
def test_emulated_formats_have_no_such_options(field: dict, scaling: dict) -> None:
    refused(f"Recipe.{next(iter(field))} (", Recipe, **scaling, **field)


def test_describe() -> None:
    assert Recipe(keep_hidden="fp8").describe() == (
        "blockwise FP8: e4m3, 1x128 and weights 128x128, scales fp32 power of two, hidden kept in "
        "fp8"
    )
    hybrid = Recipe(scaling="tensorwise", power_of_two=False, grad_format="e5m2", amax_history=16)
    assert hybrid.describe() == (
        "tensorwise FP8: e4m3, gradients e5m2, by tensor, scales fp32 of the last 16 steps"
    )


def test_describe_of_emulated_formats() -> None:
    where = "emulated before Blackwell"
    assert Recipe(scaling="mxfp8").describe() == f"MXFP8, {where}: e4m3, 1x32, scales e8m0"
    line = f"NVFP4, {where}: e2m1, 1x16 and weights 16x16, scales e4m3 and per tensor fp32"
    assert Recipe(scaling="nvfp4").describe() == f"{line} power of two"
    plain = dict(power_of_two=False, hadamard=False, stochastic_rounding=False)
    expected = f"{line}, no Hadamard transform, no stochastic rounding"
    assert Recipe(scaling="nvfp4", **plain).describe() == expected


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
