"""QK-clip: scales down queries and keys of heads whose attention logits exceed a threshold.

Legend: B sequences, T tokens, H query heads, h key heads, g = H / h, d head dim; n and r, the parts
of a latent attention's head without and with rotary embedding.

    forward   q, k -> largest logit of each head of this rank, over the step's micro-batches
    step      one all-reduce (max) -> gamma_H = min(1, tau / max_H) -> rows of the projections

| attention | queries | keys |
|---|---|---|
| grouped; gamma_h is the minimum of a key's g heads | gamma_H / sqrt(gamma_h) | sqrt(gamma_h) |
| latent, part n (values are not scaled) | sqrt(gamma_H) | sqrt(gamma_H) |
| latent, part r, whose key all heads share | gamma_H | 1 |

Each head's logits are multiplied by that head's gamma, and logits of other heads do not change.

Source: MuonClip of Kimi K2 (arXiv:2507.20534), with the rule for shared key heads added.
"""

from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.attention.sequence import Sequence
from moecore.base.fields import Positive, check_arguments
from moecore.base.params import clean_name, compute_global_indices
from moecore.base.regions import run_and_save
from moecore.base.torch_private import get_local_tensor
from moecore.kernels.ops import Op
from moecore.kernels.zigzag import find_document_ids
from moecore.models.layers import Attention
from moecore.models.mla import LatentAttention
from moecore.parallel.model.parallel_state import find_staged_module, get_request

BLOCK_NUMEL = 1 << 26  # logits that exist at once


