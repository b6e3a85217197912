"""Upcycling: convert a trained dense MLP to an MoE layer with the same output at step 0.

Legend: D model dim, F hidden dim of the dense MLP, G shards of it, f = F / G hidden dim of one
expert, X expansion (copies of each shard), E = X * G experts, T active experts of a token.

    w1 [F, D] -> G shards [f, D] -> X copies of each -> [X * G, f, D]

Note [virtual groups]. Experts j * G .. j * G + G - 1 are virtual group j: one copy of each shard,
in order. Its router rows are equal, so its members have equal scores, and E scores are ranked by
(score, greatest first; id, lowest first): the order is one full group after another, also if
two groups tie, because members are neighbours and the lower id wins a tie. With T a multiple of
G the first T are full groups. Example, X2 G2 T2, scores [.3 .3 .3 .3]: order 0 1 2 3, group 0 is
chosen; had the shards' copies been neighbours (ids 0 and 1 both shard 0), the second shard would
be missing. Equal rows gave bitwise equal logits in every size tried on a CPU with E a multiple of
4; otherwise a matrix product may sum its last columns in another order, and a token whose best
groups differ by less than that rounding (about 1e-7 of a logit) may get shards of both. Sinkhorn's
iterations keep equal columns equal.

Note [scale]. The members of group j have equal weights w_j, and the group's shards sum to the
dense output y, so the layer gives sum_j w_j * y over the T / G chosen groups. The weights of all T
sum to S = G * sum_j w_j, so FC2 is multiplied by G / S. FC2 and later operations are linear: this
is exact for every activation, and in any dtype if G / S is a power of two (otherwise FC2 is rounded
once). S with s = routed_scaling_factor:

    normalised or "post", any scores        s
    softmax over all, not normalised        s * T / E, for logits near 0
    sigmoid, sqrtsoftplus, not normalised   s * T * score(0), for logits near 0

With softmax G / S is X * G^2 / (T * s), the factor of the paper. The last two hold only for scores
that do not differ, so there the router starts with logits of about `UNIFORM_LOGIT_STD`: enough to
rank experts, too small to change a weight by more than 3e-6. The FC2 bias of an expert is
multiplied by its weight as well; each of the T active experts has b2 / S, so that they sum to b2.

Source: sparse upcycling (arXiv:2212.05055); virtual groups and weight scaling (arXiv:2410.07524).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moecore.base.fields import Bound, CheckedRecord, Count, FieldErrors, check_arguments
from moecore.base.options.layer import MoEConfig
from moecore.base.params import init_normal_

ROUTER_STD = 0.02
UNIFORM_LOGIT_STD = 5e-7  # std of a logit, for tokens of mean square 1: see Note [scale]
KEEPS_GROUPS = ("learned", "sinkhorn")  # assignments, see Note [virtual groups]
NAME = re.compile(r"E(?P<expansion>\d+)G(?P<granularity>\d+)T(?P<top_k>\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpcycleOptions(CheckedRecord):
    """Number and size of the experts that a dense MLP becomes: E{expansion}G{granularity}T{top_k}.

    Attributes:
        expansion: copies X of each shard; the layer has X times the weights of the dense MLP.
        granularity: shards G of the dense MLP, split along its hidden dim; 1 = no split.
        top_k: active experts T of a token, a multiple of G; T = G has the FLOPs of the dense MLP.
        router_std: std of the router's weights; None = 0.02, or the largest std with which the
            layer gives the dense output, see Note [scale].
        seed: seed of the router's weights; all other weights are computed from dense weights.
    """

    expansion: Count
    granularity: Count
    top_k: Count
    router_std: Annotated[float, Bound(">", 0), "use None for the default"] | None = None
    seed: Annotated[int, Bound("<", 2**64)] = 0

    def _find_field_errors(self) -> FieldErrors:
        if self.top_k % self.granularity:
            yield (
                "top_k",
                f"be a multiple of granularity ({self.granularity}), because only all shards "
                "together give the dense output: use "
                f"{-(-self.top_k // self.granularity) * self.granularity}",
            )
        if self.top_k > self.num_experts:
            yield (
                "top_k",
                f"be <= expansion * granularity ({self.num_experts}): lower top_k or raise "
                "expansion",
            )

    @classmethod
    def parse(cls, name: str, *, router_std: float | None = None, seed: int = 0) -> UpcycleOptions:
        """Parse a name such as "E8G2T4" to options; raise ValueError for other names."""
        match = NAME.fullmatch(name)
        if match is None:
            raise ValueError(f'upcycling name ({name!r}) must have the form "E8G2T4": write it so')
        sizes = {name: int(number) for name, number in match.groupdict().items()}
        return cls(**sizes, router_std=router_std, seed=seed)

    @property
    def num_experts(self) -> int:
        """Number of experts in a layer."""
        return self.expansion * self.granularity

    def moe_config(self, *, dim: Count, hidden_dim: Count, **moe_fields: Any) -> MoEConfig:
        """Return the config of the MoE layer; ValueError if its output cannot equal the MLP's."""
        check_arguments(UpcycleOptions.moe_config, locals())
        if hidden_dim % self.granularity:
            raise ValueError(
                f"UpcycleOptions.granularity ({self.granularity}) must divide the dense hidden dim "
                f"({hidden_dim}): choose a divisor"
            )
        config = MoEConfig(
            dim=dim,
            hidden_dim=hidden_dim // self.granularity,
            num_experts=self.num_experts,
            top_k=self.top_k,
            **moe_fields,
        )
        check_upcycle(config, self)
        return config


