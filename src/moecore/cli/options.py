"""The options of `moecore checkpoint`, `measure`, `doctor` and `report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from moecore.base.command_options import POSITIONAL
from moecore.base.fields import Bound, Count
from moecore.base.text import UNITS
from moecore.io.checkpoint.directory import Step


class FileSize(int):
    """A number of bytes that a command line writes with KB, MB, GB or TB, or without a unit."""

    @classmethod
    def from_word(cls, word: str) -> FileSize:
        """Return the bytes of a word such as 5GB; raise ValueError for another word."""
        unit = word[-2:].upper()
        number = word[:-2] if unit in UNITS else word
        try:
            size = int(float(number) * UNITS.get(unit, 1))
        except (ValueError, OverflowError):
            size = 0
        if size < 1:
            raise ValueError("pass a size >= 1 such as 5GB or 500MB")
        return cls(size)


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Print the metadata and the tensors of a checkpoint.

    Try:
      moecore checkpoint inspect runs/a
      moecore checkpoint inspect hf/Mixtral-8x7B --json

    Attributes:
        path: step or run (its latest checkpoint), also as URL; Hugging Face or DCP directory.
        json: print one JSON object with all tensors.
        tensors: list every tensor.
    """

    path: Annotated[str, POSITIONAL]
    json: bool = False
    tensors: bool = False


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Check that nothing is missing or damaged.

    Native: the SHA-256 of every file and of the manifest. Hugging Face: headers, sizes, the index,
    missing layers, experts and scales; that format has no digests, so damage inside a tensor is not
    seen.

    example: moecore checkpoint verify runs/a/step-000100

    Attributes:
        path: step or run (its latest checkpoint), also as URL; Hugging Face or DCP directory.
        sizes: native: sizes and headers only, no hashing.
    """

    path: Annotated[str, POSITIONAL]
    sizes: bool = False


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Convert a checkpoint: native <-> Hugging Face, Megatron-Core (torch_dist) or plain DCP.

    One process, file to file, one tensor at a time: the command needs memory for the largest tensor
    only. Optimizer state is not converted.

    Try:
      moecore checkpoint convert hf/Qwen3-30B-A3B runs/start       (Hugging Face -> native, step 0)
      moecore checkpoint convert runs/a hf/mine --config hf/Qwen3-30B-A3B --dtype bfloat16
      moecore checkpoint convert runs/a megatron/release --to megatron --config hf/Qwen3-30B-A3B

    Attributes:
        source: the checkpoint to read, as for inspect.
        target: new directory; for native, a new run, also as URL.
        config: not from Hugging Face: the model's config.json, or its directory.
        to: default: hf from native, native from all others. megatron = torch_dist, dcp = names of
            moecore's decoder, dcp-transformers = names of transformers.
        dtype: of all float tensors; default: as stored.
        layout: to Hugging Face: a tensor per expert, as published (default), or one for all.
        step: to native: the step; default: 0.
        max_shard_size: to native and Hugging Face: the size of a file; default: 5GB.
    """

    source: Annotated[str, POSITIONAL]
    target: Annotated[str, POSITIONAL]
    config: Path | None = None
    to: Literal["hf", "megatron", "dcp", "dcp-transformers", "native"] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    layout: Literal["per_expert", "fused"] | None = None
    step: Step | None = None
    max_shard_size: FileSize | None = None


@dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """Remove old checkpoints of a run.

    example: moecore checkpoint prune runs/a --keep 3 --dry-run

    Attributes:
        path: the run, also as URL.
        keep: how many of the newest stay.
        dry_run: only print which checkpoints would be removed.
    """

    path: Annotated[str, POSITIONAL]
    keep: Count
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """Measure products, attention, copies and kernels on this machine's GPU, as a table for plans.

    Under torchrun the command measures collectives too.

    Attributes:
        out: the file to write.
    """

    out: Path = Path("table.json")


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Check the machines of a job, as it will train.

    The command compares versions, environment and clocks of all ranks. It checks limits, memory,
    disks and peer access of their hosts, and measures their links.

    example, on every host of a job:
      torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500
      -m moecore doctor --checkpoints /shared/runs

    Attributes:
        checkpoints: a directory that all ranks write, which is tried; None = none.
        timeout: seconds that ranks wait for each other.
    """

    checkpoints: Path | None = None
    timeout: Annotated[int, Bound(">=", 1), Bound("<=", 86_400), "pass seconds, a day at most"] = 60


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Report where a step's time went on one rank's GPU, and the options to try next.

    The command reads a Chrome trace of torch.profiler. It prints the limit of the step, which
    communication is exposed, why the GPU is idle, and the options that may win most.

    example: moecore report trace.json.gz --steps 3

    Attributes:
        trace: a .json or .json.gz file of one rank, as `export_chrome_trace` writes it.
        steps: steps of the trace; None = as profile.step() has marked, otherwise 1.
        json: print one JSON object.
    """

    trace: Annotated[Path, POSITIONAL]
    steps: int | None = None
    json: bool = False
