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

ScoreFunction = Literal["softmax", "sigmoid"]
ScoreOrder = Literal["pre", "post"]
Activation = Literal["swiglu", "geglu", "relu2", "clamped_swiglu"]
RouterDtype = Literal["float32", "float64"]
Assignment = Literal["learned", "balanced"]

GATED_ACTIVATIONS: tuple[Activation, ...] = ("swiglu", "geglu", "clamped_swiglu")


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceConfig:
    """How the load of the experts is kept even. All coefficients 0 means: not at all.

    The balance loss is `coef * E * sum_e(f_e * p_e)` with `f_e` the share of assignments that
    expert e got and `p_e` its mean score, so perfectly even routing gives exactly `coef`. The
    three scopes differ in the tokens over which `f_e` is counted, and may be mixed.

    Attributes:
        micro_batch_coef: `f_e` over the tokens of one data rank's micro-batch.
        sequence_coef: `f_e` per sequence (first dim of a [B, T, D] input); mean over sequences.
        global_batch_coef: `f_e` over all data ranks and the micro-batches so far in this step.
        z_loss_coef: times the mean over tokens of logsumexp(logits) squared.
        bias_update_rate: step of the aux-loss-free expert bias per optimizer step; 0 = no update.

    Source: Switch Transformer (arXiv:2101.03961), ST-MoE (arXiv:2202.08906), aux-loss-free
    balancing (arXiv:2408.15664), global-batch balancing (arXiv:2501.11873).
    """

    micro_batch_coef: float = 0.0
    sequence_coef: float = 0.0
    global_batch_coef: float = 0.0
    z_loss_coef: float = 0.0
    bias_update_rate: float = 0.0

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            _finite("BalanceConfig", f.name, getattr(self, f.name))

    @property
    def needs_loss(self) -> bool:
        """Whether any auxiliary loss reaches the gradient."""
        coefs = (self.micro_batch_coef, self.sequence_coef, self.global_batch_coef)
        return any(coefs) or self.z_loss_coef > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """One Mixture-of-Experts layer.

    Attributes:
        dim: model dim D of input and output.
        hidden_dim: hidden dim F of one expert.
        num_experts: number of routed experts E.
        top_k: experts per token K.
        score_function: how logits become scores.
        score_order: "pre" scores all experts and keeps the scores of the chosen; "post" applies
            the score function to the K chosen logits only.
        normalize_weights: divide the K weights of a token by their sum.
        routed_scaling_factor: factor on the routing weights, after normalisation.
        num_groups: experts are split into this many equal groups; 1 = no groups.
        top_groups: groups that a token may choose from, ranked by the sum of their two best
            selection scores (DeepSeek-V3).
        expert_bias: a per-expert buffer added to the scores for selection only, never to the
            weights. Follows the load when `balance.bias_update_rate` > 0.
        router_bias: a learned bias on the router logits.
        router_dtype: dtype of logits and scores, whatever the dtype of the input.
        assignment: "balanced" ignores the scores for selection and deals this rank's tokens out
            in turn, so that experts differ by at most one token per rank (for benchmarks);
            weights still come from the scores.
        activation: activation between the two expert matrices. Gated ones read 2F columns.
        activation_limit: clamp of "clamped_swiglu" (gpt-oss: 7.0).
        activation_alpha: sigmoid slope of "clamped_swiglu" (gpt-oss: 1.702).
        fc1_bias: per-expert bias before the activation.
        fc2_bias: per-expert bias on the output; it is multiplied by the routing weight too.
        shared_hidden_dim: hidden dim of the shared expert; 0 = none.
        shared_gate: multiply the shared expert's output by sigmoid(x @ g).
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
    normalize_weights: bool = True
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    expert_bias: bool = False
    router_bias: bool = False
    router_dtype: RouterDtype = "float32"
    assignment: Assignment = "learned"
    activation: Activation = "swiglu"
    activation_limit: float = 7.0
    activation_alpha: float = 1.702
    fc1_bias: bool = False
    fc2_bias: bool = False
    shared_hidden_dim: int = 0
    shared_gate: bool = False
    balance: BalanceConfig = field(default_factory=BalanceConfig)

    def __post_init__(self) -> None:
        for name in ("dim", "hidden_dim", "num_experts", "top_k", "num_groups", "top_groups"):
            _whole("MoEConfig", name, getattr(self, name), 1)
        _whole("MoEConfig", "shared_hidden_dim", self.shared_hidden_dim, 0)
        for name in ("routed_scaling_factor", "activation_limit", "activation_alpha"):
            _finite("MoEConfig", name, getattr(self, name), positive=True)
        for name, choices in _MOE_CHOICES.items():
            _one_of("MoEConfig", name, getattr(self, name), choices)
        if self.top_k > self.num_experts:
            raise ValueError(
                f"MoEConfig.top_k ({self.top_k}) must be <= num_experts ({self.num_experts}): "
                "lower top_k or add experts"
            )
        self._check_groups()
        if self.score_order == "post" and self.score_function == "sigmoid":
            raise ValueError(
                'MoEConfig.score_order ("post") must be "pre" with score_function ("sigmoid"): '
                "a sigmoid gives the same weights in either order, so use score_order='pre'"
            )
        if self.score_order == "post" and not self.normalize_weights:
            raise ValueError(
                'MoEConfig.normalize_weights (False) must be True with score_order ("post"): a '
                "softmax over the chosen logits always sums to 1, so drop normalize_weights=False"
            )
        if self.shared_gate and not self.shared_hidden_dim:
            raise ValueError(
                "MoEConfig.shared_gate (True) must go with shared_hidden_dim (0) > 0: "
                "set shared_hidden_dim or drop the gate"
            )
        if self.balance.bias_update_rate and not self.expert_bias:
            raise ValueError(
                f"MoEConfig.balance.bias_update_rate ({self.balance.bias_update_rate}) must go "
                "with expert_bias (False) = True: set expert_bias=True"
            )

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
        if self.top_groups < self.num_groups and experts_per_group < 2:
            raise ValueError(
                f"MoEConfig.num_groups ({self.num_groups}) must leave >= 2 of num_experts "
                f"({self.num_experts}) in a group, because groups are ranked by their two best: "
                "use fewer groups"
            )
        if self.top_k > self.top_groups * experts_per_group:
            raise ValueError(
                f"MoEConfig.top_k ({self.top_k}) must be <= the experts in top_groups "
                f"({self.top_groups} x {experts_per_group}): raise top_groups or lower top_k"
            )

    @property
    def gated(self) -> bool:
        """Whether FC1 gives a gate and an up half (2F columns)."""
        return self.activation in GATED_ACTIVATIONS

    @property
    def fc1_dim(self) -> int:
        """Columns of FC1: 2F for gated activations, else F."""
        return self.hidden_dim * (2 if self.gated else 1)


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
