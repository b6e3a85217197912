"""Pages that only the site has: the API reference from docstrings, and llms.txt (mkdocs hooks)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent.parent / "docs"
OPTIONS = (
    "    options: {show_source: false, show_root_heading: true, show_root_full_path: false, "
    "heading_level: 3}\n"
)


def on_files(files: Files, config: Any) -> Files:
    """Add `reference.md`, with the names of docs/api.md, and `llms.txt`."""
    text = "# API reference\n\nFrom the docstrings of every public name.\n\n"
    for section in (DOCS / "api.md").read_text().split("\n## `")[1:]:
        module = section.partition("`")[0]
        cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
        names = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
        text += f"## `{module}`\n\n" + "\n".join(f"::: {module}.{n}\n{OPTIONS}" for n in names)
    files.append(File.generated(config, "reference.md", content=text))
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