def check_upcycle(config: MoEConfig, options: UpcycleOptions) -> None:
    """Raise ValueError if an MoE layer with this config cannot reproduce a dense MLP's output."""
    for name, expected_value in (("num_experts", options.num_experts), ("top_k", options.top_k)):
        if getattr(config, name) != expected_value:
            raise ValueError(
                f"MoEConfig.{name} ({getattr(config, name)}) must be the {expected_value} of "
                f"E{options.expansion}G{options.granularity}T{options.top_k}: use "
                "UpcycleOptions.moe_config"
            )
    for name, value, reason in (
        ("shared_hidden_dim", config.shared_hidden_dim, "a shared expert adds to the dense output"),
        ("latent_dim", config.latent_dim, "a smaller dim can not carry the dense output"),
        (
            "capacity",
            config.capacity,
            "dropped tokens lose the dense output; upcycle without it and load the same weights "
            "into a model that has it",
        ),
    ):
        if value:
            raise ValueError(
                f"MoEConfig.{name} ({value}) must be off for upcycling, because {reason}: drop it"
            )
    if config.assignment not in KEEPS_GROUPS:
        raise ValueError(
            f'MoEConfig.assignment ("{config.assignment}") must be one of {KEEPS_GROUPS} for '
            'upcycling, because others split virtual groups: upcycle with "learned" and load the '
            "same weights into a model that has it"
        )
    if config.top_groups < config.num_groups and options.expansion % config.num_groups:
        raise ValueError(
            f"MoEConfig.num_groups ({config.num_groups}) must divide UpcycleOptions.expansion "
            f"({options.expansion}), so that no group limit splits a virtual group: use a divisor"
        )
    if config.weights_on_input and compute_weight_sum(config) != 1:
        raise ValueError(
            f"MoEConfig.weights_on_input (True) must go with routing weights of 1, not "
            f"{compute_weight_sum(config):g}, because the activation is not linear: use "
            "normalize_weights=True and routed_scaling_factor=1"
        )
    _choose_router_std(config, options)


def compute_weight_sum(config: MoEConfig) -> float:
    """Return the sum of a token's routing weights at step 0, when all logits are about 0."""
    K, s = config.top_k, config.routed_scaling_factor
    if config.normalizes:
        return s
    zero_scores = {
        "softmax": 1 / config.num_experts,
        "sigmoid": 0.5,
        "sqrtsoftplus": math.sqrt(math.log(2)),
    }
    return s * K * zero_scores[config.score_function]


def upcycle_mlp(
    dense: Mapping[str, Tensor], *, config: MoEConfig, options: UpcycleOptions, layer_name: str
) -> dict[str, Tensor]:
    """Convert a dense MLP's tensors to the tensors of an MoE layer with the same output at step 0.

    Args:
        dense: with hidden dim F and model dim D, "w1" [2, F, D] (gate, then up), or [F, D] without
            a gate; "w2" [D, F]; and "b1" [2, F] or [F] and "b2" [D] if `config` has `fc1_bias` and
            `fc2_bias`. Unsharded tensors of one dtype on one device.
        config: the layer, from `UpcycleOptions.moe_config`.
        options: number and size of the experts.
        layer_name: name of the layer in its model; layers of equal names have equal routers.

    Returns:
        New tensors with the names of a `MoELayer`, equal on every rank.

    Raises:
        ValueError: if a tensor is missing, sharded, on meta or has a wrong shape, or if the layer
            cannot reproduce the dense output.
    """
    check_arguments(upcycle_mlp, locals())
    check_upcycle(config, options)
    _check_dense(dense, config, options, layer_name)
    X, G = options.expansion, options.granularity
    w1, w2_DF = dense["w1"], dense["w2"]
    scale = G / compute_weight_sum(config)  # as a Python number, so torch rounds once
    w2_GDf = w2_DF.unflatten(1, (G, -1)).movedim(1, 0)
    tensors = {
        "router.weight": _sample_router_rows(config, options, layer_name, like=w1),
        "experts.w1": _repeat_shards(_split_shards(w1, w1.ndim - 2, G), X),
        "experts.w2": _repeat_shards(w2_GDf, X) * scale,
    }
    if config.fc1_bias:
        shards_G = _split_shards(dense["b1"], dense["b1"].ndim - 1, G)
        tensors["experts.b1"] = _repeat_shards(shards_G, X)
    if config.fc2_bias:
        tensors["experts.b2"] = _repeat_shards(dense["b2"].expand(G, -1), X) * (scale / G)
    if config.router_bias:
        tensors["router.bias"] = w1.new_zeros(config.num_experts)
    if config.expert_bias:
        tensors["router.expert_bias"] = w1.new_zeros(config.num_experts, dtype=torch.float32)
    return tensors


