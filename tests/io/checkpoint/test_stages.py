"""What any pipeline stages save, any other load to the bit, and one process; and the other way.

The oracle is a whole model of one process that takes the same steps: gradients are a function of
a parameter's name, so no pipeline has to run. Each rank cuts what it must hold out of whole
tensors.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.rank_checks import gather_objects
from moecore.io import Saver, load, read_manifest, save
from tests.helpers.errors import error_of
from tests.helpers.grids import asked_for
from tests.helpers.ranks import run_ranks
from tests.parallel.pipeline.stages import (
    TABLE,
    build,
    local,
    plain,
    set_gradients,
    shard_of,
    values_of,
)

LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "data4": ("whole", {}),
    "pp2": ("halves", {}),
    "pp2-ep2": ("turns", {"ep": 2}),
    "pp4": ("quarters", {}),
}
SOURCES = ("one process", *LAYOUTS)
STEPS = 2
State = dict[str, Tensor]


def optimizer_of(model: nn.Module, *, lr: float = 1e-2) -> torch.optim.AdamW:
    """Return one with two groups; a stage may have no parameter of the second."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim == 1]},
    ]
    return torch.optim.AdamW(groups, lr=lr, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    set_gradients(model, step)
    optimizer.step()
    optimizer.zero_grad()
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(values_of(name, buffer.shape, step))


def trained(model: nn.Module) -> torch.optim.AdamW:
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        train(model, optimizer, step)
    return optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    found = dict(model.state_dict(keep_vars=True))
    for name, param in model.named_parameters():
        found |= {f"{slot}/{name}": value for slot, value in optimizer.state[param].items()}
    return found


def differing(model: nn.Module, optimizer: torch.optim.Optimizer, wholes: State) -> list[str]:
    """Return what differs from the shards of whole tensors; each must be there."""
    return [
        name
        for name, tensor in tensors_of(model, optimizer).items()
        if not torch.equal(local(tensor), shard_of(wholes[name].detach(), tensor))
    ]


@cache
def snapshots() -> tuple[State, State]:
    """Return the whole state when it is saved, and after one further step."""
    model = plain()
    optimizer = trained(model)
    before = {name: t.detach().clone() for name, t in tensors_of(model, optimizer).items()}
    train(model, optimizer, STEPS)
    return before, tensors_of(model, optimizer)


def loaded(path: Path, model: nn.Module) -> dict[str, list[str]]:
    """Load into a model with other weights, and take the further step."""
    before, after = snapshots()
    optimizer = optimizer_of(model, lr=7.0)
    extra = load(path, model, optimizer)
    wrong = differing(model, optimizer, before)
    train(model, optimizer, STEPS)
    assert extra["note"] == "kept" and torch.equal(extra["numbers"], torch.arange(3.0))
    assert len(optimizer.state) == len(list(model.parameters()))
    return {"wrong": wrong, "stepped": differing(model, optimizer, after)}


def errors_of(action: Callable[[], Any]) -> list[str]:
    return gather_objects(error_of(action))


def refusals(root: Path) -> dict[str, list[str]]:
    model = build("halves")
    optimizer, second = trained(model), dist.get_rank() >= 2

    def of(name: str) -> list[str]:
        return errors_of(lambda: load(root / name / "step-000002", model))

    def saved(**options: Any) -> list[str]:
        return errors_of(lambda: save(root / "refused", 3, model, optimizer, **options))

    found = {name: of(name) for name in ("more", "less")}
    found["extra"] = saved(extra={"stage": int(second)})
    if second:
        optimizer.param_groups[0]["lr"] = 0.5
    found["lr"] = saved()
    optimizer.param_groups[0]["lr"] = 1e-2
    if second:
        optimizer.state[model.model.embed_tokens.weight]["step"] += 1
    found["copies"] = saved()
    if second:
        optimizer.add_param_group({"params": []})
    found["groups"] = errors_of(lambda: load(root / "pp2" / "step-000002", model, optimizer))
    found["nothing is left"] = gather_objects((root / "refused").exists())
    return found


def worker(
    rank: int, device: torch.device, folder: str, pairs: list[tuple[str, str]]
) -> dict[Any, Any]:
    root = Path(folder)
    found: dict[Any, Any] = {}
    for name, (layout, degrees) in LAYOUTS.items():
        model = build(layout, **degrees)
        optimizer = trained(model)
        extra = {"note": "kept", "numbers": torch.arange(3.0)}
        with Saver(root / name, model, optimizer) as saver:
            saver.save(2, extra, wait=name != "pp4")  # that one in the background
            saver.close()
    dist.barrier()
    for source, target in pairs:
        layout, degrees = LAYOUTS[target]
        model = build(layout, seed=9, **degrees)
        result = loaded(root / source / "step-000002", model)
        found[source, target] = {
            key: sorted(set().union(*gather_objects(wrong))) for key, wrong in result.items()
        }
    found["refusals"] = refusals(root)
    return found


def save_whole(root: Path, name: str, model: nn.Module) -> None:
    extra = {"note": "kept", "numbers": torch.arange(3.0)}
    save(root / name, 2, model, trained(model), extra)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stages")
    save_whole(root, "one process", plain())
    more = plain()
    more.more = nn.Parameter(torch.ones(3))
    save_whole(root, "more", more)
    less = plain()
    less.set_submodule("model.norm", nn.Identity())
    save_whole(root, "less", less)
    return root


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, root: Path) -> dict[Any, Any]:
    pairs = asked_for(request, "source", "target")
    return run_ranks(4, worker, str(root), pairs)  # type: ignore[no-any-return]


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", SOURCES)
def test_loads_what_others_saved(results: dict[Any, Any], source: str, target: str) -> None:
    assert results[source, target] == {"wrong": [], "stepped": []}


