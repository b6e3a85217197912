from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moecore import BalanceConfig
from moecore.attention.sequence import shift_rows
from moecore.models import (
    Decoder,
    DecoderConfig,
    GatedDeltaConfig,
    Mamba2Config,
    YarnConfig,
    flops_per_token,
    num_params,
    preset,
)
from tests.io.hf.states import hf_state
from tests.models.hf_pairs import YARN, deepseek, randomize
from tests.models.plain_decoder import PlainLosses, plain_losses
from tests.parallel.small_decoder import small_decoder

BALANCE = BalanceConfig(micro_batch_coef=0.1, sequence_coef=0.2, z_loss_coef=0.01)
DEEPSEEK = replace(preset("tiny-deepseek-v3"), ce_chunk_tokens=7)
DEEPSEEK = replace(DEEPSEEK, moe=replace(DEEPSEEK.moe, balance=BALANCE))
GROUPED = small_decoder(
    32,
    24,
    vocab_size=60,
    max_seq_len=4096,
    qk_norm="head",
    tie_embeddings=True,
    dense_layers=(1,),  # and so is the module's MLP
    mlp_hidden_dim=48,
    ce_chunk_tokens=7,
    moe=dict(balance=BALANCE),
)
WINDOWED = replace(  # the second layer and the modules; alone it would hide what sinks do
    GROUPED,
    attention_bias="all",
    windows=(0, 5),
    attention_sinks=True,
    rotary_dim=4,
    max_seq_len=128,
    yarn=YarnConfig(factor=4.0, original_max_seq_len=32, beta_fast=2.0, truncate=False),
)
LINEAR = replace(
    GROUPED,
    attention_gate=True,
    linear_attention=GatedDeltaConfig(num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=8),
    linear_layers=(0,),
    norm_eps=1e-3,
    zero_centered_norms=True,
)
HYBRID = replace(  # every kind of layer, and one behind another of its half
    GROUPED,
    qk_norm=None,
    num_layers=6,
    pattern="M*-MEE",
    dense_layers=(),
    mlp_activation="relu2",
    rope_theta=None,
    linear_attention=Mamba2Config(
        num_k_heads=2, num_v_heads=6, head_k_dim=16, head_v_dim=8, min_step=0.3
    ),
    norm_eps=1e-3,
    moe=replace(GROUPED.moe, activation="relu2", shared_hidden_dim=40),  # type: ignore[type-var]
)
KINDS = {"latent": DEEPSEEK, "grouped, tied, dense": GROUPED, "windows, sinks, biases": WINDOWED}
KINDS["linear, gates"] = LINEAR
CONFIGS = {
    f"{name}, {depth}": replace(config, num_mtp_layers=depth, mtp_loss_coef=0.4)
    for name, config in KINDS.items()
    for depth in (1, 2)
}
CONFIGS |= {
    f"{name}, repeated": replace(KINDS[name], num_mtp_layers=1, mtp_repeats=3, mtp_loss_coef=0.4)
    for name in ("latent", "grouped, tied, dense", "linear, gates")
}
CONFIGS |= {f"{n}, detached": replace(CONFIGS[n], mtp_detached=True) for n in list(CONFIGS)[1:4:2]}


def make(config: DecoderConfig) -> Decoder:
    """A decoder whose losses all differ: large weights, random norms and biases."""
    model = Decoder(config)
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if not value.is_floating_point():  # experts by token id
                continue
            if "norm" in name:
                value.copy_(torch.rand(value.shape, generator=g) + 0.5)
            elif "expert_bias" in name:
                value.copy_(torch.rand(value.shape, generator=g) * 0.1)
            elif name.endswith("A_log"):  # states outlive tokens
                value.uniform_(-4.0, -1.0, generator=g)
            elif name.endswith(("_bias", "_proj.bias", "sinks", ".D")):
                value.copy_(torch.randn(value.shape, generator=g))
            elif "linear_attn" not in name:  # its norm divides by what these are
                value.mul_(8.0)
    return model


def batch(config: DecoderConfig, T: int = 19) -> tuple[Tensor, Tensor]:
    """Labels are the next tokens; some do not count."""
    g = torch.Generator().manual_seed(5)
    text = torch.randint(0, config.vocab_size, (3, T + 1), generator=g)
    labels = text[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=g) < 0.2] = -100
    labels[0, :6] = -100
    return text[:, :-1], labels


