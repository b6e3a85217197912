from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore import ParallelConfig, build_meshes, parallelize_moe
from moecore.families.fp32_modules import is_selection_bias, set_dtypes
from moecore.io import export_hf, load_hf
from moecore.io.hf.files import HFFiles
from moecore.io.hf.pieces import FileView
from moecore.io.hf.quant import TensorSource, ViewedSource
from moecore.io.hf.stock import Shapes, compute_published_shapes, get_shapes, plan_stock_tensors
from tests.families.transformers.family_models import model_class, tiny_model
from tests.families.transformers.hf_models import qwen3_moe
from tests.families.transformers.test_families import BY_DAY, taken, without_unused_rows
from tests.helpers.grids import beside
from tests.io.hf.dirs import write_directory


def emptied(like: Any, dtype: torch.dtype) -> nn.Module:
    """The same model as loading from scratch has it, full of nan."""
    with torch.device("meta"):
        model = type(like)._from_config(like.config, dtype=dtype)
    set_dtypes(model, dtype)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
    return model


def stored(path: Path) -> dict[str, Tensor]:
    return {n: t for f in path.glob("*.safetensors") for n, t in load_file(f).items()}


def assert_equal(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, tensor in found.items():
        dtype = tensor.dtype if is_selection_bias(name) else want[name].dtype
        assert tensor.dtype == dtype, name  # a selection bias is fp32 here, its values are stock's
        assert torch.equal(tensor.to(want[name].dtype), want[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("family", beside(taken(), {*taken()} - {*BY_DAY}))
def test_files_of_stock(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "stock", max_shard_size="60KB")
    files, loaded = stored(tmp_path / "stock"), emptied(model, torch.float32)
    report = load_hf(tmp_path / "stock", loaded)
    assert_equal(loaded.state_dict(), model.state_dict())
    assert report.bytes_read == report.total_bytes == sum(t.nbytes for t in files.values())
    export_hf(loaded, tmp_path / "ours")
    assert_equal(stored(tmp_path / "ours"), files)
    half = emptied(model, torch.bfloat16)
    load_hf(tmp_path / "stock", half, cast=True)
    want = model_class(family).from_pretrained(tmp_path / "stock", dtype=torch.bfloat16)
    assert_equal(half.state_dict(), want.state_dict())


def test_rows_of_padding_are_zeros(tmp_path: Path) -> None:
    """Since transformers 5.24 the head has fewer rows than its file."""
    model = tiny_model("inkling2", vocab_size=64)
    model.save_pretrained(tmp_path / "stock")
    loaded = emptied(model, torch.float32)
    load_hf(tmp_path / "stock", loaded)
    assert_equal(loaded.state_dict(), model.state_dict())
    export_hf(loaded, tmp_path / "ours")
    assert_equal(stored(tmp_path / "ours"), stored(tmp_path / "stock"))


def test_experts_that_return_their_input_have_no_rows(tmp_path: Path) -> None:
    """Files of stock LongCat-Flash, which have rows, and published ones, which have none."""
    model = tiny_model("longcat_flash")
    model.save_pretrained(tmp_path / "stock")
    want = without_unused_rows(model.state_dict())
    own, meshes = not dist.is_initialized(), build_meshes(ParallelConfig(), "cpu")
    for path in (tmp_path / "stock", tmp_path / "published"):
        loaded = parallelize_moe(emptied(model, torch.float32), meshes)
        load_hf(path, loaded)
        found = loaded.state_dict().items()
        assert_equal({n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found}, want)
        if path.name == "stock":
            export_hf(loaded, tmp_path / "published")
    if own:
        dist.destroy_process_group()
    files = stored(tmp_path / "published")
    kept = {n: t for n, t in stored(tmp_path / "stock").items() if n in files}
    assert_equal(files, kept)
    assert sorted(n for n in files if ".layers.1.mlp.experts.3." in n)
    assert not any(".mlp.experts.4." in n for n in files)


def plan_of(family: str) -> tuple[nn.Module, Shapes]:
    with torch.device("meta"):
        reader = tiny_model(family)
    return reader, compute_published_shapes(reader)


def test_a_part_of_a_moved_tensor_is_read_alone(tmp_path: Path) -> None:
    """Step3p7's files have q, k and v of a tower in one tensor, rows permuted by head."""
    reader, files = plan_of("step3p7")
    name = "model.vision_model.layers.0.self_attn.k_proj.weight"
    (piece,) = plan_stock_tensors(reader, {name: (32, 32)}, files)[name].pieces
    assert piece.view is not None and piece.file_shape == (96, 32)
    written = torch.randn(piece.file_shape)
    save_file({piece.name: written}, tmp_path / "model.safetensors")
    heads = written[32:64].view(-1, 8, 32)  # rows of a head: the first halves of pairs, then second
    want = torch.cat((heads[:, 0::2], heads[:, 1::2]), dim=1).reshape(32, 32)
    source = TensorSource(piece.name, piece.file_shape, torch.float32)
    moved = ViewedSource(piece.name, piece.shape, torch.float32, origin=source, view=piece.view)
    with HFFiles(tmp_path) as opened:
        found = moved.read(opened, (slice(8, 16), slice(0, 32)))
        assert torch.equal(found, want[8:16]) and opened.bytes_read == 8 * 32 * 4


def test_boxes_of_a_view() -> None:
    """Any box against indexing: a transposed tensor with its last dim cut to pairs, from row 1."""
    rng, stored = random.Random(0), torch.arange(5.0 * 6 * 4).view(5, 6, 4)
    view = FileView((5, 6, 4), (1, 0, 0), ((0, 4, 1), (2, 4, 1), (1, 2, 1), (1, 3, 2)))
    want = stored[1:].transpose(1, 2).view(4, 4, 3, 2).transpose(2, 3).reshape(4, 4, 6)

    class Files:
        def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
            return stored[box].clone()

    source = TensorSource("x", (5, 6, 4), torch.float32)
    moved = ViewedSource("x", (4, 4, 6), torch.float32, origin=source, view=view)
    for _ in range(50):
        ends = [sorted(rng.sample(range(n + 1), 2)) for n in want.shape]
        box = tuple(slice(a, b) for a, b in ends)
        assert torch.equal(moved.read(Files(), box), want[box]), box


def test_a_tensor_that_is_stacked_of_too_few_is_named(tmp_path: Path) -> None:
    """A name that transformers changes, and one of the tensors that it stacks."""
    model = tiny_model("ernie4_5_moe")
    model.save_pretrained(tmp_path / "stock")
    files = stored(tmp_path / "stock")
    gone = [n for n in files if "moe_statics" in n or n.endswith("experts.3.up_proj.weight")]
    kept = {name: tensor for name, tensor in files.items() if name not in gone}
    write_directory(tmp_path / "cut", kept, model.config.to_dict())
    with pytest.raises(ValueError) as info:
        load_hf(tmp_path / "cut", emptied(model, torch.float32))
    assert len(gone) == 2 and all(f"{name} is missing" in str(info.value) for name in gone)


def test_values_that_are_computed_are_refused(monkeypatch, tmp_path):
    from transformers import conversion_mapping, core_model_loading

    class Doubled(core_model_loading.ConversionOps):
        def convert(self, found: Any, source_patterns: Any, target_patterns: Any, **_: Any) -> Any:
            return {target_patterns[0]: 2 * next(iter(found.values()))[0]}

        @property
        def reverse_op(self) -> Doubled:
            return self

    rule = core_model_loading.WeightConverter("gate.scale", "gate.weight", [Doubled()])
    conversion_mapping.get_checkpoint_conversion_mapping("mixtral")  # fills the cache
    monkeypatch.setitem(
        conversion_mapping._checkpoint_conversion_mapping_cache, "qwen3_moe", [rule]
    )
    model = qwen3_moe()
    state = {n.replace("gate.weight", "gate.scale"): t for n, t in model.state_dict().items()}
    write_directory(tmp_path / "in", state, model.config.to_dict())
    for call in (
        lambda: load_hf(tmp_path / "in", model),
        lambda: export_hf(model, tmp_path / "out"),
    ):
        message = r"gate.weight .* of Qwen3MoeForCausalLM must be"
        with pytest.raises(NotImplementedError, match=message) as e:
            call()
        assert "computes its values: load it by Qwen3MoeForCausalLM.from_pretrained" in str(e.value)
        assert "\n" not in str(e.value)


def test_a_checkpoint_has_gate_and_up_apart() -> None:
    """A native checkpoint keeps gate_up_proj [E, 2F, D] as [E, 2, F, D]."""
    model = qwen3_moe()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    (E, rows, D) = model.state_dict()[name].shape
    with torch.device("meta"):
        reader = type(model)(model.config)
    published = compute_published_shapes(reader)
    recipe = plan_stock_tensors(reader, {name: (E, 2, rows // 2, D)}, published)[name]
    numbers = torch.arange(E * rows * D).view(recipe.shape)
    found = {p.name: numbers[p.region].view(p.shape) for p in recipe.pieces}
    where = name.removesuffix("gate_up_proj")
    for e, (i, role) in itertools.product(range(E), enumerate(("gate_proj", "up_proj"))):
        assert torch.equal(found.pop(f"{where}{e}.{role}.weight"), numbers[e, i])
    assert not found
    fused = plan_stock_tensors(
        reader, {name: (E, 2, rows // 2, D)}, get_shapes(reader.state_dict())
    )[name]
    assert [(p.name, p.shape) for p in fused.pieces] == [(name, (E, rows, D))]
