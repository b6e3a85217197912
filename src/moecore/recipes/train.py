r"""Train a decoder on text, byte by byte: `moecore pretrain` with other defaults.

    moecore train --run-dir runs/demo                two processes on a CPU, or all GPUs
    moecore train --run-dir runs/mine --data a.txt b.jsonl --preset tiny --steps 1000
    torchrun --nproc-per-node 8 -m moecore train --run-dir runs/eight --ep 4 --etp 2

Eight GPUs of one host at full speed. The router learns from scratch with even loads from the first
step. docs/performance.md has the speed of this command:

    moecore train --run-dir runs/qwen3 --preset qwen3-30b-a3b --compile-dense \
        --dense-strategy optim --experts-strategy optim_grads_params --seq-len 4096 \
        --batch-size 4 --lr 3e-4 --schedule-steps 40000 --dispatcher nvlink --row-factor 1.5 \
        --expert-bias --score-function sigmoid --bias-update quantile --bias-update-rate 1 \
        --bias-per-micro-batch
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moecore.base.fields import Positive
from moecore.models import DecoderConfig
from moecore.recipes.corpora import STDLIB, SourceOptions
from moecore.recipes.generate import SampleOptions
from moecore.recipes.loop import run, run_command
from moecore.recipes.optimizer import OptimizerConfig
from moecore.recipes.parser import parse
from moecore.recipes.pretrain import (
    PretrainConfig,
    build_job,
    check_stages,
    dry_run_stages,
    resolve_stages,
)
from moecore.recipes.schedule import LearningRateSchedule


@dataclass(frozen=True, kw_only=True)
class TrainConfig(PretrainConfig):
    """Train a Mixture-of-Experts decoder on text, byte by byte."""

    data: tuple[SourceOptions, ...] = (SourceOptions(path=STDLIB),)
    embedding_std: Positive = 0.02
    run_dir: Path = Path("runs/demo")
    optimizer: OptimizerConfig = OptimizerConfig(lr=3e-3)
    schedule: LearningRateSchedule = LearningRateSchedule()
    samples: SampleOptions = SampleOptions(
        sample_prompts=("def ",), sample_every=1000, sample_tokens=64
    )

    def choose_balance(self, config: DecoderConfig) -> dict[str, Any]:
        """Return {}: the preset's balance options are the defaults."""
        return {}


parse_arguments = partial(parse, TrainConfig, prog="moecore train")


def run_rank(args: PretrainConfig) -> int:
    """Train and save on this rank; return the exit status."""
    return run(args, build_job, resolve_stages)


main = partial(
    run_command, parse_arguments, run_rank=run_rank, check=check_stages, dry_run=dry_run_stages
)
