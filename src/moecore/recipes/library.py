"""`moecore recipes`: the configs that ship with moecore.

A recipe begins with comment lines: its title, then `key: value` of command, machine, data and
result. A model's config of the same name (NAME.json) belongs to it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moecore.base.tables import format_columns
from moecore.recipes.errors import ARGUMENT_ERRORS, print_error

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True, slots=True)
class ShippedRecipe:
    """A config that ships with moecore, and what its comments say.

    Attributes:
        name: of the file, without the suffix.
        title: one line.
        facts: command, machine, data, result and others, by key.
    """

    name: str
    title: str
    facts: dict[str, str]

    @classmethod
    def read(cls, name: str) -> ShippedRecipe:
        """Return a recipe by name.

        Raises:
            ValueError: when there is none.
        """
        if name not in names():
            raise ValueError(f"NAME ({name}) must be a recipe: moecore recipes list prints them")
        comments = []
        for line in (CONFIGS / f"{name}.toml").read_text().splitlines():
            if not line.startswith("#"):
                break
            comments.append(line.removeprefix("#").strip())
        facts = dict(re.findall(r"^(\w+): (.*)$", "\n".join(comments[1:]), re.MULTILINE))
        return cls(name, comments[0], facts)

    @property
    def files(self) -> list[Path]:
        """The config and the files that belong to it."""
        return sorted(CONFIGS.glob(f"{self.name}.*"), reverse=True)


def names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(path.stem for path in CONFIGS.glob("*.toml"))


def main(words: Sequence[str] | None = None) -> int:
    """Print or copy recipes."""
    parser = argparse.ArgumentParser(prog="moecore recipes", description="Configs that are ready.")
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    commands.add_parser("list", help="print all recipes, a line each")
    show = commands.add_parser("show", help="print one recipe")
    copy = commands.add_parser("copy", help="write one recipe into a directory, to change it there")
    for command in (show, copy):
        command.add_argument("name", metavar="NAME", help="as moecore recipes list prints it")
    copy.add_argument("--to", type=Path, default=Path(), metavar="DIR", help="default: this one")
    args = parser.parse_args(words)
    try:
        if args.command == "list":
            rows: list[tuple[str, ...]] = [("NAME", "COMMAND", "MACHINE")]
            for recipe in map(ShippedRecipe.read, names()):
                name = recipe.facts["command"].removeprefix("moecore ")
                rows.append((recipe.name, name, recipe.facts["machine"]))
            print("\n".join(format_columns(rows)))
        elif args.command == "show":
            print((CONFIGS / f"{ShippedRecipe.read(args.name).name}.toml").read_text(), end="")
        else:
            copy_recipe(ShippedRecipe.read(args.name), args.to)
    except ARGUMENT_ERRORS as error:
        return print_error(error)
    return 0


def copy_recipe(recipe: ShippedRecipe, target: Path) -> None:
    """Write the files of a recipe into a directory and print the command that runs it.

    Raises:
        ValueError: when one of the files is there already; then nothing is written.
    """
    for file in recipe.files:
        if (target / file.name).exists():
            raise ValueError(f"{target / file.name} must not exist yet: move it away")
    target.mkdir(parents=True, exist_ok=True)
    for file in recipe.files:
        (target / file.name).write_bytes(file.read_bytes())
    print(f"run it with: {recipe.facts['command']} {target / recipe.name}.toml")
