"""A planned run as text: flags of `moecore plan`, Python calls, and TOML for recipes.

    format_flags   -> the command that plans the run
    format_python_calls   -> the Python that builds the run on GPUs
    format_recipe  -> TOML for `moecore pretrain` and `moecore finetune`

A TOML has the names of the commands' flags and of the fields of option records. Fields with default
values are left out. Data, tokenizer, steps and learning rate are flags of the command, because they
are not part of a plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

from moecore.base.fields import check_arguments
from moecore.base.options.dispatch import DispatchOptions
from moecore.base.options.names import PrecisionName
from moecore.base.options.precision import Precision
from moecore.models.config import DecoderConfig
from moecore.planning.model import find_preset
from moecore.planning.run import TrainingRun, make_dispatch_options

OTHER_LINES = ("param_dtype", "stash")  # fields that another line of a TOML stands for
REMAINING_DEGREES = ("dp_shard", "edp_shard")  # degrees that the other degrees determine
OPTIONAL_DEGREES = ("pp", "tp", "cp")  # degrees of 1 unless given
VALUES = (bool, int, float, str)


def format_option_flags(run: TrainingRun) -> list[str]:
    """Return the flags of `moecore plan` for a run's options that change its memory."""
    memory, options, fraction = run.memory, run.optimizer, run.optimizer.offload_fraction
    values: dict[str, Any] = {
        "precision": None if run.precision is None else _format_precision(run.precision).strip("'"),
        "recompute": memory.recompute,
        "offload": memory.offload,
        "offload-frozen": memory.offload_frozen,
        "offload-params": memory.offload_params,
        "stash": memory.stash is not None,
        "row-factor": None if run.nvlink is None else run.nvlink.row_factor,
        "dispatcher": None if run.dispatcher == "auto" else run.dispatcher,
        "fp8-dispatch": run.fp8_dispatch,
        "dense-strategy": run.fsdp.dense_strategy,
        "fp8-param-gather": run.fsdp.fp8_param_gather,
        "moments": None if options.moment_dtype == "float32" else options.moment_dtype,
        "master-remainder": options.master_remainder,
        "state-offload": fraction or None,
    }
    return _format_flags(values)


def format_flags(run: TrainingRun) -> list[str]:
    """Return the degrees and options of a run as flags of `moecore plan`."""
    p, pipeline = run.resolved, run.pipeline
    values: dict[str, Any] = {"seq-len": run.seq_len}
    for name in ("pp", "tp", "cp", "ep", "etp"):
        degree = getattr(p, name)
        values[name] = degree if degree > 1 or name == "ep" else None
    values |= {"batch-size": run.batch_size, "micro-batches": run.num_micro_batches}
    if pipeline is not None:
        values |= {"schedule": pipeline.schedule, "layout": pipeline.layout}
        values["chunks"] = None if pipeline.layout else pipeline.chunks
    return _format_flags(values) + format_option_flags(run)


def _format_flags(values: Mapping[str, Any]) -> list[str]:
    """Return {flag: value} as words such as ["--ep", "8"]; None, False and () have no flag."""
    flags = list[str]()
    for name, value in values.items():
        if value is not None and value is not False and value != ():
            items = () if value is True else value if isinstance(value, tuple) else (value,)
            texts = (f"{item:g}" if isinstance(item, float) else str(item) for item in items)
            flags += [f"--{name}", *texts]
    return flags


def format_python_calls(run: TrainingRun) -> str:
    """Return Python that builds a run: meshes, model, `parallelize_moe`, optimizer, step."""
    check_arguments(format_python_calls, locals())
    sizes = f"{run.num_micro_batches}, {run.batch_size}, {run.seq_len}"
    arguments = {"fsdp": _format_record(run.fsdp), "loss": "'mean'"}
    if _find_non_default_fields(run.memory):
        arguments["memory"] = _format_record(run.memory)
    if run.precision is not None:
        arguments["precision"] = _format_precision(run.precision)
    if run.resolved.ep * run.resolved.etp > 1 or run.nvlink is not None or run.fp8_dispatch:
        dispatch = make_dispatch_options(run)
        is_name = dispatch == DispatchOptions.of(dispatch.name)
        arguments["dispatch"] = repr(dispatch.name) if is_name else _format_record(dispatch)
    if run.pipeline is not None:
        arguments["pipeline"] = _format_record(run.pipeline)
    options = run.optimizer
    moments = (
        "" if options.moment_dtype == "float32" else f", moment_dtype=torch.{options.moment_dtype}"
    )
    moments += ", master_remainder=True" if options.master_remainder else ""
    fraction = options.offload_fraction
    is_split = run.dispatcher == "hierarchical"
    domain = f", ranks_per_domain={run.ranks_per_domain}" if is_split else ""
    imports, allocates = "", "model.to_empty("
    if run.memory.offload_params:
        imports, allocates = ", materialize", "materialize(model, "
    source = run.planned_model.make_source(run.dtype)
    replaces = any("replace(" in line for line in source.build)
    lines = [
        *(["from dataclasses import replace", ""] if replaces else []),
        "import torch",
        "",
        "from moecore import *",
        *source.imports,
        f"from moecore.train import AdamW{', StateOffload' if fraction else ''}{imports}",
        "",
        f"meshes = build_meshes({_format_record(run.parallel)}{domain})",
        *source.build,
        "parallelize_moe(",
        "    model,",
        "    meshes,",
        *(f"    {key}={value}," for key, value in arguments.items()),
        ")",
        f"{allocates}device=meshes.device_type)",
        source.fill,
        f"optimizer = AdamW(model.parameters(){moments})",
        *([f"StateOffload(optimizer, model, fraction={fraction})"] if fraction else []),
        f"num_micro_batches, rows, seq_len = {sizes}  # of a step and of a data rank",
        "step = TrainStep(model, optimizer, max_norm=1.0, num_micro_batches=num_micro_batches)",
        f"# step.forward_backward(num_micro_batches dicts of {source.inputs}, both int64",
        "# [rows, seq_len]), then step.finish()",
    ]
    return "\n".join(lines)


