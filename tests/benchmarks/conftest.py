"""Benchmarks that tests run write records into folders of the tests, as from a clean commit."""

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def commit_of_tests(monkeypatch: Any) -> None:
    monkeypatch.setenv("MOECORE_COMMIT", "0" * 12)
