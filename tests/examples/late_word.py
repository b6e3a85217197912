"""A rank of examples/train.py; rank 0 prints its error late."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import errors
import train


def run_rank(args: object) -> int:
    print_error = errors.print_error

    def print_late(error: Exception) -> int:
        time.sleep(1.0)
        return print_error(error)

    if os.environ["RANK"] == "0":
        errors.print_error = print_late
    return train.run_rank(args)
