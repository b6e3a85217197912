"""Decoder: tokens -> logits or loss. The model that examples train and tests measure.

Legend: B sequences, T tokens of a sequence, N = B * T, D model dim, V vocabulary.

    tokens_BT -> embedding -> [norm, attention, add, norm, MLP or MoE, add] x L -> norm -> head
                                                                                     +-> mtp -> head

Parameter names follow Hugging Face decoders (model.layers.0.self_attn.q_proj.weight), except
inside an MoE layer, which keeps moecore's own (model.layers.0.mlp.experts.w1), and for multi-token
prediction (mtp.0); `hf/names.py` translates.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moecore._fields import CountOrZero, PositiveOrZero, Seed, check_arguments
from moecore.models.block import Block
from moecore.models.config import DecoderConfig
from moecore.models.layers import Linear, RMSNorm
from moecore.models.loss import IGNORE_INDEX, count_labels, linear_cross_entropy
from moecore.models.mtp import MTPLayer, shift_left
from moecore.models.rotary import rotary_table
from moecore.models.tensor_parallel import TensorParallel, apply_tensor_parallel
from moecore.moe.layer import MoELayer
from moecore.moe.params import clean_name, init_normal_, local_param

INIT_STD = 0.02


class Embedding(nn.Module):
    """A table of V rows, whole on every tp rank.

    Args:
        config: the decoder.
        dtype: dtype of the table.
    """

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.dim, dtype=dtype))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return x_BTD in the dtype of the table."""
        return F.embedding(tokens_BT, local_param(self.weight))


class Backbone(nn.Module):
    """Everything but the head: tokens -> normed hidden states.

    Args:
        config: the decoder.
        dtype: dtype of the parameters.
    """

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        self.tp: TensorParallel | None = None
        self.embed_tokens = Embedding(config, dtype=dtype)
        self.layers = nn.ModuleList(Block(config, i, dtype=dtype) for i in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps, dtype=dtype)

    def forward(self, tokens_BT: Tensor, padding_mask_BT: Tensor | None = None) -> Tensor:
        """Return x_BTD; under tp only this rank's tokens of each sequence.

        Args:
            tokens_BT: int64 ids, the same on every tp rank.
            padding_mask_BT: bool, True = padding; likewise.
        """
        rotary = rotary_table(self.config, tokens_BT.shape[1], tokens_BT.device)
        x_BTD = self.embed(tokens_BT)
        own_mask = self.own(padding_mask_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, rotary, own_mask)
        return self.norm(x_BTD)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the embeddings of this tp rank's tokens."""
        return self.embed_tokens(tokens_BT if self.tp is None else self.tp.own(tokens_BT))

    def own(self, mask_BT: Tensor | None) -> Tensor | None:
        """Return this tp rank's part of a mask over the whole sequences."""
        return mask_BT if mask_BT is None or self.tp is None else self.tp.own(mask_BT)


class Head(nn.Module):
    """The output matrix, and the loss on top of it. Without a weight of its own when tied.

    Args:
        config: the decoder.
        dtype: dtype of the weight.

    Attributes:
        is_fsdp_head: nothing but its own forward reads its weight: note "head" in `fsdp/shard.py`.
    """

    is_fsdp_head = True

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        self.tp: TensorParallel | None = None
        own = (
            None
            if config.tie_embeddings
            else torch.empty(config.vocab_size, config.dim, dtype=dtype)
        )
        self.weight = None if own is None else nn.Parameter(own)

    def forward(
        self,
        x_BTD: Tensor,
        labels_BT: Tensor | None,
        num_tokens: Tensor | int | None,
        tied_weight: Tensor | None,
    ) -> Tensor:
        """Return the loss, or the logits when there are no labels; see `Decoder.forward`.

        Args:
            x_BTD: normed hidden states; under tp this rank's tokens.
            labels_BT: of the whole sequences.
            num_tokens: what the summed loss is divided by.
            tied_weight: the embedding table, when tied.
        """
        weight = tied_weight if self.weight is None else self.weight
        assert weight is not None, "a tied head is called with the embedding table"
        weight_VD = local_param(weight)
        if labels_BT is None:
            logits_BTV = F.linear(x_BTD, weight_VD)
            return logits_BTV if self.tp is None else self.tp.gather_whole(logits_BTV)
        if num_tokens is None:
            num_tokens = count_labels(labels_BT).clamp(min=1)
        if self.tp is not None:
            labels_BT = self.tp.own(labels_BT)
        loss = linear_cross_entropy(
            x_BTD.flatten(0, 1),
            weight_VD,
            labels_BT.flatten(),
            num_tokens=num_tokens,
            chunk_tokens=self.config.ce_chunk_tokens,
        )
        return loss if self.tp is None else self.tp.sum_value(loss)


