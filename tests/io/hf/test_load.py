import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import (
    BalanceConfig,
    FSDPOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.io.hf import load as hf_load
from moecore.io.hf.config import decoder_config_from_hf
from moecore.io.hf.export import export_hf
from moecore.io.hf.files import read_json
from moecore.io.hf.load import find_config_problems, load_hf
from moecore.io.hf.names import infer_hf_layout
from moecore.models import Decoder, DecoderConfig, preset
from tests.families.transformers.hf_models import ARCHITECTURES, random_model, transformers
from tests.io.hf.dirs import fp8_state, mxfp4_state, write_directory
from tests.io.hf.states import hf_state, native_state
from tests.io.hf.test_config import TINY_JSON
from tests.models.hf_pairs import make_pair

IDS = torch.arange(24).view(2, 12)


def empty_like(model: nn.Module) -> nn.Module:
    """The same model as loading from scratch has it: built on meta, storage full of NaN."""
    with torch.device("meta"):
        empty = type(model)(model.config)
    return fill(empty.to_empty(device="cpu")).to(model.dtype).eval()


def fill(model: nn.Module, value: float = float("nan")) -> nn.Module:
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(value)
    return model


def assert_state(model: nn.Module, want: Mapping[str, Tensor]) -> None:
    found = model.state_dict()
    assert found.keys() == want.keys()
    assert [n for n, t in want.items() if not torch.equal(found[n], t.to(found[n].dtype))] == []


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transformers_models_load_experts_that_are_stacked(name, tmp_path):
    model = random_model(name).eval()
    write_directory(tmp_path, model.state_dict(), {}, num_shards=3)
    loaded = empty_like(model)
    seen: list[tuple[int, int]] = []
    report = load_hf(tmp_path, loaded, progress=lambda *numbers: seen.append(numbers))
    num_bytes = sum(param.nbytes for param in loaded.parameters())
    assert seen[-1][0] == seen[-1][1] >= num_bytes and seen == sorted(seen)
    assert_state(loaded, model.state_dict())
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)  # rotary buffers too
    size = sum(t.nbytes for t in model.state_dict().values())
    assert (report.bytes_read, report.total_bytes, report.compared_bytes) == (size, size, 0)
    assert report.tensors == len(model.state_dict()) and report.seconds > 0


