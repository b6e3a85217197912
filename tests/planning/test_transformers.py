import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from moecore import MemoryOptions, ParallelConfig, PipelineConfig
from moecore.base.options.precision import Precision
from moecore.base.saved_tensors import use_packer
from moecore.cli import main
from moecore.families import use_causal_attention
from moecore.families.family import find_family, swap_blocks
from moecore.families.fp32_modules import is_selection_bias
from moecore.families.transformers.experts import find_experts_adapter, get_used_parameters
from moecore.families.transformers.lora_options import LoRAOptions
from moecore.families.transformers.packing import find_packing_problem
from moecore.io import decoder_config_from_hf
from moecore.models import flops_per_token
from moecore.parallel.fsdp.units import find_blocks
from moecore.parallel.pipeline.stages import get_loss
from moecore.planning import (
    SearchRequest,
    TrainingRun,
    TransformersModel,
    dry_run,
    fake_world,
    plan_memory,
    plan_peak_memory,
    plan_time,
)
from moecore.planning import transformers as planned_transformers
from moecore.planning.costs import CostTable
from moecore.planning.estimate import count_saved_bytes_by_block
from moecore.planning.layouts import Layout
from moecore.planning.recipe import format_python_calls
from moecore.planning.run import count_resident_bytes, list_rank_bytes
from moecore.planning.search import find_refusal
from moecore.planning.segments import SampledRun
from moecore.train.memory.saved_bytes import count_saved_bytes
from tests.families.transformers.family_models import (
    IS_BEFORE_5_23,
    SIZES,
    config_values,
    model_class,
    skip_unless_in_bf16,
    tiny_model,
)
from tests.families.transformers.test_families import BY_DAY, REFUSED, taken
from tests.helpers.grids import beside
from tests.train.memory.test_saved_bytes import Saved

# Default sizes, and which structure each has.
DEEP: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_hidden_layers": 12},  # grouped queries
    "deepseek_v3": {"num_hidden_layers": 10},  # latents, three dense layers
    "qwen3_next": {"num_hidden_layers": 12},  # linear attention in most layers
    "llama4": {"num_hidden_layers": 12},  # chunks in most layers, masks
    "jamba": {"num_hidden_layers": 10},  # layers listed by properties of the config
    "dots3_note": {"num_hidden_layers": 10},  # heads of some layers by their numbers
    "longcat_flash": {"num_layers": 8},  # whose num_hidden_layers are attentions, two a layer
}
# Of two sizes of heads a CPU keeps the scores of all pairs of tokens: these have one.
KEPT = ("qwen3_moe", "gpt_oss", "afmoe", "llama4", "ernie4_5_moe", "granitemoe", "phimoe", "aria")
WIDE = SIZES | {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
}
BOTH = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v2")


@cache
def model_of(family: str) -> TransformersModel:
    return TransformersModel.of(config_values(family))


def default(family: str, **changes: Any) -> TransformersModel:
    """The model of a family's own default sizes."""
    kind = model_class(family)
    config = kind.config_class(**changes)
    config.architectures = [kind.__name__]
    return TransformersModel.of(json.loads(config.to_json_string(use_diff=False)))


