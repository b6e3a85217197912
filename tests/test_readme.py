"""The code of the README and of pages without tests of their own runs, in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHECKS = {
    "README.md": "done.norm.finite and len(done.metrics.tokens_per_expert) == 2",
    "docs/from_torchtitan.md": "done.norm.finite and loss.isfinite()",
    "docs/trainer.md": "latest(args.output_dir + '/checkpoints').name == 'step-000004'",
    "docs/from_transformers.md": "done.norm.finite and latest(root).name == 'step-000004'",
}
# The model of README.md and examples/first.py has 128 experts: 12 s of a core.
LARGE, SMALL = "num_hidden_layers=2", "num_hidden_layers=2, num_experts=8, intermediate_size=64"


@pytest.mark.parametrize("page", CHECKS)
def test_the_example_runs(page: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    code = (ROOT / page).read_text().split("```python\n")[1].split("```")[0]
    if page == "README.md":
        assert code.count(LARGE) == 1
        code = code.replace(LARGE, SMALL)
    code += f"\nassert {CHECKS[page]}\n"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "layers.1.mlp" in result.stdout


def test_the_readme_quotes_the_first_script() -> None:
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    script = (ROOT / "examples" / "first.py").read_text()
    assert script.partition('"""\n\n')[2].startswith(code)
