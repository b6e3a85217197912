"""PreferenceTuning: one rank's part of `moecore finetune` with objective "dpo".

The reference model is the model of the directory, sharded like the policy and frozen. With adapters
the policy without its adapters is the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.recipes.finetuning import FineTuning
from moecore.recipes.metrics import Metrics
from moecore.recipes.preferences import PreferenceBatch
from moecore.rl import DPO, Engine, Rollouts


@dataclass(kw_only=True)
class PreferenceTuning(FineTuning):
    """A model of a Hugging Face directory on pairs of completions.

    Attributes:
        reference: parallelized and frozen; None = the model without its adapters.
    """

    reference: Any

    unit = "pair"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.objective: DPO = self.args.dpo or DPO()
        # A micro-batch has room for `batch_size` pairs of the greatest length.
        max_tokens = 2 * self.shape.batch_size * self.shape.seq_len
        self.engine = Engine(
            self.model, self.owner, max_tokens=max_tokens, reference=self.reference
        )
        self._metrics: Metrics = {}

    def forward_backward(self, num_labels: Tensor, batch: Any) -> Tensor:
        """Run forward and backward of the mean over pairs; return this rank's part of it."""
        rollouts = self.with_reference(batch)
        result = self.engine.forward_backward(rollouts, self.objective)
        self._metrics = self.rewards(rollouts, result.scores.log_probs_N)
        return result.loss / self.meshes.data_ranks  # every rank has the mean

    def with_reference(self, batch: PreferenceBatch) -> Rollouts:
        """Return the pairs with the log-probabilities of the reference, on the device."""
        scores = self.engine.reference_log_probs(batch.rollouts)
        return batch.rollouts.replace(
            ref_log_probs_N=scores.log_probs_N,
            response_mask_N=batch.rollouts.response_mask_N.to(self.device),
        )

    def rewards(self, rollouts: Rollouts, log_probs_N: Tensor) -> Metrics:
        """Return the means over the pairs of all data ranks, by the names of TRL. Collective."""
        rewards_i2 = self.objective.beta * self.objective.compute_log_ratios(log_probs_N, rollouts)
        margins_i = rewards_i2[:, 0] - rewards_i2[:, 1]
        sums = torch.stack([*rewards_i2.sum(0), margins_i.sum(), (margins_i > 0).sum()])
        sums = torch.cat([sums, sums.new_full((1,), len(margins_i))])
        dist.all_reduce(sums)
        *totals, num_pairs = sums.tolist()
        names = ("chosen", "rejected", "margins", "accuracies")
        pairs = zip(names, totals, strict=True)
        return {f"rewards/{name}": total / num_pairs for name, total in pairs}

    def position(self) -> Metrics:
        """Return the rewards of the step."""
        return self._metrics

    def sum_of_losses(self, batch: Any) -> Tensor:
        """Return the sum of the losses of this data rank's pairs."""
        rollouts = self.with_reference(batch)
        log_probs_N = self.engine.log_probs(rollouts).log_probs_N
        log_ratios_i2 = self.objective.compute_log_ratios(log_probs_N, rollouts)
        return self.objective.compute_pair_losses(log_ratios_i2).sum()

    def more_metrics(self, counts: list[int], seconds: float) -> Metrics:
        """Return the tokens of completions."""
        return {"answer_tokens": counts[2]}
