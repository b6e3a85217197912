"""Blackwell's formats and Transformer Engine with what saves memory: the bits of those without.

Over ranks: clones in `test_emulated_ranks.py` and `tests/moe/test_te.py`, tokens as FP8 in
`tests/moe/test_wire.py`, graphs of parts in `tests/train/graphs/test_graphed_blocks.py`, weights
gathered quantised in `tests/parallel/fsdp/test_quantised_gather.py`.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecore import (
    DenseOptions,
    FSDPOptions,
    MemoryOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.memory import OFFLOADED
from moecore.base.options.precision import Precision, Recipe
from moecore.base.torch_private import get_local_tensor
from moecore.models import Decoder
from moecore.train import AdamW
from moecore.train.memory import storages
from tests.helpers.te_definition import te_defined
from tests.parallel.small_decoder import small_decoder
from tests.train.memory.blocks import LateStreams
from tests.train.memory.test_offload import assert_equal, gradients, in_order
from tests.train.memory.towers import make_tower, stashed

RECIPES = {
    "mxfp8": Recipe(scaling="mxfp8"),
    "nvfp4": Recipe(scaling="nvfp4"),
    "te, blockwise": Recipe(backend="te"),
    "te, mxfp8": Recipe(backend="te", scaling="mxfp8"),
    "te, nvfp4": Recipe(backend="te", scaling="nvfp4", power_of_two=False),
}
PRODUCTS = ("qkv_proj", "mlp", "shared_experts", "expert_fc1")
MEMORY = {
    "recompute": MemoryOptions(recompute=("norm", "activation", "rope", *PRODUCTS)),
    "recompute of layers": MemoryOptions(recompute=("moe",)),
    "offload": MemoryOptions(offload=OFFLOADED),
    "both": MemoryOptions(recompute="gemm_last", offload=("attention", "experts")),
}
CONFIG = small_decoder(128, 128, vocab_size=60, num_layers=3, head_dim=32, dense=96, shared=64)


@pytest.fixture(autouse=True)
def defined(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(storages, "CopyStreams", LateStreams)
    with te_defined():
        yield


def trained(recipe: Recipe, **how: Any) -> dict[str, Tensor]:
    """Losses and gradients of two micro-batches."""
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), precision=recipe, **how)
    step = TrainStep(model, AdamW(model.parameters(), lr=1e-2), num_micro_batches=2)
    tokens = torch.randint(0, 60, (2, 2, 17), generator=torch.Generator().manual_seed(3))
    found: dict[str, Tensor] = {}
    for micro, batch_BT in enumerate(tokens):
        with step.micro_batch():
            loss = model(batch_BT[:, :-1], batch_BT[:, 1:])
            loss.backward()
        found[f"loss {micro}"] = loss.detach()
    grads = {name: param.grad for name, param in model.named_parameters()}
    return found | {
        name: get_local_tensor(grad) for name, grad in grads.items() if grad is not None
    }


@pytest.mark.filterwarnings("error")  # of what is not used
@pytest.mark.parametrize("name", RECIPES)
def test_memory_options_change_no_bit(name: str) -> None:
    expected = trained(RECIPES[name])
    assert len(expected) > 20
    for what, memory in MEMORY.items():
        found = trained(RECIPES[name], memory=memory)
        assert [n for n in expected if not torch.equal(found[n], expected[n])] == [], what


@pytest.mark.usefixtures("no_group_left")
@pytest.mark.parametrize("how", ["nvlink", "padded"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_stash_changes_no_bit(name: str, how: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = make_tower(3, how, sizes=dict(dim=128, hidden_dim=128))
    for block in model.layers:
        block.moe.get_part("experts").set_backend("auto", recipe=RECIPES[name])
    expected = gradients(model, in_order)
    stash = stashed(model, factor=8.0)  # a few rows per expert, which "te" pads to 128
    assert_equal(gradients(model, in_order), expected)
    stash.wait_and_raise_errors()
    assert stash.out_bytes > 0


@pytest.mark.filterwarnings("ignore:precision is not used")
@pytest.mark.parametrize(
    ("part", "config"),
    [
        ("mlp", replace(CONFIG, mlp_hidden_dim=48)),
        ("attention", replace(CONFIG, num_heads=1, num_kv_heads=1, head_dim=48)),
        ("shared_experts", replace(CONFIG, moe=replace(CONFIG.moe, shared_hidden_dim=48))),
        ("experts", replace(CONFIG, moe=replace(CONFIG.moe, hidden_dim=48))),
    ],
)
@pytest.mark.parametrize("name", RECIPES)
def test_sizes_that_do_not_fit_are_refused_by_the_call_or_stay_wide(name, part, config) -> None:
    model, precision = Decoder(config), Precision(recipe=RECIPES[name], roles=(part,))
    is_fitting = 48 % RECIPES[name].weight_multiple == 0 and (
        name != "te, blockwise" or part != "experts"
    )
    meshes = build_meshes(ParallelConfig(), "cpu")
    if part in ("experts", "shared_experts") and not is_fitting:
        with pytest.raises(ValueError, match=r"must be a multiple of|is no matrix of multiples of"):
            parallelize_moe(model, meshes, precision=precision)
        return
    parallelize_moe(model, meshes, precision=precision)
    tokens = torch.randint(0, 60, (1, 17))
    model(tokens[:, :-1], tokens[:, 1:]).backward()


GATHER = FSDPOptions(fp8_param_gather=True)
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gathers": ("mxfp8", dict(fsdp=GATHER), "fp8_param_gather (True)"),
    "gathers by te": ("te, nvfp4", dict(fsdp=GATHER), "fp8_param_gather (True)"),
    "products": ("mxfp8", dict(expert_backend="torch"), "must be 'auto' or 'triton'"),
    "history, compiled": (
        "te, delayed",
        dict(dense=DenseOptions(compile=True)),
        "DenseOptions.compile (True) must go with Recipe.amax_history (2) = 0",
    ),
    "products of te": ("te, mxfp8", dict(expert_backend="triton"), "must be 'auto' or 'te'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_one_line(case: str) -> None:
    name, how, message = REFUSED[case]
    delayed = Recipe(backend="te", scaling="tensorwise", amax_history=2)
    precision = RECIPES.get(name) or Precision(recipe=delayed, roles=("mlp",))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parallelize_moe(
            Decoder(CONFIG), build_meshes(ParallelConfig(), "cpu"), precision=precision, **how
        )
    assert "\n" not in str(caught.value)
