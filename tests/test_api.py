import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
SECTIONS = {
    part.splitlines()[0].strip("` "): {
        name
        for row in re.findall(r"^\| (`.*?) \|", part, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    for part in PAGE.read_text().split("\n## ")[1:]
}


@pytest.mark.parametrize("module", SECTIONS)
def test_the_page_has_what_a_module_exports(module: str) -> None:
    if module == "moecore.integrations.transformers":
        pytest.importorskip("accelerate")
    exported = import_module(module)
    assert SECTIONS[module] == set(exported.__all__)
    assert all(hasattr(exported, name) for name in SECTIONS[module])


def test_the_page_has_every_module_that_exports() -> None:
    src = Path(import_module("moecore").__file__).parent
    packages = [f.parent for f in src.rglob("__init__.py") if "__all__ =" in f.read_text()]
    names = {".".join(("moecore", *p.relative_to(src).parts)) for p in packages}
    assert names == set(SECTIONS)


def test_a_name_has_one_level_and_first_examples_use_stable_names() -> None:
    levels = dict[str, set[str]]()
    for part in PAGE.read_text().split("\n## ")[1:]:
        for section in part.split("\n### "):
            title = section.splitlines()[0]
            assert title == "Provisional" or title.startswith("`moecore"), title
            level = "provisional" if title == "Provisional" else "stable"
            for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
                for name in re.findall(r"`(\w+)`", row):
                    levels.setdefault(name, set()).add(level)
    assert {name: found for name, found in levels.items() if len(found) > 1} == {}
    for page in (PAGE.parent.parent / "README.md", PAGE.parent / "guide.md"):
        for line in re.findall(r"^from moecore\S* import (.*)$", page.read_text(), re.MULTILINE):
            names = re.findall(r"\w+", line)
            unstable = {name for name in names if levels.get(name, {"stable"}) != {"stable"}}
            assert unstable == set(), page


def documented(module: str) -> Iterator[tuple[str, set[str], set[str]]]:
    """Yield name, parameters and explained names of what explains any, methods too."""
    exported = import_module(module)
    for name in sorted(SECTIONS[module]):
        value = getattr(exported, name)
        if not getattr(value, "__module__", "").startswith("moecore"):
            continue
        known = set[str]().union(*(entries(c) for c in getattr(value, "__mro__", (value,))))
        if inspect.isfunction(value) and known:
            yield name, parameters(value), known
        elif inspect.isclass(value):
            if known and "__init__" in vars(value) and not issubclass(value, Exception):
                yield name, parameters(value.__init__), known
            for method, function in vars(value).items():
                has_args = "Args:" in (getattr(function, "__doc__", None) or "")
                if has_args and inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{name}.{method}", parameters(function), entries(function)


def parameters(function: Any) -> set[str]:
    found = inspect.signature(function).parameters.values()
    return {p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)} - {"self"}


def entries(value: Any) -> set[str]:
    """The names that sections Args and Attributes of a docstring explain."""
    found, doc = set(), inspect.cleandoc(value.__doc__ or "")
    for section in re.findall(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)*)", doc, re.MULTILINE):
        for names in re.findall(r"^    ([\w, *]+):", section, re.MULTILINE):
            found |= {name.strip(" *") for name in names.split(",")}
    return found


@pytest.mark.parametrize("module", SECTIONS)
def test_public_docstrings_explain_every_parameter_or_none(module: str) -> None:
    if module == "moecore.integrations.transformers":
        pytest.importorskip("accelerate")
    missing = {name: left for name, known, said in documented(module) if (left := known - said)}
    assert missing == {}