@pytest.mark.parametrize("family", beside(taken(), {*taken()} - {*BY_DAY}))
def test_parameters_gradients_and_state_are_those_of_the_class(family: str) -> None:
    kind, run = model_class(family), TrainingRun(model=model_of(family), num_gpus=1, seq_len=64)
    with torch.device("meta"):
        stock = tiny_model(family)
        for experts in filter(find_experts_adapter, stock.modules()):
            for name, tensor in get_used_parameters(experts).items():
                experts.register_parameter(name, tensor)
        twin = tiny_model(family)
    swap_blocks(twin, {})
    # Selection biases of moecore's routers, which some classes have as frozen parameters.
    buffers = {n for n, _ in twin.named_buffers() if is_selection_bias(n)}
    number = sum(param.numel() for n, param in stock.named_parameters() if n not in buffers)
    assert type(run.planned_model.build(torch.float32)) is kind
    assert run.planned_model.count_parameters().params == number
    (size,) = list_rank_bytes(run)
    assert size.parameters == 4 * number
    # A class freezes biases of its routers, and an indexer gets no gradient.
    idle = {
        p for layer in find_family(stock).find_indexers(stock) for p in layer.indexer.parameters()
    }
    params = run.planned_model.build(torch.float32).named_parameters()
    idle |= {param for n, param in params if not param.requires_grad and n not in buffers}
    learnt = number - sum(param.numel() for param in idle)
    assert size.gradients == 4 * learnt
    assert count_resident_bytes(run, size)["optimizer state"] == 8 * learnt  # two moments in fp32


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_is_not_trained_says_why(family: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_values(family)))
    command = ["plan", "--config", str(file), "--gpus", "2", "--ep", "2"]
    assert main(command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(re.escape(REFUSED[family]), line)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("granitemoe", {"model_type": []}, r"config.json model_type \(\[\]\) must be a string"),
    ("granitemoe", {"model_type": "x" * 10**5}, r"config.json model_type \('xxx.*\) must be of a"),
    ("granitemoe", {"return_dict": False}, "must have values with which a step runs, not Attri"),
    ("longcat_flash", {"qk_head_dim": 576}, "must have values with which a step runs, not Runtime"),
    ("minimax", {"num_hidden_layers": 10**20}, r"num_hidden_layers.* must be at most 100000"),
    ("granitemoe", {"num_hidden_layers": 10**5}, "it has more than 1000 modules"),
    ("qwen3_next", {"num_hidden_layers": 10**20}, r"num_hidden_layers.* must be "),
    ("afmoe", {"moe_intermediate_size": 10**20}, "config.json must be one that transformers reads"),
    # Python's errors name no field, so the line of transformers is shown.
    ("dots1", {"n_routed_experts": None}, r"in `.*num_experts.*`"),
    ("gemma4", {"vocab_size_per_layer_input": 10**6, "hidden_size": -1}, "transformers reads: "),
]


def test_an_output_without_a_loss_is_refused() -> None:
    with pytest.raises(ValueError, match=r"output \(tuple\) must be the loss, or have it as .loss"):
        get_loss((torch.ones(()),))


@pytest.mark.parametrize(
    ("family", "changes", "error"), WRONG, ids=[f"{f}-{next(iter(c))}" for f, c, _ in WRONG]
)
def test_a_wrong_config_is_one_line(family, changes, error, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("moecore.io.hf.stock.MAX_MODULES", 1000)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_values(family) | changes))
    command = ["plan", "--config", str(file), "--gpus", "2", "--ep", "2", "--seq-len", "64"]
    assert main(command) == 1
    # Beside it there are only warnings of transformers.
    (line,) = (x for x in capsys.readouterr().err.splitlines() if not x.startswith("[trans"))
    assert re.search(error, line) and len(line) < 600


@pytest.mark.parametrize("family", beside(DEEP, ["qwen3_moe", "deepseek_v3", "llama4"]))
def test_few_layers_stand_for_all(family: str) -> None:
    model = default(family, **DEEP[family])
    seq_len = 32 if family == "jamba" else 256  # whose scan is one of Python
    run = TrainingRun(model=model, num_gpus=4, seq_len=seq_len, parallel=ParallelConfig(ep=2))
    assert SampledRun.from_run(run).run.planned_model.num_layers < run.planned_model.num_layers
    assert max(plan_peak_memory(run)) == pytest.approx(dry_run(run).peak, rel=0.003)
    params = sum(param.numel() for param in run.planned_model.build(torch.float32).parameters())
    assert params == run.planned_model.count_parameters().params


