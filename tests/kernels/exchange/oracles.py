"""What an exchange brings to every rank, of what all ranks have: in one process, in plain PyTorch.

Letters: as in `kernels/exchange/operations.py`.
"""

import torch
from torch import Tensor


def peers_ref(ids_TK: Tensor, num_local: int, num_blocks: int, etp: int) -> Tensor:
    """Return int64 [T], bit g set where rank g owns one of the token's experts.

    Rank g owns block g // etp: experts [g // etp * num_local, (g // etp + 1) * num_local).

    Example, 2 blocks of 2 experts, etp 2: ids [[0, 1], [1, 3], [-1, -1]] give [3, 15, 0].
    """
    block_TK = torch.where(ids_TK < 0, -1, ids_TK.long() // num_local)
    ranks = torch.arange(num_blocks * etp, device=ids_TK.device)
    needs_TG = (block_TK[:, :, None] == ranks // etp).any(1)
    return (needs_TG.long() << ranks).sum(1)


def spread_ref(x_GCN: Tensor, peers_GC: Tensor, rank: int, fill: float = 0) -> Tensor:
    """Return what `rank` receives, [S, N]: the rows of the tokens that it needs, else `fill`."""
    needed_GC1 = (peers_GC >> rank & 1).bool()[..., None]
    return torch.where(needed_GC1, x_GCN, fill).flatten(0, 1)


def reduce_ref(y_GSN: Tensor, peers_T: Tensor, rank: int) -> Tensor:
    """Return the sums of `rank`'s tokens, [T, N]; y_GSN[p] is what rank p holds."""
    G, S, N = y_GSN.shape
    T = peers_T.shape[0]
    out_TN = y_GSN.new_zeros(T, N, dtype=torch.promote_types(y_GSN.dtype, torch.float32))
    for p in range(G):
        part_TN = y_GSN[p].view(G, S // G, N)[rank, :T]
        out_TN = out_TN + torch.where((peers_T >> p & 1).bool()[:, None], part_TN, 0)
    return out_TN.to(y_GSN.dtype)
