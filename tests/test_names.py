"""No name in src is, or ends in, a participle, an adverb or a pronoun: values are nouns.

Write `record` for `found`, `local_x` for `own`, `full_x` for `whole` and `kept_ids` for `ids_kept`.
The list leaves out terms of the field (`sharded`, `cached`) and what torch's FSDP uses as a name.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import moecore

SRC = Path(moecore.__file__).parent
PARTICIPLES = """
found held wanted kept came given asked left gathered sent made taken done known shown lost gone
used needed required stored written received skipped packed moved saved chosen picked planned
counted told said summed copied padded scaled merged routed dropped computed expected compared
broken begun started waiting running leaving going coming following joined
"""
OTHER_WORDS = """
how own whole mine ours theirs most least later more alone alike else others both each such these
those here there then now within away ahead behind once again always what which who whose when why
so where one ones together apart likewise some few less same another
"""
WORDS = frozenset((PARTICIPLES + OTHER_WORDS).split())
# How many each package may have. A number may only fall: the goal is 1 per 1,000 lines in all.
# fmt: off
BOUNDS = {"families": 1, "kernels": 1, "moe": 2, "parallel": 2}
# fmt: on
# Calls `f(**name)` of a dictionary that the same function built: no type checker sees the names.
# The number may only fall.
MAX_SPLATS = 140


def is_forbidden(name: str, *, is_verb: bool) -> bool:
    """Say whether a name is a word of the list or ends in one. `cut` may only name a verb."""
    name = re.sub(r"(?<=[a-z])(_[A-Z0-9]+)+$", "", name.strip("_"))  # without its logical shape
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
    is_predicate = words[0] == "is" and len(words) == 2 and words[1] in PARTICIPLES.split()
    if is_predicate or words[-2:] == ["if", "needed"] or (words == ["cut"] and is_verb):
        return False
    return words[-1] in WORDS or words == ["cut"]


def bound_name(node: ast.AST) -> str | None:
    """Return the name that a node binds, a local variable or an attribute of `self` included."""
    if isinstance(node, ast.Name):
        return node.id if isinstance(node.ctx, ast.Store) else None
    if isinstance(node, ast.Attribute):
        is_of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
        return node.attr if is_of_self and isinstance(node.ctx, ast.Store) else None
    if isinstance(node, ast.alias):
        return node.asname if node.asname != node.name else None
    return node.arg if isinstance(node, ast.arg) else getattr(node, "name", None)


def names_of(node: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.AST, str]]:
    """Yield each name that a file binds, with its function or class and its node."""
    for child in ast.iter_child_nodes(node):
        name, inside = bound_name(child), owner
        if name is not None:
            is_field = isinstance(child, ast.Attribute)
            yield owner.rpartition(".")[0] if is_field else owner, child, name
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{owner}.{name}"
        yield from names_of(child, inside)


def forbidden_names(source: str) -> list[tuple[int, str]]:
    """Return line and name of every forbidden name, once for each function or class."""
    lines: dict[tuple[str, str], int] = {}
    for owner, node, name in names_of(ast.parse(source)):
        if is_forbidden(name, is_verb=isinstance(node, ast.FunctionDef)):
            lines.setdefault((owner, name), node.lineno)
    return sorted((line, name) for (_, name), line in lines.items())


def test_names_are_nouns_and_verbs() -> None:
    hits: dict[str, list[str]] = {}
    for path in sorted(SRC.rglob("*.py")):
        place = path.relative_to(SRC)
        package = place.parts[0] if len(place.parts) > 1 else "."
        rows = [f"{place}:{line} {name}" for line, name in forbidden_names(path.read_text())]
        hits.setdefault(package, []).extend(rows)
    over = {package: rows for package, rows in hits.items() if len(rows) > BOUNDS.get(package, 0)}
    counts = {package: len(rows) for package, rows in over.items()}
    assert not over, "\n".join([str(counts), *(row for rows in over.values() for row in rows)])


def test_planted_names_are_reported() -> None:
    source = "class RowsHeld:\n  def found(self, own_TD): kept = self._most = [how for how in x]"
    planted = {name for _, name in forbidden_names(source)}
    assert planted == {"RowsHeld", "found", "own_TD", "kept", "_most", "how"}
    terms = "def cut(seen, is_packed, kept_rows, padding): cast_if_needed = sharded = 1"
    assert forbidden_names(terms) == []


def splats(source: str) -> list[int]:
    """Return the lines of calls `f(**name)` whose function assigned a dictionary to `name`."""
    lines = set[int]()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            nodes = list(ast.walk(function))
            dicts = {
                ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
                for node in nodes
                if isinstance(node, ast.Assign | ast.AnnAssign)
                and re.match(r"dict\(|\{", ast.unparse(node.value or node.annotation))
            }
            keywords = (
                word for node in nodes if isinstance(node, ast.Call) for word in node.keywords
            )
            lines |= {
                word.value.lineno
                for word in keywords
                if word.arg is None and ast.unparse(word.value) in dicts
            }
    return sorted(lines)


def test_few_calls_pass_a_dictionary_of_the_function() -> None:
    rows = [f"{path}:{line}" for path in SRC.rglob("*.py") for line in splats(path.read_text())]
    assert len(rows) <= MAX_SPLATS, "\n".join(rows)
    assert splats("def f(**more):\n  a = {'b': 1}\n  g(**a)\n  g(b=1, **more)") == [3]