def _update_max_logits_by_block(
    max_H: Tensor,
    q_BTHd: Tensor,
    k_BShd: Tensor,
    positions_T: Tensor | None,
    cu_seqlens: Tensor | None,
    padding_BS: Tensor | None,
    scale: float,
) -> None:
    """Update `max_H` in place with the largest attention logit q k * `scale` of each head.

    Only the logits of one block of queries exist at a time. T are this rank's queries, and S are
    all keys of a row. `positions_T` are the queries' positions in the row; None = 0 .. T - 1.
    Padding (True in `padding_BS`), later keys and keys of other documents do not count.
    """
    document_S = None
    if cu_seqlens is not None:  # documents are packed over all rows
        q_BTHd, k_BShd = q_BTHd.flatten(0, 1)[None], k_BShd.flatten(0, 1)[None]
        document_S = find_document_ids(cu_seqlens, k_BShd.shape[1])
        padding_BS = None if padding_BS is None else padding_BS.flatten()[None]
    (B, T, H, _), (S, h) = q_BTHd.shape, k_BShd.shape[1:3]
    if not B * T:
        return
    q_BhgTd = q_BTHd.unflatten(2, (h, H // h)).permute(0, 2, 3, 1, 4)
    k_BhdS = k_BShd.permute(0, 2, 3, 1)
    keys_S = torch.arange(S, device=max_H.device)
    size = max(1, BLOCK_NUMEL // (B * H * S))
    for start in range(0, T, size):
        stop = min(T, start + size)
        num_keys = stop if positions_T is None else S
        query_places_T1 = (keys_S if positions_T is None else positions_T)[start:stop, None]
        rows = q_BhgTd[..., start:stop, :].flatten(2, 3)
        scores = (rows @ k_BhdS[..., :num_keys]).unflatten(2, (H // h, stop - start))
        hidden = keys_S[:num_keys] > query_places_T1
        if document_S is not None:
            hidden |= document_S[query_places_T1] != document_S[:num_keys]
        scores.masked_fill_(hidden, -torch.inf)
        if padding_BS is not None:
            is_padding = padding_BS[:, query_places_T1] | padding_BS[:, None, :num_keys]
            scores.masked_fill_(is_padding[:, None, None], -torch.inf)
        block_max_H = scores.amax((0, 3, 4)).flatten().float() * scale
        max_H.copy_(torch.maximum(max_H, block_max_H))


_update_max_op = Op(
    "update_max_scores",
    _update_max_logits_by_block,
    lambda max_H, q, k, places, cu_seqlens, padding, scale: None,
    mutates_args=("max_H",),
)


@torch.compiler.disable
def _gather_keys(q_BtHd: Tensor, k: Tensor, sequence: Sequence) -> tuple[Tensor, Tensor]:
    """Return the keys of all cp ranks, and the positions of local queries. Collective."""
    local_tokens = sequence.local_tokens
    assert local_tokens is not None, "asked for only with tokens on several ranks"
    k_BThd = k if k.shape[1] > q_BtHd.shape[1] else local_tokens.gather_values(k)
    rows = 1 if sequence.cu_seqlens is None else k.shape[0]
    tokens = torch.arange(rows * k_BThd.shape[1], device=k.device)
    return k_BThd, local_tokens.slice_local(tokens.view(rows, -1)).flatten()


class QKClip:
    """Records maximum attention logits of a `moecore.models` decoder, and clips after a step.

    Every training forward computes queries times keys a second time for the maximum, in blocks.
    Context parallel ranks all-gather the keys.

        clip = QKClip(model, tau=100.0)
        ...
        done = step.finish()
        clip.step(is_skipped=done.is_skipped)

    Args:
        model: parallelized or plain, a decoder or a module that contains a decoder.
        tau: maximum logit, after the attention scale. Larger logits are scaled down.

    Raises:
        ValueError: for a model without attention of `moecore.models`, with norms of queries and
            keys (norm weights bound these logits, not projections), or with another QKClip.

    Attributes:
        max_scores: attention name -> fp32 [heads] on the device: the maximum logits of the last
            step over all ranks of the pipeline stage, -inf if no training forward ran.
    """

    def __init__(self, model: nn.Module, tau: Positive = 100.0) -> None:
        check_arguments(QKClip.__init__, locals())
        self.tau = tau
        self._watchers = [
            _ScoreWatcher.from_module(clean_name(name), module)
            for name, module in model.named_modules()
            if isinstance(module, Attention | LatentAttention)
        ]
        owner, stages = find_staged_module(model)
        if not self._watchers and stages is None:
            raise ValueError(
                f"model ({type(model).__name__}) must have attention of moecore.models: QK-clip "
                "knows no other"
            )
        self.max_scores: dict[str, Tensor] = {}
        self._is_sharded = any(isinstance(p, DTensor) for p in model.parameters())
        request = get_request(owner)
        self._group = None if request is None else request.meshes.stage_group
        for watcher in self._watchers:
            watcher.module.observe_scores = watcher

    @torch.no_grad()
    def step(self, *, is_skipped: bool | Tensor = False) -> None:
        """Scale the projections of heads above tau, and reset maxima. One all-reduce, no host sync.

        Call it on every rank, after the optimizer. If `is_skipped` (bool or device bool), no
        projection changes. If one projection of an attention is frozen, none of them changes.
        """
        if not self._watchers:
            return
        max_scores = torch.cat([watcher.get_full_max() for watcher in self._watchers])
        if self._is_sharded:
            dist.all_reduce(max_scores, dist.ReduceOp.MAX, self._group)
        sizes = [watcher.num_heads for watcher in self._watchers]
        for watcher, max_H in zip(self._watchers, max_scores.split(sizes), strict=True):
            exceeds_H = (max_H > self.tau) & max_H.isfinite()
            if isinstance(is_skipped, Tensor) or is_skipped:
                exceeds_H &= ~torch.as_tensor(is_skipped, device=max_H.device)
            if watcher.is_trained:
                watcher.scale_logits((self.tau / max_H).where(exceeds_H, 1.0))
            self.max_scores[watcher.name] = max_H
            watcher.max_H.fill_(-torch.inf)

    def close(self) -> None:
        """Stop recording; forwards of the model then compute no maximum."""
        for watcher in self._watchers:
            watcher.module.observe_scores = None


class _Projection(NamedTuple):
    """A linear's weight and bias, each mapped to the global indices of this rank's rows."""

    params: dict[Tensor, Tensor]

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Self:
        params = [param for param in (linear.weight, linear.bias) if param is not None]
        return cls({param: compute_global_indices(param)[0].to(param.device) for param in params})

    def scale_rows(self, factors_Hd: Tensor) -> None:
        """Multiply row i of head h of weight and bias by `factors_Hd[h, i]`, in place."""
        for param, rows in self.params.items():
            local = get_local_tensor(param)
            factors = factors_Hd.flatten()[rows].to(local.dtype)
            local.mul_(factors.view(-1, *[1] * (local.ndim - 1)))


class _ScoreWatcher:
    """Records the maximum logit of each local head of an attention module, in `max_H`.

    `num_heads` counts the heads of all tp ranks. `query_linear` and `key_linear` are the names of
    the linears in `module` that compute queries and keys.
    """

    def __init__(
        self, name: str, module: Any, num_heads: int, query_linear: str, key_linear: str
    ) -> None:
        self.name, self.module, self.num_heads = name, module, num_heads
        if module.observe_scores is not None:
            raise ValueError(f"{name} must be watched by one QKClip: close() the other")
        linear = getattr(module, query_linear)
        self.queries = _Projection.from_linear(linear)
        self.keys = _Projection.from_linear(getattr(module, key_linear))
        size, self.first = 1, 0
        if module.tp is not None:
            size = module.tp.size
            self.first = num_heads // size * module.tp.rank
        self.max_H = torch.full(
            (num_heads // size,), -torch.inf, device=linear.weight.device, dtype=torch.float32
        )

    @classmethod
    def from_module(cls, name: str, module: Attention | LatentAttention) -> Self:
        """Return the watcher of an attention module; ValueError if QK-clip does not support it."""
        if isinstance(module, LatentAttention):
            if module.indexer is not None:
                raise ValueError(
                    f"MLAConfig.sparse ({module.mla.sparse}) must be None for QK-clip, whose "
                    f"maxima count all keys of {name}: leave QKClip out"
                )
            queries = "q_b_proj" if module.mla.q_lora_rank else "q_proj"
            num_heads = module.o_proj.weight.shape[1] // module.mla.v_head_dim
            return cls(name, module, num_heads, queries, "kv_b_proj")
        config, problem = module.config, None
        if config.qk_norm is not None:
            reason = f"since norms bound the logits of {name}"
            problem = f"qk_norm ({config.qk_norm!r}) must be None for QK-clip, {reason}"
        elif config.attention_gate:
            reason = f"which would scale gates of {name} too"
            problem = f"attention_gate (True) must be False for QK-clip, {reason}"
        elif module.window is not None:
            reason = f"whose maxima count all keys of {name}"
            problem = f"windows ({config.windows}) must be () for QK-clip, {reason}"
        if problem is not None:
            raise ValueError(f"DecoderConfig.{problem}: leave QKClip out")
        return cls(name, module, module.config.num_heads, "q_proj", "k_proj")

    def __call__(self, q_BTHd: Tensor, k_BThd: Tensor, sequence: Sequence, scale: float) -> None:
        """In a training forward, update the maximum; a logit is query times key times `scale`."""
        if self.module.training and torch.is_grad_enabled():
            run_and_save(self._update_max, q_BTHd.detach(), k_BThd.detach(), sequence, scale)

    def _update_max(self, q_BTHd: Tensor, k_BThd: Tensor, sequence: Sequence, scale: float) -> None:
        """Update `max_H` with local queries and keys; may be collective over tp and cp."""
        places_T, padding_BT, tp = None, sequence.padding_mask_BT, self.module.tp
        if padding_BT is not None and tp is not None:
            padding_BT = tp.gather_tokens(padding_BT)
        if sequence.local_tokens is not None:
            k_BThd, places_T = _gather_keys(q_BTHd, k_BThd, sequence)
            if padding_BT is not None:
                padding_BT = sequence.local_tokens.gather_values(padding_BT)
        documents = sequence.cu_seqlens
        _update_max_op(self.max_H, q_BTHd, k_BThd, places_T, documents, padding_BT, scale)

    @property
    def is_trained(self) -> bool:
        """Whether both projections are trained; frozen projections are not scaled."""
        params = (*self.queries.params, *self.keys.params)
        return all(param.requires_grad for param in params)

    def get_full_max(self) -> Tensor:
        """Return each head's maximum logit, fp32 [heads]; -inf for heads of other tp ranks."""
        full_max_H = self.max_H.new_full((self.num_heads,), -torch.inf)
        full_max_H[self.first : self.first + self.max_H.numel()] = self.max_H
        return full_max_H

    def scale_logits(self, gamma_H: Tensor) -> None:
        """Multiply the logits of head h by `gamma_H[h]`: scale its projections in place."""
        if isinstance(self.module, LatentAttention):
            mla, root_H1 = self.module.mla, gamma_H.sqrt()[:, None]
            n, r, v = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim
            turned = gamma_H[:, None].expand(-1, r)
            self.queries.scale_rows(torch.cat((root_H1.expand(-1, n), turned), dim=1))
            values = torch.ones_like(root_H1).expand(-1, v)
            self.keys.scale_rows(torch.cat((root_H1.expand(-1, n), values), dim=1))
            return
        config = self.module.config
        gamma_hg = gamma_H.unflatten(0, (config.num_kv_heads, -1))
        root_h1 = gamma_hg.amin(dim=1, keepdim=True).sqrt()
        of_queries_H1 = (gamma_hg / root_h1).flatten()[:, None]
        self.queries.scale_rows(of_queries_H1.expand(-1, config.head_dim))
        self.keys.scale_rows(root_h1.expand(-1, config.head_dim))
