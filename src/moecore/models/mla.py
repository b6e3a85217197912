"""Multi-head latent attention: queries, keys and values are projected from small latents.

Legend: B sequences, T tokens of a sequence, t tokens of this tp rank, D model dim, H query heads
(this rank's share under tp), Q latent of the queries, C latent of keys and values, n and r the
dims of a query or key head without and with rotary embedding, v dim of a value head.

    x_BtD -> q_a_proj, norm -> q_BtQ --+                    +-> q_b_proj  -> q_BTH(n+r) -- rotate r
                                       +-> gather (tp) -> --+-> kv_b_proj -> k_BTHn, v_BTHv
    x_BtD -> kv_a_proj -> norm -> c_BtC, k_Btr -------------+-> k_BT1r, the same for all heads

Under tensor parallelism heads are sharded and the weights of latents are replicated. Each rank
computes the latents of its own tokens, so these weights have partial-sum gradients. Ranks exchange
latents (Q + C + r numbers per token) instead of hidden states (D).

Context parallelism by all-gather exchanges key/value latents and rotated shared keys (C + r numbers
per token). Every rank then computes the keys and values of full rows.

With `sparse` a query reads the keys that an `Indexer` selects (h heads of dim i).
`attention/sparse.py` receives queries and latents, and applies `kv_b_proj` to queries and outputs.

Source: DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3.2-Exp (arXiv:2512.02556, section 2.1); parameter
names are transformers'.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.attention.function import attend
from moecore.attention.sequence import RotaryTable, Sequence
from moecore.attention.sparse import KeyChoice, attend_sparse
from moecore.base.options.indexer import IndexerConfig
from moecore.base.params import get_local_param
from moecore.kernels.sparse_attention import IndexerHeads, LatentHeads
from moecore.models.config import DecoderConfig
from moecore.models.layers import RMSNorm, ScoreObserver
from moecore.models.tensor_parallel import TensorParallel, all_reduce_replicated
from moecore.models.tp_products import apply_row_linear
from moecore.moe.aux_loss import AuxLoss
from moecore.precision.plain import Linear


class KeyNorm(nn.LayerNorm):
    """LayerNorm of the indexer's keys; its parameters may be sharded DTensors."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normed input, in the dtype of the input."""
        weight, bias = (get_local_param(p).to(input.dtype) for p in (self.weight, self.bias))
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class Indexer(nn.Module):
    """Scores the keys that queries of sparse latent attention may select; replicated over tp."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        mla = config.mla
        assert mla is not None and mla.sparse is not None, "sparse attention has its dims"
        self.num_heads, self.head_dim = mla.sparse.num_heads, mla.sparse.head_dim
        self.tp: TensorParallel | None = None
        self.wq_b = Linear(mla.q_lora_rank, self.num_heads * self.head_dim, dtype=dtype)
        self.wk = Linear(config.dim, self.head_dim, dtype=dtype)
        self.k_norm = KeyNorm(self.head_dim, eps=1e-6, dtype=dtype)
        self.weights_proj = Linear(config.dim, self.num_heads, dtype=dtype)

    def forward(self, x_BTD: Tensor, q_BTQ: Tensor, rotary: RotaryTable) -> IndexerHeads:
        """Return the indexer's queries, keys and head weights of T tokens, all-gathered over tp."""
        k_BTi, w_BTh = self.k_norm(self.wk(x_BTD)), self.weights_proj(x_BTD)
        if self.tp is not None:
            kw_BTX = self.tp.gather_tokens(torch.cat((k_BTi, w_BTh), dim=-1))
            k_BTi, w_BTh = kw_BTX.split((self.head_dim, self.num_heads), dim=-1)
        q_BThi = rotary.rotate(self.wq_b(q_BTQ).unflatten(-1, (-1, self.head_dim)))
        k_BTi = rotary.rotate(k_BTi.unsqueeze(2)).squeeze(2)
        scale = self.num_heads**-0.5 * self.head_dim**-0.5
        return IndexerHeads(q_BThi, k_BTi, w_BTh.float() * scale)


