"""The options of `moecore plan` and `dry-run`, and the run or search that they describe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from moecore.base.command_options import Fields, Table, UsageError, make_flag_name
from moecore.base.fields import quote
from moecore.base.options.dispatch import DispatchOptions, NVLinkOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.memory import MemoryOptions, Offloaded, Recomputed, StashOptions
from moecore.base.options.names import (
    GpuName,
    MomentDtype,
    PlannedDispatcher,
    PrecisionName,
    PresetName,
    ScheduleName,
    Strategy,
)
from moecore.base.options.precision import Precision
from moecore.families.transformers.lora import LoRAOptions
from moecore.io.hf.config import FAMILIES, decoder_config_from_hf
from moecore.io.hf.config_fields import read_config
from moecore.models import PRESETS
from moecore.parallel.mesh import ParallelConfig
from moecore.parallel.pipeline.schedule import PipelineConfig
from moecore.planning.gpus import Gpu, are_peers, count_domain_ranks, count_peers, get_gpu, read_gpu
from moecore.planning.layouts import ANY, LAYOUT_FIELDS, Layout, SearchRequest
from moecore.planning.run import AnyModel, OptimizerOptions, TrainingRun, list_stages
from moecore.planning.transformers import TransformersModel

DEGREES = tuple(item.name for item in fields(ParallelConfig))
# Options that some modes of the command do not read.
OF_SEARCHES = ("global_batch", "gpus_per_node")
OF_STAGES = ("layout", "chunks", "schedule")
STRATEGIES = ("dense_strategy", "experts_strategy", "fp8_param_gather")
OF_RUNS = ("batch_size", "micro_batches", "dispatcher", "fp8_dispatch", *OF_STAGES, *STRATEGIES)


@dataclass(frozen=True, kw_only=True)
class PlannedConfig:
    """Options of a planned run; "with degrees" means only if a parallel degree is given.

    Attributes:
        preset: the model.
        config: the model's Hugging Face config.json or its directory, in place of a preset.
        gpus: number of GPUs, one rank each.
        gpu: the kind of all GPUs; None = h100-80.
        gpu_spec: a TOML file with fields of moecore.planning.Gpu; `like` names a known GPU.
        seq_len: tokens of a row.
        batch_size: rows of a data rank's micro-batch, with degrees; None = 1.
        micro_batches: micro-batches of a step on a data rank, with degrees; None = 1.
        layout: layers of the pipeline stages, such as "Et*3|(tt|)*29m|L".
        chunks: pipeline stages per rank; not with `layout`.
        schedule: pipeline schedule; None = 1f1b.
        dense_strategy: ZeRO strategy of blocks, with degrees; None = optim_grads_params.
        experts_strategy: ZeRO strategy of experts; None = as blocks.
        fp8_param_gather: all-gather the weights of blockwise FP8 GEMMs as FP8.
        dispatcher: dispatcher between NVLink domains, with degrees; None = auto, one exchange.
        fp8_dispatch: dispatch tokens as FP8, with degrees.
        precision: recipe of GEMMs; None = bf16, or in a search FP8 if needed.
        recompute: what backward recomputes, see MemoryOptions.
        offload: saved tensors in host memory, see MemoryOptions.
        moments: dtype of AdamW's moments.
        frozen_dense: also store frozen linears in 4 bits, with a 4-bit precision.
        offload_frozen: keep frozen experts in host memory, with a 4-bit precision.
        offload_params: keep weights, gradients and optimizer state in host memory, with degrees.
        lora_rank: rank of LoRA adapters, with --config and degrees; None = all weights are trained.
        finetune: plan the class of transformers, which moecore finetune trains, with --config;
            otherwise moecore's decoder of the same sizes, if there is one.
        checkpointing: recompute each layer, as transformers does, with --config.
        stash: save expert activations in a paged buffer, with dispatcher nvlink.
        row_factor: capacity of dispatcher nvlink / rows of even loads; None = 2.0 within nodes.
        master_remainder: bf16 weights with fp32 masters, see moecore.train.AdamW.
        state_offload: fraction of AdamW's state in host memory.
        parallel: parallel degrees; if no degree is set, search for layouts.
    """

    preset: PresetName | None = None
    config: Path | None = None
    gpus: int
    gpu: GpuName | None = None
    gpu_spec: Path | None = None
    seq_len: int = 4096
    batch_size: int | None = None
    micro_batches: int | None = None
    layout: str | None = None
    chunks: int | None = None
    schedule: ScheduleName | None = None
    dense_strategy: Strategy | None = None
    experts_strategy: Strategy | None = None
    fp8_param_gather: bool = False
    dispatcher: PlannedDispatcher | None = None
    fp8_dispatch: bool = False
    precision: PrecisionName | Literal["bf16"] | None = None
    recompute: tuple[Recomputed | Literal["gemm_last"], ...] = ()
    offload: tuple[Offloaded, ...] = ()
    frozen_dense: bool = False
    offload_frozen: bool = False
    offload_params: bool = False
    lora_rank: int | None = None
    finetune: bool = False
    checkpointing: bool = False
    moments: MomentDtype = "float32"
    stash: bool = False
    row_factor: float | None = None
    master_remainder: bool = False
    state_offload: float = 0.0
    parallel: Annotated[Fields, Table(record=ParallelConfig)] = field(default_factory=dict)

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
        html: write an HTML page of memory, time and stages.
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
    if args.lora_rank is not None or args.checkpointing:
        _refuse(args, ("explain", "call", "write"), "moecore finetune --dry-run has adapters")
        if not args.parallel:
            raise UsageError("--lora-rank and --checkpointing must go with degrees: add --ep 1")
    if args.explain is not None:
        unread = (*DEGREES, *OF_RUNS, "top", "png", "timeline", "html")
        return _refuse(args, unread, "--explain has all degrees")
    if not args.parallel:
        reason = "a search has its own: give degrees, such as --ep 8, or drop it"
        return _refuse(args, OF_RUNS, reason)
    unread, reason = (*OF_SEARCHES, "top"), "degrees are given, so nothing is searched"
    if args.parallel.get("pp", 1) == 1:
        unread, reason = (*unread, *OF_STAGES), f"{reason}, and there are no stages without --pp"
    _refuse(args, unread, reason)


def check_no_pipeline_options(args: PlannedConfig) -> None:
    """Raise a UsageError for an option of pipeline stages that is set although pp is 1."""
    if args.parallel.get("pp", 1) == 1:
        _refuse(args, OF_STAGES, "there are no stages without --pp")


def _refuse(args: Any, unread: Sequence[str], reason: str) -> None:
    """Raise a UsageError with `reason` for the first set option in `unread`, a list of names."""
    for name in unread:
        value = args.parallel.get(name) if name in DEGREES else getattr(args, name)
        if value is not None and value is not False:  # 0 equals False
            raise UsageError(
                f"--{name.replace('_', '-')} ({value!s:.80}) must be left out: {reason}"
            )


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
    if args.finetune or args.lora_rank is not None or args.checkpointing:
        if args.preset:
            raise ValueError(
                f"--preset ({args.preset}) must not go with --lora-rank, --checkpointing "
                "and --finetune, which are for classes of transformers: use --config"
            )
        lora = None if args.lora_rank is None else LoRAOptions(rank=args.lora_rank)
        return replace(TransformersModel.of(args.config), lora=lora, recompute=args.checkpointing)
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
    options, memory = _parse_optimizer_options(args), _parse_memory_options(args)
    return SearchRequest(
        model=_parse_model(args),
        num_gpus=args.gpus,
        gpu=select_gpu(args),
        gpus_per_node=args.gpus_per_node,
        seq_len=args.seq_len,
        global_batch=args.global_batch,
        memory=ANY if memory == MemoryOptions() else memory,
        precision=ANY if args.precision is None else _parse_precision(args),
        optimizer=ANY if options == OptimizerOptions() else options,
        nvlink=NVLinkOptions(row_factor=args.row_factor) if _has_nvlink_capacity(args) else ANY,
    )


def _parse_precision(args: Any) -> Precision | None:
    """Return the precision of `--precision` and `--frozen-dense`; None = bf16."""
    precision = Precision.of(None if args.precision == "bf16" else args.precision)
    if precision is None and args.frozen_dense:
        raise ValueError("--frozen-dense must go with a 4-bit format: add --precision nf4")
    return precision and replace(precision, frozen_dense=args.frozen_dense)


def _parse_memory_options(args: Any) -> MemoryOptions:
    """Return the memory options of the flags."""
    return MemoryOptions(
        recompute="gemm_last" if args.recompute == ("gemm_last",) else args.recompute,
        offload=args.offload,
        stash=StashOptions() if args.stash else None,
        offload_frozen=args.offload_frozen,
        offload_params=args.offload_params,
    )


def _has_nvlink_capacity(args: Any) -> bool:
    """Return whether --stash or --row-factor is set, each of which selects dispatcher nvlink."""
    return args.stash or args.row_factor is not None


def _parse_optimizer_options(args: Any) -> OptimizerOptions:
    """Return the optimizer options of `--moments`, `--master-remainder` and `--state-offload`."""
    return OptimizerOptions(
        moment_dtype=args.moments,
        master_remainder=args.master_remainder,
        offload_fraction=args.state_offload,
    )


def parse_run(args: PlannedConfig) -> TrainingRun:
    """Return the `TrainingRun` that the command's options describe."""
    parallel, pipeline, nvlink = ParallelConfig(**args.parallel), None, None
    if args.parallel.get("pp", 1) > 1:
        pipeline = PipelineConfig(
            layout=args.layout, chunks=args.chunks, schedule=args.schedule or "1f1b"
        )
    domain = count_domain_ranks(select_gpu(args), args.gpus)
    num_peers = count_peers(select_gpu(args), domain)
    if _has_nvlink_capacity(args):
        nvlink = NVLinkOptions(row_factor=args.row_factor)
    else:
        dispatch = DispatchOptions(name=args.dispatcher or "auto")
        nvlink = choose_nvlink_options(dispatch, parallel.resolve(args.gpus), num_peers)
    return TrainingRun(
        model=_parse_model(args),
        num_gpus=args.gpus,
        parallel=parallel,
        seq_len=args.seq_len,
        batch_size=1 if args.batch_size is None else args.batch_size,
        num_micro_batches=1 if args.micro_batches is None else args.micro_batches,
        pipeline=pipeline,
        fsdp=FSDPOptions(
            param_dtype=torch.bfloat16,
            dense_strategy=args.dense_strategy or "optim_grads_params",
            experts_strategy=args.experts_strategy,
            fp8_param_gather=args.fp8_param_gather,
        ),
        memory=_parse_memory_options(args),
        precision=_parse_precision(args),
        optimizer=_parse_optimizer_options(args),
        nvlink=nvlink,
        dispatcher=args.dispatcher or "auto",
        ranks_per_domain=domain,
        num_peers=num_peers,
        has_block_scales=get_gpu(select_gpu(args)).has_block_scales,
        fp8_dispatch=args.fp8_dispatch,
    )


def choose_nvlink_options(
    dispatch: DispatchOptions, parallel: ParallelConfig, num_peers: int
) -> NVLinkOptions | None:
    """Return the run's options of NVLink dispatch kernels; None = the run does not use them.

    `num_peers` is the number of neighbouring ranks that access each other's memory.
    """
    has_peers = are_peers(parallel.ep * parallel.etp, num_peers)
    is_nvlink = dispatch.name in ("auto", "nvlink") and has_peers
    if is_nvlink or dispatch.name == "hierarchical":
        return dispatch.nvlink or NVLinkOptions()
    return None
