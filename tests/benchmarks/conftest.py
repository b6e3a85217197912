"""Benchmarks that tests run write records into folders of the tests, as from a clean commit."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def commit_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECORE_COMMIT", "0" * 12)
