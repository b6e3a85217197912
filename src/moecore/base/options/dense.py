"""DenseOptions: how a block runs what lies between its routed experts."""

from __future__ import annotations

from dataclasses import dataclass

from moecore.base.fields import CheckedRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseOptions(CheckedRecord):
    """How attention, norms, routers and shared experts run.

    Attributes:
        compile: run attention, norms and residual adds through torch.compile.
        graph: on GPUs, run attention, routers, shared experts and what an exchange prepares as
            CUDA graphs of each block, for dispatchers that wait on the host.
        overlap_shared: on GPUs, run shared experts on a stream of their own.
    """

    compile: bool = False
    graph: bool = False
    overlap_shared: bool = False