def test_casts_of_the_weights_before_are_dropped(tmp_path, no_group_left):
    """Micro-batches of one step share them; what goes on after a load is another step."""
    random_model("qwen3-moe").save_pretrained(tmp_path)
    options = FSDPOptions(param_dtype=torch.bfloat16, dense_strategy="optim")
    logits = []
    for used in (True, False):
        model = fill(random_model("qwen3-moe"), 1.0)
        parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), fsdp=options)
        step = TrainStep(model, num_micro_batches=2)
        if used:
            with step.micro_batch():
                model(IDS)
        load_hf(tmp_path, model)
        with step.micro_batch():
            logits.append(model(IDS).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("stacked", [False, True], ids=["published", "stacked"])
@pytest.mark.parametrize(
    "name",
    [
        *("qwen2-moe", "qwen3", "qwen3-next", "nemotron-h", "nemotron-h, latent experts"),
        *("mixtral", "olmoe", "deepseek", "deepseek, yarn", "gpt-oss"),
    ],
)
def test_native_decoders_load_them_too(name, stacked, tmp_path):
    model, config = make_pair(name)
    model.save_pretrained(tmp_path)
    if stacked:
        tied = {"lm_head.weight"} if config.tie_embeddings else set()
        state = {n: t for n, t in model.state_dict().items() if n not in tied}
        write_directory(tmp_path, state, model.config.to_dict(), num_shards=2)
    decoder = fill(Decoder(decoder_config_from_hf(tmp_path))).eval()
    load_hf(tmp_path, decoder)
    assert_state(decoder, native_state(model.state_dict(), config))
    with torch.no_grad():
        want, found = model.eval()(IDS).logits, decoder(IDS)
    assert (found - want).abs().max() <= 1e-5 * want.abs().max()


BLOCK = 24


def deepseek_files(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Write FP8 files with multi-token prediction; return the native state they must give."""
    config = preset("tiny-deepseek-v3")
    g = torch.Generator().manual_seed(1)
    state = {n: torch.randn(t.shape, generator=g) for n, t in Decoder(config).state_dict().items()}
    state = {n: t if "expert_bias" in n else t.to(dtype).float() for n, t in state.items()}
    stored, truth = fp8_state(hf_state(state, config, layout="per_expert"), BLOCK)
    keep = ("_scale_inv", "e_score_correction_bias")
    stored = {
        n: t if n.endswith(keep) or t.dtype == torch.float8_e4m3fn else t.to(dtype)
        for n, t in stored.items()
    }
    quantization = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    write_directory(path, stored, {"quantization_config": quantization}, num_shards=4)
    return native_state(truth, config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks_are_dequantised_into_the_dtype_of_the_model(dtype, tmp_path):
    truth = deepseek_files(tmp_path, dtype)
    decoder = fill(Decoder(preset("tiny-deepseek-v3"), dtype=dtype))
    report = load_hf(tmp_path, decoder)
    assert_state(decoder, truth)  # rounded once, from fp32
    assert decoder.state_dict()["mtp.0.block.mlp.router.expert_bias"].dtype == torch.float32
    table = truth["model.embed_tokens.weight"].numel() * dtype.itemsize
    assert report.bytes_read == report.total_bytes
    assert report.compared_bytes == 4 * table  # two copies and their originals


def test_fp8_files_give_transformers_and_the_decoder_equal_logits(tmp_path):
    deepseek_files(tmp_path)
    config = preset("tiny-deepseek-v3")
    hf_config = transformers.DeepseekV3Config(**TINY_JSON, attn_implementation="eager")
    model = empty_like(transformers.DeepseekV3ForCausalLM(hf_config))
    report = load_hf(tmp_path, model)
    assert report.left_over and all("layers.3." in name for name in report.left_over)
    decoder = Decoder(config).eval()
    load_hf(tmp_path, decoder)
    with torch.no_grad():
        want, found = model(IDS).logits, decoder(IDS)
    assert (found - want).abs().max() <= 1e-5 * want.abs().max()


def test_multi_token_prediction_of_qwen3_next(tmp_path):
    """The native decoder has what the files have, though config.json does not name it."""
    model, config = make_pair("qwen3-next")
    ahead = Decoder(replace(config, num_mtp_layers=1, mtp_loss_coef=0.3))
    own = ahead.state_dict() | native_state(model.state_dict(), config)
    stored = hf_state(own, ahead.config, layout="per_expert")
    write_directory(tmp_path, stored, model.config.to_dict(), num_shards=2)
    found = decoder_config_from_hf(tmp_path)
    assert (found.num_mtp_layers, found.mtp_loss_coef) == (1, 0.3)
    decoder = fill(Decoder(found))
    load_hf(tmp_path, decoder)
    assert_state(decoder, own)
    loaded = empty_like(model)
    report = load_hf(tmp_path, loaded)
    assert_state(loaded, model.state_dict())
    assert {*report.left_over} == {n for n in stored if n.startswith("mtp.")}
    export_hf(decoder, tmp_path / "out", config=model.config.to_dict())
    again = fill(Decoder(decoder_config_from_hf(tmp_path / "out")))
    load_hf(tmp_path / "out", again)
    assert_state(again, own)


def test_mxfp4_is_dequantised(tmp_path):
    model = random_model("gpt-oss", hidden_size=64, intermediate_size=32, num_local_experts=4)
    stored, truth = mxfp4_state(model.state_dict())
    write_directory(tmp_path, stored, {}, num_shards=2)
    loaded = empty_like(model)
    load_hf(tmp_path, loaded)
    assert_state(loaded, truth)
    model.load_state_dict(truth)
    assert torch.equal(loaded(IDS).logits, model.eval()(IDS).logits)
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    decoder = fill(Decoder(decoder_config_from_hf(tmp_path)))
    load_hf(tmp_path, decoder)
    assert_state(decoder, native_state(truth, decoder.config))


def test_small_chunks_give_the_same(tmp_path, monkeypatch):
    model = random_model("mixtral", tie_word_embeddings=True)
    state = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}
    write_directory(tmp_path, state, {})
    monkeypatch.setattr(hf_load, "CHUNK_BYTES", 4 * 32 * 5)
    loaded = empty_like(model)
    report = load_hf(tmp_path, loaded)
    assert_state(loaded, model.state_dict())
    assert report.bytes_read == sum(t.nbytes for t in state.values())


def test_dtypes_widen_and_round_only_when_told(tmp_path):
    model = random_model("qwen3-moe")
    low = {n: t.bfloat16() for n, t in model.state_dict().items()}
    write_directory(tmp_path / "low", low, {})
    write_directory(tmp_path / "high", model.state_dict(), {})
    loaded = empty_like(model)
    load_hf(tmp_path / "low", loaded)
    assert_state(loaded, {n: t.float() for n, t in low.items()})
    half = empty_like(model.bfloat16())
    with pytest.raises(
        ValueError,
        match=r"model.embed_tokens.weight \(torch.float32\) does not fit into torch.bfloat16 exact",
    ):
        load_hf(tmp_path / "high", half)
    assert all(t.isnan().all() for t in half.state_dict().values())
    load_hf(tmp_path / "high", half, cast=True)
    assert_state(half, low)
    with pytest.raises(ValueError, match=r"does not fit into torch.float16 exactly"):
        load_hf(tmp_path / "low", empty_like(model.half()))


GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
EXPERT = "model.layers.1.mlp.experts."


def published(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a small Qwen3-MoE under its published names."""
    state = {}
    for name, value in model.state_dict().items():
        prefix, stacked, role = name.partition(".experts.")
        if not stacked:
            state[name] = value
            continue
        for e, matrix in enumerate(value):
            parts = {"down_proj": matrix}
            if role == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            for part, weight in parts.items():
                state[f"{prefix}.experts.{e}.{part}.weight"] = weight
    assert infer_hf_layout(state) == "per_expert"
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: [s.pop(f"{EXPERT}3.{r}_proj.weight") for r in ("up", "down")],
            r"must fit the model: model.layers.1.mlp.experts.3.up_proj.weight is missing; "
            r"model.layers.1.mlp.experts.3.down_proj.weight is missing: correct",
        ),
        (
            lambda s: s.update({f"{EXPERT}8.up_proj.weight": torch.zeros(16, 32)}),
            r"layers.1.mlp.experts.8.up_proj.weight is no tensor of the model",
        ),
        (
            lambda s: s.update({f"{EXPERT}2.up_proj.weight": torch.zeros(16, 31)}),
            r"layers.1.mlp.experts.2.up_proj.weight \(16, 31\) must be \(16, 32\)",
        ),
        (
            lambda s: s.update({f"{EXPERT}2.up_proj.weight": torch.zeros(16, 32).int()}),
            r"experts.2.up_proj.weight \(torch.int32\) must be a float tensor for a parameter in",
        ),
        (
            lambda s: s.update({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}),
            r"model.norm.weight \(fp8\) has no model.norm.weight_scale_inv",
        ),
        (
            lambda s: [s.pop(n) for n in list(s) if ".layers.0." in n],
            r"is missing(; [a-z0-9_.]+ is missing){9} \(and \d+ more\): correct",
        ),
        (
            lambda s: s.update({"model.layers.2.input_layernorm.weight": torch.ones(32)}),
            r"model.layers.2.input_layernorm.weight is no tensor of the model",
        ),
    ],
)
def test_all_that_does_not_fit_is_listed_before_anything_is_written(change, message, tmp_path):
    model = random_model("qwen3-moe")
    state = published(model)
    change(state)
    write_directory(tmp_path, state, {})
    loaded = empty_like(model)
    with pytest.raises(ValueError, match=message) as info:
        load_hf(tmp_path, loaded)
    assert "\n" not in str(info.value)
    assert all(t.isnan().all() for t in loaded.state_dict().values())


