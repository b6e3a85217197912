"""docs/models.md lists every activation of experts, and each has the value that stands there."""

import re
from pathlib import Path
from typing import get_args

import torch
import torch.nn.functional as F

from moecore.base.options.layer import GATED_ACTIVATIONS, Activation
from moecore.kernels.rows.activation import ActivationOptions, activate_rows

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
ROW = re.compile(r'^\| `"(\w+)"` \| (yes|no) \| `([^`]+)` \|', re.MULTILINE)


def test_activations_have_the_values_of_the_page() -> None:
    rows = {name: (gate, value) for name, gate, value in ROW.findall(PAGE.read_text())}
    assert set(rows) == set(get_args(Activation))
    gate, up = torch.linspace(-9, 9, 12).double(), torch.linspace(9, -6, 12).double()
    functions = dict(
        silu=F.silu,
        gelu=F.gelu,
        gelu_tanh=lambda x: F.gelu(x, approximate="tanh"),
        relu=F.relu,
        sigmoid=torch.sigmoid,
        tanh=torch.tanh,
        min=lambda x, limit: x.clamp(max=limit),
    )
    for name, (has_gate, value) in rows.items():
        assert (has_gate == "yes") == (name in GATED_ACTIVATIONS), name
        expected = eval(value, functions | dict(gate=gate, up=up, h=gate, limit=7.0, alpha=1.702))
        given = torch.cat([gate, up], dim=-1) if has_gate == "yes" else gate
        found = activate_rows(given, ActivationOptions(kind=name))
        torch.testing.assert_close(found, expected)
