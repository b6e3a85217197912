"""Where an optimizer step is, known to its `TrainStep` and to the models that it trains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class Progress:
    """The micro-batches of a step. Models refer to it weakly: it ends with its `TrainStep`.

    Attributes:
        done: micro-batches whose forward and backward have run.
        is_several: all of the step do, in any order.
        is_last: it is the last of its step.
        has_failed: one, or the end of the step, has raised.
    """

    done: int = 0
    is_open: bool = False
    is_several: bool = False
    is_last: bool = False
    has_failed: bool = False

    def restart(self) -> None:
        """Begin the next step."""
        self.done, self.has_failed = 0, False

    def check_closed(self, what: str) -> None:
        """Raise for `what` within a micro-batch."""
        if self.is_open:
            raise ValueError(f"{what} must not be within a micro_batch(): leave it first")

    def check_between(self, what: str) -> None:
        """Raise for `what` within a micro-batch, or in a step that has failed."""
        self.check_closed(what)
        if self.has_failed:
            raise ValueError(
                f"{what} must not follow an exception in the step: call drop(), and run all of its "
                "micro-batches again"
            )