def _split_shards(w: Tensor, dim: int, G: int) -> Tensor:
    """Split `dim` (hidden dim F) in G shards, which become dim 0: [2, F, D] to [G, 2, F / G, D]."""
    shards_G: Tensor = w.unflatten(dim, (G, -1)).movedim(dim, 0)
    return shards_G


def _repeat_shards(w_Gx: Tensor, X: int) -> Tensor:
    """Repeat G shards [G, ...] X times along dim 0; expert j * G + g then has shard g."""
    return w_Gx.detach().repeat(X, *([1] * (w_Gx.ndim - 1)))


def _sample_router_rows(
    config: MoEConfig, options: UpcycleOptions, layer_name: str, *, like: Tensor
) -> Tensor:
    """Return a random router weight [experts, model dim] like `like`, equal in virtual groups."""
    std = _choose_router_std(config, options)
    if std < torch.finfo(like.dtype).tiny:
        raise ValueError(
            f"router std ({std:.1e}) of {layer_name} must be a normal number of its dtype "
            f"({like.dtype}): convert the dense weights to torch.bfloat16 or torch.float32"
        )
    rows_XD = torch.empty(options.expansion, config.dim, dtype=torch.float32, device="cpu")
    init_normal_(rows_XD, std=std, key=f"{layer_name}.router.weight", seed=options.seed)
    return rows_XD.to(like).repeat_interleave(options.granularity, dim=0)


def _choose_router_std(config: MoEConfig, options: UpcycleOptions) -> float:
    """Return the router weights' std; raise ValueError if `options.router_std` changes outputs."""
    selects_all = config.score_function == "softmax" and config.top_k == config.num_experts
    if config.normalizes or selects_all:
        return ROUTER_STD if options.router_std is None else options.router_std
    max_std = UNIFORM_LOGIT_STD / math.sqrt(config.dim)
    if options.router_std is not None and options.router_std > max_std:
        raise ValueError(
            f"UpcycleOptions.router_std ({options.router_std}) must be <= {max_std:.1e} with "
            "MoEConfig.normalize_weights (False), where scores that differ change the output: use "
            "None, or normalize_weights=True"
        )
    return max_std if options.router_std is None else options.router_std


def _check_dense(
    dense: Mapping[str, Tensor], config: MoEConfig, options: UpcycleOptions, layer_name: str
) -> None:
    """Raise ValueError if the dense MLP's tensors have wrong names or shapes, or are sharded."""
    D, F = config.dim, config.hidden_dim * options.granularity
    columns = (2, F) if config.gated else (F,)
    shapes: dict[str, tuple[int, ...]] = {"w1": (*columns, D), "w2": (D, F)}
    if config.fc1_bias:
        shapes["b1"] = columns
    if config.fc2_bias:
        shapes["b2"] = (D,)
    if dense.keys() != shapes.keys():
        raise ValueError(
            f"dense weights {sorted(dense)} of {layer_name} must be {sorted(shapes)}, as "
            "MoEConfig's activation and biases say: match the two"
        )
    for name, tensor in dense.items():
        if isinstance(tensor, DTensor) or tensor.is_meta:
            kind = "a DTensor" if isinstance(tensor, DTensor) else "on meta"
            raise ValueError(
                f"dense weight {name} ({kind}) of {layer_name} must be a whole tensor with values: "
                "upcycle after loading and before parallelizing"
            )
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"dense weight {name} {tuple(tensor.shape)} of {layer_name} must have the shape "
                f"{shapes[name]} that MoEConfig and UpcycleOptions give: use "
                "UpcycleOptions.moe_config with the dense MLP's dims"
            )
