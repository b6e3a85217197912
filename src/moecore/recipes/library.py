"""`moecore recipes`: lists, prints and copies the configs that are part of moecore.

A recipe begins with comment lines: its title, then `key: value` of command, machine, data and
result. A model's config with the recipe's name (NAME.json) belongs to the recipe.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from moecore.base.command_options import POSITIONAL, UsageError
from moecore.base.text import format_columns

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True, slots=True)
class ShippedRecipe:
    """A config that is part of moecore: its name, title and `key: value` comments."""

    name: str
    title: str
    facts: dict[str, str]

    @classmethod
    def read(cls, name: str) -> Self:
        """Return a recipe by name; UsageError for an unknown name."""
        if name not in list_recipe_names():
            raise UsageError(f"NAME ({name}) must be a recipe: moecore recipes list prints them")
        comments = []
        for line in (CONFIGS / f"{name}.toml").read_text().splitlines():
            if not line.startswith("#"):
                break
            comments.append(line.removeprefix("#").strip())
        facts = dict(re.findall(r"^(\w+): (.*)$", "\n".join(comments[1:]), re.MULTILINE))
        return cls(name, comments[0], facts)


def list_recipe_names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(path.stem for path in CONFIGS.glob("*.toml"))


@dataclass(frozen=True, kw_only=True)
class ListConfig:
    """Print all recipes, a line each."""


@dataclass(frozen=True, kw_only=True)
class ShowConfig:
    """Print one recipe.

    Attributes:
        name: a recipe, see moecore recipes list.
    """

    name: Annotated[str, POSITIONAL]


@dataclass(frozen=True, kw_only=True)
class CopyConfig(ShowConfig):
    """Write one recipe into a directory, to change it there.

    Attributes:
        to: the directory.
    """

    to: Path = Path()


def run_list(args: ListConfig) -> int:
    """Print the names, commands and machines of all recipes; return 0."""
    rows: list[tuple[str, ...]] = [("NAME", "COMMAND", "MACHINE")]
    for recipe in map(ShippedRecipe.read, list_recipe_names()):
        name = recipe.facts["command"].removeprefix("moecore ")
        rows.append((recipe.name, name, recipe.facts["machine"]))
    print("\n".join(format_columns(rows)))
    return 0


def run_show(args: ShowConfig) -> int:
    """Print the TOML of a recipe; return 0."""
    print((CONFIGS / f"{ShippedRecipe.read(args.name).name}.toml").read_text(), end="")
    return 0


def run_copy(args: CopyConfig) -> int:
    """Write a recipe's files, print its command and return 0; ValueError for an existing file."""
    recipe = ShippedRecipe.read(args.name)
    files = sorted(CONFIGS.glob(f"{recipe.name}.*"), reverse=True)
    for file in files:
        if (args.to / file.name).exists():
            raise ValueError(f"{args.to / file.name} must not exist yet: move it away")
    args.to.mkdir(parents=True, exist_ok=True)
    for file in files:
        (args.to / file.name).write_bytes(file.read_bytes())
    print(f"run it with: {recipe.facts['command']} {args.to / recipe.name}.toml")
    return 0
