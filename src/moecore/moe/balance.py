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
from torch import Tensor

from moecore._compat import disable_dynamo
from moecore.config import MoEConfig
from moecore.kernels.balance import BalanceLossOptions, balance_loss, balance_statistics
from moecore.kernels.counts import add_expert_counts, count_experts, count_experts_and_tokens
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

    `counts_E` (int64) and `losses` (fp32, order of `LOSS_NAMES`) are allocated by the first
    backward, None before it, and changed in place from then on. So a CUDA graph that captured a
    forward and backward counts at every replay. What a replay can not do lives in Python:

    - Run one forward and backward before capture, and `reset()` to forget the warm-up.
    - `num_micro_batches` stays 0 when a step is all replays: nothing checks their number then.
    - `set_num_micro_batches` must come before capture, which keeps its factor on the gradient.

    Args:
        config: the layer.
    """

    def __init__(self, config: MoEConfig) -> None:
        self.config = config
        self.groups = BalanceGroups()
        self.gradient_scale = 1.0  # factor on the auxiliary losses' gradient
        self.counts_E: Tensor | None = None
        self.losses: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the counts of this step."""
        self.num_micro_batches = 0
        self.num_in_flight = 0  # forwards that wait for their backward
        if self.counts_E is not None and self.losses is not None:
            self.counts_E.zero_()
            self.losses.zero_()

    def attach(self, y: Tensor, routing: Routing, num_sequences: int) -> Tensor:
        """Return y with the auxiliary losses and the counts riding on it.

        Without gradients it is y itself, and nothing is counted. Without auxiliary losses nothing
        is launched here, and one kernel in backward. No host sync.

        Raises:
            NotImplementedError: for a recomputed forward that could differ from its first run.
            ValueError: when a CUDA graph captures it before any backward.
        """
        if torch.is_grad_enabled() and y.requires_grad:
            return self._attach(y, routing, num_sequences)
        return y

    # Dynamo would guard on the Python state, which changes with every micro-batch, and recompile.
    @disable_dynamo
    def _attach(self, y: Tensor, routing: Routing, num_sequences: int) -> Tensor:
        self._follow(y.device)
        if self.counts_E is None and _is_capturing(y):
            raise ValueError(
                "LoadTracker.counts_E (None) must exist before a CUDA graph captures the layer: "
                "run one forward and backward first, then tracker.reset()"
            )
        self._check_recompute()
        losses = None
        if self.config.balance.needs_loss:
            losses = balance_losses(
                routing, num_sequences, self.config, self.groups, prior_counts_E=self.counts_E
            )
        return _Attach.apply(y, losses, routing.expert_ids_TK, self)

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

    def _follow(self, device: torch.device) -> None:
        """Take the counts along when the layer has moved."""
        if self.counts_E is not None and self.losses is not None and self.counts_E.device != device:
            self.counts_E, self.losses = self.counts_E.to(device), self.losses.to(device)

    def commit(self, ids_TK: Tensor, losses: Tensor | None) -> None:
        """Add one micro-batch; called by backward. One kernel, and one more for losses.

        Args:
            ids_TK: int32, the experts of this rank's tokens; -1 = dropped.
            losses: fp32, in the order of `LOSS_NAMES`; None = no auxiliary loss is on.
        """
        self.num_in_flight = max(0, self.num_in_flight - 1)
        if not _is_capturing(ids_TK):  # what is captured has not run
            self.num_micro_batches += 1
        if self.counts_E is None or self.losses is None:
            device = ids_TK.device
            self.counts_E = torch.zeros(self.config.num_experts, dtype=torch.int64, device=device)
            self.losses = torch.zeros(len(LOSS_NAMES), device=device)
        add_expert_counts(self.counts_E[None], ids_TK)
        if losses is not None:
            self.losses += losses


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class _Attach(torch.autograd.Function):
    """Identity on y; backward gives the losses their gradient and commits the counts once.

    It saves the ids, not their counts: backward counts straight into the tracker, in one launch.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, losses: Tensor | None, ids_TK: Tensor, tracker: LoadTracker
    ) -> Tensor:
        ctx.tracker = tracker
        ctx.save_for_backward(losses, ids_TK)
        # Not a view: FSDP2 hooks its units' outputs, and an in-place add to a view drops the hook.
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        losses, ids_TK = ctx.saved_tensors
        with torch.no_grad():
            ctx.tracker.commit(ids_TK, losses)
        dlosses = None
        if ctx.needs_input_grad[1]:
            dlosses = torch.full_like(losses, ctx.tracker.gradient_scale)
        return grads[0], dlosses, None, None


def balance_losses(
    routing: Routing,
    num_sequences: int,
    config: MoEConfig,
    groups: BalanceGroups,
    *,
    prior_counts_E: Tensor | None = None,
) -> Tensor:
    """Return this rank's parts of the auxiliary losses, fp32, in the order of `LOSS_NAMES`.

    Ranks of `groups.micro_batch` each return the part of their own tokens; the parts add up to the
    loss. Coefficients are applied. One small all-reduce per scope that needs one; no host sync.

    Args:
        routing: of this rank's tokens.
        num_sequences: the tokens are this many sequences of equal length, one after the other.
        config: the layer.
        groups: who counts together.
        prior_counts_E: this rank's counts of earlier micro-batches of the step.
    """
    balance, ids_TK = config.balance, routing.expert_ids_TK
    # Only "sequence" tells sequences apart; to the other scopes the tokens are one.
    B = num_sequences if balance.sequence_coef else 1
    counts_BX = count_experts_and_tokens(ids_TK, B, config.num_experts)
    if groups.micro_batch is not None:
        dist.all_reduce(counts_BX, group=groups.micro_batch)
    global_counts_E = None
    if balance.global_batch_coef:
        global_counts_E = _global_counts(ids_TK, config, prior_counts_E, groups.global_batch)
    score_sums_BE, z_sum = balance_statistics(routing.logits_TE, B, config.score_function)
    options = BalanceLossOptions(
        top_k=config.top_k,
        micro_batch_coef=balance.micro_batch_coef,
        sequence_coef=balance.sequence_coef,
        global_batch_coef=balance.global_batch_coef,
        z_loss_coef=balance.z_loss_coef,
    )
    return balance_loss(score_sums_BE, z_sum, counts_BX, options, global_counts_E=global_counts_E)


def _global_counts(
    ids_TK: Tensor, config: MoEConfig, prior_E: Tensor | None, group: dist.ProcessGroup | None
) -> Tensor:
    """This micro-batch's counts on top of the prior ones, over all ranks of the group."""
    if prior_E is None:
        counts_E = count_experts(ids_TK, 1, config.num_experts)[0]
    else:
        counts_E = prior_E.clone()
        add_expert_counts(counts_E[None], ids_TK)
    if group is not None:
        dist.all_reduce(counts_E, group=group)
    return counts_E


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
            # As told, not as seen: replays of a CUDA graph are not seen, and the rest is checked.
            shares = self.num_micro_batches * self.groups.data_ranks
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
        # Each to fp64 first: cat would round the counts to the fp32 of the losses.
        return torch.cat([tracker.counts_E.double(), tracker.losses.double()])

    def _move_bias(self, layer: Any, counts_E: Tensor) -> None:
        """Raise the bias of underloaded experts by the rate, lower that of overloaded ones."""
        rate = layer.config.balance.bias_update_rate
        if rate:
            bias_E = layer.part("router").selection_bias
            bias_E += rate * torch.sign(counts_E.mean() - counts_E).to(bias_E.dtype)
