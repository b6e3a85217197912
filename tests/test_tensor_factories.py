"""Calls in src that create tensors name a device and a dtype, not those of the caller's defaults.

`torch.set_default_dtype(torch.bfloat16)` would round an accumulator that names no dtype, and
`torch.set_default_device("cuda")` would move a host buffer that names no device to the GPU.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "moecore"
# Functions whose device is the default device. `torch.frombuffer` always reads host memory.
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full"),
    *("hann_window", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm"),
    *("range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}
# Functions whose dtype is, or may be, the default dtype. Other calls convert a tensor or create
# integers.
FLOATS = {
    *("empty", "empty_permuted", "empty_strided", "eye", "full", "hann_window", "linspace"),
    *("logspace", "ones", "rand", "randn", "scalar_tensor", "tensor", "zeros"),
}
# Modules whose constructors create parameters on the default device, as torch's own modules do.
MODULES = {"models/backbone.py", "models/head.py", "models/layers.py", "models/linear_attention.py"}


def find_missing_arguments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, argument) for each argument that a call of a factory, or a partial, leaves out.

    A call with `**arguments` must have them from a place that names both.
    """
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        function: ast.expr = call.func
        if isinstance(function, ast.Name) and function.id == "partial" and call.args:
            function = call.args[0]
        is_of_torch = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
        if not is_of_torch or function.value.id != "torch" or function.attr not in FACTORIES:  # type: ignore[attr-defined]
            continue
        names = {keyword.arg for keyword in call.keywords}
        required = {"device", "dtype"} if function.attr in FLOATS else {"device"}  # type: ignore[attr-defined]
        for argument in sorted(required - names if None not in names else ()):
            yield call.lineno, argument


def test_calls_in_src_name_device_and_dtype() -> None:
    missing = [
        f"{path.relative_to(SRC)}:{line} must name its {argument}"
        for path in sorted(SRC.rglob("*.py"))
        for line, argument in find_missing_arguments(path.read_text())
        if not (argument == "device" and str(path.relative_to(SRC)) in MODULES)
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("torch.zeros(3)", ["device", "dtype"]),
        ("torch.zeros(3, dtype=torch.float32)", ["device"]),
        ("torch.tensor(1.0, device='cpu')", ["dtype"]),
        ("partial(torch.zeros, device=x.device)", ["dtype"]),
        ("torch.arange(3)", ["device"]),
        ("torch.arange(3, device='cpu')", []),
        ("torch.zeros(3, **options)", []),
        ("torch.zeros_like(x)", []),
        ("x.new_zeros(3)", []),
    ],
)
def test_a_call_that_leaves_arguments_out(source: str, missing: list[str]) -> None:
    assert [argument for _, argument in find_missing_arguments(source)] == missing
