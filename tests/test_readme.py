import os
import traceback
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.helpers.ranks import forks

ROOT = Path(__file__).parent.parent
# Page and number of the block -> what is true behind it.
CHECKS = {
    ("README.md", 0): "done.norm.finite and len(done.metrics.tokens_per_expert) == 2",
    ("docs/torchtitan.md", 0): "done.norm.finite and loss.isfinite()",
    ("docs/transformers.md", 0): "latest(args.output_dir + '/checkpoints').name == 'step-000004'",
    ("docs/transformers.md", 4): "done.norm.finite and latest(root).name == 'step-000004'",
}


def run(code: str, folder: Path) -> None:
    """Run code alone in a folder; what it prints is in a file there."""
    os.chdir(folder)
    with open("said.txt", "w") as said, redirect_stdout(said):
        try:
            exec(code, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc(file=said)
            said.flush()
            os._exit(1)
    os._exit(0)  # without destructors: gloo's threads may outlive what they use


@pytest.mark.parametrize(("page", "place"), CHECKS)
def test_the_example_runs(page: str, place: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    code = (ROOT / page).read_text().split("```python\n")[1 + place].split("```")[0]
    code += f"\nassert {CHECKS[page, place]}\n"
    process = forks().Process(target=run, args=(code, tmp_path))
    process.start()
    process.join()
    said = (tmp_path / "said.txt").read_text()
    assert process.exitcode == 0 and "layers.1.mlp" in said, said


def test_the_readme_quotes_the_first_script() -> None:
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    script = (ROOT / "examples" / "first.py").read_text()
    assert script.partition('"""\n\n')[2].startswith(code)
