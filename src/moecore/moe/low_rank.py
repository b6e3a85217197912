"""Low-rank updates of experts' matrices (LoRA): W + s * B A per expert, which is never formed.

Legend: E experts, e local experts (E / ep), I and O input and output dims of a matrix, r rank,
B rows of a batch, T local tokens, N adapters, K choices of a token.

    y_O = W_OI x_I + s * B_Or (A_rI x_I)

The rows of a batch may use different adapters (`RowAdapters`). Dispatch then sorts a rank's rows by
(expert, adapter), and the products with A and B run over these groups.

A and B are replicated over etp, which shards W. A rank uses the slices of A and B that match its
slice of W. The sum of the gradients over etp is the full gradient.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.kernels.experts.contract import LowRankUpdate
from moecore.moe.records import ExpertInput, Routing

ALIGNMENT = 16  # bytes of a row, which grouped products ask for
Read = Callable[[nn.Parameter], Tensor]
SlicePair = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class RowAdapters(threading.local):
    """Adapter ids of the batch rows whose forward or backward runs in this thread.

    Id i is the i-th active LoRA adapter of peft. `num_adapters` is the number of adapters.
    """

    ids_B: Tensor | None = None  # integers; None = every row uses the sum of the active adapters

    def __init__(self, num_adapters: int) -> None:
        self.num_adapters = num_adapters

    def expand(self, num_tokens: int) -> Tensor | None:
        """Return each token's adapter id, [T], for rows of equal length; None without ids."""
        if self.ids_B is None:
            return None
        length, rest = divmod(num_tokens, len(self.ids_B))
        if rest:
            raise ValueError(
                f"tokens of a layer with adapters ({num_tokens}) must be a multiple of the rows of "
                f"adapter_ids ({len(self.ids_B)}): pass one id per row"
            )
        return self.ids_B[:, None].expand(-1, length).flatten()

    def group_choices(self, routing: Routing) -> Routing:
        """Return the routing with physical ids expert * N + adapter, for N = `num_adapters`."""
        # Example, N=2, experts [[3, 0], [2, -1]], adapters [0, 1]: groups [[6, 0], [5, -1]].
        experts_TK, ids_T = routing.destinations_TK, self.expand(len(routing.weights_TK))
        groups_TK = experts_TK * self.num_adapters
        if ids_T is not None:
            groups_TK = groups_TK + ids_T[:, None].to(torch.int32)
        return replace(routing, physical_TK=groups_TK.where(experts_TK >= 0, -1))

    def add_groups(self, inp: ExpertInput) -> ExpertInput:
        """Return `inp`, dispatched by (expert, adapter), with offsets_e per expert.

        offsets_g is per (expert, adapter), or None without adapter ids.
        """
        offsets_g = inp.index.offsets_e
        offsets_e = offsets_g[self.num_adapters - 1 :: self.num_adapters].contiguous()
        index = inp.index._replace(
            offsets_e=offsets_e, offsets_g=None if self.ids_B is None else offsets_g
        )
        return replace(inp, index=index)


class LowRank(nn.Module):
    """LoRA adapters of E experts' matrices [E, O, I]: A [E, r, I], B [E, O, r], and scales.

    O and I are output and input dims; r is the rank. `pairs` maps adapter names to (A, B), and
    `scaling` maps adapter names to scales.
    """

    in_exports = False  # whether exports add the updates of a 4-bit weight, as forward does

    def __init__(
        self, pairs: Mapping[str, tuple[nn.Parameter, nn.Parameter]], scaling: Mapping[str, float]
    ) -> None:
        super().__init__()
        self.lora_A = nn.ParameterDict({name: a for name, (a, _) in pairs.items()})
        self.lora_B = nn.ParameterDict({name: b for name, (_, b) in pairs.items()})
        self.scaling = dict(scaling)

    @property
    def active(self) -> Sequence[str]:
        """Names of the LoRA adapters that are active in the model, in order."""
        return list(self.lora_A)

    @property
    def in_use(self) -> list[str]:
        """Names of the active LoRA adapters that this matrix has, in order."""
        return [name for name in self.active if name in self.lora_A]

    def make_local_update(
        self, read: Read, slice_pair: SlicePair, num_groups: int = 0
    ) -> LowRankUpdate | None:
        """Return this rank's A and B, concatenated over active adapters; None = no adapter.

        Differentiable. `read` returns the local experts' part of a parameter. `slice_pair` slices A
        [e, r, I] and B [e, O, r] for this rank's etp slice of the matrix. If each row uses one of
        `num_groups` adapters, dim 0 is e * num_groups and r is the largest rank.
        """
        names = self.in_use
        if not names:
            return None
        parts_a = {name: read(self.lora_A[name]) for name in names}
        parts_b = {name: read(self.lora_B[name]) * self.scaling[name] for name in names}
        if num_groups:
            sizes = [a.shape[1] for a in parts_a.values()]
            no_a, no_b = parts_a[names[0]][:, :0], parts_b[names[0]][:, :, :0]
            groups_a, groups_b = [no_a] * num_groups, [no_b] * num_groups
            for i, name in enumerate(self.active):
                groups_a[i], groups_b[i] = parts_a.get(name, no_a), parts_b.get(name, no_b)
            padded_a = [F.pad(a, (0, 0, 0, max(sizes) - a.shape[1])) for a in groups_a]
            padded_b = [F.pad(b, (0, max(sizes) - b.shape[2])) for b in groups_b]
            a_erI, b_eOr = (torch.stack(x, dim=1).flatten(0, 1) for x in (padded_a, padded_b))
        elif len(names) == 1:  # torch.cat copies a single tensor, too
            a_erI, b_eOr = parts_a[names[0]], parts_b[names[0]]
        else:
            a_erI = torch.cat(list(parts_a.values()), dim=1)
            b_eOr = torch.cat(list(parts_b.values()), dim=2)
        a_erI, b_eOr = (x.contiguous() for x in slice_pair(a_erI, b_eOr))
        missing = -a_erI.shape[1] % (ALIGNMENT // a_erI.element_size())
        if missing:
            a_erI, b_eOr = F.pad(a_erI, (0, 0, 0, missing)), F.pad(b_eOr, (0, missing))
        return LowRankUpdate(a_erI, b_eOr)
