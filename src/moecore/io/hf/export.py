"""export_hf: write a model of any parallel layout as a Hugging Face directory.

Files are assigned to ranks round-robin. The writer of a file receives one tensor at a time from the
ranks that have its shards, appends the tensor to the file and frees it. The peak memory of a rank
beyond the model is one Hugging Face tensor, a message of at most 64 MiB and a buffer of 16 MiB. The
directory has a temporary name until all files are on disk, and is then renamed.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.failures import run_and_share_errors, share_call_errors, share_errors
from moecore.base.fields import NumBytes, check_arguments
from moecore.base.params import chunk_by_size
from moecore.io.checkpoint.files import sync_directory, write_new_file
from moecore.io.checkpoint.ranks import (
    check_draft_is_visible,
    get_rank_and_world,
    is_first_rank,
    run_on_first_rank,
)
from moecore.io.checkpoint.shard_file import (
    FileLayout,
    Meter,
    Progress,
    ShardWriter,
    compute_layout,
)
from moecore.io.hf.bitsandbytes import NF4Collector, Quantization, plan_nf4_items
from moecore.io.hf.buckets import RankCollector
from moecore.io.hf.collect import Collector, ErrorKeeper, Item
from moecore.io.hf.config_fields import HFConfig
from moecore.io.hf.export_plan import ExportLayout, plan_export
from moecore.io.hf.files import CONFIG, INDEX, SINGLE
from moecore.io.hf.merge import check_no_unmerged_adapters
from moecore.train.expert_moves import run_in_expert_order


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Sizes and duration of an `export_hf` call."""

    tensors: int
    shards: int
    total_bytes: int
    written_bytes: int  # by this rank, including headers
    peak_bytes: int  # of this rank beyond the model: a message and the tensor to write
    seconds: float
    # Norm of the rounding errors over the norm of the weights, of all linears that are written in
    # NF4. It is 0 without merged adapters. None = no `quantization`.
    nf4_error: float | None


