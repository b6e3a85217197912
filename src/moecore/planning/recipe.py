"""A planned run as text: flags of `moecore plan`, Python calls, and TOML for recipes.

    format_run_flags      -> the command that plans the run
    format_python_calls   -> the Python that builds the run on GPUs
    format_recipe         -> TOML for `moecore pretrain` and `moecore finetune`

A TOML has the names of the commands' flags and of the fields of option records. Fields with default
values are left out. Data, tokenizer, steps and learning rate are flags of the command, because they
are not part of a plan.
"""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

from moecore.base.command_options import format_toml_tables, get_field_default, make_flag_name
from moecore.base.options.dispatch import DispatchOptions
from moecore.base.options.names import PrecisionName
from moecore.base.options.precision import Precision
from moecore.models.config import DecoderConfig
from moecore.planning.gpus import are_peers
from moecore.planning.model import find_preset
from moecore.planning.run import TrainingRun, make_dispatch_options

OTHER_LINES = ("param_dtype", "stash")  # fields that another line of a TOML stands for
DEGREES = ("pp", "tp", "cp", "ep", "etp", "dp_replicate", "edp_replicate")  # others follow
Tables = dict[str, dict[str, Any]]


def list_layout(run: TrainingRun) -> Tables:
    """Return {table: {option: value}} of a run's degrees, sizes and pipeline."""
    degrees = {name: getattr(run.resolved, name) for name in DEGREES}
    sizes = {"seq_len": run.seq_len, "batch_size": run.batch_size}
    sizes |= {"grad_accum": run.num_micro_batches}
    degrees = {name: degree for name, degree in degrees.items() if degree > 1 or name == "ep"}
    return {"": degrees | sizes, "pipeline": _find_changed_options(run.pipeline)}


def list_options(run: TrainingRun) -> Tables:
    """Return {table: {option: value}} of the options that change a run's memory; None = not set."""
    state, precision, stash = run.optimizer, run.precision, run.memory.stash
    recipe_name = None if precision is None else find_precision_name(precision)
    fp8 = dict[str, Any]()  # a format of frozen weights
    if precision is not None and not (recipe_name or precision.recipe or precision.overrides):
        fp8 = _find_changed_options(precision)
    # "auto" selects "nvlink" on the planned GPUs and "alltoall" on CPU ranks, so the file trains on
    # both. Ranks that are no peers have "alltoall" by "auto" too.
    group = run.resolved.ep * run.resolved.etp
    name, nvlink = make_dispatch_options(run).name, run.nvlink
    is_auto = stash is None if name == "nvlink" else not are_peers(group, run.num_peers)
    return {
        "": {
            "precision": recipe_name or (None if fp8 or precision is None else repr(precision)),
            "moment_dtype": None if state.moment_dtype == "float32" else state.moment_dtype,
            "master_remainder": state.master_remainder or None,
            "state_offload": state.offload_fraction or None,
        },
        "fp8": fp8,
        "sharding": {
            "dispatcher": None if is_auto and name != "hierarchical" else name,
            "fp8_dispatch": run.fp8_dispatch or None,
            "stash": None if stash is None else True,
        },
        "memory": _find_changed_options(run.memory),
        "stash": _find_changed_options(stash),
        "nvlink": {"row_factor": nvlink and nvlink.row_factor} | _find_changed_options(nvlink),
        "fsdp": {"dense_strategy": run.fsdp.dense_strategy} | _find_changed_options(run.fsdp),
    }


def format_flags(*options: Tables) -> list[str]:
    """Return options as words such as ["--ep", "8"]; options that are None have no flag."""
    words = list[str]()
    values = (pair for tables in options for table in tables.values() for pair in table.items())
    for name, value in values:
        if value is not None:
            items = () if isinstance(value, bool) else value
            items = items if isinstance(items, tuple) else (items,)
            texts = (f"{item:g}" if isinstance(item, float) else str(item) for item in items)
            flag = f"--{'no-' if value is False else ''}{make_flag_name(name)}"
            words += [flag, *(text.removeprefix("torch.") for text in texts)]
    return words


def format_run_flags(run: TrainingRun) -> list[str]:
    """Return the degrees and options of a run as flags of `moecore plan`."""
    return format_flags(list_layout(run), list_options(run))


def format_python_calls(run: TrainingRun) -> str:
    """Return Python that builds a run: meshes, model, `parallelize_moe`, optimizer, step."""
    sizes = f"{run.num_micro_batches}, {run.batch_size}, {run.seq_len}"
    arguments = {"fsdp": _format_record(run.fsdp), "loss": "'mean'"}
    if _find_non_default_fields(run.memory):
        arguments["memory"] = _format_record(run.memory)
    if run.precision is not None:
        arguments["precision"] = repr(find_precision_name(run.precision) or run.precision)
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
    values = ((f, getattr(record, f.name)) for f in fields(record))
    return {f.name: value for f, value in values if value != get_field_default(f)}


def find_precision_name(precision: Precision) -> str | None:
    """Return the `--precision` name of these options; None = no name has equal options."""
    names = get_args(PrecisionName)
    return next((name for name in names if Precision.of(name) == precision), None)


def format_recipe(run: TrainingRun, config: Path | None = None) -> str:
    """Return a run as TOML for `moecore pretrain`; ValueError for options TOML cannot express.

    `config` is the path of the model's config.json or its directory; None = the model is a preset.
    """
    options = list_options(run)
    has_name = run.precision is None or find_precision_name(run.precision) is not None
    if not (has_name or options["fp8"]):
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
    layout = list_layout(run)
    top = model | layout[""] | {"dtype": "bfloat16"} | options[""]
    return format_toml_tables({**layout, **options, "": top, "model": changes})


def _find_changed_options(record: Any) -> dict[str, Any]:
    """Return a record's non-default fields, without fields that another line sets; {} for None."""
    return {n: v for n, v in _find_non_default_fields(record).items() if n not in OTHER_LINES}