def expected(model, tokens, labels, num_tokens=None) -> tuple[PlainLosses, dict[str, Tensor]]:
    """The plain losses, and the gradient of their total."""
    params = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    losses = plain_losses(
        {**dict(model.named_buffers()), **params}, model.config, tokens, labels, num_tokens
    )
    losses.total(model.config).backward()
    return losses, {n: p.grad for n, p in params.items()}


def assert_gradients(model: Decoder, want: dict[str, Tensor]) -> None:
    for name, param in model.named_parameters():
        scale = want[name].abs().max()
        assert scale > 0, name
        assert (param.grad - want[name]).abs().max() <= 1e-5 * scale, name


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_equal_the_plain_computation(name):
    model, num_tokens = make(CONFIGS[name]), 200 if name.endswith("2") else None
    tokens, labels = batch(model.config)
    want, gradients = expected(model, tokens, labels, num_tokens)
    loss = model(tokens, labels, num_tokens=num_tokens)
    coef, ahead = model.config.mtp_loss_coef, torch.stack(want.ahead)
    torch.testing.assert_close(loss, want.main + coef * ahead.mean(), rtol=1e-5, atol=0)
    assert model.mtp_losses.dtype == torch.float32 and not model.mtp_losses.requires_grad
    torch.testing.assert_close(model.mtp_losses, ahead, rtol=1e-5, atol=0)
    assert len({round(v, 3) for v in [want.main.item(), *ahead.tolist()]}) == 1 + len(ahead)
    loss.backward()
    assert_gradients(model, gradients)


@pytest.mark.parametrize("name", ["latent, 2", "grouped, tied, dense, 1"])
def test_autocast_errs_at_most_twice_what_a_bf16_model_does(name):
    config = CONFIGS[name]
    every = replace(config.moe, top_k=config.moe.num_experts, num_groups=1, top_groups=1)
    config = replace(config, moe=every)  # a choice that flips is no rounding error
    found = {}
    for mode in ("fp32", "autocast", "bf16"):
        model = make(config)
        tokens, labels = batch(config)
        if mode == "bf16":
            model.bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            loss = model(tokens, labels)
        loss.backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found[mode] = loss.detach(), model.mtp_losses, torch.cat(grads)
        assert all(p.grad.dtype == p.dtype for p in model.parameters() if p.grad is not None)
    for exact, ours, plain in zip(*(found[mode] for mode in found), strict=True):
        assert (ours - exact).norm() <= 2 * (plain - exact).norm() + 2e-4 * exact.norm()


@pytest.mark.parametrize("name", ["latent, 2", "latent, repeated", "linear, gates, 1"])
def test_what_is_read_past_the_end_changes_nothing(name, monkeypatch):
    model = make(CONFIGS[name])
    tokens, labels = batch(model.config)
    results = []
    for token in (0, 9):
        monkeypatch.setattr(
            "moecore.attention.sequence.shift_rows",
            lambda x, steps, fill, token=token: shift_rows(x, steps, token if fill == 0 else fill),
        )
        model.zero_grad()
        model(tokens, labels).backward()
        results.append([model.mtp_losses, *(p.grad for p in model.parameters())])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6 * first.abs().max().item())


def test_short_documents_are_divided_alike_in_all_forms():
    """Without a number, with that of the batch, and with that of a batch in two micro-batches."""
    config = CONFIGS["latent, 2"]
    model = make(replace(config, moe=replace(config.moe, balance=BalanceConfig())))
    lengths = [[2, 3, 2, 3], [4, 2, 3, 1]]
    g, found = torch.Generator().manual_seed(3), []
    rows = [torch.randint(0, config.vocab_size, (1, 10), generator=g) for _ in lengths]
    borders = [torch.tensor([0, *n]).cumsum(0).int() for n in lengths]

    def labels_of(row: Tensor, border: Tensor) -> Tensor:
        labels = row.roll(-1, 1)
        labels[0, border[1:].long() - 1] = -100  # the last of a document has no next token
        return labels

    labels = [labels_of(row, border) for row, border in zip(rows, borders, strict=True)]
    whole = torch.cat(rows), torch.cat(labels)
    cu_seqlens = torch.cat([borders[0], borders[1][1:] + 10])
    num_tokens = int((whole[1] != -100).sum())
    every = [(*whole, cu_seqlens, None)], [(*whole, cu_seqlens, num_tokens)]
    parts = zip(rows, labels, borders, strict=True)
    for batches in (*every, [(*part, num_tokens) for part in parts]):
        model.zero_grad()
        for tokens, targets, border, number in batches:
            model(tokens, targets, cu_seqlens=border, num_tokens=number).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    largest = max(grad.abs().max() for grad in found[0].values())
    for other in found[1:]:
        for name, grad in found[0].items():
            scale = max(grad.abs().max(), 1e-4 * largest)
            assert (other[name] - grad).abs().max() <= 1e-5 * scale, name


