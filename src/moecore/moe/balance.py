"""Auxiliary losses and load counts of one layer.

Legend: T local tokens, B sequences, E experts, K experts per token, X columns.

Each layer's `LoadTracker` computes its auxiliary losses from the routing and attaches them to the
layer's output. Backward adds their gradient and commits the counts, so that a recomputed forward,
eval mode and no_grad count nothing. Once per optimizer step `MoEState.finish_step`
(`moe/state.py`) reduces the counts of all layers, updates the biases and returns the metrics.

Counts contain the choices before capacity dropped any, without padding. The router's entropy over
the experts is also summed. If an expert bias or groups change the choice, the losses count each
token's K best scores, because their gradient must balance the scores (DeepSeek-V3,
arXiv:2412.19437, equations 17 to 20).

An auxiliary loss is a mean over pairs of a micro-batch and a data rank that have tokens. It
therefore does not depend on the parallel layout. Ranks that share a micro-batch (cp, tp) count its
tokens together. If each forward has its own cp, several data ranks share a micro-batch, which then
counts once for each of these ranks.

The number of pairs must be known before the first backward. `MoEState.announce_micro_batches`
sums it once per step. Without this call a loss is the mean over ranks with tokens, and the step
takes the mean over all micro-batches.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.options.layer import MoEConfig
from moecore.base.torch_private import is_inside_backward
from moecore.kernels.routing.balance import balance_statistics
from moecore.kernels.routing.balance_loss import balance_loss
from moecore.kernels.routing.counts import add_expert_counts, count_experts_and_tokens
from moecore.kernels.routing.entropy import add_entropy_
from moecore.kernels.routing.margins import NUM_BINS, add_margins_
from moecore.moe.aux_loss import LossFactors
from moecore.moe.micro_batch import MicroBatch
from moecore.moe.records import Routing
from moecore.moe.router import choose_best_ids

LOSS_NAMES = ("micro_batch", "sequence", "global_batch", "z")


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceGroups:
    """Process groups over which the auxiliary losses count tokens; None = only this rank."""

    micro_batch: dist.ProcessGroup | None = None  # has parts of one data rank's micro-batch
    global_batch: dist.ProcessGroup | None = None  # all ranks of the pipeline stage
    data_ranks: int = 1  # in `global_batch`
    cp: int = 1  # context parallel ranks in `micro_batch`, which is cp-major
    # `micro_batch` of forwards that `cp` data ranks share, for each other cp.
    by_cp: Mapping[int, dist.ProcessGroup] = field(default_factory=dict)
    weight: int = 1  # data ranks for which the auxiliary losses of a micro-batch count

    def select_cp_groups(self, cp: int | None) -> Self:
        """Return the groups of a forward over `cp` ranks; None = the cp degree of the meshes."""
        if cp in (None, self.cp):
            return self
        if cp not in self.by_cp:
            raise ValueError(
                f"cp ({cp}) must be one of {[self.cp, *self.by_cp]}, which have groups of ranks"
            )
        return replace(self, micro_batch=self.by_cp[cp], cp=cp, weight=cp)


@dataclass(slots=True)
class LoadCounts:
    """Counts of a layer's tokens per expert, losses and entropy since the last optimizer step."""

    choices_E: Tensor  # choices of each expert
    capacity_choices_E: Tensor | None  # choices within capacity; None where nothing can be dropped
    # How often each expert was among a token's best scores; None where the global-batch loss does
    # not count that.
    best_E: Tensor | None
    losses: Tensor  # fp32, in the order of `LOSS_NAMES`
    entropy_2: Tensor  # of the router over all tokens in units of `entropy.UNIT`, and the tokens
    margins_EX: Tensor | None  # histograms of quantile balancing; None without it

    @classmethod
    def make_zeros(cls, config: MoEConfig, device: torch.device) -> Self:
        """Return zero counts, with None for the optional tensors that `config` does not need."""
        E = config.num_candidates
        drops = config.capacity is not None and config.assignment != "expert_choice"
        best = config.counts_best_scores and config.balance.global_batch_coef > 0
        quantile = config.balance.bias_update == "quantile"
        zeros = partial(torch.zeros, dtype=torch.int64, device=device)
        return cls(
            choices_E=zeros(E),
            capacity_choices_E=zeros(E) if drops else None,
            best_E=zeros(E) if best else None,
            losses=torch.zeros(len(LOSS_NAMES), device=device, dtype=torch.float32),
            entropy_2=zeros(2),
            margins_EX=zeros(E, NUM_BINS) if quantile else None,
        )

    def list_tensors(self) -> list[Tensor]:
        """Return the tensors that are not None."""
        return [t for f in fields(self) if (t := getattr(self, f.name)) is not None]


