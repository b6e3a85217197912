"""Links and citations of the pages hold, and pages state the present at a size that is read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
DIARY = ROOT / "docs" / "log"
LONGEST = {"docs/performance.md": 150, "docs/architecture.md": 150}


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page(page: Path) -> None:
    assert broken_links(page) == []
    name, lines = str(page.relative_to(ROOT)), page.read_text().splitlines()
    assert name != "README.md" or len(page.read_text().split()) <= 900
    if name in LONGEST or page.parent.name == "findings":
        assert len(lines) <= LONGEST.get(name, 150)
    if name != "docs/benchmarks.md" and DIARY not in page.parents:  # that one lists its records
        assert not re.search(r"\bcommits? [0-9a-f]{7}", "\n".join(lines))


def test_pages_that_the_code_cites_exist() -> None:
    for folder in ("src", "benchmarks", "examples", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            for cited in re.findall(r"\bdocs/[\w/]+\.(?:md|png)\b", file.read_text()):
                assert (ROOT / cited).exists(), f"{file.relative_to(ROOT)} cites {cited}"
