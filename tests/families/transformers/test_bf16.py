"""Every family in bf16 beside stock transformers, loaded in bf16: names that stay fp32, gradients.

Both are measured against stock in fp32. A batch in which a token stands between two experts within
rounding tells nothing; `SEEDS` has others.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore import (
    FSDPOptions,
    MemoryOptions,
    Meshes,
    ParallelConfig,
    build_meshes,
    parallelize_moe,
    plan_sharding,
)
from moecore.families.fp32_modules import is_selection_bias, set_dtypes
from moecore.io import export_hf, load_hf
from moecore.moe.router import Router
from moecore.parallel.model.parallel_state import get_moe_state
from tests.families.transformers import family_models as fm
from tests.families.transformers.test_families import BY_DAY, taken, without_unused_rows
from tests.helpers.grids import beside
from tests.helpers.ranks import run_ranks

BF16 = FSDPOptions(param_dtype=torch.bfloat16)
SEEDS = {"minimax": 1, "phimoe": 2}
BIASES = [6.912, 6.900, 6.904, 6.908]  # bf16 has 6.906 and 6.9375 there


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


Ran = tuple[Tensor, dict[str, Tensor]]


def run(model: nn.Module, given: dict[str, Tensor]) -> Ran:
    """Return loss and gradients of one batch."""
    loss = fm.loss_of(model, given)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
    return loss.detach().float(), without_unused_rows({n: g.float() for n, g in whole.items()})


def errors(found: Ran, exact: Ran) -> tuple[float, float]:
    """Return the error of the loss, and of the worst tensor's gradient beside its norm."""
    largest = max(g.norm() for g in exact[1].values())
    assert found[1].keys() == exact[1].keys()
    worst = max(
        (found[1][n] - g).norm() / max(g.norm(), 1e-3 * largest) for n, g in exact[1].items()
    )
    return float((found[0] - exact[0]).abs()), float(worst)


def stock_in_bf16(family: str, path: Path) -> Any:
    how: Any = dict(dtype=torch.bfloat16, attn_implementation="eager")
    model = fm.model_class(family).from_pretrained(path, **how).train()
    if family == fm.FROZEN_TOWER:
        model.model.visual.requires_grad_(False)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", beside(taken(), {*taken()} - {*BY_DAY}))
def test_a_family_in_bf16(family: str, meshes: Meshes, tmp_path: Path) -> None:
    fm.skip_unless_in_bf16(family)
    plain = fm.tiny_model(family)
    plain.save_pretrained(tmp_path)
    given = fm.batch(plain, SEEDS.get(family, 0))
    stock = stock_in_bf16(family, tmp_path)
    want = {n: p.dtype for n, p in stock.named_parameters()}
    exact = run(plain, given)
    of_stock = errors(run(stock, given), exact)
    ways = [(fm.tiny_model(family), BF16)]
    if torch.float32 in want.values():  # gates, sinks, decay rates, hyper-connections, norms
        ways.append((stock_in_bf16(family, tmp_path), FSDPOptions()))
    for model, options in ways:
        parallelize_moe(model, meshes, fsdp=options)
        found = computing_dtypes(model)
        loss, gradient = errors(run(model, given), exact)
        assert {
            n: dtype
            for n, dtype in found.items()
            if n in want and dtype != want[n] and not is_selection_bias(n)
        } == {}
        assert loss <= 2 * of_stock[0] + 0.01 and gradient <= 2 * of_stock[1] + 0.03


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family", ["exaone_moe", "ernie4_5_moe", "flint", "hunyuan_v1_moe", "minimax", "zaya"]
)
def test_files_have_the_dtypes_of_stock(family: str, meshes: Meshes, tmp_path: Path) -> None:
    """An export of fp32 weights in bf16, and a model made in bf16 on meta that reads it."""
    model = fm.tiny_model(family)
    for name, tensor in model.state_dict().items():
        if is_selection_bias(name):
            tensor.copy_(torch.tensor(BIASES).view(tensor.shape))
        if name.endswith("balancing_biases"):
            tensor.copy_(torch.tensor([*BIASES, -1]))  # which stock sets in all that it reads
    model.save_pretrained(tmp_path / "fp32")
    want = stock_in_bf16(family, tmp_path / "fp32").state_dict()
    export_hf(parallelize_moe(model, meshes, fsdp=BF16), tmp_path / "bf16", dtype=torch.bfloat16)
    read = fm.model_class(family).from_pretrained(tmp_path / "bf16", dtype="auto").state_dict()
    with torch.device("meta"):
        made = fm.model_class(family)._from_config(model.config, dtype=torch.bfloat16)
    parallelize_moe(made, meshes).to_empty(device="cpu")
    load_hf(tmp_path / "bf16", made)
    files = load_file(tmp_path / "bf16" / "model.safetensors")
    assert all(files[n].dtype == t.dtype for n, t in want.items() if n in files)
    for found in (read, made.state_dict()):
        assert found.keys() == want.keys()
        for name, tensor in want.items():
            own = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
            assert own.dtype == tensor.dtype and torch.equal(own, tensor), name


