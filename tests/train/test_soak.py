from dataclasses import replace
from pathlib import Path

import pytest

from tests.train.soak import Plan, soak


@pytest.mark.slow
@pytest.mark.nightly  # by day test_kill.py and the examples of training kill one thing each
@pytest.mark.parametrize(("steps", "kills"), [(12, 1), (2000, 20)])
def test_nothing_is_lost(steps: int, kills: int, tmp_path: Path) -> None:
    plan = Plan(steps=steps, save_every=4, nan_every=11)
    quiet = soak(plan, tmp_path / "quiet")
    found = soak(replace(plan, kills=kills, full_disks=True), tmp_path / "disturbed")
    assert found.digests == quiet.digests
    assert found.starts == kills + 1 and found.full > 0 and quiet.full == 0
    # Allocators of threads fill for some hundred steps; of a short run nothing can be said.
    late = quiet.resident[len(quiet.resident) // 3 :]
    assert steps < 1000 or max(late) <= 1.02 * min(late), quiet.resident
