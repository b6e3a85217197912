import json
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moecore.io import load, load_hf, save
from moecore.io.hf.convert import hf_to_native
from moecore.io.hf.files import CONFIG, INDEX, HFFiles
from moecore.io.hf.quant import dequantize_fp8, dequantize_mxfp4, find_sources
from moecore.io.hf.verify import verify_hf
from moecore.models import Decoder, preset
from tests.io.checkpoint.fuzz import VALUES
from tests.io.hf.dirs import plain_fp8, plain_mxfp4, quantize_fp8, random_mxfp4, write_directory
from tests.io.hf.test_config import TINY_JSON

STATE = {
    "a": torch.arange(24.0).view(4, 6),
    "b": torch.arange(60).view(3, 4, 5).bfloat16(),
    "scalar": torch.tensor(7.0),
    "empty": torch.empty(0, 3),
}


def test_boxes_are_read_and_counted(tmp_path):
    write_directory(tmp_path, STATE, {}, num_shards=2)
    with HFFiles(tmp_path) as files:
        assert files.tensors["b"].shape == (3, 4, 5) and files.tensors["b"].nbytes == 120
        assert files.bytes_read == 0
        assert torch.equal(files.read("a", (slice(1, 3), slice(2, 5))), STATE["a"][1:3, 2:5])
        assert files.bytes_read == 2 * 3 * 4
        box = (slice(0, 3), slice(3, 4), slice(0, 5))
        assert torch.equal(files.read("b", box), STATE["b"][:, 3:4])
        assert files.bytes_read == 24 + 15 * 2 and files.read("scalar", ()).item() == 7
        assert files.read("empty", (slice(0, 0), slice(0, 3))).shape == (0, 3)
        assert files.bytes_read == 24 + 30 + 4


FP8_SHAPES = [(48, 48, 24), (50, 37, 16), (7, 130, 128), (5, 3, 1)]


