"""Objectives: functions from log-probabilities of sampled tokens to a loss per token.

Legend: N tokens, n sequences; p the current policy, p_old the policy that sampled, p_ref the
reference model; A the advantage of a token; r = p / p_old.

An objective reads complete sequences and returns a loss per token. The engine computes the mean
over the global batch. With "token" it is the mean over response tokens. With "sequence" it is the
mean over sequences of each response's mean. An objective therefore does not depend on micro-batches
and ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from moecore.base.fields import (
    Bound,
    CheckedRecord,
    Count,
    FieldErrors,
    Positive,
    PositiveOrZero,
    check_arguments,
    quote,
)
from moecore.rl.rollouts import Rollouts

Mean = Literal["token", "sequence"]
KLEstimator = Literal["k1", "k2", "k3"]
Share = Annotated[float, Bound(">", 0), Bound("<", 1)]
TokenLoss = Callable[[Tensor, Tensor | None, Rollouts], Tensor]

# The fp32 exponential overflows above 88.7, and backward multiplies a clipped token's zero gradient
# by it: 0 * inf is nan. exp(80) = 5.5e34 leaves a factor of 6,000 for advantages and coefficients.
MAX_LOG_RATIO = 80.0


@runtime_checkable
class Objective(Protocol):
    """Protocol of a callable that maps log-probabilities of sampled tokens to losses per token."""

    @property
    def mean(self) -> Mean:
        """The mean of the loss: over tokens ("token") or over sequences ("sequence")."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the fields of `Rollouts` that must not be None."""

    @property
    def entropy(self) -> bool:
        """Whether the engine computes entropies; otherwise the objective receives None."""

    @property
    def group_size(self) -> int:
        """Number of consecutive sequences that must be in one micro-batch."""

    def __call__(self, log_probs_N: Tensor, entropy_N: Tensor | None, rollouts: Rollouts) -> Tensor:
        """Return the loss of each token, fp32 [N]; values outside of responses are ignored.

        `log_probs_N` have gradients. `entropy_N` are in nats, with gradients; None = not computed.
        """


def check_losses(objective: str, loss_N: object, log_probs_N: Tensor) -> None:
    """Raise ValueError unless `objective` returned a differentiable loss `loss_N` per token."""
    if not isinstance(loss_N, Tensor):
        raise ValueError(
            f"{objective} returned {quote(loss_N)}, which must be a tensor: return a loss per token"
        )
    if loss_N.shape != log_probs_N.shape:
        raise ValueError(
            f"{objective} returned {tuple(loss_N.shape)}, which must be one loss per token "
            f"{tuple(log_probs_N.shape)}: means are taken by the engine"
        )
    if not loss_N.is_floating_point() or loss_N.device != log_probs_N.device:
        raise ValueError(
            f"{objective} returned {loss_N.dtype} on {loss_N.device}, which must be floating "
            f"on {log_probs_N.device}: compute losses from log_probs_N"
        )
    if log_probs_N.requires_grad and not loss_N.requires_grad:
        raise ValueError(
            f"{objective} returned losses without a gradient, which must depend on "
            "log_probs_N or entropy_N: do not detach them"
        )


def estimate_kl(
    log_probs_N: Annotated[Tensor, "pass fp32 [N]"],
    ref_log_probs_N: Annotated[Tensor, "pass fp32 [N]"],
    estimator: KLEstimator,
) -> Tensor:
    """Return an estimate of KL(policy || reference) at each sampled token, in nats, fp32 [N].

    With d = ref_log_probs_N - log_probs_N, the estimate is -d ("k1"), d^2 / 2 ("k2") or
    exp(d) - 1 - d ("k3"). To avoid fp32 overflow, "k3" clamps d to 80, with a gradient of 0 above.
    """
    check_arguments(estimate_kl, locals())
    if log_probs_N.shape != ref_log_probs_N.shape:
        raise ValueError(
            f"ref_log_probs_N {tuple(ref_log_probs_N.shape)} must have the shape of log_probs_N "
            f"{tuple(log_probs_N.shape)}: pass those of the same tokens"
        )
    d_N = ref_log_probs_N - log_probs_N
    if estimator == "k1":
        return -d_N
    if estimator == "k2":
        return d_N**2 / 2
    d_N = d_N.clamp(max=MAX_LOG_RATIO)
    return d_N.exp() - 1 - d_N


