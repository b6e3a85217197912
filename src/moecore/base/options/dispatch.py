"""Options of token dispatch and of clones of hot experts; docs/dispatchers.md has their costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from moecore.base.fields import Bound, CheckedRecord, Count, FieldErrors, OneOf, Positive
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
    """Options of the `nvlink` dispatcher.

    Attributes:
        max_tokens: maximum tokens per rank in one forward; None = the maximum over ranks in the
            first forward. If a rank has more, `TrainStep.forward_backward` repeats the step, as
            with `row_factor`; any other caller gets an error.
        row_factor: capacity for expert rows per rank, relative to balanced routing of `max_tokens`
            on every rank. "exact": the received number, with one host sync per dispatch; not in
            CUDA graphs. None: capacity for any routing. If a rank receives more than a numeric
            factor allows, `TrainStep.forward_backward` repeats the step with a sufficient factor
            and uses it from then on, with one host sync per step. A loop of `micro_batch()` and a
            CUDA graph skip the step on every rank without a sync; the graph is captured again. A
            step without optimizer and `clip()` raises an error. In evaluation, rows are dispatched
            by all-to-all if the factor is a number, so any routing fits.
        overlap_weight_grads: the GPU's copy engines return token gradients to the tokens' ranks
            while the experts compute weight gradients.
        keep_rows: save the received rows for backward. False: backward dispatches the tokens a
            second time; requires expert_backend "triton" or "torch", without biases.
        timeout_s: seconds that a rank waits for other ranks before it raises an error.
    """

    max_tokens: Count | None = None
    row_factor: RowFactor | None = 2.0
    overlap_weight_grads: bool = True
    keep_rows: bool = True
    timeout_s: Positive = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CloneOptions(CheckedRecord):
    """Clones of hot experts on other ranks: a copy of an expert computes a part of its tokens.

    Attributes:
        per_rank: maximum number of clones on a rank in one layer; one clone costs the transfer of
            its expert's weights in forward, and of the weight gradients in backward.
        min_share: minimum tokens of a clone, as a share of the mean tokens per rank. A smaller
            imbalance creates no clone.
        refresh: when clones are planned. "forward": in every forward, from its routing. An int n:
            every n steps, from the loads of one optimizer step, so no forward waits for a plan.
    """

    per_rank: Count = 2
    min_share: Annotated[float, Bound(">=", 0), Bound("<", 1)] = 0.05
    refresh: Refresh = "forward"


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchOptions(CheckedRecord):
    """How tokens reach the ranks of their experts.

    Attributes:
        name: the dispatcher; "auto" chooses by the hardware, see docs/dispatchers.md.
        nvlink: options for "nvlink", "hierarchical" and "auto"; None = the defaults.
        fp8: dispatch tokens, and save them for backward, as float8_e4m3fn with a scale per 128
            columns. Experts multiply dequantised tokens; backward ignores the rounding
            (straight-through). Gradients of the experts' output are sent in FP8 only if experts in
            FP8 ("blockwise") round them identically; sums over ranks are sent unrounded.
        clones: clones of hot experts on ranks with few tokens; None = none. See docs/balancing.md.
    """

    name: DispatcherName = "auto"
    nvlink: NVLinkOptions | None = None
    fp8: bool = False
    clones: CloneOptions | None = None

    def _find_field_errors(self) -> FieldErrors:
        names = "'nvlink', 'hierarchical' or 'auto': drop it"
        if self.nvlink is not None and self.name not in ("auto", "nvlink", "hierarchical"):
            yield "nvlink", f"go with name ({self.name!r}) = {names}"
        is_registered = DISPATCHERS[self.name] is not None
        if self.fp8 and (is_registered or self.name in ("allgather", "nccl_ep")):
            yield "fp8", f"go with name ({self.name!r}) = 'alltoall', {names}"

    @classmethod
    def of(cls, dispatch: DispatchOptions | DispatcherName) -> DispatchOptions:
        """Return a `DispatchOptions` unchanged, or default options for a dispatcher name."""
        return dispatch if isinstance(dispatch, DispatchOptions) else cls(name=dispatch)
