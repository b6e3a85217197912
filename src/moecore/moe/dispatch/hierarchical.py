"""Two-level dispatch: each token is sent at most once to each other NVLink domain.

    rank i of domain a --across--> rank i of domain b --inside b--> the ranks of its experts

    dispatch = exchange across domains, then the dispatch of an inner dispatcher in the domain
    combine  = combine of the inner dispatcher, then the exchange back, and the sum over domains

Legend: T local tokens, D model dim, K experts per token, H domains, A rows that a rank receives
from the ranks with its index in all domains, including its own tokens.

All-to-all sends a token to every rank that needs it, so up to K times over the slow network between
domains. Here each domain receives a token once. The domain sums its ranks' outputs before it
returns them.

Source: HybridEP in Megatron-Core has the same order of the two levels.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from moecore.moe.dispatch.alltoall import AllToAllPlan, ReceivedRows, TokenExchange
from moecore.moe.dispatch.collectives import LayerCheck
from moecore.moe.dispatch.send_order import SendOrder, build_send_order, mask_choices_by_block
from moecore.moe.dispatch.wire import Wire
from moecore.moe.placement import DomainPlacement, ExpertPlacement
from moecore.moe.records import Dispatcher, ExpertInput, Routing


@dataclass(frozen=True, slots=True)
class HierarchicalPlan:
    """Record of one dispatch for `combine`: the records of both levels of dispatch."""

    across: AllToAllPlan
    inside: Any
    num_arrived: int  # A


class HierarchicalDispatcher(Dispatcher):
    """Sends each token once to every domain that owns one of its experts, then to ranks inside.

    A domain is a set of ranks with fast links. `inner_dispatcher` dispatches in this rank's domain.
    `cross_domain_group` has one rank per domain: the ranks with this rank's index in the domain.
    """

    waits_on_host = True

    def __init__(
        self,
        placement: ExpertPlacement,
        domain: DomainPlacement,
        inner_dispatcher: Dispatcher,
        cross_domain_group: dist.ProcessGroup,
        *,
        fp8: bool = False,
    ) -> None:
        self.placement, self.domain = placement, domain
        self._inside = inner_dispatcher  # over the ranks of `domain`, with the same `fp8`
        self._across = TokenExchange(cross_domain_group, placement.layer, Wire(fp8))

    @property
    def layer_check(self) -> LayerCheck | None:
        """The check that ranks run the same layer; None if `inner_dispatcher` has no such check."""
        inner: LayerCheck | None = getattr(self._inside, "layer_check", None)
        return None if inner is None else self._across.layer_check

    def has_spare_rows(self, *, pads: bool) -> bool:
        """Return the value of `inner_dispatcher`, see `Dispatcher.has_spare_rows`."""
        return self._inside.has_spare_rows(pads=pads)

    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertInput:
        """Send tokens to domains, then to ranks inside the domain; return the experts' input.

        Across domains: 3 collectives, and one host sync (with `routing.pad` only the first call).
        """
        (T, K), ids_TK = routing.expert_ids_TK.shape, routing.destinations_TK
        num_experts, H = self.domain.num_domain_experts, self._across.group.size()
        self._across.wire.check_dim(x_TD.shape[1])
        if routing.pad:
            num_slots = min(T, num_experts * routing.max_rows_per_expert)
            needs_HT = mask_choices_by_block(ids_TK, num_experts, H).any(-1)
            received_rows = self._across.send_padded(x_TD, routing, needs_HT, num_slots, self.pairs)
        else:
            order = self.prepare_send_order(ids_TK, self._across.layer_check.encode_layer(x_TD))
            even = self.domain.compute_balanced_domain_tokens(T, K), 0
            received_rows, _ = self._across.send_tokens(
                x_TD, routing, order, self.pairs, balanced_counts=even
            )
        rows_AD = received_rows.rows.widen()  # packing these rows again gives the same bytes
        inp = self._dispatch_in_domain(rows_AD, received_rows, routing)
        balanced = None if inp.balanced is None else self.placement.count_balanced(T, K)
        if received_rows.plan.receiver is not None:
            received_rows.plan.receiver.next = inp.receiver
        plan = HierarchicalPlan(received_rows.plan, inp.plan, rows_AD.shape[0])
        parts = (inp.rows, inp.index, plan, inp.unsummed, balanced)
        return ExpertInput(*parts, receiver=inp.receiver)

    def prepare_send_order(self, ids_TK: Tensor, encoded_layer: int) -> SendOrder:
        """Return the order of the rows to send, sorted by domain, and counts per domain."""
        (T, K), H = ids_TK.shape, self._across.group.size()
        return build_send_order(
            mask_choices_by_block(ids_TK, self.domain.num_domain_experts, H),
            T * min(H, K),
            encoded_layer,
        )

    def _dispatch_in_domain(
        self, rows_AD: Tensor, received_rows: ReceivedRows, routing: Routing
    ) -> ExpertInput:
        """Dispatch received rows, unpacked, to this domain's ranks; return the experts' input."""
        H, inside, outer = self._across.group.size(), self._inside, self._across.layer_check
        weights_AK, domain = received_rows.weights_SK, dist.get_rank(self._across.group)
        ids_AK = self.domain.convert_to_domain_ids(received_rows.ids_SK, domain)
        spare = H * routing.expert_ids_TK.shape[0] - rows_AD.shape[0]
        if spare > 0 and inside.has_spare_rows(pads=False):  # then shapes depend only on T
            rows_AD, weights_AK = (F.pad(x, (0, 0, 0, spare)) for x in (rows_AD, weights_AK))
            ids_AK = F.pad(ids_AK, (0, 0, 0, spare), value=-1)
        layer_check: LayerCheck | None = getattr(inside, "layer_check", None)
        if layer_check is not None:
            layer_check.joins = outer.is_skipped
        inside.pairs = self.pairs
        capacity = None if routing.capacity is None else H * routing.max_rows_per_expert
        inp = inside.dispatch(
            rows_AD,
            Routing(
                expert_ids_TK=ids_AK,
                weights_TK=weights_AK,
                chosen_ids_TK=ids_AK,
                capacity=capacity,
                pad=routing.pad,
                rows_multiple=routing.rows_multiple,
            ),
        )
        if layer_check is not None:
            outer.is_skipped = layer_check.is_skipped
        return inp

    def combine(self, y_SD: Any, plan: HierarchicalPlan) -> Tensor:
        """Sum y_SD inside each domain, send sums to tokens' ranks; return y_TD, summed in fp32."""
        y_AD = self._inside.combine(y_SD, plan.inside)[: plan.num_arrived]
        return self._across.return_sums(y_AD, plan.across, self.pairs)
