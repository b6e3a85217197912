"""The table of docs/memory.md is that of the committed records."""

from __future__ import annotations

from benchmarks.memory_page import PAGE, table, with_table


def test_the_table_is_that_of_the_records() -> None:
    page = PAGE.read_text()
    assert "| gemm_last |" in table()
    assert with_table(page) == page, "run python -m benchmarks.memory_page"
