"""Pages that only the site has: the API reference from docstrings, and llms.txt (mkdocs hooks)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent.parent / "docs"
OPTIONS = "    options: {show_source: false, show_root_heading: true, members_order: source}\n"


def on_files(files: Files, config: Any) -> Files:
    """Add `reference.md`, with the modules of docs/api.md, and `llms.txt`."""
    modules = re.findall(r"^## `(moecore[\w.]*)`", (DOCS / "api.md").read_text(), re.MULTILINE)
    names = [f"::: {module}\n{OPTIONS}" for module in modules]
    title = "# API reference\n\nFrom the docstrings of every public name.\n\n"
    files.append(File.generated(config, "reference.md", content=title + "\n".join(names)))
    files.append(File.generated(config, "llms.txt", content=list_pages(config["site_name"])))
    return files


def list_pages(title: str) -> str:
    """Return the pages with their titles and first sentences, one per line."""
    lines = [f"# {title}", ""]
    for page in sorted(DOCS.rglob("*.md")):
        heading, _, text = page.read_text().partition("\n")
        sentence = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text.strip().split(". ")[0])
        sentence = " ".join(sentence.split())[:200]
        lines.append(f"- [{heading.strip('# ')}]({page.relative_to(DOCS)}): {sentence}")
    return "\n".join(lines) + "\n"
