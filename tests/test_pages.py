"""Links and citations of the pages hold, and pages state the present in sentences that are read.

A page has at most 2,000 words, paragraphs of at most 100 words, sentences of at most 30 words and
18 in the mean, table cells of at most 20 words, and 2 private idioms per 1,000 words
(`helpers/idioms.py`). `page_bounds.json` has the values that exceed these limits; its numbers may
only fall.
"""

import json
import re
from pathlib import Path

import pytest

from tests.helpers.idioms import find_idioms, max_idioms

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINKED = sorted([*PAGES, *ROOT.glob("benchmarks/*/README.md")])
BOUNDS = json.loads((Path(__file__).parent / "page_bounds.json").read_text())
LIMITS = {
    "words": 2000,
    "words per sentence": 18,
    **dict.fromkeys(("long sentences", "long paragraphs", "long cells"), 0),
}
PAGE_WORDS = {"README.md": 900, "docs/architecture.md": 2500, "docs/findings.md": 4000}


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


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page(page: Path) -> None:
    assert broken_links(page) == []
    if page in PAGES:
        assert not re.search(r"\bcommits? [0-9a-f]{7}", page.read_text())


def measures(page: Path) -> dict[str, float]:
    """The measures of `LIMITS`; code, tables and headings have no sentences."""
    text = page.read_text()
    words = len(text.split())
    lines = re.sub(r"```.*?```", "\n", text, flags=re.DOTALL).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    cells = [len(cell.split()) for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    prose = ["" if line.startswith(("|", "#", "<")) else line for line in lines]
    blocks = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", "\n".join(prose))
    parts = [part for block in blocks for part in re.split(r"[.!?]\W*\s(?=\W*[A-Z]|`)", block)]
    sentences = [n for part in parts if (n := len(part.split()))]
    return {
        "words": words,
        "words per sentence": round(sum(sentences) / max(1, len(sentences)), 1),
        "long sentences": sum(n > 30 for n in sentences),
        "long paragraphs": sum(len(block.split()) > 100 for block in blocks),
        "long cells": sum(n > 20 for n in cells),
        "idioms": len(find_idioms(text)),
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_of_a_page(page: Path) -> None:
    name, found = str(page.relative_to(ROOT)), measures(page)
    limits = {**LIMITS, "words": PAGE_WORDS.get(name, 2000), "idioms": max_idioms(page.read_text())}
    limits |= BOUNDS.get(name, {})
    assert {what: n for what, n in found.items() if n > limits[what]} == {}


def test_bounds_are_of_pages_that_exist() -> None:
    assert set(BOUNDS) <= {str(page.relative_to(ROOT)) for page in PAGES}


def test_pages_that_the_code_cites_exist() -> None:
    for folder in ("src", "benchmarks", "examples", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            cited = r"\b(docs/[\w/]+\.(?:md|png))\b(?:#([\w-]+))?"
            for name, anchor in re.findall(cited, file.read_text()):
                assert (ROOT / name).exists(), f"{file.relative_to(ROOT)} cites {name}"
                has_heading = not anchor or anchor in anchors(ROOT / name)
                assert has_heading, f"{file.relative_to(ROOT)} cites {name}#{anchor}"