@torch.no_grad()
@share_call_errors
@run_in_expert_order
def export_hf(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    config: HFConfig | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: NumBytes = 5 * 10**9,
    layout: ExportLayout = "per_expert",
    quantization: Quantization | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write a model as a Hugging Face directory. Collective.

    transformers' `from_pretrained` and `load_hf` read the directory, which has no tokenizer files.
    Experts stored only in FP8 are dequantised to their compute dtype.

    Args:
        model: a `moecore.models.Decoder`, a transformers model, or a PeftModel of one with merged
            adapters; plain or parallelized.
        path: the new directory; every rank must see its parent.
        config: the config.json to write, as a mapping, a file or a directory. A native decoder
            needs a config that describes it. None uses the config of the transformers model.
        dtype: dtype of all float tensors except those that transformers keeps in fp32 (selection
            biases, and tensors that a class names); None keeps the model's dtypes.
        max_shard_bytes: maximum bytes of tensors in one file; a larger tensor has its own file.
        layout: "per_expert" is the published format, which transformers' `save_pretrained` also
            writes; "fused" has the in-memory names and shapes of transformers.
        quantization: "bitsandbytes" writes linears that are stored in NF4 in its format, without
            double quantisation; None dequantises them.
        progress: called with (bytes done, bytes expected) of this rank.

    Raises:
        ValueError: before files are written: for a wrong argument, an existing directory, a config
            of another model, missing or additional parameters of a transformers class (a part of a
            model, or upcycled layers without a class), or adapters that are not merged.
        NotImplementedError: if the layout has no name for a tensor.
        OSError: on every rank, if one rank could not write; no files remain.
    """
    with share_errors():
        check_arguments(export_hf, locals())
        start, path, meter = time.monotonic(), Path(path), Meter(progress)
        check_export_target(path, dtype)
        check_no_unmerged_adapters(model)
    plan = plan_export(model, config, dtype, layout)
    items = plan.items if quantization is None else plan_nf4_items(plan)
    shards = plan_shard_files(items, max_shard_bytes)
    origins = [getattr(item, "origin", item) for item in items]
    collector = RankCollector(plan.tensors, plan.owners, origins, plan.device)
    nf4_collector = NF4Collector(collector)
    with collector.open_pass():
        write_directory(path, shards, plan.values, nf4_collector, meter)
    return ExportReport(
        tensors=sum(map(len, shards)),
        shards=len(shards),
        total_bytes=sum(item.nbytes for shard in shards for item in shard),
        written_bytes=meter.moved_bytes,
        peak_bytes=collector.peak_bytes,
        seconds=time.monotonic() - start,
        nf4_error=None if quantization is None else nf4_collector.compute_error(),
    )


def write_directory(
    path: Path, shards: list[list[Item]], config: dict[str, Any], collector: Collector, meter: Meter
) -> None:
    """Write safetensors files of the items in `shards`, index and config.json. Collective."""
    rank, world = get_rank_and_world()
    with open_draft(path) as draft:
        for first in range(0, len(shards), world):  # each rank writes one file at a time
            wave = [order_items(shard) for shard in shards[first : first + world]]
            with _ExportOutput(meter) as output:
                if rank < len(wave):
                    file = draft / _make_file_name(first + rank, len(shards))
                    output.open_file(file, wave[rank][0])
                for turn in itertools.zip_longest(*(items for _, items in wave)):
                    for owner, item in enumerate(turn):
                        if item is not None:
                            output.append_tensor(collector.collect_tensor(item, owner))
            run_and_share_errors(collector.raise_error)
            run_and_share_errors(output.raise_error)
        run_on_first_rank(lambda: _write_config_and_index(draft, shards, config))


@contextmanager
def open_draft(path: Path) -> Iterator[Path]:
    """Return a context with a draft directory: renamed to `path`, deleted on error. Collective."""
    draft = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex[:8]}")

    def make() -> Path:
        draft.mkdir(parents=True)
        return draft

    def publish() -> None:
        sync_directory(draft)
        if path.exists():
            raise OSError(f"path ({path}) appeared meanwhile: choose another")
        draft.rename(path)
        sync_directory(path.parent)

    draft = run_on_first_rank(make)
    try:
        check_draft_is_visible(draft)
        yield draft
        run_on_first_rank(publish)
    except BaseException:
        if is_first_rank():
            shutil.rmtree(draft, ignore_errors=True)
        raise


def check_export_target(path: Path, dtype: torch.dtype | None) -> None:
    """Raise ValueError if the directory exists or the dtype has fewer than 16 bits."""
    if path.exists():
        raise ValueError(f"path ({path}) must not exist yet: choose another, or remove it")
    check_export_dtype(dtype)


def check_export_dtype(dtype: torch.dtype | None) -> None:
    """Raise ValueError unless the dtype is None or a float of 16 bits or more."""
    if dtype is not None and not (dtype.is_floating_point and dtype.itemsize >= 2):
        raise ValueError(
            f"dtype ({dtype!r}) must be a float of 16 bits or more, a torch.dtype, or None: "
            "nothing is quantised here"
        )


def plan_shard_files(items: Sequence[Item], max_shard_bytes: int) -> list[list[Item]]:
    """Split tensors into files of at most `max_shard_bytes`; larger tensors have a file each."""
    return list(chunk_by_size(items, lambda item: item.nbytes, max_shard_bytes))


class _ExportOutput(ErrorKeeper):
    """The safetensors file that this rank writes; after an error, tensors are ignored."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._writer: ShardWriter | None = None

    def open_file(self, file: Path, layout: FileLayout) -> None:
        """Create the safetensors file; store an error instead of raising it."""
        with self._keep_error():
            self._writer = ShardWriter(file, layout.header, pinned=False, meter=self._meter)
            self._meter.expect(layout.size)

    def append_tensor(self, tensor: Tensor | None) -> None:
        """Append a tensor, the next in the layout's order, to this rank's file; None is ignored."""
        with self._keep_error():
            if self._writer is not None and tensor is not None and self._error is None:
                self._writer.add(tensor)

    def __enter__(self) -> _ExportOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._writer is None:
            return
        with self._keep_error(), self._writer:
            if kind is None and self._error is None:
                self._writer.finish()


def order_items(items: Sequence[Item]) -> tuple[FileLayout, list[Item]]:
    """Return the layout of a file with these tensors, and the tensors in the file's order."""
    by_name = {item.name: item for item in items}
    layout = compute_layout({name: (item.dtype, item.shape) for name, item in by_name.items()})
    return layout, [by_name[name] for name in layout.begins]


def _write_config_and_index(draft: Path, shards: list[list[Item]], config: dict[str, Any]) -> None:
    """Write config.json, with the dtype of most bytes, and an index of several files."""
    sizes: dict[torch.dtype, int] = {}
    for item in itertools.chain(*shards):
        dtype = getattr(item, "weight_dtype", item.dtype)  # of an `NF4Item`, its weight's
        sizes[dtype] = sizes.get(dtype, 0) + item.nbytes
    name = str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")
    config["dtype"] = name
    if "torch_dtype" in config:
        config["torch_dtype"] = name
    files: dict[str, Any] = {CONFIG: config}
    if len(shards) > 1:
        weight_map = {
            item.name: _make_file_name(i, len(shards))
            for i, shard in enumerate(shards)
            for item in shard
        }
        metadata = {"total_size": sum(sizes.values())}
        files[INDEX] = {"metadata": metadata, "weight_map": weight_map}
    for file, value in files.items():
        write_new_file(draft / file, json.dumps(value, indent=2, sort_keys=True) + "\n")


def _make_file_name(file_idx: int, num_files: int) -> str:
    """Return the name of safetensors file `file_idx` (from 0) among `num_files` files."""
    return SINGLE if num_files == 1 else f"model-{file_idx + 1:05d}-of-{num_files:05d}.safetensors"
