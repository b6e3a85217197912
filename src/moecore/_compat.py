"""Names of torch's products that are private or differ between releases, looked up once.

Everything else in moecore uses one spelling; a version check anywhere else is a bug.
"""

from __future__ import annotations

import torch

# torch.nn.functional.grouped_mm is the public name where it exists; both record autograd.
grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm

# Their public forms take other arguments, and say less about the layout of scales.
scaled_mm = torch._scaled_mm_v2
scaled_grouped_mm = torch._scaled_grouped_mm
