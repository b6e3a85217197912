"""Frozen experts in host memory train as frozen experts on the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import MemoryOptions, ParallelConfig, build_meshes, parallelize_moe
from moecore.base.torch_private import get_local_tensor
from moecore.families.transformers.stock import enable_activation_checkpointing
from moecore.io import export_hf, init_hf, load_hf
from moecore.moe.stored_weights import get_four_bit_blocks, get_host_matrix
from moecore.train import TrainingOffload
from moecore.train.memory import frozen_offload
from moecore.train.memory.frozen_offload import FrozenOffload
from tests.families.transformers.hf_models import random_model
from tests.families.transformers.lora_cases import adapted_model, batches
from tests.precision.test_stored import results
from tests.train.optim.late_stream import LateStream

LAYERS = 3
QWEN = dict(num_hidden_layers=LAYERS, hidden_size=64, moe_intermediate_size=64)
GPT_OSS = dict(hidden_size=64, intermediate_size=64)
OFFLOAD = MemoryOptions(offload_frozen=True)


@pytest.fixture(autouse=True)
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies run as late as their events let them."""
    monkeypatch.setattr(frozen_offload, "CopyStream", LateStream)


def parallelized(
    memory: MemoryOptions | None = None,
    *,
    name: str = "qwen3-moe",
    checkpoints: bool = False,
    device: str = "cpu",
    sizes: dict[str, int] = QWEN,
    **options: Any,
) -> nn.Module:
    model = adapted_model(name, GPT_OSS if name == "gpt-oss" else sizes)
    if checkpoints:
        enable_activation_checkpointing(model)
    meshes = build_meshes(ParallelConfig(), device)
    return parallelize_moe(model, meshes, precision="nf4", memory=memory, **options)


def matrices(model: nn.Module) -> list[Any]:
    found = (get_host_matrix(param) for param in model.parameters())
    return [matrix for matrix in found if matrix is not None]


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in expected.items())


class Watch:
    """Counts reads of layers that were not prefetched, and the layers on the device."""

    def __init__(self, model: nn.Module) -> None:
        offload: FrozenOffload = matrices(model)[0]._offload
        fetch_layer, self.missed, self.most = offload.fetch_layer, 0, 0

        def fetch(layer: Any) -> None:
            self.missed += layer.copy_event is None
            fetch_layer(layer)
            self.most = max(self.most, sum(bool(m.device) for m in matrices(model)))

        vars(offload)["fetch_layer"] = fetch


@pytest.mark.parametrize("case", ["saved", "checkpointing", "recompute"])
def test_bits_are_those_of_a_base_on_the_device(no_group_left: None, case: str) -> None:
    memory = MemoryOptions(recompute=("moe",) if case == "recompute" else ())
    expected = results(parallelized(memory, checkpoints=case == "checkpointing"))
    memory = replace(memory, offload_frozen=True)
    model = parallelized(memory, checkpoints=case == "checkpointing")
    watch = Watch(model)
    assert len(matrices(model)) == 2 * LAYERS
    assert equal(results(model), expected)
    assert equal(results(model), expected)
    assert watch.missed == 1 and watch.most == 2 * 2  # the first layer of the first step


def test_transposed_matrices(no_group_left: None) -> None:
    expected = results(parallelized(name="gpt-oss"))
    model = parallelized(OFFLOAD, name="gpt-oss")
    assert all(equal(results(model), expected) for _ in range(2))