def test_a_scan_that_loops_over_tokens_is_refused() -> None:
    """A plan of stock jamba at 4,096 tokens had no answer after minutes."""
    run = TrainingRun(
        model=model_of("jamba"), num_gpus=2, seq_len=65, parallel=ParallelConfig(ep=2)
    )
    with pytest.raises(ValueError, match=r"^seq_len \(65\) must be at most 64 for .*JambaMamba"):
        plan_peak_memory(run)


SMALL = ("gemma4", "glm5_next", "nemotron_h", "qwen4_exp", "zaya")


@pytest.mark.parametrize("family", beside(taken(), [f for f in taken() if f not in SMALL]))
def test_a_family_is_dry_run(family: str) -> None:
    """Two layers: the pieces are the whole step."""
    run = TrainingRun(model=model_of(family), num_gpus=2, seq_len=64, parallel=ParallelConfig(ep=2))
    assert plan_peak_memory(run) == (dry_run(run).peak,)


@pytest.mark.parametrize(("family", "gate"), [("aria", 1), ("nemotron_h", 0)])
def test_products_of_experts_that_torch_multiplies(family: str, gate: int) -> None:
    """Forward, and in backward twice as much."""
    run = TrainingRun(model=model_of(family), num_gpus=1, seq_len=64)
    works = dry_run(run).forward_backward
    moe, layers = run.planned_model.moe, run.planned_model.num_moe_runs
    products = (2 + gate) * moe.expert_dim * moe.hidden_dim
    forward = layers * 2 * 64 * SIZES["moe_topk"] * products
    assert sum(w.flops for w in works if w.kind == "grouped product") == 3 * forward


def test_stages_of_a_class_of_transformers() -> None:
    model = default("qwen3_moe", num_hidden_layers=6)
    stages: Any = dict(parallel=ParallelConfig(pp=2, ep=4), pipeline=PipelineConfig())
    run = TrainingRun(model=model, num_gpus=8, **stages, num_micro_batches=4, seq_len=256)
    first, last = plan_peak_memory(run)
    # The first stage is planned with a root unit that has the head too.
    head = 2 * run.planned_model.vocab_size * run.planned_model.dim
    assert 0 <= first - dry_run(run).peak <= head
    assert last == pytest.approx(dry_run(run, 4).peak, rel=0.002)


def test_a_model_whose_layers_are_not_alike_is_run_whole() -> None:
    run = TrainingRun(model=model_of("gemma4"), num_gpus=1, seq_len=64)
    assert run.planned_model.layers == tuple(range(run.planned_model.num_layers))


@pytest.mark.parametrize("family", KEPT)
def test_activations_are_those_that_a_forward_keeps(family: str) -> None:
    """A forward on a CPU, to the byte; and the plan has what such a count has of a GPU."""
    model, positions = tiny_model(family), {"position_ids": torch.arange(48)[None]}
    if find_packing_problem(model) is None:
        use_causal_attention(model)
        positions = {}
    swap_blocks(model, {})
    tokens_BT = torch.randint(3, 60, (2, 48), generator=torch.Generator().manual_seed(0))

    def forward(copy: Any) -> Any:
        return copy(input_ids=tokens_BT, use_cache=False, **positions)

    how: dict[str, Any] = dict(options=MemoryOptions(), device_type="cpu")
    kept = count_saved_bytes(model, find_blocks(model), forward, **how)
    saved = Saved(model)
    with use_packer(saved):
        out = forward(model)
    assert sum(one.num_bytes for one in (*kept.blocks, kept.outside)) == saved.num_bytes
    del out
    check_kept_on_gpus(family)


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v4"])
def test_activations_of_forwards_that_are_replaced(family: str) -> None:
    """Sparse attention; hyper-connections, beside parameters in fp32 and scores of a choice."""
    skip_unless_in_bf16(family)
    check_kept_on_gpus(family)


