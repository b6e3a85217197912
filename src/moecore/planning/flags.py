"""The options of `moecore plan` and `dry-run`, and the run or search that they describe."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from moecore.base.command_options import Spelling, Table, UsageError, list_options, make_flag_name
from moecore.base.fields import quote
from moecore.base.options.memory import MemoryOptions
from moecore.base.options.names import GpuName, MomentDtype, PresetName
from moecore.families.transformers.lora_options import LoRAOptions
from moecore.io.hf.config import FAMILIES, decoder_config_from_hf
from moecore.io.hf.config_fields import read_config
from moecore.models import PRESETS
from moecore.parallel.mesh import ParallelConfig
from moecore.planning.gpus import Gpu, read_gpu
from moecore.planning.layouts import ANY, LAYOUT_FIELDS, Layout, SearchRequest
from moecore.planning.options import Sharding, ShardingOptions, make_optimizer_options
from moecore.planning.run import AnyModel, OptimizerOptions, TrainingRun, list_stages
from moecore.planning.transformers import TransformersModel

# Options, and tables of options, that some modes of the command do not read.
OF_SEARCHES = ("global_batch", "gpus_per_node")
OF_RUNS = ("batch_size", "micro_batches", "dispatcher", "fp8_dispatch", "pipeline", "fsdp")
OF_TRAININGS = (
    *("expert_backend", "overlap_shared", "compile_dense", "graph_dense", "clones", "dynamic_cp"),
)


@dataclass(frozen=True, kw_only=True)
class PlannedConfig(ShardingOptions):
    """Options of a planned run; "with degrees" means only if a parallel degree is given.

    Attributes:
        preset: the model.
        config: the model's Hugging Face config.json or its directory, in place of a preset.
        gpus: number of GPUs, one rank each.
        gpu: the kind of all GPUs; None = h100-80.
        gpu_spec: a TOML file with fields of moecore.planning.Gpu; `like` names a known GPU.
        batch_size: rows of a data rank's micro-batch, with degrees; None = 1.
        micro_batches: micro-batches of a step on a data rank, with degrees; None = 1.
        precision: recipe of GEMMs; None = bf16, or in a search FP8 if needed.
        lora: LoRA adapters, with --config and degrees; None = all weights are trained.
        finetune: plan the class of transformers, which moecore finetune trains, with --config;
            otherwise moecore's decoder of the same sizes, if there is one.
        checkpointing: recompute each layer, as transformers does, with --config.
        moment_dtype: the dtype of AdamW's moments.
        master_remainder: bf16 weights with fp32 masters, see moecore.train.AdamW.
        state_offload: fraction of AdamW's state in host memory.
        parallel: parallel degrees; if no degree is set, search for layouts.
        sharding: dispatchers, with degrees, and the paged buffer.
    """

    preset: PresetName | None = None
    config: Path | None = None
    gpus: int
    gpu: GpuName | None = None
    gpu_spec: Path | None = None
    seq_len: int = 4096
    batch_size: int | None = None
    micro_batches: Annotated[int | None, Spelling(alias="grad_accum")] = None
    lora: Annotated[LoRAOptions | None, Table(prefix=True)] = None
    finetune: bool = False
    checkpointing: bool = False
    moment_dtype: Annotated[MomentDtype, Spelling(alias="moments")] = "float32"
    master_remainder: bool = False
    state_offload: float = 0.0
    sharding: Annotated[Sharding, Table(without=OF_TRAININGS)] = Sharding()

    def __post_init__(self) -> None:
        for names in (("preset", "config"), ("gpu", "gpu_spec")):
            first, second = (getattr(self, name) for name in names)
            flags = " and ".join(f"--{make_flag_name(name)}" for name in names)
            if first is not None and second is not None:
                raise ValueError(f"{flags} must not both be set: drop one")
            if first is None and second is None and names[0] == "preset":
                raise ValueError(f"one of {flags} must be set: name a model")


@dataclass(frozen=True, kw_only=True)
class PlanConfig(PlannedConfig):
    """Plan the memory and the time of a training run.

    Without degrees the command prints layouts that fit, best first. With degrees it prints bytes by
    kind for each pipeline rank, the peak memory, and the time of a step.

    For example:
      moecore plan --preset deepseek-v3 --gpus 256 --gpu h100-80
      moecore plan --preset deepseek-v3 --gpus 256 --gpu h100-80 --explain pp=8,ep=8
      moecore plan --preset qwen3-30b-a3b --gpus 8 --gpu h200-141 --ep 8 --batch-size 4

    Attributes:
        global_batch: rows of a step, without degrees; None = 8 per GPU.
        gpus_per_node: GPUs that NVLink connects, without degrees; None = by the GPU.
        top: layouts to print, without degrees; None = 3. Four times as many are planned.
        explain: print why a layout such as pp=8,ep=8 is refused, or its options and memory.
        call: print the Python of the run, or of the best layout.
        write: write the TOML of the run, or of the best layout, for moecore pretrain.
        png: write a PNG of the memory per pipeline rank.
        timeline: write a PNG of the pipeline schedule of a step.
        html: write an HTML page of memory, time and stages, also for other batches and recompute.
        table: a cost table from moecore measure.
        pairs_hide: share of inter-node exchange time that overlapped stages hide; None = 0.93.
        json: print one JSON object.
    """

    global_batch: int | None = None
    gpus_per_node: int | None = None
    top: int | None = None
    explain: str | None = None
    call: bool = False
    write: Path | None = None
    png: Path | None = None
    timeline: Path | None = None
    html: Path | None = None
    table: Path | None = None
    pairs_hide: float | None = None
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class DryRunConfig(PlannedConfig):
    """Run the host code of one rank's training step without a GPU or other ranks.

    Expert loads are balanced, and collectives return at once.

    Attributes:
        rank: the global rank that runs.
        json: print one JSON object.
    """

    rank: int = 0
    json: bool = False


DEFAULT_GPU: GpuName = "h100-80"


def select_gpu(args: PlannedConfig) -> GpuName | Gpu:
    """Return the name of the selected GPU, or the record of a `--gpu-spec` file."""
    return (args.gpu or DEFAULT_GPU) if args.gpu_spec is None else read_gpu(args.gpu_spec)


def format_gpu_name(args: PlannedConfig) -> str:
    """Return the name of the selected GPU, or the path of its `--gpu-spec` file."""
    return str(args.gpu_spec or args.gpu or DEFAULT_GPU)


def check_no_unused_options(args: PlanConfig) -> None:
    """Raise a UsageError for an option that the mode (search, run or --explain) ignores."""
    if args.lora is not None or args.checkpointing:
        _refuse(args, ("explain", "call", "write"), "moecore finetune --dry-run has adapters")
        if not args.parallel:
            raise UsageError("--lora-rank and --checkpointing must go with degrees: add --ep 1")
    if args.explain is not None:
        unread = ("parallel", *OF_RUNS, "top", "png", "timeline", "html")
        return _refuse(args, unread, "--explain has all degrees")
    if not args.parallel:
        reason = "a search has its own: give degrees, such as --ep 8, or drop it"
        return _refuse(args, OF_RUNS, reason)
    _refuse(args, (*OF_SEARCHES, "top"), "degrees are given, so nothing is searched")
    check_no_pipeline_options(args)


def check_no_pipeline_options(args: PlannedConfig) -> None:
    """Raise a UsageError for an option of pipeline stages that is set although pp is 1."""
    if args.parallel.get("pp", 1) == 1:
        _refuse(args, ("pipeline",), "there are no stages without --pp")


def _refuse(args: PlannedConfig, unread: Sequence[str], reason: str) -> None:
    """Raise a UsageError with `reason` for the first set option in `unread`, names and tables."""
    args_class: Any = type(args)
    for option in list_options(args_class):
        is_unread = option.name in unread or option.table in unread
        value = option.get_value(args) if is_unread else None
        is_default = option.table in ("sharding", "fsdp") and value == option.default
        if value is not None and value is not False and not is_default:  # 0 equals False
            raise UsageError(f"--{option.flag} ({value!s:.80}) must be left out: {reason}")


def format_layout(run: TrainingRun) -> str:
    """Return a run's layout in the syntax of `--explain`: "pp=8,tp=1,..,batch_size=1"."""
    p = run.resolved
    named = {name: getattr(p, name) for name in LAYOUT_FIELDS[:5]}
    if run.pipeline is not None:
        named["chunks"] = len(list_stages(run)) // p.pp
    return ",".join(f"{k}={v}" for k, v in (named | {"batch_size": run.batch_size}).items())


