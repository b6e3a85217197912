"""`MoEConfig` of one MoE layer, with `BalanceConfig` and `CapacityConfig` as fields.

Construction checks types, ranges and the relations of fields (`fields.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Self, TypedDict, get_args

from torch import Tensor

from moecore.base.fields import (
    Bound,
    CheckedRecord,
    Count,
    CountOrZero,
    FieldErrors,
    OneOf,
    Positive,
    PositiveOrZero,
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

# The bound is larger than every ratio of expert count to top_k, so a larger value is an error.
CapacityFactor = Annotated[float, Bound(">", 0), Bound("<=", 1e6), "use 1.0 for no slack"]
Jitter = Annotated[float, Bound(">=", 0), Bound("<", 1), "use about 0.01, or 0.0 for none"]

GATED_ACTIVATIONS: tuple[Activation, ...] = get_args(GatedActivation)
LIMITED_ACTIVATIONS = ("clamped_swiglu", "limited_swiglu", "situ_glu")


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceConfig(CheckedRecord):
    """Load balancing: auxiliary losses and the expert bias. The defaults do not balance.

    The balance loss of E experts is `coef * E * sum_e(f_e * p_e)`. `f_e` is the share of (token,
    expert) assignments of expert e and `p_e` its mean score, so balanced routing gives `coef`. The
    three coefficients differ in the tokens over which `f_e` is counted, and can be combined. With
    an expert bias or groups, `f_e` counts each token's top_k best scores, not its selected experts.

    Attributes:
        micro_batch_coef: coefficient of the loss over the tokens of a data rank's micro-batch.
        sequence_coef: coefficient of the loss per sequence (first dim of a [B, T, D] input),
            averaged over sequences that are not only padding.
        global_batch_coef: coefficient of the loss over all data ranks and the step's micro-batches.
        z_loss_coef: coefficient of the mean of logsumexp(logits) squared over tokens.
        bias_update_rate: rate of the loss-free expert bias per optimizer step; 0 = no update.
        bias_update: "sign" adds the rate to the bias of underloaded experts and subtracts it for
            overloaded experts (DeepSeek-V3: 0.001). "quantile" moves the bias by the rate (at most
            1) towards the value that would have balanced the step (Kimi K3: 1).
        bias_per_micro_batch: in training, solve for the bias that balances each data rank's
            micro-batch before its tokens select experts, starting from the last step's bias. Loads
            are balanced from the first step, but a selection depends on other tokens, also later
            ones. Eval uses the bias that steps update.

    Source: Switch Transformer (arXiv:2101.03961), ST-MoE (arXiv:2202.08906), loss-free balancing
    (arXiv:2408.15664), global-batch balancing (arXiv:2501.11873), quantile balancing
    (https://kexue.fm/archives/11619; Kimi K3 technical report, section 2.3.3), a bias per batch
    (arXiv:2502.15451).
    """

    micro_batch_coef: PositiveOrZero = 0.0
    sequence_coef: PositiveOrZero = 0.0
    global_batch_coef: PositiveOrZero = 0.0
    z_loss_coef: PositiveOrZero = 0.0
    bias_update_rate: PositiveOrZero = 0.0
    bias_update: BiasUpdate = "sign"
    bias_per_micro_batch: bool = False

    def _find_field_errors(self) -> FieldErrors:
        if self.bias_update == "quantile" and not 0 < self.bias_update_rate <= 1:
            yield "bias_update_rate", 'lie in (0, 1] with bias_update ("quantile"): use 1.0'
        if self.bias_per_micro_batch and self.bias_update != "quantile":
            relation = f'go with bias_update ({self.bias_update!r}) = "quantile"'
            yield "bias_per_micro_batch", f"{relation}: set bias_update or drop it"

    @property
    def needs_counts_loss(self) -> bool:
        """Whether a loss that depends on token counts per expert has a coefficient above 0."""
        return any((self.micro_batch_coef, self.sequence_coef, self.global_batch_coef))

    @property
    def needs_loss(self) -> bool:
        """Whether any auxiliary loss has a coefficient above 0."""
        return self.needs_counts_loss or self.z_loss_coef > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityConfig(CheckedRecord):
    """Expert capacity, and which (token, expert) assignments, called choices, are dropped.

    An expert receives at most C = ceil(factor * N * top_k / num_experts) tokens. N is the number of
    tokens without padding in a data rank's micro-batch, over its tp ranks. A dropped choice adds
    nothing to the token's output. The weights of the remaining choices do not change.

    Attributes:
        factor: capacity relative to balanced routing in training; 1.0 = exactly balanced.
        eval_factor: capacity factor in eval mode; None = no choice is dropped.
        drop: "probability" keeps the choices with the highest routing weights. "position" keeps the
            choices of the first positions in all sequences. Ties are ordered by position, then by
            sequence. Positions do not count padding.
        pad: pad dispatch buffers to the capacity, so that shapes are static and dispatchers do not
            synchronise with the host. Every rank must have the same number of tokens. In eval
            without dropping, buffers have the worst-case size.

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
        top_k: experts per token K.
        zero_experts: number Z of additional experts that return their input (LongCat-Flash). Ids
            from E to E + Z - 1 are not dispatched and run no matmul. Balancing counts them.
        score_function: function from logits to scores; "sqrtsoftplus" is
            sqrt(log(1 + exp(logit))).
        score_order: "pre" scores all experts and selects by score; "post" selects by logit and
            applies the score function to the K selected logits. With "sigmoid", "post" adds the
            expert bias to logits, and can rank logits above 17, whose scores all round to 1.
        normalize_weights: divide a token's K weights by their sum; None = if K > 1. With True and
            K = 1 the weight is always 1, so only balance losses train the router.
        routed_scaling_factor: factor on the routing weights, after normalisation.
        num_groups: number of equal groups of experts; 1 = no groups.
        top_groups: number of groups that a token can choose from.
        group_experts: number of best scores whose sum ranks a group: 2 in DeepSeek-V3, 1 in
            DeepSeek-V2, top_k // top_groups in Megatron-Core.
        expert_bias: a buffer that is added to the scores for the selection, not to the weights.
            Steps update it by the loads if `balance.bias_update_rate` > 0.
        router_bias: a trained bias on the router logits.
        router_dtype: dtype of logits and scores, for inputs of any dtype.
        router_jitter: in training, multiply each element of the router's input by a random factor
            in [1 - router_jitter, 1 + router_jitter]; recomputation uses the same factors.
        assignment: rule that selects experts; weights are always computed from the scores.
            "learned": each token selects the experts with its best scores.
            "sinkhorn": in training, selection after Sinkhorn iterations over the micro-batch, which
            balance the experts; in eval as "learned".
            "expert_choice": each expert selects the C tokens with its best scores, C from
            `capacity` (factor 1.0 without it). Not causal.
            "hash": a fixed table has K experts per token id (DeepSeek-V4's first layers,
            arXiv:2106.04426). The layer's forward receives `token_ids`.
        hash_vocab_size: rows of the table of assignment "hash", otherwise 0.
        capacity: token dropping; None = no dropping.
        weights_on_input: multiply the experts' input, not their output, by the routing weight;
            needs top_k = 1 (Llama 4).
        latent_dim: dim of the experts between a shared down-projection before dispatch and an
            up-projection after combine (LatentMoE). Router and shared experts use `dim`. 0 = off.
        latent_norm_eps: eps of an RMSNorm with weight before the up-projection (Kimi K3); None = no
            norm.
        activation: activation between the two expert matrices. Gated activations read 2F columns.
            "gelu" is exact, "geglu" has the tanh approximation. "limited_swiglu" is
            silu(gate) * up with clamped inputs (DeepSeek-V4). "situ_glu" is
            b * tanh(gate / b) * sigmoid(gate) * c * tanh(up / c) (Kimi K3).
        activation_limit: limit of the gate (b in "situ_glu"): 7.0 in gpt-oss ("clamped_swiglu"),
            10.0 in DeepSeek-V4 ("limited_swiglu"), 4.0 in Kimi K3 ("situ_glu").
        activation_up_limit: limit of up, c in "situ_glu" (Kimi K3: 25.0); None = activation_limit.
        activation_alpha: sigmoid slope of "clamped_swiglu" (gpt-oss: 1.702).
        fc1_bias: a bias per expert before the activation.
        fc2_bias: a bias per expert on the output, which is multiplied by the routing weight.
        shared_hidden_dim: hidden dim of one shared expert; 0 = no shared experts.
        num_shared_experts: number of shared experts; their outputs are added.
        shared_gate: multiply each shared expert's output by sigmoid(x @ g), with one g per expert.
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

    def _find_field_errors(self) -> FieldErrors:
        yield from self._find_group_errors()
        if self.score_order == "post":
            yield from self._find_post_score_errors()
        yield from self._find_expert_errors()
        if (self.assignment == "hash") != (self.hash_vocab_size > 0):
            relation = f"be > 0 with assignment ('hash') and 0 with {self.assignment!r}"
            yield "hash_vocab_size", f"{relation}: set it to the vocabulary size, or drop it"
        if self.assignment != "learned":
            yield from self._find_assignment_errors()
        if self.balance.bias_update_rate:
            yield from self._find_bias_errors()

    def _find_group_errors(self) -> FieldErrors:
        E, G, top_groups = self.num_experts, self.num_groups, self.top_groups
        size, ranks_groups = E // G, top_groups < G
        if self.top_k > self.num_candidates:
            yield "top_k", f"be <= {self._num_candidates_text}: lower top_k or add experts"
        if E % G:
            yield "num_groups", f"divide num_experts ({E}): choose a divisor"
        if top_groups > G:
            yield "top_groups", f"be <= num_groups ({G}): lower top_groups"
        if ranks_groups and size < self.group_experts:
            relation = f"be <= num_experts ({E}) / group_experts ({self.group_experts})"
            yield "num_groups", f"{relation}: use fewer groups"
        if not ranks_groups and self.group_experts != 2:
            yield "group_experts", f"go with top_groups ({top_groups}) < num_groups ({G}): drop it"
        if ranks_groups and self.top_k > top_groups * size:
            relation = f"be <= the experts in top_groups ({top_groups} x {size})"
            yield "top_k", f"{relation}: raise top_groups or lower top_k"

    def _find_post_score_errors(self) -> FieldErrors:
        if self.score_function == "sqrtsoftplus":
            yield "score_order", f"be 'pre' with score_function ({self.score_function!r}): drop it"
        if self.score_function != "softmax":
            return
        if self.normalize_weights is False:
            relation = "be True with score_order ('post'), whose softmax over K logits sums to 1"
            yield "normalize_weights", f"{relation}: drop it"
        if not self.normalizes:  # the softmax over one logit is 1, so the router learns nothing
            relation = f"go with normalize_weights ({self.normalize_weights})"
            yield "top_k", f"be > 1 with score_order ('post'), or {relation} = True: use 'pre'"

    def _find_assignment_errors(self) -> FieldErrors:
        rule = f"assignment ({self.assignment!r})"
        is_expert_choice = self.assignment == "expert_choice"
        if self.expert_bias:
            yield "expert_bias", f"be False with {rule}, which reads no bias: drop one"
        if self.top_groups < self.num_groups:
            yield "top_groups", f"equal num_groups ({self.num_groups}) with {rule}: drop groups"
        if (is_expert_choice or self.assignment == "hash") and self.balance.needs_counts_loss:
            yield "balance", f"have no loss on counts with {rule}: use z_loss_coef only"
        if is_expert_choice and self.capacity and self.capacity.drop != "probability":
            yield "capacity.drop", f"be 'probability' with {rule}: drop it"
        if is_expert_choice and self.score_order == "post":  # compares scores of different tokens
            yield "score_order", f"be 'pre' with {rule}: use score_order='pre'"

    def _find_expert_errors(self) -> FieldErrors:
        if self.weights_on_input and self.choices_per_token > 1:
            relation = f"not top_k ({self.top_k}) and assignment ({self.assignment!r})"
            yield "weights_on_input", f"go with one expert per token, {relation}: use top_k=1"
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
        for name, value, allowed in (
            ("assignment", self.assignment, "learned"),
            ("capacity", self.capacity and self.capacity.drop, None),
            ("num_groups", self.num_groups, 1),
        ):
            if self.zero_experts and value != allowed:
                yield "zero_experts", f"be 0 with {name} ({value!r}): drop one"

    def _find_bias_errors(self) -> FieldErrors:
        if not self.expert_bias:
            relation = "go with expert_bias (False) = True: set expert_bias=True"
            yield "balance.bias_update_rate", relation
        if self.balance.bias_update == "sign":
            return
        # "quantile" compares every token's best K + 1 scores, which must lie in [0, 1].
        for name, value, allowed in (
            ("score_function", self.score_function, "sigmoid"),
            ("score_order", self.score_order, "pre"),
            ("top_groups", self.top_groups, self.num_groups),
        ):
            if value != allowed:
                relation = f'go with {name} ({value!r}) = {allowed!r}: use bias_update="sign"'
                yield "balance.bias_update", relation
        if self.top_k == self.num_candidates:
            relation = f"go with top_k ({self.top_k}) < {self._num_candidates_text}: drop it"
            yield "balance.bias_update", relation

    def by_token_id(self, vocab_size: int) -> Self:
        """Return a copy with assignment "hash": `vocab_size` table rows, no bias and no groups."""
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
        """Whether FC1 has a gate and an up projection, and therefore 2 * `hidden_dim` columns."""
        return self.activation in GATED_ACTIVATIONS

    @property
    def fc1_dim(self) -> int:
        """Number of output columns of FC1: 2 * `hidden_dim` with a gate, otherwise `hidden_dim`."""
        return self.hidden_dim * (2 if self.gated else 1)

    @property
    def num_candidates(self) -> int:
        """Number of experts among which a token selects: `num_experts` + `zero_experts`."""
        return self.num_experts + self.zero_experts

    @property
    def _num_candidates_text(self) -> str:
        return f"num_experts{' + zero_experts' * (self.zero_experts > 0)} ({self.num_candidates})"

    @property
    def expert_dim(self) -> int:
        """Dim of the routed experts' input and output: latent_dim if set, otherwise dim."""
        return self.latent_dim or self.dim

    @property
    def counts_best_scores(self) -> bool:
        """Whether balance losses count each token's top_k best scores, not its selected experts."""
        has_altered_choice = self.expert_bias or self.top_groups < self.num_groups
        return has_altered_choice and self.balance.needs_counts_loss

    @property
    def normalizes(self) -> bool:
        """Whether a token's routing weights are divided by their sum."""
        normalizes = self.normalize_weights
        return self.choices_per_token > 1 if normalizes is None else normalizes

    @property
    def choices_per_token(self) -> int:
        """Experts per token in the router's output: top_k, or all E for "expert_choice"."""
        return self.num_experts if self.assignment == "expert_choice" else self.top_k


class MoEOverrides(TypedDict, total=False):
    """Fields of `MoEConfig` that `parallelize_moe(moe=...)` can set; none changes parameters."""

    balance: Balance
    capacity: Capacity
    router_dtype: RouterDtype
    router_jitter: Jitter
