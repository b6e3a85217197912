"""Regions on a GPU: the bits of a model that keeps all, where torch promises bits at all."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moecore.base.options.memory import MemoryOptions, Recomputed
from moecore.models import Decoder, preset
from moecore.train.memory.apply import apply_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

DEVICE = torch.device("cuda")
LATENT: tuple[Recomputed, ...] = ("norm", "activation", "rope", "mla_up_proj", "shared_experts")
PARTS: dict[str, tuple[Recomputed, ...]] = {
    "tiny-qwen3": ("norm", "rope", "qkv_proj", "attention_scores", "moe"),
    "tiny-deepseek-v3": LATENT,
}


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def gradients(name: str, parts: tuple[Recomputed, ...]) -> dict[str, Tensor]:
    model = Decoder(preset(name), device=DEVICE, dtype=torch.bfloat16)
    apply_memory([*model.layers, *model.mtp], MemoryOptions(recompute=parts), DEVICE)
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 100, (2, 128), generator=g).to(DEVICE)
    for _ in range(2):
        model(tokens, tokens.roll(-1, 1)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.usefixtures("deterministic")
def test_bits_of_a_model_that_keeps_all(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want, again, found = (gradients(name, parts) for parts in ((), (), PARTS[name]))
    assert all(torch.equal(again[n], want[n]) for n in want), "kernels that are not deterministic"
    assert found.keys() == want.keys()
    assert [n for n in want if not torch.equal(found[n], want[n])] == []
