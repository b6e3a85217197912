"""Hyperparameters of optimizers and state of schedulers: the stored values and their checks.

A parameter belongs to at most one optimizer, so the name of a parameter's state needs no optimizer.
Several optimizers are stored as one list of parameter groups, with the class of each group. The
checkpoint does not store which of several optimizers of one class has a group.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from moecore.base.fields import format_name, quote
from moecore.base.torch_private import tree_map_only
from moecore.io.checkpoint.manifest import MAX_DEPTH, is_nested_deeper
from moecore.io.checkpoint.state import ModelView

T = TypeVar("T")
# Options that select an implementation and do not change results.
RUN_OPTIONS = {"fused", "foreach", "capturable", "differentiable"}
# Options that schedulers add to a group when they are constructed.
SCHEDULER_OPTIONS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
# Numbers that do not decide which state exists, so that 0 may become another number.
NUMERIC_OPTIONS = {"lr", "betas", "weight_decay", "eps"} | SCHEDULER_OPTIONS
WIDTH = "width_factor"  # of `WidthRates.regroup`; it is in the saved lr, weight_decay and weights
MAX_NESTING = MAX_DEPTH - 10  # of a value, which lies in others


def concat_param_groups(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """Return the parameter groups of all optimizers in one list."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def name_optimizer_classes(optimizers: Sequence[Optimizer]) -> str:
    """Return the optimizers' class name; if they differ, one name per group ("Muon, AdamW")."""
    # An optimizer may declare the class whose state it has as `checkpoint_class`.
    names = [
        str(getattr(optimizer, "checkpoint_class", type(optimizer).__name__))
        for optimizer in optimizers
        for _ in optimizer.param_groups
    ]
    return ", ".join(names) if len(set(names)) > 1 else names[0]


def split_class_names(name: str, num_groups: int) -> list[str]:
    """Convert a text of `name_optimizer_classes` to a list with the class name of each group."""
    names = name.split(", ")
    return names * num_groups if len(names) == 1 else names


def collect_hyperparameters(
    optimizers: Sequence[Optimizer], model: ModelView
) -> list[dict[str, Any]]:
    """Return each group's parameter names ("params") and options except `RUN_OPTIONS` ("fused")."""
    groups = []
    for group in concat_param_groups(optimizers):
        values = {k: v for k, v in group.items() if k != "params" and k not in RUN_OPTIONS}
        values = {k: v.item() if isinstance(v, Tensor) else v for k, v in values.items()}
        check_json_values("optimizer hyperparameter", values)
        groups.append({"params": [model.get_name(p) for p in group["params"]], **values})
    return groups


def find_group_mismatches(
    current_groups: list[dict[str, Any]], saved_groups: list[dict[str, Any]]
) -> list[str]:
    """Return an error text per saved value that does not load, or one if parameter names differ."""
    # State is loaded by name, so the order of parameters in a group has no effect.
    if [sorted(group["params"]) for group in current_groups] != [
        sorted(g["params"]) for g in saved_groups
    ]:
        return [
            f"optimizer.param_groups ({len(current_groups)}) hold other parameters, or in another "
            f"order, than the {len(saved_groups)} in the checkpoint"
        ]
    return [
        f"optimizer hyperparameter {format_name(key)} ({quote(group.get(key))}) is {value!r:.40} "
        "in the checkpoint"
        for group, saved_group in zip(current_groups, saved_groups, strict=True)
        for key, value in saved_group.items()
        if (key in group or key in NUMERIC_OPTIONS)
        and not _can_restore_option(key, group.get(key, 0.0), value)
    ]


