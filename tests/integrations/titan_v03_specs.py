"""Tiny jobs for torchtitan 0.3, stock and moecore's, on seeded random tokens.

torchtitan imports this module by `--module tests.integrations.titan_v03_specs`; its functions are
what `--config` chooses from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.config.override import derive
from torchtitan.models import deepseek_v3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe import GroupedExperts, MoE  # noqa: F401  (a test's)
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.deepseek_v3.model import DeepSeekV3Model
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from moecore.integrations.torchtitan.v03.jobs import accelerated, decoder_job
from moecore.integrations.torchtitan.v03.parts import TitanDecoder, make_titan_moe  # noqa: F401
from moecore.models import DecoderConfig
from tests.integrations.titan_runs import (
    DECODER,
    DIM,
    EPS,
    LR,
    SEQ_LEN,
    STEPS,
    VOCAB,
    WEIGHT_DECAY,
    WIDE,
    RandomBatches,
    random_block,
    refill,
)


class RandomTokens(RandomBatches, BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_rank, dp_world_size, seq_len, local_batch_size, **_):
        super().__init__(dp_rank, dp_world_size, local_batch_size, seq_len)


class NoTokenizer(BaseTokenizer):
    """The tokens are there already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCAB


class ExactExperts(GroupedExperts):
    """Stock's experts in the dtype of their input: stock multiplies in bf16 whatever it gets."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        offsets = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        w1, w2, w3 = (w.transpose(-2, -1) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        gate = F.silu(torch._grouped_mm(x_RD, w1, offs=offsets))
        h_RF = gate * torch._grouped_mm(x_RD, w3, offs=offsets)
        return torch._grouped_mm(h_RF, w2, offs=offsets)


def filled(model_cls: type, block: str) -> Any:
    """A Config whose model ends `init_weights` with `refill`."""

    class Filled(model_cls):  # type: ignore[misc, valid-type]
        @dataclass(kw_only=True, slots=True)
        class Config(model_cls.Config):  # type: ignore[misc, name-defined]
            pass

        def init_weights(self, **kwargs: Any) -> None:
            super().init_weights(**kwargs)
            refill(self, block)

    return Filled.Config


def head_and_embedding(package: Any) -> dict[str, Any]:
    table = dict(num_embeddings=VOCAB, embedding_dim=DIM)
    head = dict(in_features=DIM, out_features=VOCAB)
    return dict(
        vocab_size=VOCAB,
        dim=DIM,
        norm=RMSNorm.Config(normalized_shape=DIM, param_init=package._NORM_INIT),
        tok_embeddings=Embedding.Config(**table, param_init=package._EMBEDDING_INIT),
        lm_head=Linear.Config(**head, param_init=package._LINEAR_INIT),
    )


def spec_of(package: Any, model_cls: type, layers: list[Any]) -> ModelSpec:
    for layer in layers:  # flex attention has no backward on the CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = filled(model_cls, ".moe.")(**head_and_embedding(package), layers=layers)
    flavor = "debugmodel_moe" if package is qwen3 else "debugmodel"
    return replace(package.model_registry(flavor), model=model)


def tiny_qwen3() -> ModelSpec:
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=2,
        dim=DIM,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        moe_hidden_dim=16,
        num_experts=8,
        top_k=3,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=8, max_seq_len=64, theta=1e4),
    )
    return spec_of(qwen3, Qwen3Model, layers)


def tiny_deepseek_v3() -> ModelSpec:
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=3,
        n_dense_layers=1,
        dim=DIM,
        n_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        mscale=1.0,
        dense_hidden_dim=64,
        moe_hidden_dim=16,
        num_experts=8,
        num_shared_experts=2,
        router_top_k=2,
        router_score_func="sigmoid",
        router_num_expert_groups=4,
        router_num_limited_groups=2,
        router_route_scale=2.0,
        router_route_norm=True,
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(dim=8, max_seq_len=64, theta=1e4),
    )
    return spec_of(deepseek_v3, DeepSeekV3Model, layers)


def exact(spec: ModelSpec) -> ModelSpec:
    for _, config, parent, attr in list(spec.traverse(GroupedExperts.Config)):
        setattr(parent, attr, derive(config, ExactExperts.Config))
    return spec


def on_gloo(spec: ModelSpec) -> ModelSpec:
    """The stock spec on gloo, which has no scaled sum: FSDP2 must sum without a factor."""

    def parallelize(*args: Any, **kwargs: Any) -> nn.Module:
        model = spec.parallelize_fn(*args, **kwargs)
        for unit in (m for m in model.modules() if isinstance(m, FSDPModule)):
            unit.set_force_sum_reduction_for_comms(True)
        return model

    return replace(spec, parallelize_fn=parallelize)


def job(spec: ModelSpec) -> Trainer.Config:
    loss = CrossEntropyLoss.Config(global_vocab_size=VOCAB)
    return tiny(
        Trainer.Config(
            model_spec=spec,
            loss=ChunkedLossWrapper.Config(num_chunks=4, loss_fn=loss),
            metrics=MetricsProcessor.Config(),
        )
    )


def tiny(job: Any) -> Any:
    """The job with everything but the model and its loss replaced."""
    optimizer = default_adamw(lr=LR, eps=EPS, weight_decay=WEIGHT_DECAY)
    return replace(
        job,
        dataloader=RandomTokens.Config(),
        tokenizer=NoTokenizer.Config(),
        metrics=replace(job.metrics, log_freq=1),
        optimizer=replace(optimizer, implementation="foreach"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=1,
            seq_len=SEQ_LEN,
            steps=STEPS,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        activation_checkpoint=None,
        debug=replace(job.debug, seed=7, enable_structured_logging=False),
    )


def stock_tiny_qwen3() -> Trainer.Config:
    return job(on_gloo(exact(tiny_qwen3())))


def stock_tiny_bf16() -> Trainer.Config:
    return job(on_gloo(tiny_qwen3()))


def stock_tiny_deepseek_v3() -> Trainer.Config:
    return job(on_gloo(exact(tiny_deepseek_v3())))


def moecore_tiny_qwen3() -> Trainer.Config:
    return accelerated(job(tiny_qwen3()))


def moecore_tiny_deepseek_v3() -> Trainer.Config:
    return accelerated(job(tiny_deepseek_v3()))


def moecore_tiny_converted() -> Trainer.Config:
    return accelerated(job(exact(tiny_qwen3())))


def moecore_tiny_decoder() -> Trainer.Config:
    return decoder(DECODER)


def moecore_wide_decoder() -> Trainer.Config:
    return decoder(WIDE)


def decoder(config: DecoderConfig) -> Trainer.Config:
    made = decoder_job(config)
    made.model_spec.model = filled(TitanDecoder, ".mlp.")(decoder=config)
    return tiny(made)


def stock_block(
    *,
    score_func: str = "sigmoid",
    top_k: int,
    shared: bool = False,
    bias: bool = False,
    forced: bool = False,
    load_balance_coeff: float | None = 1e-3,
    **router: Any,
) -> nn.Module:
    names = ("weight", "bias", "w1_EFD", "w2_EDF", "w3_EFD")
    fill: dict[str, Any] = dict.fromkeys(names, nn.init.normal_)
    sizes = dict(num_experts=8, top_k=top_k, dim=16)
    config = make_moe_config(
        num_experts=8,
        load_balance_coeff=load_balance_coeff,
        router=make_router_config(
            **sizes, score_func=score_func, gate_param_init=fill, bias=bias, **router
        ),
        routed_experts=make_routed_experts_config(
            **sizes, hidden_dim=32, param_init=fill, comm_backend="standard"
        ),
        shared_experts=make_ffn_config(
            dim=16, hidden_dim=64, w1_param_init=fill, w2w3_param_init=fill
        )
        if shared
        else None,
    )
    config.router._debug_force_load_balance = forced
    block = config.build()
    return random_block(block)


def exact_block(block: Any) -> None:
    block.routed_experts.inner_experts.__class__ = ExactExperts


def fill_block(block: Any) -> None:
    block.init_states()
