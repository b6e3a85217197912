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
    """A number of bytes, written on the command line with KB, MB, GB, TB or without a unit."""

    @classmethod
    def from_word(cls, word: str) -> FileSize:
        """Parse a word such as 5GB; ValueError for any other form."""
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
        path: a step, a run (its latest checkpoint) or their URL, or an HF or DCP directory.
        json: print one JSON object with all tensors.
        tensors: list every tensor.
    """

    path: Annotated[str, POSITIONAL]
    json: bool = False
    tensors: bool = False


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Check that a checkpoint is complete and undamaged.

    Native: the SHA-256 of all files and the manifest. Hugging Face: headers, sizes, the index, and
    missing layers, experts and scales, but not the tensors' values, which have no digests.

    example: moecore checkpoint verify runs/a/step-000100

    Attributes:
        path: a step, a run (its latest checkpoint) or their URL, or an HF or DCP directory.
        sizes: native: check only sizes and headers, without hashes.
    """

    path: Annotated[str, POSITIONAL]
    sizes: bool = False


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Convert a checkpoint: native <-> Hugging Face, Megatron-Core (torch_dist) or plain DCP.

    One process converts one tensor at a time, so the command needs memory only for the largest
    tensor. Optimizer state is not converted.

    Try:
      moecore checkpoint convert hf/Qwen3-30B-A3B runs/start       (Hugging Face -> native, step 0)
      moecore checkpoint convert runs/a hf/mine --config hf/Qwen3-30B-A3B --dtype bfloat16
      moecore checkpoint convert runs/a megatron/release --to megatron --config hf/Qwen3-30B-A3B

    Attributes:
        source: the checkpoint to read, as for inspect.
        target: a new directory; for native, a new run or its URL.
        config: the model's config.json or directory, unless source is Hugging Face.
        to: target format; default: hf from native, native otherwise. megatron = torch_dist, dcp =
            names of moecore's decoder, dcp-transformers = names of transformers.
        dtype: the dtype of all float tensors; default: as stored.
        layout: to Hugging Face: per_expert = a tensor per expert (default), fused = stacked.
        step: to native: the step number; default: 0.
        max_shard_size: to native and Hugging Face: maximum size of a file; default: 5GB.
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
        keep: number of newest checkpoints to keep.
        dry_run: only print which checkpoints would be removed.
    """

    path: Annotated[str, POSITIONAL]
    keep: Count
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """Measure matmuls, attention, copies and kernels on this GPU, as a cost table for plans.

    Under torchrun the command also measures collectives.

    Attributes:
        out: the file to write.
    """

    out: Path = Path("table.json")


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Check the hosts and GPUs of a job before training.

    The command compares versions, environment and clocks of all ranks. It checks limits, memory,
    disks and peer access of their hosts, and measures their links.

    example, on every host of a job:
      torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500
      -m moecore doctor --checkpoints /shared/runs

    Attributes:
        checkpoints: a directory in which all ranks write a test file; None = no test.
        timeout: seconds that ranks wait for each other.
    """

    checkpoints: Path | None = None
    timeout: Annotated[int, Bound(">=", 1), Bound("<=", 86_400), "pass seconds, a day at most"] = 60


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Report the time of a step on one rank's GPU by cause, and options to try.

    The command reads a Chrome trace of torch.profiler. It prints the limit of the step, exposed
    communication, causes of GPU idle time, and the options that may save most time.

    example: moecore report trace.json.gz --steps 3

    Attributes:
        trace: a .json or .json.gz file of one rank, as `export_chrome_trace` writes it.
        steps: steps in the trace; None = as marked by profile.step(), or 1 without marks.
        json: print one JSON object.
    """

    trace: Annotated[Path, POSITIONAL]
    steps: int | None = None
    json: bool = False
