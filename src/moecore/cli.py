"""The command line: checkpoints (inspect, verify, convert, prune), plans, costs, reports of runs.

Exit codes: 0 no problem; 1 a problem was found, named in one line on stderr; 2 wrong usage; 130
interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from moecore.base.fields import UsageError, check_value
from moecore.io.checkpoint.directory import Step, latest, prunable, prune, whole_directories
from moecore.io.checkpoint.manifest import DTYPE_NAMES, MANIFEST, read_manifest
from moecore.io.checkpoint.meter import Progress
from moecore.planning.commands import add_dry_run, add_plan, add_report
from moecore.planning.measure import add_measure

DESCRIPTION = """\
Work with checkpoints. A path is a step directory (runs/a/step-000100), a run (runs/a; its latest
checkpoint is meant), a Hugging Face directory (with config.json and safetensors) or one of
torch.distributed.checkpoint, plain or of Megatron-Core (with .metadata)."""

EXAMPLES = """\
examples:
  moecore checkpoint inspect runs/a                       what is in it
  moecore checkpoint inspect hf/Mixtral-8x7B --json       the same for programs
  moecore checkpoint verify runs/a/step-000100            hash every byte
  moecore checkpoint convert hf/Qwen3-30B-A3B runs/start  Hugging Face -> native, as step 0
  moecore checkpoint convert runs/a hf/mine --config hf/Qwen3-30B-A3B --dtype bfloat16
  moecore checkpoint convert megatron/iter_0001000 runs/start --config hf/Qwen3-30B-A3B
  moecore checkpoint convert runs/a megatron/release --to megatron --config hf/Qwen3-30B-A3B
  moecore checkpoint prune runs/a --keep 3 --dry-run      which would be removed

exit codes: 0 all is well, 1 a problem was found, 2 wrong usage"""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TARGETS = ("native", "hf", "megatron", "dcp", "dcp-transformers")
# What only some targets have.
FITTING = {"step": ("native",), "layout": ("hf",), "max_shard_size": ("native", "hf")}
MOST_SHOWN = 400  # characters of a usage error
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        argv: arguments without the program's name; None takes the process's own.
    """
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # --help, or an error that argparse has printed
        return int(stop.code or 0)
    try:
        return args.run(args)
    except UsageError as error:
        print(f"moecore: {_printable(str(error))}", file=sys.stderr)
        return 2
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"moecore: {_printable(' '.join(str(error).split()))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # as shells have it


class _Parser(argparse.ArgumentParser):
    """A parser whose errors show the beginning of what was typed, in place of all of it."""

    def error(self, message: str) -> NoReturn:
        super().error(message if len(message) <= MOST_SHOWN else f"{message[:MOST_SHOWN]}...")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="moecore", description="MoE training: tools.")
    rooms = parser.add_subparsers(title="rooms", required=True, metavar="ROOM")
    checkpoint = rooms.add_parser(
        "checkpoint",
        help="inspect, verify, convert and prune checkpoints",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = checkpoint.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_readers(commands)
    _add_convert(commands)
    remove = _command(commands, "prune", _prune, "remove old checkpoints of a run")
    remove.add_argument("path", type=Path, help="the run")
    remove.add_argument("--keep", type=int, required=True, help="how many of the newest stay, >= 1")
    remove.add_argument("--dry-run", action="store_true", help="only print which would go")
    add_plan(rooms)
    add_dry_run(rooms)
    add_measure(rooms)
    add_report(rooms)
    return parser


def _add_readers(commands: Any) -> None:
    inspect = _command(commands, "inspect", _inspect, "print what a checkpoint holds")
    inspect.add_argument("--json", action="store_true", help="print one JSON object, all tensors")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")

    verify = _command(
        commands,
        "verify",
        _verify,
        "check that nothing is missing or damaged",
        "Native: the SHA-256 of every file and of the manifest. Hugging Face: headers, sizes, the "
        "index, missing layers, experts and scales; that format has no digests, so damage inside a "
        "tensor is not seen.",
    )
    for reader in (inspect, verify):
        reader.add_argument(
            "path", type=Path, help="step directory, run, Hugging Face or DCP directory"
        )
    verify.add_argument(
        "--sizes", action="store_true", help="native: sizes and headers only, no hashing"
    )


def _add_convert(commands: Any) -> None:
    convert = _command(
        commands,
        "convert",
        _convert,
        "native <-> Hugging Face, Megatron-Core (torch_dist) or plain DCP",
        "One process, file to file, one tensor at a time: it needs memory for the largest tensor "
        "only. From a native checkpoint to Hugging Face unless --to names another format; from all "
        "others to a native one. Optimizer state is not converted.",
    )
    convert.add_argument("source", type=Path, help="what to read")
    convert.add_argument("target", type=Path, help="new directory; for native, a new run")
    convert.add_argument(
        "--config",
        type=Path,
        help="not from Hugging Face: the model's config.json, or its directory",
    )
    convert.add_argument(
        "--to",
        choices=TARGETS,
        help="from native: hf (default), megatron (torch_dist), dcp (names of moecore's decoder), "
        "dcp-transformers (names of transformers)",
    )
    convert.add_argument("--dtype", choices=DTYPES, help="of all float tensors; default: as stored")
    convert.add_argument(
        "--layout",
        choices=("per_expert", "fused"),
        help="to Hugging Face: a tensor per expert, as published (default), or one for all",
    )
    convert.add_argument("--step", type=_step, help="to native: step (default 0)")
    convert.add_argument(
        "--max-shard-size",
        type=_size,
        metavar="SIZE",
        help="to native and Hugging Face: of a file (default 5GB)",
    )


def _command(
    commands: Any, name: str, run: Callable[[Any], int], text: str, more: str = ""
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}. {more}".strip()
    )
    parser.set_defaults(run=run)
    return parser


