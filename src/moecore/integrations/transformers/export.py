"""save_model of a `MoETrainer`: an export, or adapters, into a directory that may exist."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

from torch import nn

from moecore.io import export_hf, save_adapters
from moecore.io.checkpoint.ranks import on_first_rank
from moecore.io.hf.lora_merge import unmerged


def export_into(model: nn.Module, folder: Path) -> None:
    """Write a model into a directory that may exist, in place of an earlier export. Collective.

    Of a model with adapters of peft that are not merged only the active ones are written.
    """
    if unmerged(model):
        save_adapters(model, folder, adapter=cast(Any, model).active_adapter)
        return
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
