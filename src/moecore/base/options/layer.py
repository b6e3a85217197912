"""Frozen records of a layer: `MoEConfig`, with `BalanceConfig` and `CapacityConfig` inside.

Types, ranges and cross-field rules are checked at construction (`fields.py`), before any GPU work.
Runtime handles (meshes, groups, dispatchers) are arguments elsewhere, never fields here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypedDict, get_args

from torch import Tensor

from moecore.base.fields import (
    Bound,
    CheckedRecord,
    Count,
    CountOrZero,
    OneOf,
    Positive,
    PositiveOrZero,
    Rules,
)
from moecore.base.registry import Registry

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
ScoreOrder = Literal["pre", "post"]
GatedActivation = Literal["swiglu", "geglu", "clamped_swiglu", "limited_swiglu", "situ_glu"]
Activation = Literal[GatedActivation, "gelu", "relu", "relu2", "silu"]
RouterDtype = Literal["float32", "float64"]
# Logits [N, E], choices per token K, padding mask [N] or None -> ids [N, K].
AssignmentRule = Callable[[Tensor, int, Tensor | None], Tensor]
ASSIGNMENTS: Registry[AssignmentRule | None] = Registry(
    "assignment", dict.fromkeys(("learned", "sinkhorn", "expert_choice", "hash"))
)
Assignment = Annotated[
    Literal["learned", "sinkhorn", "expert_choice", "hash"] | str, OneOf(ASSIGNMENTS)
]
BiasUpdate = Literal["sign", "quantile"]
DropOrder = Literal["probability", "position"]

# More than any expert count over top_k; an overflow is no capacity.
CapacityFactor = Annotated[float, Bound(">", 0), Bound("<=", 1e6), "use 1.0 for no slack"]
Jitter = Annotated[float, Bound(">=", 0), Bound("<", 1), "use about 0.01, or 0.0 for none"]

GATED_ACTIVATIONS: tuple[Activation, ...] = get_args(GatedActivation)
LIMITED_ACTIVATIONS = ("clamped_swiglu", "limited_swiglu", "situ_glu")


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceConfig(CheckedRecord):
    """How the load of the experts is kept even. All coefficients 0 means: not at all.

    The balance loss is `coef * E * sum_e(f_e * p_e)` with `f_e` the share of assignments that
    expert e got and `p_e` its mean score, so perfectly even routing gives exactly `coef`. The
    three scopes differ in the tokens over which `f_e` is counted, and may be mixed. With an expert
    bias or groups `f_e` counts each token's K best scores, not its choice.

    Attributes:
        micro_batch_coef: `f_e` over the tokens of one data rank's micro-batch.
        sequence_coef: `f_e` per sequence (first dim of a [B, T, D] input); mean over the sequences
            that are not all padding.
        global_batch_coef: `f_e` over all data ranks and the micro-batches so far in this step.
        z_loss_coef: times the mean over tokens of logsumexp(logits) squared.
        bias_update_rate: of the aux-loss-free expert bias per optimizer step; 0 = no update.
        bias_update: "sign" adds the rate to the bias of underloaded experts and takes it from
            overloaded ones (DeepSeek-V3: 0.001). "quantile" solves for the bias at which each
            expert would have got K / E of the step's choices, and moves there by the rate as a
            share of the way, so at most 1 (Kimi K3: 1).
        bias_per_micro_batch: while training, solve anew for every data rank's micro-batch before
            its tokens choose, by quantiles from the bias of the step before. Loads are even from
            the first step on, but a token's choice depends on its neighbours, later ones
            included, through E numbers. Eval chooses by the bias that steps move.

    Source: Switch Transformer (arXiv:2101.03961), ST-MoE (arXiv:2202.08906), aux-loss-free
    balancing (arXiv:2408.15664), global-batch balancing (arXiv:2501.11873), quantile balancing
    (https://kexue.fm/archives/11619; Kimi K3 technical report, section 2.3.3), a bias solved for
    one batch (arXiv:2502.15451).
    """

    micro_batch_coef: PositiveOrZero = 0.0
    sequence_coef: PositiveOrZero = 0.0
    global_batch_coef: PositiveOrZero = 0.0
    z_loss_coef: PositiveOrZero = 0.0
    bias_update_rate: PositiveOrZero = 0.0
    bias_update: BiasUpdate = "sign"
    bias_per_micro_batch: bool = False

    def _rules(self) -> Rules:
        if self.bias_update == "quantile" and not 0 < self.bias_update_rate <= 1:
            yield (
                "bias_update_rate",
                'lie in (0, 1] with bias_update ("quantile"), which goes that share of the way: '
                "use 1.0",
            )
        if self.bias_per_micro_batch and self.bias_update != "quantile":
            yield (
                "bias_per_micro_batch",
                f'go with bias_update ({self.bias_update!r}) = "quantile", which it starts from: '
                "set it so",
            )

    @property
    def needs_counts_loss(self) -> bool:
        """Whether a loss on the experts' counts reaches the gradient."""
        return any((self.micro_batch_coef, self.sequence_coef, self.global_batch_coef))

    @property
    def needs_loss(self) -> bool:
        """Whether any auxiliary loss reaches the gradient."""
        return self.needs_counts_loss or self.z_loss_coef > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityConfig(CheckedRecord):
    """How many tokens an expert takes, and what happens to the rest.

    One expert takes at most C = ceil(factor * N * K / E) of a data rank's micro-batch of N tokens,
    counted over the ranks that share it (tp), padding left out. Choices over it are dropped: they
    add nothing to the token's output, which the residual stream around the layer then carries.
    Weights of the choices that stay are not changed.

    Attributes:
        factor: capacity over the even load while training; 1.0 = no slack.
        eval_factor: the same in eval mode; None = nothing is dropped there.
        drop: which choices stay: "probability", those of the highest routing weight; "position",
            those of the first tokens of all sequences: every position 0, then every position 1.
            Padding has no position. Among equals the earlier position stays, then the earlier
            sequence.
        pad: buffers between ranks have the size that the capacity allows, whatever was chosen, so
            shapes are static and dispatchers need no host sync. Every rank must then bring the
            same number of tokens, and where nothing is dropped (eval) the size is the worst case.

    Source: GShard (arXiv:2006.16668), Switch Transformer (arXiv:2101.03961).
    """

    factor: CapacityFactor
    eval_factor: CapacityFactor | None = None
    drop: DropOrder = "probability"
    pad: bool = False


Balance = Annotated[BalanceConfig, "pass BalanceConfig(micro_batch_coef=0.01)"]
Capacity = Annotated[CapacityConfig | None, "pass CapacityConfig(factor=1.25)"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig(CheckedRecord):
    """One Mixture-of-Experts layer.

    Attributes:
        dim: model dim D of input and output.
        hidden_dim: hidden dim F of one expert.
        num_experts: number of routed experts E.
        zero_experts: number Z of further experts that return their input (LongCat-Flash). A token
            chooses among E + Z; ids from E on are these, and are neither dispatched nor multiplied.
            Balancing counts them as experts, so even loads leave E / (E + Z) of the choices to E.
        top_k: experts per token K.
        score_function: how logits become scores; "sqrtsoftplus" is sqrt(log(1 + exp(logit))).
        score_order: "pre" scores all experts and keeps the scores of the chosen; "post" applies
            the score function to the K chosen logits only.
        normalize_weights: divide the K weights of a token by their sum; None = where K > 1. One
            weight over itself is 1, so with True and K = 1 the router learns from balance losses
            alone.
        routed_scaling_factor: factor on the routing weights, after normalisation.
        num_groups: experts are split into this many equal groups; 1 = no groups.
        top_groups: groups that a token may choose from.
        group_experts: groups are ranked by the sum of so many of their best selection scores: 2 in
            DeepSeek-V3, 1 in DeepSeek-V2, top_k // top_groups in Megatron-Core.
        expert_bias: a per-expert buffer added to the scores for selection only, never to the
            weights. Follows the load when `balance.bias_update_rate` > 0.
        router_bias: a learned bias on the router logits.
        router_dtype: dtype of logits and scores, whatever the dtype of the input.
        router_jitter: while training the router reads x times a factor drawn anew for every
            element from [1 - router_jitter, 1 + router_jitter]. Drawn from torch's generator:
            `torch.manual_seed` repeats it, activation checkpointing too (preserve_rng_state).
        assignment: who chooses. Weights come from the scores in every case.
            "learned": each token takes the experts with its best scores.
            "sinkhorn": while training, of the exponentials of its logits after Sinkhorn's
            iterations over the micro-batch, which even out the experts; in eval as "learned".
            "expert_choice": each expert takes the C tokens with its best scores, C from `capacity`
            (factor 1.0 without one); a token gets any number of experts. Reads later tokens: not
            causal.
            "hash": a table has K experts for each token id, and is not trained (DeepSeek-V4's first
            layers, after Hash Layers, arXiv:2106.04426). The layer's forward gets `token_ids`.
        hash_vocab_size: rows of the table of assignment "hash", else 0.
        capacity: token dropping; None = none.
        weights_on_input: multiply the experts' input by the routing weight instead of their
            output; needs top_k = 1 (Llama 4).
        latent_dim: experts work in this smaller dim: a shared down-projection before dispatch, an
            up-projection after combine (LatentMoE). Router and shared experts keep `dim`. 0 = off.
        latent_norm_eps: eps of an RMSNorm, with a weight, of combined rows before the
            up-projection (Kimi K3's normalized LatentMoE); None = there is none.
        activation: activation between the two expert matrices. Gated ones read 2F columns; "gelu"
            is the exact one, "geglu" has the tanh form. "limited_swiglu" is silu(gate) * up with
            gate clamped from above and up on both sides (DeepSeek-V4). "situ_glu" is b * tanh(gate
            / b) * sigmoid(gate) * c * tanh(up / c), with smooth limits b and c (Kimi K3).
        activation_limit: of the gate of "clamped_swiglu" (gpt-oss: 7.0), "limited_swiglu"
            (DeepSeek-V4: 10.0) and "situ_glu" (Kimi K3: 4.0).
        activation_up_limit: of their up (Kimi K3: 25.0); None = activation_limit.
        activation_alpha: sigmoid slope of "clamped_swiglu" (gpt-oss: 1.702).
        fc1_bias: per-expert bias before the activation.
        fc2_bias: per-expert bias on the output; it is multiplied by the routing weight too.
        shared_hidden_dim: hidden dim of one shared expert; 0 = none.
        num_shared_experts: shared experts that every token passes; they are added.
        shared_gate: multiply each shared expert's output by sigmoid(x @ g) with its own g.
        balance: load balancing.
    """

    dim: Count
    hidden_dim: Count
    num_experts: Count
    top_k: Count
    zero_experts: CountOrZero = 0
    score_function: ScoreFunction = "softmax"
    score_order: ScoreOrder = "pre"
    normalize_weights: bool | None = None
    routed_scaling_factor: Positive = 1.0
    num_groups: Count = 1
    top_groups: Count = 1
    group_experts: Count = 2
    expert_bias: bool = False
    router_bias: bool = False
    router_dtype: RouterDtype = "float32"
    router_jitter: Jitter = 0.0
    assignment: Assignment = "learned"
    hash_vocab_size: CountOrZero = 0
    capacity: Capacity = None
    weights_on_input: bool = False
    latent_dim: CountOrZero = 0
    latent_norm_eps: Positive | None = None
    activation: Activation = "swiglu"
    activation_limit: Positive = 7.0
    activation_up_limit: Positive | None = None
    activation_alpha: Positive = 1.702
    fc1_bias: bool = False
    fc2_bias: bool = False
    shared_hidden_dim: CountOrZero = 0
    num_shared_experts: Count = 1
    shared_gate: bool = False
    balance: Balance = field(default_factory=BalanceConfig)

    def _rules(self) -> Rules:
        yield from self._group_rules()
        yield from self._score_rules()
        yield from self._expert_rules()
        if self.zero_experts:
            yield from self._zero_rules()
        if (self.assignment == "hash") != (self.hash_vocab_size > 0):
            yield (
                "hash_vocab_size",
                f"be > 0 with assignment ('hash'), whose table it sizes, and 0 with "
                f"{self.assignment!r}: set or drop it",
            )
        if self.assignment != "learned":
            yield from self._assignment_rules()
        if self.balance.bias_update_rate:
            yield from self._bias_rules()

    def _group_rules(self) -> Rules:
        E, G, top_groups = self.num_experts, self.num_groups, self.top_groups
        size, ranks_groups = E // G, top_groups < G
        if self.top_k > self.num_candidates:
            yield "top_k", f"be <= {self._candidates}: lower top_k or add experts"
        if E % G:
            yield "num_groups", f"divide num_experts ({E}): choose a divisor"
        if top_groups > G:
            yield "top_groups", f"be <= num_groups ({G}): lower top_groups"
        if ranks_groups and size < self.group_experts:
            yield (
                "num_groups",
                f"leave >= group_experts ({self.group_experts}) of num_experts ({E}) in a group, "
                "because groups are ranked by so many of their best: use fewer groups",
            )
        if not ranks_groups and self.group_experts != 2:
            yield (
                "group_experts",
                f"go with top_groups ({top_groups}) < num_groups ({G}), where groups are ranked: "
                "drop it",
            )
        if ranks_groups and self.top_k > top_groups * size:
            yield (
                "top_k",
                f"be <= the experts in top_groups ({top_groups} x {size}): raise top_groups or "
                "lower top_k",
            )

    def _score_rules(self) -> Rules:
        if self.score_order == "post" and self.score_function != "softmax":
            yield (
                "score_order",
                f"be 'pre' with score_function ({self.score_function!r}), whose scores do not "
                "depend on the other experts: use score_order='pre'",
            )
        if self.score_order == "post" and self.normalize_weights is False:
            yield (
                "normalize_weights",
                "be True with score_order ('post'), whose softmax over the chosen logits always "
                "sums to 1: drop it",
            )
        if self.score_order == "post" and not self.normalizes:
            yield (
                "top_k",
                "be > 1 with score_order ('post') and normalize_weights "
                f"({self.normalize_weights}), where a softmax over one logit is always 1 and the "
                "router learns nothing: use score_order='pre'",
            )

    def _assignment_rules(self) -> Rules:
        rule = f"assignment ({self.assignment!r})"
        if self.expert_bias:
            yield "expert_bias", f"be False with {rule}, which reads no bias: drop one"
        if self.top_groups < self.num_groups:
            yield "top_groups", f"equal num_groups ({self.num_groups}) with {rule}: drop groups"
        if self.assignment == "hash" and self.balance.needs_counts_loss:
            yield (
                "balance",
                f"have no loss on counts with {rule}, whose choice no loss moves: use z_loss_coef "
                "only",
            )
        if self.assignment != "expert_choice":
            return
        if self.capacity is not None and self.capacity.drop != "probability":
            yield (
                "capacity.drop",
                f"be 'probability' with {rule}, where experts take their best tokens: drop it",
            )
        if self.score_order == "post":
            yield (
                "score_order",
                f"be 'pre' with {rule}, where experts compare scores of different tokens: use "
                "score_order='pre'",
            )
        if self.balance.needs_counts_loss:
            yield (
                "balance",
                f"have no loss on counts with {rule}, whose counts are even: use z_loss_coef only",
            )

    def _expert_rules(self) -> Rules:
        if self.weights_on_input and self.choices_per_token > 1:
            yield (
                "weights_on_input",
                f"go with one expert per token, not top_k ({self.top_k}) and assignment "
                f"({self.assignment!r}), because a token travels once: use top_k=1 and an "
                "assignment by tokens",
            )
        if self.activation_up_limit is not None and self.activation not in LIMITED_ACTIVATIONS:
            yield "activation_up_limit", f"be None with activation ({self.activation!r}): drop it"
        if self.latent_dim >= self.dim:
            yield "latent_dim", f"be < dim ({self.dim}): lower it, or use 0 for none"
        if self.latent_norm_eps is not None and not self.latent_dim:
            yield "latent_norm_eps", "go with latent_dim: set it, or drop latent_norm_eps"
        for name, is_set in (
            ("shared_gate", self.shared_gate),
            ("num_shared_experts", self.num_shared_experts > 1),
        ):
            if is_set and not self.shared_hidden_dim:
                yield name, "go with shared_hidden_dim (0) > 0: set shared_hidden_dim or drop it"

    def _zero_rules(self) -> Rules:
        for name, value, allowed, reason in (
            ("assignment", self.assignment, "learned", "tokens choose"),
            ("capacity", self.capacity and self.capacity.drop, None, "nothing is dropped"),
            ("num_groups", self.num_groups, 1, "experts have no groups"),
        ):
            if value != allowed:
                yield (
                    "zero_experts",
                    f"be 0 with {name} ({value!r}), because {reason} where experts return their "
                    "input: drop one",
                )

    def _bias_rules(self) -> Rules:
        if not self.expert_bias:
            yield (
                "balance.bias_update_rate",
                "go with expert_bias (False) = True: set expert_bias=True",
            )
        if self.balance.bias_update == "sign":
            return
        for name, value, allowed in (
            ("score_function", self.score_function, "sigmoid"),
            ("top_groups", self.top_groups, self.num_groups),
        ):
            if value != allowed:
                yield (
                    "balance.bias_update",
                    f"go with {name} ({value!r}) = {allowed!r}, because it compares every token's "
                    'best K + 1 scores in [0, 1]: use bias_update="sign"',
                )
        if self.top_k == self.num_candidates:
            yield (
                "balance.bias_update",
                f"go with top_k ({self.top_k}) < {self._candidates}: drop it",
            )

    def by_token_id(self, vocab_size: int) -> MoEConfig:
        """Return the same layer with assignment "hash": no bias, groups or losses on counts."""
        return replace(
            self,
            assignment="hash",
            hash_vocab_size=vocab_size,
            expert_bias=False,
            num_groups=1,
            top_groups=1,
            group_experts=2,
            balance=BalanceConfig(z_loss_coef=self.balance.z_loss_coef),
        )

    @property
    def gated(self) -> bool:
        """Whether FC1 gives a gate and an up half (2F columns)."""
        return self.activation in GATED_ACTIVATIONS

    @property
    def fc1_dim(self) -> int:
        """Columns of FC1: 2F for gated activations, else F."""
        return self.hidden_dim * (2 if self.gated else 1)

    @property
    def num_candidates(self) -> int:
        """Experts among which a token chooses: E + Z."""
        return self.num_experts + self.zero_experts

    @property
    def _candidates(self) -> str:
        zero_term = " + zero_experts" if self.zero_experts else ""
        return f"num_experts{zero_term} ({self.num_candidates})"

    @property
    def expert_dim(self) -> int:
        """Dim of the routed experts' input and output: latent_dim, or dim without one."""
        return self.latent_dim or self.dim

    @property
    def counts_best_scores(self) -> bool:
        """Whether a balance loss counts best scores, because a bias or groups move the choice."""
        has_altered_choice = self.expert_bias or self.top_groups < self.num_groups
        return has_altered_choice and self.balance.needs_counts_loss

    @property
    def normalizes(self) -> bool:
        """Whether a token's weights are divided by their sum."""
        if self.normalize_weights is None:
            return self.choices_per_token > 1
        return self.normalize_weights

    @property
    def choices_per_token(self) -> int:
        """Columns of a routing decision: top_k, or all experts where the experts choose."""
        return self.num_experts if self.assignment == "expert_choice" else self.top_k


class MoEOverrides(TypedDict, total=False):
    """Fields of `MoEConfig` that a call may set for every MoE layer: they decide no parameter."""

    balance: Balance
    capacity: Capacity
    router_dtype: RouterDtype
    router_jitter: Jitter