def make_key_choice(config: IndexerConfig | None, layer: nn.Module, top_k: int) -> KeyChoice:
    """Return the record that limits attention to `top_k` keys and enables the indexer's loss.

    In the stage "warm_up" of `config`, attention reads all keys. The loss is enabled if `config` is
    not None or "frozen", and `layer` runs in training mode with gradients.
    """
    config = config or IndexerConfig(stage="frozen")
    learns = config.stage != "frozen" and layer.training and torch.is_grad_enabled()
    return KeyChoice(
        top_k=None if config.stage == "warm_up" else top_k,
        returns_divergences=learns,
        fp8_scores=config.fp8_scores,
    )


def compute_mean_divergence(divergence_BT: Tensor, sequence: Sequence) -> Tensor:
    """Return this cp rank's term of the mean KL divergence over tokens that are not padding."""
    mask_BT, local_tokens = sequence.padding_mask_BT, sequence.local_tokens
    if mask_BT is None:
        cp = 1 if local_tokens is None else local_tokens.cp.size
        return divergence_BT.sum() / (divergence_BT.numel() * cp)
    number = (~mask_BT).sum()
    if local_tokens is not None:
        number = all_reduce_replicated(number, local_tokens.cp.group)
    return divergence_BT.masked_fill(mask_BT, 0).sum() / number.clamp(min=1)


