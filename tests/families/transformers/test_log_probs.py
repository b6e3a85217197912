import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import MemoryOptions, Meshes, parallelize_moe
from moecore.families import use_causal_attention
from moecore.families.family import find_family
from moecore.models.log_probs import LogProbLoss
from moecore.packing import PackedCollator
from tests.families.transformers.family_models import tiny_model
from tests.families.transformers.hf_models import LargestStorage, random_model, whole_gradients

LENGTHS = (9, 5, 4)
TEMPERATURE = 0.7
# granitemoe divides its logits; gpt-oss would not keep documents apart by positions
NAMES = ["qwen2-moe", "qwen3-moe", "mixtral", "olmoe", "deepseek-v3", "gpt-oss", "granitemoe"]


def made(name: str) -> nn.Module:
    return tiny_model(name) if name == "granitemoe" else random_model(name)


def parallelized(model: nn.Module, meshes: Meshes, **options: Any) -> nn.Module:
    use_causal_attention(model)
    return parallelize_moe(model, meshes, **options)


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 61, (length,), generator=generator) for length in LENGTHS]


def loss_of(log_probs: Tensor, entropy: Tensor) -> Tensor:
    """Another gradient at every token."""
    steps = torch.linspace(-1, 2, log_probs.numel())
    return (log_probs.flatten() * steps).sum() + (entropy.flatten() * steps.flip(0)).sum() / 9


def stock(model: nn.Module) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Log-probabilities, entropies, loss and gradients, by F.log_softmax of each document."""
    log_probs, entropies = [], []
    for ids in documents():
        out = model(input_ids=ids[None], position_ids=torch.arange(len(ids))[None])
        log_p = (out.logits[0].float() / TEMPERATURE).log_softmax(-1)
        picked = log_p[:-1].gather(1, ids[1:, None])[:, 0]
        log_probs.append(torch.cat([picked, torch.zeros(1)]))
        entropy = -(log_p.exp() * log_p).sum(-1)
        entropies.append(torch.cat([entropy[:-1], torch.zeros(1)]))
    found = torch.cat(log_probs), torch.cat(entropies)
    loss = loss_of(*found)
    loss.backward()
    grads = whole_gradients(model)
    return found[0].detach(), found[1].detach(), loss.detach(), grads


def scored(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """The same of one packed row."""
    batch = PackedCollator(row_tokens=sum(LENGTHS))(documents())
    seen = []

    def function(log_probs: Tensor, entropy: Tensor | None) -> Tensor:
        seen.extend([log_probs.detach()[0], entropy.detach()[0]])
        return loss_of(log_probs, entropy)

    loss = LogProbLoss(
        labels_BT=batch["labels"], function=function, temperature=TEMPERATURE, entropy=True
    )
    out = model(**find_family(model).make_forward_arguments(batch), log_prob_loss=loss)
    return seen[0], seen[1], out.loss


@pytest.mark.parametrize("name", NAMES)
def test_packed_rows_have_the_log_probs_of_the_stock_model(name: str, meshes: Meshes) -> None:
    plain = made(name)
    model = parallelized(copy.deepcopy(plain), meshes)
    wanted, found = stock(plain), scored(model)
    found[2].backward()
    for got, want in zip(found, wanted, strict=False):
        assert (got - want).abs().max() <= 1e-6 * max(1, want.abs().max())
    grads = whole_gradients(model)
    assert wanted[3].keys() == grads.keys()
    for key, want in wanted[3].items():
        assert (grads[key] - want).abs().max() <= 2e-5 * max(1e-3, want.abs().max()), key
    with torch.no_grad():
        model.eval()
        again = scored(model)
    torch.testing.assert_close(again[0], found[0], rtol=0, atol=1e-6)


def test_with_logits_of_the_model_itself_numbers_are_the_same(meshes: Meshes) -> None:
    memory = MemoryOptions(fused_loss=False)
    model = parallelized(random_model("qwen3-moe"), meshes, memory=memory)
    other = parallelized(random_model("qwen3-moe"), meshes)
    for got, want in zip(scored(model), scored(other), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("trains", [True, False])
def test_logits_of_all_tokens_never_exist(trains: bool, meshes: Meshes) -> None:
    model = parallelized(random_model("qwen3-moe", vocab_size=4096), meshes)
    batch = PackedCollator(row_tokens=2500)([torch.arange(50) % 61] * 50)
    loss = LogProbLoss(labels_BT=batch["labels"], function=lambda x, _: x.sum())
    with torch.set_grad_enabled(trains), LargestStorage() as seen:
        out = model(**find_family(model).make_forward_arguments(batch), log_prob_loss=loss)
        if trains:
            out.loss.backward()
    assert seen.num_bytes == 4 * 2048 * 4096


def test_the_own_loss_of_a_model_is_back_after_a_forward(meshes: Meshes) -> None:
    model = parallelized(random_model("qwen3-moe"), meshes)
    ids = documents()[0][None]
    before = model(input_ids=ids, labels=ids).loss
    scored(model)
    assert torch.equal(model(input_ids=ids, labels=ids).loss, before)
    loss = LogProbLoss(labels_BT=ids, function=lambda x, _: x.sum())
    with pytest.raises(ValueError, match="labels must be None with a log_prob_loss"):
        model(input_ids=ids, labels=ids, log_prob_loss=loss)
    assert torch.equal(model(input_ids=ids, labels=ids).loss, before)


def test_documents_need_attention_that_keeps_them_apart(meshes: Meshes) -> None:
    model = parallelize_moe(random_model("gpt-oss"), meshes)
    with pytest.raises(ValueError, match=r"must be of a model after use_causal_attention[^\n]*$"):
        scored(model)
