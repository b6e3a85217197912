"""recipe_of: a planned run as TOML for `moecore pretrain` and `finetune`.

Names are those of its flags and of the records of options: a field that has its default is left
out. What a plan does not know is given beside the file: data, tokenizer, steps, learning rate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from moecore.base.fields import check_arguments
from moecore.models.config import DecoderConfig
from moecore.planning.model import preset_of
from moecore.planning.run import TrainingRun, dispatcher_of, precision_name

OTHER_LINES = ("param_dtype", "stash")  # fields that another line stands for
REMAINING_DEGREES = ("dp_shard", "edp_shard")  # degrees that are what others leave
OPTIONAL_DEGREES = ("pp", "tp", "cp")  # degrees of 1 without these
VALUES = (bool, int, float, str)


def recipe_of(run: TrainingRun, config: Path | None = None) -> str:
    """Return the TOML of a run.

    Args:
        run: any; `moecore pretrain` trains native decoders.
        config: the config.json of its model, or the directory; None = the model is a preset.

    Raises:
        ValueError: for a model that is neither a preset nor read from a config.json, and options
            without a name.
    """
    check_arguments(recipe_of, locals())
    precision = None if run.precision is None else precision_name(run.precision)
    if run.precision is not None and precision is None:
        raise ValueError("precision must be one that has a name for a recipe: print its --call")
    if run.nvlink is not None and run.nvlink.row_factor is None:
        raise ValueError(
            "nvlink.row_factor (None) must be a number for a recipe, as TOML has no None: give "
            "--row-factor"
        )
    model, changes = {"hf_config": str(config)}, dict[str, int]()
    if config is None:
        preset = preset_of(run.model) if isinstance(run.model, DecoderConfig) else None
        if preset is None:
            raise ValueError(
                "model must be a preset, or be read from a config.json, for a recipe: write one "
                "and pass config"
            )
        model, changes = {"preset": preset[0]}, preset[1]
    resolved = {f.name: getattr(run.resolved, f.name) for f in fields(run.parallel)}
    degrees = {
        n: d
        for n, d in resolved.items()
        if n not in REMAINING_DEGREES and (d > 1 or n not in OPTIONAL_DEGREES)
    }
    is_sent = run.resolved.ep * run.resolved.etp > 1
    tables: dict[str, Mapping[str, Any]] = {
        "": model
        | degrees
        | {
            "seq_len": run.seq_len,
            "batch_size": run.batch_size,
            "grad_accum": run.num_micro_batches,
            "dtype": "bfloat16",
            "precision": precision,
            "moment_dtype": run.optimizer.moment_dtype,
            "master_remainder": run.optimizer.master_remainder or None,
            "state_offload": run.optimizer.offload_fraction or None,
        },
        "model": changes,
        "sharding": {
            "dispatcher": _dispatcher(run) if is_sent else None,
            "fp8_dispatch": run.fp8_dispatch or None,
            "stash": None if run.memory.stash is None else True,
        },
        "fsdp": _changed(run.fsdp),
        "memory": _changed(run.memory),
        "stash": _changed(run.memory.stash),
        "nvlink": _changed(run.nvlink),
        "pipeline": _changed(run.pipeline),
    }
    text = list[str]()
    for table, values in tables.items():
        lines = [f"{name} = {_toml(v)}" for name, v in values.items() if v is not None]
        text += [*([f"[{table}]"] if table and lines else []), *lines]
    return "\n".join(text) + "\n"


def _dispatcher(run: TrainingRun) -> str:
    """Return the dispatcher of the file: "auto" where that is "nvlink" on the planned GPUs."""
    # CPU ranks refuse "nvlink". There "auto" is "alltoall", so the file trains on them too.
    name = dispatcher_of(run)
    return "auto" if name == "nvlink" and run.memory.stash is None else name


def _changed(record: Any) -> dict[str, Any]:
    """Return the fields of a record that have no default's value; {} of None."""
    if record is None:
        return {}
    plain = type(record)()
    values = {f.name: (getattr(record, f.name), getattr(plain, f.name)) for f in fields(record)}
    return {n: v for n, (v, default) in values.items() if v != default and n not in OTHER_LINES}


def _toml(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value if isinstance(value, VALUES) else str(value).removeprefix("torch."))