@dataclass(frozen=True, kw_only=True, slots=True)
class PPO(CheckedRecord):
    """The clipped loss of PPO: -min(r A, clip(r, 1 - clip, 1 + clip_high) A) for each token.

    r is the token's probability under the policy divided by its probability under the sampling
    policy. A is the token's advantage. r is clamped to exp(80), with a gradient of 0 above.

    Attributes:
        clip: the lower bound of the clipped ratio is 1 - clip.
        clip_high: the upper bound of the clipped ratio is 1 + clip_high; None = clip.
        kl: the estimator of the KL penalty, "k1", "k2" or "k3" (`estimate_kl`).
        kl_coef: coefficient of the KL penalty; > 0 needs `ref_log_probs_N`.
        entropy_coef: coefficient of the entropy, which is subtracted from the loss.
        mean: "token" = mean over tokens, "sequence" = mean over sequences of their token means.
    """

    clip: Share = 0.2
    clip_high: Positive | None = None
    kl: KLEstimator = "k3"
    kl_coef: PositiveOrZero = 0.0
    entropy_coef: PositiveOrZero = 0.0
    mean: Mean = "token"
    group_size: ClassVar[int] = 1

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the fields of `Rollouts` that must not be None."""
        return ("advantages_N", *(["ref_log_probs_N"] if self.kl_coef else []))

    @property
    def entropy(self) -> bool:
        """Whether the loss reads entropies, because `entropy_coef` > 0."""
        return self.entropy_coef > 0

    def compute_log_ratio(self, log_probs_N: Tensor, rollouts: Rollouts) -> Tensor:
        """Return `log_probs_N` minus the sampling policy's log-probabilities, fp32 [N].

        If `old_log_probs_N` is None, detached `log_probs_N` are subtracted: 0 with a gradient.
        """
        old_N = rollouts.old_log_probs_N
        return log_probs_N - (log_probs_N.detach() if old_N is None else old_N)

    def __call__(self, log_probs_N: Tensor, entropy_N: Tensor | None, rollouts: Rollouts) -> Tensor:
        """Return the loss of each token, fp32 [N]; `entropy_N` None = no entropy term."""
        assert rollouts.advantages_N is not None, "the engine has looked"
        ratio_N = self.compute_log_ratio(log_probs_N, rollouts).clamp(max=MAX_LOG_RATIO).exp()
        high = self.clip if self.clip_high is None else self.clip_high
        clipped_N = ratio_N.clamp(1 - self.clip, 1 + high)
        advantages_N = rollouts.advantages_N
        loss_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
        if self.kl_coef:
            assert rollouts.ref_log_probs_N is not None, "the engine has looked"
            kl_N = estimate_kl(log_probs_N, rollouts.ref_log_probs_N, self.kl)
            loss_N = loss_N + self.kl_coef * kl_N
        return loss_N if entropy_N is None else loss_N - self.entropy_coef * entropy_N


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPO(PPO):
    """The GRPO loss: PPO's with `group_advantages`, a k3 penalty, and the mean over sequences.

    The loss of DAPO is `GRPO(mean="token", clip_high=0.28, kl_coef=0.0)`.
    """

    kl_coef: PositiveOrZero = 0.04
    mean: Mean = "sequence"


@dataclass(frozen=True, kw_only=True, slots=True)
class GSPO(PPO):
    """The GSPO loss: PPO's with one ratio per sequence, the geometric mean of its token ratios."""

    clip: Share = 3e-4
    clip_high: Positive | None = 4e-4
    mean: Mean = "sequence"

    def compute_log_ratio(self, log_probs_N: Tensor, rollouts: Rollouts) -> Tensor:
        """Return fp32 [N]: for each token, the mean log-ratio over the tokens of its response."""
        of_tokens_N = PPO.compute_log_ratio(self, log_probs_N, rollouts)
        counts_n = rollouts.sum_responses(torch.ones_like(log_probs_N))
        means_n = rollouts.sum_responses(of_tokens_N) / counts_n.clamp(min=1)
        return rollouts.expand_to_tokens(means_n)


@dataclass(frozen=True, kw_only=True, slots=True)
class DPO(CheckedRecord):
    """The loss of DPO: -log sigmoid(beta * (chosen log-ratio - rejected log-ratio)) of each pair.

    A log-ratio is a response's log-probability under the policy minus that under the reference.
    Sequences 2i (chosen) and 2i + 1 (rejected) are a pair. The loss is the mean over pairs.

    Attributes:
        beta: a larger value keeps the policy closer to the reference model.
        label_smoothing: weight of the loss of the pair in reverse order, for noisy labels.
    """

    beta: Positive = 0.1
    label_smoothing: Annotated[float, Bound(">=", 0), Bound("<", 0.5)] = 0.0
    mean: ClassVar[Mean] = "sequence"  # both sequences of a pair have the loss of the pair
    needs: ClassVar[tuple[str, ...]] = ("ref_log_probs_N",)
    entropy: ClassVar[bool] = False
    group_size: ClassVar[int] = 2

    def __call__(self, log_probs_N: Tensor, entropy_N: Tensor | None, rollouts: Rollouts) -> Tensor:
        """Return for each token the loss of its pair of sequences, [N]."""
        loss_i = self.compute_losses(log_probs_N, rollouts)
        return rollouts.expand_to_tokens(loss_i.repeat_interleave(2))

    def compute_losses(self, log_probs_N: Tensor, rollouts: Rollouts) -> Tensor:
        """Return the loss of each pair, fp32 [pairs]."""
        return self.compute_pair_losses(self.compute_log_ratios(log_probs_N, rollouts))

    def compute_log_ratios(self, log_probs_N: Tensor, rollouts: Rollouts) -> Tensor:
        """Return each response's log-ratio to the reference, fp32 [pairs, 2], chosen first."""
        assert rollouts.ref_log_probs_N is not None, "the engine has looked"
        ratios_n = rollouts.sum_responses(log_probs_N - rollouts.ref_log_probs_N)
        return ratios_n.view(-1, 2)

    def compute_pair_losses(self, log_ratios_i2: Tensor) -> Tensor:
        """Return the loss of each pair from `compute_log_ratios`, fp32 [pairs]."""
        logits_i = self.beta * (log_ratios_i2[:, 0] - log_ratios_i2[:, 1])
        loss_i = -torch.nn.functional.logsigmoid(logits_i)
        if self.label_smoothing:
            exchanged_i = -torch.nn.functional.logsigmoid(-logits_i)
            loss_i = torch.lerp(loss_i, exchanged_i, self.label_smoothing)
        return loss_i