def parse_layout(text: str) -> Layout:
    """Return the layout that a text such as "pp=8,ep=8" describes, or raise ValueError."""
    degrees: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        is_number = value.isdecimal() and len(value) < 10 and int(value) > 0
        if name.strip() not in LAYOUT_FIELDS or not is_number:
            names = ", ".join(LAYOUT_FIELDS)
            raise ValueError(
                f"--explain ({quote(part)}) must be NAME=NUMBER, of {names}: use pp=8,ep=8"
            )
        degrees[name.strip()] = int(value)
    degrees.setdefault("chunks", 2 if degrees.get("pp", 1) > 1 else 1)
    return Layout(**degrees)


def _parse_model(args: Any) -> AnyModel:
    """Return the model of `--preset` or `--config`, with max_seq_len of at least `--seq-len`."""
    if args.finetune or args.lora is not None or args.checkpointing:
        if args.preset:
            raise ValueError(
                f"--preset ({args.preset}) must not go with --lora-rank, --checkpointing "
                "and --finetune, which are for classes of transformers: use --config"
            )
        return replace(
            TransformersModel.of(args.config), lora=args.lora, recompute=args.checkpointing
        )
    if args.preset:
        model = PRESETS[args.preset]
    elif read_config(args.config).get("model_type") not in FAMILIES:
        return TransformersModel.of(args.config)
    else:
        try:
            model = decoder_config_from_hf(args.config)
        except NotImplementedError as error:
            # The class may have what the native decoder lacks. If not, that error is the answer.
            with suppress(ValueError, NotImplementedError):
                stock_model = TransformersModel.of(args.config)
                print(f"moecore: planned as a class of transformers: {error}", file=sys.stderr)
                return stock_model
            raise
    return replace(model, max_seq_len=max(model.max_seq_len, args.seq_len))


def parse_search_request(args: PlanConfig) -> SearchRequest:
    """Return the search request; the search chooses all memory-saving options that are not set."""
    precision, memory = args.make_precision(), args.make_memory_options()
    optimizer = make_optimizer_options(args)
    return SearchRequest(
        model=_parse_model(args),
        num_gpus=args.gpus,
        gpu=select_gpu(args),
        gpus_per_node=args.gpus_per_node,
        seq_len=args.seq_len,
        global_batch=args.global_batch,
        memory=ANY if memory == MemoryOptions() else memory,
        precision=ANY if not args.precision and precision is None else precision,
        optimizer=ANY if optimizer == OptimizerOptions() else optimizer,
        nvlink=args.nvlink or ANY,
    )


def parse_run(args: PlannedConfig) -> TrainingRun:
    """Return the `TrainingRun` that the command's options describe."""
    run = args.make_training_run(
        _parse_model(args),
        args.gpus,
        select_gpu(args),
        ParallelConfig(**args.parallel),
        num_micro_batches=1 if args.micro_batches is None else args.micro_batches,
        state=args,
    )
    # Options of dispatcher nvlink are refused if the run cannot have the dispatcher.
    return run if args.nvlink is None else replace(run, nvlink=args.nvlink)
