"""Plans of the native decoder with linear and with sparse attention, and with halves of blocks.

`test_memory.py` compares what such models store with ranks.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moecore import ParallelConfig, PipelineConfig
from moecore.cli import main
from moecore.kernels.common import cdiv
from moecore.kernels.linear_attention.chunked import CHUNK, TILE
from moecore.models import DecoderConfig, flops_per_token, num_params, preset
from moecore.planning import (
    CostTable,
    SearchRequest,
    TrainingRun,
    dry_run,
    plan_memory,
    plan_peak_memory,
    plan_time,
    time_step,
)
from moecore.planning.estimate import count_saved_bytes_by_block
from moecore.planning.layouts import Layout
from moecore.planning.record import compute_operation_work
from moecore.planning.search import find_refusal
from moecore.planning.segments import SampledRun
from tests.helpers.grids import beside

TABLE = CostTable.of("h200-141")
NEXT, V32 = preset("qwen3-next-80b-a3b"), preset("deepseek-v3.2")
NANO = preset("nemotron-3-nano-30b-a3b")


def of_layers(number: int, last: str = "full", *, dense: int = 0) -> DecoderConfig:
    """Qwen3-Next of another depth, whose first layers may be dense."""
    of_four = 3 if last == "full" else 2  # which layer of four has attention
    linear = tuple(i for i in range(number) if i % 4 != of_four)
    mlp = dict(dense_layers=tuple(range(dense)), mlp_hidden_dim=5120 if dense else 0)
    return replace(NEXT, num_layers=number, linear_layers=linear, **mlp)


def of_pattern(pattern: str) -> DecoderConfig:
    """Nemotron 3 Nano of another depth."""
    hidden_dim = 4096 if "-" in pattern else 0
    return replace(NANO, num_layers=len(pattern), pattern=pattern, mlp_hidden_dim=hidden_dim)


DEEP = TrainingRun(model=of_layers(16), num_gpus=8, parallel=ParallelConfig(ep=8), seq_len=1024)
CASES = {
    "three linear, one full": (DEEP, 0.002),
    "dense ones too, cp": (
        replace(DEEP, model=of_layers(12, dense=3), parallel=ParallelConfig(cp=2, ep=4)),
        0.01,
    ),
    "sparse, two nodes": (
        TrainingRun(
            model=replace(V32, num_layers=9), num_gpus=16, parallel=ParallelConfig(ep=16, tp=2)
        ),
        0.02,
    ),
    "plain MLPs too, attention last, cp": (
        replace(DEEP, model=of_pattern("M-MEM*E" * 2 + "M*"), parallel=ParallelConfig(cp=2, ep=4)),
        0.001,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_few_layers_stand_for_all(case: str) -> None:
    run, error = CASES[case]
    assert SampledRun.from_run(run).run.planned_model.num_layers <= min(
        9, run.planned_model.num_layers - 1
    )
    step = dry_run(run)
    assert plan_peak_memory(run) == pytest.approx((step.peak,), rel=error)
    exact, found = time_step(step, TABLE), plan_time(run, TABLE)
    assert found.seconds == pytest.approx(exact.seconds, rel=0.04)


@pytest.mark.parametrize("model", [of_layers(8), of_pattern("MEMEM*E" * 2)])
def test_ranks_of_a_pipeline(model: DecoderConfig) -> None:
    stages = dict(parallel=ParallelConfig(pp=2, ep=4), pipeline=PipelineConfig())
    run = replace(DEEP, model=model, num_micro_batches=3, **stages)
    exact = [dry_run(run, rank).peak for rank in (0, 4)]
    assert plan_peak_memory(run) == pytest.approx(exact, rel=0.005)


@pytest.mark.parametrize("model", [of_layers(4), of_pattern("MEMEM*E")])
def test_flops_of_linear_attention(model: DecoderConfig) -> None:
    """The model's, and within chunks of 64 tokens; backward computes the states again."""
    T, linear = 2048, model.linear_attention
    works = dry_run(TrainingRun(model=model, num_gpus=1, seq_len=T)).forward_backward
    H, k = linear.num_v_heads, linear.head_k_dim
    v = cdiv(linear.head_v_dim, TILE) * TILE  # the kernels pad values with zeros
    scans = [w for w in works if w.kind == "attention" and "attention" not in w.name]
    products = 22 * k * v + 2 * CHUNK * (10 * k + 7 * v + 20 * CHUNK)
    if model.pattern:
        products = 14 * k * v + 2 * CHUNK * (4 * k + 3 * v)
    assert sum(w.flops for w in scans) == 3 * T * H * products
    more = 3 * (T * H * products - T * linear.state_flops * 3)
    flops = T * flops_per_token(model, T) + more
    assert sum(w.flops for w in works) == pytest.approx(flops, rel=0.05)


