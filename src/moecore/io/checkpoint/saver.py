"""Saves in the background: copy to host memory, go on training, write meanwhile.

    saver = Saver(root, model, optimizer, keep=2)
    for step in ...:
        train_step()
        saver.check()                        an error of the last save comes out here
        if step % 100 == 0:
            saver.save(step, {"step": step}, wait=False)
    saver.close()                            waits for the last save

A background save succeeds or fails on all ranks together, but ranks learn of it at slightly
different times. `check` does not communicate, so a rank that catches its error and goes on stays in
step with the others. `save` and `close` wait for the save before and agree: when any rank has not
seen its error yet, all of them raise it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.failures import share_call_errors, share_errors
from moecore.base.fields import CountOrZero, check_arguments
from moecore.base.torch_private import default_timeout
from moecore.io.checkpoint.directory import Step, directory_of, discard
from moecore.io.checkpoint.hyperparameters import Schedulers
from moecore.io.checkpoint.lock import RunLock
from moecore.io.checkpoint.rank_agreement import check_rank_agreement
from moecore.io.checkpoint.ranks import gather, is_first_rank, on_every_rank, on_first_rank
from moecore.io.checkpoint.shard_file import Meter, Progress
from moecore.io.checkpoint.snapshot import Snapshot, join_stages, locals_of, take_snapshot
from moecore.io.checkpoint.state import Optimizers
from moecore.io.checkpoint.store import begin, write
from moecore.parallel.model.parameter_guards import refuse_earlier
from moecore.train.memory.host import HostCopies

logger = logging.getLogger("moecore.io")


class Saver:
    """Saves checkpoints of one run, in the background if asked. Construction is collective.

    It owns a gloo process group, a thread, host memory and the lock of the run, so that no other
    job writes there: `close` it, or use it in a `with`.

    Args:
        root: directory of the run, which is made; every rank must see it.
        model: parallelized or plain.
        optimizer: over the model's parameters; a list of several, each with parameters of its own;
            None = keep the model only.
        scheduler: of the learning rate; its state must be JSON-able. A list of several, in the
            order of their optimizers.
        keep: how many of the newest checkpoints stay; 0 = all.
        config: the description of the model; see `save`.
        progress: called with (bytes done, bytes expected) of this rank, from the writing thread.

    Raises:
        OSError: on every rank, naming the owner, when another job or `Saver` writes to `root`.
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
        arguments = locals()
        with share_errors():
            check_arguments(Saver.__init__, arguments)
            refuse_earlier(model, optimizer)
        self._model, self._optimizer = model, optimizer
        self._lock = RunLock(Path(root))
        self._scheduler, self._keep, self._config = scheduler, keep, config
        self._progress = progress
        # Of its own: a collective of the training in between would mix up the ranks' order.
        self._group = None
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=default_timeout())
        try:
            on_first_rank(self._lock.acquire, self._group)
        except BaseException:
            if self._group is not None:
                dist.destroy_process_group(self._group)
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moecore-save")
        # Of all that this rank holds, replicas too; reused, so one save is in flight at a time.
        self._copies = HostCopies()
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
        """Make the host memory of background saves, so that the first one need not. Collective.

        It pins what the model and the optimizer hold now, which takes seconds: call it before
        training where the optimizer has its state, as after a load, else after the first step.
        Between steps, as `save`; not while a CUDA graph is captured.

        Raises:
            ValueError: after `close`.
            RuntimeError: on every rank, when one has no memory for it.
            OSError: of the save before.
        """
        self._check_open()
        self._finish()
        on_every_rank(lambda: self._copies.reserve(locals_of(self._snapshot(0, None))), self._group)

    @share_call_errors
    def save(self, step: Step, extra: Mapping[str, Any] | None = None, *, wait: bool) -> Path:
        """Save a step and return where it will be. Collective.

        With `wait=False` the model may change as soon as this returns; the checkpoint is there
        when the next `save` or `close` returns.

        Args:
            step: >= 0; names the directory.
            extra: name -> JSON-able value or plain tensor, the same on every rank.
            wait: until it is on disk.

        Raises:
            ValueError: for a wrong argument, a value that differs between ranks though only one is
                kept, or after `close`, before anything is written.
            NotImplementedError: for state that has no place in a checkpoint, likewise.
            RuntimeError: when a rank has no memory for the copies; the draft is removed.
            OSError: when a rank could not write; of the save before, or with `wait` of this one.
        """
        arguments = locals()
        with share_errors():
            check_arguments(Saver.save, arguments)
            self._check_open()
        self._finish()
        snapshot = on_every_rank(lambda: self._snapshot(step, extra), self._group)
        check_rank_agreement(snapshot, self._group)
        snapshot = join_stages(snapshot, self._group)
        draft = begin(self._lock, step, self._group)
        if wait:
            self._write(draft, snapshot, locals_of(snapshot))
        else:
            # The copy is waited for, and of the disk the empty draft alone. Returning earlier would
            # need a fence before what changes a tensor next: optimizer, expert bias, load, user.
            start = time.perf_counter()
            try:
                copies = on_every_rank(lambda: self._copies.fill(locals_of(snapshot)), self._group)
            except Exception:  # such as no host memory on one rank
                if is_first_rank():
                    discard(draft)
                raise
            seconds = time.perf_counter() - start
            if is_first_rank():
                logger.info("step %d: copied to host memory in %.3f s", step, seconds)
            self._future = self._thread.submit(self._write_and_log, draft, snapshot, copies)
        return directory_of(self._lock.root, step)

    def check(self) -> None:
        """Raise the error of a background save that has failed. Call it every step; cheap, local.

        Raises:
            OSError: as `save` with `wait` would have. The save before it is still loadable, unless
                the error says that the failed step is saved.
        """
        if self._future is not None and self._future.done():
            future, self._future = self._future, None
            future.result()

    def close(self) -> None:
        """Wait for a background save and release what the saver owns. Collective.

        Raises:
            OSError: when that save failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._finish()
        finally:
            self._thread.shutdown()
            self._lock.release()
            self._copies.clear()
            if self._group is not None:
                dist.destroy_process_group(self._group)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("Saver (closed) must be open to save: make another one")

    def _finish(self) -> None:
        """Wait for the running save; raise its error on all ranks if one has not seen it."""
        future, self._future = self._future, None
        error = future.exception() if future is not None else None
        try:
            errors = gather(error, self._group)
        except RuntimeError:  # such as when a rank has ended, which may be that error
            if error is None:
                raise
            errors = [error]
        for first in errors:
            if first is not None:
                raise first

    def _snapshot(self, step: int, extra: Mapping[str, Any] | None) -> Snapshot:
        return take_snapshot(
            step,
            self._model,
            self._optimizer,
            extra,
            scheduler=self._scheduler,
            config=self._config,
        )

    def _write(self, draft: Path, snapshot: Snapshot, locals_: Mapping[str, Tensor]) -> None:
        meter = Meter(self._progress)
        write(draft, snapshot, locals_, keep=self._keep, meter=meter, group=self._group)

    def _write_and_log(self, draft: Path, snapshot: Snapshot, copies: Mapping[str, Tensor]) -> None:
        try:
            self._write(draft, snapshot, copies)
        except Exception as error:  # also now: the caller may be long in coming to `check`
            logger.error("background save of step %d failed: %s", snapshot.facts.step, error)
            raise
