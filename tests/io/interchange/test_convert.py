import copy
import io
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from moecore.cli import main
from moecore.families.family import swap_blocks
from moecore.io import load, save
from moecore.io.hf.config import decoder_config_from_hf
from moecore.io.hf.convert import native_to_hf
from moecore.io.interchange import dcp as dcp_room
from moecore.io.interchange import megatron
from moecore.io.interchange.convert import dcp_to_native, native_to_dcp
from moecore.io.interchange.dcp import DCPFiles, NewChunk, NewTensor, write_dcp
from moecore.io.interchange.dcp_metadata import _MetadataRecord, _Unpickler
from moecore.models import Decoder, DecoderConfig
from tests.families.transformers.hf_models import random_model
from tests.io.hf.states import hf_state
from tests.io.hf.test_config import TINY_JSON
from tests.io.interchange.megatron_states import fused_qkv, megatron_state
from tests.models.hf_pairs import make_pair

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
NAMES = ["qwen3", "mixtral", "olmoe", "deepseek, no query latent", "tiny-deepseek-v3", "qwen2"]
IDS = torch.arange(24).view(2, 12)


def case(name: str) -> tuple[DecoderConfig, dict[str, Any]]:
    """A decoder's config, and the config.json of the same model."""
    if "deepseek" in name:  # as Megatron-Core ranks groups, with one eps
        hf = TINY_JSON if name.startswith("tiny") else make_pair(name)[0].config.to_dict()  # type: ignore[operator]
        hf = hf | dict(num_experts_per_tok=4, rms_norm_eps=1e-6)
        return decoder_config_from_hf(hf), hf
    if name == "qwen2":  # with shared experts and their gate
        hf = random_model("qwen2-moe").config.to_dict() | dict(qkv_bias=False)
        return decoder_config_from_hf(hf), hf
    hf, config = make_pair(name)
    return config, hf.config.to_dict()  # type: ignore[operator]


def decoder(config: DecoderConfig, seed: int = 3) -> Decoder:
    """With no two numbers alike, so that rows in a wrong order are seen."""
    model = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return model.eval()


