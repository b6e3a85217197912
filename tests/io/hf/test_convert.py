import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from moecore.families.family import swap_blocks
from moecore.io import load, save
from moecore.io.checkpoint.directory import latest
from moecore.io.checkpoint.manifest import read_manifest
from moecore.io.hf.convert import hf_to_native, native_to_hf
from moecore.io.hf.export import export_hf
from moecore.io.interchange.convert import native_to_dcp
from moecore.models import Decoder, preset
from tests.families.transformers.family_models import tiny_model
from tests.families.transformers.hf_models import random_model
from tests.io.hf.dirs import assert_same_directory, write_directory
from tests.io.hf.states import native_state
from tests.io.hf.test_config import TINY_JSON
from tests.io.hf.test_load import assert_state, deepseek_files
from tests.models.hf_pairs import make_pair

CONFIG = replace(preset("tiny-deepseek-v3"), ce_chunk_tokens=2048)


def changed_files(path: Path, change: Callable[[dict[str, Tensor]], object]) -> dict[str, Tensor]:
    """Export a decoder, change its tensors, and write them again; return them."""
    export_hf(Decoder(CONFIG), path, config=TINY_JSON)
    state = load_file(path / "model.safetensors")
    change(state)
    write_directory(path, state, TINY_JSON)
    return state


@pytest.mark.parametrize(("layout", "scheme"), [("per_expert", ""), ("fused", "file://")])
def test_native_to_hf_writes_what_export_writes(layout, scheme, tmp_path):
    model = Decoder(CONFIG)
    path = save(f"{scheme}{tmp_path}/run", 3, model, None)
    options = dict(config=TINY_JSON, layout=layout, max_shard_bytes=60_000)
    export_hf(model, tmp_path / "exported", **options)
    native_to_hf(path, tmp_path / "converted", **options)
    assert_same_directory(tmp_path / "exported", tmp_path / "converted")
    root = f"{scheme}{tmp_path}/back"
    back = hf_to_native(tmp_path / "converted", root, step=7, max_file_bytes=100_000)
    assert str(back) == f"{root}/step-000007" == str(latest(root))
    assert len(read_manifest(back).files) > 3
    loaded = Decoder(CONFIG)
    loaded.init_weights(seed=9)
    load(back, loaded)
    assert_state(loaded, model.state_dict())


@pytest.mark.parametrize("name", ["qwen2-moe", "mixtral", "gpt-oss"])
def test_checkpoints_of_transformers_models_too(name, tmp_path):
    """They keep gate and up apart; a plain model's experts are not known to, a MoELayer's are."""
    model = random_model(name, tie_word_embeddings=name == "mixtral")
    want = dict(model.state_dict())
    swap_blocks(model, {})
    path = save(tmp_path / "run", 0, model, None)
    layout = "fused" if name == "gpt-oss" else "per_expert"
    values = model.config.to_dict()
    native_to_hf(path, tmp_path / "out", config=values, layout=layout)
    again = type(model).from_pretrained(tmp_path / "out")
    assert_state(again, want)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["ernie4_5_moe", "flint", "hunyuan_v1_moe", "zaya"])