class LatentAttention(nn.Module):
    """Causal multi-head latent attention with the sizes of `DecoderConfig.mla`."""

    observe_scores: ScoreObserver | None = None  # as in `Attention`
    indexer_config: IndexerConfig | None = None  # None = "frozen"

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        assert config.mla is not None, "a decoder without mla has grouped-query attention"
        self.mla = mla = config.mla
        self.tp: TensorParallel | None = None
        D, H, C = config.dim, config.num_heads, mla.kv_lora_rank
        if mla.q_lora_rank:
            self.q_a_proj = Linear(D, mla.q_lora_rank, dtype=dtype)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, mla.norm_eps, dtype=dtype)
            queries = H * mla.qk_head_dim
            self.q_b_proj = Linear(mla.q_lora_rank, queries, tp_shard_dim=0, dtype=dtype)
        else:
            self.q_proj = Linear(D, H * mla.qk_head_dim, tp_shard_dim=0, dtype=dtype)
        self.kv_a_proj_with_mqa = Linear(D, C + mla.qk_rope_head_dim, dtype=dtype)
        self.kv_a_layernorm = RMSNorm(C, mla.norm_eps, dtype=dtype)
        kv_dim = H * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.kv_b_proj = Linear(C, kv_dim, tp_shard_dim=0, dtype=dtype)
        self.o_proj = Linear(H * mla.v_head_dim, D, tp_shard_dim=1, residual=True, dtype=dtype)
        self.indexer = None if mla.sparse is None else Indexer(config, dtype=dtype)

    def forward(self, x_BTD: Tensor, sequence: Sequence) -> Tensor:
        """Return the attention output of this rank's normed tokens, in the shape of x."""
        C, r = self.mla.kv_lora_rank, self.mla.qk_rope_head_dim
        q_BTQ = self.q_a_layernorm(self.q_a_proj(x_BTD)) if self.mla.q_lora_rank else x_BTD
        c_BTC, k_BTr = self.kv_a_proj_with_mqa(x_BTD).split((C, r), dim=-1)
        c_BTC = self.kv_a_layernorm(c_BTC)
        if self.tp is not None:
            latents_BTX = self.tp.gather_tokens(torch.cat((q_BTQ, c_BTC, k_BTr), dim=-1))
            q_BTQ, c_BTC, k_BTr = latents_BTX.split((q_BTQ.shape[-1], C, r), dim=-1)
        if self.indexer is not None:
            y_BTHv = self._attend_sparsely(self.indexer, x_BTD, q_BTQ, c_BTC, k_BTr, sequence)
            return apply_row_linear(y_BTHv.flatten(2), self.o_proj, self.tp)
        q_BTHq, k_BTHq, v_BTHv = self._compute_heads(q_BTQ, c_BTC, k_BTr, sequence)
        if self.observe_scores is not None:
            self.observe_scores(q_BTHq, k_BTHq, sequence, self.mla.score_scale)
        y_BTHv = attend(q_BTHq, k_BTHq, v_BTHv, sequence, scale=self.mla.score_scale)
        return apply_row_linear(y_BTHv.flatten(2), self.o_proj, self.tp)

    def enable_indexer_training(self, config: IndexerConfig) -> None:
        """Use `config` in later forwards; unless "frozen", those in training mode have its loss."""
        self.indexer_config = config
        if config.stage != "frozen":
            self.aux_loss = AuxLoss()

    @property
    def is_eager(self) -> bool:
        """Whether CUDA graphs must exclude this module: the indexer's loss uses host state."""
        return self.indexer is not None

    def _attend_sparsely(
        self,
        indexer: Indexer,
        x_BTD: Tensor,
        q_BTQ: Tensor,
        c_BTC: Tensor,
        k_BTr: Tensor,
        sequence: Sequence,
    ) -> Tensor:
        """Return the attention y_BTHv over selected keys; its backward also trains the indexer."""
        rotary, mla = sequence.rotary, self.mla
        assert rotary is not None and mla.sparse is not None
        choice = make_key_choice(self.indexer_config, self, mla.sparse.top_k)
        with torch.set_grad_enabled(choice.returns_divergences):  # a choice is a constant
            index = indexer(x_BTD.detach(), q_BTQ.detach(), rotary)
        n, v = mla.qk_nope_head_dim, mla.v_head_dim
        # By a product with the identity: FP8 has its part in it.
        eye_CC = torch.eye(c_BTC.shape[-1], dtype=c_BTC.dtype, device=c_BTC.device)
        up_CHn, down_CHv = self.kv_b_proj(eye_CC).unflatten(-1, (-1, n + v)).split((n, v), dim=-1)
        q_BTHq = rotary.rotate_pairs(self.q_b_proj(q_BTQ).unflatten(-1, (-1, mla.qk_head_dim)))
        keys_BTl = torch.cat((c_BTC, rotary.rotate_pairs(k_BTr[:, :, None])[:, :, 0]), dim=-1)
        heads = LatentHeads(q_BTHq, keys_BTl, up_CHn.permute(1, 2, 0), down_CHv.transpose(0, 1))
        out = attend_sparse(heads, index, sequence, choice, scale=mla.score_scale)
        y_BTHv: Tensor = out.o_tHv
        if out.divergence_t is None:
            return y_BTHv
        assert self.indexer_config is not None
        loss = self.indexer_config.loss_coef * compute_mean_divergence(out.divergence_t, sequence)
        return self.aux_loss.attach_loss(y_BTHv, loss, sequence.depth)  # type: ignore[no-any-return]

    def _compute_heads(
        self, q_BTQ: Tensor, c_BTC: Tensor, k_BTr: Tensor, sequence: Sequence
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project latents to queries, keys and values of heads; rotate queries and keys."""
        rotary, local_tokens = sequence.rotary, sequence.local_tokens
        assert rotary is not None, "a decoder's sequence has a rotary table"
        n, r, v = self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim, self.mla.v_head_dim
        q = self.q_b_proj(q_BTQ) if self.mla.q_lora_rank else self.q_proj(q_BTQ)
        q_BTHq = rotary.rotate_pairs(q.unflatten(-1, (-1, n + r)))
        k_BT1r = rotary.rotate_pairs(k_BTr[:, :, None])
        if local_tokens is not None and local_tokens.cp.gathers:  # latents, which are smaller
            full_BTX = local_tokens.gather(torch.cat((c_BTC, k_BT1r[:, :, 0]), dim=-1))
            c_BTC, k_BTr = full_BTX.split((c_BTC.shape[-1], r), dim=-1)
            k_BT1r = k_BTr[:, :, None]
        k_BTHn, v_BTHv = self.kv_b_proj(c_BTC).unflatten(-1, (-1, n + v)).split((n, v), dim=-1)
        k_BTHr = k_BT1r.expand(*k_BTHn.shape[:-1], r)
        return q_BTHq, torch.cat((k_BTHn, k_BTHr), dim=-1), v_BTHv
