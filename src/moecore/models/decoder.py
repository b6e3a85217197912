"""Decoder: moecore's model, which maps token ids to logits or a loss.

Legend: B sequences, T tokens of a sequence, N = B * T, D model dim, V vocabulary.

    tokens_BT -> embedding -> [norm, attention, add, norm, MLP or MoE, add] x L -> norm -> head
                                                                                     +-> mtp -> head

A pipeline stage runs a part of these modules (`StagedModel`). Without pipeline parallelism one
stage runs all modules.

Parameter names follow Hugging Face decoders (model.layers.0.self_attn.q_proj.weight), except
inside an MoE layer, which keeps moecore's own (model.layers.0.mlp.experts.w1), and for multi-token
prediction (mtp.0); `io/hf/names.py` translates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moecore.attention.context_parallel.local_tokens import ContextParallel
from moecore.attention.kv_cache import KVCache
from moecore.attention.sequence import Sequence
from moecore.base.fields import (
    Count,
    CountOrZero,
    Device,
    FloatDtype,
    Positive,
    PositiveOrZero,
    Seed,
    check_arguments,
)
from moecore.base.options.context import ContextOptions
from moecore.base.params import clean_name, init_normal_
from moecore.base.torch_private import get_local_tensor
from moecore.models.backbone import Backbone, Embedding
from moecore.models.block import MTPLayer
from moecore.models.config import DecoderConfig
from moecore.models.head import Head
from moecore.models.layers import Attention, RMSNorm
from moecore.models.linear_attention import LinearAttention
from moecore.models.log_probs import LogProbLoss
from moecore.models.loss import IGNORE_INDEX, count_labels
from moecore.models.mla import KeyNorm
from moecore.models.tensor_parallel import apply_tensor_parallel
from moecore.moe.layer import MoELayer
from moecore.parallel.pipeline.layout import Stage
from moecore.parallel.pipeline.stages import (
    StageParts,
    check_hidden_states,
    check_stage_modules,
    require_arguments,
    runs_final_norm,
)
from moecore.precision.plain import Linear

INIT_STD = 0.02


class Decoder(nn.Module):
    """A decoder-only transformer; in one process an ordinary module on CPU or GPU.

    The constructor initialises the weights with seed 0 unless the device is meta. For a meta
    model, call `apply_tensor_parallel` and `parallelize_moe`, then `to_empty` and `init_weights`.
    The initial values do not depend on the parallel layout.

    Args:
        config: the decoder.
        device: device of the parameters; "meta" allocates nothing.
        dtype: dtype of the parameters.

    Attributes:
        mtp_losses: fp32 [num_predictions] on the device, detached: the cross-entropy of each
            multi-token prediction in the last training forward, for this data rank's tokens and
            before `mtp_loss_coef`. None before the first such forward. Reading the values
            (`.tolist()`) synchronises; the forward does not.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: Device | None = None,
        dtype: FloatDtype | None = None,
    ) -> None:
        check_arguments(Decoder.__init__, locals())
        super().__init__()
        self.config = config
        device = torch.get_default_device() if device is None else torch.device(device)
        with torch.device("meta"):
            self.model = Backbone(config, dtype=dtype)
            self.lm_head = Head(config, dtype=dtype)
            layers = (MTPLayer(config, dtype=dtype) for _ in range(config.num_mtp_layers))
            self.mtp = nn.ModuleList(layers)
        self.mtp_losses: Tensor | None = None
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks, first to last."""
        return self.model.layers

    @torch.no_grad()
    def init_weights(self, seed: Seed = 0, *, embedding_std: Positive = INIT_STD) -> None:
        """Initialise every parameter and buffer; values do not depend on the parallel layout.

        Matrices and sinks are N(0, 0.02^2), norms multiply by 1, biases are 0. As in GPT-2, a
        matrix whose output is added to the residual stream is divided by sqrt(n). n is 2 *
        num_layers, or the length of a pattern. Linear attention has its own
        `LinearAttention.init_weights`. No communication.

        Args:
            seed: seed of all values.
            embedding_std: standard deviation of the token embeddings. With 1, embeddings are larger
                than the layers' outputs, so routers distinguish tokens from the first step on.
        """
        check_arguments(Decoder.init_weights, locals())
        halves = self.config.num_layers * (1 if self.config.pattern else 2)
        scale = 1.0 / math.sqrt(halves)
        for path, module in self.named_modules():
            key = clean_name(path)
            if isinstance(module, MoELayer):
                module.init_weights(std=INIT_STD, key=key, seed=seed)
                w2 = getattr(module.get_part("experts"), module.layout.expert_layout.w2)
                residual = [module.latent.w_up if module.config.latent_dim else w2]
                if module.config.shared_hidden_dim:
                    residual.append(module.get_part("shared").w2)
                for weight in residual:
                    get_local_tensor(weight).mul_(scale)
            elif isinstance(module, RMSNorm):
                get_local_tensor(module.weight).fill_(0.0 if module.zero_centered else 1.0)
            elif isinstance(module, Linear | Embedding | Head) and module.weight is not None:
                std = INIT_STD * (scale if getattr(module, "residual", False) else 1.0)
                if isinstance(module, Embedding):
                    std = embedding_std
                init_normal_(module.weight, std=std, key=f"{key}.weight", seed=seed)
                if isinstance(module, Linear) and module.bias is not None:
                    get_local_tensor(module.bias).zero_()
            elif isinstance(module, KeyNorm):
                get_local_tensor(module.weight).fill_(1.0)
                get_local_tensor(module.bias).zero_()
            elif isinstance(module, LinearAttention):
                module.init_weights(key=key, seed=seed)
            elif isinstance(module, Attention):
                if module.o_bias is not None:
                    get_local_tensor(module.o_bias).zero_()
                if module.sinks is not None:
                    init_normal_(module.sinks, std=INIT_STD, key=f"{key}.sinks", seed=seed)

    def apply_tensor_parallel(self, tp_mesh: DeviceMesh) -> Decoder:
        """Shard the dense parameters over the 1-D mesh `tp_mesh` in place, and return self.

        Later forwards use sequence parallelism: each rank has the hidden states of its tokens. Call
        this before `parallelize_moe`, on a meta model or with identical values on every rank.
        Routed experts do not change. With one tp rank the model does not change.

        Raises:
            ValueError: if tp does not divide heads or hidden dims, or if parameters are sharded.
        """
        apply_tensor_parallel(self, self.config, tp_mesh)
        return self

    def context_options(self, options: ContextOptions, cp: int, tp: int) -> ContextOptions:
        """Return `options` with a communication method of context parallelism for this model.

        `cp` and `tp` are numbers of ranks. Raises a ValueError if no method supports the numbers of
        heads per rank, or sparse attention.
        """
        heads = self.config.num_heads // tp, self.config.num_kv_heads // tp
        mla = self.config.mla
        context = options.resolve(cp, *heads, has_latents=mla is not None)
        if mla is not None and mla.sparse is not None and context.way != "allgather":
            raise ValueError(
                f"ContextOptions.way ({context.way!r}) must be 'allgather' for sparse attention, "
                "whose queries read keys of all ranks: leave it 'auto'"
            )
        return context

    def apply_context_parallel(self, cp: ContextParallel) -> None:
        """Shard the tokens of each row over the cp ranks in later forwards."""
        self.model.cp = cp

    def apply_context_groups(self, groups: Mapping[int, ContextParallel]) -> None:
        """Set {number of ranks: cp group}; the `cp` argument of a forward selects the group."""
        self.model.context_groups = groups

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        *,
        num_tokens: Tensor | int | None = None,
        padding_mask_BT: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Count | None = None,
        cp: Count | None = None,
        hidden: Tensor | None = None,
        stage: Stage | None = None,
        log_prob_loss: LogProbLoss | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy over the labels, or the logits if there are no labels.

        With labels in training mode, the mean of the multi-token prediction losses, times
        `mtp_loss_coef`, is added. Each of these losses is a sum over its labels, divided by
        `num_tokens` as the main loss is (DeepSeek-V3, equation 24).

        Args:
            tokens_BT: int64 or int32 ids, not sliced over cp or tp. All cp and tp ranks of a data
                rank pass identical arguments.
            labels_BT: int64, the token that follows each position (already shifted), or -100 where
                the position has no loss.
            num_tokens: divisor of the loss summed over labels, for example the number of labels in
                the global batch: an int or an integer scalar tensor. None = the number of labels in
                `labels_BT`.
            padding_mask_BT: bool, True = padding, which experts and balance losses skip. Padding
                must be at the end of a document or be a separate document, and have labels of -100.
                Neither is checked, because the check would synchronise.
            cu_seqlens: int32 [n + 1], borders of the documents that are packed into the rows.
                Document i has the tokens cu_seqlens[i] : cu_seqlens[i + 1] of the B * T tokens,
                counted row by row. The last value is B * T; empty documents are allowed at the end.
                Positions restart in each document, and attention does not cross documents. Values
                are checked on the CPU only, so a device tensor causes no sync. None = each row is a
                document.
            max_seqlen: an upper bound of the tokens in a document, for `cu_seqlens` on the device;
                None = B * T.
            cp: with `ContextOptions.dynamic`, the number of consecutive data ranks that share these
                rows and pass identical arguments: a power of two, 1 = only this rank. None = the cp
                of the mesh.
            hidden: output of the previous pipeline stage, of shape `hidden_shape`; None in a stage
                with the embedding.
            stage: the pipeline stage that runs; None = the full model. All stages of a micro-batch
                get identical other arguments.
            log_prob_loss: a loss of log-probabilities with its own labels, returned instead of the
                cross-entropy. `labels_BT` must be None, and multi-token prediction does not run.

        Returns:
            An fp32 scalar, equal on all cp and tp ranks (0 if every label is -100), or logits
            [B, T, V] in the dtype of the model. A stage without the head returns this rank's hidden
            states, the input of the next stage. The forward adds no host sync.

        Raises:
            ValueError: for wrong shapes, a document that is too long, rows or documents not
                divisible by 2 * cp, a cp rank's tokens not divisible by tp, a cp without a group,
                or a stage or hidden states that do not fit this rank.
        """
        check_arguments(Decoder.forward, locals())
        stage = self.model.full_stage if stage is None else stage
        self._check_shapes(tokens_BT, labels_BT, padding_mask_BT, log_prob_loss)
        check_stage_modules(self, self.stage_parts(), stage, len(self.mtp))
        if num_tokens is None and labels_BT is not None:
            num_tokens = count_labels(labels_BT)
        num_states = self._count_normed_inputs(stage, runs_mtp=self._runs_mtp(labels_BT))
        check_hidden_states(hidden, stage, self._compute_hidden_shape(num_states, tokens_BT, cp))
        sequence = self.model.build_sequence(tokens_BT, padding_mask_BT, cu_seqlens, max_seqlen, cp)
        if num_states:
            assert hidden is not None, "checked above"
            states = list(hidden.unbind())
        else:
            states = [self.model(tokens_BT, sequence, hidden=hidden, stage=stage)]
            if not runs_final_norm(stage, self.config.num_mtp_layers):
                return states[0]
        if stage.loss:
            args = (states[0], labels_BT, num_tokens, self._tied_weight, sequence)
            out = self.lm_head(*args, log_prob_loss)
        if self._runs_mtp(labels_BT):
            assert labels_BT is not None, "modules run with labels only"
            rows = (tokens_BT, labels_BT, num_tokens, padding_mask_BT)
            mtp_losses = self._run_mtp_modules(states, stage, *rows, sequence)
            if stage.loss:
                losses = torch.stack(mtp_losses)
                self.mtp_losses = losses.detach()
                out = out + self.config.mtp_loss_coef * losses.mean()
        return out if stage.loss else torch.stack(states)

    def _run_mtp_modules(
        self,
        states: list[Tensor],
        stage: Stage,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        num_tokens: Tensor | int | None,
        padding_mask_BT: Tensor | None,
        sequence: Sequence,
    ) -> list[Tensor]:
        """Append the output of this stage's multi-token prediction modules to `states`.

        Return the losses; [] in a stage without the head. Tokens, labels and mask have full rows.
        """
        if padding_mask_BT is None:
            padding_mask_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        losses, is_detached = [], self.config.mtp_detached
        for depth in range(1, self.config.num_predictions + 1):
            index = (depth - 1) // self.config.mtp_repeats
            if index in stage.mtp:
                e_BTD = self.model.embed(sequence.shift_tokens(tokens_BT, depth, 0), sequence)
                mask_BT = sequence.shift_tokens(padding_mask_BT, depth, True)
                mask_BT = self.model.slice_local_tokens(mask_BT, sequence)
                # A view has one gradient: its sum with the head's is the same in any order, so that
                # stages have the bits of the whole.
                h_BTD = states[-1].view_as(states[-1])
                if is_detached:
                    e_BTD, h_BTD = e_BTD.detach(), h_BTD.detach() if depth == 1 else h_BTD
                mtp_sequence = replace(sequence, padding_mask_BT=mask_BT, depth=depth)
                states.append(self.mtp[index](h_BTD, e_BTD, mtp_sequence))
            if stage.loss:
                targets_BT = sequence.shift_tokens(labels_BT, depth, IGNORE_INDEX)
                args = (states[depth], targets_BT, num_tokens, self._tied_weight, sequence)
                losses.append(self.lm_head(*args, is_detached=is_detached))
        return losses

    def stage_parts(self) -> StageParts:
        """Return the names of the submodules that `parallelize_moe` splits into pipeline stages."""
        return StageParts(
            embedding="model.embed_tokens",
            layers="model.layers",
            final_modules=("model.norm",),
            head="lm_head",
            mtp="mtp",
            tied=self.config.tie_embeddings,
        )

    def hidden_shape(self, stage: Stage, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the shape of a stage's input hidden states on this rank, for forward's `inputs`.

        The shape is [B, T / (cp * tp), D] before the final norm. After the norm and k multi-token
        predictions it is [1 + k, B, T / (cp * tp), D]. No communication.
        """
        predicts = self._runs_mtp(inputs.get("labels_BT"))
        num_states = self._count_normed_inputs(stage, runs_mtp=predicts)
        return self._compute_hidden_shape(num_states, inputs["tokens_BT"], inputs.get("cp"))

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Raise a ValueError if pipeline stages cannot run forward's arguments `inputs`."""
        require_arguments(inputs, "tokens_BT", "labels_BT or log_prob_loss")
        names = ("tokens_BT", "labels_BT", "padding_mask_BT", "log_prob_loss")
        self._check_shapes(*(inputs.get(name) for name in names))  # type: ignore[arg-type]

    def _compute_hidden_shape(
        self, num_states: int, tokens_BT: Tensor, cp: int | None
    ) -> tuple[int, ...]:
        """Return [num_states, B, T / (cp * tp), D], or [B, T / (cp * tp), D] for 0 states."""
        B, T = tokens_BT.shape
        ranks, tp = self.model.select_cp_ranks(cp), self.model.tp
        num_ranks = (1 if ranks is None else ranks.size) * (1 if tp is None else tp.size)
        stack = (num_states,) if num_states else ()
        return (*stack, B, T // num_ranks, self.config.dim)

    def _runs_mtp(self, labels_BT: Tensor | None) -> bool:
        """Whether multi-token prediction runs in any pipeline stage."""
        return labels_BT is not None and self.training and len(self.mtp) > 0

    def _count_normed_inputs(self, stage: Stage, *, runs_mtp: bool) -> int:
        """Return how many normed hidden states a stage's input stacks; 0 = a residual stream."""
        modules_before = stage.mtp[0] if stage.mtp else len(self.mtp) if stage.loss else 0
        if not (modules_before and runs_mtp):
            return min(modules_before, 1)
        return 1 + modules_before * self.config.mtp_repeats

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
        """Return the prompt followed by sampled tokens.

        Under FSDP, EP, CP or TP every rank passes the same tokens and a generator of the same seed.
        With cached keys and values a new token costs a forward of one token. A new token costs a
        full forward under cp, with linear or sparse attention, for compiled layers, and if the
        prompt and the new tokens together exceed `max_seq_len`.

        Args:
            tokens_BT: the prompt, int64, at least one token.
            max_new_tokens: number of tokens to append.
            temperature: divides the logits; 0 = take the token with the largest logit.
            generator: random generator on the device of the prompt.
        """
        check_arguments(Decoder.generate, locals())
        max_length = self.config.max_seq_len
        fits = tokens_BT.shape[1] + max_new_tokens <= max_length
        cache = KVCache() if fits and self.model.can_cache else None
        for _ in range(max_new_tokens):
            window_BT = tokens_BT[:, -max_length if cache is None else cache.length :]
            logits_BV = self._compute_last_logits(window_BT, cache).float()
            if temperature == 0:
                next_B1 = logits_BV.argmax(-1, keepdim=True)
            else:
                scores_BV = (logits_BV / temperature).softmax(-1)
                next_B1 = torch.multinomial(scores_BV, 1, generator=generator)
            tokens_BT = torch.cat([tokens_BT, next_B1], dim=1)
        return tokens_BT

    def _compute_last_logits(self, window_BT: Tensor, cache: KVCache | None) -> Tensor:
        """Return the logits [B, V] of the last of T tokens; pads the tokens for cp and tp."""
        T, tp, cp = window_BT.shape[1], self.model.tp, self.model.cp
        multiple = (1 if tp is None else tp.size) * (1 if cp is None else 2 * cp.size)
        padding = -T % multiple
        mask_BT = torch.arange(T + padding, device=window_BT.device).expand(len(window_BT), -1) >= T
        tokens_BT = F.pad(window_BT, (0, padding))
        self.model.cache = cache
        if cache is not None:
            cache.begin_forward(T)
        try:
            logits_BTV: Tensor = self(tokens_BT, padding_mask_BT=mask_BT if padding else None)
        finally:
            self.model.cache = None
        if cache is not None:
            cache.end_forward()
        return logits_BTV[:, T - 1]

    def _check_shapes(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None,
        padding_mask_BT: Tensor | None,
        log_prob_loss: LogProbLoss | None,
    ) -> None:
        """Raise a ValueError for a wrong shape or dtype, or labels with a `log_prob_loss`."""
        if tokens_BT.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"tokens ({tokens_BT.dtype}) must be ids: pass tokens.long()")
        if tokens_BT.ndim != 2:
            raise ValueError(f"tokens {tuple(tokens_BT.shape)} must be [B, T]: add a batch dim")
        if labels_BT is not None and labels_BT.shape != tokens_BT.shape:
            raise ValueError(
                f"labels {tuple(labels_BT.shape)} must have the shape of tokens "
                f"{tuple(tokens_BT.shape)}: shift them and fill the end with -100"
            )
        if log_prob_loss is not None and labels_BT is not None:
            raise ValueError(
                f"labels {tuple(labels_BT.shape)} must be None with a log_prob_loss, which has its "
                "own: pass one of them"
            )
        if log_prob_loss is not None and log_prob_loss.labels_BT.shape != tokens_BT.shape:
            raise ValueError(
                f"LogProbLoss.labels_BT {tuple(log_prob_loss.labels_BT.shape)} must have the shape "
                f"of tokens {tuple(tokens_BT.shape)}: shift them and fill the end with -100"
            )
        mask = padding_mask_BT
        if mask is not None and (mask.shape != tokens_BT.shape or mask.dtype != torch.bool):
            raise ValueError(
                f"padding_mask {tuple(mask.shape)} ({mask.dtype}) must be torch.bool with the "
                f"shape of tokens {tuple(tokens_BT.shape)}: True where there is padding"
            )
