"""docs/api.md has every public name, and each one imports from where the page says."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

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


def test_links_of_the_page_lead_somewhere() -> None:
    links = re.findall(r"\]\(([\w.]+)(#[\w-]+)?\)", PAGE.read_text())
    assert all((PAGE.parent / file).exists() for file, _ in links)