class Decoder(nn.Module):
    """A decoder-only transformer; a plain module in one process, CPU or GPU.

    It is initialised with seed 0 unless it is built on meta. There, `apply_tensor_parallel`,
    `parallelize_moe` and FSDP2 come first, then `to_empty` and `init_weights`; values are the same
    on every layout.

    Args:
        config: the decoder.
        device: device of the parameters; "meta" allocates nothing.
        dtype: dtype of the parameters.

    Attributes:
        mtp_losses: fp32 [num_mtp_layers] on the device, detached: the cross-entropy of each
            multi-token prediction module in the last training forward, before `mtp_loss_coef`, of
            this data rank's tokens. None before it. Reading it (`.tolist()`) is the only sync.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_arguments(Decoder.__init__, locals())
        super().__init__()
        self.config = config
        device = torch.get_default_device() if device is None else torch.device(device)
        with torch.device("meta"):
            self.model = Backbone(config, dtype=dtype)
            self.lm_head = Head(config, dtype=dtype)
            self.mtp = nn.ModuleList(
                MTPLayer(config, dtype=dtype) for _ in range(config.num_mtp_layers)
            )
        self.mtp_losses: Tensor | None = None
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks, first to last."""
        return self.model.layers

    @torch.no_grad()
    def init_weights(self, seed: Seed = 0) -> None:
        """Fill every parameter and buffer, the same on every layout. No communication.

        Matrices are N(0, 0.02^2), those that write into the residual stream are divided by
        sqrt(2 * num_layers), norms are 1, biases are 0.

        Args:
            seed: different seeds give independent models.

        Source: the scaled residual matrices are GPT-2's.
        """
        check_arguments(Decoder.init_weights, locals())
        scale = 1.0 / math.sqrt(2 * self.config.num_layers)
        for path, module in self.named_modules():
            key = clean_name(path)
            if isinstance(module, MoELayer):
                module.init_weights(std=INIT_STD, key=key, seed=seed)
                for weight in _residual_weights(module):
                    _local(weight).mul_(scale)
            elif isinstance(module, RMSNorm):
                _local(module.weight).fill_(1.0)
            elif isinstance(module, Linear | Embedding | Head) and module.weight is not None:
                std = INIT_STD * (scale if getattr(module, "residual", False) else 1.0)
                init_normal_(module.weight, std=std, key=f"{key}.weight", seed=seed)

    def apply_tensor_parallel(self, tp_mesh: DeviceMesh) -> Decoder:
        """Cut the dense parameters over tp, in place, and work on own tokens from now on.

        Call it before `parallelize_moe` and FSDP2, on a meta model or with the same values on every
        rank. Routed experts are left alone: they live on the expert mesh.

        Args:
            tp_mesh: one dim; a tp of one rank changes nothing.

        Returns:
            self.

        Raises:
            ValueError: when heads or hidden dims do not divide, or parameters are sharded already.
        """
        apply_tensor_parallel(self, self.config, tp_mesh)
        return self

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        *,
        num_tokens: Tensor | int | None = None,
        padding_mask_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy over the labels that count, or the logits without labels.

        In training mode `mtp_loss_coef` times the mean of the losses of the multi-token prediction
        modules is added, each the mean over its own labels (or divided by `num_tokens` too). In
        eval mode and without labels these modules do not run.

        Args:
            tokens_BT: int64 ids; under tp the same whole sequences on every tp rank.
            labels_BT: int64, the token that should follow each position (already shifted), or -100
                where nothing counts.
            num_tokens: when given, the loss is the sum over labels divided by it: a whole number or
                an integer scalar tensor, such as the labels of the global batch.
            padding_mask_BT: bool, True = padding, which no expert computes and no balance loss
                counts. Padding must follow the tokens of its sequence, where causal attention hides
                it from them, and its labels must be -100; neither is checked, it would sync.

        Returns:
            An fp32 scalar, the same on every tp rank (0 when no label counts), or logits
            [B, T, V] in the dtype of the model. No host sync of its own.

        Raises:
            ValueError: for wrong shapes, a sequence that is too long or does not divide by tp.
        """
        check_arguments(Decoder.forward, locals())
        self._check(tokens_BT, labels_BT, padding_mask_BT)
        x_BTD = self.model(tokens_BT, padding_mask_BT)
        out = self.lm_head(x_BTD, labels_BT, num_tokens, self._tied_weight)
        if labels_BT is None or not self.training or not self.mtp:
            return out
        if padding_mask_BT is None:
            padding_mask_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        losses = self._mtp_losses(x_BTD, tokens_BT, labels_BT, num_tokens, padding_mask_BT)
        self.mtp_losses = losses.detach()
        return out + self.config.mtp_loss_coef * losses.mean()

    def _mtp_losses(
        self,
        h_BTD: Tensor,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        num_tokens: Tensor | int | None,
        padding_mask_BT: Tensor,
    ) -> Tensor:
        """Return the loss of each multi-token prediction module, fp32; see `models/mtp.py`."""
        rotary = rotary_table(self.config, tokens_BT.shape[1], tokens_BT.device)
        losses = []
        for ahead, layer in enumerate(self.mtp, start=1):
            e_BTD = self.model.embed(shift_left(tokens_BT, ahead, 0))
            mask_BT = self.model.own(shift_left(padding_mask_BT, ahead, True))
            h_BTD = layer(h_BTD, e_BTD, rotary, mask_BT)
            targets_BT = shift_left(labels_BT, ahead, IGNORE_INDEX)
            losses.append(self.lm_head(h_BTD, targets_BT, num_tokens, self._tied_weight))
        return torch.stack(losses)

    @property
    def _tied_weight(self) -> Tensor | None:
        return self.model.embed_tokens.weight if self.config.tie_embeddings else None

    @torch.no_grad()
    def generate(
        self,
        tokens_BT: Tensor,
        max_new_tokens: CountOrZero,
        *,
        temperature: PositiveOrZero = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the tokens followed by new ones, one forward over the window per new token.

        Under FSDP, EP or TP every rank calls it with the same tokens and an equally seeded
        generator. There is no cache: for trying a model out, not for serving.

        Args:
            tokens_BT: int64 prompt, at least one token.
            max_new_tokens: how many to add.
            temperature: divides the logits; 0 takes the best token.
            generator: on the device of the tokens.

        Returns:
            int64 [B, T + max_new_tokens].
        """
        check_arguments(Decoder.generate, locals())
        for _ in range(max_new_tokens):
            window = tokens_BT[:, -self.config.max_seq_len :]
            logits_BV = self._last_logits(window).float()
            if temperature == 0:
                next_B1 = logits_BV.argmax(-1, keepdim=True)
            else:
                scores_BV = (logits_BV / temperature).softmax(-1)
                next_B1 = torch.multinomial(scores_BV, 1, generator=generator)
            tokens_BT = torch.cat([tokens_BT, next_B1], dim=1)
        return tokens_BT

    def _last_logits(self, window_BT: Tensor) -> Tensor:
        """Logits after the last token; padded for tp, with tokens that go to no expert."""
        T = window_BT.shape[1]
        tp = self.model.tp
        padding = 0 if tp is None else -T % tp.size
        mask_BT = torch.arange(T + padding, device=window_BT.device).expand(len(window_BT), -1) >= T
        tokens_BT = F.pad(window_BT, (0, padding))
        return self(tokens_BT, padding_mask_BT=mask_BT if padding else None)[:, T - 1]

    def _check(
        self, tokens_BT: Tensor, labels_BT: Tensor | None, padding_mask_BT: Tensor | None
    ) -> None:
        if tokens_BT.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"tokens ({tokens_BT.dtype}) must be ids: pass tokens.long()")
        if tokens_BT.ndim != 2:
            raise ValueError(f"tokens {tuple(tokens_BT.shape)} must be [B, T]: add a batch dim")
        if tokens_BT.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"sequence length ({tokens_BT.shape[1]}) must be <= max_seq_len "
                f"({self.config.max_seq_len}): cut the sequences or raise max_seq_len"
            )
        if labels_BT is not None and labels_BT.shape != tokens_BT.shape:
            raise ValueError(
                f"labels {tuple(labels_BT.shape)} must have the shape of tokens "
                f"{tuple(tokens_BT.shape)}: shift them and fill the end with -100"
            )
        mask = padding_mask_BT
        if mask is not None and (mask.shape != tokens_BT.shape or mask.dtype != torch.bool):
            raise ValueError(
                f"padding_mask {tuple(mask.shape)} ({mask.dtype}) must be torch.bool with the "
                f"shape of tokens {tuple(tokens_BT.shape)}: True where there is padding"
            )


def _residual_weights(layer: MoELayer) -> list[nn.Parameter]:
    """What the layer's output comes out of: FC2 of the experts, or what leads out of the latent."""
    if layer.config.latent_dim:
        weights = [layer.latent.w_up]
    else:
        weights = [getattr(layer.part("experts"), layer.layout.expert_layout.w2)]
    if layer.config.shared_hidden_dim:
        weights.append(layer.part("shared").w2)
    return weights


def _local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param
