"""Low-rank updates of experts' matrices (LoRA): W + s * B A per expert, which is never formed.

Legend: E experts, e local experts (E / ep), I and O input and output dims of a matrix, r rank.

    y_O = W_OI x_I + s * B_Or (A_rI x_I)

A and B are replicated over etp, which shards W. A rank uses the slices of A and B that match its
slice of W. The sum of the gradients over etp is the full gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.kernels.experts.contract import LowRankUpdate

ALIGNMENT = 16  # bytes of a row, which grouped products ask for
Read = Callable[[nn.Parameter], Tensor]
SlicePair = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class LowRank(nn.Module):
    """LoRA adapters of E experts' matrices [E, O, I]: A [E, r, I], B [E, O, r], and scales.

    O and I are output and input dims, and r is the rank. `pairs` has A and B of each adapter by
    name, and `scaling` its scale.
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
    def in_use(self) -> list[str]:
        """Names of the LoRA adapters that forward uses, in order."""
        return list(self.lora_A)

    def make_local_update(self, read: Read, slice_pair: SlicePair) -> LowRankUpdate | None:
        """Return this rank's part of A and B, all adapters together; None = no adapter.

        Differentiable. `read` returns the local experts' part of a parameter. `slice_pair` slices A
        [e, r, I] and B [e, O, r] to this rank's part of the matrix.
        """
        pairs = [(read(self.lora_A[n]), read(self.lora_B[n]), self.scaling[n]) for n in self.in_use]
        if not pairs:
            return None
        parts_a, parts_b = [a for a, _, _ in pairs], [b * s for _, b, s in pairs]
        if len(pairs) == 1:  # torch.cat copies a single tensor, too
            a_erI, b_eOr = slice_pair(parts_a[0], parts_b[0])
        else:
            a_erI, b_eOr = slice_pair(torch.cat(parts_a, dim=1), torch.cat(parts_b, dim=2))
        a_erI, b_eOr = a_erI.contiguous(), b_eOr.contiguous()
        missing = -a_erI.shape[1] % (ALIGNMENT // a_erI.element_size())
        if missing:
            a_erI, b_eOr = F.pad(a_erI, (0, 0, 0, missing)), F.pad(b_eOr, (0, missing))
        return LowRankUpdate(a_erI, b_eOr)