def _inspect(args: Any) -> int:
    path, kind = _find(args.path)
    facts = {"native": _native_facts, "Hugging Face": _hf_facts, "DCP": _dcp_facts}[kind](path)
    tensors = facts.pop("tensors")
    facts |= _totals(tensors)
    if path != args.path:
        facts["steps"] = [p.name for p in whole_directories(args.path)]
    if args.json:
        print(json.dumps(facts | {"tensors": tensors}))
        return 0
    for name, value in facts.items():
        print(f"{name:<12} {_shown(value)}")
    if args.tensors:
        for name, entry in tensors.items():
            print(f"  {entry['dtype']:<8} {entry['shape']!s:<24} {_printable(name)}")
    return 0


def _native_facts(path: Path) -> dict[str, Any]:
    manifest = read_manifest(path)
    facts = manifest.facts
    return {
        "path": str(path),
        "format": "native",
        "step": facts.step,
        "world_size": facts.world_size,
        "meshes": facts.meshes,
        "versions": facts.versions,
        "optimizer": facts.optimizer is not None,
        "scheduler": facts.scheduler is not None,
        "config": facts.config,
        "extra": facts.extra,
        "files": {name: file.size for name, file in manifest.files.items()},
        "tensors": _entries(manifest.tensors),
    }


def _hf_facts(path: Path) -> dict[str, Any]:
    from moecore.io.hf.files import CONFIG, HFFiles, read_json
    from moecore.io.hf.names import find_layout
    from moecore.io.hf.quant import find_sources

    config = read_json(path / CONFIG)
    with HFFiles(path) as files:
        quantization = config.get("quantization_config")
        sources, _ = find_sources(files, quantization)
        stored = files.tensors
    return {
        "path": str(path),
        "format": "Hugging Face",
        "model_type": config.get("model_type"),
        "layout": find_layout(sources),
        "quantized": quantization and quantization.get("quant_method"),
        "versions": {"transformers": config.get("transformers_version")},
        "files": {f: (path / f).stat().st_size for f in sorted({t.file for t in stored.values()})},
        "tensors": _entries(stored),
    }


def _dcp_facts(path: Path) -> dict[str, Any]:
    from moecore.io.interchange.convert import names_in
    from moecore.io.interchange.dcp import DCPFiles

    with DCPFiles(path) as files:
        names, stored = names_in(files), files.tensors
    used = sorted({chunk.file for tensor in stored.values() for chunk in tensor.chunks})
    return {
        "path": str(path),
        "format": "DCP",
        "names": names,
        "files": {file: (path / file).stat().st_size for file in used},
        "tensors": _entries(stored),
    }


def _entries(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {"shape": list(tensor.shape), "dtype": DTYPE_NAMES[tensor.dtype]}
        for name, tensor in tensors.items()
    }


def _totals(tensors: dict[str, Any]) -> dict[str, Any]:
    """Number of tensors, elements and bytes by dtype."""
    elements = Counter[str]()
    for entry in tensors.values():
        elements[entry["dtype"]] += math.prod(entry["shape"])
    sizes = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}
    num_bytes = sum(count * sizes[name] for name, count in elements.items())
    return {"num_tensors": len(tensors), "num_bytes": num_bytes, "elements": elements}


def _verify(args: Any) -> int:
    path, kind = _find(args.path)
    if kind == "native":
        from moecore.io.checkpoint.store import verify

        with _progress("hashing") as progress:
            manifest = verify(path, "sizes" if args.sizes else "full", progress=progress)
        print(f"{path}: whole, {len(manifest.files)} files, {_bytes(manifest.num_bytes)}")
        return 0
    if kind == "DCP":
        from moecore.io.interchange.dcp import DCPFiles

        with DCPFiles(path) as files:
            print(f"{path}: whole, {len(files.tensors)} tensors (.metadata; no digests)")
        return 0
    from moecore.io.hf.verify import verify_hf

    problems = verify_hf(path)
    for problem in problems:
        print(f"moecore: {path}: {_printable(problem)}", file=sys.stderr)
    if not problems:
        print(f"{path}: whole (headers; the format has no digests)")
    return 1 if problems else 0


