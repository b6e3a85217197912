"""Private idioms: everyday words and phrases without a noun that pages and docstrings avoid.

The public docstrings of torch's FSDP2 have one such word in 2,000. Name the subject of a sentence,
use the term of the field, and write the verb of a relation.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

IDIOMS = (
    r"alike|alone|apart|else|beside|in turns?",
    r"what|whatever",  # as a noun: "what a unit holds" is "the parameters of a unit"
    r"(?:those|that|theirs) of|of which|of (?:its|their|your|one's) own",
    r"held|kept|whole|let go|given back",  # sharded, saved, unsharded, resharded
    r"comes?|came|goes|travel(?:s|led)?|lies?",  # is received, is sent, is stored
    r"asks?|asked|nobody|somebody",
    r"adds? up|added up|(?:computed|runs?|sent) again|at random",
    r"rooms?|foldings?",  # package or capacity, parallel layout
)
PATTERN = re.compile(
    "|".join(rf"\b(?:{idiom})\b".replace(" ", r"\s+") for idiom in IDIOMS), re.IGNORECASE
)
HEADLESS = re.compile(r"(?:^|[.!?:;]\s+|\|\s*|[-*] )Of ", re.MULTILINE)


def prose_of(text: str) -> str:
    """Return a page or docstring without code, links' addresses and indented examples."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"``?[^`\n]*``?", "", text)
    return re.sub(r"\]\([^)\s]*\)", "]", text)


def find_idioms(text: str) -> list[str]:
    prose = prose_of(text)
    matches = [*PATTERN.finditer(prose), *HEADLESS.finditer(prose)]
    return [match.group().strip("-*.!?:;| \n") for match in matches]


def max_idioms(text: str) -> int:
    """Return 2 per 1,000 words, at least 1."""
    return max(1, len(text.split()) // 500)


def public_docstrings(path: Path) -> str:
    """Return the docstrings of a file, of its public classes, functions and methods."""
    return "\n".join(_docstrings(ast.parse(path.read_text())))


def _docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    yield ast.get_docstring(node) or ""
    for child in node.body:
        kinds = (ast.ClassDef, ast.FunctionDef)
        if isinstance(child, kinds) and not child.name.startswith("_"):
            yield from _docstrings(child)
