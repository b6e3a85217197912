"""save, load and verify: checkpoints that all ranks write and read together."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from moecore.base.failures import run_and_share_errors, share_call_errors, share_errors
from moecore.base.fields import CountOrZero, check_arguments
from moecore.base.rank_checks import Group, gather_objects
from moecore.io.checkpoint.comparison import (
    Comparison,
    allocate_amax_load_target,
    allocate_optimizer_load_target,
    compare_checkpoint,
    refuse_differences,
    select_rng_load_target,
    select_tensors,
)
from moecore.io.checkpoint.directory import Step, is_published, make_step_path
from moecore.io.checkpoint.drafts import Draft, create_draft, remove_draft
from moecore.io.checkpoint.files import join_problems
from moecore.io.checkpoint.hyperparameters import (
    Schedulers,
    decode_scheduler_state,
    restore_hyperparameters,
)
from moecore.io.checkpoint.lock import RemoteLock, RunLock, make_lock
from moecore.io.checkpoint.manifest import Manifest, read_manifest
from moecore.io.checkpoint.object_storage import AnyPath, make_path
from moecore.io.checkpoint.rank_agreement import check_rank_agreement
from moecore.io.checkpoint.ranks import (
    check_draft_is_visible,
    check_same_path,
    get_rank_and_world,
    is_first_rank,
    run_on_first_rank,
)
from moecore.io.checkpoint.shard_file import Meter, Progress, compute_layout, find_file_problem
from moecore.io.checkpoint.snapshot import Snapshot, get_local_tensors, join_stages, take_snapshot
from moecore.io.checkpoint.state import (
    ModelView,
    Optimizers,
    restore_amax_histories,
    restore_optimizer_state,
    restore_rng_states,
)
from moecore.io.checkpoint.storage import (
    BlockLoadPlanner,
    LocalSavePlanner,
    Reader,
    Writer,
    run_dcp_call,
)
from moecore.io.checkpoint.transformers_buffers import compute_missing_buffers
from moecore.moe.layer import RoutedLayer
from moecore.train.expert_moves import run_in_expert_order
from moecore.train.rerun import drop_step

Verify = Literal["full", "sizes"]
_THREADS = 4
logger = logging.getLogger("moecore.io")


@share_call_errors
@run_in_expert_order
def save(
    root: str | os.PathLike[str],
    step: Step,
    model: nn.Module,
    optimizer: Optimizers | None,
    extra: Mapping[str, Any] | None = None,
    *,
    scheduler: Schedulers | None = None,
    keep: CountOrZero = 0,
    config: object = None,
) -> AnyPath:
    """Write a checkpoint of this step and return its directory or URL. Collective.

    A checkpoint has all state of a bit-exact resume: parameters, persistent buffers, histories of
    delayed scaling, the optimizer's state and hyperparameters, each rank's CPU and CUDA generator
    states, and `extra`. Call `save` between optimizer steps. If a save is killed, the previous
    checkpoint remains loadable. Every rank must see `root`.

    Args:
        root: directory of the run, or an fsspec URL such as s3://bucket/run; one job at a time
            writes to it.
        step: >= 0; names the directory.
        model: parallelized or plain.
        optimizer: the optimizer, or a list of optimizers with disjoint parameters; None = save only
            the model.
        extra: name -> JSON-able value or plain tensor (no DTensor), equal on every rank.
        scheduler: a learning rate scheduler with JSON-able state, or a list in the order of the
            optimizers.
        keep: number of the newest checkpoints that remain; older ones are deleted; 0 = all remain.
        config: a JSON-able mapping, dataclass or transformers config that describes the model, for
            comparison in `load`. None = the config of a native decoder or transformers model.

    Returns:
        The new checkpoint, `root/step-000123`.

    Raises:
        ValueError: before files are written, for a wrong argument, or a replicated value that
            differs between ranks.
        NotImplementedError: before files are written, for state that a checkpoint cannot store.
        OSError: if another job writes to `root`, or a rank could not write. `latest` is then
            unchanged, unless the error says that this step is saved.
    """
    with share_errors():
        check_arguments(save, locals())
        lock = make_lock(make_path(root))
        snapshot = take_snapshot(step, model, optimizer, extra, scheduler=scheduler, config=config)
    check_rank_agreement(snapshot)
    snapshot = join_stages(snapshot)
    try:
        draft = start_draft(lock, step)
        write_checkpoint(draft, snapshot, get_local_tensors(snapshot), keep=keep, meter=Meter())
    finally:
        lock.release()
    return make_step_path(lock.root, step)


@share_call_errors
@run_in_expert_order
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    scheduler: Schedulers | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: Verify = "full",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Set model, optimizer and generators to their saved state, in place. Collective.

    The parallel layout may differ from the saved layout: every rank reads its shards. Random
    generators are set only with an optimizer, and only on ranks that the saving run also had.
    Gradients and token counts of an unfinished step are dropped (`TrainStep.drop`). Buffers that no
    checkpoint stores (transformers' rotary frequencies) are recomputed.

    Args:
        path: a complete checkpoint, such as from `latest`, or its URL. From a URL each rank reads
            only the byte ranges of its shards, after `verify`.
        model: with storage (not on meta), and the global shapes and dtypes of the checkpoint.
        optimizer: built like the saved optimizer, or a list in the order of the save. Its state is
            replaced, and may be empty before.
        scheduler: built like the saved scheduler, or a list; None = no scheduler state is loaded.
        strict: raise for any difference. False loads tensors with equal names and shapes, does not
            change other tensors, and warns.
        cast: allow dtypes that differ from the saved dtypes, and convert the values.
        verify: "full" hashes every file first, each on one rank; "sizes" checks sizes and headers.
        progress: called with (bytes done, bytes expected) of this rank.

    Returns:
        `extra` of the save; tensors are on the CPU.

    Raises:
        ValueError: if the checkpoint is damaged or does not fit, before any state changes.
        OSError: if a rank could not read; the model may then be partly loaded.
    """
    with share_errors():
        check_arguments(load, locals())
        path = make_path(path)
    meter = Meter(progress)
    check_same_path(path)
    manifest = run_on_first_rank(lambda: read_manifest(path))
    view, comparison = compare_checkpoint(manifest, model, optimizer, scheduler, cast=cast)
    run_and_share_errors(lambda: refuse_differences(comparison, path, strict=strict))
    if comparison.uncompared and is_first_rank():
        warnings.warn(f"path ({path}): {comparison.uncompared}", stacklevel=4)
    verify_files(path, manifest, verify, meter)
    drop_step(model)
    for layer in model.modules():
        cloner = layer.cloner if isinstance(layer, RoutedLayer) else None
        if cloner is not None and cloner.plan is not None:
            cloner.plan.clear()  # a checkpoint has no plan
    try:
        with torch.no_grad():
            for buffer, value in compute_missing_buffers(model):
                buffer.copy_(value)
    except NotImplementedError as error:
        warnings.warn(f"path ({path}): {error}: left as it was", stacklevel=4)
    amax = allocate_amax_load_target(model, manifest)
    extra = _read_into_objects(path, manifest, view, comparison, amax, meter, strict=strict)
    restore_amax_histories(model, amax)
    if comparison.scheduler is not None:
        assert manifest.facts.scheduler is not None
        values = decode_scheduler_state(comparison.scheduler, manifest.facts.scheduler)
        comparison.scheduler.load_state_dict(values)
    if comparison.left_out and is_first_rank():
        differences = f"{len(comparison.left_out)} differ: {join_problems(comparison.left_out)}"
        warnings.warn(f"path ({path}): {differences}: left as it was", stacklevel=4)
    meter.log(f"loaded {path}, verify={verify}")
    return extra


