"""All-gather of every token, and an all-to-all of partial sums: the dispatcher for small groups.

Legend: T local tokens, C maximum tokens of any rank, D model dim, K experts per token, G ranks of
the group (ep * etp), S = G * C source rows.

This dispatcher is faster than all-to-all if nearly every token needs nearly every rank (K >= ep),
because rows are not sorted before they are sent. One host sync per forward, none in backward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.kernels.rows.record import Rows
from moecore.moe.dispatch.collectives import (
    EqualTokenCounts,
    LayerCheck,
    all_gather_rows,
    all_gather_tensors,
    reduce_scatter_rows,
)
from moecore.moe.placement import ExpertPlacement
from moecore.moe.records import Dispatcher, ExpertInput, Routing


class AllGatherDispatcher(Dispatcher):
    """Dispatcher that all-gathers all tokens of a group; experts read only the routed rows."""

    waits_on_host = True

    def __init__(self, placement: ExpertPlacement) -> None:
        self.placement = placement
        self._sizes = EqualTokenCounts(placement.group)
        self.layer_check = LayerCheck(placement.group, placement.layer)

    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertInput:
        """All-gather tokens, padded to an equal number per rank, as source rows of the experts.

        4 collectives and one host sync; with `routing.pad` only the first call has a host sync.
        """
        p, T = self.placement, x_TD.shape[0]
        if routing.pad:
            self._sizes.check_num_tokens(T, x_TD.device)
            C, num_rows = T, p.compute_max_rows(routing)
        else:
            block_TK = torch.div(routing.destinations_TK, p.num_physical, rounding_mode="floor")
            pairs_P = (block_TK.flatten() == torch.arange(p.ep, device=x_TD.device)[:, None]).sum(1)
            C, num_rows = T, p.compute_balanced_rows(*routing.destinations_TK.shape)
            note = self.layer_check.encode_layer(x_TD)
            local_counts = F.pad(F.pad(pairs_P, (1, 0), value=note), (1, 0), value=T)
            if not x_TD.is_meta:
                counts = all_gather_rows(local_counts[None], p.group).tolist()
                self.layer_check.check_encoded_layers([row[1] for row in counts])
                block = p.first_physical // p.num_physical
                C, num_rows = max(row[0] for row in counts), sum(row[2 + block] for row in counts)
        pad = (0, 0, 0, C - T)
        tensors = (
            F.pad(x_TD, pad),
            F.pad(routing.weights_TK, pad),
            F.pad(routing.destinations_TK, pad, value=-1),
        )
        rows_SD, weights_SK, ids_SK = all_gather_tensors(tensors, p.group, self.pairs)
        index = p.build_index(ids_SK, weights_SK, routing, num_rows)
        return ExpertInput(Rows(rows_SD), index, T)

    def combine(self, y_SD: Tensor, plan: int) -> Tensor:
        """Reduce-scatter the partial sums y_SD in fp32; return y_TD of T = `plan` local tokens."""
        return reduce_scatter_rows(y_SD, self.placement.group, self.pairs)[:plan]
