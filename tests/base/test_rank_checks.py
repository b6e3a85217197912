from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from moecore import ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.base.rank_checks import compute_checksum, gather_objects
from moecore.train import AdamW, HostAdamW, Muon, assign_matrices
from tests.helpers.errors import error_of
from tests.helpers.ranks import ranks_fixture

Optimizers = Callable[[nn.Module, int], Any]  # of a model and a rank


def groups(model: nn.Module, rank: int) -> Any:
    first, *others = model.parameters()
    return torch.optim.SGD([{"params": [first]}, {"params": others, "lr": 1.0 + rank}], lr=1.0)


def some(model: nn.Module, rank: int) -> Any:
    return torch.optim.SGD(list(model.parameters())[rank:], lr=1.0)


def muons(model: nn.Module, rank: int, **options: Any) -> Any:
    assignment = assign_matrices(model)
    return [Muon(assignment, **options), AdamW(assignment.adamw_params)]


def frozen(model: nn.Module, rank: int) -> Any:
    model[1].bias.requires_grad_(rank == 0)  # type: ignore[index]
    return torch.optim.SGD(model.parameters(), lr=1.0)


def scheduled(model: nn.Module, rank: int) -> Any:
    """As it is now: a scheduler on one rank has set what schedulers remember."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if rank:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    return optimizer


DIFFERENT: dict[str, tuple[Optimizers, str]] = {
    "none": (
        lambda m, r: torch.optim.SGD(m.parameters(), lr=1.0) if r else None,
        r"TrainStep.optimizer is None \((True on rank 0|False on rank 1), .*\) must",
    ),
    "class": (
        lambda m, r: (torch.optim.SGD, torch.optim.AdamW)[r](m.parameters(), lr=1.0),
        r"classes of optimizers \(\['(SGD'\] on rank 0|AdamW'\] on rank 1), .*\) and 2 more must",
    ),
    "lr": (groups, r"optimizer.param_groups\[1\].lr \((1.0 on rank 0|2.0 on rank 1), .*\) must"),
    "lr tensor": (
        lambda m, r: AdamW(m.parameters(), lr=torch.tensor(0.5 + r)),
        r"optimizer.param_groups\[0\].lr \((0.5 on rank 0|1.5 on rank 1), .*\) must",
    ),
    "betas": (
        lambda m, r: torch.optim.AdamW(m.parameters(), betas=(0.9, 0.95 + 0.01 * r)),
        r"optimizer.param_groups\[0\].betas \(\(0.9, 0.9[56]\) on rank [01], .*\) must",
    ),
    "scheduler": (scheduled, r"names of optimizers' options \(.* on rank 0.*\) and 1 more must"),
    "parameters": (some, r"param_groups\[0\].params \(\['[01]\.(weight|bias)', .*\) must"),
    "moment_dtype": (
        lambda m, r: AdamW(
            m.parameters(), moment_dtype=(torch.float32, torch.bfloat16)[r], master_remainder=False
        ),
        r"optimizer.moment_dtype \(torch.b?float(32 on rank 0|16 on rank 1), .*\) must",
    ),
    "host_fraction": (
        lambda m, r: HostAdamW(m.parameters(), host_fraction=0.25 * r),
        r"optimizer.host_fraction \((0.0 on rank 0|0.25 on rank 1), .*\) must",
    ),
    "Muon": (
        lambda m, r: muons(m, r, ns_steps=5 + r),
        r"optimizer 0.param_groups\[0\].ns_steps \([56] on rank [01], .*\) must",
    ),
    "ns_dtype": (
        lambda m, r: muons(m, r, ns_dtype=(torch.float32, torch.bfloat16)[r]),
        r"optimizer 0.ns_dtype \(torch.b?float(32 on rank 0|16 on rank 1), .*\) must",
    ),
    "requires_grad": (
        frozen,
        r"requires_grad of 1.bias \((True on rank 0|False on rank 1), .*\) must",
    ),
}
ALIKE: dict[str, Optimizers] = {
    "several": muons,
    "an object in a group": lambda m, r: torch.optim.SGD(
        [{"params": list(m.parameters()), "hook": object()}], lr=torch.tensor(1.0)
    ),
}


def worker(rank: int, device: torch.device) -> list[dict[str, str]]:
    meshes, found = build_meshes(ParallelConfig(), "cpu"), {}
    cases = {name: make for name, (make, _) in DIFFERENT.items()} | ALIKE
    for name, make in cases.items():
        torch.manual_seed(0)
        model = parallelize_moe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), meshes)
        found[name] = error_of(partial(TrainStep, model, make(model, rank)))
    return gather_objects(found)


found = ranks_fixture(2, worker)


@pytest.mark.parametrize("case", DIFFERENT)
def test_every_rank_reads_what_differs(case: str, found: list[dict[str, str]]) -> None:
    for of_rank in found:
        assert "\n" not in of_rank[case]
        with pytest.raises(ValueError, match=DIFFERENT[case][1] + " be the same on every rank"):
            raise ValueError(of_rank[case])
    assert {of_rank[case] for of_rank in found for case in ALIKE} == {"no error"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_checksum_sees_signs_places_and_lengths(dtype: torch.dtype) -> None:
    x = torch.arange(-9, 14).to(dtype)
    whole, others = compute_checksum(x), [x[:-1], x[1:], x.roll(8), -x if dtype.is_signed else ~x]
    others += [torch.cat([x, x[:1] * 0]), torch.cat([x[8:16], x[:8], x[16:]])]
    assert len({int(compute_checksum(other)) for other in [x, *others]}) == 7
    assert whole == compute_checksum(torch.cat([x[:1], x])[1:])  # a view that begins anywhere
    zeros = torch.zeros(32)
    signs = [zeros.index_fill(0, torch.tensor(i), -0.0) for i in range(32)]
    assert len({int(compute_checksum(each)) for each in [zeros, *signs]}) == 33
