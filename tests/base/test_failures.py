from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch.distributed as dist

from moecore.base import failures
from moecore.base.failures import RankError, publish_errors, withdraw_error_records

WORLD = 4
CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer"


@pytest.fixture(autouse=True)
def store() -> Iterator[dist.Store]:
    """One store, and no wait for records."""
    one = dist.HashStore()
    with patch.multiple(failures, _get_store=lambda: one, GRACE_S=0.06):
        yield one
        withdraw_error_records()


def fail(rank: int, where: str, error: Exception) -> Exception:
    """Return what a rank raises that has this error."""
    with patch.multiple(dist, get_rank=lambda: rank, get_world_size=lambda: WORLD):
        with pytest.raises(Exception) as caught, publish_errors("a step"), publish_errors(where):
            raise error
        return caught.value


def test_a_rank_that_waits_raises_what_another_one_has_raised() -> None:
    error = ValueError("of two\nlines")
    assert fail(1, "finish()", error) is error
    found = fail(0, "the all-gather of layers.1", RuntimeError(CLOSED))
    assert isinstance(found, RankError)
    assert str(found) == (
        "rank 1 failed in finish(): ValueError: of two lines (rank 0 runs the all-gather of "
        "layers.1)"
    )


def test_the_first_error_counts_and_not_that_of_a_rank_that_waits() -> None:
    fail(2, "finish()", RuntimeError(CLOSED))
    fail(1, "micro-batch 2 of 4", KeyError("labels"))
    fail(3, "clip()", ValueError("later"))
    found = str(fail(0, "finish()", RuntimeError(CLOSED)))
    assert found.startswith("rank 1 failed in micro-batch 2 of 4: KeyError: 'labels' (")


def test_an_error_that_a_rank_has_survived_is_no_cause() -> None:
    fail(1, "micro-batch 1 of 2", FloatingPointError())
    withdraw_error_records()
    found = str(fail(0, "finish()", RuntimeError(CLOSED)))
    assert found.startswith("rank 0 runs finish(), but one of ranks 1, 2, 3 has ended or runs som")
    assert "recorded no error" in found and found.endswith("Connection closed by peer)")


def test_a_rank_that_was_killed_is_the_one_without_a_record() -> None:
    for rank in (0, 2):
        fail(rank, "finish()", RuntimeError(CLOSED))
    found = str(fail(3, "finish()", RuntimeError(CLOSED)))
    assert found.startswith("rank 3 runs finish(), but rank 1 has ended or runs something else")


def test_ranks_that_wait_for_each_other_name_what_they_run() -> None:
    fail(1, "finish()", RuntimeError(CLOSED))
    found = str(fail(0, "the all-gather of the model", RuntimeError(CLOSED)))
    assert found.startswith("rank 0 runs the all-gather of the model and rank 1 finish(): give")


def test_other_errors_pass_as_they_are() -> None:
    for error in (ValueError("gloo is a word"), RuntimeError("CUDA out of memory"), RankError("x")):
        assert fail(0, "finish()", error) is error
