"""`Registry`: the named values of an option, to which users can add."""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


class Registry(dict[str, T]):
    """The allowed names of an option, each with its value; users can register further names.

    `option` is the option's name in errors. `OneOf(registry)` annotates a field with these names.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]  # annotations are cached

    def __init__(self, option: str, values: Mapping[str, T]) -> None:
        super().__init__(values)
        self._option = option

    def register(self, name: str, value: T) -> None:
        """Add a name with its value; raise a ValueError if the name is already registered."""
        if not isinstance(name, str) or not name or name in self:
            raise ValueError(
                f"{self._option} ({name!r}) must be a new name, unlike "
                f"{', '.join(map(repr, self))}: choose another one"
            )
        self[name] = value