def _convert(args: Any) -> int:
    path, kind = _find(args.source)
    to = args.to or ("hf" if kind == "native" else "native")
    if (kind == "native") == (to == "native"):
        ways = " or ".join(TARGETS[1:]) if kind == "native" else "native, and then on from there"
        raise UsageError(f"--to ({to}) must be {ways}: {path} is {kind}")
    if kind == "Hugging Face" and args.config is not None:
        raise UsageError(f"--config ({args.config}) must be left out: {path} has its own")
    if kind != "Hugging Face" and args.config is None:
        raise UsageError("--config must name the config.json of the Hugging Face model")
    for name, targets in FITTING.items():
        value = getattr(args, name)
        if value is not None and to not in targets:
            shown = name.replace("_", "-")
            raise UsageError(f"--{shown} ({value}) must be left out for a target that is {to}")
    with _progress("writing") as progress:
        target = (_to_native if to == "native" else _from_native)(args, path, kind, to, progress)
    print(f"{path} -> {target}")
    return 0


def _to_native(args: Any, path: Path, kind: str, _: str, progress: Progress | None) -> Path:
    from moecore.io.hf.convert import hf_to_native
    from moecore.io.interchange.convert import dcp_to_native

    options: dict[str, Any] = dict(
        dtype=DTYPES.get(args.dtype),
        progress=progress,
        **_given(step=args.step, max_file_bytes=args.max_shard_size),
    )
    if kind == "DCP":
        return dcp_to_native(path, args.target, config=args.config, **options)
    return hf_to_native(path, args.target, **options)


def _from_native(args: Any, path: Path, _: str, to: str, progress: Progress | None) -> Path:
    from moecore.io.hf.convert import native_to_hf
    from moecore.io.interchange.convert import native_to_dcp

    target: Path = args.target
    options: dict[str, Any] = dict(
        config=args.config, dtype=DTYPES.get(args.dtype), progress=progress
    )
    if to == "hf":
        options |= _given(max_shard_bytes=args.max_shard_size, layout=args.layout)
        native_to_hf(path, target, **options)
    else:
        native_to_dcp(path, target, names=to, **options)  # type: ignore[arg-type]
    return target


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that were given; of others the functions have the defaults."""
    return {name: value for name, value in options.items() if value is not None}


def _prune(args: Any) -> int:
    if args.keep < 1:
        raise UsageError(f"--keep ({args.keep}) must be >= 1: the newest must stay")
    if not args.path.is_dir():
        raise UsageError(f"path ({args.path}) must be a run: it is not there")
    for path in (prunable if args.dry_run else prune)(args.path, args.keep):
        print(f"{'would remove' if args.dry_run else 'removed'} {path}")
    return 0


def _find(path: Path) -> tuple[Path, str]:
    """Return the checkpoint that a path means, and "native", "Hugging Face" or "DCP"."""
    if not path.is_dir():
        raise UsageError(f"path ({path}) must be a directory: it is not there")
    if (path / MANIFEST).is_file():
        return path, "native"
    if (path / ".metadata").is_file():  # with or without the model's config.json beside it
        return path, "DCP"
    if (path / "config.json").is_file():
        return path, "Hugging Face"
    newest = latest(path)
    if newest is None:
        raise UsageError(
            f"path ({path}) must hold a {MANIFEST}, a config.json, a .metadata or whole step "
            "directories: it has none of them"
        )
    return newest, "native"


@contextmanager
def _progress(what: str) -> Iterator[Progress | None]:
    """Show a bar on a terminal, where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield None
        return
    with tqdm(desc=what, unit="B", unit_scale=True, disable=None, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def _step(text: str) -> int:
    try:
        step = int(text)
        check_value("step", step, Step)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a whole number >= 0 and < 10**18"
        ) from None
    return step


def _size(text: str) -> int:
    """Return bytes, from a number with KB, MB, GB or TB, or without."""
    unit = text[-2:].upper()
    number = text[:-2] if unit in UNITS else text
    try:
        size = int(float(number) * UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a size >= 1 such as 5GB or 500MB")
    return size


def _bytes(count: int) -> str:
    for unit, size in reversed(UNITS.items()):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{_printable(k)}={_shown(v)}" for k, v in value.items()) or "-"
    if isinstance(value, list):
        return " ".join(map(_shown, value)) or "-"
    return "-" if value is None else _printable(str(value))


def _printable(text: str) -> str:
    """Return a text with escapes for what a terminal would act on, and for lone surrogates."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
