from benchmarks.memory_page import PAGE, TABLES, fill_tables


def test_the_tables_are_those_of_the_records() -> None:
    page = PAGE.read_text()
    assert all(table().count("|\n") > 3 for table in TABLES.values())
    assert fill_tables(page) == page, "run python -m benchmarks.memory_page"