def test_sequences_too_short_for_a_target():
    model = make(CONFIGS["latent, 2"])
    tokens, labels = batch(model.config, T=2)
    loss = model(tokens, labels)
    loss.backward()
    assert model.mtp_losses[0] > 0 and model.mtp_losses[1] == 0
    for param in model.mtp[1].parameters():
        assert param.grad is None or not param.grad.any()
    one = model(tokens[:, :1], labels[:, :1])
    assert model.mtp_losses.tolist() == [0.0, 0.0] and one.isfinite()
    none = model(tokens, torch.full_like(labels, -100))
    assert none.item() == 0.0 and model.mtp_losses.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", ["no labels", "eval", "generate"])
def test_it_runs_in_training_with_labels_only(mode):
    model = make(CONFIGS["latent, 2"])
    tokens, labels = batch(model.config)
    plain = Decoder(replace(model.config, num_mtp_layers=0, mtp_loss_coef=0.0))
    plain.load_state_dict({n: t for n, t in model.state_dict().items() if "mtp." not in n})
    for module in model.mtp.modules():
        module.register_forward_pre_hook(lambda *_: pytest.fail("must not run"))
    if mode == "no labels":
        assert torch.equal(model(tokens), plain(tokens))
    elif mode == "eval":
        assert torch.equal(model.eval()(tokens, labels), plain.eval()(tokens, labels))
    else:
        out = model.generate(tokens, 2, temperature=0)
        assert torch.equal(out, plain.generate(tokens, 2, temperature=0))
    assert model.mtp_losses is None


def test_a_repeated_module_is_modules_whose_weights_are_tied_by_hand():
    """Gradients are the sum over the copies', and so are FLOPs; parameters are those of one."""
    config = CONFIGS["latent, repeated"]
    model = make(config)
    apart = Decoder(replace(config, num_mtp_layers=3, mtp_repeats=1))
    state = model.state_dict()
    copies = {n.replace("mtp.0", f"mtp.{k}"): t for k in range(3) for n, t in state.items()}
    apart.load_state_dict(copies)
    tokens, labels = batch(config)
    for one in (model, apart):
        one(tokens, labels).backward()
    torch.testing.assert_close(model.mtp_losses, apart.mtp_losses, rtol=1e-6, atol=0)
    others = dict(apart.named_parameters())
    for name, param in model.named_parameters():
        grads = [others[n].grad for n in {name.replace("mtp.0", f"mtp.{k}") for k in range(3)}]
        want = torch.stack(grads).sum(0)
        assert (param.grad - want).abs().max() <= 1e-5 * want.abs().max(), name
    found = [m.get_submodule("mtp.0.block.mlp").tracker.counts for m in (model, apart)]
    layers = [apart.get_submodule(f"mtp.{k}.block.mlp").tracker.counts for k in range(3)]
    assert torch.equal(found[0].choices_E, sum(layer.choices_E for layer in layers))
    losses = torch.stack([layer.losses for layer in layers]).sum(0)
    torch.testing.assert_close(found[0].losses, losses, rtol=1e-5, atol=0)
    assert flops_per_token(config, 64) == flops_per_token(apart.config, 64)
    assert (
        num_params(config) == sum(p.numel() for p in model.parameters()) < num_params(apart.config)
    )


