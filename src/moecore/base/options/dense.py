"""`DenseOptions`: how attention, norms, routers and shared experts run."""

from __future__ import annotations

from dataclasses import dataclass

from moecore.base.fields import CheckedRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseOptions(CheckedRecord):
    """How attention, norms, routers and shared experts run.

    Attributes:
        compile: run attention, norms and residual adds through torch.compile.
        graph: on GPUs, capture attention, routers, shared experts and the preparation of dispatch
            in CUDA graphs per block, for dispatchers that synchronise with the host.
        overlap_shared: on GPUs, run shared experts on a second CUDA stream.
    """

    compile: bool = False
    graph: bool = False
    overlap_shared: bool = False
