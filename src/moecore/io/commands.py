"""The commands of `moecore checkpoint`: inspect, verify, convert and prune."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from moecore.base.command_options import UsageError
from moecore.base.progress import show_progress
from moecore.base.text import escape_unprintable, format_bytes, format_error_line
from moecore.io.checkpoint.directory import (
    find_checkpoint_root,
    find_complete_checkpoints,
    find_prunable_checkpoints,
    latest,
    prune,
)
from moecore.io.checkpoint.lock import find_abandoned_drafts
from moecore.io.checkpoint.manifest import DTYPE_NAMES, MANIFEST, read_manifest
from moecore.io.checkpoint.object_storage import AnyPath, make_path

MAX_CHARS = 400  # characters of a name or a value
TARGETS = ("native", "hf", "megatron", "dcp", "dcp-transformers")
# Flag of `convert` -> the targets that it is for.
FLAG_TARGETS = {"step": ("native",), "layout": ("hf",), "max_shard_size": ("native", "hf")}


def run_inspect(args: Any) -> int:
    """Print format, metadata and tensors of the checkpoint at `args.path`; return exit code 0."""
    path, kind = _find_checkpoint(args.path)
    readers = {"native": _read_native_facts, "Hugging Face": _read_hf_facts, "DCP": _read_dcp_facts}
    facts = {"path": str(path), "format": kind} | readers[kind](path)
    tensors: dict[str, Any] = {
        name: {"shape": list(tensor.shape), "dtype": DTYPE_NAMES[tensor.dtype]}
        for name, tensor in facts.pop("tensors").items()
    }
    elements = Counter[str]()
    for entry in tensors.values():
        elements[entry["dtype"]] += math.prod(entry["shape"])
    sizes = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}
    num_bytes = sum(count * sizes[name] for name, count in elements.items())
    facts |= {"num_tensors": len(tensors), "num_bytes": num_bytes, "elements": elements}
    if path != make_path(args.path):
        facts["steps"] = [p.name for p in find_complete_checkpoints(path.parent)]
    if args.json:
        print(json.dumps(facts | {"tensors": tensors}))
        return 0
    for name, value in facts.items():
        print(f"{name:<12} {_format_value(value)}")
    if args.tensors:
        for name, entry in tensors.items():
            print(f"  {entry['dtype']:<8} {entry['shape']!s:<24} {_truncate_text(name)}")
    return 0


def _read_native_facts(path: AnyPath) -> dict[str, Any]:
    """Return a native checkpoint's metadata, files and tensors by name, to print."""
    manifest = read_manifest(path)
    facts = manifest.facts
    return {
        "step": facts.step,
        "world_size": facts.world_size,
        "meshes": facts.meshes,
        "versions": facts.versions,
        "optimizer": facts.optimizer is not None,
        "scheduler": facts.scheduler is not None,
        "config": facts.config,
        "extra": facts.extra,
        "files": {name: file.size for name, file in manifest.files.items()},
        "tensors": manifest.tensors,
    }


def _read_hf_facts(path: Path) -> dict[str, Any]:
    """Return a Hugging Face directory's metadata, files and tensors by name, to print."""
    from moecore.io.hf.config_fields import read_config
    from moecore.io.hf.files import HFFiles
    from moecore.io.hf.names import infer_hf_layout
    from moecore.io.hf.quant import find_sources

    config = read_config(path)
    with HFFiles(path) as files:
        quantization = config.get("quantization_config")
        sources, _ = find_sources(files, quantization)
        tensors = files.tensors
    return {
        "model_type": config.get("model_type"),
        "layout": infer_hf_layout(sources),
        "quantized": quantization and quantization.get("quant_method"),
        "versions": {"transformers": config.get("transformers_version")},
        "files": {f: (path / f).stat().st_size for f in sorted({t.file for t in tensors.values()})},
        "tensors": tensors,
    }


def _read_dcp_facts(path: Path) -> dict[str, Any]:
    """Return a DCP checkpoint's tensor naming, files and tensors by name, to print."""
    from moecore.io.interchange.convert import infer_tensor_naming
    from moecore.io.interchange.dcp import DCPFiles

    files = DCPFiles(path)
    names, tensors = infer_tensor_naming(files), files.tensors
    data_files = sorted({chunk.file for tensor in tensors.values() for chunk in tensor.chunks})
    return {
        "names": names,
        "files": {file: (path / file).stat().st_size for file in data_files},
        "tensors": tensors,
    }


