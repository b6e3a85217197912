"""Tensor parallelism against one process: loss, logits, every gradient, values after init.

Four ranks are spawned once. Each case runs on tp = 4 and on tp = 2 x dp = 2, where the two tp
groups see different data, so that a wrong group shows. With tp = 4 exchanges are sliced.
Gradients of all runs of a case travel in one exchange to rank 0, which alone runs the plain model,
on the data of each tp group.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from moecore import BalanceConfig, CapacityConfig, MoEConfig
from moecore.attention.sequence import Sequence
from moecore.base.torch_private import get_local_tensor
from moecore.models import Decoder, DecoderConfig, MLAConfig, YarnConfig, preset
from moecore.models.tensor_parallel import check_tensor_parallel
from moecore.moe.balance import BalanceGroups
from moecore.moe.layer import MoELayer
from tests.helpers.ranks import ranks_fixture
from tests.helpers.sliced import sliced
from tests.helpers.whole import gather_whole
from tests.train.memory.blocks import counting_bytes

SHAPE = dict(vocab_size=96, dim=32, num_heads=8, num_kv_heads=4, head_dim=8, ce_chunk_tokens=5)
MOE = MoEConfig(
    dim=32,
    hidden_dim=24,
    num_experts=8,
    top_k=2,
    balance=BalanceConfig(micro_batch_coef=0.1, sequence_coef=0.1, z_loss_coef=0.01),
)
MLA = MLAConfig(
    q_lora_rank=12,
    kv_lora_rank=10,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=6,
    yarn=YarnConfig(factor=4.0, original_max_seq_len=1024, mscale_all_dim=1.0),
)
CONFIGS = {
    "dense and moe, head norm": DecoderConfig(
        **SHAPE,
        num_layers=3,
        qk_norm="head",
        dense_layers=(0,),
        mlp_hidden_dim=40,
        hash_layers=1,
        moe=MOE,
    ),
    "full norm, biases, shared expert, tied, drops": DecoderConfig(
        **SHAPE,
        num_layers=2,
        attention_bias="all",
        rotary_dim=4,
        qk_norm="full",
        tie_embeddings=True,
        moe=replace(
            MOE,
            score_function="sigmoid",
            num_groups=4,
            top_groups=2,
            expert_bias=True,
            shared_hidden_dim=16,
            shared_gate=True,
            capacity=CapacityConfig(factor=1.2, drop="position"),
        ),
    ),
    "latent attention, predicting ahead": DecoderConfig(
        **SHAPE | dict(num_kv_heads=8),
        num_layers=2,
        mla=MLA,
        num_mtp_layers=2,
        mtp_loss_coef=0.4,
        dense_layers=(0,),
        mlp_hidden_dim=40,
        moe=replace(MOE, expert_bias=True, shared_hidden_dim=16),
    ),
    "latent attention without a query latent": DecoderConfig(
        **SHAPE | dict(num_kv_heads=8),
        num_layers=1,
        mla=replace(MLA, q_lora_rank=0, yarn=None),
        num_mtp_layers=1,
        mtp_loss_coef=0.4,
        tie_embeddings=True,
        mlp_hidden_dim=40,
    ),
    "dense only": DecoderConfig(**SHAPE, num_layers=2, mlp_hidden_dim=40, tie_embeddings=True),
}
TP_SIZES = (2, 4)
B, T = 3, 24


def make_batch(dp_rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels; the second half of every sequence's labels mostly does not count."""
    g = torch.Generator().manual_seed(10 + dp_rank)
    tokens = torch.randint(0, 96, (B, T), generator=g)
    labels = torch.randint(0, 96, (B, T), generator=g)
    labels[:, T // 2 :][torch.rand(B, T // 2, generator=g) < 0.8] = -100
    labels[:, -T // 4 :] = -100  # one rank of tp = 4 has no label at all
    return tokens, labels


def randomize_norms(model: nn.Module) -> None:
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, param in model.named_parameters():
            scale = torch.rand(param.shape, generator=g) + 0.5
            param.mul_(scale if "norm" in name else 4.0)
            if name.startswith("model.") and name.endswith("bias"):  # zero so far
                param.copy_(scale - 1.0)


def plain_of(config: DecoderConfig) -> Decoder:
    plain = Decoder(config)
    randomize_norms(plain)
    return plain


def build(config: DecoderConfig, mesh: DeviceMesh) -> Decoder:
    """The tp twin of the plain model, aux losses counted over the tp ranks."""
    model = plain_of(config)
    assert model.apply_tensor_parallel(mesh["tp"]) is model
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.tracker.groups = BalanceGroups(micro_batch=mesh["tp"].get_group())
    return model


def relative(got: Tensor, want: Tensor) -> float:
    scale = want.abs().max().item()
    return (got - want).abs().max().item() / scale if scale else got.abs().max().item()


def runs_of(dp_rank: int) -> dict[str, Callable[[Decoder], Tensor]]:
    """What is differentiated, on the data of one tp group."""
    tokens, labels = make_batch(dp_rank)
    mask = torch.arange(T) >= torch.tensor([T, T // 3, T // 2])[:, None]
    padded_labels = labels.masked_fill(mask, -100)
    # Documents across rows and across the ranks' slices; the last ends with padding.
    cu_seqlens = torch.tensor([0, 10, 31, 32, 50, 72, 72])
    end = torch.arange(B * T).view(B, T) >= 69
    weights = torch.randn(B, T, 96, generator=torch.Generator().manual_seed(5)) / 100
    return {
        "mean": lambda m: m(tokens, labels),
        "sum": lambda m: m(tokens, labels, num_tokens=torch.tensor(1000)),
        "padded": lambda m: m(tokens, padded_labels, padding_mask_BT=mask),
        "packed": lambda m: m(
            tokens, labels.masked_fill(end, -100), padding_mask_BT=end, cu_seqlens=cu_seqlens
        ),
        "logits": lambda m: m(tokens) * weights,
    }


def computed(model: Decoder, dp_rank: int) -> dict[str, Tensor]:
    """What the runs return, the gradients of its sum, losses of modules that predict ahead, tokens.

    Under tp a gradient is what this rank holds.
    """
    found = {}
    for kind, run in runs_of(dp_rank).items():
        model.zero_grad()
        out = run(model)
        out.sum().backward()
        found[f"{kind}: output"] = out.detach()
        for name, param in model.named_parameters():
            if param.grad is None:  # without labels no module predicts ahead
                assert name.startswith("mtp.")
                continue
            found[f"{kind}: {name}"] = param.grad
        if kind != "logits" and model.config.num_mtp_layers:
            found[f"{kind}: mtp"] = model.mtp_losses.detach().clone()
    prompt = make_batch(dp_rank)[0][:, :7]
    return found | {"generate": model.generate(prompt, 3, temperature=0)}


def added(grads: dict[str, Tensor], group: dist.ProcessGroup) -> dict[str, Any]:
    """Add over a tp group, in one all-reduce, what each rank has a part of.

    That is DTensors that are partial, and whole experts, which saw this rank's tokens only.
    """
    parts = {
        n: get_local_tensor(g)
        for n, g in grads.items()
        if ".experts." in n or (isinstance(g, DTensor) and g.placements[0].is_partial())
    }
    flat = torch.cat([part.flatten() for part in parts.values()])
    dist.all_reduce(flat, group=group)
    pieces = flat.split([part.numel() for part in parts.values()])
    sums = {n: x.view(parts[n].shape) for n, x in zip(parts, pieces, strict=True)}
    return grads | sums


def check_parity(config: DecoderConfig, mesh: DeviceMesh) -> dict[str, float]:
    """Relative errors of everything beyond those of one process, on rank 0."""
    model, dp_rank = build(config, mesh), mesh.get_local_rank("dp")
    params = dict(model.named_parameters())
    assert all(isinstance(p, DTensor) == (".experts." not in n) for n, p in params.items())
    found = added(computed(model, dp_rank), mesh["tp"].get_group())
    found = gather_whole({f"{n} of {dp_rank}": t for n, t in found.items()})
    if dist.get_rank():
        return {}
    plain, alone, errors = plain_of(config).double(), plain_of(config), {}
    shapes = {n: p.shape for n, p in plain.named_parameters()}
    assert {n: p.shape for n, p in params.items()} == shapes
    for i in range(mesh.size(0)):
        own = computed(alone, i)
        for n, t in computed(plain, i).items():
            errors[f"{n} of {i}"] = relative(found.pop(f"{n} of {i}"), t) - relative(own[n], t)
    assert not found
    return errors


def check_meta_init(config: DecoderConfig, mesh: DeviceMesh) -> dict[str, float]:
    """A model cut on meta gets the same values as a whole one, bit for bit; on rank 0."""
    model = Decoder(config, device="meta").apply_tensor_parallel(mesh["tp"])
    model.to_empty(device="cpu")
    model.init_weights(seed=7)
    state = gather_whole(model.state_dict())
    if dist.get_rank():
        return {}
    plain = Decoder(config)
    plain.init_weights(seed=7)
    want = plain.state_dict()
    assert state.keys() == want.keys()
    return {f"init: {k}": float((state[k] != want[k]).sum()) for k in want}


def check_fsdp(config: DecoderConfig, mesh: DeviceMesh) -> dict[str, float]:
    """FSDP2 over dp on top of tp: gradients are means over dp, initial values stay the same."""
    plain, model = plain_of(config), build(config, mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    dp = mesh.size(0)
    total = sum(plain(*make_batch(r)) for r in range(dp)) / dp
    total.backward()
    loss = model(*make_batch(mesh.get_local_rank("dp")))
    loss.backward()
    own = plain(*make_batch(mesh.get_local_rank("dp")))
    errors = {"loss": relative(loss.detach(), own.detach())}
    plain_params = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        errors[name] = relative(param.grad.full_tensor(), plain_params[name].grad)
    plain.init_weights(seed=7)
    model.init_weights(seed=7)
    for name, param in model.named_parameters():
        wrong = (param.full_tensor() != plain_params[name]).sum()
        errors[f"init: {name}"] = float(wrong)
    return errors


def check_refusals(mesh: DeviceMesh) -> list[str]:
    """The messages of requests that cannot be met."""
    config, tp = CONFIGS["dense only"], mesh["tp"]
    model = Decoder(config, device="meta").apply_tensor_parallel(tp)
    messages = []
    for request in (
        lambda: model.apply_tensor_parallel(tp),
        lambda: Decoder(replace(config, num_kv_heads=1), device="meta").apply_tensor_parallel(tp),
        lambda: build(config, mesh)(torch.zeros(1, 7, dtype=torch.int64)),
    ):
        with pytest.raises(ValueError) as info:
            request()
        messages.append(str(info.value))
    return messages


def head_bytes(mesh: DeviceMesh) -> int:
    """The most bytes of a head, its loss and its gradients at once, on this rank."""
    config = DecoderConfig(**SHAPE | dict(vocab_size=6144), num_layers=1, mlp_hidden_dim=40)
    model = Decoder(config).apply_tensor_parallel(mesh["tp"])
    x_BtD = torch.randn(B, T // mesh["tp"].size(), config.dim, requires_grad=True)
    labels_BT = torch.arange(B * T).view(B, T)
    with counting_bytes() as made:
        model.lm_head(x_BtD, labels_BT, None, None, Sequence()).backward()
    return made.peak + get_local_tensor(model.lm_head.weight).nbytes


def worst_over_ranks(errors: dict[str, float]) -> dict[str, float]:
    values = torch.tensor(list(errors.values()), dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(errors, values.tolist(), strict=True))


def worker(rank: int, device: torch.device, cases: list[tuple[str, int]]) -> dict:
    results: dict = {}
    for tp in TP_SIZES:
        mesh = init_device_mesh("cpu", (4 // tp, tp), mesh_dim_names=("dp", "tp"))
        for name in [name for name, size in cases if size == tp]:
            config = CONFIGS[name]
            with sliced() if tp == 4 else nullcontext() as counts:
                errors = check_parity(config, mesh)
            assert tp == 2 or (counts is not None and counts["all_gather"] and counts["all_to_all"])
            results[name, tp] = errors | check_meta_init(config, mesh)
        results["refusals", tp] = check_refusals(mesh)
        results["head bytes", tp] = head_bytes(mesh)
        if tp == 2:
            results["fsdp"] = worst_over_ranks(check_fsdp(CONFIGS["dense only"], mesh))
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    results["head bytes", 1] = head_bytes(alone)
    return results


results = ranks_fixture(4, worker, "name", "tp")


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_one_process(results, name, tp):
    errors = results[name, tp]
    exact = {k: e for k, e in errors.items() if k.startswith(("generate", "init"))}
    assert not any(exact.values()), exact
    wrong = {k: e for k, e in errors.items() if k not in exact and not e <= 1e-5}
    assert not wrong
    assert len(errors) > 4 * len(list(Decoder(CONFIGS[name], device="meta").parameters()))


def test_fsdp_on_top(results):
    assert not {k: e for k, e in results["fsdp"].items() if not e <= 1e-5}


@pytest.mark.parametrize("tp", TP_SIZES)
def test_refusals_are_one_line(results, tp):
    again, heads, length = results["refusals", tp]
    assert "must be whole before tensor parallelism: call apply_tensor_parallel before" in again
    assert heads == (f"DecoderConfig.num_kv_heads (1) must be a multiple of tp ({tp}): lower tp")
    assert length == f"sequence length (7) must be a multiple of tp ({tp}): pad the sequences"
    assert not any("\n" in m for m in (again, heads, length))


@pytest.mark.parametrize("tp", TP_SIZES)
def test_memory_of_head_and_loss_is_divided(results, tp):
    """Weight, gradient and logits of a chunk; tokens of all ranks are whole, but few."""
    alone = results["head bytes", 1]
    assert alone > 3 * 6144 * SHAPE["dim"] * 4  # the weight, its gradient while it is made, after
    assert abs(tp * results["head bytes", tp] / alone - 1) <= 0.05


def test_check_names_each_field():
    config = CONFIGS["dense only"]
    for name, wrong in (
        (r"num_heads \(2\)", replace(config, num_heads=2, num_kv_heads=1)),
        (r"mlp_hidden_dim \(42\)", replace(config, mlp_hidden_dim=42)),
        (r"linear_attention.num_k_heads \(2\)", replace(preset("tiny-qwen3-next"), num_kv_heads=4)),
        (r"linear_attention.num_k_heads \(2\)", replace(preset("tiny-nemotron-h"), num_kv_heads=4)),
    ):
        with pytest.raises(ValueError, match=rf"{name} must be a multiple of tp \(4\)"):
            check_tensor_parallel(wrong, 4)
    check_tensor_parallel(preset("qwen3-30b-a3b"), 4)