def test_order_of_layers_may_change(no_group_left: None) -> None:
    """An evaluation, forwards before backwards, and other weights."""
    stored, plain = parallelized(OFFLOAD), parallelized()
    watch = Watch(stored)

    def losses(model: nn.Module, seed: int) -> list[Tensor]:
        if seed:  # layers on the device have older values
            init_hf(model, seed)
        with torch.no_grad():
            found = [model(**batches(2)[0], use_cache=False).loss]
        found += [model(**batch, use_cache=False).loss for batch in batches(3)[:2]]
        (found[1] + found[2]).backward()
        return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]

    for seed in (0, 3):
        pairs = zip(losses(stored, seed), losses(plain, seed), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    assert watch.most == 2 * 2


def test_files_are_written_to_host_memory(no_group_left: None, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    random_model("qwen3-moe", **QWEN).bfloat16().save_pretrained(tmp_path / "base")
    models = []
    for memory in (None, OFFLOAD):
        with torch.device("meta"):
            config = random_model("qwen3-moe", **QWEN).config
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.requires_grad_(False)
        meshes = build_meshes(ParallelConfig(), "cpu")
        parallelize_moe(model, meshes, precision="nf4", memory=memory)
        model.to_empty(device="cpu")
        load_hf(tmp_path / "base", model)
        models.append(model)
    expected, stored = (dict(model.named_parameters()) for model in models)
    offload, count = matrices(models[1])[0]._offload, 0
    for name, param in expected.items():
        blocks, found = get_four_bit_blocks(param), get_four_bit_blocks(stored[name])
        if blocks is not None and found is not None:
            assert all(map(torch.equal, found.tensors(), blocks.tensors()))
            count += sum(tensor.nbytes for tensor in blocks.tensors())
    assert count <= offload._copies.count_bytes() < 2 * count
    assert not any(matrix.device for matrix in matrices(models[1]))
    for model, name in zip(models, ("plain", "stored"), strict=True):
        export_hf(model, tmp_path / name)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "stored")]
    assert files[0] == files[1]


def test_a_training_off_the_device_has_no_copies(no_group_left: None) -> None:
    model, offloaded = parallelized(OFFLOAD), parallelized(OFFLOAD)
    expected = [results(model) for _ in range(2)]
    assert equal(results(offloaded), expected[0])
    offload = TrainingOffload(offloaded)
    offload.offload("all")
    assert not any(matrix.device for matrix in matrices(offloaded))
    offload.onload("all")
    assert equal(results(offloaded), expected[1])


def test_experts_in_their_dtype_are_refused(no_group_left: None) -> None:
    message = r"MemoryOptions.offload_frozen \(True\) must be False without Precision.frozen"
    with pytest.raises(ValueError, match=message) as error:
        model = adapted_model("qwen3-moe", QWEN)
        parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), memory=OFFLOAD)
    assert "\n" not in str(error.value)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpoints", [False, True], ids=["saved", "checkpointing"])
def test_gpus_compute_the_same_in_less_memory(
    no_group_left: None, monkeypatch: pytest.MonkeyPatch, checkpoints: bool
) -> None:
    monkeypatch.undo()  # copies run on streams
    sizes = dict(num_hidden_layers=12, hidden_size=1024, moe_intermediate_size=512)
    ids = torch.randint(0, 61, (2, 512), generator=torch.Generator().manual_seed(1)).cuda()
    found, peaks = [], []
    for memory in (None, OFFLOAD):
        torch.manual_seed(0)
        model = parallelized(memory, checkpoints=checkpoints, device="cuda", sizes=sizes)
        losses = []
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
        peaks.append(torch.cuda.max_memory_allocated())
        grads = [get_local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
        found.append([tensor.cpu() for tensor in [*losses, *grads]])
        if memory is not None:
            flats = [flat for matrix in matrices(model) for flat in matrix.host]
            assert all(flat.is_pinned() for flat in flats)
            saved = sum(flat.nbytes for flat in flats) * (12 - 2) / 12
            assert peaks[0] - peaks[1] > 0.95 * saved
        del model, loss, grads
    for one, other in zip(*found, strict=True):
        limit = 0.01 * other.abs().max().item()  # attention's backward adds in any order
        assert torch.allclose(one, other, atol=limit)
    assert all(map(torch.equal, found[0][:3], found[1][:3]))