def find_option_mismatches(group: Mapping[str, Any], saved_group: Mapping[str, Any]) -> list[str]:
    """Return error texts for options, such as amsgrad, that decide which optimizer state exists."""
    ignored = SCHEDULER_OPTIONS | RUN_OPTIONS | {"params"}
    odd = sorted((group.keys() - ignored) ^ (saved_group.keys() - SCHEDULER_OPTIONS - {"params"}))
    problems = []
    if odd:
        problems.append(
            f"optimizer hyperparameters {', '.join(odd)} are on one side only, checkpoint or "
            "optimizer"
        )
    return problems + [
        f"optimizer hyperparameter {format_name(key)} ({quote(group[key])}) is "
        f"{quote(saved_group[key])} in the checkpoint"
        for key in sorted(
            group.keys() & saved_group.keys() - NUMERIC_OPTIONS - RUN_OPTIONS - {"params"}
        )
        if isinstance(group[key], int | float | None) and bool(group[key]) != bool(saved_group[key])
    ]


def restore_hyperparameters(optimizers: Sequence[Optimizer], groups: list[dict[str, Any]]) -> None:
    """Set the hyperparameters of optimizers, in place, to the values in saved `groups`."""
    for group, saved_group in zip(concat_param_groups(optimizers), groups, strict=True):
        for key, value in saved_group.items():
            current = group.get(key)
            if key == "params" or key in RUN_OPTIONS:
                continue
            if isinstance(current, Tensor):
                current.fill_(value)  # a captured graph reads this very tensor
            else:
                group[key] = tuple(value) if isinstance(current, tuple) else value


@runtime_checkable
class Scheduler(Protocol):
    """Protocol of a learning rate scheduler; torch's schedulers implement it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the scheduler's state."""


Schedulers = Scheduler | Sequence[Scheduler]


class _JoinedScheduler:
    """Several schedulers as one scheduler, whose state has keys such as "0.last_epoch"."""

    def __init__(self, parts: Sequence[Scheduler]) -> None:
        self._parts = parts

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all schedulers, with prefixed keys."""
        states = [part.state_dict() for part in self._parts]
        return {f"{i}.{key}": v for i, state in enumerate(states) for key, v in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state of each scheduler from a joined state dict."""
        states: list[dict[str, Any]] = [{} for _ in self._parts]
        for name, value in state_dict.items():
            i, _, key = name.partition(".")
            states[int(i)][key] = value
        for part, state in zip(self._parts, states, strict=True):
            part.load_state_dict(state)


def join_schedulers(
    scheduler: Schedulers | None, optimizers: Sequence[Optimizer]
) -> Scheduler | None:
    """Return schedulers as one `Scheduler`; ValueError if not in the order of the optimizers."""
    if not isinstance(scheduler, Sequence):
        return scheduler
    if not scheduler:
        raise ValueError("scheduler ([]) must hold a scheduler: pass None where there is none")
    order = {id(optimizer): i for i, optimizer in enumerate(optimizers)}
    owners = [order.get(id(getattr(part, "optimizer", None))) for part in scheduler]
    places = [i for i in owners if i is not None]  # the state of another scheduler would fit too
    if places != sorted(places):
        raise ValueError(
            f"scheduler (of optimizers {', '.join(map(str, places))}) must be in the order of "
            "the optimizers: sort the list"
        )
    return scheduler[0] if len(scheduler) == 1 else _JoinedScheduler(scheduler)


def _name_scheduler(scheduler: Scheduler) -> str:
    """Return the class name of a scheduler, or the class names of joined schedulers."""
    parts = scheduler._parts if isinstance(scheduler, _JoinedScheduler) else [scheduler]
    return ", ".join(type(part).__name__ for part in parts)


def decode_scheduler_state(scheduler: Scheduler, saved_values: dict[str, Any]) -> dict[str, Any]:
    """Convert saved JSON to a state dict; ValueError if names or learning rates do not fit."""
    state = scheduler.state_dict()
    if state.keys() != saved_values.keys():
        raise ValueError(
            f"scheduler ({_name_scheduler(scheduler)}) must have the state of the saved one, but "
            f"{', '.join(sorted(state.keys() ^ saved_values.keys()))} differ"
        )
    for name, rates in _find_learning_rates(saved_values):
        if not isinstance(rates, list) or not all(map(is_finite_number, rates)):
            raise ValueError(
                f"scheduler {format_name(name)} must be a list of finite numbers, but is "
                f"{rates!r:.40} in the checkpoint"
            )
    result: dict[str, Any] = _restore_types(state, saved_values)
    return result


