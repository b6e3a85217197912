"""The options of `moecore plan` and `dry-run`: which there are, and the run or search they mean."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from moecore.base.fields import UsageError, quote
from moecore.base.options.dispatch import DispatchOptions, NVLinkOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.memory import GEMM_LAST, MemoryOptions, StashOptions
from moecore.base.options.names import GpuName
from moecore.base.options.precision import Precision
from moecore.io.hf.config import FAMILIES, decoder_config_from_hf
from moecore.io.hf.config_fields import read_config
from moecore.models import PRESETS
from moecore.parallel.mesh import ParallelConfig
from moecore.parallel.pipeline.schedule import PipelineConfig
from moecore.planning.gpus import Gpu, are_peers, domain_of, peers_of, read_gpu
from moecore.planning.layouts import ANY, FOLDING, Folding, SearchRequest
from moecore.planning.run import AnyModel, OptimizerOptions, TrainingRun, stages_of
from moecore.planning.transformers import TransformersModel

DEGREES = tuple(field.name for field in fields(ParallelConfig))
# Options that some modes of the command do not read.
OF_SEARCHES = ("global_batch", "gpus_per_node")
OF_STAGES = ("layout", "chunks", "schedule")
STRATEGIES = ("dense_strategy", "experts_strategy", "fp8_param_gather")
OF_RUNS = ("batch_size", "micro_batches", "dispatcher", "fp8_dispatch", *OF_STAGES, *STRATEGIES)


def kind_of(args: Any) -> GpuName | Gpu:
    """Return the GPU of the options."""
    name: GpuName = args.gpu
    return name if args.gpu_spec is None else read_gpu(args.gpu_spec)


def shown_gpu(args: Any) -> str:
    """Return the name of the GPU, or of its file."""
    return str(args.gpu if args.gpu_spec is None else args.gpu_spec)


def has_degrees(args: Any) -> bool:
    """Return whether a degree is given, so that one run is planned."""
    return any(getattr(args, name) is not None for name in DEGREES)


def refuse_unread(args: Any) -> None:
    """Raise a UsageError for the first option that is given and that would not be read."""
    if args.explain is not None:
        unread, reason = (
            (*DEGREES, *OF_RUNS, "top", "png", "timeline", "html"),
            "--explain has all degrees",
        )
    elif not has_degrees(args):
        unread, reason = OF_RUNS, "a search has its own: give degrees, such as --ep 8, or drop it"
    else:
        unread, reason = (*OF_SEARCHES, "top"), "degrees are given, so nothing is searched"
        if (args.pp or 1) == 1:
            unread, reason = (
                (*unread, *OF_STAGES),
                f"{reason}, and there are no stages without --pp",
            )
    _refuse(args, unread, reason)


def refuse_stages(args: Any) -> None:
    """Raise a UsageError for the first option of pipeline stages in a run without stages."""
    if (args.pp or 1) == 1:
        _refuse(args, OF_STAGES, "there are no stages without --pp")


def _refuse(args: Any, unread: Sequence[str], reason: str) -> None:
    for name in unread:
        value = getattr(args, name)
        if value is not None and value is not False:  # 0 equals False
            raise UsageError(
                f"--{name.replace('_', '-')} ({value!s:.80}) must be left out: {reason}"
            )


def as_folding(run: TrainingRun) -> str:
    """Return the folding of a run, as `--explain` reads it."""
    p = run.resolved
    named = {name: getattr(p, name) for name in FOLDING[:5]}
    if run.pipeline is not None:
        named["chunks"] = len(stages_of(run)) // p.pp
    return ",".join(f"{k}={v}" for k, v in (named | {"batch_size": run.batch_size}).items())


def folding_of(text: str) -> Folding:
    """Return the folding of a text such as "pp=8,ep=8"."""
    degrees: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name.strip() not in FOLDING or not value.isdecimal() or len(value) > 9 or int(value) < 1:
            names = ", ".join(FOLDING)
            raise ValueError(
                f"--explain ({quote(part)}) must be NAME=NUMBER, of {names}: use pp=8,ep=8"
            )
        degrees[name.strip()] = int(value)
    degrees.setdefault("chunks", 2 if degrees.get("pp", 1) > 1 else 1)
    return Folding(**degrees)


def _model(args: Any) -> AnyModel:
    """Return the model of the preset or the config, for rows of at least `seq_len` tokens."""
    model = PRESETS[args.preset] if args.config is None else _model_of(args.config)
    if isinstance(model, TransformersModel):
        return model
    return replace(model, max_seq_len=max(model.max_seq_len, args.seq_len))


def _model_of(config: Path) -> AnyModel:
    """Return the native decoder of a config.json, or the class of transformers."""
    if read_config(config).get("model_type") not in FAMILIES:
        return TransformersModel.of(config)
    try:
        return decoder_config_from_hf(config)
    except NotImplementedError as error:
        # The class may have what the native decoder lacks. If not, that error is the answer.
        with suppress(ValueError, NotImplementedError):
            model = TransformersModel.of(config)
            print(f"moecore: planned as a class of transformers: {error}", file=sys.stderr)
            return model
        raise


def request_of_options(args: Any) -> SearchRequest:
    """Return the search of the options."""
    options, memory = _optimizer(args), _memory(args)
    is_plain = options == OptimizerOptions()
    precision: Any = ANY if args.precision is None else _precision(args)
    return SearchRequest(
        model=_model(args),
        num_gpus=args.gpus,
        gpu=kind_of(args),
        gpus_per_node=args.gpus_per_node,
        seq_len=args.seq_len,
        global_batch=args.global_batch,
        memory=ANY if memory == MemoryOptions() else memory,
        precision=precision,
        optimizer=ANY if is_plain else options,
        nvlink=NVLinkOptions(row_factor=args.row_factor) if _has_room(args) else ANY,
    )


def _precision(args: Any) -> Precision | None:
    return Precision.of(None if args.precision == "bf16" else args.precision)


def _memory(args: Any) -> MemoryOptions:
    named = {"gemm_last": GEMM_LAST}
    parts: Any = tuple(name for part in args.recompute for name in named.get(part, (part,)))
    return MemoryOptions(
        recompute="gemm_last" if args.recompute == ["gemm_last"] else parts,
        offload=tuple(args.offload),
        stash=StashOptions() if args.stash else None,
    )


def _has_room(args: Any) -> bool:
    """Whether dispatcher nvlink has a room, so that it is chosen."""
    return args.stash or args.row_factor is not None


def _optimizer(args: Any) -> OptimizerOptions:
    return OptimizerOptions(
        moment_dtype=args.moments,
        master_remainder=args.master_remainder,
        offload_fraction=args.state_offload,
    )


def run_of_options(args: Any) -> TrainingRun:
    """Return the run of the options."""
    values = {name: getattr(args, name) for name in DEGREES}
    degrees = {name: value for name, value in values.items() if value is not None}
    pipeline = None
    if (args.pp or 1) > 1:
        pipeline = PipelineConfig(
            layout=args.layout, chunks=args.chunks, schedule=args.schedule or "1f1b"
        )
    domain = domain_of(kind_of(args), args.gpus)
    num_peers = peers_of(kind_of(args), domain)
    return TrainingRun(
        model=_model(args),
        num_gpus=args.gpus,
        parallel=ParallelConfig(**degrees),
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
        memory=_memory(args),
        precision=_precision(args),
        optimizer=_optimizer(args),
        nvlink=_nvlink(args, ParallelConfig(**degrees), num_peers),
        dispatcher=args.dispatcher or "auto",
        ranks_per_domain=domain,
        num_peers=num_peers,
        fp8_dispatch=args.fp8_dispatch,
    )


def _nvlink(args: Any, parallel: ParallelConfig, num_peers: int) -> NVLinkOptions | None:
    """Return the capacity of nvlink, inside of a server or domain; None = all-to-all."""
    if _has_room(args):
        return NVLinkOptions(row_factor=args.row_factor)
    dispatch = DispatchOptions(name=args.dispatcher or "auto")
    return planned_nvlink(dispatch, parallel.resolve(args.gpus), num_peers)


def planned_nvlink(
    dispatch: DispatchOptions, parallel: ParallelConfig, num_peers: int
) -> NVLinkOptions | None:
    """Return the options of dispatcher nvlink in a planned run; None = all-to-all.

    Args:
        dispatch: the options of dispatch. "auto" is nvlink for ranks that are peers.
        parallel: degrees without -1.
        num_peers: neighbouring ranks that reach the memory of each other.
    """
    has_peers = are_peers(parallel.ep * parallel.etp, num_peers)
    is_nvlink = dispatch.name in ("auto", "nvlink") and has_peers
    if is_nvlink or dispatch.name == "hierarchical":
        return dispatch.nvlink or NVLinkOptions()
    return None
