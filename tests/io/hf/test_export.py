import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from moecore import BalanceConfig
from moecore.io.hf import export as hf_export
from moecore.io.hf.config import decoder_config_from_hf
from moecore.io.hf.export import export_hf
from moecore.io.hf.load import load_hf
from moecore.io.hf.verify import verify_hf
from moecore.models import Decoder, preset
from tests.families.transformers.hf_models import ARCHITECTURES, random_model, transformers
from tests.io.hf.states import hf_state, native_state
from tests.io.hf.test_config import TINY_JSON
from tests.io.hf.test_load import assert_state
from tests.models.hf_pairs import make_pair

IDS = torch.arange(24).view(2, 12)
CASES = [(n, la) for n in ARCHITECTURES for la in ("per_expert", "fused")]
CASES.remove(("gpt-oss", "per_expert"))


def read_all(path: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        state |= load_file(file)
    return state


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_transformers_loads_it_and_gives_equal_logits(name, layout, tmp_path):
    model, out = random_model(name).eval(), tmp_path / "out"
    report = export_hf(model, out, max_shard_bytes=60_000, layout=layout)
    # config.json does not say which attention: the model's own, for equal bits
    again = type(model).from_pretrained(out, attn_implementation="eager").eval()
    assert_state(again, model.state_dict())
    for parameter in again.parameters():  # mapped files are less aligned: other kernels
        parameter.data = parameter.data.clone()
    assert torch.equal(again(IDS).logits, model(IDS).logits) and verify_hf(out) == []
    model.save_pretrained(tmp_path / "theirs")
    if layout == "per_expert":  # the published names
        ours, theirs = read_all(out), read_all(tmp_path / "theirs")
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    largest = max(t.nbytes for t in read_all(out).values())
    assert report.peak_bytes == largest  # one tensor at a time
    assert report.total_bytes == sum(t.nbytes for t in read_all(out).values())


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3", "mixtral", "olmoe", "deepseek", "deepseek-v2", "glm-4.5", "llama, biases"),
        *("gpt-oss", "qwen2-moe", "qwen3-next", "nemotron-h", "deepseek-v3.2"),
    ],
)
def test_a_native_decoder_becomes_a_transformers_model(name, tmp_path):
    model, config = make_pair(name)
    decoder = Decoder(config).eval()
    export_hf(decoder, tmp_path / "out", config=model.config.to_dict())
    again = type(model).from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        want, found = decoder(IDS), again(IDS).logits
    assert (found - want).abs().max() <= 1e-5 * want.abs().max()
    assert_state(decoder, native_state(again.state_dict(), config))
    loaded = Decoder(config)
    loaded.init_weights(seed=5)
    load_hf(tmp_path / "out", loaded)
    assert_state(loaded, decoder.state_dict())


