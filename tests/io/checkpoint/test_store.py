import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from moecore import (
    BalanceConfig,
    CloneOptions,
    FSDPOptions,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.io import latest, load, prune, read_manifest, save, set_latest
from moecore.io.checkpoint.directory import POINTER, find_complete_checkpoints
from moecore.io.checkpoint.drafts import create_draft, publish
from moecore.io.checkpoint.manifest import MANIFEST
from moecore.io.checkpoint.state import split_halves
from moecore.moe.balance import BalanceGroups
from moecore.moe.clones import Cloner
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.layer import LayerLayout
from moecore.moe.placement import ExpertPlacement
from moecore.moe.state import MoEState

CONFIG = MoEConfig(dim=8, hidden_dim=4, num_experts=2, top_k=1, expert_bias=True)


def build() -> tuple[nn.Module, torch.optim.AdamW]:
    layer = MoELayer(CONFIG)
    return layer, torch.optim.AdamW(layer.parameters(), lr=0.5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(6, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved_steps(root: Path, *steps: int) -> tuple[nn.Module, torch.optim.AdamW]:
    model, optimizer = build()
    for step in steps:
        save(root, step, model, optimizer)
    return model, optimizer


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in read_manifest(path).tensors.items()}


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
    assert torch.equal(torch.rand(4), after_save) and extra["epoch"] == 3 and extra["loss"] == 0.1
    assert torch.equal(extra["ids"], torch.arange(3))
    assert other_optimizer.param_groups[0]["lr"] == 0.5
    assert other_optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        for slot, value in optimizer.state[mine].items():
            assert torch.equal(value, other_optimizer.state[theirs][slot]), slot


def test_optimizer_state_is_filled_in_place(tmp_path: Path) -> None:
    """No second state in memory, and a captured graph goes on reading the first."""
    model, optimizer = build()
    train(model, optimizer)
    path = save(tmp_path, 1, model, optimizer)
    train(model, optimizer)
    # The dict holds the tensors too: a new tensor could get the address of a freed one.
    places = {id(v): v for slots in optimizer.state.values() for v in slots.values()}
    weight = model.experts.w1
    optimizer.state[weight]["exp_avg"] = torch.zeros_like(weight, dtype=torch.float64)
    load(path, model, optimizer)
    now = {id(v) for slots in optimizer.state.values() for v in slots.values()}
    assert len(now - places.keys()) == 1
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float32


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
def test_gate_and_up_are_stored_apart(tmp_path, layout, w1, b1):
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


def test_latest_without_a_usable_pointer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert latest(tmp_path / "none") is None
    saved_steps(tmp_path, 1, 2, 3)
    (tmp_path / "step-000003" / MANIFEST).unlink()  # not whole
    (tmp_path / "step-9").mkdir()  # not one of ours
    assert latest(tmp_path) == tmp_path / "step-000002"
    assert "latest names step-000003, which is gone: taking step-000002, the" in caplog.text
    caplog.clear()
    (tmp_path / POINTER).unlink()
    assert latest(tmp_path) == tmp_path / "step-000002" and not caplog.text
    set_latest(tmp_path / "step-000001")
    assert latest(tmp_path) == tmp_path / "step-000001"
    for name in ("step-000003", "step-9", "none"):
        with pytest.raises(ValueError, match=f"{name}.* must be a whole checkpoint"):
            set_latest(tmp_path / name)


def test_rolled_back_run_replaces_later_steps(tmp_path: Path) -> None:
    model, optimizer = build()
    for step in (1, 2, 3):
        save(tmp_path, step, model, optimizer, {"run": "first"})
    set_latest(tmp_path / "step-000001")
    save(tmp_path, 2, model, optimizer, {"run": "second"}, keep=1)
    path = latest(tmp_path)
    assert path == tmp_path / "step-000002" and load(path, model, optimizer) == {"run": "second"}


def test_only_a_rolled_back_run_replaces_a_step(tmp_path: Path) -> None:
    model, optimizer = saved_steps(tmp_path, 1, 2, 3)
    with pytest.raises(ValueError, match=r"step \(3\) must not be saved already"):
        save(tmp_path, 3, model, optimizer)
    draft = create_draft(tmp_path, 4)
    other = tmp_path / "step-000004"
    shutil.copytree(tmp_path / "step-000003", other)  # by another process, meanwhile
    manifest = read_manifest(other)
    manifest = replace(manifest, facts=replace(manifest.facts, step=4))
    set_latest(other)
    with pytest.raises(ValueError, match=r"step \(4\) must not be saved already"):
        publish(draft, manifest, keep=0)
    assert latest(tmp_path) == other


def test_prune_never_removes_the_newest(tmp_path: Path) -> None:
    saved_steps(tmp_path, 1, 2, 3, 4)
    (tmp_path / POINTER).unlink()
    assert [path.name for path in prune(tmp_path, 3)] == ["step-000001"]
    set_latest(tmp_path / "step-000002")
    assert [path.name for path in prune(tmp_path, 1)] == ["step-000003", "step-000004"]
    assert latest(tmp_path) == tmp_path / "step-000002" and prune(tmp_path, 1) == []
    for keep in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match=r"keep \(.*\) must be a whole number >= 1"):
            prune(tmp_path, keep)  # type: ignore[arg-type]
    (tmp_path / POINTER).write_text("step-000004 or so")
    with pytest.raises(ValueError, match=r"latest\) must be '<checkpoint> <sha256"):
        prune(tmp_path, 1)
    assert len(find_complete_checkpoints(tmp_path)) == 1


@pytest.mark.parametrize("by_save", [False, True])
@pytest.mark.parametrize("alias", ["step-0000003", "step-000000003", "STEP-000003", "step-3"])
def test_a_second_name_of_a_step_is_no_checkpoint_of_the_run(tmp_path, alias, by_save):
    model, optimizer = saved_steps(tmp_path, 1, 2, 3)
    names = [tmp_path / "step-000003", tmp_path / alias]
    shutil.copytree(*names)
    names[0].rename(tmp_path / "moved")  # so that the order in the directory is another one
    (tmp_path / "moved").rename(names[0])
    kept = [names[0]]
    if by_save:
        kept = [save(tmp_path, 4, model, optimizer, keep=1)]
    else:
        assert prune(f"{tmp_path}/", 1) == [tmp_path / f"step-00000{i}" for i in (1, 2)]
    assert latest(tmp_path) == kept[0] and find_complete_checkpoints(tmp_path) == kept
    assert read_manifest(kept[0]) and names[1].is_dir()
    with pytest.raises(ValueError, match=rf"{alias}\) must be a whole checkpoint"):
        set_latest(names[1])
    (tmp_path / POINTER).write_text(f"{alias} {'0' * 64}\n")
    with pytest.raises(ValueError, match=r"latest\) must be '<checkpoint> <sha256"):
        prune(tmp_path, 1)
    (tmp_path / POINTER).unlink()
    assert latest(tmp_path) == kept[0]


@pytest.mark.parametrize("keep", [1, 2])
def test_prune_leaves_what_a_link_that_stays_leads_to(tmp_path: Path, keep: int) -> None:
    saved_steps(tmp_path, 1, 2, 3, 4)
    for link, target in ((3, 1), (4, 3)):  # 4 -> 3 -> 1
        shutil.rmtree(tmp_path / f"step-00000{link}")
        (tmp_path / f"step-00000{link}").symlink_to(f"step-00000{target}")
    set_latest(tmp_path / "step-000004")
    assert prune(tmp_path, keep) == [tmp_path / "step-000002"]
    assert latest(tmp_path) == tmp_path / "step-000004"


@pytest.mark.parametrize("by_save", [False, True])
@pytest.mark.parametrize("why", ["directory", "files", "some files"])
def test_a_checkpoint_that_cannot_be_removed_stays(tmp_path, monkeypatch, caplog, why, by_save):
    """As of one whose files another user owns; rights do not bind root, so they are replaced."""
    model, optimizer = saved_steps(tmp_path, 1, 2, 3)
    first = tmp_path / "step-000001"
    inode = first.stat().st_ino
    access, unlink = os.access, os.unlink

    def no_access(path: Any, mode: int) -> bool:
        return Path(path).name != first.name and access(path, mode)

    def no_unlink(path: Any, *, dir_fd: int | None = None) -> None:
        owned = dir_fd is not None and os.fstat(dir_fd).st_ino == inode
        if owned and not (why == "some files" and str(path) == MANIFEST):
            raise PermissionError(1, "Operation not permitted", path)
        unlink(path, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        if why == "directory":
            patch.setattr(os, "access", no_access)
        else:
            patch.setattr(os, "unlink", no_unlink)
        if by_save:
            save(tmp_path, 4, model, optimizer, keep=1)
            text = caplog.text
        else:
            with pytest.raises(OSError, match="could not be removed") as info:
                prune(tmp_path, 1)
            text = str(info.value)
            assert "\n" not in text
    assert f"path ({first}) could not be removed: " in text
    assert f"(1 old checkpoints could not be removed, {1 + by_save} were removed)" in text
    if why != "some files":
        assert read_manifest(first) and first in find_complete_checkpoints(tmp_path)
        assert [path.name for path in prune(tmp_path, 1)] == [first.name]
    assert len(find_complete_checkpoints(tmp_path)) == 1


def test_steps_of_a_rolled_back_run_are_removed_first(tmp_path: Path) -> None:
    model, optimizer = saved_steps(tmp_path, 100, 200, 300, 400)
    set_latest(tmp_path / "step-000200")
    save(tmp_path, 210, model, optimizer, keep=4)
    assert steps_of(tmp_path) == [100, 200, 210, 400]
    save(tmp_path, 220, model, optimizer, keep=3)
    assert steps_of(tmp_path) == [200, 210, 220]


def steps_of(root: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in find_complete_checkpoints(root)]


def test_damaged_newest_does_not_stop_the_next_save(tmp_path, caplog):
    model, optimizer = build()
    path = save(tmp_path, 1, model, optimizer)
    (path / MANIFEST).write_text("{}")
    with pytest.raises(ValueError, match="one of both is damaged"):
        latest(tmp_path)
    with pytest.raises(ValueError, match=r"step \(1\) must not be saved already"):
        save(tmp_path, 1, model, optimizer)  # it would remove what may be the only one
    assert save(tmp_path, 2, model, optimizer) == latest(tmp_path)
    (tmp_path / POINTER).write_text("damaged")
    assert save(tmp_path, 3, model, optimizer) == latest(tmp_path)
    assert "must be '<checkpoint> <sha256 of its manifest>' but is 'damaged'" in caplog.text


def test_no_save_moves_latest_back(tmp_path: Path) -> None:
    model, optimizer = saved_steps(tmp_path, 5, 9)
    before = sorted(os.listdir(tmp_path))
    for step in (0, 4, 7):
        message = rf"step \({step}\) must be > 9, the latest saved under .*: call set_latest first"
        with pytest.raises(ValueError, match=message):
            save(tmp_path, step, model, optimizer)
    (tmp_path / POINTER).unlink()  # then the highest one is the latest
    with pytest.raises(ValueError, match=r"step \(7\) must be > 9"):
        save(tmp_path, 7, model, optimizer)
    assert sorted(os.listdir(tmp_path)) == [name for name in before if name != POINTER]
    set_latest(tmp_path / "step-000005")
    assert save(tmp_path, 7, model, optimizer) == latest(tmp_path)
    with pytest.raises(ValueError, match=r"step \(6\) must be > 7"):
        save(tmp_path, 6, model, optimizer)


def test_files_are_safetensors_and_say_what_is_in_them(tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer)
    facts = {"name": "tiny", "dims": [8, 4]}
    path = save(tmp_path, 3, model, optimizer, {"ids": torch.arange(3)}, config=facts)
    assert sorted(os.listdir(path)) == ["moecore.json", "rank-00000.safetensors"]
    tensors = load_file(path / "rank-00000.safetensors")
    assert torch.equal(tensors["extra.ids"], torch.arange(3))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensors[f"model.{name}"], tensor)
    with safe_open(path / "rank-00000.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    manifest = read_manifest(path)
    assert manifest.facts.config == facts and manifest.facts.step == 3
    assert manifest.facts.world_size == 1 and manifest.facts.meshes == []
    assert manifest.facts.versions["torch"] == torch.__version__
    assert manifest.num_bytes == (path / "rank-00000.safetensors").stat().st_size
    dataclass_path = save(tmp_path, 4, model, optimizer, config=CONFIG)
    config = read_manifest(dataclass_path).facts.config
    assert config is not None and config["num_experts"] == CONFIG.num_experts


def test_empty_and_odd_tensors(tmp_path: Path) -> None:
    odd: dict[str, Tensor] = {
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False, True]),
        "half": torch.randn(5, dtype=torch.float16),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "strided": torch.randn(6, 5).t(),
        "float8": torch.randn(9).to(torch.float8_e4m3fn),
    }
    path = save(tmp_path, 1, *build_linear(3), odd)
    found = load(path, *build_linear(3))
    assert found.keys() == odd.keys()
    for name, tensor in odd.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].float(), tensor.float()), name
    with pytest.raises(NotImplementedError, match=r"extra.z \(torch.complex64\) must have a dtype"):
        save(tmp_path, 2, *build_linear(3), {"z": torch.zeros(2, dtype=torch.complex64)})


