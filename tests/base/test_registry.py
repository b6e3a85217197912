from collections.abc import Callable
from typing import Any

import pytest

from moecore import (
    MoEConfig,
    register_assignment,
    register_dispatcher,
    register_expert_backend,
    register_precision,
)
from moecore.base.options.dispatch import DISPATCHERS
from moecore.base.options.layer import ASSIGNMENTS
from moecore.base.options.precision import PRECISIONS, Precision, Recipe
from moecore.moe.backends import EXPERT_BACKENDS

KINDS: list[tuple[Callable[[str, Any], None], Any, Any]] = [
    (register_assignment, ASSIGNMENTS, lambda *_: None),
    (register_dispatcher, DISPATCHERS, lambda *_: None),
    (register_expert_backend, EXPERT_BACKENDS, lambda *_: None),
    (register_precision, PRECISIONS, Precision(recipe=Recipe())),
]


@pytest.mark.parametrize(("register", "registry", "value"), KINDS)
def test_a_name_is_registered_once(register, registry, value, monkeypatch) -> None:
    monkeypatch.setitem(registry, "mine", None)  # removed after the test
    del registry["mine"]
    first = next(iter(registry))
    register("mine", value)
    assert "mine" in registry
    for name in ("mine", first):
        message = f"^[A-Za-z_.]+ \\('{name}'\\) must be a new name.*'mine'"
        with pytest.raises(ValueError, match=message):
            register(name, value)
    with pytest.raises(ValueError, match="must be"):
        register("other", 3)


def test_an_unknown_name_lists_the_registered_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ASSIGNMENTS, "mine", None)
    del ASSIGNMENTS["mine"]
    sizes = {"dim": 32, "hidden_dim": 64, "num_experts": 8, "top_k": 2}
    with pytest.raises(ValueError, match=r"assignment \('mine'\) must be one of 'learned'"):
        MoEConfig(**sizes, assignment="mine")
    register_assignment("mine", lambda *_: None)
    assert MoEConfig(**sizes, assignment="mine").assignment == "mine"
    with pytest.raises(ValueError, match="'hash', 'mine'"):
        MoEConfig(**sizes, assignment="other")