def test_not_strict_loads_what_both_have(tmp_path):
    model = random_model("qwen3-moe")
    state = published(model)
    del state["model.norm.weight"]
    lost = [n for n in state if n.startswith(EXPERT) and "down_proj" in n]
    state = {n: t for n, t in state.items() if n not in lost} | {"more": torch.ones(3)}
    write_directory(tmp_path, state, {})
    loaded = empty_like(model)
    report = load_hf(tmp_path, loaded, strict=False)
    assert report.missing == (f"{EXPERT}down_proj", "model.norm.weight")
    assert report.left_over == ("more",)
    for name, value in loaded.state_dict().items():
        same = torch.equal(value, model.state_dict()[name])
        assert value.isnan().all() if name in report.missing else same, name
    state |= {n: torch.zeros(32, 16) for n in lost[:-1]}  # half a parameter
    write_directory(tmp_path, state, {})
    with pytest.raises(ValueError, match=r"experts.7.down_proj.weight is missing"):
        load_hf(tmp_path, loaded, strict=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            dict(num_experts_per_tok=3),
            r"config.json moe.top_k \(3\) must be that of the model \(2\)",
        ),
        (
            dict(attention_bias=True),
            r"config.json attention_bias \(True\) .* native decoder, which",
        ),
    ],
)
def test_files_of_another_decoder_of_the_same_shapes(values, message, tmp_path):
    config = preset("tiny-deepseek-v3")
    state = hf_state(Decoder(config).state_dict(), config, layout="per_expert")
    write_directory(tmp_path, state, TINY_JSON | values)
    with pytest.raises(ValueError, match=message):
        load_hf(tmp_path, fill(Decoder(config)))
    loaded = fill(Decoder(config))
    with pytest.warns(UserWarning, match=message):
        load_hf(tmp_path, loaded, strict=False)
    assert_state(loaded, native_state(state, config))
    write_directory(tmp_path, state, TINY_JSON | dict(max_position_embeddings=64))
    moe = replace(config.moe, balance=BalanceConfig(z_loss_coef=1e-3))
    load_hf(tmp_path, Decoder(replace(config, moe=moe, mtp_loss_coef=0.1)))


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        (
            "qwen3-moe",
            dict(norm_topk_prob=False),
            r"moe[a-z_.]* \(False\) must be that of .* \(True",
        ),
        (
            "gpt-oss",
            dict(sliding_window=3),
            r"windows \(\(3, 0\)\) must be that of the model \(\(4, 0\)\)",
        ),
    ],
)
def test_files_of_another_transformers_model_of_the_same_shapes(name, changed, message, tmp_path):
    saved = random_model(name, **changed)
    saved.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_hf(tmp_path, fill(random_model(name)))
    loaded = fill(random_model(name))
    with pytest.warns(UserWarning, match=message):
        load_hf(tmp_path, loaded, strict=False)
    assert_state(loaded, saved.state_dict())
    other = random_model(name, **changed, router_aux_loss_coef=0.5, attention_dropout=0.1)
    load_hf(tmp_path, fill(other))  # what only training reads
    assert_state(other, saved.state_dict())