def test_what_stock_keeps_in_fp32_is_not_rounded(family, tmp_path):
    """Gates, sinks, decay rates and biases of a class; in DCP directories too."""
    pytest.importorskip(f"transformers.models.{family}")
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "stock")
    want = type(model).from_pretrained(tmp_path / "stock", dtype=torch.bfloat16).state_dict()
    assert {tensor.dtype for tensor in want.values()} == {torch.float32, torch.bfloat16}
    swap_blocks(model, {})
    path = save(tmp_path / "run", 0, model, None)
    options = dict(config=tmp_path / "stock", dtype=torch.bfloat16)
    native_to_hf(path, tmp_path / "out", **options)
    found = type(model).from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    native_to_dcp(path, tmp_path / "dcp", names="dcp-transformers", **options)
    kept = dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    stored = {n: torch.empty_like(t) for n, t in want.items() if n in kept}  # no tied head
    dcp.load(stored, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    for name, tensor in want.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    for name, tensor in stored.items():
        dtype = kept[name].properties.dtype
        assert dtype == want[name].dtype and torch.equal(tensor, want[name]), name


@pytest.mark.parametrize("beside", [False, True])
def test_a_module_around_the_model_is_left_out(beside, tmp_path):
    """Such as the docs' WithLoss, whose checkpoints say hf.model.layers; but not half of one."""
    model = random_model("qwen3-moe")
    values = model.config.to_dict()
    parts = {"hf": model, "value": nn.Linear(32, 1)} if beside else {"hf": model}
    path = save(tmp_path / "run", 0, nn.ModuleDict(parts), None)
    if beside:
        with pytest.raises(ValueError, match=r"model.embed_tokens.weight is missing; .*: pass the"):
            native_to_hf(path, tmp_path / "out", config=values)
        assert not (tmp_path / "out").exists()
        return
    native_to_hf(path, tmp_path / "out", config=values)
    export_hf(model, tmp_path / "exported")
    assert_same_directory(tmp_path / "exported", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "qwen3-moe",
            dict(num_hidden_layers=1),
            r"layers.1.* is not in the model that config.json",
        ),
        (
            "qwen3-moe",
            dict(num_hidden_layers=3),
            r"model.layers.2.input_layernorm.weight is missing",
        ),
        (
            "qwen3-moe",
            dict(hidden_size=64),
            r"model.embed_tokens.weight \(61, 32\) must be \(61, 64\)",
        ),
        (
            "qwen3-moe",
            dict(tie_word_embeddings=True),
            r"lm_head.weight must equal model.embed_tokens",
        ),
        ("qwen3-moe", dict(model_type="olmoe"), r"q_norm.weight \(8,\) must be \(32,\)"),
        ("gpt-oss", dict(num_hidden_layers=1), r"num_hidden_layers. \(1\) must be"),
    ],
)
def test_a_config_of_another_transformers_model(name, change, message, tmp_path):
    """Tensors tell it, where the checkpoint keeps no config of the model."""
    model = random_model(name)
    path = save(tmp_path / "run", 0, model, None, config={})
    layout = "fused" if name == "gpt-oss" else "per_expert"
    with pytest.raises(ValueError, match=message):
        native_to_hf(path, tmp_path / "out", config=model.config.to_dict() | change, layout=layout)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_a_stored_config_tells_what_shapes_do_not(name, tmp_path):
    model = random_model(name)
    values = model.config.to_dict()
    path = save(tmp_path / "run", 0, model, None)  # keeps the model's own
    message = r"top_k|num_experts_per_tok \(3\) must be that of the mod"
    with pytest.raises(ValueError, match=message):
        options = dict(config=values | dict(num_experts_per_tok=3), layout="fused")
        native_to_hf(path, tmp_path / "out", **options)
    native_to_hf(path, tmp_path / "out", config=values | dict(use_cache=False), layout="fused")


def test_the_head_of_a_model_without_one_is_missed(tmp_path):
    model = random_model("gpt-oss", attention_dropout=0.1)  # which the native decoder lacks
    path = save(tmp_path / "run", 0, model.model, None)
    with pytest.raises(ValueError, match=r"describes: lm_head.weight is missing: pass"):
        native_to_hf(path, tmp_path / "out", config=model.config.to_dict(), layout="fused")


def test_a_head_that_equals_the_embedding_is_tied(tmp_path):
    """As `to_empty` under FSDP2 and `load_hf` leave it until the first forward."""
    model = random_model("qwen3-moe")
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.config.tie_word_embeddings = True
    path = save(tmp_path / "run", 0, model, None)
    native_to_hf(path, tmp_path / "out", config=model.config.to_dict())
    again = type(model).from_pretrained(tmp_path / "out")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    "name", ["qwen3", "mixtral", "olmoe", "deepseek", "gpt-oss", "llama, biases"]
)
def test_hf_to_native(name, tmp_path):
    model, config = make_pair(name)
    model.save_pretrained(tmp_path / "hf")
    path = hf_to_native(tmp_path / "hf", tmp_path / "run")
    assert read_manifest(path).facts.config["dim"] == 64
    decoder = Decoder(config).eval()
    load(path, decoder)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        want, found = model.eval()(ids).logits, decoder(ids)
    assert (found - want).abs().max() <= 1e-5 * want.abs().max()
    native_to_hf(path, tmp_path / "back", config=model.config.to_dict())
    again = type(model).from_pretrained(tmp_path / "back")
    assert_state(again, model.state_dict())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_quantised_weights_are_dequantised(dtype, tmp_path):
    truth = deepseek_files(tmp_path / "hf", torch.bfloat16)
    write_config(tmp_path / "hf")
    path = hf_to_native(tmp_path / "hf", tmp_path / "run", dtype=dtype)
    decoder = Decoder(CONFIG, dtype=dtype or torch.bfloat16)
    load(path, decoder)
    assert_state(decoder, truth)


def write_config(path: Path) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [24, 24]}
    text = json.dumps(TINY_JSON | {"quantization_config": quantization})
    (path / "config.json").write_text(text)


