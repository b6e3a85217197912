"""Documents cut into pieces whose states go from piece to piece, as over context parallel ranks."""

from itertools import accumulate, chain

import torch
from torch import Tensor

# Pieces of each document: several chunks of 64 tokens with a rest, one chunk, one token, or none.
# Pieces begin in the middle of chunks of their document.
PIECES = [[80, 130, 1, 40], [64], [3, 0, 70]]


class Pieces:
    """A `StateChain` of pieces that are the documents of a rule, in one process."""

    def __init__(self, pieces: list[list[int]], device: str = "cpu") -> None:
        lengths = list(chain.from_iterable(pieces))
        self.cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        self.borders = [0, *accumulate(map(sum, pieces))]  # of documents
        self.is_first = [i == 0 for lengths in pieces for i in range(len(lengths))]

    def compute_initial_states(self, transitions: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
        last, maps = transitions[..., :value_dim], transitions[..., value_dim:]
        if maps.shape[-1] == 1:
            maps = torch.diag_embed(maps[..., 0])
        states = [torch.zeros_like(last[0])]
        for i, is_first in enumerate(self.is_first[1:]):
            states.append(last[i] * (not is_first) + maps[i] @ states[-1] * (not is_first))
        return torch.stack(states), maps

    def compute_last_gradients(self, initial_gradients: Tensor, maps: Tensor) -> Tensor:
        later = [torch.zeros_like(initial_gradients[0])]
        for i in reversed(range(1, len(self.is_first))):
            of_first = initial_gradients[i] + maps[i].mT @ later[-1]
            later.append(of_first * (not self.is_first[i]))
        return torch.stack(later[::-1])
