"""The loss of a training forward with labels: transformers' own value, and no logits of all tokens.

Expected values are those of the stock model, in one process.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from moecore import FSDPOptions, Meshes, ParallelConfig, build_meshes, parallelize_moe
from moecore.base.options.memory import MemoryOptions
from moecore.families.transformers.head import HeadWithoutLogits, Logits
from tests.families.transformers import hf_models
from tests.families.transformers.family_models import tiny_model
from tests.helpers.ranks import run_ranks

LINE = (
    "logits of a training forward with labels must be read before backward and under "
    "torch.no_grad(), because the loss was computed without them: pass "
    "parallelize_moe(memory=MemoryOptions(fused_loss=False))"
)


def step(model: nn.Module, *args: Any, **given: Any) -> dict[str, Tensor]:
    """Return the loss of a forward, and every gradient."""
    out = model(*args, **given, use_cache=False)
    out.loss.backward()
    found = {"loss": out.loss.detach()} | hf_models.whole_gradients(model)
    model.zero_grad()
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-6, atol=0)
    hf_models.assert_equal_numbers(found, expected)


def inputs(kind: str) -> dict[str, Any]:
    ids, labels = hf_models.batch()
    given: dict[str, Any] = dict(input_ids=ids, labels=labels)
    if kind == "sum":
        given["num_items_in_batch"] = torch.tensor(37)
    elif kind == "shifted":
        given["shift_labels"] = labels.roll(-1, 1)
    return given


@pytest.mark.parametrize("kind", ["mean", "sum", "shifted"])
@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3", "gpt-oss"])
def test_loss_and_gradients_are_those_of_stock(family: str, kind: str, meshes: Meshes) -> None:
    stock, model = hf_models.random_model(family), hf_models.random_model(family)
    parallelize_moe(model, meshes)
    assert isinstance(model.lm_head, HeadWithoutLogits)
    assert_same(step(model, **inputs(kind)), step(stock, **inputs(kind)))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "loss_function", smoothed),
        lambda model: setattr(model, "loss_function", capped),
        lambda model: model.lm_head.weight.requires_grad_(False),
        lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight),
        lambda model: model.lm_head.register_forward_hook(lambda m, args, out: out / 4),
    ],
    ids=["smoothed", "capped", "frozen", "tied", "scaled"],
)
def test_what_else_a_model_does_is_done(change: Callable[[Any], Any], meshes: Meshes) -> None:
    stock = hf_models.random_model("qwen3-moe", tie_word_embeddings=False)
    change(stock)
    model = copy.deepcopy(stock)
    parallelize_moe(model, meshes)
    assert_same(step(model, **inputs("mean")), step(stock, **inputs("mean")))


def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """A loss of one's own, of all but the last token's logits."""
    flat = logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(flat, labels[:, 1:].flatten(), label_smoothing=0.1)


def capped(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return smoothed(torch.tanh(logits / 2) * 2, labels, vocab_size)


@pytest.mark.parametrize("family", ["granitemoe", "minimax_m2", "llama4"])
def test_other_families(family: str, meshes: Meshes) -> None:
    """Such as one that divides its logits, and one whose head is beside its base model."""
    stock = tiny_model(family).train()
    ids, labels = hf_models.batch()
    model = parallelize_moe(copy.deepcopy(stock), meshes)
    given = dict(input_ids=ids, labels=labels)
    found, expected = step(model, **given), step(stock, **given)
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-6, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_logits_of_all_tokens_are_never_made(fused: bool, meshes: Meshes) -> None:
    stock = hf_models.random_model("qwen3-moe", vocab_size=5000, hidden_size=8)
    model = parallelize_moe(stock, meshes, memory=MemoryOptions(fused_loss=fused))
    ids = torch.arange(4500).view(90, 50)
    with hf_models.LargestStorage() as largest:
        model(input_ids=ids, labels=ids, use_cache=False, attention_mask=None).loss.backward()
    logits = ids.numel() * 5000 * 4
    assert largest.num_bytes >= logits if not fused else largest.num_bytes <= logits / 2


def test_logits_can_be_read_before_backward(meshes: Meshes) -> None:
    stock = hf_models.random_model("qwen3-moe")
    model = parallelize_moe(copy.deepcopy(stock), meshes)
    out, wanted = (each(**inputs("mean"), use_cache=False) for each in (model, stock))
    assert isinstance(out.logits, Logits) and out.logits.shape == wanted.logits.shape
    assert repr(out.logits) == "Logits(shape=(2, 11, 61), dtype=torch.float32, not computed)"
    with torch.no_grad():
        torch.testing.assert_close(out.logits + 0, wanted.logits.detach())
        assert out.logits[:, -1].argmax(-1).equal(wanted.logits[:, -1].argmax(-1))
    torch.testing.assert_close(out.logits.detach(), wanted.logits.detach())
    with pytest.raises(ValueError) as caught:
        F.cross_entropy(out.logits.flatten(0, 1), inputs("mean")["labels"].flatten())
    assert str(caught.value) == LINE
    out.loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    with pytest.raises(ValueError) as caught:
        out.logits.detach()
    assert str(caught.value) == LINE


def test_without_training_there_are_logits(meshes: Meshes) -> None:
    model = parallelize_moe(hf_models.random_model("qwen3-moe"), meshes)
    ids, labels = hf_models.batch()
    assert type(model(input_ids=ids).logits) is Tensor
    with torch.no_grad():
        assert type(model(input_ids=ids, labels=labels).logits) is Tensor
    assert type(model.eval()(input_ids=ids, labels=labels).logits) is Tensor
    with pytest.raises(ValueError, match="cu_seqlens"):  # of a hook before the head's
        model.train()(input_ids=ids, labels=labels, max_seqlen=3)


def test_over_ranks_the_weight_may_be_gone() -> None:
    run_ranks(2, read_after_resharding)


def read_after_resharding(rank: int, device: torch.device) -> None:
    """Logits of gathered weights: right while these are there, and refused afterwards."""
    stock = hf_models.random_model("qwen3-moe")
    expected = stock(**inputs("mean"), use_cache=False)
    expected.loss.backward()
    found = hf_models.whole_gradients(stock)
    for strategy in ("optim", "optim_grads_params"):
        meshes = build_meshes(ParallelConfig(ep=2, edp_shard=1), device_type="cpu")
        options = FSDPOptions(dense_strategy=strategy)
        model = parallelize_moe(hf_models.random_model("qwen3-moe"), meshes, fsdp=options)
        out = model(**inputs("mean"), use_cache=False)
        torch.testing.assert_close(out.loss, expected.loss)
        out.loss.backward()
        hf_models.assert_equal_numbers(hf_models.whole_gradients(model), found)
        for param in model.parameters():
            part = param.to_local() if isinstance(param, DTensor) else param
            part.data.zero_()
        model(**inputs("mean"), use_cache=False)  # gathers again, into the same memory
        with pytest.raises(ValueError, match="must be read before backward"):
            out.logits.detach()
    dist.barrier()
