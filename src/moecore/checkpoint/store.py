"""save and load: one directory per step, written and read by all ranks together.

The tensors go through torch.distributed.checkpoint, everything else is JSON in the marker file.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from moecore.checkpoint.directory import new_draft, publish, read_marker
from moecore.checkpoint.state import (
    ModelView,
    check_json,
    empty_optimizer_state,
    optimizer_groups,
    optimizer_tensors,
    restore_groups,
    restore_rng,
    rng_tensors,
)

T = TypeVar("T")
Sizes = dict[str, tuple[torch.Size, torch.dtype]]


def save(
    root: str | os.PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    extra: Mapping[str, Any] | None = None,
    *,
    keep: int = 0,
) -> Path:
    """Write a checkpoint of this step and return its directory. Collective.

    Kept are parameters, persistent buffers (the routers' expert bias among them), the optimizer's
    state and hyperparameters, each rank's CPU and CUDA generator states, and `extra`: what a
    bit-exact resume needs. Call it between optimizer steps. A kill at any moment leaves the
    previous checkpoint loadable. Every rank must see `root`.

    Args:
        root: directory of the run; one save at a time writes to it.
        step: >= 0; names the directory.
        model: parallelized or plain.
        optimizer: over the model's parameters.
        extra: name -> JSON-able value or plain tensor, the same on every rank.
        keep: how many of the newest checkpoints stay; 0 = all.

    Returns:
        The new checkpoint, `root/step-000123`.

    Raises:
        ValueError: for a wrong argument, before anything is written.
        OSError: when a rank could not write; nothing changed for `latest`.
    """
    _check_count("step", step)
    _check_count("keep", keep)
    view = ModelView(model)
    values = {k: v for k, v in (extra or {}).items() if not isinstance(v, Tensor)}
    check_json("extra", values)
    marker = {
        "step": step,
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "torch": torch.__version__,
        "optimizer": optimizer_groups(optimizer, view),
        "extra": values,
    }
    tensors = {f"model.{name}": tensor for name, tensor in view.stored.items()}
    tensors |= {f"optimizer.{k}": v for k, v in optimizer_tensors(optimizer, view).items()}
    tensors |= {f"extra.{k}": v for k, v in (extra or {}).items() if isinstance(v, Tensor)}
    tensors |= rng_tensors()

    draft = _on_first_rank(lambda: new_draft(Path(root), step))
    _check_visible(draft)
    _checked_io("write", draft, lambda: dcp.save(tensors, checkpoint_id=draft))
    return _on_first_rank(lambda: publish(draft, step, marker, keep=keep))


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Set model, optimizer and generators as they were saved, in place. Collective.

    The layout may differ from the one that saved: every rank reads what it holds. A rank that the
    saving run did not have keeps its generators.

    Args:
        path: a whole checkpoint, such as from `latest`.
        model: materialised, with the same global shapes and dtypes.
        optimizer: built like the saved one; its state may be empty, and is replaced.

    Returns:
        `extra` of the save; tensors are on the CPU.

    Raises:
        ValueError: when the checkpoint is not whole or does not fit, before anything is changed.
        OSError: when a rank could not read; the model may then be part old, part new.
    """
    path = Path(path)
    _check_same(path)
    marker = _on_first_rank(lambda: read_marker(path))
    view = ModelView(model)
    stored = _stored_sizes(path)
    _check_model(path, view, _below("model.", stored))
    target = {f"model.{name}": tensor for name, tensor in view.stored.items()}

    sizes = _below("optimizer.", stored)
    state = empty_optimizer_state(optimizer, view, sizes)
    for param, slots in state.items():
        name = view.name_of(param)
        for slot, value in slots.items():
            stored_value = value if value.ndim == 0 else view.view(name, value)
            target[f"optimizer.{slot}.{name}"] = stored_value
    extra = {k: torch.empty(*v[:1], dtype=v[1]) for k, v in _below("extra.", stored).items()}
    target |= {f"extra.{k}": v for k, v in extra.items()}
    rng = {name: tensor for name, tensor in rng_tensors().items() if name in stored}
    target |= rng

    restore_groups(optimizer, view, marker["optimizer"])
    _checked_io("read", path, lambda: dcp.load(target, checkpoint_id=path))
    optimizer.state.clear()
    optimizer.state.update(state)
    restore_rng(rng)
    return {**marker["extra"], **extra}


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} ({value!r}) must be a whole number >= 0")


def _stored_sizes(path: Path) -> Sizes:
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _below(prefix: str, sizes: Sizes) -> Sizes:
    return {k.removeprefix(prefix): v for k, v in sizes.items() if k.startswith(prefix)}


def _check_model(path: Path, view: ModelView, sizes: Sizes) -> None:
    """Raise for the first difference that torch would load over silently or deep inside."""
    for names, here, there in (
        (view.stored.keys() - sizes.keys(), "model", "checkpoint"),
        (sizes.keys() - view.stored.keys(), "checkpoint", "model"),
    ):
        if names:
            raise ValueError(
                f"path ({path}) must hold the tensors of this model: {min(names)} (and "
                f"{len(names) - 1} more) of the {here} is not in the {there}"
            )
    for name, tensor in view.stored.items():
        found, wanted = sizes[name], (tensor.shape, tensor.dtype)
        if found != wanted:
            raise ValueError(
                f"{name} {tuple(found[0])} {found[1]} in {path} must be {tuple(wanted[0])} "
                f"{wanted[1]} as in the model: build the model as when it was saved"
            )


def _on_first_rank(action: Callable[[], T]) -> T:
    """Run an action on rank 0 and return its result, or raise its error, on every rank."""
    if not dist.is_initialized():
        return action()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _check_same(path: Path) -> None:
    """Raise on every rank when they want to load different checkpoints, or one sees none."""
    if not dist.is_initialized():
        return
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, (path.name, path.is_dir()))
    if len({name for name, _ in names}) > 1:
        raise ValueError(
            f"path ({path.name}) must be the same on every rank, but rank 0 has {names[0][0]}: "
            "let one rank look for the latest and broadcast it"
        )
    seen = [found for _, found in names]
    if any(seen) and not all(seen):
        raise ValueError(
            f"path ({path}) must be visible to every rank, but rank {seen.index(False)} does not "
            "see it: use a shared file system"
        )


def _check_visible(draft: Path) -> None:
    """Raise on every rank when one does not see the directory: its shards would be lost."""
    if not dist.is_initialized():
        return
    seen = [False] * dist.get_world_size()
    dist.all_gather_object(seen, draft.is_dir())
    if not all(seen):
        raise ValueError(
            f"root ({draft.parent}) must be one directory for all ranks, but rank "
            f"{seen.index(False)} does not see what rank 0 made there: use a shared file system"
        )


def _checked_io(verb: str, path: Path, action: Callable[[], object]) -> None:
    """Run a torch.distributed.checkpoint call; its own exception is no Exception and many lines."""
    try:
        with warnings.catch_warnings():
            # A plain model in one process is what the caller has, not an oversight.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            action()
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"path ({path}): rank {rank} could not {verb} it: {cause!r}") from error
