"""`register_dispatcher`: gives a user's dispatcher a name."""

from collections.abc import Callable

from moecore.base.fields import check_arguments
from moecore.base.options.dispatch import DISPATCHERS
from moecore.moe.placement import ExpertPlacement
from moecore.moe.records import Dispatcher


def register_dispatcher(name: str, make: Callable[[ExpertPlacement], Dispatcher]) -> None:
    """Register a user's dispatcher as a value of `DispatchOptions.name`, on every rank.

    Args:
        name: a new name.
        make: called once per MoE layer with the ranks that own the layer's experts; returns the
            layer's `Dispatcher`. If ep * etp is 1, no token is sent and `make` is not called.

    Raises:
        ValueError: when the name is already registered, or `make` is not a function.
    """
    check_arguments(register_dispatcher, locals())
    DISPATCHERS.register(name, make)
