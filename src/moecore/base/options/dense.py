"""`DenseOptions`: how attention, norms, routers and shared experts run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from moecore.base.fields import CheckedRecord, FieldErrors

GraphScope = Literal["attention", "router", "shared_experts", "dispatch"]
GRAPH_SCOPES: tuple[GraphScope, ...] = get_args(GraphScope)
GraphScopes = Annotated[tuple[GraphScope, ...], "pass ('router', 'dispatch')"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseOptions(CheckedRecord):
    """How attention, norms, routers and shared experts run.

    Attributes:
        compile: run attention, norms and residual adds through torch.compile.
        graph: on GPUs, capture the parts `graph_scopes` of blocks in CUDA graphs. Dispatchers may
            synchronise with the host between these parts.
        graph_scopes: the captured parts: "attention" (with its norm; also dense blocks), "router",
            "shared_experts" and "dispatch" (its preparation). () = all of them, but not "attention"
            over tp or cp, whose collectives a graph contains only if it is named.
        overlap_shared: on GPUs, run shared experts on a second CUDA stream.
    """

    compile: bool = False
    graph: bool = False
    graph_scopes: GraphScopes = ()
    overlap_shared: bool = False

    def _find_field_errors(self) -> FieldErrors:
        if self.graph_scopes and not self.graph:
            yield "graph_scopes", "be () without graph: set graph=True"