def test_buffers_that_are_cast_to_compute_are_saved_as_they_are(meshes: Meshes) -> None:
    """Also where a first call was refused, and the second one casts them once more."""
    model = fm.tiny_model("minimax")
    before = {n: b.clone() for n, b in model.named_buffers()}
    model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match=r"scale \(\) must have a dim"):
        parallelize_moe(model, meshes, fsdp=BF16)
    del model.scale
    fm.loss_of(parallelize_moe(model, meshes, fsdp=BF16), fm.batch(model, 0)).backward()
    after = dict(model.named_buffers())
    assert all(after[n].dtype == b.dtype and torch.equal(after[n], b) for n, b in before.items())


def test_a_recomputed_forward_casts_its_buffers(meshes: Meshes) -> None:
    """Its second run multiplies by the same decay rates, so no bit of a gradient changes."""
    model, again = fm.tiny_model("minimax"), fm.tiny_model("minimax")
    fm.loss_of(parallelize_moe(model, meshes, fsdp=BF16), fm.batch(model, 0)).backward()
    memory = MemoryOptions(recompute=("qkv_proj",))
    parallelize_moe(again, meshes, fsdp=BF16, memory=memory)
    fm.loss_of(again, fm.batch(again, 0)).backward()
    grads = {name: param.grad.full_tensor() for name, param in again.named_parameters()}
    for name, param in model.named_parameters():
        assert torch.equal(param.grad.full_tensor(), grads[name]), name


def test_gradients_of_what_stays_fp32_are_summed_in_fp32(meshes: Meshes) -> None:
    options = FSDPOptions(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    plan = plan_sharding(fm.tiny_model("flint"), meshes, fsdp=options)
    units = [unit for unit in plan.units if unit.role == "block"]
    sums = {s.param: layout.reduces for u in units for layout in u.layouts for s in layout.slots}
    kept = {name for name, dtype in sums.items() if dtype == "float32"}
    assert kept == {name for name in sums if name.endswith(("sinks", "gate.weight"))}


def count(rank: int, device: torch.device) -> list[int]:
    """Return how many tokens each expert of an Ernie gets whose biases alone choose."""
    model = fm.tiny_model("ernie4_5_moe")
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("e_score_correction_bias"):
                param.copy_(torch.tensor([BIASES]))
            if name.endswith("gate.weight"):
                param.zero_()
    meshes = build_meshes(ParallelConfig(edp_shard=2), "cpu")
    fm.loss_of(parallelize_moe(model, meshes, fsdp=BF16), fm.batch(model, 0)).backward()
    counts = get_moe_state(model).finish_step().tokens_per_expert.values()
    return [int(n) for n in sum(counts)]


def test_a_selection_bias_that_is_a_parameter_chooses_in_fp32() -> None:
    first, second, third, fourth = run_ranks(2, count)
    assert first == fourth > 0 and second == third == 0


def test_names_of_models_in_others_and_of_peft() -> None:
    peft = pytest.importorskip("peft")
    names = ("model.layers.0.mlp.gate.wg.", "model.layers.1.mlp.gate.wg.")
    model = fm.tiny_model("hunyuan_v1_moe")
    wrapped = nn.ModuleDict({"inner": model})
    found = set_dtypes(wrapped, torch.bfloat16)
    assert found == {f"inner.{name}weight" for name in names}
    assert not set_dtypes(wrapped, None) and not set_dtypes(wrapped, torch.float32)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["wg"]))
    assert set_dtypes(model, torch.bfloat16) == {f"{name}base_layer.weight" for name in names}
    model = fm.tiny_model("hunyuan_v1_moe")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["wg"])
    peft.get_peft_model(model, config)
    saved = {f"{name}modules_to_save.default.weight" for name in names}
    assert set_dtypes(model, torch.bfloat16) >= saved


def test_names_that_fp16_alone_keeps() -> None:
    model = fm.tiny_model("gpt_oss")
    norms = {n for n, _ in model.named_parameters() if "norm" in n}
    assert set_dtypes(model, torch.float16) == norms and not set_dtypes(model, torch.bfloat16)
