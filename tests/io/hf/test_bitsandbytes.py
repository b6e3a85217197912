"""bitsandbytes' NF4 files have the values of its definition, and keep codes and scales in a base.

The comparison with bitsandbytes itself is in `test_bitsandbytes_oracle.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from moecore import ParallelConfig, Precision, build_meshes, parallelize_moe
from moecore.base.torch_private import get_local_tensor
from moecore.io import export_hf, load_hf
from moecore.io.hf import bitsandbytes
from moecore.kernels.rows.four_bit import NF4, quantise
from moecore.moe.stored_weights import get_four_bit_blocks
from tests.families.transformers.hf_models import random_model
from tests.helpers.ranks import run_ranks
from tests.io.hf.dirs import write_directory

SIZES = dict(
    **dict(num_hidden_layers=2, hidden_size=64, num_experts=2, num_experts_per_tok=1),
    **dict(moe_intermediate_size=64, shared_expert_intermediate_size=64, intermediate_size=96),
)
STATE = ".quant_state.bitsandbytes__nf4"
STORED = Precision(frozen="nf4", frozen_dense=True)
SKIPPED = ("shared_expert_gate.weight", "mlp.gate.weight", "lm_head.weight", "embed_tokens.weight")


def random_nf4(shape: tuple[int, ...], *, nested: bool, size: int, seed: int) -> dict[str, Tensor]:
    """Random tensors of the format by suffix; each group has a code of 1 or -1."""
    g = torch.Generator().manual_seed(seed)
    numel = shape[0] * shape[1]
    codes = torch.randint(0, 16, (-(-numel // size), size), generator=g)
    codes[:, 3] = 15 * torch.randint(0, 2, (len(codes),), generator=g)
    packed = codes.flatten()[:numel].view(-1, 2)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": size, "dtype": "bfloat16"}
    state["shape"] = list(shape)
    scales = torch.rand(len(codes), generator=g) + 0.1
    found = {"": (packed[:, :1] * 16 + packed[:, 1:]).to(torch.uint8), ".absmax": scales}
    if nested:
        state |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": 1.25}
        found[".absmax"] = torch.randint(0, 256, (len(codes),), generator=g).to(torch.uint8)
        found[".nested_absmax"] = torch.rand(-(-len(codes) // 8), generator=g)
        found[".nested_quant_map"] = torch.linspace(-1, 1, 256)
    found[".quant_map"] = torch.tensor(NF4)
    found[STATE] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    return found


def plain_nf4(stored: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The oracle, value by value in fp32: values of the matrix, and the scales of its groups."""
    state = json.loads(bytes(stored[STATE].tolist()))
    table, scales = stored[".quant_map"], list(stored[".absmax"])
    if "nested_offset" in state:
        for i, code in enumerate(scales):
            outer = stored[".nested_absmax"][i // state["nested_blocksize"]]
            scales[i] = stored[".nested_quant_map"][int(code)] * outer + state["nested_offset"]
    values = []
    for i, byte in enumerate(stored[""].flatten().tolist()):
        for j, code in enumerate((byte // 16, byte % 16)):
            values.append(table[code] * scales[(2 * i + j) // state["blocksize"]])
    return torch.stack(values).view(state["shape"]), torch.stack(scales)


def write_nf4(path: Path, model: nn.Module, **options: Any) -> dict[str, Tensor]:
    """Write a model with random NF4 matrices, its experts one by one; return the true values."""
    tensors, truth = dict[str, Tensor](), dict[str, Tensor]()
    state = dict[str, Tensor]()
    for name, value in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for e, matrix in enumerate(value):
                for part, half in zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True):
                    state[name.replace("gate_up_proj", f"{e}.{part}.weight")] = half
        elif name.endswith("experts.down_proj"):
            for e, matrix in enumerate(value):
                state[name.replace("down_proj", f"{e}.down_proj.weight")] = matrix
        else:
            state[name] = value
    for seed, (name, value) in enumerate(state.items()):
        if value.ndim == 2 and not name.endswith(SKIPPED):
            stored = random_nf4(tuple(value.shape), seed=seed, **options)
            tensors |= {name + suffix: tensor for suffix, tensor in stored.items()}
            truth[name], truth[f"{name}.scales"] = plain_nf4(stored)
        else:
            tensors[name] = truth[name] = value
    config = model.config.to_dict()  # type: ignore[operator,union-attr]
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    write_directory(path, tensors, config)
    return truth


def matrix_of(name: str, param: nn.Parameter, truth: dict[str, Tensor]) -> Tensor:
    """The true values of a parameter, experts stacked."""
    if ".experts." not in name:
        return truth[name]
    experts, part = name.rsplit(".", 1)
    parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    rows = [
        torch.cat([truth[f"{experts}.{e}.{p}.weight"] for p in parts])
        for e in range(param.shape[0])
    ]
    return torch.stack(rows)


@pytest.mark.parametrize(("nested", "size"), [(False, 64), (True, 64), (True, 256)])
def test_values_are_of_the_definition(tmp_path: Path, nested: bool, size: int) -> None:
    """With rows of 96 a group has values of two rows."""
    model = random_model("qwen2-moe", **SIZES, mlp_only_layers=[0])
    truth = write_nf4(tmp_path, model, nested=nested, size=size)
    report = load_hf(tmp_path, model)
    assert not report.left_over and not report.missing
    for name, param in model.named_parameters():
        assert torch.equal(param, matrix_of(name, param, truth)), name
    half = random_model("qwen2-moe", **SIZES, mlp_only_layers=[0]).bfloat16()
    load_hf(tmp_path, half, cast=True)
    for name, param in half.named_parameters():
        assert torch.equal(param, matrix_of(name, param, truth).bfloat16()), name


def frozen_model() -> nn.Module:
    model = random_model("qwen2-moe", **SIZES).bfloat16().requires_grad_(False)
    return parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), precision=STORED)


@pytest.mark.parametrize("nested", [False, True])
def test_a_base_keeps_codes_and_scales(no_group_left: None, tmp_path: Path, nested: bool) -> None:
    truth = write_nf4(tmp_path / "base", random_model("qwen2-moe", **SIZES), nested=nested, size=64)
    model = frozen_model()
    load_hf(tmp_path / "base", model, cast=True)
    num_stored = 0
    for name, param in model.named_parameters():
        blocks = get_four_bit_blocks(param)
        if blocks is not None:
            num_stored += 1
            found = torch.tensor(NF4)[
                torch.stack((blocks.values >> 4, blocks.values & 15), -1).int()
            ]
            found = found.flatten(-2).unflatten(-1, (-1, 64)) * blocks.scales[..., None]
            assert torch.equal(found.flatten(-2), matrix_of(name, param, truth)), name
        if blocks is not None and ".experts." not in name:
            assert torch.equal(blocks.scales.flatten(), truth[f"{name}.scales"]), name
    assert num_stored == 2 * 9  # 4 of attention, 3 of shared experts, 2 of experts

    export_hf(model, tmp_path / "export", quantization="bitsandbytes")
    again = frozen_model()
    load_hf(tmp_path / "export", again)
    plain = dict(again.named_parameters())
    for name, param in model.named_parameters():
        blocks, other = get_four_bit_blocks(param), get_four_bit_blocks(plain[name])
        if blocks is None:
            assert torch.equal(get_local_tensor(param), get_local_tensor(plain[name])), name
        elif ".experts." not in name:  # experts are written in bf16
            assert other is not None and torch.equal(blocks.values, other.values), name
            assert torch.equal(blocks.scales, other.scales), name


def test_files_of_an_export(no_group_left: None, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = frozen_model()
    with patch.object(bitsandbytes, "quantise", side_effect=quantise) as counted:
        report = export_hf(model, tmp_path / "export", quantization="bitsandbytes")
    assert report.nf4_error == 0
    assert counted.call_count == 2 * 7  # each linear once
    stored = load_file(tmp_path / "export" / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    blocks = get_four_bit_blocks(dict(model.named_parameters())[name])
    assert blocks is not None
    assert torch.equal(stored[name], blocks.values.view(-1, 1))
    assert torch.equal(stored[f"{name}.absmax"], blocks.scales.flatten())
    assert torch.equal(stored[f"{name}.quant_map"], torch.tensor(NF4))
    state = json.loads(bytes(stored[name + STATE].tolist()))
    expected = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 64]}
    assert state == expected
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    quantization = config["quantization_config"]
    assert config["dtype"] == quantization["bnb_4bit_compute_dtype"] == "bfloat16"
    skipped = quantization["llm_int8_skip_modules"]
    assert "lm_head" in skipped and "model.layers.0.mlp.shared_expert_gate" in skipped
    assert not any(part in name for name in skipped for part in ("_proj", "experts."))
    experts = "model.layers.0.mlp.experts.0.gate_proj.weight"
    assert stored[experts].dtype == torch.bfloat16 and stored[experts].shape == (64, 64)


def export_on_ranks(rank: int, device: torch.device, path: Path) -> int:
    model = random_model("qwen2-moe", **SIZES).bfloat16().requires_grad_(False)
    parallelize_moe(model, build_meshes(ParallelConfig(ep=2), "cpu"), precision=STORED)
    export_hf(model, path, quantization="bitsandbytes", max_shard_bytes=1 << 16)
    return len([*path.glob("*.safetensors")])


@pytest.mark.slow
def test_ranks_write_the_same_files(no_group_left: None, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    assert run_ranks(2, export_on_ranks, tmp_path / "two") > 2
    export_hf(frozen_model(), tmp_path / "one", quantization="bitsandbytes")
    expected = load_file(tmp_path / "one" / "model.safetensors")
    found: dict[str, Tensor] = {}
    for file in (tmp_path / "two").glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


PROBLEMS: dict[str, Any] = {
    r"has no model\S+q_proj.weight.absmax": ("q_proj.weight.absmax", None),
    r"nested_absmax \(1,\) torch.float32 must be \(8,\)": (
        "q_proj.weight.nested_absmax",
        torch.ones(1),
    ),
    r"q_proj.weight\S+nf4 must be JSON with blocksize and shape": (
        f"q_proj.weight{STATE}",
        torch.tensor([*b"[]"], dtype=torch.uint8),
    ),
}


@pytest.mark.parametrize(("message", "change"), PROBLEMS.items(), ids=range(len(PROBLEMS)))
def test_wrong_files(tmp_path: Path, message: str, change: tuple[str, Tensor | None]) -> None:
    from safetensors.torch import load_file, save_file

    model = random_model("qwen2-moe", **SIZES)
    write_nf4(tmp_path, model, nested=True, size=64)
    file = tmp_path / "model.safetensors"
    tensors, (end, value) = load_file(file), change
    name = next(name for name in tensors if name.endswith(end))
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    save_file(tensors, file)
    with pytest.raises(ValueError, match=message) as error:
        load_hf(tmp_path, model)
    assert "\n" not in str(error.value)


def test_a_model_without_linears_in_nf4_is_refused(no_group_left: None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must have linears that are stored in NF4"):
        export_hf(random_model("qwen2-moe"), tmp_path / "no", quantization="bitsandbytes")
