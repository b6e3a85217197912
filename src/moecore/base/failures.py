"""Reports the error of a failed rank to the ranks that wait for it.

A rank that raises an error does not enter the next collective, so the other ranks receive an error
of gloo or NCCL. The failed rank therefore writes its own error to the store of the default process
group. The other ranks read the store after their transport error:

    rank 1    ValueError in micro-batch 2 of 4  ->  store
    rank 0    "Connection closed by peer"       ->  RankError: rank 1 failed in micro-batch 2 of 4

The store is accessed only after an error. A step without errors does not use it.

`share_errors` is for calls outside of a step. After local checks the ranks exchange their errors
with one collective. Every rank raises the error of the first failed rank.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from moecore.base.rank_checks import Group, gather_objects

P = ParamSpec("P")
T = TypeVar("T")
KEY = "moecore/failures"
GRACE_S = 2.0  # how long a rank waits for the records of other ranks
LONGEST, SHORT = 500, 120  # characters of an error, and of a transport error
MAX_NAMED = 8  # ranks
TRANSPORT_ERRORS = ("gloo", "NCCL", "Connection closed", "Connection reset")
_local_records: list[tuple[dist.Store, int]] = []  # this rank's records


class RankError(RuntimeError):
    """Raised if another rank failed, or ran another operation, while this rank waited for it."""


@contextmanager
def publish_errors(activity: str, *, is_written: bool = True) -> Iterator[None]:
    """Return a context that writes an error of its body to the default process group's store.

    A transport error (gloo, NCCL, the store) becomes a `RankError` that quotes the errors of other
    ranks. If `is_written` is False, errors are not written, but transport errors are converted.
    `activity` describes the body in errors, such as "micro-batch 2 of 4".
    """
    try:
        yield
    except RankError:
        raise
    except Exception as error:
        store = _get_store()
        if store is None:
            raise
        if _is_transport_error(error):
            raise RankError(explain_transport_error(activity, error)) from error
        if is_written and not hasattr(error, "is_published"):  # else an inner context wrote it
            error.is_published = True  # type: ignore[attr-defined]
            _write_error_record(store, activity, error, is_transport_error=False)
        raise


@contextmanager
def share_errors(group: Group = None) -> Iterator[None]:
    """Return a context at whose end every rank of a group raises the first failed rank's error.

    The end of the context is a collective. Code in the context must raise an error before it
    communicates. The message names the failed rank unless all ranks have the same error.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if _is_single_rank(group):
        if error is not None:
            raise error
        return
    error = None if error is None else make_sendable(error)  # all ranks raise the same type
    try:
        errors = gather_objects(error, group)
    except Exception as of_transport:
        raise (of_transport if error is None else error) from None
    ranks = [rank for rank, failure in enumerate(errors) if failure is not None]
    if not ranks:
        return
    is_common = len({str(failure) for failure in errors}) == 1  # every rank has this error itself
    first = error if error is not None and ranks[0] == dist.get_rank(group) else errors[ranks[0]]
    assert first is not None
    rank = dist.get_process_group_ranks(group or dist.group.WORLD)[ranks[0]]
    has_rank = is_common or f"rank {rank}" in str(first)
    if not has_rank and first.args == (str(first),):
        first.args = (f"{first} (on rank {rank})",)
    raise first


def share_call_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function: if one rank passes wrong arguments, every rank raises its TypeError.

    The first collective of `function` must be the one of `share_errors`, which sends the error.
    """
    parameters = signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            parameters.bind(*args, **kwargs)
        except TypeError:
            with share_errors():
                return function(*args, **kwargs)  # raises Python's error, which names the function
        return function(*args, **kwargs)

    return call


def run_and_share_errors(action: Callable[[], T], group: Group = None) -> T:
    """Return `action()`, or raise the first failed rank's error on all ranks. Collective."""
    with share_errors(group):
        return action()


