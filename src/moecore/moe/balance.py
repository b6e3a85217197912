"""Load balance: auxiliary losses, expert-load statistics and the expert bias.

Legend: T local tokens, B sequences, E experts, K experts per token, L layers.

Journey: each layer's `LoadTracker` computes its auxiliary losses from the routing and rides them
on the layer's output. Backward adds their gradient and commits the counts, so that a recomputed
forward, eval mode and no_grad count nothing. Once per optimizer step `MoEState.finish_step`
reduces the counts of all layers in one collective, moves the expert biases and returns the metrics.

An auxiliary loss is the mean over the step's micro-batches and data ranks of each one's loss,
whatever the folding: ranks that share a micro-batch (cp, tp) count tokens together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moecore.config import MoEConfig
from moecore.moe.router import Routing

LOSS_NAMES = ("micro_batch", "sequence", "global_batch", "z")


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceGroups:
    """Who counts tokens together.

    Attributes:
        micro_batch: ranks that hold parts of one data rank's micro-batch; None = this rank alone.
        global_batch: all ranks of the pipeline stage; None = this rank alone.
        data_ranks: number of data ranks in `global_batch`.
    """

    micro_batch: dist.ProcessGroup | None = None
    global_batch: dist.ProcessGroup | None = None
    data_ranks: int = 1


class LoadTracker:
    """One layer's auxiliary losses and counts since the last optimizer step.

    Args:
        config: the layer.
    """

    def __init__(self, config: MoEConfig) -> None:
        self.config = config
        self.groups = BalanceGroups()
        self.gradient_scale = 1.0  # factor on the auxiliary losses' gradient
        self.reset()

    def reset(self) -> None:
        """Forget the counts of this step."""
        self.num_micro_batches = 0
        self.num_in_flight = 0  # forwards that wait for their backward
        self.counts_E: Tensor | None = None
        self.losses: Tensor | None = None

    def attach(self, y: Tensor, routing: Routing, num_sequences: int) -> Tensor:
        """Return y with the auxiliary losses and the counts riding on it.

        Without gradients it is y itself, and nothing is counted.
        """
        if not (torch.is_grad_enabled() and y.requires_grad):
            return y
        self._check_recompute()
        E = self.config.num_experts
        with torch.no_grad():
            counts_BE = count_experts(routing.expert_ids_TK, num_sequences, E)
        losses = torch.zeros(len(LOSS_NAMES), device=y.device)
        if self.config.balance.needs_loss:
            losses = balance_losses(
                routing, counts_BE, self.config, self.groups, prior_counts_E=self.counts_E
            )
        return _Attach.apply(y, losses, counts_BE.sum(0), self)

    def _check_recompute(self) -> None:
        """Count forwards, and refuse one that could not repeat what it did the first time.

        Activation checkpointing repeats a forward inside backward. "global_batch" reads the counts
        so far, which are those of its first run only if no other micro-batch came in between.
        """
        recomputing = torch._C._current_graph_task_id() != -1
        if not recomputing:
            self.num_in_flight += 1
        elif self.num_in_flight > 1 and self.config.balance.global_batch_coef:
            raise NotImplementedError(
                f"BalanceConfig.global_batch_coef ({self.config.balance.global_batch_coef}) "
                "must be 0 with activation checkpointing and several forwards before a backward: "
                "use micro_batch_coef, or one backward per forward"
            )

    def commit(self, counts_E: Tensor, losses: Tensor) -> None:
        """Add one micro-batch; called by backward."""
        self.num_in_flight = max(0, self.num_in_flight - 1)
        self.num_micro_batches += 1
        if self.counts_E is None or self.losses is None:
            self.counts_E, self.losses = counts_E.clone(), losses.clone()
        else:
            self.counts_E += counts_E
            self.losses += losses


class _Attach(torch.autograd.Function):
    """Identity on y; backward gives the losses their gradient and commits the counts once."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, losses: Tensor, counts_E: Tensor, tracker: LoadTracker
    ) -> Tensor:
        ctx.tracker = tracker
        ctx.save_for_backward(losses, counts_E)
        # Not a view: FSDP2 hooks its units' outputs, and an in-place add to a view drops the hook.
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        losses, counts_E = ctx.saved_tensors
        ctx.tracker.commit(counts_E, losses.detach())
        return grads[0], torch.full_like(losses, ctx.tracker.gradient_scale), None, None


