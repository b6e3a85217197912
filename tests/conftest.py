"""Selects what this process can run.

`gpu` tests where CUDA is; `interpret` tests where Triton interprets kernels (TRITON_INTERPRET=1);
everything else everywhere but under the interpreter, whose process is for kernels alone. Where
there is no GPU, and `--nightly` is not given, cases that are marked `nightly` are left out, those
that the table `helpers/by_day.py` does not name, and of a test with several parametrizations those
whose values other cases have.

Which tests ran before in this process must not matter: each file begins without a process group,
each file and test with the same generators, and hypothesis tries the same examples in each run
(`--hypothesis-profile=explore` tries new ones).
"""

import gc
import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from moecore.kernels.triton_api import INTERPRET
from tests.helpers import sparing  # noqa: F401  # tests make little garbage as well
from tests.helpers.by_day import beyond_the_table
from tests.helpers.grids import beyond_each_value

# transformers' bars of loaded weights, which ranks would print into the rows of dots.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

try:
    from hypothesis import settings
    from hypothesis.internal.conjecture import providers
except ImportError:  # tests that need it fail by its name
    pass
else:
    settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
    settings.register_profile("explore", deadline=None)
    settings.load_profile("fixed")
    # Else examples depend on the source of all modules that are imported, whose parsing takes long.
    providers._get_local_constants = lambda: providers._local_constants


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the cases marked nightly as well")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):  # this process starts workers of pytest-xdist
        from tests.helpers.ranks import share_servers

        share_servers()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    whole_grids = config.option.nightly or torch.cuda.is_available()

    def runs_here(item: pytest.Item) -> bool:
        marks = {mark.name for mark in item.iter_markers()}
        if not whole_grids and "nightly" in marks:
            return False
        if "interpret" in marks or INTERPRET:
            return INTERPRET and "interpret" in marks and "gpu" not in marks
        return torch.cuda.is_available() or "gpu" not in marks

    here = [item for item in items if runs_here(item)]
    if not whole_grids:
        for beyond in (beyond_the_table, beyond_each_value):
            left_out = beyond(here)
            here = [item for item in here if item not in left_out]
    left = set(here)
    config.hook.pytest_deselected(items=[item for item in items if item not in left])
    items[:] = here
    for item in items:
        if (mark := item.get_closest_marker("gpus")) and torch.cuda.device_count() < mark.args[0]:
            item.add_marker(pytest.mark.skip(reason=f"needs {mark.args[0]} GPUs, one per rank"))
    # Long files first, so that workers end together.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


# Their ranks fork from servers that import torchtitan, which takes longer than most files.
ON_ONE_WORKER = re.compile(r"(tests/integrations/)test_(torchtitan|local_tokens)\w*\.py")


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist nobody calls it
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return what gives whole files to workers, and files that share servers to one of them."""
    from xdist.scheduler import LoadFileScheduling

    class LoadServers(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return ON_ONE_WORKER.sub(r"\1", super()._split_scope(nodeid))

    return LoadServers(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    _keep()


def _keep() -> None:
    """Let no later collection walk what is there: modules and tests live as long as the process."""
    gc.collect()
    gc.freeze()


@contextmanager
def without_group() -> Iterator[None]:
    """No default process group before and after, whoever made one in this process."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()  # DTensor's: of meshes whose groups are gone
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def seed() -> None:
    """Seed the generators of this process."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # that one notes its stack for devices that might come, twice in each test
        torch.default_generator.manual_seed(0)
    random.seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    seed()  # for fixtures of the file


@pytest.fixture(autouse=True)
def _seeded() -> None:
    seed()  # for the test, whichever of its fixtures were there


@pytest.fixture(scope="module", autouse=True)
def _no_group_of_another_file() -> Iterator[None]:
    with without_group():
        yield
    _keep()


@pytest.fixture
def no_group_left() -> Iterator[None]:
    """For a test, see `without_group`."""
    with without_group():
        yield
