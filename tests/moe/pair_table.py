"""The options of a layer as a table, and few configs in which every valid pair of values occurs.

The first value of an option is neutral: it goes with every value of every other option. So a pair
that a config refuses beside neutral values is refused by a rule between these two.
"""

import zlib
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import Any

from moecore import BalanceConfig, MoEConfig
from moecore.base.options.layer import CapacityConfig

Choice = dict[str, str]  # option -> value
Pair = tuple[tuple[str, str], tuple[str, str]]

SIZES: dict[str, Any] = dict(dim=32, hidden_dim=16, num_experts=8)
# Fields of MoEConfig, and of BalanceConfig after a dot; {} where the value is about the run.
TABLE: dict[str, dict[str, dict[str, Any]]] = {
    "assignment": {
        "learned": {},
        "sinkhorn": {"assignment": "sinkhorn"},
        "expert_choice": {"assignment": "expert_choice"},
    },
    "zero_experts": {"none": {}, "3": {"zero_experts": 3}},
    "top_k": {"1": {"top_k": 1}, "2": {"top_k": 2}, "8": {"top_k": 8}},
    "scores": {
        "sigmoid": {"score_function": "sigmoid"},
        "softmax": {},
        "softmax-post": {"score_order": "post"},
        "sqrtsoftplus": {"score_function": "sqrtsoftplus"},
    },
    "normalize": {"yes": {"normalize_weights": True}, "no": {"normalize_weights": False}},
    "scaling": {"1": {}, "2.5": {"routed_scaling_factor": 2.5}},
    "groups": {
        "none": {},
        "2 of 4 by 1": {"num_groups": 4, "top_groups": 2, "group_experts": 1},
        "2 of 4 by 2": {"num_groups": 4, "top_groups": 2},
        "1 of 2 by 3": {"num_groups": 2, "top_groups": 1, "group_experts": 3},
    },
    "bias": {
        "none": {},
        "fixed": {"expert_bias": True},
        "sign": {"expert_bias": True, ".bias_update_rate": 0.01},
        "quantile": {"expert_bias": True, ".bias_update_rate": 1.0, ".bias_update": "quantile"},
        "quantile per micro-batch": {
            "expert_bias": True,
            ".bias_update_rate": 1.0,
            ".bias_update": "quantile",
            ".bias_per_micro_batch": True,
        },
    },
    "router_bias": {"no": {}, "yes": {"router_bias": True}},
    "router_dtype": {"32": {}, "64": {"router_dtype": "float64"}},
    "jitter": {"no": {}, "yes": {"router_jitter": 0.2}},
    "capacity": {
        "none": {},
        "probability": {"capacity": CapacityConfig(factor=0.8, eval_factor=0.5)},
        "position": {"capacity": CapacityConfig(factor=0.8, drop="position")},
        "pad": {"capacity": CapacityConfig(factor=0.8, pad=True)},
    },
    "weights_on_input": {"no": {}, "yes": {"weights_on_input": True}},
    "latent": {"no": {}, "yes": {"latent_dim": 16}},
    "activation": {
        "swiglu": {},
        "geglu": {"activation": "geglu"},
        "clamped_swiglu": {"activation": "clamped_swiglu", "activation_limit": 1.0},
        "limited_swiglu": {"activation": "limited_swiglu", "activation_limit": 0.5},
        "situ_glu": {"activation": "situ_glu", "activation_limit": 0.5, "activation_up_limit": 1.0},
        "gelu": {"activation": "gelu"},
        "relu": {"activation": "relu"},
        "relu2": {"activation": "relu2"},
        "silu": {"activation": "silu"},
    },
    "expert_biases": {
        "none": {},
        "fc1": {"fc1_bias": True},
        "fc2": {"fc2_bias": True},
        "both": {"fc1_bias": True, "fc2_bias": True},
    },
    "shared": {
        "none": {},
        "one": {"shared_hidden_dim": 12},
        "one gate": {"shared_hidden_dim": 12, "shared_gate": True},
        "two": {"shared_hidden_dim": 12, "num_shared_experts": 2},
        "two gates": {"shared_hidden_dim": 12, "num_shared_experts": 2, "shared_gate": True},
    },
    "loss": {
        "none": {},
        "micro_batch": {".micro_batch_coef": 0.5},
        "sequence": {".sequence_coef": 0.5},
        "global_batch": {".global_batch_coef": 0.5},
        "z": {".z_loss_coef": 0.1},
    },
    "padding": {"no": {}, "yes": {}},
    "recompute": {"no": {}, "plain": {}, "reentrant": {}},
    "backend": {"torch": {}, "sequential": {}},
    "folding": {"ep2-etp2": {}, "ep4": {}},
}
# What a message may call an option, where it is not the option's own name.
NAMES = {
    "scores": ("score_function", "score_order"),
    "normalize": ("normalize_weights",),
    "groups": ("top_groups", "num_groups"),
    "bias": ("expert_bias", "bias_update"),
    "loss": ("balance",),
}


