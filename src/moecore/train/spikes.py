"""SpikeLimit: skips an optimizer step whose gradient norm is far above the norms before it.

    limit = median + factor * 1.4826 * (median absolute deviation)   of the last `window` norms

Both numbers hardly change with a few outliers. 1.4826 times the deviation is the standard deviation
of normally distributed norms. A skipped step's norm is recorded too, so that a lasting change of
the norm raises the limit. The limit and the norms are tensors on the device, and the host never
waits for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from moecore.base.fields import Bound, CheckedRecord, CountOrZero

FEWEST = 16  # norms before there is a limit
NORMAL = 1.4826  # standard deviation over median absolute deviation of a normal distribution
NORMS = "spike_norms"  # entry of a state


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeOptions(CheckedRecord):
    """When a `TrainStep` skips a step because of its gradient norm.

    Attributes:
        window: number of previous norms from which the limit is computed.
        factor: distance of the limit from the median of these norms, in robust standard deviations.
        rollback_after: number of consecutive spikes of norm or loss after which a training command
            loads its last checkpoint and skips their batches; 0 = never. `TrainStep` ignores it.
    """

    window: Annotated[int, Bound(">=", FEWEST), Bound("<=", 4096)] = 128
    factor: Annotated[float, Bound(">", 0)] = 10.0
    rollback_after: CountOrZero = 0


class SpikeLimit:
    """Limit of the next gradient norm, from `norms`: fp64 [window], oldest first, nan = no step."""

    def __init__(self, options: SpikeOptions, device: torch.device) -> None:
        self.options = options
        self.norms = torch.full((options.window,), torch.nan, device=device, dtype=torch.float64)

    @torch.no_grad()
    def compute_limit(self) -> Tensor:
        """Return the limit, 0-dim fp64; inf after fewer than 16 steps."""
        number = self.norms.isfinite().sum()
        median = _compute_median(self.norms, number)
        deviation = _compute_median((self.norms - median).abs(), number)
        limit = median + self.options.factor * NORMAL * deviation
        return torch.where(number >= FEWEST, limit, torch.inf)

    @torch.no_grad()
    def record_norm(self, norm: Tensor) -> None:
        """Append a step's norm (0-dim) in place, unless it is nan or inf."""
        shifted = torch.cat([self.norms[1:], norm.to(self.norms).reshape(1)])
        self.norms.copy_(torch.where(norm.isfinite(), shifted, self.norms))

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the norms as "spike_norms"."""
        return {NORMS: self.norms.clone()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the newest norms of a `state_dict` in place; without this entry, set all to nan."""
        norms = state.get(NORMS)
        self.norms.fill_(torch.nan)
        if isinstance(norms, Tensor):
            newest = norms.flatten()[-len(self.norms) :]
            self.norms[len(self.norms) - len(newest) :].copy_(newest)


def _compute_median(values: Tensor, num_values: Tensor) -> Tensor:
    """Return the lower median of the `num_values` values that are not nan, on the device."""
    middle = (num_values - 1).clamp(min=0) // 2
    return values.sort().values.index_select(0, middle.reshape(1)).squeeze(0)