def _find_learning_rates(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each list of learning rates in a scheduler's nested state."""
    entries = list(enumerate(value)) if isinstance(value, list) else []
    for name, entry in value.items() if isinstance(value, dict) else entries:
        if str(name).endswith(("base_lrs", "_last_lr")):
            yield str(name), entry
        else:
            yield from _find_learning_rates(entry)


def encode_scheduler_state(scheduler: Scheduler) -> dict[str, Any]:
    """Convert a scheduler's state to JSON values; ValueError if JSON cannot store the state."""
    state = scheduler.state_dict()
    name = _name_scheduler(scheduler)
    # Synchronises with the device.
    numbers = tree_map_only(Tensor, lambda x: x if x.ndim else x.item(), state)
    check_json_values(f"scheduler {name}", numbers)
    values: dict[str, Any] = copy_json(numbers)
    if _restore_types(state, values) != state:
        raise ValueError(
            f"scheduler ({name}) must have a state that JSON can hold: keep it in extra instead"
        )
    return values


def _restore_types(template: Any, value: Any) -> Any:
    """Convert JSON to `template`'s types: tuples, tensors of numbers, and keys of integers."""
    if isinstance(template, Tensor) and isinstance(value, int | float):
        return torch.full_like(template, value)
    if isinstance(template, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(template, list) and isinstance(value, list) and len(template) == len(value):
        return [_restore_types(a, b) for a, b in zip(template, value, strict=True)]
    if isinstance(template, dict) and isinstance(value, dict):
        if template and all(isinstance(key, int) for key in template):
            return type(template)({int(key): entry for key, entry in value.items()})
        return {key: _restore_types(template.get(key), entry) for key, entry in value.items()}
    return value


def copy_json(values: T) -> T:
    """Return a deep copy of JSON values."""
    result: T = json.loads(json.dumps(values))
    return result


def check_json_values(error_prefix: str, values: Mapping[str, Any]) -> None:
    """Raise ValueError(`error_prefix` and a reason) if JSON cannot store one of the values."""
    for name, value in values.items():
        try:
            json.dumps(value, sort_keys=True)
            if is_nested_deeper(value, MAX_NESTING):
                raise ValueError(f"it nests more than {MAX_NESTING} times")
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{error_prefix} {format_name(name)} ({type(value).__name__}) must be JSON-able "
                f"or a tensor: {error}"
            ) from None


def _can_restore_option(option: str, current_value: Any, saved_value: Any) -> bool:
    """Whether a load may set the optimizer option `option` to its saved value."""
    if option == WIDTH:
        return bool(current_value == saved_value)
    if current_value is None or saved_value is None:
        return option not in NUMERIC_OPTIONS or current_value is saved_value
    if isinstance(current_value, bool) or isinstance(saved_value, bool):
        return isinstance(current_value, bool) and isinstance(saved_value, bool)
    if isinstance(current_value, tuple | list):
        return (
            isinstance(saved_value, list)
            and len(current_value) == len(saved_value)
            and all(
                _can_restore_option(option, a, b)
                for a, b in zip(current_value, saved_value, strict=True)
            )
        )
    if isinstance(current_value, int | float | Tensor):
        return is_finite_number(saved_value) or (
            option not in NUMERIC_OPTIONS and saved_value in (math.inf, -math.inf)
        )
    return isinstance(saved_value, type(current_value))


def is_finite_number(value: object) -> bool:
    """Whether a value is an int or float (no bool) that a finite float can represent."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
