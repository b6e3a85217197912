"""save_model of a `MoETrainer`: an export into a directory that may exist."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import nn

from moecore.checkpoint.ranks import on_first_rank
from moecore.hf import export_hf


def export_into(model: nn.Module, folder: Path) -> None:
    """Export a model into a directory that may exist, in place of an earlier export. Collective."""
    draft = folder / ".export"
    on_first_rank(lambda: shutil.rmtree(draft, ignore_errors=True))  # a kill may have left one
    export_hf(model, draft)
    on_first_rank(lambda: _publish(draft, folder))


def _publish(draft: Path, folder: Path) -> None:
    """Move an export's files up; config.json, without which nothing loads, goes and comes last."""
    config = folder / "config.json"
    config.unlink(missing_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    for file in sorted(draft.iterdir(), key=lambda file: file.name == config.name):
        file.replace(folder / file.name)
    draft.rmdir()
