"""A rank of moecore train; rank 0 prints its error late."""

import os
import time

from moecore.recipes import errors, train


def run_rank(args: object) -> int:
    print_error = errors.print_error

    def print_late(error: Exception) -> int:
        time.sleep(1.0)
        return print_error(error)

    if os.environ["RANK"] == "0":
        errors.print_error = print_late
    return train.run_rank(args)
