"""State of a Trainer's run in the `extra` of checkpoints, and the checkpoint to resume from.

The entries are the text of Trainer's trainer_state.json, and the states of Python's and numpy's
generators, fp64 [ranks, NUM_WORDS].
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerState

from moecore.io import latest, read_manifest
from moecore.io.checkpoint.object_storage import AnyPath, make_path
from moecore.io.checkpoint.ranks import run_on_first_rank

STATE = "trainer_state"
GENERATORS = "host_generators"
_NUM_PYTHON = 625  # words of random's state
_NUM_NUMPY = 624
NUM_WORDS = _NUM_PYTHON + 2 + _NUM_NUMPY + 3


def find_checkpoint_to_resume(
    resume_from: str | os.PathLike[str] | bool | None, root: Path, *, will_save: bool
) -> AnyPath | None:
    """Return the checkpoint to resume from, or None for a new run. Collective.

    `resume_from` is a directory or URL; True = the newest checkpoint in `root`; None or False = a
    new run. ValueError if True finds no checkpoint, or if a new run `will_save` and finds one.
    """
    newest = run_on_first_rank(lambda: latest(root))
    if resume_from is None or resume_from is False:
        if will_save and newest is not None:
            raise ValueError(
                f"output_dir ({root.parent}) must have no checkpoints ({newest.name}) for a new "
                "run: train(resume_from_checkpoint=True), or use another directory"
            )
        return None
    if resume_from is True and newest is None:
        raise ValueError(
            f"resume_from_checkpoint (True) must find a checkpoint in {root}: leave it out"
        )
    return newest if resume_from is True else make_path(resume_from)


def encode_state(state: TrainerState) -> str:
    """Convert rank 0's Trainer state to JSON text; return it on every rank. Collective."""
    return run_on_first_rank(lambda: json.dumps(asdict(state)))


def read_state_text(path: AnyPath) -> str:
    """Return a checkpoint's trainer_state.json as text; ValueError if invalid. Collective."""
    extra = run_on_first_rank(lambda: read_manifest(path).facts.extra)
    if STATE not in extra:
        raise ValueError(
            f"resume_from_checkpoint ({path}) must be a checkpoint of MoETrainer: load any other "
            "with moecore.io.load before training"
        )
    return str(extra[STATE])


def get_host_rng_state() -> Tensor:
    """Return the states of Python's and numpy's generators in one tensor, fp64 [NUM_WORDS]."""
    _, words, cached = random.getstate()
    state: Any = np.random.get_state()
    _, keys, position, has_cached, numpy_cached = state
    python = [*words, float(cached is not None), cached or 0.0]
    numpy = [*keys.tolist(), position, has_cached, numpy_cached]
    return torch.tensor([*python, *numpy], dtype=torch.float64, device="cpu")


def set_host_rng_state(state: Tensor) -> None:
    """Set Python's and numpy's generators to the states from `get_host_rng_state`."""
    values = state.tolist()
    has_cached, cached = values[_NUM_PYTHON : _NUM_PYTHON + 2]
    random.setstate((3, tuple(map(int, values[:_NUM_PYTHON])), cached if has_cached else None))
    *keys, position, has_cached, cached = values[_NUM_PYTHON + 2 :]
    np.random.set_state(
        ("MT19937", np.array(keys, dtype=np.uint32), int(position), int(has_cached), cached)
    )
