"""How tokens travel, and clones of hot experts; docs/dispatchers.md has what options cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from moecore.base.fields import Bound, CheckedRecord, Count, OneOf, Positive, Rules
from moecore.base.registry import Registry

BuiltinDispatcher = Literal[
    "auto", "local", "alltoall", "allgather", "nvlink", "hierarchical", "nccl_ep"
]
# The function that makes a registered dispatcher of an `ExpertPlacement`; None = moecore's own.
DISPATCHERS: Registry[Callable[[Any], Any] | None] = Registry(
    "DispatchOptions.name", dict.fromkeys(get_args(BuiltinDispatcher))
)
DispatcherName = Annotated[BuiltinDispatcher | str, OneOf(DISPATCHERS)]

RowFactor = Annotated[Positive | Literal["exact"], "use 2.0, or 'exact' to count rows first"]
Refresh = Annotated[Count | Literal["forward"], "use 'forward' to plan in every forward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NVLinkOptions(CheckedRecord):
    """Choices of the `nvlink` dispatcher.

    Attributes:
        max_tokens: most tokens of any rank in one forward; None = the most of the first forward.
            More let `TrainStep.forward_backward` run again as with `row_factor`, and are an error
            elsewhere.
        row_factor: expert rows per rank over what a balanced routing of `max_tokens` on every
            rank would give. "exact": as many as come, at one host sync per dispatch; not in CUDA
            graphs. None: room for any routing. Where more come than a number allows,
            `TrainStep.forward_backward` runs the step again with the factor that was needed, which
            stays; it waits for the device once per step. A loop of `micro_batch()` skips the step
            on every rank, without a wait, and so does a CUDA graph, which is captured anew then.
            Steps that nobody clips have an error. Outside of a step that somebody ends so, which is
            evaluation, rows of a limited number travel by all-to-all, so that any fit.
        overlap_weight_grads: copy engines bring the tokens' gradients home while the experts
            compute those of their weights.
        keep_rows: whether backward finds the rows that came. False sends the tokens once more
            there; for experts "triton" and "torch" without biases.
        timeout_s: seconds that a rank waits for another one before it is an error.
    """

    max_tokens: Count | None = None
    row_factor: RowFactor | None = 2.0
    overlap_weight_grads: bool = True
    keep_rows: bool = True
    timeout_s: Positive = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CloneOptions(CheckedRecord):
    """Clones of hot experts on other ranks.

    Attributes:
        per_rank: most clones that a rank holds in one layer; one clone costs the transfer of its
            expert's weights in forward, and of their gradients in backward.
        min_share: no clone gets fewer tokens than this share of a rank's mean, so ranks that are as
            close to it stay as they are.
        refresh: when clones are planned. "forward": in every one, from its own choices. n: from the
            loads of one optimizer step for the next n, so no forward waits for a plan.
    """

    per_rank: Count = 2
    min_share: Annotated[float, Bound(">=", 0), Bound("<", 1)] = 0.05
    refresh: Refresh = "forward"


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchOptions(CheckedRecord):
    """How tokens reach the ranks of their experts.

    Attributes:
        name: the dispatcher; "auto" chooses by the hardware, see docs/dispatchers.md.
        nvlink: sizes and times of stores, for "nvlink", "hierarchical" and "auto"; None = the
            defaults.
        fp8: tokens travel between ranks, and are kept for backward, as float8_e4m3fn with a scale
            per 128 columns; experts multiply them in the dtype that they had, and the rounding has
            the gradient of an identity. Gradients of the experts' output travel so too where
            experts in FP8 ("blockwise") would round them alike; sums travel as they are.
        clones: clones of hot experts on ranks with few tokens; None = none. See docs/balancing.md.
    """

    name: DispatcherName = "auto"
    nvlink: NVLinkOptions | None = None
    fp8: bool = False
    clones: CloneOptions | None = None

    def _rules(self) -> Rules:
        if self.nvlink is not None and self.name not in ("auto", "nvlink", "hierarchical"):
            yield (
                "nvlink",
                f"go with name ({self.name!r}) = 'nvlink', 'hierarchical' or 'auto': drop it",
            )
        is_registered = DISPATCHERS[self.name] is not None
        if self.fp8 and (is_registered or self.name in ("allgather", "nccl_ep")):
            yield (
                "fp8",
                f"go with name ({self.name!r}) = 'alltoall', 'nvlink', 'hierarchical' or 'auto': "
                "drop it",
            )

    @classmethod
    def of(cls, dispatch: DispatchOptions | DispatcherName) -> DispatchOptions:
        """Return the record that an argument stands for: a name alone has default options."""
        return dispatch if isinstance(dispatch, DispatchOptions) else cls(name=dispatch)
