import json
from pathlib import Path

import pytest

from tests.helpers.idioms import find_idioms, max_idioms, public_docstrings

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "src").rglob("*.py"))
BOUNDS: dict[str, int] = json.loads((Path(__file__).parent / "docstring_bounds.json").read_text())


@pytest.mark.parametrize(
    ("text", "idioms"),
    [
        ("What tp ranks have alike has partial sums.", ["What", "alike"]),
        ("Of whole rows, those of a rank.", ["whole", "those of", "Of"]),
        ("The sum or those\nof ranks.", ["those\nof"]),
        ("Tensors that are replicated over tp have partial sums. One of them is first.", []),
        ("Code has its `whole` own words, ``kept`` too.\n```\nelse: held\n```", []),
        ("A [page](what.md#else) is linked.", []),
    ],
)
def test_idioms_are_found_outside_of_code(text: str, idioms: list[str]) -> None:
    assert find_idioms(text) == idioms


def test_public_docstrings_have_few_idioms() -> None:
    above = {}
    for file in FILES:
        name, text = str(file.relative_to(ROOT)), public_docstrings(file)
        found = find_idioms(text)
        if len(found) > max(BOUNDS.get(name, 0), max_idioms(text)):
            above[name] = found
    assert above == {}, "name the subject and use the field's term: see tests/helpers/idioms.py"


def test_bounds_are_of_files_that_exist() -> None:
    assert set(BOUNDS) <= {str(file.relative_to(ROOT)) for file in FILES}
