from collections.abc import Iterator

import pytest

from tests.conftest import without_group


@pytest.fixture(scope="module", autouse=True)
def _no_group() -> Iterator[None]:
    """Plans make a process group of a world that is not there, so none may be left here."""
    with without_group():
        yield
