"""The decoder without its head: embedding, blocks and final norm.

Legend: B sequences, T tokens of a sequence, D model dim, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.attention.context_parallel.local_tokens import (
    ContextParallel,
    LocalTokens,
    check_document_lengths,
    select_cp_ranks,
)
from moecore.attention.kv_cache import KVCache
from moecore.attention.sequence import Sequence, make_packed_sequence
from moecore.base.params import get_local_param
from moecore.models.block import Block
from moecore.models.config import DecoderConfig
from moecore.models.layers import RMSNorm, build_rotary_table
from moecore.models.tensor_parallel import TensorParallel
from moecore.parallel.pipeline.layout import Stage
from moecore.parallel.pipeline.stages import runs_final_norm


class Embedding(nn.Module):
    """Token embedding whose V rows are sharded evenly over the tp ranks."""

    tp_shard_dim = 0

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.tp: TensorParallel | None = None
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.dim, dtype=dtype))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Embed token ids [B, T] to [B, T, D]; under tp, to this rank's slice [B, T / tp, D]."""
        weight_vD = get_local_param(self.weight)
        if self.tp is None:
            return F.embedding(tokens_BT, weight_vD)
        local_ids_BT, elsewhere_BT = self.tp.find_local_rows(tokens_BT, weight_vD.shape[0])
        x_BTD = F.embedding(local_ids_BT, weight_vD)
        return self.tp.reduce_scatter(x_BTD.masked_fill(elsewhere_BT[..., None], 0))


class Backbone(nn.Module):
    """Embedding, blocks and final norm: maps token ids to normed hidden states."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        self.tp: TensorParallel | None = None
        self.cp: ContextParallel | None = None
        self.context_groups: Mapping[int, ContextParallel] = {}  # by the cp of a forward
        self.cache: KVCache | None = None  # in `Decoder.generate`
        self.embed_tokens = Embedding(config, dtype=dtype)
        self.layers = nn.ModuleList(Block(config, i, dtype=dtype) for i in range(config.num_layers))
        self.norm = RMSNorm.from_config(config, dtype=dtype)
        self.full_stage = Stage(
            index=0,
            embedding=True,
            layers=tuple(range(config.num_layers)),
            mtp=tuple(range(config.num_mtp_layers)),
            loss=True,
        )

    def forward(
        self,
        tokens_BT: Tensor,
        sequence: Sequence | None = None,
        *,
        hidden: Tensor | None = None,
        stage: Stage | None = None,
    ) -> Tensor:
        """Return the hidden states of this rank's tokens after the blocks of a pipeline stage.

        `tokens_BT` is not sliced over cp or tp. A stage without the embedding reads `hidden`, the
        output of the previous stage. `stage` None = all blocks. The final norm follows the last
        block.
        """
        stage = self.full_stage if stage is None else stage
        if sequence is None:
            sequence = self.build_sequence(tokens_BT)
        x_BTD = self.embed(tokens_BT, sequence) if stage.embedding else hidden
        assert x_BTD is not None, "checked by Decoder.forward"
        for index in stage.layers:
            x_BTD = self.layers[index](x_BTD, sequence)
        return self.norm(x_BTD) if runs_final_norm(stage, self.config.num_mtp_layers) else x_BTD

    def build_sequence(
        self,
        tokens_BT: Tensor,
        padding_mask_BT: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cp: int | None = None,
    ) -> Sequence:
        """Build the `Sequence` record that blocks read: documents, padding mask and rotary table.

        The arguments are as in `Decoder.forward`; the record describes only this rank's tokens.
        Raises a ValueError for documents that are longer than `max_seq_len`.
        """
        ranks = self.select_cp_ranks(cp)
        (B, T), device = tokens_BT.shape, tokens_BT.device
        if cu_seqlens is None:
            if max_seqlen is not None:
                raise ValueError(
                    f"max_seqlen ({max_seqlen}) must be None without cu_seqlens, where rows are "
                    "documents: leave it out"
                )
            sequence, longest = Sequence(), T
            positions = torch.arange(T, device=device)
            if self.cache is not None:
                positions += self.cache.length
                sequence = Sequence(cache=self.cache)
        else:
            sequence = make_packed_sequence(cu_seqlens, max_seqlen, (B, T), device)
            assert sequence.positions_BT is not None
            positions, longest = sequence.positions_BT, sequence.max_seqlen
        if longest > self.config.max_seq_len:
            raise ValueError(
                f"sequence length ({longest}) must be <= max_seq_len ({self.config.max_seq_len}): "
                "cut the documents, pass max_seqlen with packed ones, or raise max_seq_len"
            )
        if ranks is not None:
            if cu_seqlens is not None:
                check_document_lengths(cu_seqlens, ranks.size)
            local_tokens = LocalTokens(ranks, (B, T), sequence.cu_seqlens, sequence.max_seqlen)
            sequence, shape = replace(sequence, local_tokens=local_tokens), positions.shape[:-1]
            positions = local_tokens.slice_local(positions.view(-1, T)).view(*shape, -1)
        if padding_mask_BT is not None:
            padding_mask_BT = self.slice_local_tokens(padding_mask_BT, sequence)
        if self.config.hash_layers:
            sequence = replace(sequence, token_ids_BT=self.slice_local_tokens(tokens_BT, sequence))
        rotary = build_rotary_table(self.config, positions)
        return replace(sequence, padding_mask_BT=padding_mask_BT, rotary=rotary)

    @property
    def can_cache(self) -> bool:
        """Whether layers support a `KVCache`: eager, no linear or sparse attention, no cp."""
        mla = self.config.mla
        if self.cp is not None or self.context_groups or (mla and mla.sparse is not None):
            return False
        blocks = [block for block in self.layers if isinstance(block, Block)]
        is_compiled = any({"forward", *b.compile_regions} & vars(b).keys() for b in blocks)
        return not is_compiled and all(block.mixer != "linear" for block in blocks)

    def select_cp_ranks(self, cp: int | None) -> ContextParallel | None:
        """Return the cp group for the argument `cp` of a forward; None = no context parallel."""
        return select_cp_ranks(cp, self.cp, self.context_groups)

    def embed(self, tokens_BT: Tensor, sequence: Sequence) -> Tensor:
        """Embed token ids [B, T]; return the embeddings of this cp and tp rank's tokens."""
        x_BTD: Tensor = self.embed_tokens(sequence.slice_local(tokens_BT))
        return x_BTD

    def slice_local_tokens(self, x_BT: Tensor, sequence: Sequence) -> Tensor:
        """Slice a tensor [B, T], identical on all cp and tp ranks, to this rank's tokens."""
        x_BT = sequence.slice_local(x_BT)
        return x_BT if self.tp is None else self.tp.slice_local_tokens(x_BT)