@pytest.mark.parametrize(("rows", "cols", "block"), FP8_SHAPES)
def test_fp8_blocks(rows, cols, block, tmp_path):
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))
    values, scales = quantize_fp8(weight, block)
    want = plain_fp8(values, scales, block)
    assert torch.equal(dequantize_fp8(values, scales, (block, block)), want)
    write_directory(tmp_path, {"x.weight": values, "x.weight_scale_inv": scales}, {})
    with HFFiles(tmp_path) as files:
        sources, problems = find_sources(files, {"weight_block_size": [block, block]})
        assert problems == [] and list(sources) == ["x.weight"]
        rng = random.Random(0)
        for _ in range(20):
            r, c = sorted(rng.sample(range(rows + 1), 2)), sorted(rng.sample(range(cols + 1), 2))
            before = files.bytes_read
            found = sources["x.weight"].read(files, (slice(*r), slice(*c)))
            assert torch.equal(found, want[slice(*r), slice(*c)])
            touched = {(i // block, j // block) for i in range(*r) for j in range(*c)}
            assert files.bytes_read - before == found.numel() + 4 * len(touched)


def test_mxfp4_groups(tmp_path):
    blocks, scales = random_mxfp4((3, 96, 5), seed=1)
    want = plain_mxfp4(blocks, scales)
    assert torch.equal(dequantize_mxfp4(blocks, scales).transpose(1, 2).float(), want)
    write_directory(tmp_path, {"x_blocks": blocks, "x_scales": scales}, {})
    with HFFiles(tmp_path) as files:
        sources, problems = find_sources(files, None)
        assert problems == [] and sources["x"].shape == (3, 96, 5)
        for i, o in (((0, 96), (0, 5)), ((31, 33), (2, 4)), ((32, 64), (0, 1)), ((1, 2), (4, 5))):
            before = files.bytes_read
            found = sources["x"].read(files, (slice(1, 3), slice(*i), slice(*o)))
            assert torch.equal(found.float(), want[1:3, slice(*i), slice(*o)])
            groups = -(-i[1] // 32) - i[0] // 32  # whole groups: 16 bytes and a scale each
            assert files.bytes_read - before == 2 * (o[1] - o[0]) * groups * 17


def test_mxfp4_equals_transformers():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = random_mxfp4((2, 64, 8), seed=2)
    want = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(dequantize_mxfp4(blocks, scales).transpose(1, 2), want)


def test_mxfp4_worked_example_and_ends():
    blocks = torch.zeros(1, 16, dtype=torch.uint8)
    blocks[0, 0] = 0x91
    found = dequantize_mxfp4(blocks, torch.tensor([127], dtype=torch.uint8))
    assert found[:2].tolist() == [0.5, -0.5] and found[2:].abs().sum() == 0
    for scale, want in ((0, 2.0**-128), (254, 2.0**126)):
        found = dequantize_mxfp4(blocks, torch.tensor([scale], dtype=torch.uint8))
        assert found[0].item() == want
    assert dequantize_mxfp4(blocks, torch.tensor([255], dtype=torch.uint8)).isnan().all()


F8 = torch.zeros(4, 4, dtype=torch.float8_e4m3fn)
U8 = torch.uint8


@pytest.mark.parametrize(
    ("state", "quantization", "problem"),
    [
        ({"x.weight": F8}, None, "x.weight (fp8) has no x.weight_scale_inv"),
        ({"x.weight_scale_inv": torch.ones(1, 1)}, None, "x.weight_scale_inv has no x.weight"),
        (
            {"x.weight": F8, "x.weight_scale_inv": torch.ones(2, 1)},
            None,
            "x.weight_scale_inv (2, 1) torch.float32 must be (1, 1), a float",
        ),
        (
            {"x.weight": F8, "x.weight_scale_inv": torch.ones(1, 1, dtype=torch.int32)},
            None,
            "x.weight_scale_inv (1, 1) torch.int32 must be (1, 1), a float",
        ),
        (
            {"x.weight": F8, "x.weight_scale_inv": torch.ones(1, 1)},
            {"weight_block_size": [128, 0]},
            "quantization_config.weight_block_size ((128, 0)) must be two whole numbers",
        ),
        ({"x_blocks": torch.zeros(1, 2, 1, 16, dtype=U8)}, None, "x_blocks has no x_scales"),
        ({"x_scales": torch.zeros(1, 2, 1, dtype=U8)}, None, "x_scales has no x_blocks"),
        (
            {"x_blocks": torch.zeros(1, 2, 1, 8, dtype=U8), "x_scales": torch.zeros(1, 2, 1)},
            None,
            "x_blocks (1, 2, 1, 8) torch.uint8 must be uint8 [E, O, G, 16]",
        ),
        (
            {"x_blocks": torch.zeros(1, 2, 1, 16, dtype=U8), "x_scales": torch.zeros(1, 2)},
            None,
            "x_scales (1, 2) torch.float32 must be (1, 2, 1), uint8",
        ),
    ],
)
def test_incomplete_quantisation_is_a_problem(state, quantization, problem, tmp_path):
    write_directory(tmp_path, state, {})
    with HFFiles(tmp_path) as files:
        assert find_sources(files, quantization)[1] == [problem]


class Trap:
    """Unpickling it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_and_never_opened(name, tmp_path):
    trap = tmp_path / "opened"
    (tmp_path / name).write_bytes(pickle.dumps(Trap(trap)))
    with pytest.raises(ValueError, match=rf"{name}\) must be safetensors, because unpickling") as e:
        HFFiles(tmp_path)
    assert "\n" not in str(e.value)
    save_file(STATE, tmp_path / "model.safetensors")  # beside it, it does not matter
    assert set(HFFiles(tmp_path).tensors) == set(STATE) and not trap.exists()


def change_index(path: Path, **changes: Any) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] |= changes
    file.write_text(json.dumps({k: v for k, v in index.items() if v is not None}))


SHARD = "model-00001-of-00002.safetensors"


def remove(name: str):
    return lambda path: (path / name).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove(SHARD), rf"must hold every shard: {SHARD} is missing"),
        (lambda p: change_index(p, c=SHARD), rf"must agree with its shards: c is not in {SHARD}"),
        (lambda p: change_index(p, b=SHARD), rf"agree with its shards: b is not in {SHARD}"),
        (
            lambda p: save_file({**STATE, "more": torch.ones(1)}, p / SHARD),
            r"b is in model-00001-of-00002.safetensors and in model-00002.*; more is not in the",
        ),
        (lambda p: change_index(p, a="../x.safetensors"), r"names the shard \('../x.safetensors'"),
        (lambda p: change_index(p, a="/x.safetensors"), r"must be a .safetensors file in the dir"),
        (lambda p: change_index(p, a="model.bin"), r"names the shard \('model.bin'\), which must"),
        (lambda p: change_index(p, a=3), r"must have a weight_map of strings"),
        (
            lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": []}'),
            r"must have a weight_map of strings",
        ),
        (lambda p: (p / "model.safetensors.index.json").write_text("{"), r"must be JSON"),
        (lambda p: (p / "model.safetensors.index.json").write_text("[" * 100_000), r"must be JSON"),
        (remove("model.safetensors.index.json"), r"must hold model.safetensors or model.saf"),
        (lambda p: (p / SHARD).write_bytes(b""), rf"{SHARD}\) must be a whole safetensors file"),
        (
            lambda p: (p / SHARD).write_bytes((p / SHARD).read_bytes()[:-1]),
            rf"{SHARD}\) must be a whole safetensors file",
        ),
    ],
)
def test_damage_is_named(damage, message, tmp_path):
    write_directory(tmp_path, STATE, {}, num_shards=2)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as info:
        HFFiles(tmp_path)
    assert "\n" not in str(info.value)


def fuzzed(data: bytes, rng: random.Random) -> bytes:
    """Change the length, the header or the size of a file."""
    size = int.from_bytes(data[:8], "little")
    changed, kind = bytearray(data), rng.randrange(6)
    if kind == 0:
        changed[:8] = rng.choice([0, 1, size + 1, size * 2, 2**63, 2**64 - 1]).to_bytes(8, "little")
    elif kind == 1:
        for _ in range(rng.randrange(1, 9)):
            changed[8 + rng.randrange(size)] = rng.randrange(256)
    elif kind == 2:
        del changed[rng.randrange(len(changed)) :]
    elif kind == 3:
        changed += bytes(rng.randrange(1, 50))
    else:
        header = json.loads(data[8 : 8 + size])
        entry = header[rng.choice(list(STATE))]
        values: list[Any] = [None, -1, 2**62, 2**64, [], "", "F32", [0], [2**40, 2**40], {}, 1.5]
        entry[rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(values)
        text = json.dumps(header).encode()
        changed = bytearray(len(text).to_bytes(8, "little") + text + data[8 + size :])
    return bytes(changed)


def test_fuzzed_headers_are_errors_or_harmless(tmp_path):
    """A file that is still a valid one is read; anything else is a ValueError of one line."""
    write_directory(tmp_path, STATE, {})
    file = tmp_path / "model.safetensors"
    good, rng, refused = file.read_bytes(), random.Random(5), 0
    for _ in range(600):
        file.write_bytes(fuzzed(good, rng))
        try:
            with HFFiles(tmp_path) as files:
                for name, entry in files.tensors.items():
                    box = tuple(slice(0, n) for n in entry.shape)
                    assert files.read(name, box).shape == entry.shape
        except ValueError as error:
            refused += 1
            assert "model.safetensors) " in str(error) and "\n" not in str(error)
    assert refused > 450


def odd_cases(index: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Files with one odd value each."""
    for value in VALUES:
        yield CONFIG, OTHER | {"quantization_config": value}
        yield CONFIG, OTHER | {"quantization_config": {"weight_block_size": value}}
        yield CONFIG, OTHER | {"quantization_config": {"weight_block_size": [value, 1]}}
        yield CONFIG, OTHER | {"num_experts": value, "num_hidden_layers": value}
        yield INDEX, index | {"metadata": value}
        yield INDEX, index | {"metadata": {"total_size": value}}
        yield INDEX, index | {"weight_map": value}
        yield INDEX, index | {"weight_map": {"b": value}}


OTHER = {"model_type": "other", "num_experts": 1, "num_hidden_layers": 0}


def test_fuzzed_index_and_quantisation_are_problems_or_harmless(tmp_path):
    state = {"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "b": torch.ones(3)}
    state["a.weight_scale_inv"] = torch.ones(1, 1)
    write_directory(tmp_path, state, OTHER, num_shards=2)
    assert verify_hf(tmp_path) == []
    whole = {name: (tmp_path / name).read_text() for name in (CONFIG, INDEX)}
    lengths = []
    for name, values in odd_cases(json.loads(whole[INDEX])):
        (tmp_path / name).write_text(json.dumps(values))
        problems = verify_hf(tmp_path)
        assert all("\n" not in problem for problem in problems), values
        lengths.append(len(problems))
        (tmp_path / name).write_text(whole[name])
    assert sum(map(bool, lengths)) > len(lengths) / 2
    (tmp_path / CONFIG).write_text(json.dumps(OTHER | {"quantization_config": [1]}))
    assert verify_hf(tmp_path) == [
        "config.json quantization_config ([1]) must be an object: correct it"
    ]
    (tmp_path / CONFIG).write_text(whole[CONFIG])
    (tmp_path / INDEX).write_text(json.dumps(json.loads(whole[INDEX]) | {"metadata": None}))
    assert verify_hf(tmp_path) == [f"{INDEX} metadata (None) must be an object"]


def test_a_file_that_changes_while_it_is_read(tmp_path):
    """After the headers it is an OSError, of the kind that crosses ranks."""
    write_directory(tmp_path, {"a": torch.ones(4, 4)}, {})
    with HFFiles(tmp_path) as files:
        write_directory(tmp_path, {"b": torch.ones(4, 4)}, {})
        with pytest.raises(OSError, match=r"must be as its header said: .*: it has changed mean"):
            files.read("a", (slice(0, 2), slice(0, 4)))
    with HFFiles(tmp_path) as files:
        (tmp_path / "model.safetensors").write_bytes(b"short")
        with pytest.raises(OSError, match="must be as its header said"):
            files.read("b", (slice(0, 2), slice(0, 4)))


SHORTENED = """
import os, sys
from pathlib import Path
from moecore.io.hf.files import HFFiles
path = Path(sys.argv[1])
box = (slice(0, 1), slice(0, 1024))
with HFFiles(path) as files:
    first = files.read("a", box)
    os.truncate(path / "model.safetensors", 10_000)
    try:
        print(files.read("a", (slice(1000, 1024), slice(0, 1024))).sum())
    except OSError as error:
        print(error)
    print(first.sum().item())
"""


def test_a_file_that_becomes_shorter_between_two_reads(tmp_path):
    """In a process of its own, which SIGBUS would end if the file were mapped into memory."""
    write_directory(tmp_path, {"a": torch.ones(1024, 1024)}, {})
    command = [sys.executable, "-c", SHORTENED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    error, total = done.stdout.splitlines()
    assert error.endswith("it was cut meanwhile") and float(total) == 1024


@pytest.mark.parametrize("name", ["x" * 10**6, "model\nlayers\r\n.x", "\x1b[2J" * 10**4], ids=len)
def test_names_of_any_text_are_one_line_of_bounded_length(name, tmp_path):
    """In the errors of readers, of comparisons and of a save."""
    config = TINY_JSON | {"num_hidden_layers": 2}
    whole = write_directory(tmp_path / "hf", {name: torch.ones(2)}, config)
    index = write_directory(tmp_path / "index", {"a": torch.ones(2), "b": torch.ones(2)}, config, 2)
    text = json.loads((index / "model.safetensors.index.json").read_text())
    text["weight_map"][name] = text["weight_map"]["a"]
    (index / "model.safetensors.index.json").write_text(json.dumps(text))
    shard = write_directory(tmp_path / "shard", {"a": torch.ones(2), "b": torch.ones(2)}, config, 2)
    (shard / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    model = torch.nn.Linear(2, 2)
    saved = save(tmp_path / "run", 1, torch.nn.ParameterDict({"weight": torch.ones(2)}), None)
    other = torch.nn.Module()
    other._parameters[name] = torch.nn.Parameter(torch.ones(2))
    meta = torch.nn.Module()
    meta._parameters[name] = torch.nn.Parameter(torch.ones(2, device="meta"))
    decoder = Decoder(preset("tiny-deepseek-v3"))
    for action in (
        lambda: load_hf(whole, decoder),
        lambda: hf_to_native(whole, tmp_path / "native"),
        lambda: hf_to_native(index, tmp_path / "native"),
        lambda: hf_to_native(shard, tmp_path / "native"),
        lambda: load(saved, other),
        lambda: save(tmp_path / "meta", 1, meta, None),
        lambda: save(tmp_path / "run", 2, model, None, {name: object()}),
        lambda: save(tmp_path / "run", 2, model, None, {name: (1, 2)}),
    ):
        with pytest.raises(ValueError) as error:
            action()
        assert str(error.value).isprintable() and len(str(error.value)) < 7000
    for directory in (whole, index, shard):
        problems = verify_hf(directory)
        assert problems
        assert all(problem.isprintable() and len(problem) < 700 for problem in problems)