WRONG: tuple[Any, ...] = (
    *("x", -1, 0, 1.5, True, None, [], {}, [1, "x"], {"a": 1}, 10**400, float("nan"), 1e308),
    *("\n\x1b", {"a": {"b": [[[]]]}}),
)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_a_field_of_the_wrong_type_is_one_line(name, tmp_path):
    """transformers raises errors of many kinds and lines for it; nothing is written before."""
    model = random_model(name)
    model.save_pretrained(tmp_path)
    config = read_json(tmp_path / "config.json")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    extra = dict.fromkeys(("mlp_only_layers", "rope_scaling", "sliding_window", "layer_types"))
    refused = 0
    for i, (key, value) in enumerate(itertools.product(config | extra, WRONG)):
        values = config | {key: value}
        problems = find_config_problems(tmp_path, model, values, strict=True)
        assert not any("\n" in problem for problem in problems), (key, value)
        refused += len(problems) > 0
        if i % 40 == 0 and problems:
            (tmp_path / "config.json").write_text(json.dumps(values))
            with pytest.raises(ValueError, match="must fit the model: ") as info:
                load_hf(tmp_path, model)
            assert type(info.value) is ValueError and "\n" not in str(info.value)
    assert refused > 300
    assert_state(model, before)


@pytest.mark.parametrize("kind", ["fifo", "deep"])
def test_a_config_that_is_no_file_or_nests_deep(kind, tmp_path):
    model = random_model("qwen3-moe")
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    if kind == "fifo":
        os.mkfifo(tmp_path / "config.json")
    else:
        (tmp_path / "config.json").write_text('{"a": ' * 300 + "1" + "}" * 300)
    with pytest.raises(ValueError, match=r"config.json\) must (be a regular file|nest at most)"):
        load_hf(tmp_path, model)


