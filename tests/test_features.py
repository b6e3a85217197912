from typing import Any

import pytest
from tools.claims import RESULTS, ROOT
from tools.features import PAGE, find_name, make_page, read_features

FEATURES = read_features()


@pytest.mark.parametrize("row", FEATURES["feature"], ids=lambda row: row["asks"])
def test_a_feature_has_what_its_row_says(row: dict[str, Any]) -> None:
    for name in row["option"]:
        assert name.startswith("moecore.") and find_name(name) is not None
    assert row["option"] and "def test_" in (ROOT / "tests" / row["test"]).read_text()
    assert bool(row["record"]) == bool(row["text"])
    if row["record"]:
        assert row["text"] in (RESULTS / row["record"]).read_text()


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text() == make_page(FEATURES), "python -m tools.features writes it"
    rows = [*FEATURES["feature"], *FEATURES["missing"]]
    assert {row["source"].split()[0] for row in rows} == set(FEATURES["sources"])
    asks = [row["asks"] for row in rows]
    assert len(set(asks)) == len(asks) >= 62


@pytest.mark.parametrize("name", ["moecore.Nothing", "moecore.MoEConfig.nothing", "moecore.io.no"])
def test_wrong_names_are_told(name: str) -> None:
    with pytest.raises((ImportError, AttributeError)):
        find_name(name)
