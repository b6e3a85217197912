"""Hyperparameters of optimizers: which ones a checkpoint has, and whether they fit others.

A parameter belongs to one optimizer at most, so the state of several needs no names of theirs: they
are stored as one whose groups follow each other, with the class of each group. How groups of one
class are spread over optimizers decides about nothing, and is not stored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from moecore.base.fields import quote, shown_name
from moecore.io.checkpoint.manifest import MAX_DEPTH, nests_deeper
from moecore.io.checkpoint.state import ModelView

# How to compute, not what: another machine may want others.
OF_THE_RUN = {"fused", "foreach", "capturable", "differentiable"}
# What schedulers add to a group, and set anew when they are built.
OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
# Numbers that decide about no state, so that 0 may become another number.
VALUES = {"lr", "betas", "weight_decay", "eps"} | OF_SCHEDULERS
WIDTH = "width_factor"  # of `WidthRates.regroup`; it is in the saved lr, weight_decay and weights
MAX_NESTING = MAX_DEPTH - 10  # of a value, which lies in others


def all_groups(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """Return the parameter groups, one optimizer after the other."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def optimizer_class(optimizers: Sequence[Optimizer]) -> str:
    """Return the name of their class, or those of each group, such as "Muon, AdamW, AdamW"."""
    # An optimizer that only computes elsewhere declares the class whose state it has.
    names = [
        str(getattr(optimizer, "checkpoint_class", type(optimizer).__name__))
        for optimizer in optimizers
        for _ in optimizer.param_groups
    ]
    return ", ".join(names) if len(set(names)) > 1 else names[0]


def group_classes(name: str, num_groups: int) -> list[str]:
    """Return the class of each group, from what `optimizer_class` gave."""
    names = name.split(", ")
    return names * num_groups if len(names) == 1 else names


def optimizer_groups(optimizers: Sequence[Optimizer], model: ModelView) -> list[dict[str, Any]]:
    """Return each group's hyperparameters, JSON-able, without `OF_THE_RUN`, and its names."""
    groups = []
    for group in all_groups(optimizers):
        values = {k: v for k, v in group.items() if k != "params" and k not in OF_THE_RUN}
        values = {k: v.item() if isinstance(v, Tensor) else v for k, v in values.items()}
        check_json("optimizer hyperparameter", values)
        groups.append({"params": [model.name_of(p) for p in group["params"]], **values})
    return groups


def group_problems(present: list[dict[str, Any]], groups: list[dict[str, Any]]) -> list[str]:
    """Return why saved hyperparameters do not fit; groups of `present` have names as parameters."""
    # State goes by name, so the order within a group decides about nothing.
    if [sorted(group["params"]) for group in present] != [sorted(g["params"]) for g in groups]:
        return [
            f"optimizer.param_groups ({len(present)}) hold other parameters, or in another order, "
            f"than the {len(groups)} in the checkpoint"
        ]
    return [
        f"optimizer hyperparameter {shown_name(key)} ({quote(group.get(key))}) is {value!r:.40} "
        "in the checkpoint"
        for group, saved_group in zip(present, groups, strict=True)
        for key, value in saved_group.items()
        if (key in group or key in VALUES) and not _may_become(key, group.get(key, 0.0), value)
    ]


def option_problems(group: Mapping[str, Any], saved_group: Mapping[str, Any]) -> list[str]:
    """Return how two groups differ in what decides about the state of a parameter."""
    ignored = OF_SCHEDULERS | OF_THE_RUN | {"params"}
    odd = sorted((group.keys() - ignored) ^ (saved_group.keys() - OF_SCHEDULERS - {"params"}))
    problems = []
    if odd:
        problems.append(
            f"optimizer hyperparameters {', '.join(odd)} are on one side only, checkpoint or "
            "optimizer"
        )
    return problems + [
        f"optimizer hyperparameter {shown_name(key)} ({quote(group[key])}) is "
        f"{quote(saved_group[key])} in the checkpoint"
        for key in sorted(group.keys() & saved_group.keys() - VALUES - OF_THE_RUN - {"params"})
        if isinstance(group[key], int | float | None) and bool(group[key]) != bool(saved_group[key])
    ]


def restore_groups(optimizers: Sequence[Optimizer], groups: list[dict[str, Any]]) -> None:
    """Set the hyperparameters of each group, in place; `group_problems` has found none."""
    for group, saved_group in zip(all_groups(optimizers), groups, strict=True):
        for key, value in saved_group.items():
            current = group.get(key)
            if key == "params" or key in OF_THE_RUN:
                continue
            if isinstance(current, Tensor):
                current.fill_(value)  # a captured graph reads this very tensor
            else:
                group[key] = tuple(value) if isinstance(current, tuple) else value


def check_json(label: str, values: Mapping[str, Any]) -> None:
    """Raise ValueError for the first value that the JSON of a manifest cannot hold."""
    for name, value in values.items():
        try:
            json.dumps(value, sort_keys=True)
            if nests_deeper(value, MAX_NESTING):
                raise ValueError(f"it nests more than {MAX_NESTING} times")
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{label} {shown_name(name)} ({type(value).__name__}) must be JSON-able or a "
                f"tensor: {error}"
            ) from None


def _may_become(key: str, current: Any, value: Any) -> bool:
    """Whether a hyperparameter may get the saved value; None is "off", but not of `VALUES`."""
    if key == WIDTH:
        return bool(current == value)
    if current is None or value is None:
        return key not in VALUES or current is value
    if isinstance(current, bool) or isinstance(value, bool):
        return isinstance(current, bool) and isinstance(value, bool)
    if isinstance(current, tuple | list):
        return (
            isinstance(value, list)
            and len(current) == len(value)
            and all(_may_become(key, a, b) for a, b in zip(current, value, strict=True))
        )
    if isinstance(current, int | float | Tensor):
        return is_finite(value) or (key not in VALUES and value in (math.inf, -math.inf))
    return isinstance(value, type(current))


def is_finite(value: object) -> bool:
    """Whether it is a number that a float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