def run_verify(args: Any) -> int:
    """Check the checkpoint at `args.path`. Print problems and return exit code 1, otherwise 0."""
    path, kind = _find_checkpoint(args.path)
    if kind == "native":
        from moecore.io.checkpoint.store import verify

        with show_progress("hashing", unit="B") as progress:
            manifest = verify(path, "sizes" if args.sizes else "full", progress=progress)
        print(f"{path}: whole, {len(manifest.files)} files, {format_bytes(manifest.num_bytes)}")
        return 0
    if kind == "DCP":
        from moecore.io.interchange.dcp import DCPFiles

        files = DCPFiles(path)
        print(f"{path}: whole, {len(files.tensors)} tensors (.metadata; no digests)")
        return 0
    from moecore.io.hf.verify import verify_hf

    problems = verify_hf(path)
    for problem in problems:
        print(f"moecore: {format_error_line(f'{path}: {problem}')}", file=sys.stderr)
    if not problems:
        print(f"{path}: whole (headers; the format has no digests)")
    return 1 if problems else 0


def run_convert(args: Any) -> int:
    """Convert the checkpoint `args.source` to the format `args.to`; return exit code 0."""
    path, kind = _find_checkpoint(args.source)
    to = args.to or ("hf" if kind == "native" else "native")
    if (kind == "native") == (to == "native"):
        ways = " or ".join(TARGETS[1:]) if kind == "native" else "native, and then on from there"
        raise UsageError(f"--to ({to}) must be {ways}: {path} is {kind}")
    if kind == "Hugging Face" and args.config is not None:
        raise UsageError(f"--config ({args.config}) must be left out: {path} has its own")
    if kind != "Hugging Face" and args.config is None:
        raise UsageError("--config must name the config.json of the Hugging Face model")
    for name, targets in FLAG_TARGETS.items():
        value = getattr(args, name)
        if value is not None and to not in targets:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} ({value}) must be left out for a target that is {to}")
    from moecore.io.hf.convert import hf_to_native, native_to_hf
    from moecore.io.interchange.convert import dcp_to_native, native_to_dcp

    options = {"step": args.step, "config": args.config, "layout": args.layout}
    options["max_file_bytes" if to == "native" else "max_shard_bytes"] = args.max_shard_size
    options["dtype"] = None if args.dtype is None else getattr(torch, args.dtype)
    options["names"] = None if to in ("native", "hf") else to
    convert: Any = native_to_hf if to == "hf" else native_to_dcp
    if to == "native":
        convert = dcp_to_native if kind == "DCP" else hf_to_native
    options = {name: value for name, value in options.items() if value is not None}
    with show_progress("converting", unit="B") as progress:
        result = convert(path, args.target, progress=progress, **options)
    print(f"{path} -> {make_path(result if to == 'native' else args.target)}")
    return 0


def run_prune(args: Any) -> int:
    """Delete and print all but the newest `args.keep` checkpoints; only print if `args.dry_run`."""
    if args.keep < 1:
        raise UsageError(f"--keep ({args.keep}) must be >= 1: the newest must stay")
    path = make_path(args.path)
    if not path.is_dir():
        raise UsageError(f"path ({path}) must be a run: it is not there")
    root = find_checkpoint_root(path)
    old = find_prunable_checkpoints(root, args.keep)
    drafts = find_abandoned_drafts(root) if old else []  # without old ones no lock is taken
    if not args.dry_run:
        old = prune(root, args.keep)
        drafts = [path for path in drafts if not path.exists()]
    for path in (*old, *drafts):
        print(f"{'would remove' if args.dry_run else 'removed'} {path}")
    return 0


def _find_checkpoint(name: str) -> tuple[Any, str]:
    """Return the path and format of a checkpoint, or of the newest checkpoint of a run."""
    path = make_path(name)
    if not path.is_dir():
        raise UsageError(f"path ({path}) must be a directory: it is not there")
    if (path / MANIFEST).is_file():
        return path, "native"
    is_local = isinstance(path, Path)
    if is_local and (path / ".metadata").is_file():  # with or without a config.json
        return path, "DCP"
    if is_local and (path / "config.json").is_file():
        return path, "Hugging Face"
    newest = latest(find_checkpoint_root(path))
    if newest is None:
        raise UsageError(
            f"path ({path}) must hold a {MANIFEST}, a config.json, a .metadata or whole step "
            "directories: it has none of them"
        )
    return newest, "native"


def _format_value(value: Any) -> str:
    """Convert a nested metadata value to one line of text; None and empty values become "-"."""
    if isinstance(value, dict):
        entries = (f"{_truncate_text(str(k))}={_format_value(v)}" for k, v in value.items())
        return ", ".join(entries) or "-"
    if isinstance(value, list):
        return " ".join(map(_format_value, value)) or "-"
    return "-" if value is None else _truncate_text(str(value))


def _truncate_text(text: str) -> str:
    """Cut a text to `MAX_CHARS` characters and escape unprintable characters."""
    return escape_unprintable(text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}...")
