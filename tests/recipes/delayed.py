"""A rank of moecore train; rank 1 is slow in one place of every step.

The place is the environment's MOECORE_TEST_DELAY.
"""

import os
import sys
import time
from contextlib import redirect_stdout
from typing import Any

import torch.distributed as dist

from moecore.recipes import train
from moecore.recipes.corpus_training import CorpusTraining

DELAY_S = 0.6  # far above what a busy machine adds to a phase


def delay(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        time.sleep(DELAY_S)
        return function(*args, **kwargs)

    return call


def run_rank(args: object) -> int:
    build, place = train.build_job, os.environ["MOECORE_TEST_DELAY"]

    def build_job(args: object) -> CorpusTraining:
        job: Any = build(args)
        if dist.get_rank() == 1:
            layer = job.model.layers[-1]
            owner, name = {
                "data": (job.batches, "next_batch"),
                "forward and backward": (layer, "forward"),
                "optimizer": (job.optimizers[0], "step"),
            }[place]
            setattr(owner, name, delay(getattr(owner, name)))
        return job

    train.build_job = build_job
    with redirect_stdout(sys.stderr):  # which a test reads
        return train.run_rank(args)