class LoadTracker(LossFactors):
    """One layer's auxiliary losses and counts of tokens per expert since the last optimizer step.

    The first backward allocates `counts`. Later backwards, and replays of a CUDA graph, change its
    tensors in place. A replay runs no Python, so `graphs.GraphedForwardBackward` adds
    `num_captured` to `num_micro_batches` at every replay.

    If a layer runs several times (`runs`) in each forward, its losses and counts are summed.
    """

    def __init__(self, config: MoEConfig, *, runs: int = 1) -> None:
        super().__init__()
        self.runs = runs
        self._check_config(config)
        self.config = config
        self.groups = BalanceGroups()
        self.counts: LoadCounts | None = None
        self.num_captured = 0  # backwards in captures
        # True after `MoEState.set_num_micro_batches`; each step then has an end.
        self.has_steps = False
        self.reset()

    def reset(self) -> None:
        """Set the counts of this step to 0."""
        self.num_micro_batches = 0
        self.num_in_flight = 0  # forwards that wait for their backward
        self._forward_counts_E: Tensor | None = None  # counts of forwards, if several are in flight
        self._priors_E: list[Tensor] = []  # counts that each forward in flight has read
        self._reused_E: Tensor | None = None  # counts that the last recomputed forward has read
        self.token_weight = None
        # Ranks with tokens in each forward of a step without `announce`, only on CPUs, because the
        # host reads the numbers.
        self.ranks_with_tokens: list[Tensor] = []
        for tensor in self.counts.list_tensors() if self.counts else ():
            tensor.zero_()

    def set_config(self, config: MoEConfig) -> None:
        """Replace the config. Counts become None, and the next backward allocates new counts."""
        self._check_config(config)
        self.config = config
        self.counts = None
        self.reset()

    def _check_config(self, config: MoEConfig) -> None:
        # The order of its runs depends on the order of backwards.
        if self.runs > 1 and (coef := config.balance.global_batch_coef):
            raise ValueError(
                f"BalanceConfig.global_batch_coef ({coef}) must be 0 for a layer that runs "
                f"{self.runs} times in a forward: use micro_batch_coef"
            )

    def allow_forwards_in_flight(self) -> None:
        """Allow several forwards to run before the first backward, until `reset` is called."""
        # A global-batch loss then counts the forwards that began before, whether their backward has
        # run or not, as of micro-batches that run one after the other.
        if self.config.balance.global_batch_coef:
            self._forward_counts_E = torch.zeros(
                self.config.num_candidates, dtype=torch.int64, device="cpu"
            )

    def attach_losses(
        self,
        y: Tensor,
        routing: Routing,
        micro_batch: MicroBatch,
        bias_E: Tensor | None,
        depth: int = 0,
    ) -> Tensor:
        """Return y; its backward adds the auxiliary losses' gradient and counts experts' tokens."""
        if not (torch.is_grad_enabled() and y.requires_grad):
            return y
        attach: Any = self._attach_losses
        if torch.compiler.is_compiling():
            attach = self._attach_losses_uncompiled
        return attach(y, routing, micro_batch, bias_E, depth)  # type: ignore[no-any-return]

    # Dynamo would guard on the Python state, which changes with every micro-batch, and recompile.
    @torch.compiler.disable
    def _attach_losses_uncompiled(self, *args: Any) -> Tensor:
        return self._attach_losses(*args)

    def _attach_losses(
        self,
        y: Tensor,
        routing: Routing,
        micro_batch: MicroBatch,
        bias_E: Tensor | None,
        depth: int,
    ) -> Tensor:
        """Compute the losses, and return y, whose backward calls `commit_counts`."""
        self._move_counts_to_device(y.device)
        if self.counts is None and _is_capturing(y):
            raise ValueError(
                "LoadTracker.counts (None) must exist before a CUDA graph captures the layer: "
                "run one forward and backward first, then tracker.reset()"
            )
        self._start_forward_in_flight()
        config, counts, losses, best_TK = self.config, self.counts, None, None
        prior_counts_E: Tensor | None = None
        logits_TE = routing.logits_TE
        if config.balance.needs_loss:
            self.check_loss_scale(y)
            prior_E = None if counts is None else counts.choices_E
            if config.counts_best_scores:
                assert logits_TE is not None
                best_TK = choose_best_ids(logits_TE, config, routing.padding_mask_T)
                prior_E = None if counts is None else counts.best_E
            ids_TK = routing.chosen_ids_TK if best_TK is None else best_TK
            if self._forward_counts_E is not None:
                prior_E = prior_counts_E = self._add_forward_counts(ids_TK)
            num_sequences, sequences_T = micro_batch.find_sequence_ids(ids_TK.shape[0])
            observes = self.has_steps and y.device.type == "cpu" and not is_inside_backward()
            losses = compute_balance_losses(
                routing,
                ids_TK,
                num_sequences,
                config,
                self.groups.select_cp_groups(micro_batch.cp),
                prior_counts_E=prior_E,
                sequence_ids_T=sequences_T,
                token_weight=None if self.token_weight is None else self.token_weight[depth],
                ranks_with_tokens=self.ranks_with_tokens if observes else None,
            )
        quantile = config.balance.bias_update == "quantile"
        # None = not needed. Only a global-batch loss counts ids of the best scores.
        observed = (
            routing.chosen_ids_TK,
            routing.expert_ids_TK,
            best_TK if config.balance.global_batch_coef else None,
            None if logits_TE is None else logits_TE.detach(),  # the router saves it too
            bias_E if quantile else None,
            routing.padding_mask_T,
        )
        result: Tensor = _AttachLosses.apply(y, losses, self, prior_counts_E, *observed)
        return result

    def _add_forward_counts(self, ids_TK: Tensor) -> Tensor:
        """Add this forward's choices to the step's counts; return the counts before the addition.

        A recomputed forward adds nothing, and returns the counts that the oldest forward in flight
        read.
        """
        if is_inside_backward():
            self._reused_E = self._priors_E[0]
            return self._reused_E
        assert self._forward_counts_E is not None
        prior_E = self._forward_counts_E.to(ids_TK.device)
        self._forward_counts_E = prior_E.clone()
        add_expert_counts(self._forward_counts_E[None], ids_TK)
        self._priors_E.append(prior_E)
        return prior_E

    def _start_forward_in_flight(self) -> None:
        """Count this forward in `num_in_flight` until its backward; a recompute is not counted."""
        # Activation checkpointing recomputes a forward inside backward. "global_batch" reads the
        # counts so far, which differ from the first run's if other forwards are in flight.
        coef = self.config.balance.global_batch_coef
        if not is_inside_backward():
            self.num_in_flight += 1
        elif self.num_in_flight > 1 and coef and self._forward_counts_E is None:
            raise NotImplementedError(
                f"BalanceConfig.global_batch_coef ({coef}) must be 0 with activation checkpointing "
                "and several forwards before a backward: use TrainStep.micro_batches(), or one "
                "backward per forward"
            )

    def _move_counts_to_device(self, device: torch.device) -> None:
        counts = self.counts
        if counts is not None and counts.choices_E.device != device:
            self.counts = LoadCounts.make_zeros(self.config, device)
            for new, old in zip(self.counts.list_tensors(), counts.list_tensors(), strict=True):
                new.copy_(old)

    def _end_forward_in_flight(self, prior_counts_E: Tensor | None) -> None:
        """Drop the counts that a forward read (None = no counts), because its backward runs now."""
        if prior_counts_E is None:
            return
        reused_E, self._reused_E = self._reused_E, None
        self._priors_E = [prior_E for prior_E in self._priors_E if prior_E is not prior_counts_E]
        if reused_E is not None and reused_E is not prior_counts_E:
            raise NotImplementedError(
                f"BalanceConfig.global_batch_coef ({self.config.balance.global_batch_coef}) must "
                "be 0 with activation checkpointing where backwards run in another order than "
                "forwards: use micro_batch_coef"
            )

    def commit_counts(
        self, losses: Tensor | None, prior_counts_E: Tensor | None, choice_tensors: tuple[Any, ...]
    ) -> None:
        """Add a micro-batch's auxiliary losses and tokens per expert to the totals of the step.

        The first backward of each forward calls it. `losses` is fp32 [4]; None = no losses.
        `prior_counts_E` are the counts that the forward read, after `allow_forwards_in_flight`,
        otherwise None. `choice_tensors` are the argument `observed` of `_attach_losses`.
        """
        ids_TK, capacity_ids_TK, best_TK, logits_TE, bias_E, padding_mask_T = choice_tensors
        self.num_in_flight = max(0, self.num_in_flight - 1)
        self._end_forward_in_flight(prior_counts_E)
        if _is_capturing(ids_TK):  # what is captured has not run
            self.num_captured += 1
        else:
            self.num_micro_batches += 1
            if self.num_micro_batches == self.runs + 1 and not self.has_steps:
                # Biases would never move, and counts would grow over all steps.
                for name in ("bias_update_rate", "global_batch_coef"):
                    if value := getattr(self.config.balance, name):
                        warnings.warn(
                            f"BalanceConfig.{name} ({value}) needs the end of each step, which "
                            "this loop does not have: run it in TrainStep(model).micro_batch(), "
                            "and call finish() after the optimizer",
                            stacklevel=2,
                        )
        counts = self.counts = self.counts or LoadCounts.make_zeros(self.config, ids_TK.device)
        add_expert_counts(counts.choices_E[None], ids_TK)
        if counts.capacity_choices_E is not None:
            add_expert_counts(counts.capacity_choices_E[None], capacity_ids_TK)
        if counts.best_E is not None:
            add_expert_counts(counts.best_E[None], best_TK)
        if logits_TE is not None:
            add_entropy_(counts.entropy_2, logits_TE, self.config.score_function, padding_mask_T)
        if losses is not None:
            counts.losses += losses
        if counts.margins_EX is not None:
            score_options = (self.config.top_k, self.config.score_function)
            add_margins_(counts.margins_EX, logits_TE, bias_E, *score_options, padding_mask_T)


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class _AttachLosses(torch.autograd.Function):
    """Identity on y. Backward returns the gradient of the losses, and counts the saved ids once."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        losses: Tensor | None,
        tracker: LoadTracker,
        prior_counts_E: Tensor | None,
        *choice_tensors: Any,
    ) -> Tensor:
        ctx.tracker, ctx.prior_counts_E, ctx.is_committed = tracker, prior_counts_E, False
        ctx.save_for_backward(losses, *choice_tensors)
        # Not a view: units hook their outputs, and an in-place add to a view drops the hook.
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        losses, *observed = ctx.saved_tensors
        if torch.is_grad_enabled() and ctx.needs_input_grad[1]:
            raise NotImplementedError(
                "auxiliary losses have no second derivative: set their coefficients to 0 for a "
                "backward with create_graph=True"
            )
        if ctx.is_committed and ctx.needs_input_grad[1]:
            raise NotImplementedError(
                "auxiliary losses must get their gradient once, but backward ran through one "
                "forward again (retain_graph=True): add the losses up and run backward once"
            )
        if not ctx.is_committed:
            with torch.no_grad():
                ctx.tracker.commit_counts(losses, ctx.prior_counts_E, tuple(observed))
        ctx.is_committed = True
        needs_grad = ctx.needs_input_grad[1]
        dlosses = ctx.tracker.compute_losses_grad(losses) if needs_grad else None
        return grads[0], dlosses, None, None, *[None] * len(observed)


def compute_balance_losses(
    routing: Routing,
    ids_TK: Tensor,
    num_sequences: int,
    config: MoEConfig,
    groups: BalanceGroups,
    *,
    prior_counts_E: Tensor | None = None,
    sequence_ids_T: Tensor | None = None,
    token_weight: Tensor | None = None,
    ranks_with_tokens: list[Tensor] | None = None,
) -> Tensor:
    """Return this rank's part of the auxiliary losses, fp32 [4] in order of `LOSS_NAMES`.

    The sum of the parts over `groups.micro_batch` is the losses, coefficients applied. Collective.
    `ids_TK` are the expert ids to count. The global-batch loss adds `prior_counts_E`, this rank's
    counts of earlier micro-batches. `sequence_ids_T` None = sequences of equal length.
    `token_weight` multiplies the losses. None = number of ranks / number of ranks with tokens, and
    the latter number is appended to `ranks_with_tokens`.
    """
    assert routing.logits_TE is not None, "only moecore's routers have balance losses"
    balance, E, K = config.balance, config.num_candidates, config.top_k
    # Only "sequence" separates sequences; to the other losses all tokens are one sequence.
    B, sequence_ids_T = (num_sequences, sequence_ids_T) if balance.sequence_coef else (1, None)
    padding_mask_T = routing.padding_mask_T
    counts_BX = count_experts_and_tokens(ids_TK, B, E, padding_mask_T, sequence_ids_T)
    global_counts_E = None
    if balance.global_batch_coef:
        global_counts_E = counts_BX[:, :E].sum(0)
        if prior_counts_E is not None:
            global_counts_E += prior_counts_E
        if groups.global_batch is not None:
            dist.all_reduce(global_counts_E, group=groups.global_batch)
    if groups.micro_batch is not None:
        dist.all_reduce(counts_BX, group=groups.micro_batch)
    score_sums_BE, z_sum = balance_statistics(
        routing.logits_TE, B, config.score_function, padding_mask_T, sequence_ids_T
    )
    factors = [
        balance.micro_batch_coef * E / K,
        balance.sequence_coef * E / K,
        balance.global_batch_coef * E,
        balance.z_loss_coef,
    ]
    factors = [groups.weight * factor for factor in factors]
    losses = balance_loss(score_sums_BE, z_sum, counts_BX, factors, global_counts_E=global_counts_E)
    if token_weight is not None:
        return losses * token_weight
    is_local = groups.global_batch is None or groups.data_ranks == 1
    if is_local and ranks_with_tokens is None:
        return losses
    ranks = counts_BX[:, E].sum().clamp(max=1)  # with tokens: this one and those that share them
    if not is_local:
        dist.all_reduce(ranks, group=groups.global_batch)
        losses = losses * (groups.global_batch.size() / ranks.clamp(min=1).float())  # type: ignore[union-attr]
    if ranks_with_tokens is not None:
        ranks_with_tokens.append(ranks)
    return losses
