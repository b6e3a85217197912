import pytest

from moecore import Meshes, ParallelConfig, build_meshes


@pytest.fixture(scope="module")
def meshes() -> Meshes:
    """One process: build_meshes starts the group by itself."""
    return build_meshes(ParallelConfig(), "cpu")
