from typing import Any

import pytest
import torch
from torch import Tensor

from moecore import CloneOptions
from moecore.kernels.routing.clones import assign_physical_ids
from moecore.moe.clones import PeriodicPlan
from moecore.moe.placement import ExpertPlacement


def placed(ep: int, num_local: int, num_clones: int) -> ExpertPlacement:
    no_group: Any = None  # nothing communicates
    sizes = dict(num_experts=ep * num_local, ep=ep, etp=1, num_clones=num_clones)
    return ExpertPlacement(group=no_group, **sizes)


def planned(place: ExpertPlacement, loads: list[int], num_steps: int = 1) -> PeriodicPlan:
    plan = PeriodicPlan(place, num_steps, min_share=0.0)
    plan.update_from_loads(torch.tensor(loads), is_skipped=False)
    return plan


def where(place: ExpertPlacement, plan: PeriodicPlan, ids: list[int]) -> Tensor:
    ids_TK = torch.tensor(ids, dtype=torch.int32)[:, None]
    none_E = torch.zeros(place.num_experts, dtype=torch.int32)
    sizes = dict(num_local_experts=place.num_local, clones_per_rank=place.num_clones)
    return assign_physical_ids(ids_TK, none_E, plan.divide_choices(ids_TK), **sizes)[:, 0]


def test_options_are_checked() -> None:
    for wrong in (0, "step"):
        with pytest.raises(ValueError, match=r"CloneOptions.refresh \(.*\) must be a whole number"):
            CloneOptions(refresh=wrong)  # type: ignore[arg-type]


def test_worked_example() -> None:
    place = placed(2, 1, 1)
    plan = planned(place, [9, 3])
    assert plan.experts == [-1, 0]
    part = plan.divide_choices(torch.zeros(3, 1, dtype=torch.int32))
    assert [t.tolist() for t in part] == [[-1, 0], [0, 2], [0, 3]]
    assert where(place, plan, [0, 1, 0, 0, -1]).tolist() == [0, 2, 0, 3, -1]
    assert where(place, plan, [1, -1]).tolist() == [2, -1] and where(place, plan, []).tolist() == []


def test_nobody_has_clones_before_a_step() -> None:
    place = placed(2, 2, 1)
    plan = PeriodicPlan(place, 1, min_share=0.0)
    assert where(place, plan, [0, 1, 2, 3]).tolist() == [0, 1, 3, 4] and plan.experts == [-1, -1]


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 1000])
def test_every_rank_has_the_shares_of_the_plan(num_tokens: int) -> None:
    """Expert 0 has clones on three ranks; of any number of tokens each gets its share."""
    place, loads = placed(4, 1, 1), [100, 20, 0, 0]
    plan = planned(place, loads)
    assert plan.experts == [-1, 0, 0, 0]
    found = where(place, plan, [0] * num_tokens).bincount(minlength=8)
    shares = torch.tensor([30, 10, 30, 30]) / 100
    assert found[[2, 4, 6]].sum() == 0 and found.sum() == num_tokens
    assert (found[[0, 3, 5, 7]] - shares * num_tokens).abs().max() <= 1


def test_a_plan_stays_as_long_as_it_is_asked_to() -> None:
    place = placed(2, 1, 1)
    plan, seen = planned(place, [9, 3], num_steps=3), []
    for n in range(4):
        plan.update_from_loads(torch.tensor([3, 9]), is_skipped=n == 1)
        seen.append(plan.experts)
    assert seen == [[-1, 0], [-1, 0], [-1, 0], [1, -1]]
    plan.clear()
    assert plan.experts == [-1, -1] and where(place, plan, [0, 1]).tolist() == [0, 2]
    plan.update_from_loads(torch.tensor([9, 3]), is_skipped=torch.tensor(True))
    assert plan.experts == [-1, -1]
