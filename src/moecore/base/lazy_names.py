"""Names of a package that are imported on first use, because their modules import slowly."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def make_lazy_getattr(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports a submodule when its name is first read.

    `names` maps a submodule to the names, separated by blanks, that the package re-exports from it.
    """
    homes = {name: module for module, line in names.items() for name in line.split()}

    def find(name: str) -> Any:
        if name in homes:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        if not name.startswith("_"):  # a module of the package
            try:
                return import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
