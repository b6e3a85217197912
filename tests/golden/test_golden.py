"""Steps of golden paths equal their record: CONTRIBUTING.md says when to remake one.

`make test` runs the first of them, in which each batch has come once and one twice.
"""

import math

import pytest

from tests.golden import records
from tests.golden.paths import PATHS
from tests.golden.records import differences, run_all, why_not
from tests.golden.runs import BATCHES, Result
from tests.helpers.grids import asked_for, beside

BY_DAY = BATCHES + 1  # steps
NIGHTLY = ["triton", "torchtitan"]  # whole, and started apart


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, Result]:
    names = [name for name in asked_for(request, "name") if not why_not(PATHS[name])]
    return run_all(names) if request.config.option.nightly else run_all(names, BY_DAY)


@pytest.mark.parametrize("name", beside(PATHS, NIGHTLY))
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
