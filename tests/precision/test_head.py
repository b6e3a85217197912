import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from moecore import MemoryOptions, MoEConfig, ParallelConfig, build_meshes, parallelize_moe
from moecore.base.options.precision import Precision, Recipe
from moecore.models import Decoder, DecoderConfig, linear_cross_entropy
from moecore.precision.head import BlockwiseHeadProducts
from tests.families.transformers.hf_models import batch, random_model
from tests.helpers.ranks import run_ranks

BLOCK = 128
E4M3 = torch.float8_e4m3fn
BLOCKWISE = Precision(recipe=Recipe(), roles=("attention",), fp8_head=True)


def inputs(n: int = 300, d: int = 256, v: int = 512, **how: Any) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=generator).to(**how)
    weight = (torch.randn(v, d, generator=generator) * 0.3).to(**how)
    labels = torch.randint(0, v, (n,), generator=generator)
    labels[::7] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def scale_of(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the smallest power of two by which no magnitude exceeds 448."""
    largest = x.abs().amax(dims, keepdim=True).float()
    return torch.exp2((largest / 448).clamp(min=2.0**-126).log2().ceil()).double()


def rounded(x: Tensor, rows: int) -> Tensor:
    """Return a matrix as E4M3 holds it with one scale per so many rows and 128 columns, fp64."""
    M, K = x.shape
    padded = F.pad(x.double(), (0, 0, 0, -M % rows))
    blocks = padded.view(-1, rows, K // BLOCK, BLOCK)
    scale = scale_of(blocks, (1, 3))
    return ((blocks / scale).float().to(E4M3).double() * scale).view(-1, K)[:M]


def defined(hidden, weight, labels, chunk, logits=None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of losses and both gradients of products of rounded operands, fp64.

    They follow from `logits` where those are given.
    """
    dtype, weight_q = hidden.dtype, rounded(weight, BLOCK)
    loss, d_hidden = torch.zeros((), dtype=torch.float64), []
    d_weight = torch.zeros_like(weight_q)
    if logits is None:
        logits = (rounded(hidden, 1) @ weight_q.T).to(dtype).double()
    parts = (x.split(chunk) for x in (hidden, labels, logits))
    for x, own, of_chunk in zip(*parts, strict=True):
        x_q, counts = rounded(x, 1), own != -100
        loss += F.cross_entropy(of_chunk, own, reduction="sum")
        d = of_chunk.softmax(1)
        d[counts, own[counts]] -= 1
        d_q = rounded(d * counts[:, None], 1)
        d_hidden.append(d_q @ weight_q)
        d_weight += rounded(d_q, BLOCK).T @ rounded(x_q, BLOCK)
    return loss, torch.cat(d_hidden), d_weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_its_definition_says(dtype: torch.dtype) -> None:
    hidden, weight, labels = inputs(dtype=dtype)
    how: Any = dict(num_tokens=1, chunk_tokens=100, recipe=Recipe())
    loss = linear_cross_entropy(hidden, weight, labels, **how)
    loss.backward()
    expected = defined(hidden.detach(), weight.detach(), labels, 200)
    # What lies between two numbers of E4M3 may be rounded to the other one; bf16 rounds at the end.
    bound = 1e-3 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(loss.double(), expected[0], rtol=1e-5, atol=0)
    for found, exact in zip((hidden.grad, weight.grad), expected[1:], strict=True):
        assert found is not None and found.dtype == dtype
        assert (found - exact).norm() <= bound * exact.norm()
        errors = (found - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-3 * exact.norm())
        assert errors.max() <= 10 * bound
    assert not hidden.grad[labels == -100].any()


def of_parts(rank: int, _: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients of two ranks, each with 256 of 512 rows of the head."""
    hidden, weight, labels = inputs()
    part = weight.detach()[256 * rank : 256 * rank + 256].requires_grad_()
    how: Any = dict(chunk_tokens=100, recipe=Recipe())
    loss = linear_cross_entropy(hidden, part, labels, group=dist.group.WORLD, **how)
    loss.backward()
    assert hidden.grad is not None and part.grad is not None
    dist.all_reduce(hidden.grad)
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part.grad)
    return loss.detach(), hidden.grad, torch.cat(parts).detach()


def test_on_ranks_with_parts_of_the_vocabulary_it_is_that_of_one_process() -> None:
    found = run_ranks(2, of_parts)
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=100, recipe=Recipe())
    loss.backward()
    torch.testing.assert_close(found[0], loss.detach(), rtol=1e-6, atol=0)
    for ours, exact in zip(found[1:], (hidden.grad, weight.grad), strict=True):
        assert (ours - exact).norm() <= 1e-3 * exact.norm()


def qwen3() -> nn.Module:
    return random_model("qwen3-moe", vocab_size=256, hidden_size=128)


def decoder(**changed: Any) -> Decoder:
    fields: dict[str, Any] = dict(
        vocab_size=256, dim=128, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64
    )
    moe = MoEConfig(dim=128, hidden_dim=32, num_experts=4, top_k=2)
    return Decoder(DecoderConfig(**(fields | dict(moe=moe) | changed)))


def test_a_decoder_has_it_in_its_loss_and_not_in_its_logits() -> None:
    meshes, wide = build_meshes(ParallelConfig(), device_type="cpu"), decoder()
    model = copy.deepcopy(wide)
    parallelize_moe(model, meshes, precision=BLOCKWISE)
    tokens = torch.arange(64).view(2, 32) % 256
    states: list[Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda _, args: states.append(args[0].detach()))
    loss, weight = model(tokens, tokens), wide.lm_head.weight
    of_tokens = states[0].flatten(0, 1), weight.detach(), tokens.flatten()
    assert torch.equal(loss, linear_cross_entropy(*of_tokens, recipe=Recipe()))
    assert not torch.equal(loss, linear_cross_entropy(*of_tokens))
    assert torch.equal(model(tokens), F.linear(states[1], weight))


def test_a_model_of_transformers_has_it_in_its_standard_loss() -> None:
    meshes = build_meshes(ParallelConfig(), device_type="cpu")
    model = qwen3()
    weight = model.lm_head.weight.detach().clone()
    parallelize_moe(model, meshes, precision=BLOCKWISE)
    ids, labels = batch()
    states: list[Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda _, args: states.append(args[0].detach()))
    loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    of_tokens = states[0].flatten(0, 1), weight, targets
    assert torch.equal(loss, linear_cross_entropy(*of_tokens, recipe=Recipe()))
    assert not torch.equal(loss, linear_cross_entropy(*of_tokens))
    model.lm_head.register_forward_hook(lambda _, args, out: out / 4)
    with pytest.warns(UserWarning, match=r"Precision.fp8_head \(True\) is not used: the model"):
        model(input_ids=ids, labels=labels, use_cache=False)


@pytest.mark.parametrize(
    ("model", "changed", "line"),
    [
        (lambda: decoder(vocab_size=192), {}, r"its weight \[192, 128\] of a rank is no matrix"),
        (lambda: nn.Linear(128, 128), {}, "whose loss is not made in chunks of tokens"),
        (qwen3, {"memory": MemoryOptions(fused_loss=False)}, "is not made in chunks of tokens"),
    ],
)
def test_what_does_not_fit_is_refused(model: Any, changed: dict[str, Any], line: str) -> None:
    meshes = build_meshes(ParallelConfig(), device_type="cpu")
    with pytest.raises(ValueError, match=line):
        parallelize_moe(model(), meshes, precision=BLOCKWISE, **changed)


def test_other_recipes_and_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"fp8_head \(True\) must be False with rowwise"):
        Precision(recipe=Recipe(scaling="rowwise"), fp8_head=True)
    hidden, weight, labels = inputs(v=300)
    with pytest.raises(ValueError, match="no matrix of multiples of 128: use recipe=None"):
        linear_cross_entropy(hidden, weight, labels, recipe=Recipe())
    hidden, weight, labels = inputs(dtype=torch.float64)
    with pytest.raises(ValueError, match=r"its products are in torch.float64"):
        linear_cross_entropy(hidden, weight, labels, recipe=Recipe())


@pytest.mark.gpu
def test_on_a_gpu_it_is_what_its_definition_says() -> None:
    hidden, weight, labels = inputs(1500, 512, 4096, dtype=torch.bfloat16)
    on_gpu = [x.detach().cuda().requires_grad_() for x in (hidden, weight)]
    # A logit that is rounded to the other neighbour changes its row, so gradients are of the GPU's.
    products = BlockwiseHeadProducts(on_gpu[1], training=True, recipe=Recipe())
    logits = products.compute_logits(on_gpu[0].detach()).double().cpu()
    x_q, weight_q = rounded(hidden, 1), rounded(weight, BLOCK)
    exact = x_q @ weight_q.T
    half_step = exact.abs() * 2**-8  # of bf16
    assert ((logits - exact).abs() <= half_step + 2**-13 * (x_q.abs() @ weight_q.abs().T)).all()
    how: Any = dict(num_tokens=1, chunk_tokens=500, recipe=Recipe())
    loss = linear_cross_entropy(*on_gpu, labels.cuda(), **how)
    loss.backward()
    expected = defined(hidden.detach(), weight.detach(), labels, 1000, logits)
    torch.testing.assert_close(loss.double().cpu(), expected[0], rtol=1e-5, atol=0)
    for x, wanted in zip(on_gpu, expected[1:], strict=True):
        error = x.grad.double().cpu() - wanted
        assert error.norm() <= 4e-3 * wanted.norm()
        worst = error.norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-3 * wanted.norm())
        assert worst.max() <= 4e-2