def test_a_repeated_module_needs_losses_that_do_not_see_its_other_runs():
    config = CONFIGS["latent, repeated"]
    seeing = replace(config.moe, balance=BalanceConfig(global_batch_coef=0.1))
    with pytest.raises(ValueError, match=r"global_batch_coef \(0\.1\) must be 0 .* runs 3 times"):
        Decoder(replace(config, moe=seeing))
    with pytest.raises(ValueError, match=r"mtp_repeats \(3\) must be 1 with num_mtp_layers \(2\)"):
        replace(config, num_mtp_layers=2)
    with pytest.raises(ValueError, match=r"mtp_repeats \(3\) must be < max_seq_len \(3\)"):
        replace(config, max_seq_len=3)


@pytest.mark.parametrize("yarn", [None, YARN])
def test_modules_equal_those_of_transformers(tmp_path, monkeypatch, yarn):
    """transformers reads files named by `plan_hf_tensors`; its modules compute equal states."""
    pytest.importorskip("transformers")
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(getattr(layers, "MtpModel", None), "forward_layer"):
        pytest.skip("transformers has no module that predicts one further token")
    from safetensors.torch import save_file

    torch.manual_seed(0)
    hf, config = deepseek(yarn=yarn, num_mtp_layers=2)
    randomize(hf)
    hf.save_pretrained(tmp_path)
    ours = make(config)
    files = hf_state(ours.state_dict(), config, layout="per_expert")
    save_file({n: t.clone() for n, t in files.items()}, tmp_path / "model.safetensors")
    # It looks for the modules of the published 61 layers.
    ignored = [r"model\.layers\.[34]\..*"]
    monkeypatch.setattr(type(hf), "_keys_to_ignore_on_load_unexpected", ignored)
    main = type(hf).from_pretrained(tmp_path, attn_implementation="eager")
    theirs = layers.MtpModel.from_pretrained(main)
    T = 23
    text = torch.randint(0, 97, (2, T + 1), generator=torch.Generator().manual_seed(1))
    hidden = main.model(text[:, :-1]).last_hidden_state
    losses = [F.cross_entropy(main.lm_head(hidden).flatten(0, 1), text[:, 1:].flatten())]
    for k in (1, 2):
        ids = text[:, k:-1]
        # Its causal mask is that of positions from 0 on.
        hidden = theirs.forward_layer(
            k - 1, hidden[:, :-1], torch.arange(T - k)[None], None, input_ids=ids
        )
        logits, targets = main.lm_head(hidden).flatten(0, 1), text[:, k + 1 :].flatten()
        losses.append(F.cross_entropy(logits, targets, reduction="sum") / text[:, 1:].numel())
    loss = ours(text[:, :-1], text[:, 1:])
    torch.testing.assert_close(ours.mtp_losses, torch.stack(losses[1:]), rtol=1e-5, atol=0)
    total = losses[0] + 0.3 * (losses[1] + losses[2]) / 2
    torch.testing.assert_close(loss, total, rtol=1e-5, atol=0)
    loss.backward()
    total.backward()
    params = dict(main.named_parameters())
    for name, param in ours.named_parameters():
        if name.startswith("model.") or name == "lm_head.weight":
            continue
        want = module_gradient(theirs, name)
        assert (param.grad.flatten() - want.flatten()).abs().max() <= 1e-5 * want.abs().max(), name
    embedding = params["model.embed_tokens.weight"].grad
    found = ours.model.embed_tokens.weight.grad
    assert (found - embedding).abs().max() <= 1e-5 * embedding.abs().max()


def module_gradient(theirs: torch.nn.Module, name: str) -> Tensor:
    """The gradient of their parameter with our name, gate and up of a shared expert joined."""
    params = dict(theirs.named_parameters())
    name = name.replace("mtp.", "layers.").replace(".block.", ".mtp_block.")
    for ours, others in (
        ("router.weight", "gate.weight"),
        ("experts.w1", "experts.gate_up_proj"),
        ("experts.w2", "experts.down_proj"),
        ("shared.w2", "shared_experts.down_proj.weight"),
    ):
        name = name.replace(f"mlp.{ours}", f"mlp.{others}")
    if name.endswith("shared.w1"):
        prefix = name.replace("shared.w1", "shared_experts.")
        return torch.cat([params[f"{prefix}{n}_proj.weight"].grad for n in ("gate", "up")])
    if name.endswith((".0.norm.weight", ".1.norm.weight")):
        name = name.replace("norm.weight", "post_norm.weight")
    return params[name].grad
