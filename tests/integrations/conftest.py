"""Leaves out the tests of the version of torchtitan that is not installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

V02 = ["test_local_tokens.py", "test_torchtitan.py", "test_torchtitan_hf.py"]
V02 += ["test_torchtitan_ranks.py"]
HF_V03 = ["test_torchtitan_v03_hf.py"]
V03 = ["test_torchtitan_v03.py", "test_torchtitan_v03_ranks.py", *HF_V03]

try:
    installed = version("torchtitan")
except PackageNotFoundError:
    installed = ""
# 0.2 and 0.3 have different interfaces, and an environment has one of them.
collect_ignore = list(V02 if installed.startswith("0.3") else V03)
if find_spec("transformers") is None:
    collect_ignore += HF_V03
