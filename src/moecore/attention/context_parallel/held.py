"""The ranks that hold parts of the same rows, and which tokens of a forward each of them holds.

Activations are cut along the tokens, and attention alone communicates, in one of four ways:

    allgather   every rank gathers all keys and values and computes its own queries
    a2a         every rank gets all tokens of some heads, and sends the results back
    p2p         keys and values go round a ring, and every rank merges what its queries see
    a2a+p2p     heads for tokens among neighbours, rings between those groups

Legend: B rows, T tokens of a row, G cp ranks, t = T / G tokens of a row of this rank, X any dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.attention.context_parallel.layout import ChunkLayout
from moecore.attention.context_parallel.states import LocalPieces
from moecore.base.regions import run_and_save
from moecore.base.torch_private import all_gather_single, is_silent
from moecore.kernels.zigzag import row_borders
from moecore.moe.dispatch.collectives import exchanged


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """This rank's place among the cp ranks, and who communicates with whom."""

    group: dist.ProcessGroup
    # those that exchange heads for tokens, consecutive ranks of the group; None = none
    a2a: dist.ProcessGroup | None = None
    # those that keys and values go round, every len(a2a)-th rank of the group; None = none. Without
    # both keys and values are gathered
    ring: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank's index."""
        return self.group.rank()

    @property
    def gathers(self) -> bool:
        """Whether the way is "allgather"."""
        return self.a2a is None and self.ring is None


def ranks_of(
    cp: int | None, ranks: ContextParallel | None, groups: Mapping[int, ContextParallel]
) -> ContextParallel | None:
    """Return the cp ranks of a forward: `ranks`, or the group of another cp; None = no others."""
    size = 1 if ranks is None else ranks.size
    if cp in (None, size):
        return ranks
    if cp not in groups:
        raise ValueError(
            f"cp ({cp}) must be one of {[size, *groups]}, which have groups of ranks: parallelize "
            "with ContextOptions(dynamic=True), and plan for its data ranks"
        )
    return groups[cp]


class LocalTokens:
    """Who holds what, made once per forward; a plain class, as `RotaryTable` is.

    `shape` is B and T; documents are over all rows, on the device of the tokens; None = rows.

    `layout` is of the tokens on all of them, `a2a_layout` of an all-to-all's ranks' on these. Rows
    must be multiples of 2 * cp; `check_documents` is for documents.
    """

    def __init__(
        self,
        cp: ContextParallel,
        shape: tuple[int, int],
        cu_seqlens: Tensor | None = None,
        max_seqlen: int = 0,
    ) -> None:
        (B, T), ring = shape, 1 if cp.ring is None else cp.ring.size()
        if T % (2 * cp.size):
            raise ValueError(
                f"sequence length ({T}) must be a multiple of 2 * cp ({2 * cp.size}): pad the rows"
            )
        self.cp = cp
        self._shape, self._cu_seqlens = shape, cu_seqlens
        self._pieces: LocalPieces | None = None
        self.layout = ChunkLayout(cp.size, B * T, cu_seqlens, max_seqlen)
        part = None if cu_seqlens is None else cu_seqlens // ring
        self.a2a_layout = ChunkLayout(cp.size // ring, B * T // ring, part, -(-max_seqlen // ring))
        self._ring = None
        if cp.a2a is not None and cp.ring is not None:
            self._ring = LocalTokens(ContextParallel(cp.ring), shape, cu_seqlens, max_seqlen)

    @property
    def over_ring(self) -> LocalTokens:
        """Who of the ring holds what, of the heads that an all-to-all has left to this rank."""
        return self._ring or self

    def pieces(self, device: torch.device) -> LocalPieces:
        """Return this rank's pieces of documents, or of rows; the same in every call."""
        if self._pieces is None:
            B, T = self._shape
            rows = row_borders(B, B * T, device)
            documents = rows if self._cu_seqlens is None else self._cu_seqlens
            self._pieces = LocalPieces(self.cp.group, documents)
        return self._pieces

    def slice_local(self, x_BTX: Tensor) -> Tensor:
        """Return x_BtX, this rank's tokens of whole rows. No communication."""
        return self.layout.split(x_BTX)[self.cp.rank].contiguous()

    @torch.compiler.disable
    def gather(self, x_BtX: Tensor) -> Tensor:
        """Return x_BTX of all ranks in order; backward adds all ranks' gradients. Collective."""
        x_BTX: Tensor = run_and_save(exchanged, x_BtX, self.gather_values, self.sum_values)
        return x_BTX

    def gather_replicated(self, x_BtX: Tensor) -> Tensor:
        """Return x_BTX for a result equal on all ranks; backward takes this rank's tokens of it."""
        x_BTX: Tensor = run_and_save(exchanged, x_BtX, self.gather_values, self.slice_local)
        return x_BTX

    def gather_values(self, x_BtX: Tensor) -> Tensor:
        """Return x_BTX of all ranks in order, outside of autograd. Collective."""
        size = self.cp.size
        out = x_BtX.new_empty((size * x_BtX.shape[0], *x_BtX.shape[1:]))
        if not is_silent(out):  # where bytes are counted
            all_gather_single(out, x_BtX.contiguous(), group=self.cp.group)
        return self.layout.join(out.unflatten(0, (size, x_BtX.shape[0])))

    def sum_values(self, x_BTX: Tensor) -> Tensor:
        """Return x_BtX, this rank's tokens of the sum over ranks, added in fp32. Collective."""
        # A reduce-scatter carries as many bytes, and would round at every rank.
        send_buffer = self.layout.split(x_BTX).contiguous()
        recv_buffer = torch.empty_like(send_buffer)
        dist.all_to_all_single(recv_buffer, send_buffer, group=self.cp.group)
        dtype = torch.promote_types(x_BTX.dtype, torch.float32)
        return recv_buffer.sum(0, dtype=dtype).to(x_BTX.dtype)


def check_documents(cu_seqlens: Tensor, cp: int) -> None:
    """Raise for documents [n + 1] that cannot be cut; values on the CPU alone are read."""
    if cu_seqlens.device.type != "cpu":
        return
    lengths = cu_seqlens.diff().tolist()
    for document, length in enumerate(lengths):
        if length % (2 * cp):
            raise ValueError(
                f"cu_seqlens (document {document} of {length} tokens) must have documents of "
                f"multiples of 2 * cp ({2 * cp}): pad each"
            )