def check_kept_on_gpus(family: str) -> None:
    """Compare what a forward keeps with what the plan has when the head begins."""
    wide = TransformersModel.of(config_values(family, WIDE))
    run = TrainingRun(model=wide, num_gpus=1, seq_len=1024, batch_size=2)
    (head,) = (start for start in dry_run(run).starts if start[:2] == ("F", "head"))
    kinds = {kind: n for kind, n in head.kinds.items() if kind.startswith("activations")}
    del kinds["activations: outside"]
    blocks = sum(block.num_bytes for block in count_saved_bytes_by_block(run).blocks)
    assert sum(kinds.values()) == pytest.approx(blocks, rel=0.01)


@pytest.mark.parametrize("family", beside(BOTH, ["qwen2_moe", "mixtral", "olmoe"]))
def test_flops_are_those_of_the_native_decoder(family: str) -> None:
    values = config_values(family, WIDE)
    if family == "qwen2_moe":  # whose windows the native decoder does not read
        values |= {"use_sliding_window": False, "layer_types": None}
    config = decoder_config_from_hf(values)
    run = TrainingRun(model=TransformersModel.of(values), num_gpus=1, seq_len=2048)
    flops = sum(work.flops for work in dry_run(run).forward_backward)
    assert flops == pytest.approx(2048 * flops_per_token(config, 2048), rel=0.05)
    native = dry_run(replace(run, model=replace(config, max_seq_len=2048)))
    if IS_BEFORE_5_23:  # there angles are a matrix product of positions and frequencies
        head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
        flops -= 2048 * values.get("qk_rope_head_dim", head_dim)
    assert flops == sum(work.flops for work in native.forward_backward)


def test_what_a_class_refuses_is_refused_before_it_is_planned() -> None:
    model = default("qwen3_moe", num_hidden_layers=8)  # 32 heads of queries, 4 of keys
    request = SearchRequest(model=model, num_gpus=64, seq_len=65536)
    assert find_refusal(request, Layout(ep=8, batch_size=1)) is None
    for folding, reason in ((Layout(tp=64), "tp"), (Layout(pp=16), "num_layers")):
        assert reason in find_refusal(request, folding).reason
    whole = SearchRequest(model=model_of("jamba"), num_gpus=2, seq_len=64)
    assert "JambaMambaMixer" in find_refusal(whole, Layout(cp=2)).reason
    towers = SearchRequest(model=model_of("deepseek_ocr2"), num_gpus=2, seq_len=64)
    assert "beside its layers" in find_refusal(towers, Layout(pp=2)).reason