def test_model_alone_leaves_generators_and_needs_no_optimizer(tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer)
    path = save(tmp_path, 1, model, optimizer, {"note": "hi"})
    other, _ = build()
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    assert load(path, other) == {"note": "hi"} and torch.equal(torch.rand(3), expected)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    bare = save(tmp_path, 2, model, None)
    assert not [name for name in read_manifest(bare).tensors if name.startswith("optimizer.")]
    load(bare, other)
    with pytest.raises(ValueError, match="1 differ: optimizer state is not in the checkpoint"):
        load(bare, *build())


def test_rotary_frequencies_are_worked_out_anew(tmp_path: Path) -> None:
    """No checkpoint holds them and `to_empty` leaves them undefined."""
    hf_models = pytest.importorskip("tests.families.transformers.hf_models")
    model = hf_models.random_model("mixtral").eval()
    path = save(tmp_path, 1, model, None)
    with torch.device("meta"):
        other = type(model)(model.config)
    with torch.no_grad():
        for tensor in [*other.to_empty(device="cpu").parameters(), *other.buffers()]:
            tensor.fill_(float("nan"))
    load(path, other)
    ids = torch.arange(12)[None]
    assert torch.equal(other.eval()(ids).logits, model(ids).logits)

    class Odd(type(model.model.rotary_emb)):  # type: ignore[misc]
        def __init__(self, config: object, extra: int) -> None:
            super().__init__(config)

    Odd.__module__ = "transformers.models.odd"
    other.model.rotary_emb = Odd(model.config, 1)
    with pytest.warns(UserWarning, match=r"model.rotary_emb \(Odd\) has buffers .* left as it was"):
        load(path, other)
    assert torch.equal(other(ids).logits, model(ids).logits)


