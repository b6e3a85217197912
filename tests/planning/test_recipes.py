import json
from dataclasses import replace
from functools import partial

import pytest

from moecore import DenseOptions
from moecore.cli import main
from moecore.parallelize import parallelize_moe
from moecore.planning import CostTable, plan_memory, plan_time
from moecore.planning import run as run_module
from moecore.planning.gpus import GPUS
from moecore.planning.search import Layout, SearchRequest, find_refusal
from moecore.train.graphs.graphed_part import GraphedPart
from tests.helpers.grids import beside
from tests.planning.recipes import RECIPES, make_run

# What our plan of a recipe does not fit, and why.
TOO_LARGE = {
    # Table 17 has 8 stages for these numbers, and its text says why; 4 are a line of table 20.
    "deepseek-v3-h100-1024-pp4": "four stages",
    # Rows of three sequences. Experts save X and H as MXFP8, attention saves two bytes per element.
    "qwen3-235b-gb200-256": "attention saved in bf16",
}


# By day each model has GPUs of two kinds, and what does not fit runs.
NIGHTLY = [
    "deepseek-v3-gb200-256",
    "deepseek-v3-gb200-256-bf16",
    "qwen3-235b-gb300-256",
    "qwen3-235b-gb200-256-bf16",
]


@pytest.mark.parametrize("name", beside(RECIPES, NIGHTLY))
def test_a_recipe_fits_where_it_ran(name: str) -> None:
    recipe = RECIPES[name]
    plan = plan_memory(make_run(recipe))
    assert (plan.largest.num_bytes <= GPUS[recipe.gpu].memory) == (name not in TOO_LARGE)
    assert make_run(recipe).num_micro_batches * recipe.num_gpus * recipe.batch_size == (
        recipe.rows * recipe.degrees[0] * recipe.degrees[1] * recipe.degrees[2]
    )


@pytest.mark.parametrize("name", [n for n, r in RECIPES.items() if r.tokens_per_second])
def test_a_recipe_takes_as_long_as_it_did(name: str) -> None:
    """At most 6% faster: a plan has no late ranks. Without what pairs hide it is slower by far.

    DeepSeek-V3 with the products that the report measured beside DeepEP: as fast as alone they
    give 1,540 tokens/s (+9%). Of Qwen3 it names no such loss; with the same one it had 1,959.
    """
    run, reported = make_run(RECIPES[name]), RECIPES[name].tokens_per_second
    gpu, rate = GPUS[RECIPES[name].gpu], 1 / (1 + RECIPES[name].slower)
    assert reported is not None and gpu.fp8_flops is not None
    slow = replace(gpu, bf16_flops=rate * gpu.bf16_flops, fp8_flops=rate * gpu.fp8_flops)
    table = CostTable.of(slow)
    assert reported <= plan_time(run, table).tokens_per_gpu_second <= 1.06 * reported
    without = plan_time(run, replace(table, pairs_hide=0.0))
    assert without.tokens_per_gpu_second < 0.75 * reported


@pytest.mark.parametrize(
    ("name", "reported"), [("deepseek-v3-gb200-256", 4020), ("deepseek-v3-gb200-256-bf16", 3298)]
)
def test_a_blackwell_recipe_takes_about_as_long_as_it_did(name: str, reported: int) -> None:
    """Within 15% of table 11, by rates of the data sheet.

    The report runs attention, router and preprocessing as CUDA graphs, so the host is left out.
    """
    table = replace(CostTable.of(RECIPES[name].gpu), host_seconds=1e-12)
    planned = plan_time(make_run(RECIPES[name]), table).tokens_per_gpu_second
    assert abs(planned - reported) <= 0.15 * reported


def test_the_guidelines_are_those_of_the_recipes() -> None:
    for recipe in RECIPES.values():
        tp, pp, cp, ep = recipe.degrees
        run = make_run(recipe)
        gpus = dict(num_gpus=recipe.num_gpus, gpus_per_node=GPUS[recipe.gpu].server)
        rows = dict(seq_len=recipe.seq_len, global_batch=recipe.rows)
        request = SearchRequest(model=run.model, **gpus, **rows)
        assert find_refusal(request, Layout(pp, tp, cp, ep, 1, min(recipe.chunks, 4))) is None


@pytest.mark.parametrize(
    "name", ["qwen3-235b-gb200-256", "qwen3-235b-h100-256", "qwen3-235b-gb300-128-128k"]
)
def test_a_rank_is_built_with_the_graphs_of_its_recipe(name: str, monkeypatch) -> None:
    """Over tp 2 with pairs, and over tp 4 and cp 4: attn, moe_router, moe_preprocess (B.2)."""
    dense = DenseOptions(graph=True, graph_scopes=("attention", "router", "dispatch"))
    graphed = partial(parallelize_moe, dense=dense)
    monkeypatch.setattr(run_module, "parallelize_moe", graphed)
    run, (tp, pp, cp, _) = make_run(RECIPES[name]), RECIPES[name].degrees
    with run_module.enter_run_world(run):
        model = run_module.build_model(run, "cpu")
        layers = [layer for layer in model.layers if hasattr(layer, "mlp")]
        assert 0 < len(layers) < 94 / pp + 2
        for layer in layers:
            parts = layer.attend, layer.mlp.router.forward, layer.mlp.dispatcher.prepare_send_order
            assert all(isinstance(part, GraphedPart) for part in parts)
            sizes = [1 if part._group is None else part._group.size() for part in parts]
            assert sizes == [tp * cp, 1, 1]


@pytest.mark.nightly  # a search of the largest model
def test_what_a_search_finds_for_deepseek_v3_is_faster_than_the_reports_run(capsys) -> None:
    """The first row of `moecore plan --preset deepseek-v3 --gpus 1024`, which takes minutes."""
    call = "plan --preset deepseek-v3 --gpus 1024 --pp 4 --tp 2 --ep 64 --schedule overlapped"
    call += " --layout Et*5|(t*4|)*14mL --micro-batches 64 --precision blockwise --json"
    call += " --fp8-param-gather --dense-strategy optim --recompute gemm_last"
    assert main([*call.split(), "--offload", "attention", "experts", "mlp"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["tokens_per_second"] >= 1438
