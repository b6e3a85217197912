"""Decoder against Hugging Face models with the same weights, and its own promises."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from moecore import MoEConfig
from moecore.models import PRESETS, Decoder, DecoderConfig, preset
from moecore.models.layers import RotaryTable
from moecore.moe.layer import MoELayer

TINY = ("tiny", "tiny-qwen3", "tiny-shared")
SHAPE = dict(vocab_size=97, dim=64, num_layers=3, num_heads=4, head_dim=16, max_seq_len=64)
HF_SHAPE = dict(
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
    initializer_range=0.2,
    attn_implementation="eager",
)


def qwen3_pair():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    hf = Qwen3MoeConfig(
        **HF_SHAPE,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        mlp_only_layers=[1],
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    ours = DecoderConfig(
        **SHAPE,
        num_kv_heads=2,
        qk_norm="head",
        rope_theta=1e6,
        dense_layers=(1,),
        mlp_hidden_dim=48,
        moe=MoEConfig(dim=64, hidden_dim=32, num_experts=8, top_k=3),
    )
    return Qwen3MoeForCausalLM(hf), ours


def mixtral_pair():
    from transformers import MixtralConfig, MixtralForCausalLM

    hf = MixtralConfig(
        **HF_SHAPE,
        num_key_value_heads=2,
        intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    ours = DecoderConfig(
        **SHAPE,
        num_kv_heads=2,
        norm_eps=1e-5,
        rope_theta=1e6,
        tie_embeddings=True,
        moe=MoEConfig(dim=64, hidden_dim=32, num_experts=4, top_k=2),
    )
    return MixtralForCausalLM(hf), ours


def olmoe_pair():
    from transformers import OlmoeConfig, OlmoeForCausalLM

    hf = OlmoeConfig(
        **HF_SHAPE,
        num_key_value_heads=4,
        intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        rms_norm_eps=1e-5,
        pad_token_id=None,  # with one, its embedding is zero and gets no gradient
        eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    ours = DecoderConfig(
        **SHAPE,
        num_kv_heads=4,
        norm_eps=1e-5,
        qk_norm="full",
        moe=MoEConfig(dim=64, hidden_dim=32, num_experts=8, top_k=3, normalize_weights=False),
    )
    return OlmoeForCausalLM(hf), ours


HF_NAMES = {"gate.weight": "router.weight", "gate_up_proj": "w1", "down_proj": "w2"}


def from_hf(name: str) -> str:
    """Our name of a Hugging Face parameter: only those inside an MoE block differ."""
    for theirs, ours in HF_NAMES.items():
        if name.endswith((f"mlp.{theirs}", f"experts.{theirs}")):
            return name.removesuffix(theirs) + ours
    return name


@pytest.mark.parametrize("pair", [qwen3_pair, mixtral_pair, olmoe_pair])
def test_logits_loss_and_gradients_equal_hugging_face(pair):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    hf, config = pair()
    with torch.no_grad():
        for name, param in hf.named_parameters():
            if "norm" in name:
                param.uniform_(0.5, 1.5)
    ours = Decoder(config)
    shapes = {n: p.shape for n, p in ours.named_parameters()}  # w1 has a dim for gate and up
    state = {n: p.detach().clone() for n, p in hf.named_parameters()}
    state = {from_hf(n): p.view(shapes[from_hf(n)]) for n, p in state.items()}
    assert ours.load_state_dict(state, strict=True)

    tokens = torch.randint(0, 97, (3, 29))
    want = hf(tokens).logits
    got = ours(tokens)
    assert want.abs().max() > 1  # otherwise the bound says nothing
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()

    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    labels[0, :5] = -100
    loss = ours(tokens, labels)
    want_loss = F.cross_entropy(want.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, want_loss, rtol=1e-6, atol=0)
    loss.backward()
    want_loss.backward()
    params = dict(ours.named_parameters())
    for name, param in hf.named_parameters():
        scale = param.grad.abs().max()
        found = params[from_hf(name)].grad.view_as(param)
        assert (found - param.grad).abs().max() <= 2e-5 * scale, name


@pytest.mark.parametrize("name", TINY)
def test_loss_is_that_of_the_logits(name):
    model = Decoder(preset(name))
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.config.vocab_size, (2, 37), generator=g)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    logits = model(tokens)
    assert logits.shape == (2, 37, model.config.vocab_size)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    mean = model(tokens, labels)
    assert mean.shape == () and mean.dtype == torch.float32
    torch.testing.assert_close(mean, total / 72, rtol=1e-6, atol=0)
    for num in (500, torch.tensor(500)):
        loss = model(tokens, labels, num_tokens=num)
        torch.testing.assert_close(loss, total / 500, rtol=1e-6, atol=0)
    none = model(tokens, torch.full_like(labels, -100))
    assert none.item() == 0.0


@pytest.mark.parametrize("name", TINY)
def test_tokens_do_not_see_the_future(name):
    model = Decoder(preset(name))
    tokens = torch.randint(0, 100, (1, 32), generator=torch.Generator().manual_seed(2))
    changed = tokens.clone()
    changed[0, 20] += 1
    with torch.no_grad():
        same = model(tokens)[0] - model(changed)[0]
    assert same[:20].abs().max() < 1e-5
    assert same[20:].abs().amax(-1).min() > 1e-4


def test_rotary_table_by_hand():
    # d = 4, theta = 100: frequencies 1 and 0.1; pairs are (0, 2) and (1, 3).
    table = RotaryTable(3, 4, 100.0, torch.device("cpu"))
    x = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(1, 3, 1, 4)
    want = [[math.cos(t), math.cos(0.1 * t), math.sin(t), math.sin(0.1 * t)] for t in range(3)]
    torch.testing.assert_close(table.rotate(x)[0, :, 0], torch.tensor(want))


def test_rotary_table_survives_mixed_precision_casts():
    """FSDP2 casts floating tensors inside containers and dataclasses, not inside this class."""
    from torch.distributed.utils import _apply_to_tensors

    table = RotaryTable(3, 4, 100.0, torch.device("cpu"))
    (kept,) = _apply_to_tensors(lambda t: t.bfloat16(), (table,))
    assert kept.cos_Td.dtype == torch.float32


@pytest.mark.parametrize("name", TINY)
def test_init_fills_everything_after_to_empty(name):
    built = Decoder(preset(name))
    model = Decoder(preset(name), device="meta")
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(float("nan"))
    model.init_weights()
    state, want = model.state_dict(), built.state_dict()
    assert state.keys() == want.keys()
    for key in want:
        assert torch.equal(state[key], want[key]), key
    model.init_weights(seed=1)
    for key, value in model.state_dict().items():
        constant = "norm" in key or "expert_bias" in key
        assert torch.equal(value, want[key]) == constant, key


def test_init_scale_of_each_kind():
    model = Decoder(preset("tiny"))
    small = 0.02 / math.sqrt(2 * model.config.num_layers)
    stds = set()
    for name, param in model.named_parameters():
        if "norm" in name:
            assert torch.equal(param, torch.ones_like(param))
            continue
        std = small if name.endswith(("o_proj.weight", "down_proj.weight", "experts.w2")) else 0.02
        assert abs(param.std().item() / std - 1) < 5 / math.sqrt(2 * param.numel()), name
        stds.add(param.std().item())
    assert len(stds) == sum("norm" not in n for n, _ in model.named_parameters())
    shared = Decoder(preset("tiny-shared")).layers[1].mlp.part("shared")
    assert shared.w2.std() < 0.6 * shared.w1.std()


def test_names_follow_hugging_face():
    names = [n for n, _ in Decoder(preset("tiny-qwen3"), device="meta").named_parameters()]
    layer = "model.layers.0."
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert [n.removeprefix(layer) for n in names if n.startswith(layer)] == [
        "input_layernorm.weight",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        "post_attention_layernorm.weight",
        "mlp.router.weight",
        "mlp.experts.w1",
        "mlp.experts.w2",
    ]


def test_tied_head_is_one_parameter_with_both_gradients():
    config = preset("tiny-shared")
    tied = Decoder(config)
    assert "lm_head.weight" not in tied.state_dict()
    untied = Decoder(replace(config, tie_embeddings=False))
    untied.load_state_dict({**tied.state_dict(), "lm_head.weight": tied.model.embed_tokens.weight})
    tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(0))
    for model in (tied, untied):
        model(tokens, tokens.roll(-1, 1)).backward()
    both = untied.model.embed_tokens.weight.grad + untied.lm_head.weight.grad
    torch.testing.assert_close(tied.model.embed_tokens.weight.grad, both)


@pytest.mark.parametrize("name", TINY)
def test_bf16_runs_close_to_fp32(name):
    exact, model = Decoder(preset(name)), Decoder(preset(name)).bfloat16()
    for module in model.modules():
        if isinstance(module, MoELayer) and module.part("router").selection_bias is not None:
            module.part("router").expert_bias = module.part("router").expert_bias.float()
    tokens = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(0))
    loss = model(tokens, tokens)
    loss.backward()
    assert model(tokens).dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert abs(loss - exact(tokens, tokens)) < 0.02
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_greedy_generation_equals_argmax_of_logits():
    model = Decoder(preset("tiny-qwen3"))
    prompt = torch.randint(0, 128, (2, 5), generator=torch.Generator().manual_seed(0))
    out = model.generate(prompt, 6, temperature=0)
    assert out.shape == (2, 11) and torch.equal(out[:, :5], prompt)
    logits = model(out)
    assert torch.equal(out[:, 5:], logits[:, 4:-1].argmax(-1))
    assert not out.requires_grad and model.training


def test_sampling_repeats_with_its_generator_and_passes_the_window():
    model = Decoder(replace(preset("tiny-qwen3"), max_seq_len=8))
    prompt = torch.zeros(1, 6, dtype=torch.int64)
    outs = [
        model.generate(prompt, 20, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)
    ]
    assert outs[0].shape == (1, 26)
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert torch.equal(model.generate(prompt, 0), prompt)
    with pytest.raises(ValueError, match=r"temperature \(-1\) must be >= 0"):
        model.generate(prompt, 1, temperature=-1)


def test_wrong_inputs_are_refused():
    model = Decoder(preset("tiny-qwen3"))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"tokens \(8,\) must be \[B, T\]"):
        model(tokens[0])
    with pytest.raises(ValueError, match=r"sequence length \(129\) must be <= max_seq_len \(128\)"):
        model(torch.zeros(1, 129, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"labels \(1, 7\) must have the shape of tokens \(1, 8\)"):
        model(tokens, tokens[:, 1:])


def test_a_few_steps_learn_a_repeated_sequence():
    torch.manual_seed(0)
    model = Decoder(preset("tiny-qwen3"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 128, (4, 33))
    losses = []
    for _ in range(20):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(128)) < 0.1
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in PRESETS if n.startswith("tiny")])
def test_cuda_equals_cpu(name):
    cpu = Decoder(preset(name))
    gpu = Decoder(preset(name), device="cuda")
    gpu.load_state_dict(cpu.state_dict())
    tokens = torch.randint(0, 100, (2, 40), generator=torch.Generator().manual_seed(0))
    want = cpu(tokens, tokens.roll(-1, 1))
    got = gpu(tokens.cuda(), tokens.roll(-1, 1).cuda())
    assert got.is_cuda and abs(got.item() - want.item()) < 1e-4
    got.backward()
    want.backward()
    ours = dict(gpu.named_parameters())
    for key, param in cpu.named_parameters():
        scale = param.grad.abs().max()
        assert (ours[key].grad.cpu() - param.grad).abs().max() <= 5e-4 * scale, key
