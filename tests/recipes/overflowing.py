"""A rank of moecore train; in its second step rank 1 overflows.

The other rank is in a collective then. No GPU: the exchange is a stub.
"""

import torch.distributed as dist

from moecore.moe.dispatch.exchange import ExchangeError
from moecore.parallel.model.parallel_state import get_capacity
from moecore.recipes import train
from moecore.recipes.corpus_training import CorpusTraining


class Overflowing:
    """Stands for a model's exchanges; the second poll finds what it was given."""

    capacity_factor, shortages, watch = None, (), None

    def __init__(self, error: Exception) -> None:
        self.error, self.polls = error, 0

    def raise_reported_errors(self, *, includes_shortages: bool) -> None:
        self.polls += 1
        if self.polls == 2:
            raise self.error

    wait_and_raise_errors = raise_reported_errors


def too_many_rows() -> ExchangeError:
    return ExchangeError("NVLinkOptions.row_factor (1.05) must be >= 1.361", 1.3605)


def run_rank(args: object) -> int:
    build = train.build_job

    def build_job(args: object) -> CorpusTraining:
        job = build(args)
        if dist.get_rank() == 1:
            get_capacity(job.model).owners = (Overflowing(too_many_rows()),)
        return job

    train.build_job = build_job
    return train.run_rank(args)
