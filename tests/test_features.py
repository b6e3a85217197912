import re
from pathlib import Path
from typing import Any

import pytest
from tools.affected import imports
from tools.claims import RESULTS, ROOT
from tools.features import PAGE, find_name, make_page, read_features

FEATURES = read_features()
TESTS = ROOT / "tests"


def read_test(path: str) -> str:
    """Return the text of a test file and of what it imports from tests, directly or not."""
    files, waiting = set[Path](), [TESTS / path]
    while waiting:
        files.add(file := waiting.pop())
        waiting += [x for x in imports(file) if TESTS in x.parents and x not in files]
    return "\n".join(file.read_text() for file in files)


@pytest.mark.parametrize("row", FEATURES["feature"], ids=lambda row: row["asks"])
def test_a_feature_has_what_its_row_says(row: dict[str, Any]) -> None:
    text = read_test(row["test"])
    assert row["option"] and "def test_" in (TESTS / row["test"]).read_text()
    for name in row["option"]:
        assert name.startswith("moecore.") and find_name(name) is not None
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", text), f"the test has no {name}"
    assert bool(row["record"]) == bool(row["text"])
    if row["record"]:
        record = (RESULTS / row["record"]).read_text()
        lines = record.splitlines() if row["record"].endswith(".jsonl") else [record]
        assert any(row["text"] in line and "-dirty" not in line for line in lines)


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
