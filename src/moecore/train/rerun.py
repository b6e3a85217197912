"""Reruns: a step whose rows exceeded a buffer's capacity is repeated with larger buffers.

run() -> all-reduce of the capacity that each rank needed, between last forward and backward
      -> every rank's rows fit: done, while the device still computes the backward
      -> otherwise: drop the step, restore random states, enlarge buffers, run() once more
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.rank_checks import get_rank_or_zero
from moecore.base.streams import HostCopyOfTensor
from moecore.moe.aux_loss import list_aux_losses
from moecore.moe.layer import RoutedLayer
from moecore.moe.pairs import get_rng_states, set_rng_states
from moecore.moe.records import ChoiceTape
from moecore.moe.shortage import BufferCapacities, Watch, compute_next_factor
from moecore.parallel.model.parallel_state import list_engines, list_parallel_states
from moecore.precision.amax import drop_amax

logger = logging.getLogger("moecore.train.rerun")
T = TypeVar("T")


class Reruns:
    """Repeats a training step with larger buffers until the token rows for the experts fit.

    Construction is collective, with a host sync. `capacities` has, for each model, the owners of
    buffers of limited size: dispatchers and stashes.
    """

    def __init__(self, capacities: Sequence[BufferCapacities], device: torch.device) -> None:
        self._capacities, self._device = capacities, device
        self._holders = [holder for capacity in capacities for holder in capacity.owners]
        is_limited = any(holder is not None and holder.capacity_factor for holder in self._holders)
        # Ranks may differ: one all-reduce finds out whether any of them has a limited capacity.
        flag = torch.tensor(float(is_limited), device=device, dtype=torch.float32)
        if dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        self._is_limited_on_any_rank = bool(flag.item())
        self._reduces_early = not any(h is not None and h.is_known_late for h in self._holders)
        self._is_running = False  # whether all of a step runs, perhaps again
        self._factors: HostCopyOfTensor | None = None  # that any rank needed of each holder

    def run_until_rows_fit(
        self, run_step: Callable[[], T], drop_step: Callable[[], None], tapes: Sequence[ChoiceTape]
    ) -> T:
        """Return `run_step()`; if rows exceed a buffer, drop the step, rewind `tapes`, repeat."""
        # Each run has one all-reduce, for which the host waits. Layers in CUDA graphs have none.
        is_graphed = any(capacity.is_graphed for capacity in self._capacities)
        if is_graphed or not self._is_limited_on_any_rank:
            return run_step()
        rewinders = [tape.make_rewind() for tape in tapes]
        while True:
            before, self._factors, self._is_running = get_rng_states(), None, True
            try:
                with self.watch_shortages("reruns"):
                    result = run_step()
            finally:
                self._is_running = False
            factors = (self._factors or self._reduce_capacity_factors()).read().tolist()
            if not any(factors):
                return result
            drop_step()
            for rewind in rewinders:
                rewind()
            set_rng_states(before)
            for holder, needed_factor in zip(self._holders, factors, strict=True):
                if holder is None:
                    continue
                holder.wait_for_reports()  # a backward may still run
                holder.clear_counters()
                if needed_factor:
                    factor = compute_next_factor(needed_factor)
                    if get_rank_or_zero() == 0:
                        text = "%s (%s) was too small: the step runs again with %s"
                        logger.warning(text, holder.option, holder.capacity_factor, factor)
                    holder.set_capacity_factor(factor)

    def start_capacity_all_reduce(self) -> None:
        """After a step's last forward, start to all-reduce the needed capacities. Collective."""
        if self._is_running and self._reduces_early:
            self._factors = self._reduce_capacity_factors()

    def has_shortage(self) -> Tensor | None:
        """Return a 0-dim device bool: whether rows exceed a buffer; None = no buffer is limited."""
        if not self._is_limited_on_any_rank:
            return None
        return self._compute_local_capacity_factors().amax() > 0

    @contextmanager
    def watch_shortages(self, reaction: Watch) -> Iterator[None]:
        """Return a context in which excess rows repeat ("reruns") or skip ("skips") the step."""
        with ExitStack() as stack:
            for capacity in self._capacities:
                stack.enter_context(capacity.watch_shortages(reaction))
            yield

    def raise_visible_errors(self, *, skips: bool) -> None:
        """Raise an ExchangeError that is already on the host; if `skips`, not for excess rows."""
        for capacity in self._capacities:
            capacity.end_step(skips=skips)

    def end_step(self, is_skipped: bool | Tensor) -> None:
        """Clear row counts on the device; record `is_skipped` for CUDA graphs. No host sync."""
        for holder in self._holders:
            if holder is not None and self._is_limited_on_any_rank:
                holder.clear_counters(host=False)
        for capacity in self._capacities:
            if capacity.graph_steps is not None:
                capacity.graph_steps.record_step(is_skipped)

    def check_capacities(self) -> None:
        """Raise an ExchangeError if token rows exceeded a buffer's capacity. Host sync."""
        for capacity in self._capacities:
            capacity.wait_and_raise_errors()

    def _compute_local_capacity_factors(self) -> Tensor:
        """Return fp32 [buffer owners]: the least factor for this rank's rows; 0 = rows fit."""
        device, zero = self._device, torch.zeros((), device=self._device, dtype=torch.float32)
        factors = [
            zero if h is None else h.compute_min_capacity_factor(device) for h in self._holders
        ]
        return torch.stack(factors)

    def _reduce_capacity_factors(self) -> HostCopyOfTensor:
        """All-reduce the needed factors by maximum; start their copy to the host. Collective."""
        factors = self._compute_local_capacity_factors()
        if dist.is_initialized():
            dist.all_reduce(factors, dist.ReduceOp.MAX)
        return HostCopyOfTensor(factors)


def drop_step(model: nn.Module) -> None:
    """Discard the gradients, token counts, auxiliary losses and amax values of an unfinished step.

    FSDP units are resharded. Cached quantised copies of expert weights are freed. No collective.
    """
    for engine in list_engines(model):
        engine.drop_step()
    for record in list_parallel_states(model):
        if record.arguments is not None:
            record.arguments.drop_step()
    drop_amax(model)
    for module in model.modules():
        if isinstance(module, RoutedLayer):
            module.drop_step_state()
    for loss in list_aux_losses(model).values():
        loss.reset()
    for param in model.parameters():
        param.grad = None
