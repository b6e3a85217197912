"""Records of sparse attention: queries and latent keys, the indexer's heads, and key ranges.

Legend: t queries, N keys, K selected keys of a query, H heads, n and r dims of a head without and
with positions, L dims of a latent, v dims of a value, h heads of the indexer, i dims of one.

A latent of L numbers and a rotated key of r numbers represent the keys and values of all heads:

    key of a head = (up_HnL latent, rotated key)      value of a head = latent down_HLv

    score I of a query and a key     sum over h of w_th * relu(q_thi . k_Ni), in fp32
    selected keys                    the K keys with the largest I that the query sees; of equal
                                     scores the earlier keys
    divergence of a query            sum over its keys of p * (log p - log softmax(I)); p, without
                                     gradient, is the mean of attention probabilities over heads

Source: DeepSeek-V3.2-Exp (arXiv:2512.02556, section 2.1).
"""

from typing import NamedTuple

from torch import Tensor


class LatentHeads(NamedTuple):
    """Queries, latent keys and up- and down-projections of latent attention (MLA), one dtype.

    Without projections (both None), `keys_Nl` has the keys and values of all heads: d = v = l = L.
    """

    q_tHd: Tensor  # d = n + r, the last r dims rotated by position
    keys_Nl: Tensor  # l = L + r: latents, then rotated keys
    up_HnL: Tensor | None = None
    down_HLv: Tensor | None = None

    @property
    def latent_dim(self) -> int:
        """Return L, the number of dims of a key that are its value too."""
        return (self.keys_Nl if self.down_HLv is None else self.down_HLv).shape[1]


class IndexerHeads(NamedTuple):
    """The indexer's queries, keys and head weights, with gradients only from KL divergences."""

    q_thi: Tensor
    k_Ni: Tensor
    w_th: Tensor  # fp32, with all constant factors


class KeySpans(NamedTuple):
    """The range of keys that each query may see: from `first_t` to `last_t`, both included."""

    first_t: Tensor  # int64, the first key of the query's document
    last_t: Tensor  # int64, the query's own key
    stride: int  # keys per query: the number of cp ranks
    longest: int  # an upper bound of the keys of a document

    def get_bounds(self, first_query: int, query_end: int, num_keys: int) -> tuple[int, int]:
        """Return (first, end) of the keys that queries [first_query, query_end) may see."""
        # Key `stride * i` is in the document of query i. With stride 1 it is the query's own key.
        # Otherwise a rank has two chunks of 2 * stride, and the own key is < longest / 2 further.
        first = self.stride * (first_query + 1) - self.longest
        last = query_end if self.stride == 1 else self.stride * (query_end - 1) + self.longest // 2
        return max(0, first), min(num_keys, last)


class SparseOutput(NamedTuple):
    """Attention output, selected keys (or None), and KL divergence of the indexer (or None)."""

    o_tHv: Tensor
    selected_tK: Tensor | None  # int32, ascending, then -1; None = all keys were read
    divergence_t: Tensor | None  # fp32; None = `returns_divergences` was False