def count_experts(ids_TK: Tensor, num_sequences: int, num_experts: int) -> Tensor:
    """Return int64 [B, E], the assignments of each expert per sequence; -1 is not counted."""
    ids_BN = ids_TK.reshape(num_sequences, ids_TK.numel() // max(num_sequences, 1)).long()
    ids_BN = torch.where(ids_BN < 0, num_experts, ids_BN)
    counts = torch.zeros(num_sequences, num_experts + 1, dtype=torch.int64, device=ids_TK.device)
    return counts.scatter_add_(1, ids_BN, torch.ones_like(ids_BN))[:, :-1]


def balance_losses(
    routing: Routing,
    counts_BE: Tensor,
    config: MoEConfig,
    groups: BalanceGroups,
    *,
    prior_counts_E: Tensor | None = None,
) -> Tensor:
    """Return this rank's parts of the auxiliary losses, in the order of `LOSS_NAMES`.

    Ranks of `groups.micro_batch` each return the part of their own tokens; the parts add up to the
    loss. Coefficients are applied. One small all-reduce per scope that needs one; no host sync.

    Args:
        routing: of this rank's tokens.
        counts_BE: their counts, from `count_experts`.
        config: the layer.
        groups: who counts together.
        prior_counts_E: this rank's counts of earlier micro-batches of the step.
    """
    balance, B = config.balance, counts_BE.shape[0]
    E, K = config.num_experts, config.top_k
    T = routing.scores_TE.shape[0]
    # One row per sequence: counts of the experts, then the number of tokens.
    packed = F.pad(counts_BE, (0, 1), value=T // max(B, 1))
    if groups.micro_batch is not None:
        dist.all_reduce(packed, group=groups.micro_batch)
    counts_BE, tokens_B1 = packed[:, :E].float(), packed[:, E:].clamp(min=1).float()
    tokens = packed[:, E].sum().clamp(min=1).float()
    mean_scores_E = routing.scores_TE.sum(0) / tokens

    zero = routing.logits_TE.new_zeros((), dtype=torch.float32)
    losses = dict.fromkeys(LOSS_NAMES, zero)
    if balance.micro_batch_coef:
        share_E = counts_BE.sum(0) / (tokens * K)
        losses["micro_batch"] = balance.micro_batch_coef * E * (share_E * mean_scores_E).sum()
    if balance.sequence_coef:
        share_BE = counts_BE / (tokens_B1 * K)
        mean_scores_BE = routing.scores_TE.view(B, T // max(B, 1), E).sum(1) / tokens_B1
        loss_B = E * (share_BE * mean_scores_BE).sum(-1)
        losses["sequence"] = balance.sequence_coef * loss_B.sum() / max(B, 1)
    if balance.global_batch_coef:
        counts_E = _global_counts(routing.expert_ids_TK, E, prior_counts_E, groups.global_batch)
        share_E = counts_E / counts_E.sum().clamp(min=1)
        losses["global_batch"] = balance.global_batch_coef * E * (share_E * mean_scores_E).sum()
    if balance.z_loss_coef:
        squares = routing.logits_TE.logsumexp(-1).square().sum().float()
        losses["z"] = balance.z_loss_coef * squares / tokens
    return torch.stack([losses[name] for name in LOSS_NAMES])


def _global_counts(
    ids_TK: Tensor, num_experts: int, prior_E: Tensor | None, group: dist.ProcessGroup | None
) -> Tensor:
    counts_E = count_experts(ids_TK, 1, num_experts)[0]
    if prior_E is not None:
        counts_E = counts_E + prior_E
    if group is not None:
        dist.all_reduce(counts_E, group=group)
    return counts_E.float()


@dataclass(frozen=True, slots=True)
class MoEMetrics:
    """What one optimizer step routed. Tensors stay on the device until read.

    Attributes:
        tokens_per_expert: layer name -> int64 [E], over all ranks and micro-batches.
        aux_losses: layer name -> fp32 [4] in the order of `LOSS_NAMES`, coefficients applied.
    """

    tokens_per_expert: dict[str, Tensor] = field(default_factory=dict)
    aux_losses: dict[str, Tensor] = field(default_factory=dict)

    def load_max_over_mean(self) -> dict[str, float]:
        """Return layer name -> most loaded expert over the mean. One host sync for all layers."""
        if not self.tokens_per_expert:
            return {}
        ratios = [
            n.max() / n.float().mean().clamp(min=1e-9) for n in self.tokens_per_expert.values()
        ]
        return dict(zip(self.tokens_per_expert, torch.stack(ratios).tolist(), strict=True))

    def total_aux_loss(self) -> float:
        """Return the sum over layers of all auxiliary losses. One host sync."""
        if not self.aux_losses:
            return 0.0
        return float(torch.stack(list(self.aux_losses.values())).sum())


class MoEState:
    """The balance record that a parallelized model owns: `moe_state(model)`.

    Args:
        layers: name -> layer, every MoELayer of the model.
        groups: who counts together.
        loss: "mean" or "sum", the loss convention of `parallelize_moe`.
    """

    def __init__(
        self, layers: Mapping[str, Any], groups: BalanceGroups, *, loss: str = "mean"
    ) -> None:
        self.layers = layers
        self.groups = groups
        self.loss = loss
        for layer in layers.values():
            layer.tracker.groups = groups
        self.set_num_micro_batches(1)

    def set_num_micro_batches(self, num_micro_batches: int) -> None:
        """Say how many micro-batches one optimizer step accumulates (1 until told otherwise).

        The auxiliary losses are divided by it, as the user divides the main loss; no other factor
        on the main loss reaches them.

        Raises:
            ValueError: when it is less than 1.
        """
        if num_micro_batches < 1:
            raise ValueError(
                f"num_micro_batches ({num_micro_batches}) must be >= 1: use the number of "
                "backwards per optimizer step"
            )
        self.num_micro_batches = num_micro_batches
        scale = 1.0 / num_micro_batches
        if self.loss == "sum":
            scale /= self.groups.data_ranks
        for layer in self.layers.values():
            layer.tracker.gradient_scale = scale

    @torch.no_grad()
    def finish_step(self, *, skipped: bool = False) -> MoEMetrics:
        """Reduce the step's counts, move the expert biases, and start counting anew.

        Call once per optimizer step on every rank. One collective for all layers; no host sync.

        Args:
            skipped: the step was dropped (`not clip_grad_norm_(...).finite`): biases stay too.

        Returns:
            The metrics of the step; all zero when nothing was counted since the last call.

        Raises:
            ValueError: when a layer with auxiliary losses saw another number of micro-batches than
                `set_num_micro_batches` said, so that their gradient had the wrong scale.
        """
        trackers = {name: layer.tracker for name, layer in self.layers.items()}
        # Every rank packs every layer, counted or not: all reduce the same length. fp64 carries
        # counts exactly (to 2^53) beside the losses in one tensor.
        packed = torch.cat([self._packed(layer) for layer in self.layers.values()])
        if self.groups.global_batch is not None:
            dist.all_reduce(packed, group=self.groups.global_batch)
        metrics, start = MoEMetrics(), 0
        for name, tracker in trackers.items():
            E = tracker.config.num_experts
            counts_E, losses = packed[start : start + E], packed[start + E : start + E + 4]
            start += E + len(LOSS_NAMES)
            metrics.tokens_per_expert[name] = counts_E.long()
            shares = max(tracker.num_micro_batches, 1) * self.groups.data_ranks
            metrics.aux_losses[name] = (losses / shares).float()
            if not skipped:
                self._move_bias(self.layers[name], counts_E)
        seen = {n: t.num_micro_batches for n, t in trackers.items() if t.config.balance.needs_loss}
        for tracker in trackers.values():
            tracker.reset()
        for name, count in seen.items():
            if count not in (0, self.num_micro_batches):
                raise ValueError(
                    f"num_micro_batches ({self.num_micro_batches}) must equal the backwards of a "
                    f"step, but {name} saw {count}: call moe_state(model).set_num_micro_batches"
                    f"({count}), and finish_step() after every step"
                )
        return metrics

    def _packed(self, layer: Any) -> Tensor:
        """The layer's counts and losses of this step in one fp64 tensor; zeros without any."""
        tracker = layer.tracker
        if tracker.counts_E is None:
            size = tracker.config.num_experts + len(LOSS_NAMES)
            return torch.zeros(size, dtype=torch.float64, device=layer.part("router").weight.device)
        return torch.cat([tracker.counts_E, tracker.losses]).double()

    def _move_bias(self, layer: Any, counts_E: Tensor) -> None:
        """Raise the bias of underloaded experts by the rate, lower that of overloaded ones."""
        rate = layer.config.balance.bias_update_rate
        if rate:
            bias_E = layer.part("router").selection_bias
            bias_E += rate * torch.sign(counts_E.mean() - counts_E).to(bias_E.dtype)
