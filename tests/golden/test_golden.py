"""Twenty steps of every golden path equal their record: CONTRIBUTING.md says when to remake one."""

from __future__ import annotations

import math

import pytest

from tests.golden import records
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


def test_one_bit_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    best, golden = records.nearest(records.platform_key(), "local")
    monkeypatch.setattr(records, "platform_key", lambda: best)
    monkeypatch.setattr(records, "_packages", lambda path: golden["versions"])
    assert not differences("local", golden)
    loss = float.fromhex(golden["losses"][7])
    other = golden | {"losses": golden["losses"].copy(), "parameters": "0"}
    other["losses"][7] = math.nextafter(loss, 9.0).hex()
    assert len(differences("local", other)) == 2
    monkeypatch.setattr(records, "platform_key", lambda: best + "-other")
    assert not differences("local", other)
    other["losses"][7] = (loss * (1 + 2 * PATHS["local"].bound)).hex()
    assert len(differences("local", other)) == 1
    other["norms"] = ["nan", *golden["norms"][1:]]
    assert len(differences("local", other)) == 2
