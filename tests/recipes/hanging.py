"""A rank of moecore train; in its second step rank 1 stops in one place.

The place is the environment's MOECORE_TEST_DELAY.
"""

import os
import time
from typing import Any

import torch.distributed as dist

from moecore.recipes import train
from moecore.recipes.corpus_training import CorpusTraining


def stop() -> None:
    while True:
        time.sleep(600)


def run_rank(args: object) -> int:
    build, place = train.build_job, os.environ["MOECORE_TEST_DELAY"]

    def build_job(args: object) -> CorpusTraining:
        job: Any = build(args)
        layer, reader = job.model.layers[-1], job.batches
        owner, name = {"data": (reader, "next_batch"), "layer": (layer, "forward")}[place]
        function, calls = getattr(owner, name), list[int]()

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                stop()
            return function(*args, **kwargs)

        if dist.get_rank() == 1:
            setattr(owner, name, call)
        return job

    train.build_job = build_job
    return train.run_rank(args)