def written(path: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def assert_same(found: Decoder, expected: Decoder) -> None:
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert [n for n in ours if not torch.equal(ours[n], theirs[n])] == []
    with torch.no_grad():
        assert torch.equal(found.eval()(IDS), expected.eval()(IDS))


@pytest.mark.parametrize("name", NAMES)
def test_megatron_there_and_back(name, tmp_path):
    config, values = case(name)
    model = decoder(config)
    state: dict[str, Any] = megatron_state(config, model.state_dict())
    padded = {
        key: torch.cat([state[key], torch.full((7, config.dim), 9.0)])
        for key in ("embedding.word_embeddings.weight", "output_layer.weight")
        if key in state
    }
    trainer = {
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.ones(3),
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_3": [b"fp8"],
        "rng_state": {"numpy": [1, 2]},
    }
    source = written(tmp_path / "megatron", state | padded | trainer)
    path = dcp_to_native(source, tmp_path / "run", config=values, step=7)
    found = decoder(config, seed=4)
    load(path, found)
    assert_same(found, model)
    count = native_to_dcp(path, tmp_path / "back", config=values, names="megatron")
    again = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    dcp.load(again, checkpoint_id=tmp_path / "back", no_dist=True)
    stored = DCPFiles(tmp_path / "back").tensors
    assert count == len(stored) and stored.keys() == state.keys()
    assert [key for key in state if stored[key].shape != tuple(state[key].shape)] == []
    assert [key for key in state if not torch.equal(again[key], state[key])] == []
    common = torch.load(tmp_path / "back" / "common.pt", weights_only=True)
    metadata = json.loads((tmp_path / "back" / "metadata.json").read_text())
    assert common["checkpoint_version"] == 3.0 and metadata["sharded_backend"] == "torch_dist"
    dcp_to_native(tmp_path / "back", tmp_path / "again", config=values)  # a chunk per expert
    found = decoder(config, seed=5)
    load(tmp_path / "again" / "step-000000", found)
    assert_same(found, model)


def test_order_of_the_fused_projection(tmp_path):
    """Two groups of two query heads, head dim 1: q0 q1 k0 v0 q2 q3 k1 v1."""
    q, k, v = (torch.arange(n).view(n, 1) + first for n, first in ((4, 0), (2, 10), (2, 20)))
    order = [0, 1, 10, 20, 2, 3, 11, 21]
    assert fused_qkv(q, k, v, num_groups=2, head_dim=1).flatten().tolist() == order
    config, values = case("mixtral")
    model = decoder(config)
    path = save(tmp_path / "run", 0, model, None)
    native_to_dcp(path, tmp_path / "out", config=values, names="megatron")
    name, d = "decoder.layers.self_attention.linear_qkv.weight", config.head_dim
    files = DCPFiles(tmp_path / "out")
    shape = files.tensors[name].shape
    fused = files.read(name, tuple(slice(0, n) for n in shape))[1]
    attention = model.layers[1].self_attn
    heads = {n: getattr(attention, f"{n}_proj").weight.split(d) for n in "qkv"}
    expected = [
        heads[n][i] for n, i in (("q", 0), ("q", 1), ("k", 0), ("v", 0), ("q", 2), ("q", 3))
    ]
    assert torch.equal(fused, torch.cat([*expected, heads["k"][1], heads["v"][1]]))


def in_memory(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of modules in memory: a layer, and an expert in it, have names of their own."""
    found = {}
    for name, tensor in state.items():
        where, experts, matrix = name.partition("mlp.experts.experts.")
        if not experts:
            found[f"module.{name}"] = tensor
        for e in range(tensor.shape[0] if experts else 0):
            found[f"module.{where}mlp.experts.{matrix}{e}"] = tensor[e].clone()
    return found


def singletons(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each expert, and gate and up, under keys of their own; norms that are not fused."""
    found = {}
    for name, tensor in state.items():
        where, experts, matrix = name.partition("mlp.experts.experts.")
        parts = {f"{where}{experts}{e}.{matrix}": t for e, t in enumerate(tensor)}
        for key, value in (parts if experts else {name: tensor}).items():
            if key.endswith("linear_fc1.weight"):
                gate, up = value.chunk(2)
                found |= {f"{key}_w": gate.clone(), f"{key}_v": up.clone()}
            else:
                key = key.replace("self_attention.linear_qkv.layer_norm", "input_layernorm.")
                key = key.replace("mlp.linear_fc1.layer_norm", "pre_mlp_layernorm.")
                found[key.replace("._weight", ".weight")] = value.clone()
    return found


@pytest.mark.parametrize("form", [in_memory, singletons])
def test_other_forms_of_megatron_names(form, tmp_path):
    config, values = case("qwen3")
    model = decoder(config)
    state = form(megatron_state(config, model.state_dict()))
    path = dcp_to_native(written(tmp_path / "in", state), tmp_path / "run", config=values)
    found = decoder(config, seed=4)
    load(path, found)
    assert_same(found, model)


@pytest.mark.parametrize("names", ["dcp", "dcp-transformers"])
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("name", ["mixtral", "tiny-deepseek-v3"])
def test_plain_ones_there_and_back(name, prefix, names, tmp_path):
    config, values = case(name)
    model = decoder(config)
    state: dict[str, Tensor] = dict(model.state_dict())
    if names == "dcp-transformers":
        state = hf_state(state, config, layout="fused")
    beside = {"optim.state.model.norm.weight.exp_avg": torch.ones(2)} if prefix else {}
    there = {f"{prefix}{n}": t.clone() for n, t in state.items()}
    source = written(tmp_path / "in", there | beside)
    path = dcp_to_native(source, tmp_path / "run", config=values)
    found = decoder(config, seed=4)
    load(path, found)
    assert_same(found, model)
    native_to_dcp(path, tmp_path / "out", config=values, names=names, dtype=torch.bfloat16)
    again = {n: torch.zeros_like(t, dtype=torch.bfloat16) for n, t in state.items()}
    kept = {n: torch.zeros_like(t) for n, t in state.items() if n.endswith("_bias")}
    dcp.load(again | kept, checkpoint_id=tmp_path / "out", no_dist=True)
    assert [
        n for n in again if n not in kept and not torch.equal(again[n], state[n].bfloat16())
    ] == []
    assert [n for n in kept if not torch.equal(kept[n], state[n])] == []


def test_a_transformers_models_checkpoint_too(tmp_path):
    model = random_model("mixtral")
    values, want = model.config.to_dict(), dict(model.state_dict())
    swap_blocks(model, {})
    path = save(tmp_path / "run", 0, model, None)
    with pytest.raises(ValueError, match=r"names \('dcp'\) must be those of the checkpoint, whi"):
        native_to_dcp(path, tmp_path / "no", config=values, names="dcp")
    for names in ("dcp-transformers", "megatron"):
        native_to_dcp(path, tmp_path / names, config=values, names=names)
        native = dcp_to_native(tmp_path / names, tmp_path / f"run-{names}", config=values)
        native_to_hf(native, tmp_path / f"hf-{names}", config=values)
        again = type(model).from_pretrained(tmp_path / f"hf-{names}").state_dict()
        assert [n for n in want if not torch.equal(again[n], want[n])] == []


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.__delitem__(name)


def changed(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.update({name: value})


FC1 = "decoder.layers.mlp.experts.experts.linear_fc1.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("decoder.layers.mlp.router.weight"), r"mlp.router.weight\[0\] is missing"),
        (without(FC1), r"experts.experts.linear_fc1.weight\[0, 0\] is missing"),
        (
            changed(FC1, torch.ones(4, 4, 64, 64)),
            r"linear_fc1.weight \(4, 4, 64, 64\) must be \(3, 4, 64, 64\)",
        ),
        (
            changed("embedding.word_embeddings.weight", torch.ones(96, 64)),
            r"word_embeddings.weight \(96, 64\) must be \(97, 64\)",
        ),
        (
            changed("decoder.layers.self_attention.linear_qkv.bias", torch.ones(3, 128)),
            r"linear_qkv.bias is no tensor of the decoder",
        ),
        (
            changed("output_layer.weight", torch.ones(97, 64)),
            r"lm_head.weight must equal model.embed_tokens.weight",
        ),
        (
            changed(FC1, torch.ones(3, 4, 64, 64, dtype=torch.int64)),
            r"gate_proj.weight \(torch.int64\) must be a float tensor",
        ),
    ],
)
def test_what_the_config_does_not_describe(change, message, tmp_path):
    config, values = case("mixtral")
    state = megatron_state(config, decoder(config).state_dict())
    change(state)
    with pytest.raises(ValueError, match=message) as info:
        dcp_to_native(written(tmp_path / "in", state), tmp_path / "run", config=values)
    assert "\n" not in str(info.value) and not (tmp_path / "run").exists()


class Evil:
    """Its pickle asks for a command that would leave a file beside `.metadata`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.folder}/was-here",)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: f.unlink(), r".metadata\) must exist"),
        (lambda f: f.write_bytes(f.read_bytes()[:-30]), r"must be that of a whole DCP directory"),
        (
            lambda f: f.write_bytes(pickle.dumps(Evil(f.parent))),
            r"posix.system is no class of a DCP dir",
        ),
        (lambda f: f.write_bytes(pickle.dumps({"a": 1})), r"state_dict_metadata .* must be a dict"),
        (  # an entry of the memo so far behind that all before it would take 2 GB
            lambda f: f.write_bytes(b"\x80\x04Nr" + (2**27).to_bytes(4, "little") + b"."),
            r"its memo has 134217728 entries, more than it has bytes",
        ),
        (
            lambda f: f.write_bytes(f.read_bytes().replace(b"__0_0.distcp", b"../0_.distcp")),
            r"'../0_.distcp', which is no file of the directory",
        ),
        (lambda f: (f.parent / "__0_0.distcp").unlink(), r"__0_0.distcp is missing"),
        (lambda f: os.truncate(f.parent / "__0_0.distcp", 900), r"__0_0.distcp ends before"),
    ],
)
def test_metadata_runs_nothing_and_is_checked(damage, message, tmp_path):
    config, values = case("mixtral")
    path = written(tmp_path / "in", dict(decoder(config).state_dict()))
    damage(path / ".metadata")
    with pytest.raises(ValueError, match=message) as info:
        dcp_to_native(path, tmp_path / "run", config=values)
    assert "\n" not in str(info.value)
    assert not (tmp_path / "run").exists() and not (path / "was-here").exists()


def nested(depth: int) -> bytes:
    """A pickle of a list with 2 ** depth leaves, itself a few bytes per level."""
    steps = (bytes([*b"]q", i + 1, *b"(h", i, *b"h", i, *b"e"]) for i in range(depth))
    return b"\x80\x04]q\x000" + b"0".join(steps)


def as_layout(value: bytes) -> bytes:
    """A pickle that asks for a layout called after a value."""
    return value[:2] + b"ctorch.serialization\n_get_layout\n" + value[2:] + b"\x85R."


def test_metadata_expands_nothing_and_imports_nothing():
    """As text a nested list has 2 ** 20 leaves; getattr of torch imports torch.onnx."""
    for layout in (as_layout(nested(20)), as_layout(b"\x80\x04X\x07\x00\x00\x00strided")):
        assert isinstance(_Unpickler(io.BytesIO(layout)).load(), _MetadataRecord)
    code = (
        "import io, sys; from moecore.io.interchange.dcp_metadata import _Unpickler\n"
        "before = set(sys.modules)\n"
        "try: _Unpickler(io.BytesIO(b'\\x80\\x04ctorch\\nonnx\\n.')).load()\n"
        "except Exception as error: print(error, len(set(sys.modules) - before))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "torch.onnx is no class of a DCP directory 0\n"


@pytest.mark.parametrize(
    ("offsets", "sizes", "is_whole"),
    [
        ([(0,), (2,)], [(2,), (2,)], True),
        ([(0,), (1,)], [(2,), (2,)], False),  # row 1 twice, row 3 never: as many as a whole one
        ([(0, 0), (0, 1), (1, 1)], [(2, 1), (1, 2), (1, 2)], True),
        ([(0, 0), (0, 2), (1, 0)], [(1, 2), (2, 1), (1, 2)], True),
        ([(0, 0), (0, 1), (1, 0)], [(2, 1), (1, 2), (1, 2)], False),  # [1, 0] twice, [1, 2] never
    ],
)
def test_chunks_cover_each_element_once(offsets, sizes, is_whole, tmp_path):
    chunks = [
        NewChunk(o, s, lambda s=s: torch.ones(s)) for o, s in zip(offsets, sizes, strict=True)
    ]
    shape = (4,) if len(offsets[0]) == 1 else (2, 3)
    write_dcp(tmp_path, {"a": NewTensor(shape, torch.float32, chunks)}, dcp_room.Meter())
    if not is_whole:
        message = r"a \(.*\) has chunks that are not all of it, each el"
        with pytest.raises(ValueError, match=message):
            DCPFiles(tmp_path)
        return
    files = DCPFiles(tmp_path)
    assert torch.equal(files.read("a", tuple(slice(0, n) for n in shape)), torch.ones(shape))


def test_one_of_several_models_is_not_guessed(tmp_path):
    """The optimizer's tensors of a model's name are no second model; an average of weights is."""
    config, values = case("mixtral")
    state, other = (decoder(config, seed).state_dict() for seed in (3, 4))
    source = written(tmp_path / "in", {"model": dict(state), "ema": dict(other)})
    message = r"one model, but has model.embed_tokens.weight below .*ema"
    with pytest.raises(ValueError, match=message):
        dcp_to_native(source, tmp_path / "run", config=values)
    source = written(tmp_path / "one", {"model": dict(state), "optim": {"exp_avg": dict(other)}})
    found = decoder(config, seed=5)
    load(dcp_to_native(source, tmp_path / "run", config=values), found)
    assert_same(found, decoder(config, seed=3))


def test_chunks_that_are_not_what_was_named(tmp_path):
    path = written(tmp_path / "in", {"a": torch.arange(6.0).view(2, 3)})
    file = path / "__0_0.distcp"
    files = DCPFiles(path)
    assert files.read("a", (slice(1, 2), slice(1, 3))).tolist() == [[4.0, 5.0]]
    raw = bytearray(file.read_bytes())
    raw[: len(raw) // 2] = bytes(len(raw) // 2)
    file.write_bytes(raw)
    files = DCPFiles(path)
    with pytest.raises(OSError, match=r"__0_0.distcp\) must hold a: "):
        files.read("a", (slice(0, 2), slice(0, 3)))


def test_a_chunk_unpacks_to_no_more_than_it_has(tmp_path, monkeypatch):
    def packed(value: Any, file: Any, **_: Any) -> None:
        stored = io.BytesIO()
        save(value, stored)
        with zipfile.ZipFile(stored) as old, zipfile.ZipFile(file, "w") as new:
            for name in old.namelist():
                new.writestr(name, old.read(name), zipfile.ZIP_DEFLATED)

    save, zeros = torch.save, torch.zeros(100_000)
    monkeypatch.setattr(torch, "save", packed)
    chunk = NewChunk((0,), (100_000,), lambda: zeros)
    write_dcp(tmp_path, {"a": NewTensor((100_000,), torch.float32, [chunk])}, dcp_room.Meter())
    files = DCPFiles(tmp_path)
    with pytest.raises(OSError, match="entries have more than its"):
        files.read("a", (slice(0, 2),))


@pytest.mark.parametrize(
    ("stored", "is_whole"),
    [
        (torch.ones(2, 3, requires_grad=True), True),
        (torch.ones(2, 3, device="meta"), False),
        (torch.ones(2, 3).to_sparse(), False),
        (torch.ones(3, 2), False),
        (torch.ones(2, 3).double(), False),
        ([torch.ones(2, 3)], False),
    ],
)
def test_a_chunk_of_another_kind(stored, is_whole, tmp_path, monkeypatch):
    plain, chunk = torch.save, NewChunk((0, 0), (2, 3), lambda: torch.ones(2, 3))
    monkeypatch.setattr(torch, "save", lambda _, *rest, **options: plain(stored, *rest, **options))
    write_dcp(tmp_path, {"a": NewTensor((2, 3), torch.float32, [chunk])}, dcp_room.Meter())
    files = DCPFiles(tmp_path)
    if is_whole:
        found = files.read("a", (slice(0, 2), slice(0, 3)))
        assert torch.equal(found, torch.ones(2, 3)) and not found.requires_grad
        return
    with pytest.raises(OSError, match=r"__0_0.distcp\) must hold a as .*, as .metadata names"):
        files.read("a", (slice(0, 2), slice(0, 3)))


def test_one_chunk_is_in_memory_at_a_time(tmp_path, monkeypatch):
    """Chunks are made when they are written, and of those that are read the last one stays."""
    made: list[int] = []

    def make(i: int) -> Callable[[], Tensor]:
        return lambda: made.append(i) or torch.full((1, 4), float(i))  # type: ignore[func-returns-value]

    chunks = [NewChunk((i, 0), (1, 4), make(i)) for i in range(5)]
    saved: list[int] = []
    plain = torch.save
    monkeypatch.setattr(torch, "save", lambda *a, **k: (saved.append(len(made)), plain(*a, **k)))
    (tmp_path / "out").mkdir()
    write_dcp(tmp_path / "out", {"a": NewTensor((5, 4), torch.float32, chunks)}, dcp_room.Meter())
    assert saved == [1, 2, 3, 4, 5]
    loads: list[int] = []
    plain_load = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: (loads.append(1), plain_load(*a, **k))[1])
    files = DCPFiles(tmp_path / "out")
    for _ in range(3):
        assert files.read("a", (slice(1, 2), slice(0, 4))).tolist() == [[1.0] * 4]
    assert len(loads) == 1
    assert files.read("a", (slice(0, 5), slice(2, 3))).flatten().tolist() == [0, 1, 2, 3, 4]


def test_a_model_without_names_there_is_refused(tmp_path):
    config, values = case("mixtral")
    path = save(tmp_path / "run", 0, decoder(config), None)
    message = r"names \('zarr'\) must be one of 'megatron', 'dcp', 'dcp-tr"
    with pytest.raises(ValueError, match=message):
        native_to_dcp(path, tmp_path / "out", config=values, names="zarr")
    with pytest.raises(NotImplementedError, match=r"model_type \('gpt2'\) must be one of"):
        dcp_to_native(tmp_path, tmp_path / "new", config=dict(model_type="gpt2"))
    for name, tensor in (("gpt-oss", "o_proj.bias"), ("glm-4.5", "q_proj.bias")):
        with pytest.raises(NotImplementedError, match=f"{tensor} .* must have a name in Megatron"):
            megatron.build_megatron_blocks(make_pair(name)[1])
    config = make_pair("qwen3-next")[1]
    for change, tensor in (
        (dict(zero_centered_norms=False, attention_gate=False), "1.linear_attn.conv1d.weight"),
        (dict(zero_centered_norms=False), "0.self_attn.q_proj.weight"),
        (dict(attention_gate=False), "0.input_layernorm.weight"),
    ):
        with pytest.raises(NotImplementedError, match=f"{tensor} .* must have a name in Megatron"):
            megatron.build_megatron_blocks(replace(config, **change))
    hybrid = make_pair("nemotron-h")[1]
    halves = dict(num_layers=2, pattern="*E", linear_attention=None, mlp_hidden_dim=0)
    for config, tensor in (
        (replace(hybrid, **halves), "0.norm.weight"),
        (replace(hybrid, pattern="", linear_attention=None, moe=None), "mlp.up_proj.weight"),
    ):
        with pytest.raises(NotImplementedError, match=f"{tensor} .* must have a name in Megatron"):
            megatron.build_megatron_blocks(config)
    assert not (tmp_path / "out").exists()


CHANGED = {
    "moe.activation": dict(activation="limited_swiglu"),
    "moe.activation, moe.activation_limit": dict(activation="situ_glu", activation_limit=4.0),
    "moe.assignment": dict(assignment="sinkhorn", normalize_weights=False),
    "moe.normalize_weights": dict(score_function="sigmoid", normalize_weights=False),
}


@pytest.mark.parametrize("name", CHANGED)
def test_another_function_of_the_same_tensors_is_refused(name):
    """The shapes of its tensors are those of a model that Megatron-Core has."""
    config = case("qwen3")[0]
    assert config.moe is not None
    other = replace(config, moe=replace(config.moe, **CHANGED[name]))
    with pytest.raises(NotImplementedError) as error:
        megatron.build_megatron_blocks(other)
    first = name.partition(",")[0]
    assert str(error.value).startswith(f"DecoderConfig.{first} (") and "\n" not in str(error.value)


@pytest.mark.parametrize("change", ["groups", "eps"])
def test_rules_of_megatron_are_not_those_of_every_config(change):
    config = case("tiny-deepseek-v3")[0]
    assert config.moe is not None and config.mla is not None
    wrong, message = {
        "groups": (
            dict(moe=replace(config.moe, top_k=2)),
            "moe.group_experts (2) must be top_k (2) // top_groups (2)",
        ),
        "eps": (
            dict(mla=replace(config.mla, norm_eps=0.5)),
            "mla.norm_eps (0.5) must be norm_eps (1e-06)",
        ),
    }[change]
    with pytest.raises(NotImplementedError, match=re.escape(f"DecoderConfig.{message}, ")):
        megatron.build_megatron_blocks(replace(config, **wrong))


@pytest.mark.parametrize(
    "change",
    [
        dict(activation_func_clamp_value=10.0),
        dict(rotary_interleaved=True),
        dict(no_rope_freq=[0, 1]),
        dict(softmax_type="off-by-one"),
        dict(position_embedding_type="none"),
    ],
)
def test_arguments_of_a_run_that_make_it_another_model_are_refused(change, tmp_path, monkeypatch):
    """They are read out of the pickle, in which nothing runs."""
    config, values = case("qwen3")
    source = written(tmp_path / "in", megatron_state(config, decoder(config).state_dict()))
    plain = dict(num_layers=2, swiglu=True, apply_layernorm_1p=False, rotary_interleaved=False)
    plain |= dict(softmax_type="vanilla", position_embedding_type="rope")
    other = dict(cuda_graph="none", kind="off-by-one")  # a pickle holds equal texts once
    (name,) = change
    monkeypatch.setattr(Namespace, "__setstate__", lambda *_: pytest.fail("it ran"), raising=False)
    for protocol in (2, 4):
        common = dict(
            args=Namespace(**other, **plain | change),
            iteration=3,
            activation_func_tanh_clamp_scale=None,
        )
        torch.save(common, source / "common.pt", pickle_protocol=protocol)
        with pytest.raises(NotImplementedError) as error:
            dcp_to_native(source, tmp_path / "run", config=values)
        shown = {"[0, 1]": "'a list'"}.get(str(change[name]), repr(change[name]))
        wanted = f"{name} ({shown}) of {source / 'common.pt'} must be off, else the native"
        assert str(error.value).startswith(wanted) and "\n" not in str(error.value)
    torch.save(dict(args=Namespace(**plain)), source / "common.pt")
    dcp_to_native(source, tmp_path / "run", config=values)
    (source / "common.pt").write_bytes(b"no file of torch")
    dcp_to_native(source, tmp_path / "other", config=values)
    for kind, wrong in (("sparse", "common.pt"), ("packed", "common.pt/data.pkl")):
        if kind == "sparse":
            os.truncate(source / "common.pt", 40 * 10**9)
        else:  # 20 KB that unpack to 20 MB
            with zipfile.ZipFile(source / "common.pt", "w", zipfile.ZIP_DEFLATED) as file:
                file.writestr("common/data.pkl", b"\x80\x02" + b"0" * (20 << 20))
        with pytest.raises(ValueError) as size:
            dcp_to_native(source, tmp_path / "large", config=values)
        assert str(size.value).startswith(f"path ({source / wrong}) must have at most ")
        assert not (tmp_path / "large").exists()


def test_every_field_is_carried_or_must_have_its_default():
    """A new one is refused until it is named."""
    config = case("tiny-deepseek-v3")[0]
    assert [*megatron._find_unsupported_fields(config)] == []
    named = dict[str, Any]()
    for prefix, part in (("", config), ("moe.", config.moe), ("mla.", config.mla)):
        named |= {prefix + field.name: part for field in fields(part)}
    assert named.keys() >= megatron.SUPPORTED_FIELDS
    for name in named.keys() - megatron.SUPPORTED_FIELDS - {"moe", "mla"}:
        changed = copy.copy(named[name])
        object.__setattr__(changed, name.rpartition(".")[2], "another value")
        whole = changed if changed.__class__ is DecoderConfig else copy.copy(config)
        if "." in name:
            object.__setattr__(whole, name.partition(".")[0], changed)
        assert [
            p
            for p in megatron._find_unsupported_fields(whole)
            if p.startswith(f"{name} ('another value') must")
        ]


def test_an_error_while_writing_is_the_callers_own(tmp_path):
    config, values = case("mixtral")
    path = save(tmp_path / "run", 0, decoder(config), None)
    for error in (KeyError("mine"), OSError(28, "No space left on device")):

        def fail(*_, error=error):
            raise error

        with pytest.raises(type(error)) as caught:
            native_to_dcp(path, tmp_path / "out", config=values, names="dcp", progress=fail)
        assert caught.value is error and not (tmp_path / "out").exists()


def test_command_line(tmp_path, capsys):
    config, values = case("tiny-deepseek-v3")
    model = decoder(config)
    written(tmp_path / "in", megatron_state(config, model.state_dict()))
    (tmp_path / "config.json").write_text(json.dumps(values))

    def run(*args: object) -> tuple[int, str, str]:
        code = main(["checkpoint", *map(str, args)])
        out, err = capsys.readouterr()
        return code, out, err

    to_native = ("convert", tmp_path / "in", tmp_path / "run")
    assert run(*to_native)[0] == 2  # no --config
    code, out, err = run(*to_native, "--config", tmp_path / "config.json")
    assert (code, err) == (0, "") and out == f"{tmp_path}/in -> {tmp_path}/run/step-000000\n"
    code, out, _ = run("inspect", tmp_path / "in")
    assert code == 0 and "DCP" in out and "names        megatron" in out
    assert run("verify", tmp_path / "in")[1].startswith(f"{tmp_path}/in: whole")
    to_megatron = ("convert", tmp_path / "run", tmp_path / "out", "--to", "megatron")
    assert run(*to_megatron, "--config", tmp_path / "config.json")[0] == 0
    assert DCPFiles(tmp_path / "out").tensors.keys() == DCPFiles(tmp_path / "in").tensors.keys()
    wrong = ("convert", tmp_path / "in", tmp_path / "hf", "--to", "hf")
    code, _, err = run(*wrong, "--config", tmp_path / "config.json")
    assert code == 2 and err.count("\n") == 1 and "--to (hf) must be native" in err