def _is_single_rank(group: Group) -> bool:
    """Whether no other rank communicates: a group of one rank, a fake group, or no group."""
    if not dist.is_initialized() or dist.get_backend(group) == "fake":
        return True
    return dist.get_world_size(group) == 1


def make_sendable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its text if the error cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        substitute = RuntimeError(f"{type(error).__name__}: {error}")
        substitute.__cause__ = error
        return substitute
    return error


def explain_transport_errors(activity: str) -> AbstractContextManager[None]:
    """Return a context that converts transport errors (gloo, NCCL) in `activity` to `RankError`."""
    return publish_errors(activity, is_written=False)


def explain_transport_error(activity: str, error: Exception) -> str:
    """Return a transport error's text, with errors that ranks publish within `GRACE_S` seconds."""
    store = _get_store()
    if store is None:
        return str(error)
    _write_error_record(store, activity, error, is_transport_error=True)
    deadline, records = time.monotonic() + GRACE_S, list[dict[str, Any]]()
    with suppress(dist.DistError):  # the rank of the store may be the one that has ended
        while time.monotonic() < deadline and not (records and not records[0]["waits"]):
            time.sleep(0.05)
            texts = [store.get(f"{KEY}/{n}") for n in range(1, store.add(KEY, 0) + 1)]
            records = [json.loads(text) for text in texts if text]
            records = [record for record in records if record["rank"] != dist.get_rank()]
            records.sort(key=lambda record: record["waits"])  # transport errors are last
    status, cause = f"rank {dist.get_rank()} runs {activity}", " ".join(str(error).split())[:SHORT]
    fix = "give every rank the same forwards, micro-batches and steps"
    recorded_ranks = {dist.get_rank(), *(record["rank"] for record in records)}
    silent = set(range(dist.get_world_size())) - recorded_ranks
    if silent and all(record["waits"] and record["activity"] == activity for record in records):
        return (
            f"{status}, but {_format_ranks(sorted(silent))} has ended or runs something else, and "
            f"has recorded no error: {fix}, and see what the others printed ({cause})"
        )
    first = records[0]
    if first["waits"]:
        return f"{status} and rank {first['rank']} {first['activity']}: {fix} ({cause})"
    return f"rank {first['rank']} failed in {first['activity']}: {first['error']} ({status})"


def _format_ranks(ranks: Sequence[int]) -> str:
    """Return "one of ranks 1, 3" for [1, 3], or "one of 99 ranks" for more than `MAX_NAMED`."""
    if len(ranks) > MAX_NAMED:
        return f"one of {len(ranks)} ranks"
    return f"{'one of ranks ' if len(ranks) > 1 else 'rank '}{', '.join(map(str, ranks))}"


def withdraw_error_records() -> None:
    """Delete the errors that this rank wrote to the store, because the rank continues."""
    while _local_records:
        store, number = _local_records.pop()
        with suppress(dist.DistError):  # of a group that has ended since
            store.set(f"{KEY}/{number}", "")


def _get_store() -> dist.Store | None:
    """Return the store of the default process group, or None if no other rank reads it."""
    if _is_single_rank(None):
        return None
    store: dist.Store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    return store


def _is_transport_error(error: BaseException | None) -> bool:
    """Whether an error or one of its causes was raised by gloo, NCCL or the store."""
    while error is not None:
        is_runtime = isinstance(error, RuntimeError)
        if is_runtime and any(x in str(error) for x in TRANSPORT_ERRORS):
            return True
        if isinstance(error, dist.DistError):
            return True
        error = error.__cause__
    return False


def _write_error_record(
    store: dist.Store, activity: str, error: Exception, *, is_transport_error: bool
) -> None:
    """Write this rank's error to the store; `is_transport_error` = another rank failed before."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]
    record = dict(rank=dist.get_rank(), activity=activity, error=text, waits=is_transport_error)
    with suppress(dist.DistError):  # the rank of the store may be the one that has ended
        number = store.add(KEY, 1)
        _local_records.append((store, number))
        store.set(f"{KEY}/{number}", json.dumps(record))