def test_without_transformers_the_command_names_it(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(planned_transformers, "find_spec", lambda _: None)
    (tmp_path / "config.json").write_text(json.dumps(config_values("beam")))
    assert main(["plan", "--config", str(tmp_path), "--gpus", "1", "--ep", "1"]) == 1
    assert "must have transformers installed" in capsys.readouterr().err


def test_a_call_is_of_the_class(tmp_path: Path) -> None:
    """The Python that a plan prints runs in a fake world up to its first step."""
    (tmp_path / "config.json").write_text(json.dumps(config_values("qwen3_moe")))
    run = TrainingRun(model=TransformersModel.of(tmp_path), num_gpus=2, seq_len=64)
    found: dict[str, Any] = {}
    with fake_world(1):
        exec(format_python_calls(replace(run, num_gpus=1)), found)
    assert type(found["model"]) is model_class("qwen3_moe")


def test_adapters_and_recompute_are_planned() -> None:
    """Frozen weights have bf16, adapters fp32 and two moments; recompute saves layers' inputs."""
    peft = pytest.importorskip("peft", reason="stored bytes are compared with its model")
    plain = model_of("qwen3_moe")
    model = replace(plain, lora=LoRAOptions(rank=4))
    run = TrainingRun(model=model, num_gpus=1, seq_len=64)
    stored = count_resident_bytes(run, list_rank_bytes(run)[0])
    module = tiny_model("qwen3_moe").bfloat16()
    weights = sum(p.numel() for p in module.parameters())
    lora = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    trained = [p for p in peft.get_peft_model(module, lora).parameters() if p.requires_grad]
    adapters = sum(p.numel() for p in trained)
    assert {p.dtype for p in trained} == {torch.float32}
    parameters = sum(n for kind, n in stored.items() if kind.startswith("parameters"))
    assert parameters == 2 * weights + 4 * adapters and stored["optimizer state"] == 8 * adapters
    models = (replace(model, recompute=is_on) for is_on in (False, True))
    plans = (plan_memory(replace(run, model=of, seq_len=512)) for of in models)
    kept, recomputed = (plan.largest for plan in plans)
    assert recomputed.num_bytes < kept.num_bytes and recomputed.activations < 0.6 * kept.activations


def test_adapters_are_flags_of_the_command(tmp_path: Path, capsys: Any) -> None:
    sizes = dict(hidden_size=128, moe_intermediate_size=64)
    config = json.loads(default("qwen3_moe", num_hidden_layers=2, vocab_size=128, **sizes).values)
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", "--config", str(tmp_path), "--gpus", "1", "--lora-rank", "2"]
    assert main([*words, "--ep", "1", "--precision", "nf4", "--offload-frozen"]) == 0
    assert "host: frozen experts" in capsys.readouterr().out
    assert main([*words, "--ep", "1", "--frozen-dense"]) != 0
    assert "--frozen-dense must go with a 4-bit format" in capsys.readouterr().err
    stored = [*words, "--ep", "1", "--precision", "nf4", "--json"]
    peaks = []
    for flags in ([], ["--frozen-dense"]):
        assert main([*stored, *flags]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["ranks"][0]["peak"])
    assert peaks[1] < peaks[0]
    assert main(words) != 0
    assert "must go with degrees: add --ep 1" in capsys.readouterr().err
    words = ["plan", "--preset", "tiny-qwen3", "--gpus", "1", "--ep", "1", "--checkpointing"]
    assert main(words) != 0
    assert "--preset (tiny-qwen3) must not go with --lora-rank" in capsys.readouterr().err


def test_a_frozen_base_in_four_bits_is_planned() -> None:
    sizes = dict(hidden_size=128, moe_intermediate_size=64, num_experts=16, num_experts_per_tok=2)
    base = default("qwen3_moe", num_hidden_layers=4, vocab_size=128, head_dim=16, **sizes)
    run = TrainingRun(model=replace(base, lora=LoRAOptions(rank=4)), num_gpus=1, seq_len=64)
    stored = replace(run, precision=Precision.of("nf4"))
    experts, ranks = 4 * 16 * 3 * 64 * 128, [plan_memory(r).largest for r in (run, stored)]
    kinds = ({k: n for k, n in rank.device.items() if "parameters" in k} for rank in ranks)
    plain, small = (sum(kind.values()) for kind in kinds)
    assert plain - small == 2 * experts - experts * 4.5 / 8
    # At the peak the matrices of one layer are dequantised.
    saved = ranks[0].num_bytes - ranks[1].num_bytes
    layer = experts // 4
    assert plain - small - 2 * layer <= saved <= plain - small
    # In host memory, with two layers on the device at the peak.
    offloaded = replace(stored, memory=MemoryOptions(offload_frozen=True))
    rank, num_bytes = plan_memory(offloaded).largest, experts * 4.5 / 8
    assert rank.host == {"frozen experts": num_bytes}
    assert ranks[1].num_bytes - rank.num_bytes == num_bytes / 2
    table = CostTable.of("h100-80")
    assert plan_time(offloaded, table).seconds > plan_time(stored, table).seconds
    dense = plan_memory(replace(run, precision=Precision(frozen="nf4", frozen_dense=True))).largest
    smaller = sum(n for kind, n in dense.device.items() if "parameters" in kind)
    config = json.loads(base.values)
    heads = config["num_attention_heads"] + config["num_key_value_heads"]
    assert small - smaller == (2 - 4.5 / 8) * 4 * 2 * heads * 16 * 128  # q, k, v and o
