"""Attention between a block of queries and a block of keys: its arguments, results and mask.

Letters: B rows, T queries and S keys of a row, H query heads, h key/value heads (each serves H / h
query heads in a row), d dim of a query or key head, v dim of a value head, n documents.

    o[i] = sum_j p[i, j] v[j]    p[i, j] = exp(s[i, j] - lse[i])    s[i, j] = scale q[i] . k[j]

over the keys j that query i sees, with lse[i] = log sum_j exp(s[i, j]).

Note "final o and lse": the backward computes p and the sum of do * o from its arguments o and lse.
A caller that merges several blocks of keys, or adds a sink, calls it once per block with the merged
o and lse:

    lse = log(exp(lse_1) + exp(lse_2))    o = exp(lse_1 - lse) o_1 + exp(lse_2 - lse) o_2

Note "alignment": the last query of a document is aligned with its last key (bottom right). Query i
of a document with T queries and S keys has position i + S - T among the keys. With `causal` it sees
the keys up to this position, and only the last `window` of them.

Note "nothing seen": a query that sees no key has o = 0, lse = -inf and no gradient.

Source: attention sinks as of gpt-oss (arXiv:2508.10925).
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moecore.base.fields import CheckedRecord, Count, CountOrZero, FieldErrors
from moecore.kernels.common import is_gpu


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMask(CheckedRecord):
    """The keys that each query may see, by default causal per row; `cu_seqlens` is unchecked."""

    causal: bool = True  # no key after the query: note "alignment"
    # the largest number of keys per query, its own key included (sliding window); None = all keys.
    # Needs `causal`
    window: Count | None = None
    # int32 [n + 1] on the device of q, from 0 to B * T: document i has the queries
    # cu_seqlens_q[i] : cu_seqlens_q[i + 1] of all rows. A document may have no queries. None = each
    # row is one document
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None  # int32 [n + 1], from 0 to B * S, for keys
    max_length_q: CountOrZero | None = None  # an upper bound of the queries of a document
    max_length_k: CountOrZero | None = None  # an upper bound of the keys of a document

    def _find_field_errors(self) -> FieldErrors:
        if self.window is not None and not self.causal:
            yield "window", "be None without causal: set causal=True"
        for name in ("cu_seqlens_k", "max_length_q", "max_length_k"):
            if (getattr(self, name) is not None) != self.is_packed:
                yield name, "be given with cu_seqlens_q, and only with it: give all four or none"
        cu_seqlens_q, cu_seqlens_k = self.cu_seqlens_q, self.cu_seqlens_k
        if cu_seqlens_q is None or cu_seqlens_k is None:
            return
        for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or not len(cu_seqlens):
                yield name, "be int32 [n + 1]: pass cu_seqlens.int()"
        if cu_seqlens_q.shape != cu_seqlens_k.shape:
            yield "cu_seqlens_k", f"have the shape of cu_seqlens_q {tuple(cu_seqlens_q.shape)}"

    @property
    def is_packed(self) -> bool:
        """Whether rows contain packed documents, at offsets `cu_seqlens_q` and `cu_seqlens_k`."""
        return self.cu_seqlens_q is not None


class QKVBlock(NamedTuple):
    """The inputs of an attention call: queries, keys, values, mask and softmax scale."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: AttentionMask
    scale: float


class AttentionKernel(Protocol):
    """The functions that each attention implementation (a module of this package) defines."""

    def find_problem(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> str | None:
        """Return the reason why this implementation cannot run on these inputs, or None."""

    def forward(self, block: QKVBlock) -> tuple[Tensor, Tensor]:
        """Return attention outputs [B, T, heads, dim] and log-sum-exps of scores [B, heads, T]."""

    def backward(
        self, block: QKVBlock, do: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of q, k and v; o and lse are output and log-sum-exp over all keys."""


def merge_blocks(
    first_o: Tensor, first_lse: Tensor, second_o: Tensor, second_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge (o_BTHv, lse_BHT) of the same queries over two disjoint sets of keys.

    The output is NaN for a query that sees no key in either set.
    """
    lse = torch.logaddexp(first_lse, second_lse)
    old, new = ((part - lse).exp().transpose(1, 2)[..., None] for part in (first_lse, second_lse))
    return first_o * old + second_o * new, lse


def add_sinks(o_BTHv: Tensor, lse_BHT: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return o and lse (log-sum-exp) for one more key per head, with score `sinks_H`, value 0."""
    lse = torch.logaddexp(lse_BHT, sinks_H[:, None].to(lse_BHT.dtype))
    shares_BTH = (lse_BHT - lse).exp().transpose(1, 2)
    return (o_BTHv * shares_BTH[..., None]).to(o_BTHv.dtype), lse


def compute_sinks_grad(do_BTHv: Tensor, o_BTHv: Tensor, lse_BHT: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the gradient [heads] of the sinks' scores; o and log-sum-exp lse include the sinks."""
    delta_BHT = (do_BTHv.to(lse_BHT.dtype) * o_BTHv).sum(-1).transpose(1, 2)
    shares_BHT = (sinks_H[:, None].to(lse_BHT.dtype) - lse_BHT).exp()
    return -(shares_BHT * delta_BHT).sum((0, 2)).to(sinks_H.dtype)


def find_16_bit_problem(q: Tensor, k: Tensor, v: Tensor, capability: tuple[int, int]) -> str | None:
    """Return why 16-bit kernels for GPUs >= `capability` do not support these inputs, or None."""
    if not q.numel() or not k.numel() or not v.numel():
        return "queries, keys and values must not be empty: fused kernels do not define the result"
    if not is_gpu(q):
        return f"device ({q.device.type}) must be cuda"
    if q.is_cuda and torch.cuda.get_device_capability(q.device) < capability:
        return f"device must have compute capability >= {capability}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype ({q.dtype}) must be bfloat16 or float16"
    for name, dim in (("query", q.shape[-1]), ("value", v.shape[-1])):
        if dim % 8 or dim > 256:
            return f"{name} head dim ({dim}) must be a multiple of 8 up to 256"
    return None