def neutral() -> Choice:
    """The first value of every option."""
    return {option: next(iter(values)) for option, values in TABLE.items()}


def config_of(choice: Choice) -> MoEConfig:
    """Return the config of a choice, or raise ValueError; options left out are neutral."""
    fields: dict[str, Any] = {}
    for option, value in (neutral() | choice).items():
        fields |= TABLE[option][value]
    balance = {name[1:]: value for name, value in fields.items() if name[0] == "."}
    layer = {name: value for name, value in fields.items() if name[0] != "."}
    return MoEConfig(**SIZES, **layer, balance=BalanceConfig(**balance))


def all_pairs() -> Iterator[Pair]:
    """Every two values of different options, in the order of the table."""
    for a, b in combinations(TABLE, 2):
        for va in TABLE[a]:
            for vb in TABLE[b]:
                yield (a, va), (b, vb)


@cache
def refusals() -> dict[Pair, str]:
    """Pair -> the message with which a config of these two values is refused."""
    found = {}
    for pair in all_pairs():
        try:
            config_of(dict(pair))
        except ValueError as error:
            found[pair] = str(error)
    return found


@cache
def covering_choices() -> list[Choice]:
    """Complete choices in which every valid pair occurs; the same list in every process.

    Greedy: the first open pair, then option after option the value that closes most open pairs.
    """
    order = list(TABLE)
    place = {option: i for i, option in enumerate(order)}
    refused = refusals()
    open_pairs = {pair: None for pair in all_pairs() if pair not in refused}

    def pair_of(a: tuple[str, str], b: tuple[str, str]) -> Pair:
        return (a, b) if place[a[0]] < place[b[0]] else (b, a)

    choices: list[Choice] = []
    while open_pairs:
        choice: Choice = dict(next(iter(open_pairs)))
        for option in sorted(order, key=lambda o: (-len(TABLE[o]), place[o])):
            if option in choice:
                continue
            best, best_gain = "", (-1, 0)
            for value in TABLE[option]:
                pairs = [pair_of((option, value), other) for other in choice.items()]
                if any(pair in refused for pair in pairs):
                    continue
                # Among equals a value that looks random: always the first would repeat configs.
                noise = zlib.crc32(f"{len(choices)} {option} {value}".encode())
                gain = (sum(pair in open_pairs for pair in pairs), noise)
                if gain > best_gain:
                    best, best_gain = value, gain
            choice[option] = best
        choice = {option: choice[option] for option in order}
        choices.append(choice)
        for pair in combinations(choice.items(), 2):
            open_pairs.pop(pair, None)
    return choices


def name_of(choice: Choice) -> str:
    """What differs from the neutral choice."""
    default = neutral()
    return ",".join(f"{o}={v}" for o, v in choice.items() if v != default[o])