def start_draft(lock: RunLock | RemoteLock, step: int, group: Group = None) -> Draft:
    """Acquire the run's lock and create a draft on rank 0; return the draft. Collective."""

    def lock_and_create() -> Draft:
        lock.acquire()
        return create_draft(lock.root, step, lock.owner_text)

    draft = run_on_first_rank(lock_and_create, group)
    check_draft_is_visible(draft.folder, group)
    return draft


def write_checkpoint(
    draft: Draft,
    snapshot: Snapshot,
    local_tensors: Mapping[str, Tensor],
    *,
    keep: int,
    meter: Meter,
    group: Group = None,
) -> None:
    """Write this rank's `local_tensors`, named as in `snapshot`; publish the draft. Collective."""
    save_snapshot = partial(
        dcp.save,
        snapshot.tensors,
        storage_writer=Writer(
            draft, get_rank_and_world()[0], snapshot.facts, keep=keep, meter=meter
        ),
        planner=LocalSavePlanner(local_tensors),
        process_group=group,
    )
    try:
        run_dcp_call("write", draft.folder, save_snapshot)
    except OSError as error:
        if is_first_rank():
            remove_draft(draft)
        if is_published(draft.root, snapshot.facts.step):
            raise OSError(
                f"{error}; but step {snapshot.facts.step} is saved and `latest` names it: do not "
                "save it again"
            ) from error
        raise
    meter.log(f"saved {make_step_path(draft.root, snapshot.facts.step)}")


