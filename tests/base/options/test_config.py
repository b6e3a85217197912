"""Every rule of the three records: a one-line ValueError that names field, value and relation.

Values of a wrong type are those of `tests/base/test_fields.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from moecore import BalanceConfig, IndexerConfig, MoEConfig, ParallelConfig
from moecore.base.options.dispatch import NVLinkOptions
from moecore.base.options.layer import CapacityConfig

LAYER: dict[str, Any] = dict(dim=64, hidden_dim=32, num_experts=8, top_k=2)


def error_of(make: Callable[..., object], *args: Any, **fields: Any) -> str:
    with pytest.raises(ValueError) as caught:
        make(*args, **fields)
    message = str(caught.value)
    assert "\n" not in message
    return message


GROUPS, POST = {"num_groups": 4, "top_groups": 2}, {"score_order": "post"}
CHOICE, SINKHORN = {"assignment": "expert_choice"}, {"assignment": "sinkhorn"}
BIAS, SEQUENCE = BalanceConfig(bias_update_rate=0.5), BalanceConfig(sequence_coef=0.1)
POSITION = CapacityConfig(factor=1.0, drop="position")
# Each case: the fields, and every piece that the message must name.
RELATIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({"top_k": 9}, ["top_k (9)", "num_experts (8)"]),
    ({"top_k": 12, "zero_experts": 3}, ["top_k (12)", "num_experts + zero_experts (11)"]),
    ({"num_groups": 3}, ["num_groups (3)", "num_experts (8)"]),
    ({"num_groups": 4, "top_groups": 5}, ["top_groups (5)", "num_groups (4)"]),
    ({"num_groups": 8, "top_groups": 4}, ["num_groups (8)", "num_experts (8)", "2"]),
    ({"num_groups": 4, "top_groups": 1, "top_k": 3}, ["top_k (3)", "top_groups (1 x 2)"]),
    (GROUPS | {"group_experts": 3}, ["num_groups (4)", "group_experts (3)", "num_experts (8)"]),
    ({"group_experts": 3}, ["group_experts (3)", "top_groups (1)", "num_groups (1)"]),
    ({"routed_scaling_factor": 0.0}, ["routed_scaling_factor (0.0)", "> 0"]),
    ({"routed_scaling_factor": float("nan")}, ["routed_scaling_factor (nan)", "> 0"]),
    ({"router_jitter": 1.0}, ["router_jitter (1.0)", "< 1"]),
    ({"shared_gate": True}, ["shared_gate (True)", "shared_hidden_dim (0)"]),
    ({"num_shared_experts": 2}, ["num_shared_experts (2)", "shared_hidden_dim (0)"]),
    ({"balance": BIAS}, ["balance.bias_update_rate (0.5)", "expert_bias (False)"]),
    ({"activation": "clamped_swiglu", "activation_limit": -7.0}, ["activation_limit (-7.0)"]),
    ({"activation_up_limit": 25.0}, ["activation_up_limit (25.0)", "activation ('swiglu')"]),
    (POST | {"score_function": "sqrtsoftplus"}, ["score_order ('post')", "('sqrtsoftplus')"]),
    (POST | {"top_k": 1}, ["top_k (1)", "score_order ('post')", "normalize_weights (None)"]),
    (POST | {"normalize_weights": False}, ["normalize_weights (False)", "score_order ('post')"]),
    (SINKHORN | {"expert_bias": True}, ["expert_bias (True)", "assignment ('sinkhorn')"]),
    (CHOICE | GROUPS, ["top_groups (2)", "num_groups (4)", "assignment ('expert_choice')"]),
    (CHOICE | POST, ["score_order ('post')", "assignment ('expert_choice')"]),
    (CHOICE | {"balance": SEQUENCE}, ["balance", "assignment ('expert_choice')", "z_loss_coef"]),
    (CHOICE | {"capacity": POSITION}, ["capacity.drop ('position')", "('expert_choice')"]),
    ({"weights_on_input": True}, ["weights_on_input (True)", "top_k (2)"]),
    (CHOICE | {"weights_on_input": True, "top_k": 1}, ["weights_on_input (True)", "'expert_choi"]),
    ({"latent_dim": 64}, ["latent_dim (64)", "dim (64)"]),
    ({"latent_norm_eps": 1e-6}, ["latent_norm_eps (1e-06)", "latent_dim"]),
]
QUANTILE: dict[str, Any] = dict(
    score_function="sigmoid",
    expert_bias=True,
    balance=BalanceConfig(bias_update_rate=1.0, bias_update="quantile"),
)
RELATIONS += [
    (QUANTILE | fields, ["balance.bias_update ('quantile')", *pieces])
    for fields, pieces in (
        ({"score_function": "softmax"}, ["score_function ('softmax') = 'sigmoid'"]),
        ({"score_function": "sqrtsoftplus"}, ["score_function ('sqrtsoftplus') = 'sigmoid'"]),
        ({"num_groups": 4, "top_groups": 2}, ["top_groups (2) = 4"]),
        ({"top_k": 8}, ["top_k (8)", "num_experts (8)"]),
    )
]
RELATIONS += [(QUANTILE | {"expert_bias": False}, ["bias_update_rate (1.0)", "expert_bias"])]
SHARE = "BalanceConfig.bias_update_rate ({}) must lie in (0, 1]"
OTHERS: list[tuple[type, dict[str, Any], list[str]]] = [
    *(
        (
            BalanceConfig,
            {"bias_update": "quantile", "bias_update_rate": rate},
            [SHARE.format(rate), 'bias_update ("quantile")'],
        )
        for rate in (0.0, 1.5)
    ),
    (BalanceConfig, {"bias_per_micro_batch": True}, ["(True) must go with bias_update ('sign')"]),
    (IndexerConfig, {"stage": "warm_up", "fp8_scores": True}, ["fp8_scores (True)", "('warm_up')"]),
    (ParallelConfig, {"tp": -1}, ["ParallelConfig.tp (-1)", "dp_shard (-1)"]),
    (ParallelConfig, {"dp_replicate": -1}, ["Config.dp_shard (-1)", "dp_replicate (-1)"]),
    (ParallelConfig, {"cp": -1, "tp": -1, "dp_shard": 1}, ["ParallelConfig.tp (-1)", "cp (-1)"]),
    (ParallelConfig, {"ep": -1}, ["ParallelConfig.ep (-1)", "edp_shard (-1)"]),
    (ParallelConfig, {"etp": -1, "ep": -1, "edp_shard": 2}, ["Config.etp (-1)", " ep (-1)"]),
]


@pytest.mark.parametrize(
    ("record", "fields", "pieces"),
    [(MoEConfig, LAYER | fields, pieces) for fields, pieces in RELATIONS] + OTHERS,
    ids=str,
)
def test_relations_name_both_sides_and_the_fix(record, fields, pieces) -> None:
    message = error_of(record, **fields)
    assert message.startswith(f"{record.__name__}.")
    for piece in pieces:
        assert piece in message
    assert ": " in message, "the fix follows the relation"


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 8},
        {"num_groups": 8, "top_groups": 8},
        {"num_groups": 4, "top_groups": 1, "top_k": 2},
        {"num_groups": 4, "top_groups": 4, "top_k": 8},
        {"num_experts": 1, "top_k": 1},
        {"score_order": "post"},
        {"shared_hidden_dim": 16, "shared_gate": True},
        {"expert_bias": True, "balance": BalanceConfig(bias_update_rate=1e-3)},
        {"num_groups": 4, "top_groups": 2, "group_experts": 2},
        {"num_groups": 8, "top_groups": 8, "group_experts": 2},
        {"router_jitter": 0.99},
        {"assignment": "expert_choice", "balance": BalanceConfig(z_loss_coef=0.1)},
        {"assignment": "sinkhorn", "num_groups": 4, "top_groups": 4},
        {"weights_on_input": True, "top_k": 1},
        {"latent_dim": 63},
        {"num_shared_experts": 2, "shared_hidden_dim": 16},
        {"capacity": CapacityConfig(factor=0.5)},
        QUANTILE | {"top_k": 7},
    ],
    ids=str,
)
def test_the_edge_of_each_rule_is_allowed(fields: dict[str, Any]) -> None:
    MoEConfig(**{**LAYER, **fields})


def test_numbers_that_follow() -> None:
    config = MoEConfig(**LAYER)
    assert (config.fc1_dim, config.expert_dim, config.choices_per_token) == (64, 64, 2)
    config = MoEConfig(**LAYER, activation="relu2", latent_dim=16, assignment="expert_choice")
    assert (config.fc1_dim, config.expert_dim, config.choices_per_token) == (32, 16, 8)
    assert BalanceConfig(z_loss_coef=0.1, bias_update_rate=0.1).needs_loss
    assert not BalanceConfig(z_loss_coef=0.1, bias_update_rate=0.1).needs_counts_loss
    for name in ("micro_batch_coef", "sequence_coef", "global_batch_coef"):
        assert BalanceConfig(**{name: 0.1}).needs_counts_loss


# Of each kind of bound the first number outside.
OUTSIDE: list[tuple[type, str, float, str]] = [
    *((MoEConfig, name, 0, ">= 1") for name in ("dim", "hidden_dim", "num_experts", "top_k")),
    *((MoEConfig, name, 0, ">= 1") for name in ("num_groups", "group_experts")),
    *((MoEConfig, name, -1, ">= 0") for name in ("shared_hidden_dim", "latent_dim")),
    (MoEConfig, "router_jitter", -0.1, ">= 0"),
    *((CapacityConfig, name, 0.0, "> 0") for name in ("factor", "eval_factor")),
    *((BalanceConfig, name, -0.1, ">= 0") for name in ("sequence_coef", "z_loss_coef")),
    (NVLinkOptions, "max_tokens", 0, ">= 1 or None"),
    *((NVLinkOptions, name, 0.0, "> 0") for name in ("row_factor", "timeout_s")),
    (NVLinkOptions, "timeout_s", float("inf"), "a finite number > 0"),
    *((ParallelConfig, f.name, 0, ">= 1") for f in dataclasses.fields(ParallelConfig)),
    (ParallelConfig, "pp", -1, ">= 1"),
]


@pytest.mark.parametrize(("record", "name", "value", "relation"), OUTSIDE)
def test_numbers_outside_of_bounds(record: type, name: str, value: float, relation: str) -> None:
    valid = {MoEConfig: LAYER, CapacityConfig: {"factor": 1.0}}.get(record, {})
    message = error_of(record, **{**valid, name: value})
    assert f"{record.__name__}.{name} ({value})" in message and relation in message


DEGREES = [f.name for f in dataclasses.fields(ParallelConfig)]


@pytest.mark.parametrize("name", [n for n in DEGREES if n != "pp"])
def test_resolve_fills_the_open_degree(name: str) -> None:
    other = "edp_shard" if name in ("dp_replicate", "dp_shard", "cp", "tp") else "dp_shard"
    fields = {"dp_shard": 1, "edp_shard": 1, name: -1, other: -1}
    resolved = ParallelConfig(**fields).resolve(12)
    assert getattr(resolved, name) == 12 and -1 not in dataclasses.astuple(resolved)


def test_resolve_divides_by_what_is_given() -> None:
    p = ParallelConfig(pp=4, cp=2, tp=4, ep=64).resolve(256)
    assert (p.dp_shard, p.edp_shard) == (8, 1) and p.resolve(256) == p
    assert ParallelConfig().resolve(1) == ParallelConfig(dp_shard=1, edp_shard=1)


@pytest.mark.parametrize(
    ("fields", "pieces"),
    [
        ({"tp": 3}, ["dense view", "tp=3", "divide", "world size (8)"]),
        ({"ep": 3}, ["expert view", "ep=3", "divide", "world size (8)"]),
        ({"tp": 16}, ["dense view", "tp=16", "divide", "world size (8)"]),
        ({"dp_shard": 4, "edp_shard": 8}, ["dense view", "dp_shard=4", "equal", "world size (8)"]),
        ({"dp_shard": 8, "edp_shard": 2}, ["expert view", "edp_shard=2", "equal", "(8)"]),
        ({"dp_shard": 1, "edp_shard": 8}, ["dense view", "equal", "world size (8)"]),
        ({"pp": 2, "ep": 8}, ["expert view", "pp=2", "ep=8", "16", "world size (8)"]),
    ],
    ids=str,
)
def test_resolve_names_the_view_that_does_not_fit(fields, pieces) -> None:
    message = error_of(ParallelConfig(**fields).resolve, 8)
    for piece in pieces:
        assert piece in message
