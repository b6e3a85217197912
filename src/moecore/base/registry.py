"""`Registry`: the named values of an option, to which users can add."""

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """The allowed names of an option, each with its value; users can register further names.

    `option` is the option's name in errors. `OneOf(registry)` annotates a field with these names.
    """

    def __init__(self, option: str, values: Mapping[str, T]) -> None:
        self._option, self._values = option, dict(values)

    def register(self, name: str, value: T) -> None:
        """Add a name with its value; raise a ValueError if the name is already registered."""
        if not isinstance(name, str) or not name or name in self._values:
            raise ValueError(
                f"{self._option} ({name!r}) must be a new name, unlike "
                f"{', '.join(map(repr, self))}: choose another one"
            )
        self._values[name] = value

    def __getitem__(self, name: str) -> T:
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
