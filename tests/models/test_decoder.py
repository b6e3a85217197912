import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from moecore.models import PRESETS, Decoder, preset
from moecore.models.layers import MLP
from tests.io.hf.states import native_state
from tests.models.hf_pairs import PAIRS, gradients, make_pair

TINY = ("tiny", "tiny-qwen3", "tiny-qwen3-next", "tiny-nemotron-h", "tiny-shared")
TINY += ("tiny-deepseek-v3",)


@pytest.mark.parametrize("name", PAIRS)
def test_logits_loss_and_gradients_equal_hugging_face(name):
    pytest.importorskip("transformers")
    hf, config = make_pair(name)
    ours = Decoder(config)
    ours.load_state_dict(native_state(hf.state_dict(), config))
    tokens = torch.randint(0, 97, (3, 29))
    want, got = hf(tokens).logits, ours(tokens)
    assert want.abs().max() > 1  # otherwise the bound says nothing
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    labels[0, :5] = -100
    loss = ours(tokens, labels)
    want_loss = F.cross_entropy(want.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, want_loss, rtol=1e-6, atol=0)
    loss.backward()
    want_loss.backward()
    expected = native_state(gradients(hf), config)
    for name, param in ours.named_parameters():
        scale = expected[name].abs().max()
        if ".indexer." in name:  # a choice is a constant
            assert param.grad is None and scale == 0
            continue
        assert scale > 0, name
        assert (param.grad - expected[name]).abs().max() <= 1e-5 * scale, name


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
        constant = "norm" in key or key.endswith(("expert_bias", ".D"))
        constant |= key.endswith("dt_bias") and name == "tiny-qwen3-next"
        assert torch.equal(value, want[key]) == constant, key


def test_embeddings_have_a_scale_of_their_own():
    model, plain = Decoder(preset("tiny")), Decoder(preset("tiny"))
    model.init_weights(embedding_std=1.0)
    for (name, param), of_default in zip(model.named_parameters(), plain.parameters(), strict=True):
        factor = 50.0 if "embed_tokens" in name else 1.0
        torch.testing.assert_close(param, of_default * factor)
    with pytest.raises(ValueError, match="embedding_std"):
        model.init_weights(embedding_std=0.0)


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
    shared = Decoder(preset("tiny-shared")).layers[1].mlp.get_part("shared")
    assert shared.w2.std() < 0.6 * shared.w1.std()


def test_init_scales_what_leads_out_of_the_latent():
    config = preset("tiny")
    latent = Decoder(replace(config, moe=replace(config.moe, latent_dim=64))).layers[1].mlp
    scale = 1 / math.sqrt(2 * config.num_layers)
    assert latent.latent.w_up.std().item() == pytest.approx(0.02 * scale, rel=0.1)
    assert latent.experts.w2.std().item() == pytest.approx(0.02, rel=0.1)


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
    with pytest.raises(ValueError, match=r"temperature \(-1\) must be a finite number >= 0"):
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
    for mask in (torch.zeros(1, 7, dtype=torch.bool), tokens):
        message = r"padding_mask \(1, \d\) \(torch.*\) must be torch.bool"
        with pytest.raises(ValueError, match=message):
            model(tokens, padding_mask_BT=mask)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in PRESETS if n.startswith("tiny")])
def test_cuda_equals_cpu(name):
    cpu = Decoder(preset(name))
    for key, param in cpu.named_parameters():
        if key.endswith("A_log"):  # states outlive tokens, or gradients of decays are all rounding
            torch.nn.init.constant_(param, -2.0)
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_dense_mlp_with_smooth_limits(dtype: torch.dtype) -> None:
    """Kimi K3's formula with numbers past both limits, in fp64; bf16 is rounded from fp32."""
    config = replace(preset("tiny-deepseek-v3"), mlp_activation="situ_glu")
    mlp = MLP(config, dtype=torch.float64)
    torch.manual_seed(0)
    with torch.no_grad():
        for param in mlp.parameters():
            param.normal_(std=2)
    mlp.to(dtype)
    x = torch.randn(2, 5, config.dim, dtype=dtype, requires_grad=True)
    leaves, y = [x, *mlp.parameters()], mlp(x)
    found = [y, *torch.autograd.grad(y.sum(), leaves)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    by_name = dict(zip(dict(mlp.named_parameters()), exact[1:], strict=True))
    gate, up = (exact[0] @ by_name[f"{name}_proj.weight"].T for name in ("gate", "up"))
    assert up.abs().max() > 25 > 4 > gate.abs().min()
    a = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * (25 * torch.tanh(up / 25))
    expected = a @ by_name["down_proj.weight"].T
    wanted = [expected, *torch.autograd.grad(expected.sum(), exact)]
    for one, true in zip(found, wanted, strict=True):
        assert (one.double() - true).norm() < 4 * torch.finfo(dtype).eps * true.norm()
