"""Writes the table of families into docs/huggingface.md.

    PYTHONPATH=src python -m tools.write_families

It runs what tests/families/transformers/test_families.py runs, and drops families that are not
installed: run it with the newest transformers.
"""

from tests.families.transformers.test_families import BEGIN, END, ROOT, run, table

if __name__ == "__main__":
    page = ROOT / "docs" / "huggingface.md"
    before, _, rest = page.read_text().partition(BEGIN)
    lines = "\n".join(["", *table(run(nightly=True)), ""])
    page.write_text(before + BEGIN + lines + END + rest.partition(END)[2])
