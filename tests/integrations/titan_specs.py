"""Tiny models for torchtitan's registry, stock and moecore's, on seeded random tokens.

torchtitan imports this module by `--experimental.custom_import tests.integrations.titan_specs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.models import deepseek_v3, qwen3
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

from moecore import BalanceConfig, MoEConfig
from moecore.integrations.torchtitan.v02.decoder import TitanDecoder, with_labels
from moecore.integrations.torchtitan.v02.specs import accelerated, decoder_spec
from moecore.models import DecoderConfig
from moecore.moe.params import init_normal_

VOCAB = 96

QWEN3 = qwen3.Qwen3ModelArgs(
    vocab_size=VOCAB,
    head_dim=8,
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    qk_norm=True,
    hidden_dim=64,
    moe_enabled=True,
    moe_inter_dim=16,
    moe_args=MoEArgs(
        num_experts=8,
        num_shared_experts=0,
        top_k=3,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
        use_grouped_mm=False,  # stock multiplies in bf16 otherwise
    ),
)
DEEPSEEK_V3 = deepseek_v3.DeepSeekV3ModelArgs(
    vocab_size=VOCAB,
    dim=32,
    inter_dim=64,
    moe_inter_dim=16,
    n_layers=3,
    n_dense_layers=1,
    n_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    moe_args=MoEArgs(
        num_experts=8,
        num_shared_experts=2,
        top_k=2,
        score_func="sigmoid",
        route_norm=True,
        route_scale=2.0,
        num_expert_groups=4,
        num_limited_groups=2,
        score_before_experts=False,
        load_balance_coeff=0.01,
    ),
)
DECODER = DecoderConfig(
    vocab_size=VOCAB,
    dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_seq_len=64,
    num_mtp_layers=1,
    mtp_loss_coef=0.3,
    moe=MoEConfig(
        dim=32,
        hidden_dim=16,
        num_experts=8,
        top_k=3,
        shared_hidden_dim=16,
        score_function="sigmoid",
        expert_bias=True,
        balance=BalanceConfig(bias_update_rate=0.01, micro_batch_coef=0.01),
    ),
)


class RandomTokens(BaseDataLoader):
    """Sample i is a function of i alone, so every layout sees the same global batch."""

    def __init__(self, dp_rank: int, dp_world_size: int, batch: int, seq_len: int) -> None:
        self.batch, self.seq_len, self.next = batch, seq_len, 0
        self.first, self.step = dp_rank * batch, dp_world_size * batch

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = self.next * self.step + self.first
            tokens, labels = samples(first, self.batch, self.seq_len)
            self.next += 1
            yield {"input": tokens}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.next * self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = state_dict["seen"] // self.step if state_dict else 0


def samples(first: int, count: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [count, seq_len]; every third sample has labels that do not count."""
    rows = []
    for i in range(first, first + count):
        generator = torch.Generator().manual_seed(i)
        rows.append(torch.randint(VOCAB, (seq_len + 1,), generator=generator))
    tokens = torch.stack(rows)
    labels = tokens[:, 1:].clone()
    ignored = torch.arange(first, first + count) % 3 == 0
    labels[ignored, :5] = -100
    return tokens[:, :-1], labels


def build_random_tokens(
    *, dp_rank: int, dp_world_size: int, job_config: Any, **_: Any
) -> BaseDataLoader:
    training = job_config.training
    return RandomTokens(dp_rank, dp_world_size, training.local_batch_size, training.seq_len)


def filled(model_cls: type[nn.Module], block: str) -> type[nn.Module]:
    """A model whose matrices are the same on every layout, and large in MoE blocks.

    On CPU meshes torch fills every shard with the same random numbers, so that experts and router
    rows would be copies of each other and choices ties. And as torchtitan fills them, experts add
    too little to be seen in the loss.
    """

    class Filled(model_cls):  # type: ignore[misc, valid-type]
        @torch.no_grad()
        def init_weights(self, *args: Any, **kwargs: Any) -> None:
            super().init_weights(*args, **kwargs)
            for path, param in self.named_parameters():
                if param.ndim > 1:
                    key = path.replace("_checkpoint_wrapped_module.", "")
                    init_normal_(param, std=0.2 if block in path else 0.05, key=key)

    return Filled


def tiny(spec: TrainSpec, args: Any) -> TrainSpec:
    return replace(
        spec,
        model_cls=filled(spec.model_cls, ".moe."),
        model_args={"tiny": args},
        build_dataloader_fn=build_random_tokens,
        build_tokenizer_fn=None,
        build_validator_fn=None,
    )


def on_gloo(spec: TrainSpec) -> TrainSpec:
    """The stock spec on gloo, which has no scaled sum: FSDP2 must sum without a factor."""

    def parallelize(*args: Any, **kwargs: Any) -> nn.Module:
        model = spec.parallelize_fn(*args, **kwargs)
        for unit in (m for m in model.modules() if isinstance(m, FSDPModule)):
            group = unit._get_fsdp_state()._fsdp_param_group
            if group is not None and group.mesh_info.shard_mesh_size > 1:
                unit.set_force_sum_reduction_for_comms(True)
        return model

    return replace(spec, parallelize_fn=parallelize)


def register() -> None:
    for name, module, args in (
        ("qwen3", qwen3, QWEN3),
        ("deepseek_v3", deepseek_v3, DEEPSEEK_V3),
    ):
        stock = tiny(module.get_train_spec(), args)
        register_train_spec(f"stock_tiny_{name}", on_gloo(stock))
        register_train_spec(f"moecore_tiny_{name}", accelerated(stock))
    decoder = decoder_spec({"tiny": DECODER})
    loader = with_labels(build_random_tokens)
    decoder = replace(
        decoder,
        model_cls=filled(TitanDecoder, ".mlp."),
        build_dataloader_fn=loader,
        build_tokenizer_fn=None,
    )
    register_train_spec("moecore_tiny_decoder", decoder)


register()
