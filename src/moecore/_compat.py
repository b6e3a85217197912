"""Names of torch that differ between 2.11 and the newest release, looked up once.

Everything else in moecore uses one spelling; a version check anywhere else is a bug.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

# torch.nn.functional.grouped_mm is the public name where it exists; both record autograd.
grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


def fsdp_groups(unit: FSDPModule) -> list[Any]:
    """Return FSDP2's groups of a unit's parameters, of which 2.13 may have several."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [group for group in [state._fsdp_param_group] if group is not None]
    return list(groups)


def fsdp_params(unit: FSDPModule) -> list[Any]:
    """Return FSDP2's records of a unit's parameters."""
    return [param for group in fsdp_groups(unit) for param in group.fsdp_params]
