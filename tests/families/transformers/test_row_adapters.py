"""Several LoRA adapters trained at once equal runs of one adapter each, of stock peft."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from moecore import BalanceConfig, Meshes, ParallelConfig, build_meshes, parallelize_moe
from moecore.io import save_adapters
from moecore.io.hf.lora import collect_adapter_tensors
from moecore.models import make_adapter_loss
from tests.families.transformers import lora_cases as lc
from tests.families.transformers.hf_models import enable_checkpointing, random_model, worst
from tests.helpers.parts import on_parts
from tests.helpers.ranks import run_ranks

NAMES = ["first", "second", "third"]
CONFIGS: dict[str, dict[str, Any]] = {
    "first": {},
    "second": dict(r=3, use_rslora=True),
    "third": dict(target_modules=["q_proj"], target_parameters=None),
}
STEPS, ROWS, LENGTH = 3, 4, 6


def adapted(model_name: str, names: list[str]) -> Any:
    """Return a stock model with the named adapters, whose A and B depend on the name alone."""
    first, *rest = names
    configs = {name: lc.lora_config(**CONFIGS[name]) for name in names}
    model = lc.peft.get_peft_model(random_model(model_name), configs[first], adapter_name=first)
    for name in rest:
        model.add_adapter(name, configs[name])
    model.base_model.set_adapter(names)
    with torch.no_grad():
        for name in names:
            generator = torch.Generator().manual_seed(NAMES.index(name))
            for key, param in sorted(model.named_parameters()):
                if "lora_" in key and f".{name}." in key:
                    param.copy_(torch.randn(param.shape, generator=generator) * 0.2)
    return model


def batch(step: int, data_rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, shifted labels, and the adapter of each row; rank 1 has one adapter."""
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    tokens = torch.randint(0, 61, (ROWS, LENGTH), generator=generator)
    ids = torch.tensor([[0, 2, 1, 0], [1, 1, 1, 1], [2, 0, 0, 1], [0, 1, 2, 2]][data_rank])
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    labels[torch.arange(ROWS) % 3 == 1, 2:] = -100
    return tokens, labels, ids


def state(model: Any, *, grads: bool = False) -> dict[str, Tensor]:
    """Return each adapter's tensors, or their gradients, as peft's file would have them."""
    found = {}
    for adapter in model.peft_config:
        for name, one in collect_adapter_tensors(model, adapter).items():
            tensor = one.tensor.grad if grads else one.tensor
            assert tensor is not None
            found[f"{adapter}/{name}"] = one.convert_to_file(lc.whole(tensor))
    return found


def train(model: Any, data_ranks: int, data_rank: int | None) -> dict[str, Tensor]:
    """Train the model on all rows of its adapters; data_rank None = stock, one adapter."""
    trained = [p for p in model.parameters() if p.requires_grad]
    kind = torch.optim.AdamW if data_rank is None else on_parts(torch.optim.AdamW)
    optimizer = kind(trained, lr=0.01, eps=1e-3)
    adapters, found = [NAMES.index(name) for name in model.peft_config], dict[str, Tensor]()
    for step in range(STEPS):
        every = [batch(step, rank) for rank in range(data_ranks)]
        tokens, labels, ids = (torch.cat(x) for x in zip(*every, strict=True))
        counts = torch.zeros(len(NAMES)).index_add_(0, ids, (labels != -100).sum(1).float())
        if data_rank is None:
            rows = ids == adapters[0]
            logits = model(input_ids=tokens[rows], use_cache=False).logits
            nn.functional.cross_entropy(logits.flatten(0, 1), labels[rows].flatten()).backward()
        else:
            tokens, labels, ids = every[data_rank]
            loss = make_adapter_loss(labels, ids, counts)
            inputs = dict(input_ids=tokens, use_cache=False, adapter_ids=ids)
            model(**inputs, log_prob_loss=loss).loss.backward()
        if step == 0:
            found |= {f"grad/{name}": x for name, x in state(model, grads=True).items()}
        optimizer.step()
        optimizer.zero_grad()
    return found | state(model)


def separate_runs(model_name: str, data_ranks: int) -> dict[str, Tensor]:
    runs = (train(adapted(model_name, [name]), data_ranks, None) for name in NAMES)
    return {name: tensor for run in runs for name, tensor in run.items()}


@pytest.fixture
def meshes(no_group_left: None) -> Meshes:
    return build_meshes(ParallelConfig(), "cpu")


@pytest.mark.parametrize("model_name", ["qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("backend", ["auto", "sequential"])
def test_one_process_equals_separate_runs(
    meshes: Meshes, tmp_path: Path, model_name: str, backend: str
) -> None:
    model = adapted(model_name, NAMES)
    enable_checkpointing(model)
    parallelize_moe(model, meshes, expert_backend=backend, loss="sum")
    error, where = worst(train(model, 1, 0), separate_runs(model_name, 1))
    assert error <= 1e-5, f"{where}: {error}"