@dataclass(frozen=True, kw_only=True, slots=True)
class KTO(CheckedRecord):
    """The loss of KTO: weight * (1 - sigmoid(beta * s * (log-ratio - kl))) of each sequence.

    A log-ratio is a response's log-probability under the policy minus that under the reference. The
    sign s of the response's summed `advantages_N` is 1 if desirable and -1 if undesirable. The loss
    is the mean over sequences.

    Source: KTO (arXiv:2402.01306), equations 7 and 8, as in TRL's KTOTrainer.

    Attributes:
        beta: a larger value keeps the policy closer to the reference model.
        desirable_weight: the factor of the losses of desirable responses.
        undesirable_weight: the factor of the losses of undesirable responses.
        kl: the batch's estimate of KL(policy || reference), equal on all ranks: in `moecore
            finetune` the mean log-ratio of mismatched prompts and responses, at least 0.
    """

    beta: Positive = 0.1
    desirable_weight: Positive = 1.0
    undesirable_weight: Positive = 1.0
    kl: PositiveOrZero = 0.0
    mean: ClassVar[Mean] = "sequence"
    needs: ClassVar[tuple[str, ...]] = ("advantages_N", "ref_log_probs_N")
    entropy: ClassVar[bool] = False
    group_size: ClassVar[int] = 1

    def __call__(self, log_probs_N: Tensor, entropy_N: Tensor | None, rollouts: Rollouts) -> Tensor:
        """Return for each token the loss of its sequence, [N]."""
        return rollouts.expand_to_tokens(self.compute_losses(log_probs_N, rollouts))

    def compute_losses(self, log_probs_N: Tensor, rollouts: Rollouts) -> Tensor:
        """Return the loss of each sequence, fp32 [sequences]."""
        is_desirable_n = self.find_desirable(rollouts)
        logits_n = self.beta * (self.compute_log_ratios(log_probs_N, rollouts) - self.kl)
        losses_n = 1 - torch.where(is_desirable_n, logits_n, -logits_n).sigmoid()
        return losses_n * torch.where(
            is_desirable_n, self.desirable_weight, self.undesirable_weight
        )

    def compute_log_ratios(self, log_probs_N: Tensor, rollouts: Rollouts) -> Tensor:
        """Return each response's log-ratio to the reference, fp32 [sequences]."""
        assert rollouts.ref_log_probs_N is not None, "the engine has looked"
        return rollouts.sum_responses(log_probs_N - rollouts.ref_log_probs_N)

    def find_desirable(self, rollouts: Rollouts) -> Tensor:
        """Return whether each response is desirable, bool [sequences]."""
        assert rollouts.advantages_N is not None, "the engine has looked"
        return rollouts.sum_responses(rollouts.advantages_N) > 0


@dataclass(frozen=True, slots=True)
class OwnObjective(CheckedRecord):
    """An objective from a function of the user.

    Attributes:
        function: maps fp32 log-probabilities [N], entropies [N] or None, and a micro-batch's
            `Rollouts` to the loss of each token, [N]. All ranks must pass the same function; only
            tensors and containers in its closure may differ.
        mean: "token" = mean over tokens, "sequence" = mean over sequences of their token means.
        needs: fields of `Rollouts` that must not be None.
        entropy: whether the function reads entropies.
        group_size: number of consecutive sequences that must be in one micro-batch.
    """

    function: TokenLoss
    mean: Mean = "token"
    needs: tuple[str, ...] = ()
    entropy: bool = False
    group_size: Count = 1

    def _find_field_errors(self) -> FieldErrors:
        field_names = Rollouts.__dataclass_fields__
        if any(name not in field_names for name in self.needs):
            yield "needs", f"be fields of Rollouts ({', '.join(field_names)}): name those"

    def __call__(self, *args: Any) -> Tensor:
        """Return the result of `function`: the loss of each token, [N]."""
        return self.function(*args)
