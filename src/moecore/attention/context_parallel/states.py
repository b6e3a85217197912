"""Linear attention over cp ranks, which exchange the states before their chunks of documents.

Legend: G ranks, n documents, 2 * n chunks of this rank, H value heads, k and v dims of a head, D
channels, t tokens of this rank, w tokens that a convolution looks back, X v + k or v + 1 columns.

Each document is cut into 2 * G chunks (`kernels/zigzag.py`). Each rank stores two of them. The
state of a document passes through the ranks in ascending, then in descending order:

    G = 2    rank 0: chunk 0 -> rank 1: chunk 1 -> rank 1: chunk 2 -> rank 0: chunk 3

A rank first computes the last state L of each of its chunks from a zero state, and the map M of the
chunk (`kernels/linear_attention/contract.py`). An all-to-all gives each rank L and M of all chunks
for some documents and heads. The rank computes the states between chunks, S' = L + M S, and a
second all-to-all returns the state before each chunk to the chunk's rank. The rank then computes
outputs from these states. Backward passes gradients of states in the opposite direction:

    dS = (dS if the gradient dS' of the last state is zero) + M^T dS'

Source: LASP-2 (arXiv:2502.07563), with the transitions of the delta rule.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moecore.base.torch_private import skips_communication
from moecore.kernels.linear_attention import DeltaRule, causal_convolution, gated_delta_rule
from moecore.moe.dispatch.collectives import all_gather_rows


@dataclass(frozen=True)
class LocalChunks:
    """This rank's two chunks (early and late) of each document, for linear attention."""

    group: dist.ProcessGroup
    cu_seqlens: Tensor

    @cached_property
    def chunk_cu_seqlens(self) -> Tensor:
        """int32 [2 * n + 1]: each chunk's first token on this rank, then the number of tokens."""
        ends = self.cu_seqlens[1:] // self.group.size()
        middles = ends - self.chunk_lengths
        inner = torch.stack((middles, ends), dim=1).flatten()
        return F.pad(inner, (1, 0)).int()

    @cached_property
    def chunk_lengths(self) -> Tensor:
        """[n], the number of tokens of one chunk of each document."""
        return self.cu_seqlens.diff() // (2 * self.group.size())

    def gather_previous_tokens(self, x_tD: Tensor, num_tokens: int) -> Tensor:
        """Return [2 * n, num_tokens, D], the tokens before this rank's chunks of n documents.

        Zeros stand for tokens before the document. Collective.
        """
        G, rank = self.group.size(), self.group.rank()
        lengths = self.chunk_lengths.long()[:, None, None]
        back_w = torch.arange(num_tokens, 0, -1, device=x_tD.device)
        last = (self.chunk_cu_seqlens[1:, None] - back_w).clamp(min=0)
        last_GPwD = all_gather_rows(x_tD[last], self.group)
        # A chunk may be shorter than w, so the chunk of each of the w tokens is computed.
        chunk_2 = rank + (2 * G - 1 - 2 * rank) * torch.arange(2, device=x_tD.device)
        place_n2w = chunk_2[:, None] * lengths - back_w
        chunk_n2w = place_n2w.clamp(min=0) // lengths.clamp(min=1)
        from_end = lengths * (chunk_n2w + 1) - place_n2w
        owner = torch.minimum(chunk_n2w, 2 * G - 1 - chunk_n2w)
        document = torch.arange(len(lengths), device=x_tD.device)[:, None, None]
        chunk = (owner * len(lengths) + document) * 2 + (chunk_n2w >= G)
        exists = (place_n2w >= 0) & (lengths > 0)
        source = (chunk * num_tokens + num_tokens - from_end).where(exists, 0).flatten(0, 1)
        before = last_GPwD.flatten(0, 1)[source]
        return before.masked_fill(~exists.flatten(0, 1)[..., None], 0)

    def compute_initial_states(self, transitions: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
        """Return the state before each of this rank's chunks of n documents, [2 * n, H, k, v].

        Implements `StateChain`. Returns the maps of all chunks of the documents and heads whose
        states this rank computes. Collective.
        """
        last, maps = self._send_chunks(transitions).tensor_split((value_dim,), dim=-1)
        states = _accumulate(last, maps)
        return self._return_chunks(states, transitions.shape), maps.contiguous()

    def compute_last_gradients(self, initial_gradients: Tensor, maps: Tensor) -> Tensor:
        """Return the gradient of the state after each of this rank's chunks. Collective."""
        gradients = self._send_chunks(initial_gradients).flip(0)
        maps = maps.flip(0) if maps.shape[-1] == 1 else maps.flip(0).mT
        sums = _accumulate(gradients, maps).flip(0)
        return self._return_chunks(sums, initial_gradients.shape)

    def _send_chunks(self, x_PHkX: Tensor) -> Tensor:
        """Return [2 * G, N, k, X]: tensors of all chunks of N of the documents and heads."""
        G, chains = self.group.size(), x_PHkX.unflatten(0, (-1, 2)).transpose(0, 1).flatten(1, 2)
        chains = F.pad(chains, (0, 0, 0, 0, 0, -chains.shape[1] % G))
        parts = self._run_all_to_all(chains.unflatten(1, (G, -1)).transpose(0, 1))
        return torch.cat((parts[:, 0], parts[:, 1].flip(0)))

    def _return_chunks(self, by_chunk: Tensor, shape: torch.Size) -> Tensor:
        """Return [2 * n, H, k, v], the states of this rank's chunks, from [2 * G, N, k, v]."""
        early, late = by_chunk.chunk(2)
        parts = self._run_all_to_all(torch.stack((early, late.flip(0)), dim=1))
        n, H = shape[0] // 2, shape[1]
        parts = parts.transpose(0, 1).flatten(1, 2)[:, : n * H]
        return parts.unflatten(1, (n, H)).transpose(0, 1).flatten(0, 1)  # type: ignore[no-any-return]

    def _run_all_to_all(self, send_buffer: Tensor) -> Tensor:
        """All-to-all [G, ...] along the first dim."""
        recv_buffer = torch.empty_like(send_buffer, memory_format=torch.contiguous_format)
        if not skips_communication(send_buffer):
            dist.all_to_all_single(recv_buffer, send_buffer.contiguous(), group=self.group)
        return recv_buffer


def _accumulate(terms: Tensor, maps: Tensor) -> Tensor:
    """Return S with S[0] = 0 and S[i + 1] = terms[i] + maps[i] S[i].

    maps[i] has matrices [N, k, k], or factors [N, k, 1].
    """
    states = [torch.zeros_like(terms[0])]
    multiply = torch.mul if maps.shape[-1] == 1 else torch.matmul
    for term, factors in zip(terms[:-1], maps[:-1], strict=True):
        states.append(term + multiply(factors, states[-1]))
    return torch.stack(states)


def run_rule_over_ranks(rule: DeltaRule, chunks: LocalChunks) -> Tensor:
    """Return the outputs o_tHv of a delta rule for the local tokens of `chunks`. Collective."""
    return gated_delta_rule(rule, chunks.chunk_cu_seqlens, chain=chunks)[0]


def causal_conv1d_over_ranks(
    x_tD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, chunks: LocalChunks, *, apply_silu: bool
) -> Tensor:
    """Return y_tD of `causal_conv1d` for this rank's tokens of sharded documents. Collective."""
    past = chunks.gather_previous_tokens(x_tD, weight_DW.shape[1] - 1)
    inputs, cu_seqlens = (x_tD, weight_DW, bias_D), chunks.chunk_cu_seqlens
    return causal_convolution(*inputs, cu_seqlens, previous_tokens_nwD=past, apply_silu=apply_silu)
