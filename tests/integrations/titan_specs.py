"""Tiny models for torchtitan's registry, stock and moecore's, on seeded random tokens.

torchtitan imports this module by `--experimental.custom_import tests.integrations.titan_specs`.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.models import deepseek_v3, qwen3
from torchtitan.models.moe import MoE, MoEArgs
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

from moecore.integrations.torchtitan.models import LossDecoder
from moecore.integrations.torchtitan.v02.specs import (
    accelerated,
    add_labels,
    decoder_spec,
    make_titan_moe,  # noqa: F401  (a test's)
)
from tests.integrations.titan_runs import (
    DECODER,
    EOS,
    VOCAB,
    WIDE,
    RandomBatches,
    random_block,
    refill,
)

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


class RandomTokens(RandomBatches, BaseDataLoader):
    pass


def build_random_tokens(*, dp_rank, dp_world_size, job_config, **_):
    training = job_config.training
    return RandomTokens(dp_rank, dp_world_size, training.local_batch_size, training.seq_len)


def filled(model_cls: type[nn.Module], block: str) -> type[nn.Module]:
    """A model class that ends `init_weights` with `refill`."""

    class Filled(model_cls):  # type: ignore[misc, valid-type]
        def init_weights(self, *args: Any, **kwargs: Any) -> None:
            super().init_weights(*args, **kwargs)
            refill(self, block)

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
    for name, module, args in (("qwen3", qwen3, QWEN3), ("deepseek_v3", deepseek_v3, DEEPSEEK_V3)):
        stock = tiny(module.get_train_spec(), args)
        register_train_spec(f"stock_tiny_{name}", on_gloo(stock))
        register_train_spec(f"moecore_tiny_{name}", accelerated(stock))
    loader = add_labels(build_random_tokens)
    for name, config in (("tiny", DECODER), ("wide", WIDE)):
        decoder = replace(
            decoder_spec({"tiny": config}),
            model_cls=filled(LossDecoder, ".mlp."),
            build_dataloader_fn=loader,
            build_tokenizer_fn=lambda job: SimpleNamespace(eos_id=EOS),
        )
        register_train_spec(f"moecore_{name}_decoder", decoder)


def stock_block(*, shared=False, bias=False, forced=False, **options):
    defaults = dict(num_experts=8, use_grouped_mm=False, score_before_experts=False)
    names = dict(num_shared_experts=2 * shared, gate_bias=bias, _debug_force_load_balance=forced)
    return random_block(MoE(MoEArgs(**(defaults | names | options)), 16, 32))


def exact_block(block: nn.Module) -> None:
    """Nothing to do: without grouped products stock multiplies in the dtype of its input."""


def fill_block(block: Any) -> None:
    if block.router.gate.bias is not None:  # stock leaves it as it is
        block.router.gate.bias.zero_()
    block.init_weights(0.1, torch.device("cpu"))


register()