@pytest.mark.parametrize("name", ["flash_attention_forward", "flash_attention_backward"])
def test_flops_of_packed_documents_are_those_of_rows(name: str) -> None:
    works = []
    for shape, longest in (((4, 16, 2, 8), 16), ((64, 2, 8), 16), ((61, 2, 8), 16)):
        num_heads, like = 5 if "backward" in name else 3, dict(dtype=torch.bfloat16, device="meta")
        *heads, out = (torch.empty(shape, **like) for _ in range(num_heads + 1))
        cu_seqlens = torch.empty(5, device="meta")
        args = (*heads, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, False)
        works.append(compute_operation_work(name, args, {}, [out], writes=True))
    assert works[0] is not None and works == works[:1] * 3


@pytest.mark.parametrize("T", [512, 4096])
def test_flops_of_sparse_attention(T: int) -> None:
    """By hand, of queries times latents, selected keys, and back."""
    model = replace(V32, num_layers=1, dense_layers=(), mlp_hidden_dim=0)
    model = replace(model, num_mtp_layers=0, mtp_loss_coef=0.0)
    works = dry_run(TrainingRun(model=model, num_gpus=1, seq_len=T)).forward_backward
    mla, H = model.mla, model.num_heads
    n, r, v, L = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim, mla.kv_lora_rank
    K = min(T, mla.sparse.top_k)
    forward = n * L + K * (L + r) + K * L + L * v
    backward = 3 * n * L + 2 * K * (L + r) + 2 * K * L + 2 * L * v + K * (2 * L + r)
    kernels = "_sparse_attention", "sm90_sparse_attention", "_sum_selected_rows", "bmm"
    found = sum(w.flops for w in works if w.name.startswith(kernels))
    assert found == 2 * T * H * (forward + backward)
    index = [w for w in works if w.name == "_index_scores_kernel"]
    pairs = T * T * (1 + 1 / len(index)) / 2  # a chunk scores all keys up to its last query
    heads = mla.sparse.num_heads * mla.sparse.head_dim
    assert sum(w.flops for w in index) == pytest.approx(2 * pairs * heads, rel=0.07)


@pytest.mark.parametrize("model", [of_layers(4), replace(V32, num_layers=4), of_pattern("ME*-ME")])
def test_a_dry_run_holds_what_forwards_keep(model: DecoderConfig) -> None:
    run = TrainingRun(model=model, num_gpus=1, seq_len=1024, batch_size=2)
    head = next(start for start in dry_run(run).starts if start[:2] == ("F", "head"))
    kinds = {kind: n for kind, n in head.kinds.items() if kind.startswith("activations")}
    del kinds["activations: outside"]
    kept = count_saved_bytes_by_block(run).blocks[: model.num_layers]
    blocks = sum(block.num_bytes for block in kept)
    assert sum(kinds.values()) == pytest.approx(blocks, rel=0.01)


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("tiny-nemotron-h", 2 * 8 * 2 * 32 * 64),  # without a gate
        ("tiny-deepseek-v3", (2 + 1) * 8 * 3 * 32 * 64),  # with the module of predictions
        ("gpt-oss-20b", 24 * 32 * (3 * 2880 * 2880 + 3 * 2880)),  # with biases
    ],
)
def test_parameters_of_experts(name: Any, experts: int) -> None:
    sizes = TrainingRun(model=preset(name), num_gpus=1, seq_len=64).planned_model.count_parameters()
    assert sizes.experts == experts and sizes.params == num_params(preset(name))


def test_what_is_refused_has_the_line_of_parallelize_moe() -> None:
    request = SearchRequest(model=NEXT, num_gpus=64)
    found = find_refusal(request, Layout(tp=4, ep=16))
    assert found is not None and "num_kv_heads (2) must be a multiple of tp (4)" in found.reason
    assert find_refusal(request, Layout(tp=2, ep=16)) is None
    for model in (NEXT, V32, NANO):
        long = SearchRequest(model=model, num_gpus=64, seq_len=16384)
        assert find_refusal(long, Layout(cp=2, ep=16)) is None


@pytest.mark.parametrize(
    "name", beside(["tiny-qwen3-next", "tiny-nemotron-h"], ["tiny-nemotron-h"])
)
def test_the_command(name: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """A search with its recipe and its page, and what the scans are taken to reach."""
    monkeypatch.setattr("moecore.planning.html.SCALES", (1,))
    recipe, page = tmp_path / "recipe.toml", tmp_path / "plan.html"
    command = ["plan", "--preset", name, "--gpus", "1", "--seq-len", "64"]
    assert main([*command, "--write", str(recipe), "--html", str(page)]) == 0
    assert "linear attention" in capsys.readouterr().out
    assert f'preset = "{name}"' in recipe.read_text() and "<html" in page.read_text()
    assert main([*command, "--ep", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


def test_layers_that_choose_by_token_id_are_planned_as_others() -> None:
    """However few layers stand for all, the first of which choose so."""
    learned = replace(preset("tiny-deepseek-v3"), num_layers=6)
    stages = dict(parallel=ParallelConfig(pp=2, ep=2), pipeline=PipelineConfig(layout="Ettt|tttmL"))
    run = TrainingRun(model=learned, num_gpus=4, **stages, num_micro_batches=2, seq_len=64)
    by_id = replace(run, model=replace(learned, hash_layers=2))
    assert plan_memory(by_id).ranks == plan_memory(run).ranks