def _format_record(record: Any) -> str:
    """Return the Python that constructs a record, with fields that differ from their defaults."""
    changed = _find_non_default_fields(record).items()
    values = ((n, _format_record(v) if is_dataclass(v) else repr(v)) for n, v in changed)
    return f"{type(record).__name__}({', '.join(f'{n}={v}' for n, v in values)})"


def _find_non_default_fields(record: Any) -> dict[str, Any]:
    """Return the fields of a record whose values are not their defaults; {} for None."""
    if record is None:
        return {}
    default = type(record)()
    values = {f.name: (getattr(record, f.name), getattr(default, f.name)) for f in fields(record)}
    return {name: value for name, (value, plain) in values.items() if value != plain}


def find_precision_name(precision: Precision) -> str | None:
    """Return the `--precision` name of these options; None = no name has equal options."""
    names = get_args(PrecisionName)
    return next((name for name in names if Precision.of(name) == precision), None)


def _format_precision(precision: Precision) -> str:
    """Return a precision's name in quotes, or its repr if it has no name."""
    return repr(find_precision_name(precision) or precision)


def format_recipe(run: TrainingRun, config: Path | None = None) -> str:
    """Return a run as TOML for `moecore pretrain`; ValueError for options TOML cannot express.

    `config` is the path of the model's config.json or its directory; None = the model is a preset.
    """
    check_arguments(format_recipe, locals())
    precision = None if run.precision is None else find_precision_name(run.precision)
    if run.precision is not None and precision is None:
        raise ValueError("precision must be one that has a name for a recipe: print its --call")
    if run.nvlink is not None and run.nvlink.row_factor is None:
        raise ValueError(
            "nvlink.row_factor (None) must be a number for a recipe, as TOML has no None: give "
            "--row-factor"
        )
    model, changes = {"hf_config": str(config)}, dict[str, int]()
    if config is None:
        preset = find_preset(run.model) if isinstance(run.model, DecoderConfig) else None
        if preset is None:
            raise ValueError(
                "model must be a preset, or be read from a config.json, for a recipe: write one "
                "and pass config"
            )
        model, changes = {"preset": preset[0]}, preset[1]
    resolved = {f.name: getattr(run.resolved, f.name) for f in fields(run.parallel)}
    flags = {n: d for n, d in resolved.items() if d > 1 or n not in OPTIONAL_DEGREES}
    degrees = {n: d for n, d in flags.items() if n not in REMAINING_DEGREES}
    is_sent = run.resolved.ep * run.resolved.etp > 1
    dispatcher = make_dispatch_options(run).name
    if dispatcher == "nvlink" and run.memory.stash is None:
        # CPU ranks refuse "nvlink". There "auto" is "alltoall", so the file trains on them too.
        dispatcher = "auto"
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
            "dispatcher": dispatcher if is_sent else None,
            "fp8_dispatch": run.fp8_dispatch or None,
            "stash": None if run.memory.stash is None else True,
        },
        "fsdp": _make_toml_table(run.fsdp),
        "memory": _make_toml_table(run.memory),
        "stash": _make_toml_table(run.memory.stash),
        "nvlink": _make_toml_table(run.nvlink),
        "pipeline": _make_toml_table(run.pipeline),
    }
    text = list[str]()
    for table, values in tables.items():
        lines = [f"{name} = {_format_toml(v)}" for name, v in values.items() if v is not None]
        text += [*([f"[{table}]"] if table and lines else []), *lines]
    return "\n".join(text) + "\n"


def _make_toml_table(record: Any) -> dict[str, Any]:
    """Return a record's non-default fields, without fields that another line sets; {} for None."""
    return {n: v for n, v in _find_non_default_fields(record).items() if n not in OTHER_LINES}


def _format_toml(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_format_toml, value))}]"
    return json.dumps(value if isinstance(value, VALUES) else str(value).removeprefix("torch."))
