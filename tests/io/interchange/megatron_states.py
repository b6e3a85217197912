"""Megatron-Core's tensors of a native decoder, put together head by head and expert by expert.

Shares nothing with `moecore.io`: one loop for each tensor, by the definitions of its rows.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from moecore.models import DecoderConfig

ROOT = "model.layers."


def fused_qkv(q: Tensor, k: Tensor, v: Tensor, num_groups: int, head_dim: int) -> Tensor:
    """Rows of each group: its query heads one by one, its key head, its value head."""
    heads_of_group = q.shape[0] // head_dim // num_groups
    rows = []
    for group in range(num_groups):
        for head in range(heads_of_group):
            first = (group * heads_of_group + head) * head_dim
            rows += [q[first + j] for j in range(head_dim)]
        rows += [k[group * head_dim + j] for j in range(head_dim)]
        rows += [v[group * head_dim + j] for j in range(head_dim)]
    return torch.stack(rows)


def gate_then_up(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack([*(row for row in gate), *(row for row in up)])


def layer_state(config: DecoderConfig, state: Mapping[str, Tensor], own: str) -> dict[str, Tensor]:
    """One transformer layer; `own` is what its native names begin with."""
    s = {name.removeprefix(own): t for name, t in state.items() if name.startswith(own)}
    found: dict[str, Tensor] = {}
    if config.mla:
        found["input_layernorm.weight"] = s["input_layernorm.weight"]
        for theirs, ours in (
            ("linear_q_proj.weight", "q_proj"),
            ("linear_q_down_proj.weight", "q_a_proj"),
            ("linear_q_up_proj.layer_norm_weight", "q_a_layernorm"),
            ("linear_q_up_proj.weight", "q_b_proj"),
            ("linear_kv_down_proj.weight", "kv_a_proj_with_mqa"),
            ("linear_kv_up_proj.layer_norm_weight", "kv_a_layernorm"),
            ("linear_kv_up_proj.weight", "kv_b_proj"),
        ):
            if f"self_attn.{ours}.weight" in s:
                found[f"self_attention.{theirs}"] = s[f"self_attn.{ours}.weight"]
    else:
        found["self_attention.linear_qkv.layer_norm_weight"] = s["input_layernorm.weight"]
        q, k, v = (s[f"self_attn.{n}_proj.weight"] for n in "qkv")
        fused = fused_qkv(q, k, v, config.num_kv_heads, config.head_dim)
        found["self_attention.linear_qkv.weight"] = fused
        for n in "qk":
            if f"self_attn.{n}_norm.weight" in s:
                found[f"self_attention.{n}_layernorm.weight"] = s[f"self_attn.{n}_norm.weight"]
    found["self_attention.linear_proj.weight"] = s["self_attn.o_proj.weight"]
    norm = s["post_attention_layernorm.weight"]
    if "mlp.router.weight" not in s:
        found["mlp.linear_fc1.layer_norm_weight"] = norm
        both = s["mlp.gate_proj.weight"], s["mlp.up_proj.weight"]
        found["mlp.linear_fc1.weight"] = gate_then_up(*both)
        found["mlp.linear_fc2.weight"] = s["mlp.down_proj.weight"]
        return found
    found["pre_mlp_layernorm.weight"] = norm
    found["mlp.router.weight"] = s["mlp.router.weight"]
    if "mlp.router.expert_bias" in s:
        found["mlp.router.expert_bias"] = s["mlp.router.expert_bias"]
    fc1 = []
    for gate_up in s["mlp.experts.w1"]:
        fc1.append(gate_then_up(gate_up[0], gate_up[1]))
    found["mlp.experts.experts.linear_fc1.weight"] = torch.stack(fc1)
    found["mlp.experts.experts.linear_fc2.weight"] = s["mlp.experts.w2"]
    if "mlp.shared.w1" in s:
        found["mlp.shared_experts.linear_fc1.weight"] = s["mlp.shared.w1"]
        found["mlp.shared_experts.linear_fc2.weight"] = s["mlp.shared.w2"]
    if "mlp.shared.gate" in s:
        found["mlp.shared_experts.gate_weight"] = s["mlp.shared.gate"]
    return found


def megatron_state(config: DecoderConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors; layers that are alike are stacked, others have names of their own."""
    found = {"embedding.word_embeddings.weight": state["model.embed_tokens.weight"]}
    layers = [layer_state(config, state, f"{ROOT}{i}.") for i in range(config.num_layers)]
    for i, layer in enumerate(layers):
        for name, tensor in layer.items():
            if config.dense_layers:
                found[f"decoder.layers.{i}.{name}"] = tensor
            elif i == 0:
                found[f"decoder.layers.{name}"] = torch.stack([part[name] for part in layers])
    found["decoder.final_layernorm.weight"] = state["model.norm.weight"]
    if "lm_head.weight" in state:
        found["output_layer.weight"] = state["lm_head.weight"]
    for k in range(config.num_mtp_layers):
        for theirs, ours in (("final_layernorm", "norm"), *((n, n) for n in MTP_PARTS)):
            found[f"mtp.layers.{k}.{theirs}.weight"] = state[f"mtp.{k}.{ours}.weight"]
        for name, tensor in layer_state(config, state, f"mtp.{k}.block.").items():
            found[f"mtp.layers.{k}.transformer_layer.{name}"] = tensor
    return found


MTP_PARTS = ("enorm", "hnorm", "eh_proj")
