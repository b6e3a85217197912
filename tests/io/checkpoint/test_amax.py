"""Histories of delayed scaling: a resume on the same ranks has the same bits, others the same past.

Without histories the first step after a load would have scales of its own values, and other bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore import (
    MoEConfig,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.precision import Precision, Recipe
from moecore.base.rank_checks import gather_objects
from moecore.io import load, read_manifest, save
from moecore.io.checkpoint.snapshot import collect_rank_state, load_rank_state
from moecore.models import Decoder, DecoderConfig
from moecore.moe.amax_history import GRADIENTS
from moecore.precision.amax import list_amax_histories
from moecore.train import AdamW
from tests.helpers.ranks import run_ranks

CONFIG = DecoderConfig(
    vocab_size=64,
    dim=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    dense_layers=(0,),
    mlp_hidden_dim=64,
    moe=MoEConfig(dim=32, hidden_dim=16, num_experts=6, top_k=2),
)
ROLES = ("experts", "mlp", "attention")
MATRICES = 2 * 4 + 3  # linears: of attention in both layers, of the dense MLP
Past = dict[tuple[str, str], Tensor]  # steps by module and operand


@dataclass(frozen=True)
class Job:
    model: Decoder
    optimizer: AdamW
    step: TrainStep
    row: int  # the data rank

    def train(self, first: int, last: int) -> list[Tensor]:
        """Run steps, and return losses and what they have made."""
        found = []
        for number in range(first, last):
            generator = torch.Generator().manual_seed(10 * number + self.row)
            tokens_BT = torch.randint(CONFIG.vocab_size, (2, 17), generator=generator)
            inputs = {"tokens_BT": tokens_BT[:, :-1], "labels_BT": tokens_BT[:, 1:]}
            found.append(self.step.forward_backward([inputs]))
            self.step.finish()
        weights = [getattr(p, "_local_tensor", p).detach().clone() for p in self.model.parameters()]
        return [*found, *weights, *self.past().values()]

    def skip(self) -> None:
        with self.step.micro_batch():
            tokens_BT = torch.arange(34).view(2, 17)
            (self.model(tokens_BT[:, :-1], tokens_BT[:, 1:]) * torch.inf).backward()
        assert self.step.finish().is_skipped

    def past(self) -> Past:
        owners = list_amax_histories(self.model).items()
        return {(name, o): s.clone() for name, h in owners for o, s in h.recorded_amax.items()}

    def unknown(self) -> set[str]:
        """Return operands that have scales of their own values."""
        histories = list_amax_histories(self.model).values()
        return {o for h in histories for o in h.operands if not h.get_max_amax(o)}

    def save(self, folder: Path) -> Path:
        return save(folder, 1, self.model, self.optimizer)

    def load(self, path: Path) -> None:
        load(path, self.model, self.optimizer)


def make(seed=0, *, n=3, row=0, pipeline=None, **degrees):
    recipe = Recipe(scaling="tensorwise", amax_history=n, grad_format="e5m2", power_of_two=False)
    precision = Precision(recipe=recipe, roles=ROLES)
    meshes = build_meshes(ParallelConfig(**degrees), "cpu")
    model = Decoder(CONFIG, device="meta")
    parallelize_moe(model, meshes, precision=precision, pipeline=pipeline)
    model.to_empty(device="cpu")
    model.init_weights(seed)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    return Job(model, optimizer, TrainStep(model, optimizer, max_norm=1.0), row)


def are_equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def through_files(source: Job, folder: Path) -> Callable[[Job], None]:
    path = source.save(folder)
    return lambda job: job.load(path)


def in_memory(source: Job, folder: Path) -> Callable[[Job], None]:
    state = collect_rank_state(source.model, source.optimizer, {})
    state["tensors"] = {name: tensor.clone() for name, tensor in state["tensors"].items()}
    return lambda job: load_rank_state(state, job.model, job.optimizer) and None


@pytest.mark.parametrize("keep", [through_files, in_memory])
def test_a_resume_has_the_same_bits(keep: Any, tmp_path: Path) -> None:
    source = make()
    source.train(0, 2)
    source.skip()  # a step of finite inputs, which adds nothing
    saved = source.past()
    assert len(saved) == 3 * MATRICES + 4
    assert all(int(steps.count_nonzero()) == 2 for steps in saved.values())
    set_again, ahead = keep(source, tmp_path), source.train(2, 4)
    fresh, used = make(1), make(1)
    used.train(7, 9)
    for job in (fresh, used):
        set_again(job)
        assert not job.unknown() and are_equal(list(job.past().values()), list(saved.values()))
        assert are_equal(job.train(2, 4), ahead)


def test_other_recipes_keep_the_newest_steps(tmp_path: Path) -> None:
    source = make()
    source.train(0, 3)
    path, saved = source.save(tmp_path), source.past()
    for n in (2, 5):
        job = make(1, n=n)
        job.load(path)
        for key, steps in job.past().items():
            assert torch.equal(steps[:3], saved[key][:n]) and not steps[3:].any()
    without = make(1, n=0)
    without.load(path)
    assert not without.past()
    # Of that run a live history takes nothing: its next step has scales of its own values.
    path = without.save(tmp_path / "without")
    assert not any(name.startswith("amax.") for name in read_manifest(path).tensors)
    without.train(3, 5)
    source.load(path)
    assert source.unknown() == {"input", "weight", "gradient", "x", "a", "dy", "dh"}
    fresh = make(1)
    fresh.load(path)
    assert are_equal(source.train(3, 5), fresh.train(3, 5))


# Foldings, which other one loads what each has saved, and whether gradients have a past there.
MOVES = {
    "tp": ("other experts", True),  # the same dp, cp and tp
    "pp": ("tp", False),
}


def worker(rank: int, device: torch.device, folder: str) -> dict[str, list[Any]]:
    stages = PipelineConfig(schedule="1f1b")
    layouts: dict[str, Callable[..., Job]] = {
        "tp": lambda seed: make(seed, row=rank // 2, dp_shard=3, tp=2, ep=3),
        "other experts": lambda seed: make(seed, row=rank // 2, dp_shard=3, tp=2, ep=2),
        "pp": lambda seed: make(seed, row=rank % 3, pp=2, dp_shard=3, ep=3, pipeline=stages),
    }
    root, found = Path(folder), {}
    for name, (other, has_gradients) in MOVES.items():
        source = layouts[name](0)
        source.train(0, 2)
        path, past = source.save(root / name), gather_objects(source.past())
        is_there = {n.removeprefix("amax.") for n in read_manifest(path).tensors}
        wholes = {key: steps for one in past for key, steps in one.items()}
        found[f"{name}: saved"] = (
            all(
                f"{module}.{operand}" in is_there or operand in GRADIENTS
                for module, operand in wholes
            )
            and len(wholes) == 3 * MATRICES + 4
        )
        ahead, again = source.train(2, 3), layouts[name](1)
        again.load(path)
        found[f"{name}: bits"] = are_equal(again.train(2, 3), ahead)
        moved = layouts[other](1)
        moved.load(path)
        moved_past = moved.past().items()
        equal = [torch.equal(s, wholes[k]) for k, s in moved_past if k[1] not in GRADIENTS]
        found[f"{name} to {other}: equal"] = all(equal) and len(equal) > 0
        found[f"{name} to {other}: unknown"] = (moved.unknown() == set()) == has_gradients
        found[f"{name} to {other}: known"] = moved.unknown() <= GRADIENTS
        found[f"{name} to {other}: finite"] = all(x.isfinite().all() for x in moved.train(2, 3))
    first = next(iter(list_amax_histories(moved.model).values()))
    first.recorded_amax["input"] += rank  # as of an optimizer loop that has shared no magnitudes
    with pytest.raises(ValueError, match=r"amax\.\S+\.input of rank \d must equal .*finish\(\)"):
        moved.save(root / "unequal")
    return {what: gather_objects(value) for what, value in found.items()}


def test_ranks_and_foldings(tmp_path: Path) -> None:
    for what, ranks in run_ranks(6, worker, str(tmp_path)).items():
        assert all(ranks), what