def test_shards_index_and_config(tmp_path):
    model = random_model("qwen3-moe")
    model.config.quantization_config = {"quant_method": "fp8"}
    report = export_hf(model, tmp_path / "out", max_shard_bytes=30_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    n = report.shards
    assert n > 3
    assert [f.name for f in files] == [
        f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)
    ]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.total_bytes
    for file in files:
        with safe_open(file, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            names = shard.keys()
        assert all(index["weight_map"][name] == file.name for name in names)
        assert sum(t.nbytes for t in load_file(file).values()) <= 30_000
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("qwen3_moe", "float32")
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert "quantization_config" not in config
    one = export_hf(model, tmp_path / "one")
    assert one.shards == 1
    names = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert names == ["config.json", "model.safetensors"]
    each = export_hf(model, tmp_path / "each", max_shard_bytes=1)  # too large ones stand alone
    assert each.shards == each.tensors == report.tensors


def test_dtype_is_changed_but_for_the_selection_bias(tmp_path):
    model = random_model("deepseek-v3")
    export_hf(model, tmp_path / "out", dtype=torch.bfloat16, layout="fused")
    for name, value in read_all(tmp_path / "out").items():
        kept = any(part in name for part in model._keep_in_fp32_modules_strict)
        want = model.state_dict()[name]
        assert torch.equal(value, want if kept else want.bfloat16()), name
        assert value.dtype == (torch.float32 if kept else torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_multi_token_prediction_and_its_copies_are_written(tmp_path):
    config = preset("tiny-deepseek-v3")
    assert decoder_config_from_hf(TINY_JSON) == replace(config, ce_chunk_tokens=2048)
    decoder = Decoder(config)
    export_hf(decoder, tmp_path / "out", config=TINY_JSON)
    found = read_all(tmp_path / "out")
    want = hf_state(decoder.state_dict(), config, layout="per_expert")
    assert found.keys() == want.keys() and all(torch.equal(found[n], want[n]) for n in want)
    assert "model.layers.3.shared_head.head.weight" in found
    assert decoder_config_from_hf(tmp_path / "out").num_mtp_layers == 1
    assert verify_hf(tmp_path / "out") == []
    # Without the modules, in the model and so in the files, config.json says so.
    bare = Decoder(replace(config, num_mtp_layers=0, mtp_loss_coef=0.0))
    export_hf(bare, tmp_path / "bare", config=TINY_JSON)
    written = json.loads((tmp_path / "bare" / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 0
    assert not any("layers.3." in name for name in read_all(tmp_path / "bare"))


def decoder() -> Decoder:
    return Decoder(preset("tiny-deepseek-v3"))


def test_what_only_training_reads_may_differ(tmp_path):
    config = preset("tiny-deepseek-v3")
    moe = replace(config.moe, balance=BalanceConfig(z_loss_coef=0.1), router_jitter=0.01)
    trained = Decoder(replace(config, moe=moe, max_seq_len=64, mtp_loss_coef=0.1))
    export_hf(trained, tmp_path / "out", config=TINY_JSON)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(config=None), r"config \(None\) must be given for Decoder: pass the config.json"),
        (
            dict(config=TINY_JSON | dict(num_experts_per_tok=3)),
            r"config.json moe.top_k \(3\) must be that of the model \(2\)",
        ),
        (
            dict(config=TINY_JSON | dict(first_k_dense_replace=3)),
            r"config.json moe \(None\) must be that of the model \(given\)",
        ),
        (dict(dtype=torch.float8_e4m3fn), r"dtype \(torch.float8_e4m3fn\) must be a float of 16"),
        (dict(max_shard_bytes=0), r"max_shard_bytes \(0\) must be a whole number >= 1"),
        (dict(layout="mixtral"), r"layout \('mixtral'\) must be one of 'per_expert', 'fused'"),
    ],
)
def test_wrong_arguments(change, message, tmp_path):
    with pytest.raises(ValueError, match=message) as info:
        export_hf(decoder(), tmp_path / "out", **dict(config=TINY_JSON) | change)
    assert "\n" not in str(info.value) and list(tmp_path.iterdir()) == []


def test_a_config_of_another_transformers_model(tmp_path):
    model = random_model("gpt-oss")
    values = model.config.to_dict()
    wrong = values | dict(rope_parameters={"rope_theta": 5.0})
    with pytest.raises(ValueError, match=r"config.json rope_theta \(5.0\) must"):
        export_hf(model, tmp_path / "out", layout="fused", config=wrong)
    assert list(tmp_path.iterdir()) == []
    options = dict(layout="fused", config=values | dict(use_cache=False, router_aux_loss_coef=0.5))
    export_hf(model, tmp_path / "out", **options)


@pytest.mark.parametrize("given", [False, True])
def test_the_class_that_can_load_it_is_named(given, tmp_path):
    """Not the one that the config names, which would begin with random numbers."""
    causal = random_model("qwen3-moe")
    model = transformers.Qwen3MoeForSequenceClassification(causal.config)
    config = model.config.to_dict() | dict(architectures=["Qwen3MoeForCausalLM"])
    export_hf(model, tmp_path / "scored", config=config if given else None)
    written = json.loads((tmp_path / "scored" / "config.json").read_text())
    assert written["architectures"] == ["Qwen3MoeForSequenceClassification"]
    causal.__class__ = type("Mine", (type(causal),), {})  # is loaded by the class that it extends
    export_hf(causal, tmp_path / "mine")
    written = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert written["architectures"] == ["Qwen3MoeForCausalLM"]


def test_models_that_cannot_be_written(tmp_path):
    meta = Decoder(preset("tiny-deepseek-v3"), device="meta")
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight \(meta\) must have storage"):
        export_hf(meta, tmp_path / "out", config=TINY_JSON)
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match=r"there\) must not exist yet: choose another"):
        export_hf(decoder(), tmp_path / "there", config=TINY_JSON)
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    written = []

    class Full(hf_export.ShardWriter):
        def add(self, tensor: Tensor) -> None:
            written.append(tensor.nbytes)
            if len(written) == 40:
                raise OSError(28, "No space left on device")
            super().add(tensor)

    monkeypatch.setattr(hf_export, "ShardWriter", Full)
    with pytest.raises(OSError, match="No space left"):
        export_hf(decoder(), tmp_path / "out", config=TINY_JSON, max_shard_bytes=50_000)
    assert len(written) == 40  # nothing is written after it
    assert list(tmp_path.iterdir()) == []


def test_progress_reaches_the_size_of_the_files(tmp_path):
    seen: list[tuple[int, int]] = []
    report = export_hf(
        decoder(), tmp_path / "out", config=TINY_JSON, progress=lambda *p: seen.append(p)
    )
    sizes = sum(f.stat().st_size for f in (tmp_path / "out").glob("*.safetensors"))
    assert seen[-1] == (sizes, sizes) and report.written_bytes == sizes