def _read_into_objects(
    path: AnyPath,
    manifest: Manifest,
    view: ModelView,
    comparison: Comparison,
    amax: Mapping[str, Tensor],
    meter: Meter,
    *,
    strict: bool,
) -> dict[str, Any]:
    """Read the tensors that `comparison` selected, in place; return `extra`. Collective."""
    target = {f"model.{name}": view.stored_views[name] for name in sorted(comparison.model)}
    extra = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        for name, tensor in select_tensors("extra.", manifest).items()
    }
    target |= {f"extra.{name}": tensor for name, tensor in extra.items()}
    target |= {f"amax.{name}": steps for name, steps in amax.items()}
    states, optimizer_tensors = allocate_optimizer_load_target(comparison, view)
    rng = select_rng_load_target(manifest) if comparison.optimizers else {}
    target |= optimizer_tensors | rng
    planner = BlockLoadPlanner()
    reader = Reader(path, manifest, meter)
    run_dcp_call("read", path, lambda: dcp.load(target, storage_reader=reader, planner=planner))
    target.clear()  # frees moments that the optimizer converts to another dtype
    optimizer_tensors.clear()
    if comparison.groups:
        assert manifest.facts.optimizer is not None
        restore_hyperparameters(comparison.optimizers, manifest.facts.optimizer)
    for optimizer, state in zip(comparison.optimizers, states, strict=True):
        if strict:
            optimizer.state.clear()
        restore_optimizer_state(optimizer, state)
    restore_rng_states(rng)
    return {**manifest.facts.extra, **extra}


@share_call_errors
def verify(
    path: str | os.PathLike[str], mode: Verify = "full", *, progress: Progress | None = None
) -> Manifest:
    """Check a checkpoint without loading it; return its manifest. Collective.

    Args:
        path: the directory or URL of the checkpoint.
        mode: "full" hashes every byte, each file on one rank; "sizes" checks sizes and headers.
        progress: called with (bytes done, bytes expected) of this rank.

    Raises:
        ValueError: on every rank, naming the first damaged file.
        OSError: if a rank could not read.
    """
    with share_errors():
        check_arguments(verify, locals())
        path = make_path(path)
    manifest = run_on_first_rank(lambda: read_manifest(path))
    verify_files(path, manifest, mode, Meter(progress))
    return manifest


def verify_files(path: AnyPath, manifest: Manifest, mode: Verify, meter: Meter) -> None:
    """Check each file on one rank (`mode` "full": hash it); raise the first error. Collective."""
    rank, world = get_rank_and_world()
    names = sorted(manifest.files)[rank::world]
    if mode == "full":
        meter.expect(sum(manifest.files[name].size for name in names))

    def check(name: str) -> Exception | None:
        layout = compute_layout(manifest.list_file_entries(name))
        try:
            problem = find_file_problem(
                path / name, layout, manifest.files[name], full=mode == "full", meter=meter
            )
        except OSError as error:
            return OSError(f"path ({path / name}) could not be read to verify it: {error}")
        if problem is None:
            return None
        return ValueError(
            f"path ({path / name}) must be as it was saved, but {problem}: load another checkpoint"
        )

    # Hashing releases the GIL, so files are read concurrently.
    with ThreadPoolExecutor(min(_THREADS, max(1, len(names)))) as pool:
        local_error = next((error for error in pool.map(check, names) if error is not None), None)
    for error in gather_objects(local_error):
        if error is not None:
            raise error
