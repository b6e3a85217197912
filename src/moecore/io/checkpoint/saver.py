"""Background saves: copy to host memory, continue training, write concurrently.

    saver = Saver(root, model, optimizer, keep=2)
    for step in ...:
        train_step()
        saver.check()                        raises an error of the last save
        if step % 100 == 0:
            saver.save(step, {"step": step}, wait=False)
    saver.close()                            waits for the last save

A background save succeeds or fails on all ranks, but ranks detect an error at different times.
`check` does not communicate, so a rank that catches its error may continue. `save` and `close` wait
for the previous save and agree. If any rank has not raised the error yet, all ranks raise it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from torch import Tensor, nn

from moecore.base.failures import run_and_share_errors, share_call_errors, share_errors
from moecore.base.fields import CountOrZero, check_arguments
from moecore.base.rank_checks import gather_objects
from moecore.io.checkpoint.directory import Step, make_step_path
from moecore.io.checkpoint.drafts import Draft, remove_draft
from moecore.io.checkpoint.hyperparameters import Schedulers
from moecore.io.checkpoint.lock import make_lock
from moecore.io.checkpoint.object_storage import AnyPath, make_path
from moecore.io.checkpoint.rank_agreement import check_rank_agreement
from moecore.io.checkpoint.ranks import ControlGroup, is_first_rank, run_on_first_rank
from moecore.io.checkpoint.shard_file import Meter, Progress
from moecore.io.checkpoint.snapshot import Snapshot, get_local_tensors, join_stages, take_snapshot
from moecore.io.checkpoint.state import Optimizers
from moecore.io.checkpoint.store import start_draft, write_checkpoint
from moecore.parallel.model.parameter_guards import check_optimizer_is_newer
from moecore.train.expert_moves import restore_expert_order
from moecore.train.memory.host import HostCopies

logger = logging.getLogger("moecore.io")


class Saver:
    """Saves checkpoints of one run, optionally in the background. Construction is collective.

    The saver owns a gloo process group, a thread, host memory and the lock of the run, which
    excludes other jobs. Call `close`, or use the saver in a `with` statement.

    Args:
        root: directory of the run, which is created, or an fsspec URL; every rank must see it.
        model, optimizer, scheduler, keep, config: as in `save`.
        progress: called with (bytes done, bytes expected) of this rank, from the writing thread.

    Raises:
        OSError: on every rank, naming the owner, if another job or `Saver` writes to `root`.
    """

    @share_call_errors
    def __init__(
        self,
        root: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizers | None,
        *,
        scheduler: Schedulers | None = None,
        keep: CountOrZero = 0,
        config: object = None,
        progress: Progress | None = None,
    ) -> None:
        with share_errors():
            check_arguments(Saver.__init__, locals())
            self._lock = make_lock(make_path(root))
            check_optimizer_is_newer(model, optimizer)
        self._snapshot = partial(
            take_snapshot, model=model, optimizer=optimizer, scheduler=scheduler, config=config
        )
        self._restore_expert_order = partial(restore_expert_order, model, optimizer)
        self._progress = progress
        self._control = ControlGroup()
        self._group = self._control.group
        self._write = partial(write_checkpoint, keep=keep, group=self._group)
        try:
            run_on_first_rank(self._lock.acquire, self._group)
        except BaseException:
            self._control.close()
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moecore-save")
        self._copies = HostCopies()  # reused by each save, so one save is in flight at a time
        self._future: Future[None] | None = None
        self._closed = False

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # other ranks may not be here, so nothing collective
            self._thread.shutdown(wait=True)
            self._lock.release()
            self._closed = True

    def prepare(self) -> None:
        """Allocate and pin the host memory of background saves, which takes seconds. Collective.

        The memory fits the current tensors of model and optimizer. Call `prepare` between steps,
        after a load or the first step (the optimizer then has state), not in CUDA graph capture.

        Raises:
            ValueError: after `close`.
            RuntimeError: on every rank, if one rank has not enough memory.
            OSError: if the previous background save failed.
        """
        self._check_is_open()
        self._wait_for_previous_save()
        with self._restore_expert_order():
            run_and_share_errors(
                lambda: self._copies.reserve_like(get_local_tensors(self._snapshot(0, extra=None))),
                self._group,
            )

    @share_call_errors
    def save(self, step: Step, extra: Mapping[str, Any] | None = None, *, wait: bool) -> AnyPath:
        """Save a step and return the path of its checkpoint. Collective.

        With `wait=False` the model may change as soon as this returns. The checkpoint is complete
        when the next `save` or `close` returns.

        Args:
            step: >= 0; names the directory.
            extra: name -> JSON-able value or plain tensor (no DTensor), equal on every rank.
            wait: whether to wait until the checkpoint is on disk.

        Raises:
            ValueError: before files are written, for a wrong argument, a replicated value that
                differs between ranks, or after `close`.
            NotImplementedError: before files are written, for state that a checkpoint cannot store.
            RuntimeError: if a rank has not enough memory for the copies; the draft is removed.
            OSError: if a rank could not write in the previous save, or with `wait` in this one.
        """
        with share_errors():
            check_arguments(Saver.save, locals())
            self._check_is_open()
        self._wait_for_previous_save()
        with self._restore_expert_order():
            return self._write_or_copy(step, extra, wait=wait)

    def _write_or_copy(self, step: int, extra: Mapping[str, Any] | None, *, wait: bool) -> AnyPath:
        """Write a checkpoint, or copy its tensors to host memory and start to write them."""
        snapshot = run_and_share_errors(lambda: self._snapshot(step, extra=extra), self._group)
        check_rank_agreement(snapshot, self._group)
        snapshot = join_stages(snapshot, self._group)
        draft = start_draft(self._lock, step, self._group)
        local_tensors = get_local_tensors(snapshot)
        if wait:
            self._write(draft, snapshot, local_tensors, meter=Meter(self._progress))
            return make_step_path(self._lock.root, step)
        # Waits for the copy, because optimizer, load or caller may change the tensors next.
        start = time.perf_counter()
        try:
            copies = run_and_share_errors(
                lambda: self._copies.copy_tensors(local_tensors), self._group
            )
        except Exception:  # such as no host memory on one rank
            if is_first_rank():
                remove_draft(draft)
            raise
        if is_first_rank():
            seconds = time.perf_counter() - start
            logger.info("step %d: copied to host memory in %.3f s", step, seconds)
        self._future = self._thread.submit(self._write_and_log, draft, snapshot, copies)
        return make_step_path(self._lock.root, step)

    def check(self) -> None:
        """Raise the error of a failed background save. Call it every step: it does not communicate.

        Raises:
            OSError: if this rank could not write. The previous checkpoint is still loadable, unless
                the error says that the failed step is saved.
        """
        if self._future is not None and self._future.done():
            future, self._future = self._future, None
            future.result()

    def close(self) -> None:
        """Wait for a background save (OSError if the save failed); free resources. Collective."""
        if self._closed:
            return
        self._closed = True
        try:
            self._wait_for_previous_save()
        finally:
            self._thread.shutdown()
            self._lock.release()
            self._copies.clear()
            self._control.close()

    def _check_is_open(self) -> None:
        """Raise ValueError after `close`."""
        if self._closed:
            raise ValueError("Saver (closed) must be open to save: make another one")

    def _wait_for_previous_save(self) -> None:
        """Wait for the background save; raise its error on all ranks if one failed. Collective."""
        future, self._future = self._future, None
        error = future.exception() if future is not None else None
        try:
            errors = gather_objects(error, self._group)
        except RuntimeError:  # such as when a rank has ended, which may be that error
            if error is None:
                raise
            errors = [error]
        for first in errors:
            if first is not None:
                raise first

    def _write_and_log(
        self, draft: Draft, snapshot: Snapshot, copies: Mapping[str, Tensor]
    ) -> None:
        """Write a checkpoint from host copies in the background thread; log and raise errors."""
        try:
            self._write(draft, snapshot, copies, meter=Meter(self._progress))
        except Exception as error:  # the caller may call `check` much later
            logger.error("background save of step %d failed: %s", snapshot.facts.step, error)
            raise
