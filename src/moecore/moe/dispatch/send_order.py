"""The order of the rows that a rank sends: by destination, and then by token.

Legend: T local tokens, K experts per token, P expert blocks (ep), G destinations, M rows to send.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class SendOrder(NamedTuple):
    """The rows to send: token of each row, rows of each token [T, G], and counts per rank."""

    token_ids_M: Tensor  # M is the most rows that could be sent
    slots_TG: Tensor
    counts_G3: Tensor  # int64, for each rank the number of tokens, of their choices there, a note


def mask_choices_by_block(ids_TK: Tensor, experts_per_block: int, num_blocks: int) -> Tensor:
    """Return bool [P, T, K]: whether expert k of token t is in block p of consecutive ids."""
    block_TK = torch.div(ids_TK, experts_per_block, rounding_mode="floor")
    return block_TK == torch.arange(num_blocks, device=ids_TK.device)[:, None, None]


def build_send_order(
    is_in_block_PTK: Tensor, num_rows: int, encoded_layer: int, *, ranks_per_block: int = 1
) -> SendOrder:
    """Return the order of <= `num_rows` rows to send; a block of experts has several ranks."""
    is_sent_GT = is_in_block_PTK.any(-1).repeat_interleave(ranks_per_block, 0)
    choices_G = is_in_block_PTK.sum((1, 2)).repeat_interleave(ranks_per_block)
    order = assign_send_rows(is_sent_GT, num_rows)
    notes_G = torch.full_like(choices_G, encoded_layer)
    return SendOrder(*order, torch.stack([is_sent_GT.sum(1), choices_G, notes_G], dim=1))


def assign_send_rows(is_sent_GT: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Number the rows to send, rank by rank; return each row's token, and each token's rows.

    `is_sent_GT` is True if token t is sent to rank g. The first result is [num_rows], 0 for unused
    rows. The second is [T, G], -1 if a token is not sent to a rank.
    """
    slots_GT = (is_sent_GT.flatten().cumsum(0) - 1).view(is_sent_GT.shape)
    return _order_rows(is_sent_GT, slots_GT, num_rows, unused_token_id=0)


def assign_padded_rows(is_sent_GT: Tensor, rows_per_rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Assign `rows_per_rank` rows to each of G ranks, M rows in total; unused rows are padding.

    Returns the token of each row [M], the row of each token and rank [T, G] (-1 = not sent), and
    bool [M], True if the row has a token.
    """
    # Example, three tokens, two ranks, 2 rows each, is_sent [[1, 0, 1], [0, 1, 0]]: token_ids_M [0,
    # 2, 1, 0], slots_TG [[0, -1], [-1, 2], [1, -1]], used rows [1, 1, 1, 0].
    G = is_sent_GT.shape[0]
    starts_G1 = torch.arange(G, device=is_sent_GT.device)[:, None] * rows_per_rank
    slots_GT = is_sent_GT.cumsum(1) - 1 + starts_G1
    token_ids_M, slots_TG = _order_rows(is_sent_GT, slots_GT, G * rows_per_rank, unused_token_id=-1)
    return token_ids_M.clamp(min=0), slots_TG, token_ids_M >= 0


def _order_rows(
    is_sent_GT: Tensor, slots_GT: Tensor, num_rows: int, *, unused_token_id: int
) -> tuple[Tensor, Tensor]:
    """Return each row's token, and each token's rows [T, G] (-1 = not sent), int32."""
    G, T = is_sent_GT.shape
    tokens_T = torch.arange(T, dtype=torch.int32, device=is_sent_GT.device)
    # Tokens that are not sent are written to one spare row past the end.
    token_ids = tokens_T.new_full((num_rows + 1,), unused_token_id)
    spare_GT = torch.where(is_sent_GT, slots_GT, num_rows)
    token_ids.scatter_(0, spare_GT.flatten(), tokens_T.repeat(G))
    slots_TG = torch.where(is_sent_GT, slots_GT, -1).T.to(torch.int32).contiguous()
    return token_ids[:num_rows], slots_TG