def test_copies_must_equal_their_originals(tmp_path):
    config = preset("tiny-deepseek-v3")
    state = hf_state(Decoder(config).state_dict(), config, layout="fused")
    copy = "model.layers.3.shared_head.head.weight"
    write_directory(tmp_path, state | {copy: state[copy] + 1}, {})
    with pytest.raises(ValueError, match=rf"{copy} must equal lm_head.weight, because the model"):
        load_hf(tmp_path, Decoder(config))
    write_directory(tmp_path, state | {copy: state[copy][:5]}, {})
    with pytest.raises(ValueError, match=rf"{copy} must equal lm_head.weight"):
        load_hf(tmp_path, Decoder(config))
    del state[copy]
    write_directory(tmp_path, state, {})
    load_hf(tmp_path, Decoder(config))


def test_a_tied_model_refuses_an_untied_head(tmp_path):
    model = random_model("mixtral", tie_word_embeddings=True)
    state = dict(model.state_dict())
    write_directory(tmp_path, state, {})
    assert load_hf(tmp_path, empty_like(model)).compared_bytes == 2 * 61 * 32 * 4
    write_directory(tmp_path, state | {"lm_head.weight": torch.ones(61, 32)}, {})
    with pytest.raises(ValueError, match=r"lm_head.weight must equal model.embed_tokens.weight"):
        load_hf(tmp_path, empty_like(model))


def test_rotary_frequencies_of_old_files_are_not_read(tmp_path):
    model = random_model("mixtral")
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    write_directory(tmp_path, model.state_dict() | old, {})
    loaded = empty_like(model)
    load_hf(tmp_path, loaded)
    assert torch.equal(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_models_that_cannot_be_filled(tmp_path):
    model = random_model("qwen3-moe")
    write_directory(tmp_path, model.state_dict(), {})
    with torch.device("meta"):
        meta = type(model)(model.config)
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight has no storage in the model:"):
        load_hf(tmp_path, meta)
    with pytest.raises(NotImplementedError, match=r"model \(Linear\) must be a moecore Decoder or"):
        load_hf(tmp_path, nn.Linear(2, 2))
    config = preset("tiny-deepseek-v3")
    biased: DecoderConfig = replace(config, moe=replace(config.moe, fc2_bias=True))
    with pytest.raises(NotImplementedError, match=r"mlp.experts.b2 .* must have a Hugging Face na"):
        load_hf(tmp_path, Decoder(biased))
