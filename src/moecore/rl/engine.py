"""Engine: log-probabilities of sampled tokens, and forward and backward of an objective.

    rollouts of a data-parallel rank
        -> all ranks agree on totals and errors, in one collective
        -> micro-batches of packed rows, as many on every rank
        -> forward of the model: log-probabilities of responses, without logits in memory
        -> the objective: a loss per token, times the token's share of the global mean
        -> `TrainStep`: backward; `TrainStep.finish` runs the optimizers

Legend: N tokens of a data-parallel rank's rollouts, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor, nn

from moecore.base.failures import publish_errors, share_call_errors, share_errors
from moecore.base.fields import Count, check_arguments
from moecore.base.rank_checks import check_equal
from moecore.base.streams import copy_to_device
from moecore.models.log_probs import LogProbLoss
from moecore.parallel.fsdp.progress import check_grad_enabled
from moecore.parallel.model.parallel_state import get_parallel_state
from moecore.rl.batches import RolloutBatch, TokenScores, schedule_batch
from moecore.rl.invariance import check_batch_invariance, use_batch_invariance
from moecore.rl.micro_batches import (
    RolloutRow,
    RowLimits,
    assign_sequences,
    build_row,
    group_sequences,
)
from moecore.rl.objectives import Objective, check_losses
from moecore.rl.rollouts import PER_TOKEN, Rollouts
from moecore.rl.routes import RoutedLayers
from moecore.rl.totals import (
    check_token_ids,
    compute_shares,
    compute_totals,
    gather_totals,
    sum_over_data_ranks,
)
from moecore.train.loss_scale import make_loss_scale
from moecore.train.memory.training_offload import PartOrAll, TrainingOffload
from moecore.train.step import TrainStep

if TYPE_CHECKING:
    from moecore.io.hf.stream import WeightStream


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveResult:
    """The loss and the log-probabilities that `Engine.forward_backward` returns."""

    loss: Tensor  # fp32 scalar, the mean over the global batch, equal on every rank
    scores: TokenScores  # of this data-parallel rank's tokens, by the policy of this forward
    num_micro_batches: int  # of each rank


class Engine:
    """Trains a parallelized model on rollouts, without generation. The constructor is collective.

    Args:
        model: from `parallelize_moe`: a `Decoder`, or a causal language model of transformers after
            `use_causal_attention`, also with adapters of peft.
        step: the model's `TrainStep`. `forward_backward` sets `step.num_micro_batches`, and the
            caller ends each step with `step.finish()`.
        max_tokens: maximum tokens, including padding, of a micro-batch's packed row before cp and
            tp split the row; with `ContextOptions.dynamic`, of a data rank before tp splits them.
        reference: the reference model, on the same meshes, with the same `ContextOptions.dynamic`;
            None = `model` without peft adapters.
        batch_invariant: whether a token's log-probability is bitwise independent of other tokens in
            the micro-batch and of dp, ep and pp. The kernels are slower, and other threads of the
            process also use them while the engine runs.

    Raises:
        ValueError: for a model that is not parallelized, a `max_tokens` that is not divisible by cp
            and tp, a reference with other `ContextOptions.dynamic`, or `batch_invariant` with an
            unsupported model.

    Example:
        engine = Engine(model, step, max_tokens=8192)
        old = engine.log_probs(rollouts)
        rollouts = rollouts.replace(
            old_log_probs_N=old.log_probs_N,
            ref_log_probs_N=engine.reference_log_probs(rollouts).log_probs_N,
            advantages_N=rollouts.expand_to_tokens(group_advantages(rewards_n, groups_n)),
        )
        for mini_batch in (range(0, 32), range(32, 64)):
            engine.forward_backward(rollouts.take(mini_batch), GRPO())
            step.finish()
    """

    @share_call_errors
    def __init__(
        self,
        model: nn.Module,
        step: Annotated[TrainStep, "pass TrainStep(model, optimizer)"],
        *,
        max_tokens: Count,
        reference: nn.Module | None = None,
        batch_invariant: bool = False,
    ) -> None:
        arguments = locals()
        with share_errors():
            check_arguments(Engine.__init__, arguments)
            state = get_parallel_state(model)
            if state is None:
                raise ValueError(
                    f"model ({type(model).__name__}) must be parallelized: call parallelize_moe "
                    "first"
                )
            if step.model is not model:
                raise ValueError(
                    f"step (of a {type(step.model).__name__}) must be of the model: pass "
                    "TrainStep(model, optimizer)"
                )
            self._is_invariant = batch_invariant
            for part in (model, reference):
                of = None if part is None else get_parallel_state(part)
                if of is not None and of.request.is_dynamic != state.request.is_dynamic:
                    raise ValueError(
                        f"ContextOptions.dynamic ({of.request.is_dynamic}) of the reference must "
                        "be that of the model: parallelize both with the same context"
                    )
                if part is not None and of is not None and batch_invariant:
                    check_batch_invariance(part, of)
            self.model, self.step = model, step
            self._request = state.request
            self._meshes = state.request.meshes
            self._layers = RoutedLayers.from_model(model, self._meshes)
            p = self._meshes.parallel
            self._limits = RowLimits(max_tokens=max_tokens, cp=p.cp, tp=p.tp)
            if max_tokens % (unit := self._limits.row_unit):
                raise ValueError(
                    f"max_tokens ({max_tokens}) must be a multiple of {unit}, into which cp "
                    f"({p.cp}) and tp ({p.tp}) cut a row: round it up"
                )
        check_equal({"reference is None": reference is None}, self._meshes.device_type)
        self._reference = None
        if reference is not None:
            self._reference = TrainStep(reference, loss_scale=make_loss_scale(reference))
        steps = [step, *filter(None, [self._reference])]
        states = [(part.model, get_parallel_state(part.model)) for part in steps]
        sizes = [of.request.family.get_vocab_size(part) for part, of in states if of is not None]
        self._vocab_size = min(filter(None, sizes), default=None)
        self._offloads = [TrainingOffload(part.model, part.optimizers) for part in steps]

    def log_probs(
        self,
        rollouts: Rollouts,
        *,
        entropy: bool = False,
        routes: bool = False,
        group_size: Count = 1,
    ) -> TokenScores:
        """Return the model's log-probabilities of response tokens, without gradients.

        Train or eval mode is not changed. Collective over the world; host syncs before forwards.

        Args:
            rollouts: sequences of this data-parallel rank.
            entropy: whether entropies are computed.
            routes: whether the expert ids of each token are recorded, for `Rollouts.routes_NLK`.
            group_size: the objective's, for the micro-batches and rounding of `forward_backward`.

        Raises:
            ValueError: on every rank, if a rank's rollouts are invalid, or if the tp, cp and pp
                ranks of one data-parallel rank have different rollouts.
        """
        arguments = locals()
        with self._raise_on_all_ranks("log_probs() of rollouts"):
            check_arguments(Engine.log_probs, arguments)
            if routes and rollouts.routes_NLK is not None:
                raise ValueError(
                    "routes (True) must be False for rollouts with routes_NLK: drop one"
                )
        return self._compute_scores(
            self.step, rollouts, entropy=entropy, routes=routes, group_size=group_size
        )

    def reference_log_probs(self, rollouts: Rollouts, *, group_size: Count = 1) -> TokenScores:
        """Return the reference model's log-probabilities of response tokens, without gradients.

        The routers of the reference model choose experts; routes in `rollouts` are not replayed.
        `group_size` and ValueErrors as in `log_probs`, or without both a reference and adapters.
        """
        arguments = locals()
        with self._raise_on_all_ranks("reference_log_probs() of rollouts"):
            check_arguments(Engine.reference_log_probs, arguments)
        rollouts = rollouts.replace(routes_NLK=None, route_weights_NLK=None)
        if self._reference is not None:
            return self._compute_scores(self._reference, rollouts, group_size=group_size)
        with self._request.family.disable_adapters(self.model):
            return self._compute_scores(self.step, rollouts, group_size=group_size)

    def forward_backward(
        self,
        rollouts: Rollouts,
        objective: Annotated[Objective, "pass PPO(), GRPO() or OwnObjective(function)"],
    ) -> ObjectiveResult:
        """Run forward and backward of an objective on a batch; `step.finish()` must follow.

        The gradient is that of the mean loss over the rollouts of all data-parallel ranks, for any
        split into micro-batches. Collective over the world, with host syncs before the forwards.

        Args:
            rollouts: sequences of this data-parallel rank, with the fields that the objective
                needs. The number of sequences may differ between ranks.
            objective: `PPO`, `GRPO`, `GSPO`, `DPO`, `KTO`, or an `OwnObjective`.

        Raises:
            ValueError: as in `log_probs`, for a missing field, if all token weights are 0, or under
                torch.no_grad().
        """
        arguments = locals()
        with self._raise_on_all_ranks("forward_backward() of rollouts"):
            check_arguments(Engine.forward_backward, arguments)
            check_grad_enabled("forward_backward()")
        errors = publish_errors("forward_backward() of rollouts")
        with errors, self._use_batch_invariance(self.model):
            batch = self._build_batch(
                rollouts, objective, entropy=objective.entropy, group_size=objective.group_size
            )
            rows, number = batch.rows, len(batch.rows)
            self.step.num_micro_batches = number
            is_mean = self._request.loss == "mean"
            factor = number * self._meshes.data_ranks if is_mean else 1
            shares_N = compute_shares(batch.rollouts, objective.mean, batch.totals, factor)
            shares_N = shares_N.to(self._meshes.device)
            scores = batch.make_empty_scores(entropy=objective.entropy)
            micro_batches = [
                self._make_inputs(row, scores, objective, shares_N[row.token_idx_N]) for row in rows
            ]
            with self._layers.replay_rows(rows):
                losses = self.step.forward_backward(micro_batches)
            is_first = torch.tensor([row.is_first for row in rows], dtype=torch.bool, device="cpu")
            losses = losses.where(copy_to_device(is_first, losses.device), 0)
            loss = sum_over_data_ranks(losses.sum() / factor, self._meshes)
            scores = batch.reduce_scores(scores)
            return ObjectiveResult(loss=loss, scores=scores, num_micro_batches=number)

    def weights(self, **options: Any) -> WeightStream:
        """Return a `WeightStream`, which yields the model's current weights. Collective.

        `options` are keyword arguments of `moecore.io.stream_weights`.
        """
        from moecore.io import stream_weights  # needs safetensors

        return stream_weights(self.model, **options)

    def offload(self, selection: PartOrAll = "all") -> None:
        """Free the device memory of "weights", "grads", "optimizer", "buffers" or "all" state."""
        for offload in self._offloads:
            offload.offload(selection)

    def onload(self, selection: PartOrAll = "all") -> None:
        """Move offloaded "weights", "grads", "optimizer", "buffers" or "all" back to the device."""
        for offload in self._offloads:
            offload.onload(selection)

    def _compute_scores(
        self,
        step: TrainStep,
        rollouts: Rollouts,
        *,
        entropy: bool = False,
        routes: bool = False,
        group_size: int,
    ) -> TokenScores:
        """Return scores without gradients, with `entropy` and `routes` if requested. Collective."""
        with publish_errors("log_probs() of rollouts"), self._use_batch_invariance(step.model):
            batch = self._build_batch(
                rollouts, None, entropy=entropy, routes=routes, group_size=group_size
            )
            rows, scores = batch.rows, batch.make_empty_scores(entropy=entropy)
            micro_batches = [self._make_inputs(row, scores, None, None) for row in rows]
            tapes = self._layers.record_routes() if routes else self._layers.replay_rows(rows)
            with tapes:
                step.compute_losses(micro_batches)
            if routes:
                num_tokens = len(batch.rollouts.tokens_N)
                routes_NLK = self._layers.gather_routes(rows, num_tokens, batch.groups)
                scores = replace(scores, routes_NLK=routes_NLK)
            return batch.reduce_scores(scores)

    @contextmanager
    def _raise_on_all_ranks(self, caller: str) -> Iterator[None]:
        """Return a context whose ValueError is raised on all ranks, with the name `caller`."""
        problem = None
        try:
            yield
        except ValueError as error:
            problem = str(error)
        if problem is not None:
            with publish_errors(caller):
                gather_totals(self._meshes, None, problem, global_entries={}, shared_entries={})

    def _use_batch_invariance(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which `model` is batch invariant, if the engine has this option."""
        state = get_parallel_state(model)
        if state is None or not self._is_invariant:
            return nullcontext()
        return use_batch_invariance(state.layers, self._meshes.device.type)

    def _build_batch(
        self,
        rollouts: Rollouts,
        objective: Objective | None,
        *,
        entropy: bool,
        routes: bool = False,
        group_size: int,
    ) -> RolloutBatch:
        """Check rollouts; return this rank's packed rows and the global totals. Collective."""
        is_dynamic, limits, meshes = self._request.is_dynamic, self._limits, self._meshes
        with self._raise_on_all_ranks("rollouts"):
            for name in () if objective is None else objective.needs:
                if getattr(rollouts, name) is None:
                    raise ValueError(
                        f"Rollouts.{name} (None) must be given for {type(objective).__name__}: "
                        "pass rollouts.replace(...)"
                    )
            check_token_ids(rollouts.tokens_N, self._vocab_size)
            if routes or rollouts.routes_NLK is not None:
                self._layers.check_routes(rollouts)
            assign = group_sequences if is_dynamic else partial(assign_sequences, limits=limits)
            assignments = assign(rollouts, group_size=group_size)
            local_totals = compute_totals(rollouts, len(assignments), group_size)
        global_entries: dict[str, Any] = {"the objective": type(objective).__name__}
        global_entries["entropy"] = entropy
        for name in getattr(objective, "__dataclass_fields__", ()):
            global_entries[f"{type(objective).__name__}.{name}"] = getattr(objective, name)
        # A forward without an objective reads only routes.
        field_names = () if objective is None else PER_TOKEN
        for name in (*field_names, "routes_NLK", "route_weights_NLK"):
            global_entries[f"whether {name} is None"] = getattr(rollouts, name) is None
        global_entries |= {"routes": routes, "temperature": rollouts.temperature}
        global_entries |= {"batch_invariant": self._is_invariant, "group_size": group_size}
        shared = {field.name: getattr(rollouts, field.name) for field in fields(rollouts)}
        totals = gather_totals(
            meshes, local_totals, None, global_entries=global_entries, shared_entries=shared
        )
        if objective is not None and not totals.weight:
            raise ValueError(
                "rollouts (0 tokens of responses with a weight on all ranks) must have some: "
                "leave the batch out"
            )
        if objective is None:
            rollouts = rollouts.replace(**dict.fromkeys(PER_TOKEN))
        if is_dynamic:
            return schedule_batch(rollouts, totals, limits, group_size, meshes)
        assignments += [[] for _ in range(max(1, totals.num_micro_batches) - len(assignments))]
        rows = [build_row(rollouts, idxs, limits, meshes.device) for idxs in assignments]
        groups = (meshes.pipeline_groups or ())[:1]
        return RolloutBatch(rollouts=rollouts, rows=rows, totals=totals, groups=groups)

    def _make_inputs(
        self,
        row: RolloutRow,
        scores: TokenScores,
        objective: Objective | None,
        shares_N: Tensor | None,
    ) -> Mapping[str, Any]:
        """Return a row's forward arguments, with a loss function that also writes to `scores`.

        The loss is the sum of the tokens' losses by `objective`, each times its share of the mean,
        `shares_N`. Without an objective the loss is 0.
        """

        def loss(log_probs_BT: Tensor, entropy_BT: Tensor | None) -> Tensor:
            log_probs_N = row.scatter_to_tokens(log_probs_BT)
            entropy_N = None if entropy_BT is None else row.scatter_to_tokens(entropy_BT)
            if row.is_first:
                scores.log_probs_N[row.token_idx_N] = log_probs_N.detach().float()
            if row.is_first and entropy_N is not None and scores.entropy_N is not None:
                scores.entropy_N[row.token_idx_N] = entropy_N.detach().float()
            if objective is None or shares_N is None:
                return log_probs_N.new_zeros(())
            loss_N = objective(log_probs_N, entropy_N, row.rollouts)
            check_losses(type(objective).__name__, loss_N, log_probs_N)
            # Tokens outside of responses and tokens of weight 0 have a share of 0.
            return (loss_N.where(shares_N > 0, 0) * shares_N).sum()

        log_prob_loss = LogProbLoss(
            labels_BT=row.labels_BT,
            function=loss,
            temperature=row.rollouts.temperature,
            entropy=scores.entropy_N is not None,
        )
        inputs = self._request.family.make_forward_arguments(row.batch)
        inputs |= {"cp": row.cp} if self._request.is_dynamic else {}
        return inputs | {"log_prob_loss": log_prob_loss}