def test_sources_that_do_not_fit(tmp_path):
    model = Decoder(CONFIG)
    path = save(tmp_path / "run", 3, model, None)
    with pytest.raises(ValueError, match=r"must hold the decoder that config.json describes: mod"):
        native_to_hf(path, tmp_path / "out", config=TINY_JSON | dict(num_hidden_layers=4))
    with pytest.raises(ValueError, match=r"experts.w1 \(8, 2, 32, 64\) must be \(6, 2, 32, 64\)"):
        native_to_hf(path, tmp_path / "out", config=TINY_JSON | dict(n_routed_experts=6, n_group=3))
    message = r"moe.top_k \(3\) must be that of the model \(2\): pass the config of this model"
    with pytest.raises(ValueError, match=message):  # the checkpoint keeps the decoder's config
        native_to_hf(path, tmp_path / "out", config=TINY_JSON | dict(num_experts_per_tok=3))
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"must be as it was saved, but has another sha256"):
        native_to_hf(path, tmp_path / "out", config=TINY_JSON)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_one_rank_of_many_does_not_wait_for_the_others(tmp_path):
    path = save(tmp_path / "run", 3, Decoder(CONFIG), None)
    export_hf(Decoder(CONFIG), tmp_path / "hf", config=TINY_JSON)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        message = r"world size \(2\) must be 1 to convert files: call exp"
        with pytest.raises(ValueError, match=message):
            native_to_hf(path, tmp_path / "out", config=TINY_JSON)
        with pytest.raises(ValueError, match=r"world size \(2\) must be 1 to convert files"):
            hf_to_native(tmp_path / "hf", tmp_path / "new")
    finally:
        dist.destroy_process_group()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "run"]


@pytest.mark.parametrize("there", ["a checkpoint", "a draft"])
def test_a_run_that_has_begun_is_left_alone(there, tmp_path):
    export_hf(Decoder(CONFIG), tmp_path / "hf", config=TINY_JSON)
    run = tmp_path / "run"
    if there == "a draft":
        (run / ".step-000005.tmp-0123").mkdir(parents=True)
    else:
        save(run, 5, Decoder(CONFIG), None)
    before = sorted(run.rglob("*"))
    message = r"run\) must be no run yet, but holds .*step|latest: choo"
    with pytest.raises(ValueError, match=message):
        hf_to_native(tmp_path / "hf", run)
    assert sorted(run.rglob("*")) == before
    with pytest.raises(ValueError, match=r"step \(-1\) must be a whole number >= 0"):
        hf_to_native(tmp_path / "hf", tmp_path / "new", step=-1)
    assert not (tmp_path / "new").exists()


EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({EXPERT: torch.bfloat16}, "experts.w1 has parts in torch.bfloat16 and torch.float32: dty"),
        ({"model.norm.weight": torch.int32}, r"norm.weight \(torch.int32\) must be a float tensor"),
        ({EXPERT: torch.int64}, rf"{EXPERT} \(torch.int64\) must be a float tensor"),
    ],
)
def test_nothing_is_cast_unasked(change, message, tmp_path):
    changed_files(tmp_path / "hf", lambda s: s.update({n: s[n].to(d) for n, d in change.items()}))
    with pytest.raises(ValueError, match=message):
        hf_to_native(tmp_path / "hf", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    if torch.bfloat16 in change.values():
        hf_to_native(tmp_path / "hf", tmp_path / "run", dtype=torch.float32)
    else:
        with pytest.raises(ValueError, match="must be a float tensor"):
            hf_to_native(tmp_path / "hf", tmp_path / "run", dtype=torch.float32)


@pytest.mark.parametrize("asked", [None, torch.bfloat16, torch.float64])
def test_a_selection_bias_in_fp64_is_not_rounded(asked, tmp_path):
    """It is kept in fp32 whatever dtype is asked for, so asking is no leave."""
    changed_files(
        tmp_path / "hf", lambda s: s.update({BIAS: torch.full_like(s[BIAS], 0.1).double()})
    )
    message = rf"{BIAS} \(torch.float64\) must fit into fp32, .*: store it as fp32"
    with pytest.raises(ValueError, match=message):
        hf_to_native(tmp_path / "hf", tmp_path / "run", dtype=asked)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_narrow_selection_bias_is_widened_exactly(narrow, tmp_path):
    bias = torch.full((CONFIG.moe.num_experts,), 0.1, dtype=narrow)
    state = changed_files(tmp_path / "hf", lambda s: s.update({BIAS: bias}))
    path = hf_to_native(tmp_path / "hf", tmp_path / "run")
    decoder = Decoder(CONFIG)
    load(path, decoder)
    assert_state(decoder, {k: v.float() for k, v in native_state(state, CONFIG).items()})
    assert torch.equal(decoder.model.layers[1].mlp.router.expert_bias, state[BIAS].float())


def test_incomplete_directories_change_nothing(tmp_path):
    changed_files(tmp_path / "hf", lambda s: s.pop(EXPERT))
    with pytest.raises(ValueError, match=r"config.json says: model.layers.1.mlp.experts.5.up_pr"):
        hf_to_native(tmp_path / "hf", tmp_path / "run")
    changed_files(tmp_path / "odd", lambda s: s["model.layers.3.embed_tokens.weight"].add_(1))
    with pytest.raises(ValueError, match=r"3.embed_tokens.weight must equal model.embed_tokens"):
        hf_to_native(tmp_path / "odd", tmp_path / "run")
    write_directory(tmp_path / "qwen", {"a": torch.ones(1)}, {"model_type": "gpt2"})
    with pytest.raises(NotImplementedError, match=r"model_type \('gpt2'\) must be one of"):
        hf_to_native(tmp_path / "qwen", tmp_path / "run")
    assert not (tmp_path / "run").exists()
