"""`Progress`: counts an optimizer step's micro-batches; `TrainStep` and its models share it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True)
class Progress:
    """Counters and flags of a step's micro-batches, written by `TrainStep`, read by the model."""

    number: int = 1  # micro-batches of a step
    num_done: int = 0  # micro-batches whose forward and backward have run
    is_open: bool = False  # whether a micro-batch runs
    is_several: bool = False  # whether all micro-batches of the step run, in any order
    is_last: bool = False  # whether the micro-batch is the last of its step
    has_failed: bool = False  # whether a micro-batch, or the end of the step, has raised

    def start_next_step(self) -> None:
        """Reset the counts for the next step."""
        self.num_done, self.has_failed = 0, False

    def check_not_in_micro_batch(self, caller: str) -> None:
        """Raise a ValueError if a micro-batch is open; the error names the method `caller`."""
        if self.is_open:
            raise ValueError(f"{caller} must not be within a micro_batch(): leave it first")

    def check_no_open_micro_batch(self, caller: str) -> None:
        """Raise a ValueError if a micro-batch is open or has failed; the error names `caller`."""
        self.check_not_in_micro_batch(caller)
        if self.has_failed:
            raise ValueError(
                f"{caller} must not follow an exception in the step: call drop(), and run all of "
                "its micro-batches again"
            )

    def check_complete(self, caller: str, num_micro_batches: int) -> None:
        """Raise a ValueError unless `num_micro_batches` are done; the error names `caller`."""
        self.check_no_open_micro_batch(caller)
        if self.num_done != num_micro_batches:
            raise ValueError(
                f"{caller} must follow num_micro_batches ({num_micro_batches}) micro-batches, "
                f"but {self.num_done} are done: run forward and backward of each in "
                "`with step.micro_batch():`, set num_micro_batches before the step, or drop()"
            )


def check_grad_enabled(caller: str) -> None:
    """Raise a ValueError if torch's gradients are disabled; the error names function `caller`."""
    if not torch.is_grad_enabled():
        raise ValueError(
            f"{caller} must run with gradients: call it outside of torch.no_grad() and "
            "inference_mode()"
        )


def check_requires_grad(loss: Tensor) -> None:
    """Raise a ValueError if a loss does not require a gradient."""
    if not loss.requires_grad:
        raise ValueError(
            "loss (without a gradient) must depend on a trained parameter: set requires_grad of "
            "those that are to be trained"
        )
