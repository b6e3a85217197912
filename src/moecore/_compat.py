"""Names of torch's products that are private or differ between releases, looked up once.

Everything else in moecore uses one spelling; a version check anywhere else is a bug.
"""

from __future__ import annotations

from typing import Any

import torch

# torch.nn.functional.grouped_mm is the public name where it exists; both record autograd.
grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm

# What a torch function mode sees of it.
_GROUPED_MM = (grouped_mm, getattr(torch, "_grouped_mm", None))


def is_grouped_mm(function: Any) -> bool:
    """Whether a function that a mode sees is the grouped product."""
    return any(function is one for one in _GROUPED_MM)


# Their public forms take other arguments. A release without them still trains in bf16.
scaled_mm: Any = getattr(torch, "_scaled_mm_v2", None)
scaled_grouped_mm: Any = getattr(torch, "_scaled_grouped_mm", None)