@pytest.mark.parametrize("source", LAYOUTS)
def test_one_process_loads_each_tensor_once(results: Any, root: Path, source: str) -> None:
    result = loaded(root / source / "step-000002", plain(seed=9))
    assert result == {"wrong": [], "stepped": []}
    found = read_manifest(root / source / "step-000002")
    wanted = read_manifest(root / "one process" / "step-000002")

    def shapes(manifest: Any) -> dict[str, Any]:
        kept = {n: t for n, t in manifest.tensors.items() if not n.startswith("rng.")}
        return {name: (tensor.shape, tensor.dtype) for name, tensor in kept.items()}

    assert shapes(found) == shapes(wanted)
    for ours, theirs in zip(found.facts.optimizer, wanted.facts.optimizer, strict=True):
        assert sorted(ours.pop("params")) == sorted(theirs.pop("params")) and ours == theirs


@pytest.mark.parametrize(
    ("source", "writers"), [("pp2", {0, 1}), ("pp2-ep2", {0, 1}), ("pp4", {0})]
)
def test_the_first_stage_writes_copies(results, root, source, writers):
    tensors = read_manifest(root / source / "step-000002").tensors
    for name in (f"model.{TABLE}", f"optimizer.exp_avg.{TABLE}"):
        files = {chunk.file for chunk in tensors[name].chunks}
        assert files == {f"rank-{rank:05d}.safetensors" for rank in writers}
    files = {chunk.file for chunk in tensors[f"optimizer.step.{TABLE}"].chunks}
    assert files <= {f"rank-{rank:05d}.safetensors" for rank in writers}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("more", "more of the checkpoint is not in the model"),
        ("less", "model.norm.weight of the model is not in the checkpoint"),
        ("extra", "extra stage of rank 2 must equal that of rank 0"),
        ("lr", r"param_groups[0]['lr'] of rank 2 must equal that of rank 0"),
        ("copies", "optimizer.step.model.embed_tokens.weight of rank 2 must equal that of rank 0"),
        ("groups", "optimizer.param_groups (2) must be as many on every pipeline stage (3)"),
    ],
)
def test_refuses_on_every_rank(results: dict[Any, Any], case: str, message: str) -> None:
    errors = results["refusals"][case]
    assert all(message in error and "\n" not in error for error in errors), errors
    assert results["refusals"]["nothing is left"] == [False] * 4
