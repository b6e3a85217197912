"""Tensors that stay fp32 in bf16: those that stock transformers keeps, when it loads bf16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moecore import FSDPOptions, Meshes, ParallelConfig, build_meshes, parallelize_moe
from moecore.families.kept_fp32 import kept_fp32
from moecore.moe.router import Router
from moecore.parallel.attached import moe_state
from tests.families.transformers.family_models import batch, loss_of, model_class, tiny_model
from tests.helpers.ranks import run_ranks

BF16 = FSDPOptions(param_dtype=torch.bfloat16)
# Gates, sinks, decay rates, hyper-connections, norms, a head; of `hunyuan_v1_moe` no name is
# declared: its class makes the gate in fp32.
FAMILIES = (
    "bailing_hybrid",
    "beam",
    "deepseek_v4",
    "ernie4_5_moe",
    "ernie4_5_vl_moe",
    "flint",
    "glm5_next",
    "hunyuan_v1_moe",
    "hy_v4",
    "inkling",
    "inkling2",
    "mistral_large4",
    "openai_privacy_filter",
)
BIASES = [6.912, 6.900, 6.904, 6.908]  # bf16 has 6.906 and 6.9375 there


@pytest.fixture(scope="module")
def meshes() -> Iterator[Meshes]:
    if dist.is_initialized():
        dist.destroy_process_group()
    yield build_meshes(ParallelConfig(), "cpu")
    dist.destroy_process_group()


def computing_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Return a mapping that each forward fills: in what modules have their own parameters."""
    found: dict[str, torch.dtype] = {}

    def read(module: nn.Module, name: str) -> None:
        own = {f"{name}.{n}": p for n, p in module._parameters.items() if p is not None}
        found.update({n: p.dtype for n, p in own.items()})

    for name, module in model.named_modules():
        if not isinstance(module, Router):  # moecore's own keep their dtype in any model
            module.register_forward_pre_hook(lambda module, _, name=name: read(module, name))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_modules_compute_in_the_dtypes_of_stock(
    family: str, meshes: Meshes, tmp_path: Path
) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    how: Any = dict(dtype=torch.bfloat16, attn_implementation="eager")
    stock = model_class(family).from_pretrained(tmp_path, **how).train()
    want = {n: p.dtype for n, p in stock.named_parameters()}
    parallelize_moe(model, meshes, fsdp=BF16)
    found = computing_dtypes(model)
    loss_of(model, batch(model, 0)).backward()
    assert {n for n, dtype in found.items() if dtype == torch.float32}
    assert {n: dtype for n, dtype in found.items() if n in want and dtype != want[n]} == {}
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(bool(torch.isfinite(grad.to_local()).all()) for grad in grads)


def count(rank: int, device: torch.device) -> list[int]:
    """Return how many tokens each expert of an Ernie gets whose biases alone choose."""
    model = tiny_model("ernie4_5_moe")
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("e_score_correction_bias"):
                param.copy_(torch.tensor([BIASES]))
            if name.endswith("gate.weight"):
                param.zero_()
    meshes = build_meshes(ParallelConfig(edp_shard=2), "cpu")
    loss_of(parallelize_moe(model, meshes, fsdp=BF16), batch(model, 0)).backward()
    counts = moe_state(model).finish_step().tokens_per_expert.values()
    return [int(n) for n in sum(counts)]


def test_a_selection_bias_that_is_a_parameter_chooses_in_fp32() -> None:
    first, second, third, fourth = run_ranks(2, count)
    assert first == fourth > 0 and second == third == 0


def test_names_of_models_in_others_and_of_peft() -> None:
    peft = pytest.importorskip("peft")
    names = ("model.layers.0.mlp.gate.wg.", "model.layers.1.mlp.gate.wg.")
    model = tiny_model("hunyuan_v1_moe")
    wrapped = nn.ModuleDict({"inner": model})
    found = kept_fp32(wrapped, torch.bfloat16)
    assert found == {f"inner.{name}weight" for name in names}
    assert not kept_fp32(wrapped, None) and not kept_fp32(wrapped, torch.float32)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["wg"]))
    assert kept_fp32(model, torch.bfloat16) == {f"{name}base_layer.weight" for name in names}
    model = tiny_model("hunyuan_v1_moe")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["wg"])
    peft.get_peft_model(model, config)
    saved = {f"{name}modules_to_save.default.weight" for name in names}
    assert kept_fp32(model, torch.bfloat16) >= saved


def test_names_that_fp16_alone_keeps() -> None:
    model = tiny_model("gpt_oss")
    norms = {n for n, _ in model.named_parameters() if "norm" in n}
    assert kept_fp32(model, torch.float16) == norms and not kept_fp32(model, torch.bfloat16)
