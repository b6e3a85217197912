"""One process: what is kept, which directories count, and the one-line errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from moecore import MoEConfig, MoELayer
from moecore.checkpoint import latest, load, save
from moecore.checkpoint.directory import MARKER, POINTER, whole_directories
from moecore.checkpoint.state import split_halves
from moecore.moe.experts import ExpertLayout
from moecore.moe.layer import LayerLayout

CONFIG = MoEConfig(dim=8, hidden_dim=4, num_experts=2, top_k=1, expert_bias=True)


def build() -> tuple[nn.Module, torch.optim.AdamW]:
    layer = MoELayer(CONFIG)
    return layer, torch.optim.AdamW(layer.parameters(), lr=0.5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(6, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: tuple(entry.size) for name, entry in entries.items()}


def test_loads_what_it_saved(tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer)
    model.router.expert_bias += 1.5
    torch.manual_seed(3)
    path = save(tmp_path, 12, model, optimizer, {"epoch": 3, "loss": 0.1, "ids": torch.arange(3)})
    assert path == tmp_path / "step-000012" == latest(tmp_path)
    after_save = torch.rand(4)

    other, other_optimizer = build()
    train(other, other_optimizer)
    other_optimizer.param_groups[0]["lr"] = 9.0
    extra = load(path, other, other_optimizer)
    assert torch.equal(torch.rand(4), after_save)
    assert extra["epoch"] == 3 and extra["loss"] == 0.1
    assert torch.equal(extra["ids"], torch.arange(3))
    assert other_optimizer.param_groups[0]["lr"] == 0.5
    assert other_optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        for slot, value in optimizer.state[mine].items():
            assert torch.equal(value, other_optimizer.state[theirs][slot]), slot


def test_before_the_first_step_there_is_no_optimizer_state(tmp_path: Path) -> None:
    path = save(tmp_path, 0, *build())
    model, optimizer = build()
    train(model, optimizer)
    load(path, model, optimizer)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("layout", "w1", "b1"),
    [
        (ExpertLayout(), (2, 2, 4, 8), (2, 2, 4)),
        (ExpertLayout(gate_up="concatenated"), (2, 2, 4, 8), (2, 2, 4)),
        (ExpertLayout(gate_up="concatenated", transposed=True), (2, 8, 2, 4), (2, 2, 4)),
        (ExpertLayout(gate_up="interleaved"), (2, 8, 8), (2, 8)),
    ],
)
def test_gate_and_up_are_stored_apart(
    tmp_path: Path, layout: ExpertLayout, w1: tuple[int, ...], b1: tuple[int, ...]
) -> None:
    model = MoELayer(replace(CONFIG, fc1_bias=True), layout=LayerLayout(expert_layout=layout))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    shapes = stored_shapes(save(tmp_path, 1, model, optimizer))
    assert shapes["model.experts.w1"] == shapes["optimizer.exp_avg.experts.w1"] == w1
    assert shapes["model.experts.b1"] == shapes["optimizer.exp_avg.experts.b1"] == b1
    assert len(shapes["model.experts.w2"]) == 3


def test_split_halves_of_the_docstring() -> None:
    rows = split_halves(torch.arange(8)[None, :, None], 1)
    assert rows[0, :, 2:4, 0].tolist() == [[2, 3], [6, 7]]


def test_tied_and_compiled_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    path = save(tmp_path, 1, torch.compile(model), optimizer)
    names = [name for name in stored_shapes(path) if name.startswith("model.")]
    assert sorted(names) == ["model.0.bias", "model.0.weight", "model.1.bias"]


def test_latest_without_a_usable_pointer(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None
    model, optimizer = build()
    for step in (1, 2, 3):
        save(tmp_path, step, model, optimizer)
    (tmp_path / "step-000003" / MARKER).unlink()  # not whole
    (tmp_path / "step-9").mkdir()  # not one of ours
    assert latest(tmp_path) == tmp_path / "step-000002"
    (tmp_path / POINTER).unlink()
    assert latest(tmp_path) == tmp_path / "step-000002"
    (tmp_path / POINTER).write_text("step-000001\n")
    assert latest(tmp_path) == tmp_path / "step-000001"


def test_keep_and_leftovers(tmp_path: Path) -> None:
    model, optimizer = build()
    (tmp_path / ".step-000001.tmp-dead").mkdir()
    for step in (1, 2, 3, 4):
        save(tmp_path, step, model, optimizer, keep=2)
    assert [p.name for p in whole_directories(tmp_path)] == ["step-000003", "step-000004"]
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-000003", "step-000004"]


def test_rolled_back_run_replaces_later_steps(tmp_path: Path) -> None:
    model, optimizer = build()
    for step in (1, 2, 3):
        save(tmp_path, step, model, optimizer, {"run": "first"})
    (tmp_path / POINTER).write_text("step-000001")
    save(tmp_path, 2, model, optimizer, {"run": "second"}, keep=1)
    path = latest(tmp_path)
    assert path == tmp_path / "step-000002"
    assert load(path, model, optimizer) == {"run": "second"}


def _wrong_shape(path: Path) -> None:
    load(path, *build_linear(8))


def _wrong_dtype(path: Path) -> None:
    load(path, *build_linear(4, dtype=torch.bfloat16))


def _wrong_names(path: Path) -> None:
    load(path, *build())


def _other_groups(path: Path) -> None:
    model, _ = build_linear(4)
    groups = [{"params": [p]} for p in model.parameters()]
    load(path, model, torch.optim.AdamW(groups))


def _foreign_parameter(path: Path) -> None:
    load(path, build_linear(4)[0], build_linear(4)[1])


def _not_whole(path: Path) -> None:
    load(path.parent, *build_linear(4))


def _same_step(path: Path) -> None:
    save(path.parent, 1, *build_linear(4))


def _negative_step(path: Path) -> None:
    save(path.parent, -1, *build_linear(4))


def _extra_object(path: Path) -> None:
    save(path.parent, 2, *build_linear(4), {"thing": object()})


def _other_format(path: Path) -> None:
    (path / MARKER).write_text('{"format": 99}')
    load(path, *build_linear(4))


def build_linear(
    size: int, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(size, size, dtype=dtype)
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (_wrong_shape, r"(bias|weight) \(4.*\) torch.float32 in .* must be \(8"),
        (_wrong_dtype, r"torch.float32 in .* must be .* torch.bfloat16"),
        (_wrong_names, r"experts.w1 \(and 3 more\) of the model is not in the checkpoint"),
        (_other_groups, r"optimizer.param_groups \(2\) must hold the same parameters"),
        (_foreign_parameter, r"optimizer parameter \(4, 4\) must be one of the model's"),
        (_not_whole, r"must be a whole checkpoint, with a moecore.json"),
        (_same_step, r"step \(1\) must not be saved already"),
        (_negative_step, r"step \(-1\) must be a whole number >= 0"),
        (_extra_object, r"extra thing \(object\) must be JSON-able or a tensor"),
        (_other_format, r"checkpoint format \(99\), which must be 1"),
    ],
)
def test_one_line_errors(tmp_path: Path, action: Callable[[Path], None], message: str) -> None:
    path = save(tmp_path, 1, *build_linear(4))
    with pytest.raises(ValueError, match=message) as info:
        action(path)
    assert "\n" not in str(info.value)
    assert not list(tmp_path.glob(".step-*"))


def test_optimizer_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    model, optimizer = build_linear(4)
    optimizer.state[model.weight] = {"row": torch.zeros(4)}
    with pytest.raises(NotImplementedError, match="optimizer state row of weight must be a scalar"):
        save(tmp_path, 1, model, optimizer)


def test_unwritable_root_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        save(tmp_path / "file", 1, *build_linear(4))


def test_damaged_tensor_file_is_an_oserror(tmp_path: Path) -> None:
    path = save(tmp_path, 1, *build_linear(4))
    next(path.glob("*.distcp")).unlink()
    with pytest.raises(OSError, match="rank 0 could not read it") as info:
        load(path, *build_linear(4))
    assert "\n" not in str(info.value)
