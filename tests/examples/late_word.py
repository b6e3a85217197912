"""Runs examples/train.py with the arguments that follow; what rank 0 has to say comes late."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train


def run_rank(args: object) -> int:
    say_error = train.say_error

    def say_late(error: Exception) -> int:
        time.sleep(1.0)
        return say_error(error)

    if os.environ["RANK"] == "0":
        train.say_error = say_late
    return train.run_rank(args)


if __name__ == "__main__":
    args = train.parse_arguments()
    sys.exit(train.launch(run_rank, args, args.ranks))
