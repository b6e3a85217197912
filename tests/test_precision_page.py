from pathlib import Path

import pytest
from benchmarks.shapes import SHAPES

from moecore import ParallelConfig, build_meshes, parallelize_moe
from moecore.models import Decoder, preset
from moecore.precision.apply import list_quantised_linears
from tests.helpers.te_definition import te_defined

PAGE = Path(__file__).parents[1] / "docs" / "precision.md"


FP8, TE, FP16 = [part.split("```")[0] for part in PAGE.read_text().split("```python\n")[1:]]


@pytest.mark.usefixtures("no_group_left")
def test_the_example_of_fp16_trains() -> None:
    names: dict = {}
    exec(FP16, names)
    done = names["done"]
    assert done.norm.finite and done.to_dict()["loss_scale"] == 2.0**16
    assert names["extra"]["loss_scale"] == 2.0**16 and names["extra"]["loss_scale_num_good"] == 1


@pytest.mark.usefixtures("no_group_left")
def test_the_arguments_for_transformer_engine() -> None:
    names: dict = {}
    exec(TE, names)
    meshes = build_meshes(ParallelConfig())
    with te_defined():
        for key, num_linears in (("wide", 0), ("fp8", 19), ("dense", 19)):
            model = parallelize_moe(Decoder(preset("tiny")), meshes, **names[key])
            experts = model.model.layers[1].mlp.get_part("experts")
            is_te = experts.backend == "te", getattr(experts.recipe, "backend", None) == "te"
            assert is_te == {"wide": (True, False), "fp8": (False, True)}.get(key, (False, False))
            assert len(list(list_quantised_linears(model))) == num_linears


@pytest.mark.usefixtures("no_group_left")
def test_the_example_trains_in_fp8() -> None:
    names: dict = {}
    exec(FP8, names)
    assert names["done"].norm.finite and names["loss"].isfinite()
    layers = names["model"].model.layers
    is_fp8 = [any(list_quantised_linears(layer)) for layer in layers]
    assert is_fp8 == [False, True, True, True]
    assert layers[1].mlp.get_part("experts").recipe == names["precision"].recipe


@pytest.mark.parametrize(("row", "shape"), [("Qwen3-30B-A3B", "qwen3-30b"), ("V3", "dsv3-32e")])
def test_kept_bytes(row: str, shape: str) -> None:
    s, value = SHAPES[shape], 1 + 4 / 128
    x, h = s.dim, 2 * s.top_k * s.hidden_dim  # elements per token
    wide, narrow = x * value + 2 * h, (x + h) * value
    assert 2 * (x + h) * s.tokens == s.least_saved_bytes
    (line,) = [n for n in PAGE.read_text().splitlines() if n.startswith("| all") and row in n]
    cells = [float(cell) for cell in line.split("|")[3:5]]
    assert cells == [round(n / (2 * (x + h)), 2) for n in (narrow, wide)]
