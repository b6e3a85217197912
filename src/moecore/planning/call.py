"""The Python of a run: what to paste into a script that trains it."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, get_args

from moecore.base.fields import check_arguments
from moecore.base.options.precision import Precision, PrecisionName
from moecore.models.presets import PRESETS
from moecore.planning.run import TrainingRun


def call_of(run: TrainingRun) -> str:
    """Return the calls that make a run: meshes, model, `parallelize_moe`, optimizer, step."""
    check_arguments(call_of, locals())
    name = next((name for name, config in PRESETS.items() if config == run.model), None)
    arguments = {"fsdp": _shown(run.fsdp)}
    if run.memory.parts or run.memory.offload or run.memory.stash:
        arguments["memory"] = _shown(run.memory)
    if run.precision is not None:
        arguments["precision"] = _precision(run.precision)
    if run.nvlink is not None:
        arguments |= {"dispatcher": "'nvlink'", "nvlink": _shown(run.nvlink)}
    elif run.resolved.ep * run.resolved.etp > 1:
        arguments["dispatcher"] = "'alltoall'"
    if run.pipeline is not None:
        arguments["pipeline"] = _shown(run.pipeline)
    options = run.optimizer
    moments = (
        "" if options.moment_dtype == "float32" else f", moment_dtype=torch.{options.moment_dtype}"
    )
    moments += ", master_remainder=True" if options.master_remainder else ""
    away = options.offload_fraction
    lines = [
        "import torch",
        "",
        "from moecore import *",
        "from moecore.models import Decoder, preset",
        f"from moecore.train import AdamW{', StateOffload' if away else ''}",
        *(["from moecore.precision import *"] if "Precision(" in str(arguments) else []),
        "",
        f"meshes = build_meshes({_shown(run.parallel)})",
        f"config = preset({name!r})" if name else f"config = {run.model!r}",
        f'model = Decoder(config, device="meta", dtype={run.dtype})',
        "parallelize_moe(",
        "    model,",
        "    meshes,",
        *(f"    {key}={value}," for key, value in arguments.items()),
        ")",
        "model.to_empty(device=meshes.device_type)",
        "model.init_weights(0)",
        f"optimizer = AdamW(model.parameters(){moments})",
        *([f"StateOffload(optimizer, model, fraction={away})"] if away else []),
        f"step = TrainStep(model, optimizer, num_micro_batches={run.num_micro_batches})",
    ]
    return "\n".join(lines)


def _shown(record: Any) -> str:
    """Return a record with the fields that are not its defaults."""
    given = []
    for field in fields(record):
        value = getattr(record, field.name)
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        if value != default:
            given.append(f"{field.name}={value!r}")
    return f"{type(record).__name__}({', '.join(given)})"


def _precision(precision: Precision) -> str:
    names = get_args(PrecisionName)
    name = next((name for name in names if Precision.of(name) == precision), None)
    return repr(precision) if name is None else repr(name)
