"""Frozen records that say what a layer is and how the world is divided.

`MoEConfig` describes one MoE layer, `BalanceConfig` its load balancing, `ParallelConfig` the
parallel degrees. Every cross-field rule is checked at construction, before any GPU work: a wrong
value is a one-line `ValueError` with the field, its value, the relation it breaks and the fix.
Runtime handles (meshes, groups, dispatchers) are arguments elsewhere, never fields here.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal, get_args

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
ScoreOrder = Literal["pre", "post"]
Activation = Literal["swiglu", "geglu", "clamped_swiglu", "gelu", "relu", "relu2", "silu"]
RouterDtype = Literal["float32", "float64"]
Assignment = Literal["learned", "sinkhorn", "expert_choice"]
BiasUpdate = Literal["sign", "quantile"]
DropOrder = Literal["probability", "position"]

GATED_ACTIVATIONS: tuple[Activation, ...] = ("swiglu", "geglu", "clamped_swiglu")


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceConfig:
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

    micro_batch_coef: float = 0.0
    sequence_coef: float = 0.0
    global_batch_coef: float = 0.0
    z_loss_coef: float = 0.0
    bias_update_rate: float = 0.0
    bias_update: BiasUpdate = "sign"
    bias_per_micro_batch: bool = False

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            if f.name not in ("bias_update", "bias_per_micro_batch"):
                _finite("BalanceConfig", f.name, getattr(self, f.name))
        _one_of("BalanceConfig", "bias_update", self.bias_update, get_args(BiasUpdate))
        if self.bias_update == "quantile" and not 0 < self.bias_update_rate <= 1:
            raise ValueError(
                f"BalanceConfig.bias_update_rate ({self.bias_update_rate}) must lie in (0, 1] "
                'with bias_update ("quantile"), which goes that share of the way: use 1.0'
            )
        if not isinstance(self.bias_per_micro_batch, bool):
            raise ValueError(
                f"BalanceConfig.bias_per_micro_batch ({self.bias_per_micro_batch!r}) must be True "
                "or False"
            )
        if self.bias_per_micro_batch and self.bias_update != "quantile":
            raise ValueError(
                "BalanceConfig.bias_per_micro_batch (True) must go with bias_update "
                f'({self.bias_update!r}) = "quantile", which it starts from: set it so'
            )

    @property
    def needs_counts_loss(self) -> bool:
        """Whether a loss on the experts' counts reaches the gradient."""
        return any((self.micro_batch_coef, self.sequence_coef, self.global_batch_coef))

    @property
    def needs_loss(self) -> bool:
        """Whether any auxiliary loss reaches the gradient."""
        return self.needs_counts_loss or self.z_loss_coef > 0

    @property
    def is_on(self) -> bool:
        """Whether training differs from training without balancing."""
        return self.needs_loss or self.bias_update_rate > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityConfig:
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

    factor: float
    eval_factor: float | None = None
    drop: DropOrder = "probability"
    pad: bool = False

    def __post_init__(self) -> None:
        _finite("CapacityConfig", "factor", self.factor, positive=True)
        if self.eval_factor is not None:
            _finite("CapacityConfig", "eval_factor", self.eval_factor, positive=True)
        _one_of("CapacityConfig", "drop", self.drop, get_args(DropOrder))
        if not isinstance(self.pad, bool):
            raise ValueError(f"CapacityConfig.pad ({self.pad!r}) must be True or False")


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """One Mixture-of-Experts layer.

    Attributes:
        dim: model dim D of input and output.
        hidden_dim: hidden dim F of one expert.
        num_experts: number of routed experts E.
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
        capacity: token dropping; None = none.
        weights_on_input: multiply the experts' input by the routing weight instead of their
            output; needs top_k = 1 (Llama 4).
        latent_dim: experts work in this smaller dim: a shared down-projection before dispatch, an
            up-projection after combine (LatentMoE). Router and shared experts keep `dim`. 0 = off.
        activation: activation between the two expert matrices. Gated ones read 2F columns; "gelu"
            is the exact one, "geglu" has the tanh form.
        activation_limit: clamp of "clamped_swiglu" (gpt-oss: 7.0).
        activation_alpha: sigmoid slope of "clamped_swiglu" (gpt-oss: 1.702).
        fc1_bias: per-expert bias before the activation.
        fc2_bias: per-expert bias on the output; it is multiplied by the routing weight too.
        shared_hidden_dim: hidden dim of one shared expert; 0 = none.
        num_shared_experts: shared experts that every token passes; they are added.
        shared_gate: multiply each shared expert's output by sigmoid(x @ g) with its own g.
        balance: load balancing.

    Raises:
        ValueError: when a field or a combination of fields is not possible.
    """

    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    score_function: ScoreFunction = "softmax"
    score_order: ScoreOrder = "pre"
    normalize_weights: bool | None = None
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_experts: int = 2
    expert_bias: bool = False
    router_bias: bool = False
    router_dtype: RouterDtype = "float32"
    router_jitter: float = 0.0
    assignment: Assignment = "learned"
    capacity: CapacityConfig | None = None
    weights_on_input: bool = False
    latent_dim: int = 0
    activation: Activation = "swiglu"
    activation_limit: float = 7.0
    activation_alpha: float = 1.702
    fc1_bias: bool = False
    fc2_bias: bool = False
    shared_hidden_dim: int = 0
    num_shared_experts: int = 1
    shared_gate: bool = False
    balance: BalanceConfig = field(default_factory=BalanceConfig)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            _whole("MoEConfig", name, getattr(self, name), 1)
        for name in ("shared_hidden_dim", "latent_dim"):
            _whole("MoEConfig", name, getattr(self, name), 0)
        for name in ("routed_scaling_factor", "activation_limit", "activation_alpha"):
            _finite("MoEConfig", name, getattr(self, name), positive=True)
        _finite("MoEConfig", "router_jitter", self.router_jitter)
        for name, choices in _MOE_CHOICES.items():
            _one_of("MoEConfig", name, getattr(self, name), choices)
        if self.top_k > self.num_experts:
            raise ValueError(
                f"MoEConfig.top_k ({self.top_k}) must be <= num_experts ({self.num_experts}): "
                "lower top_k or add experts"
            )
        self._check_groups()
        self._check_scores()
        self._check_assignment()
        self._check_experts()
        self._check_balance()

    def _check_groups(self) -> None:
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"MoEConfig.num_groups ({self.num_groups}) must divide num_experts "
                f"({self.num_experts}): choose a divisor"
            )
        if self.top_groups > self.num_groups:
            raise ValueError(
                f"MoEConfig.top_groups ({self.top_groups}) must be <= num_groups "
                f"({self.num_groups}): lower top_groups"
            )
        experts_per_group = self.num_experts // self.num_groups
        if self.top_groups < self.num_groups and experts_per_group < self.group_experts:
            raise ValueError(
                f"MoEConfig.num_groups ({self.num_groups}) must leave >= group_experts "
                f"({self.group_experts}) of num_experts ({self.num_experts}) in a group, because "
                "groups are ranked by so many of their best: use fewer groups"
            )
        if self.top_groups == self.num_groups and self.group_experts != 2:
            raise ValueError(
                f"MoEConfig.group_experts ({self.group_experts}) must go with top_groups "
                f"({self.top_groups}) < num_groups ({self.num_groups}), where groups are ranked: "
                "drop it"
            )
        if self.top_k > self.top_groups * experts_per_group:
            raise ValueError(
                f"MoEConfig.top_k ({self.top_k}) must be <= the experts in top_groups "
                f"({self.top_groups} x {experts_per_group}): raise top_groups or lower top_k"
            )

    def _check_scores(self) -> None:
        if self.score_order == "post" and self.score_function != "softmax":
            raise ValueError(
                'MoEConfig.score_order ("post") must be "pre" with score_function '
                f'("{self.score_function}"), whose scores do not depend on the other experts: use '
                "score_order='pre'"
            )
        if self.score_order == "post" and self.normalize_weights is False:
            raise ValueError(
                'MoEConfig.normalize_weights (False) must be True with score_order ("post"): a '
                "softmax over the chosen logits always sums to 1, so drop normalize_weights=False"
            )
        if self.score_order == "post" and not self.normalizes:
            raise ValueError(
                f'MoEConfig.top_k ({self.top_k}) must be > 1 with score_order ("post") and '
                f"normalize_weights ({self.normalize_weights}): a softmax over one logit is always "
                'a weight of 1, from which the router learns nothing: use score_order="pre"'
            )
        if self.router_jitter >= 1:
            raise ValueError(
                f"MoEConfig.router_jitter ({self.router_jitter}) must be < 1, or factors turn "
                "negative: use about 0.01"
            )

    def _check_assignment(self) -> None:
        choice = self.assignment
        if choice in ("sinkhorn", "expert_choice"):
            for field_name, used in (
                ("expert_bias", self.expert_bias),
                ("top_groups < num_groups", self.top_groups < self.num_groups),
            ):
                if used:
                    raise ValueError(
                        f"MoEConfig.{field_name} (True) must be False with assignment "
                        f'("{choice}"), which evens the experts out itself: drop one of the two'
                    )
        if choice == "expert_choice" and self.capacity and self.capacity.drop != "probability":
            raise ValueError(
                f'MoEConfig.capacity.drop ("{self.capacity.drop}") must be "probability" with '
                'assignment ("expert_choice"), where experts take their best tokens: drop it'
            )
        if choice == "expert_choice" and self.score_order == "post":
            raise ValueError(
                'MoEConfig.score_order ("post") must be "pre" with assignment ("expert_choice"), '
                "because experts compare scores of different tokens: use score_order='pre'"
            )
        if choice == "expert_choice" and self.balance.needs_counts_loss:
            raise ValueError(
                'MoEConfig.balance must have no loss on counts with assignment ("expert_choice"), '
                "whose counts are always even: only z_loss_coef is possible"
            )

    def _check_experts(self) -> None:
        if self.weights_on_input and self.choices_per_token > 1:
            raise ValueError(
                "MoEConfig.weights_on_input (True) must go with one expert per token, not top_k "
                f'({self.top_k}) and assignment ("{self.assignment}"), because a token travels '
                "once: use top_k=1 and an assignment by tokens"
            )
        if self.latent_dim >= self.dim:
            raise ValueError(
                f"MoEConfig.latent_dim ({self.latent_dim}) must be < dim ({self.dim}): lower it, "
                "or use 0 for none"
            )
        for field_name, used in (
            ("shared_gate", self.shared_gate),
            ("num_shared_experts", self.num_shared_experts > 1),
        ):
            if used and not self.shared_hidden_dim:
                raise ValueError(
                    f"MoEConfig.{field_name} ({getattr(self, field_name)}) must go with "
                    "shared_hidden_dim (0) > 0: set shared_hidden_dim or drop it"
                )

    def _check_balance(self) -> None:
        balance = self.balance
        if balance.bias_update_rate and not self.expert_bias:
            raise ValueError(
                f"MoEConfig.balance.bias_update_rate ({balance.bias_update_rate}) must go "
                "with expert_bias (False) = True: set expert_bias=True"
            )
        if balance.bias_update == "quantile":
            for field_name, value, wanted in (
                ("score_function", self.score_function, "sigmoid"),
                ("assignment", self.assignment, "learned"),
                ("top_groups", self.top_groups, self.num_groups),
            ):
                if value != wanted:
                    raise ValueError(
                        f'MoEConfig.balance.bias_update ("quantile") must go with {field_name} '
                        f"({value!r}) = {wanted!r}, because it compares every token's best K + 1 "
                        'scores in [0, 1]: use bias_update="sign"'
                    )
            if self.top_k == self.num_experts:
                raise ValueError(
                    'MoEConfig.balance.bias_update ("quantile") must go with top_k '
                    f"({self.top_k}) < num_experts ({self.num_experts}): drop it"
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
    def expert_dim(self) -> int:
        """Dim of the routed experts' input and output: latent_dim, or dim without one."""
        return self.latent_dim or self.dim

    @property
    def counts_best_scores(self) -> bool:
        """Whether a balance loss counts best scores, because a bias or groups move the choice."""
        moved = self.expert_bias or self.top_groups < self.num_groups
        return moved and self.balance.needs_counts_loss

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


_COUNTS = (
    "dim",
    "hidden_dim",
    "num_experts",
    "top_k",
    "num_groups",
    "top_groups",
    "group_experts",
    "num_shared_experts",
)
_MOE_CHOICES: dict[str, tuple[str, ...]] = {
    "score_function": get_args(ScoreFunction),
    "score_order": get_args(ScoreOrder),
    "router_dtype": get_args(RouterDtype),
    "assignment": get_args(Assignment),
    "activation": get_args(Activation),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Parallel degrees of the dense and of the expert view of one world.

    World = pp * dp_replicate * dp_shard * cp * tp = pp * edp_replicate * edp_shard * ep * etp.
    Only `pp` must agree. -1 means "what is left" and may stand once in each view.

    Attributes:
        pp: pipeline stages, shared by both views.
        dp_replicate: data ranks that hold full copies of a dense shard (HSDP).
        dp_shard: data ranks over which dense parameters are sharded (FSDP2).
        cp: context parallel ranks; they too shard dense parameters.
        tp: tensor parallel ranks of attention and dense MLPs.
        edp_replicate: ranks that hold full copies of an expert shard.
        edp_shard: ranks over which one expert's parameters are sharded (FSDP2).
        ep: expert parallel ranks; each owns num_experts / ep experts.
        etp: expert tensor parallel ranks; each owns hidden_dim / etp of each expert.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    edp_replicate: int = 1
    edp_shard: int = -1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != -1):
                raise ValueError(
                    f"ParallelConfig.{f.name} ({value!r}) must be a whole number >= 1, "
                    "or -1 for what is left"
                )
        if self.pp == -1:
            raise ValueError(
                "ParallelConfig.pp (-1) must be given, because both views share it: use pp=1"
            )
        for view, names in (("dense", DENSE_DIMS), ("expert", EXPERT_DIMS)):
            open_names = [name for name in names if getattr(self, name) == -1]
            if len(open_names) > 1:
                raise ValueError(
                    f"ParallelConfig.{open_names[1]} (-1) must be given, because "
                    f"{open_names[0]} (-1) already takes what is left of the {view} view"
                )

    def resolve(self, world_size: int) -> ParallelConfig:
        """Return the same config with every -1 replaced, checked against the world size.

        Args:
            world_size: number of ranks.

        Raises:
            ValueError: when a view's degrees do not multiply to `world_size`.
        """
        updates: dict[str, int] = {}
        for view, names in (("dense", DENSE_DIMS), ("expert", EXPERT_DIMS)):
            degrees = {name: getattr(self, name) for name in names}
            given = 1
            for value in degrees.values():
                given *= max(value, 1)
            shown = " * ".join(f"{n}={v}" for n, v in degrees.items() if v != 1) or "1"
            if world_size % given:
                raise ValueError(
                    f"ParallelConfig {view} view ({shown} = {given}) must divide the world size "
                    f"({world_size}): change one of the degrees or the number of ranks"
                )
            open_names = [n for n, v in degrees.items() if v == -1]
            if open_names:
                updates[open_names[0]] = world_size // given
            elif given != world_size:
                raise ValueError(
                    f"ParallelConfig {view} view ({shown} = {given}) must equal the world size "
                    f"({world_size}): set one degree to -1 to take what is left"
                )
        return dataclasses.replace(self, **updates)


DENSE_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_DIMS = ("pp", "edp_replicate", "edp_shard", "ep", "etp")


def _whole(record: str, name: str, value: int, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(
            f"{record}.{name} ({value!r}) must be a whole number >= {minimum}: pass an int"
        )


def _finite(record: str, name: str, value: float, *, positive: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (positive and value == 0):
        relation = "> 0: keep the default if unsure" if positive else ">= 0: use 0.0 for none"
        raise ValueError(f"{record}.{name} ({value!r}) must be a finite number {relation}")


def _one_of(record: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        shown = ", ".join(repr(c) for c in choices)
        raise ValueError(f"{record}.{name} ({value!r}) must be one of {shown}: choose one")
