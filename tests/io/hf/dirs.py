"""Hugging Face directories written by hand: any names, FP8 blocks, MXFP4; and plain oracles."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def write_directory(path, state, config, num_shards=1):
    """Write tensors as they are, in turn into so many shards."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(dict(config)))
    names = list(state)
    if num_shards == 1:
        save_file({n: t.contiguous().clone() for n, t in state.items()}, path / "model.safetensors")
        return path
    weight_map = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {n: state[n].contiguous().clone() for n in names[i::num_shards]}
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    size = sum(t.nbytes for t in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def assert_same_directory(one: Path, other: Path) -> None:
    names = sorted(p.name for p in one.iterdir())
    assert names == sorted(p.name for p in other.iterdir())
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def quantize_fp8(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return fp8 values and one fp32 scale per block, block by block."""
    rows, cols = weight.shape
    values = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // block), -(-cols // block))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scale = weight[where].abs().max().clamp(min=1e-6) / 448
            scales[i, j] = scale
            values[where] = (weight[where] / scale).to(torch.float8_e4m3fn)
    return values, scales


def plain_fp8(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """The oracle: every element times the scale of its block; the product is exact in a double."""
    rows, factors = values.float().tolist(), scales.tolist()
    found = [
        [value * factors[i // block][j // block] for j, value in enumerate(row)]
        for i, row in enumerate(rows)
    ]
    return torch.tensor(found, dtype=torch.float32)


def fp8_state(state, block):
    """Quantise the projections as DeepSeek-V3's files do; return what is stored, and the truth."""
    stored, truth = {}, {}
    for name, value in state.items():
        if name.endswith("_proj.weight") and value.ndim == 2 and "eh_proj" not in name:
            stored[name], stored[f"{name}_scale_inv"] = quantize_fp8(value, block)
            truth[name] = plain_fp8(stored[name], stored[f"{name}_scale_inv"], block)
        else:
            stored[name] = truth[name] = value
    return stored, truth


def random_mxfp4(shape: tuple[int, int, int], seed: int) -> tuple[Tensor, Tensor]:
    """Blocks uint8 [E, O, G, 16] and scales uint8 [E, O, G] of a logical [E, I, O]."""
    E, inputs, outputs = shape
    g = torch.Generator().manual_seed(seed)
    groups = (E, outputs, inputs // 32)
    blocks = torch.randint(0, 256, (*groups, 16), generator=g).to(torch.uint8)
    return blocks, torch.randint(118, 128, groups, generator=g).to(torch.uint8)


def plain_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The oracle, fp32 [E, I, O]: value = table[nibble] * 2^(scale - 127), low nibble first."""
    E, outputs, groups, _ = blocks.shape
    found = torch.empty(E, groups * 32, outputs)
    values, powers = blocks.tolist(), scales.tolist()
    for e in range(E):
        for o in range(outputs):
            for g in range(groups):
                for b, byte in enumerate(values[e][o][g]):
                    power = 2.0 ** (powers[e][o][g] - 127)
                    found[e, g * 32 + 2 * b, o] = FP4[byte % 16] * power
                    found[e, g * 32 + 2 * b + 1, o] = FP4[byte // 16] * power
    return found


def mxfp4_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Replace the experts' matrices by MXFP4 ones, as gpt-oss's files; return files and truth."""
    stored, truth = {}, {}
    for i, (name, value) in enumerate(state.items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = random_mxfp4(tuple(value.shape), seed=i)
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
            truth[name] = plain_mxfp4(blocks, scales)
        else:
            stored[name] = truth[name] = value
    return stored, truth
