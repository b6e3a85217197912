"""Names of torch that differ between 2.11 and the newest release, looked up once.

Everything else in moecore uses one spelling; a version check anywhere else is a bug.
"""

from __future__ import annotations

import torch

# torch.nn.functional.grouped_mm is the public name where it exists; both record autograd.
grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
