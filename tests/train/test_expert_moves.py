"""Experts that change ranks during a run: ranks are even, and the run is that without moves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from moecore import (
    BalanceConfig,
    CloneOptions,
    DispatchOptions,
    MoELayer,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
    place_experts,
)
from moecore.io import (
    Saver,
    export_hf,
    latest,
    load,
    load_adapters,
    load_hf,
    merge_adapters,
    save,
    save_adapters,
    stream_weights,
)
from moecore.models import Decoder
from moecore.recipes import train as recipe
from moecore.train import AdamW, Muon, assign_matrices, move_experts
from moecore.train.expert_moves import count_moved_bytes
from tests.families.transformers.lora_cases import adapted_model, batches
from tests.helpers.ranks import ranks_fixture
from tests.io.checkpoint.test_optimizers import differing, state_of
from tests.parallel.small_decoder import small_decoder
from tests.recipes.launched import launched

pytestmark = pytest.mark.slow

WORLD = 4
RUN = (
    "--preset tiny-qwen3 --tokens random --num-layers 1 --batch-size 2 --seq-len 16 --steps 4 "
    "--sample-every 0 --checkpoint-every 4"
)
BALANCE = BalanceConfig(bias_update_rate=0.001, global_batch_coef=0.01)
MOE = dict(expert_bias=True, score_function="sigmoid", balance=BALANCE)
# Degrees, number of experts, optimizer, dispatcher. Of 6 experts an edp rank has parts of all.
CASES: dict[str, tuple[dict[str, int], int, str, str]] = {
    "ep=4": (dict(ep=4), 8, "AdamW", "alltoall"),
    "ep=2, edp_shard=2": (dict(ep=2), 8, "torch", "alltoall"),
    "ep=2, edp_shard=2, parts": (dict(ep=2), 6, "AdamW", "alltoall"),
    "ep=2, edp_replicate=2": (dict(ep=2, dp_replicate=2), 8, "AdamW", "allgather"),
    "bf16": (dict(ep=2), 8, "masters", "alltoall"),
    "Muon": (dict(ep=2), 8, "Muon", "alltoall"),
}


def make_optimizers(model: Any, kind: str) -> Any:
    if kind == "torch":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    if kind == "Muon":
        matrices = assign_matrices(model)
        muon = Muon(matrices, lr=1e-3, beta2=0.9, ns_dtype=torch.float32)
        return [muon, AdamW(matrices.adamw_params, lr=1e-3)]
    is_bf16 = kind == "masters"
    moment_dtype = torch.float8_e4m3fn if is_bf16 else torch.float32
    params, options = model.parameters(), dict(lr=1e-3, moment_dtype=moment_dtype)
    return AdamW(params, **options, master_remainder=is_bf16)


def build(
    experts: int, kind: str, degrees: dict[str, int] | None, dispatcher: str = "alltoall"
) -> tuple[Any, Any]:
    """Return a decoder whose router prefers the first experts, and its optimizers."""
    torch.manual_seed(0)
    model: Any = Decoder(small_decoder(32, 128, experts=experts, moe=MOE))
    for layer in (m for m in model.modules() if isinstance(m, MoELayer)):
        layer.router.selection_bias.copy_(0.1 * torch.arange(experts).flip(0))
    if kind == "masters":
        model.to(torch.bfloat16)
    if degrees is not None:
        parallelize_moe(model, build_meshes(ParallelConfig(**degrees), "cpu"), dispatch=dispatcher)
    return model, make_optimizers(model, kind)


def train(model: Any, optimizers: Any, rank: int, steps: range) -> list[Any]:
    step, results = TrainStep(model, optimizers, max_norm=1.0), []
    for number in steps:
        tokens = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(number))
        tokens = (tokens + rank) % 61
        loss = step.forward_backward([dict(tokens_BT=tokens[:, :-1], labels_BT=tokens[:, 1:])])
        results.append((float(loss), step.finish()))
    return results


def read(path: Path, experts: int, kind: str) -> dict[str, Any]:
    """Return the tensors of a checkpoint, by a model of one process."""
    model, optimizers = build(experts, kind, None)
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    load(path, model, optimizers)
    return state_of(model, optimizers)


def sizes(ops: list[dist.P2POp]) -> list[int]:
    return [op.tensor.nbytes for op in ops if op.op is dist.irecv]


def numbers(results: list[Any]) -> list[float]:
    return [x for loss, done in results for x in (loss, *done.to_dict().values())]


def case_of(rank: int, folder: str, case: str) -> dict[str, Any]:
    degrees, experts, kind, dispatcher = CASES[case]
    root = Path(folder) / case
    model, optimizers = build(experts, kind, degrees, dispatcher)
    *_, (_, done) = train(model, optimizers, rank, range(2))
    loads, ep = done.metrics.tokens_per_expert, degrees["ep"]
    before = save(root / "before", 2, model, optimizers)
    expected = numbers(train(model, optimizers, rank, range(2, 5)))
    end = save(root / "end", 5, model, optimizers)

    model, optimizers = build(experts, kind, degrees, dispatcher)
    load(before, model, optimizers)
    received = list[int]()
    with pytest.MonkeyPatch.context() as patches:
        send = dist.batch_isend_irecv
        patches.setattr(
            dist, "batch_isend_irecv", lambda ops: received.extend(sizes(ops)) or send(ops)
        )
        orders = move_experts(model, optimizers, loads)
    planned_bytes = count_moved_bytes(model, optimizers, {}, orders)
    shares = {}
    for name, loads_E in loads.items():
        busiest = [float(x.view(ep, -1).sum(1).max()) for x in (loads_E, loads_E[orders[name]])]
        shares[name] = [x / float(loads_E.sum()) for x in busiest]
        assert orders[name].equal(place_experts(loads_E, num_ranks=ep))
        weight = model.get_submodule(name).experts.w1
        shares[f"{name}.dims"] = {getattr(p, "dim", None) for p in weight.placements}
    after = save(root / "after", 2, model, optimizers)
    load(after, model, optimizers)  # into moved experts
    moves = train(model, optimizers, rank, range(2, 4))
    orders = move_experts(model, optimizers, {name: x.flip(0) for name, x in loads.items()})
    moves += train(model, optimizers, rank, range(4, 5))
    with Saver(root / "saver", model, optimizers) as saver:
        saver.save(5, wait=False)
    states = [read(path, experts, kind) for path in (before, after, end, latest(root / "saver"))]
    move_experts(model, optimizers, None)
    last = {name: x.full_tensor() for name, x in model.state_dict().items() if _is_sharded(x)}
    return {
        "shares": shares,
        "bytes": (planned_bytes, sum(received)),
        "saved before and after": differing(*states[:2]),
        "numbers": (numbers(moves), expected),
        "states": states[2:],
        "undone": [name for name, x in last.items() if not x.equal(states[3][name])],
    }


def adapters_of(rank: int, folder: str) -> dict[str, Any]:
    """LoRA of experts, and a transformers model with a router of its own."""
    root, losses, files = Path(folder), [], []
    for moves in (False, True):
        model = adapted_model("qwen3-moe", {})
        parallelize_moe(model, build_meshes(ParallelConfig(ep=2), "cpu"))
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        step = TrainStep(model, optimizer)
        for number in range(3):
            losses.append(float(step.forward_backward([batches(number)[rank]])))
            loads = step.finish().metrics.tokens_per_expert
            if moves and number == 0:
                orders = move_experts(model, optimizer, loads)
                assert any(x.tolist() != list(range(8)) for x in orders.values())
                with pytest.raises(NotImplementedError, match="must be in the model's order"):
                    stream_weights(model)
        path = root / str(moves)
        save_adapters(model, path / "adapters")
        load_adapters(model, path / "adapters")
        merge_adapters(model)
        export_hf(model, path / "merged")
        load_hf(path / "merged", model)
        export_hf(model, path / "again")
        for part in ("adapters/adapter_model", "merged/model", "again/model"):
            files.append(load_file(path / f"{part}.safetensors"))
    return {"losses": losses, "files": files}


def _is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def refusals_of(rank: int) -> dict[str, str]:
    errors = {}

    def note(name: str, call: Callable[..., object], *args: Any) -> None:
        try:
            call(*args)
        except (ValueError, NotImplementedError) as error:
            errors[name] = str(error)

    model, optimizer = build(8, "AdamW", dict(ep=2))
    loads = {name: torch.arange(8) for name, m in model.named_modules() if isinstance(m, MoELayer)}
    note("optimizers", move_experts, model, None, loads)
    note("names", move_experts, model, optimizer, {"x": torch.ones(8)})
    note("shapes", move_experts, model, optimizer, dict.fromkeys(loads, torch.ones(7)))
    note("ranks", move_experts, model, optimizer, {n: x.roll(rank) for n, x in loads.items()})
    assert model.state_dict()  # nothing has moved
    move_experts(model, optimizer, loads)
    note("state_dict", model.state_dict)
    note("init_weights", model.init_weights)
    for name, degrees, options in (
        ("ep", dict(), dict()),
        ("etp", dict(ep=2, etp=2), dict()),
        ("pp", dict(ep=2, pp=2), dict(pipeline=PipelineConfig())),
        ("clones", dict(ep=2), dict(dispatch=DispatchOptions(clones=CloneOptions()))),
    ):
        torch.manual_seed(0)
        other: Any = Decoder(small_decoder(32, 128, experts=8, moe=MOE))
        parallelize_moe(other, build_meshes(ParallelConfig(**degrees), "cpu"), **options)
        note(name, move_experts, other, AdamW(other.parameters()), loads)
    return errors


def worker(rank: int, _: torch.device, folder: str, cases: list[str]) -> dict[str, Any]:
    return {case: case_of(rank, folder, case) for case in cases} | {
        "refusals": refusals_of(rank),
        "adapters": adapters_of(rank, folder),
    }


outcomes = ranks_fixture(WORLD, worker, "case", in_folder=True)


@pytest.mark.parametrize("case", CASES)
def test_the_run_is_that_without_moves(case: str, outcomes: dict[str, Any]) -> None:
    outcome = outcomes[case]
    layers = {n: x for n, x in outcome["shares"].items() if not n.endswith(".dims")}
    assert all(after < before for before, after in layers.values())
    planned_bytes, received = outcome["bytes"]
    assert planned_bytes == received > 0
    assert outcome["saved before and after"] == outcome["undone"] == []
    tolerance = dict(rtol=1e-2, atol=1e-2) if case == "bf16" else dict(rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*map(torch.tensor, outcome["numbers"]), **tolerance)
    expected, actual = outcome["states"]
    for name, value in expected.items():
        if isinstance(value, Tensor) and case != "bf16":
            torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_adapters_and_exports_keep_their_order(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["adapters"]
    losses = torch.tensor(outcome["losses"]).view(2, 3)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    stay, moved = outcome["files"][:3], outcome["files"][3:]
    for expected, actual in zip(stay, moved, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert all(x.equal(moved[1][name]) for name, x in moved[2].items())


def test_the_option_of_the_commands(tmp_path: Path) -> None:
    words = RUN.split()
    losses, orders = [], [["--ep", "2"], ["--ep", "2", "--move-experts-every", "1"]]
    for i, more in enumerate(orders):
        run_dir = tmp_path / str(i)
        words_of_run = [*words, *more, "--run-dir", str(run_dir)]
        code, text = launched(recipe.run_rank, "train.py", words_of_run, tmp_path / "text")
        assert code == 0, text
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    words_of_run = [*words, "--ep", "1", "--move-experts-every", "1", "--run-dir", str(tmp_path)]
    code, text = launched(recipe.run_rank, "train.py", words_of_run, tmp_path / "error")
    assert code == 2 and "must be parallelized with ep > 1" in text


def test_what_is_refused(outcomes: dict[str, Any]) -> None:
    expected = {
        "optimizers": "must have no gradient and an optimizer to move",
        "names": "loads (x) must be of the model's MoE layers",
        "shapes": "(7,) must be 8 finite numbers",
        "ranks": "must be the same on every rank",
        "state_dict": "must be in the model's order",
        "init_weights": "must be in the model's order",
        "ep": "must be parallelized with ep > 1",
        "etp": "move_experts with etp is not supported",
        "pp": "move_experts with pp is not supported",
        "clones": "move_experts with DispatchOptions.clones is not supported",
    }
    errors = outcomes["refusals"]
    assert errors.keys() == expected.keys()
    for name, text in expected.items():
        assert text in errors[name] and "\n" not in errors[name]