def test_a_model_without_storage_is_refused(tmp_path: Path, no_group_left: None) -> None:
    """Under FSDP2 a meta tensor takes what is copied to it without a word."""

    def sharded() -> nn.Module:
        model = nn.Sequential(MoELayer(CONFIG, device="meta"))
        return parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"))

    message = r"router.weight \(meta\) must have storage to be saved or loaded: call to_empty first"
    with pytest.raises(ValueError, match=message):
        save(tmp_path, 1, sharded(), None)
    assert not list(tmp_path.iterdir())
    path = save(tmp_path, 1, sharded().to_empty(device="cpu"), None)
    with pytest.raises(ValueError, match=message):
        load(path, sharded())


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 50),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 3], gamma=0.5),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.MultiStepLR(o, [3])], milestones=[2]
    ),
    "cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_scheduler_goes_on(tmp_path: Path, kind: str, tensor_lr: bool) -> None:
    """A captured graph reads a tensor of the rate; the scheduler's own are numbers in the file."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer, LRScheduler]:
        model, _ = build_linear(2)
        rate = torch.tensor(1e-3, dtype=torch.float64) if tensor_lr else 1e-3
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
        return model, optimizer, SCHEDULERS[kind](optimizer)

    def steps(scheduler: LRScheduler, n: int) -> list[float]:
        rates = []
        for _ in range(n):
            scheduler.optimizer.step()
            scheduler.step(*([1.0] if kind == "plateau" else []))
            rates.append(float(scheduler.optimizer.param_groups[0]["lr"]))
        return rates

    model, optimizer, scheduler = made()
    steps(scheduler, 2)
    path = save(tmp_path, 2, model, optimizer, scheduler=scheduler)
    straight = steps(scheduler, 4)
    model, optimizer, scheduler = made()
    rate = optimizer.param_groups[0]["lr"]
    load(path, model, optimizer, scheduler=scheduler)
    assert not tensor_lr or optimizer.param_groups[0]["lr"] is rate
    assert steps(scheduler, 4) == straight
    other = lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(ValueError, match=r"scheduler \(ExponentialLR\) must have the state"):
        load(path, model, optimizer, scheduler=other)
    plain = save(tmp_path, 3, model, optimizer)
    with pytest.raises(ValueError, match="scheduler state is not in the checkpoint"):
        load(plain, model, optimizer, scheduler=scheduler)


@pytest.mark.parametrize("with_backward", [True, False])
def test_load_drops_a_half_done_step(tmp_path, no_group_left, with_backward):
    """Gradients that wait for the last micro-batch, counts, and casts of the weights of before."""
    options = FSDPOptions(param_dtype=torch.bfloat16, dense_strategy="optim")
    config = replace(CONFIG, hidden_dim=8, balance=BalanceConfig(bias_update_rate=1.0))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))

    def sharded() -> tuple[nn.Module, torch.optim.AdamW]:
        model = nn.Sequential(MoELayer(config))
        parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), fsdp=options)
        return model, torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        owner = TrainStep(model, optimizer, num_micro_batches=2)
        for _ in range(2):
            with owner.micro_batch():
                model(x).square().mean().backward()
        owner.finish()

    model, optimizer = sharded()
    step(model, optimizer)
    path = save(tmp_path, 1, model, optimizer)
    step(model, optimizer)
    with TrainStep(model, num_micro_batches=2).micro_batch():
        y = model(-x)
        if with_backward:
            y.sum().backward()
    load(path, model, optimizer)
    other, other_optimizer = sharded()
    load(path, other, other_optimizer)
    step(model, optimizer)
    step(other, other_optimizer)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_load_drops_a_plan_of_clones_which_is_not_saved(tmp_path, no_group_left):
    model, optimizer = build()
    plain = save(tmp_path, 1, model, optimizer)
    group: Any = None
    place = ExpertPlacement(group=group, num_experts=2, ep=2, etp=1, num_clones=1)
    model.cloner = Cloner(place, group, CloneOptions(per_rank=1, refresh=5))
    model.cloner.plan.update_from_loads(torch.tensor([9, 3]), is_skipped=False)
    plan = model.cloner.plan
    assert plan is not None and plan.experts == [-1, 0]
    path = save(tmp_path, 2, model, optimizer)
    assert stored_shapes(path) == stored_shapes(plain) and plan.experts == [-1, 0]
    load(path, model, optimizer)
    assert plan.experts == [-1, -1]


def test_unfinished_step_is_refused(tmp_path: Path) -> None:
    balance = BalanceConfig(bias_update_rate=1e-3)
    layer = MoELayer(replace(CONFIG, balance=balance))
    model = nn.Sequential(layer)
    model.state = MoEState({"0": layer}, BalanceGroups())  # as parallelize_moe leaves it
    model(torch.randn(6, 8)).sum().backward()
    with pytest.raises(ValueError, match=r"0.tracker.num_micro_batches \(1\) must be 0 in a save"):
        save(tmp_path, 1, model, None)
    model.state.finish_step()
    save(tmp_path, 1, model, None)


def test_one_line_is_logged_and_progress_told(tmp_path, caplog):
    caplog.set_level("INFO", "moecore.io")
    path = save(tmp_path, 1, *build_linear(4))
    seen: list[tuple[int, int]] = []
    load(path, *build_linear(4), progress=lambda done, total: seen.append((done, total)))
    lines = [r.message for r in caplog.records if r.name == "moecore.io"]
    figures = r"0\.\d+ GB of rank 0 in \d+\.\d+ s, \d+\.\d+ GB/s"
    assert len(lines) == 2 and re.fullmatch(rf"saved .*step-000001: {figures}", lines[0])
    assert re.fullmatch(rf"loaded .*step-000001, verify=full: {figures}", lines[1])
    assert seen == sorted(seen)
    hashed = (path / "rank-00000.safetensors").stat().st_size
    assert seen[-1][0] == seen[-1][1] > hashed  # what was hashed, and what was read


def build_linear(size, dtype=torch.float32):
    model = nn.Linear(size, size, dtype=dtype)
    return model, torch.optim.AdamW(model.parameters())


Action = Callable[[Path], object]


def saves(extra: Any = None, step: int = 2, **options: Any) -> Action:
    return lambda path: save(path.parent, step, *build_linear(4), extra, **options)


def loads(size: int = 4, dtype: torch.dtype = torch.float32, **options: Any) -> Action:
    return lambda path: load(path, *build_linear(size, dtype), **options)


def with_optimizer(optimizer_of: Callable[[Any, Any], Any], *, is_load: bool = True) -> Action:
    """Load or save with what is made of a model and its optimizer."""

    def run(path: Path) -> None:
        model, optimizer = build_linear(4)
        other = optimizer_of(model, optimizer)
        if is_load:
            load(path, model, other, strict=False)
        else:
            save(path.parent, 2, model, other)

    return run


def _two_groups(model: Any, _: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [p]} for p in model.parameters()])


def _state_in_two(model: Any, _: object) -> list[torch.optim.Optimizer]:
    one, other = torch.optim.AdamW([model.weight]), torch.optim.AdamW([model.bias])
    one.state[model.bias] = other.state[model.bias] = {"step": torch.tensor(1.0)}
    return [one, other]


def _other_format(path: Path) -> None:
    (path / MANIFEST).write_text('{"format": 99}')
    loads()(path)


ERRORS: dict[str, Action] = {
    r"2 differ: bias \(4,\) must be \(8,\) as in the model; weight \(4, 4\)": loads(8),
    r"2 differ: bias torch.float32 must be torch.bfloat16 as in the model, or": loads(
        dtype=torch.bfloat16
    ),
    r"experts.w1 of the model is not in the checkpoint; .*bias of the checkpoin": lambda path: load(
        path, *build()
    ),
    r"optimizer.param_groups \(2\) hold other parameters": lambda path: load(
        path, model := build_linear(4)[0], _two_groups(model, None)
    ),
    r"optimizer parameter \(4, 4\) must be one of the model's": with_optimizer(
        lambda *_: build_linear(4)[1]
    ),
    r"bias must belong to one optimizer, but optimizer\[0\] and opt": with_optimizer(
        lambda model, optimizer: [optimizer, torch.optim.SGD([model.bias])], is_load=False
    ),
    r"weight must belong to one optimizer, but optimizer\[0\]": with_optimizer(
        lambda _, optimizer: [optimizer, optimizer]
    ),
    "bias must have state in one optimizer, but two have some: remove it": with_optimizer(
        _state_in_two, is_load=False
    ),
    r"optimizer \(\{.*\) must be an Optimizer or a list, each an Optimizer": with_optimizer(
        lambda _, optimizer: {"dense": optimizer}
    ),
    r"optimizer \(\[\]\) must be one of torch's, or a list of several: pass": with_optimizer(
        lambda *_: []
    ),
    r"optimizer \(\[.* must be an Optimizer or a list, each an Opt": with_optimizer(
        lambda _, optimizer: [optimizer, None], is_load=False
    ),
    r"scheduler \(\[\]\) must hold a scheduler: pass None where there is none": saves(scheduler=[]),
    "must be a whole checkpoint, with a moecore.json": lambda path: loads()(path.parent),
    r"step \(-1\) must be a whole number >= 0": saves(step=-1),
    r"step \(1000000000000000000\) must be a whole number >= 0 and < 10{18}: ": saves(step=10**18),
    r"extra thing \(object\) must be JSON-able or a tensor": saves({"thing": object()}),
    r"extra counts \(dict\) must be JSON-able or a tensor": saves({"counts": {1: 2, "a": 3}}),
    r"extra counts \(dict\) must be JSON-able or a tensor: JSON has lists for": saves(
        {"counts": {"a": {1: 2}}}
    ),
    r"extra place \(list\) must be JSON-able or a tensor: JSON has lists for tuples": saves(
        {"place": [(1, 2)]}
    ),
    r"format \(99\) must be 3, or that of another moecore": _other_format,
    r"verify \('no'\) must be one of .full., .sizes.": loads(verify="no"),
    r"config \(int\) must be a mapping or a dataclass instance": saves(config=3),
}


@pytest.mark.parametrize("message", ERRORS)
def test_one_line_errors(tmp_path: Path, message: str) -> None:
    path = save(tmp_path, 1, *build_linear(4))
    with pytest.raises(ValueError, match=message) as info:
        ERRORS[message](path)
    assert "\n" not in str(info.value) and not list(tmp_path.glob(".step-*"))


def test_optimizer_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    model, optimizer = build_linear(4)
    optimizer.state[model.weight] = {"row": torch.zeros(4)}
    with pytest.raises(NotImplementedError, match="optimizer state row of weight must be a scalar"):
        save(tmp_path, 1, model, optimizer)
