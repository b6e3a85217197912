"""Twenty steps of every golden path equal their record: CONTRIBUTING.md says when to remake one."""

from __future__ import annotations

import pytest

from tests.golden.paths import PATHS
from tests.golden.records import differences, run_all, why_not
from tests.golden.runs import Result


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return run_all(name for name, path in PATHS.items() if not why_not(path))


@pytest.mark.parametrize("name", PATHS)
def test_equals_its_record(name: str, results: dict[str, Result]) -> None:
    if reason := why_not(PATHS[name]):
        pytest.skip(reason)
    assert not differences(name, results[name])
