"""Several LoRA adapters trained at once equal runs of one adapter each, of stock peft."""

from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from moecore import (
    BalanceConfig,
    CloneOptions,
    DispatchOptions,
    Meshes,
    ParallelConfig,
    Precision,
    build_meshes,
    parallelize_moe,
)
from moecore.io import save_adapters
from moecore.io.hf.lora import WEIGHTS, collect_adapter_tensors
from moecore.kernels.rows.four_bit import dequantise, quantise
from moecore.models import make_adapter_loss
from tests.families.transformers import lora_cases as lc
from tests.families.transformers.family_models import tiny_model
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


def adapted(model_name: str, names: list[str], base: nn.Module | None = None) -> Any:
    """Return a stock model with the named adapters, whose A and B depend on the name alone."""
    first, *rest = names
    configs = {name: lc.lora_config(**CONFIGS[name]) for name in names}
    base = base or random_model(model_name)
    model = lc.peft.get_peft_model(base, configs[first], adapter_name=first)
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
    device = trained[0].device
    for step in range(STEPS):
        every = [[x.to(device) for x in batch(step, rank)] for rank in range(data_ranks)]
        tokens, labels, ids = (torch.cat(x) for x in zip(*every, strict=True))
        counts = torch.zeros(len(NAMES), device=device)
        counts.index_add_(0, ids, (labels != -100).sum(1).float())
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_base_in_nvfp4_equals_separate_runs(no_group_left: None, device: str) -> None:
    """Also on a GPU, in fp32; stock models have the base's values."""

    def make(names: list[str]) -> Any:
        base = random_model("qwen3-moe")
        for name, param in base.named_parameters():
            if "experts." in name:
                param.data = dequantise(quantise(param.data, "nvfp4"), param.dtype)
        return adapted("qwen3-moe", names, base).to(device)

    meshes = build_meshes(ParallelConfig(), device)
    precision = Precision(frozen="nvfp4")
    model = parallelize_moe(make(NAMES), meshes, loss="sum", precision=precision)
    separate = reduce(or_, (train(make([name]), 1, None) for name in NAMES))
    error, where = worst(train(model, 1, 0), separate)
    assert error <= (1e-5 if device == "cpu" else 1e-4), f"{where}: {error}"


# name -> model, layout, options of parallelize_moe
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "ep2-edp2": ("qwen3-moe", dict(ep=2, edp_shard=2), {}),
    "allgather": ("mixtral", dict(ep=4), dict(dispatch="allgather")),
    "tp2-ep2": ("qwen3-moe", dict(tp=2, ep=2), {}),
    "ep2-etp2": ("gpt-oss", dict(ep=2, etp=2), {}),
}


def worker(rank: int, device: torch.device, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (model_name, layout, options) in CASES.items():
        meshes = build_meshes(ParallelConfig(**layout), "cpu")
        model = adapted(model_name, NAMES)
        parallelize_moe(model, meshes, loss="sum", **options)
        results = train(model, meshes.data_ranks, meshes.data_rank)
        if name == "ep2-edp2":
            for adapter in NAMES:
                save_adapters(model, folder / adapter, adapter=adapter)
        if rank == 0:
            found[name] = worst(results, separate_runs(model_name, meshes.data_ranks))
    for name, (make, layout, options) in REFUSED.items():
        model = parallelize_moe(make(), build_meshes(ParallelConfig(**layout), "cpu"), **options)
        with pytest.raises(ValueError) as error:
            model(input_ids=batch(0, 0)[0], adapter_ids=torch.zeros(ROWS).int())
        found[name] = str(error.value)
    return found


def with_own_router() -> Any:
    """Return a model whose router is not moecore's, with two adapters of its experts."""
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    config = lc.lora_config(target_modules=["q_proj"], target_parameters=experts)
    model = lc.peft.get_peft_model(tiny_model("lfm2_moe"), config)
    model.add_adapter("second", config)
    model.base_model.set_adapter(["default", "second"])
    return model


CLONES = DispatchOptions(clones=CloneOptions())
REFUSED: dict[str, tuple[Any, dict[str, int], dict[str, Any]]] = {
    "tp divides the rows of experts": (with_own_router, dict(tp=2, ep=2), {}),
    "clones of experts have no adapters": (
        partial(adapted, "qwen3-moe", NAMES),
        dict(ep=2, edp_shard=2),
        dict(dispatch=CLONES),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("row_adapters")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(4, worker, folder)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_layouts_without_adapters_per_row(results: dict[str, Any], name: str) -> None:
    assert results[name].startswith(f"adapter_ids must be left out, because {name}")
    assert "\n" not in results[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_separate_runs(results: dict[str, Any], name: str) -> None:
    error, where = results[name]
    assert error <= 1e-5, f"{where}: {error}"


@pytest.mark.slow
def test_each_adapter_has_a_directory_of_peft(results: dict[str, Any], folder: Path) -> None:
    expected = separate_runs("qwen3-moe", 4)
    for name in NAMES:
        stock = lc.peft.PeftModel.from_pretrained(
            random_model("qwen3-moe"), folder / name, adapter_name=name
        )
        written = {f"{name}/{key}": x for key, x in load_file(folder / name / WEIGHTS).items()}
        assert worst(written, {key: expected[key] for key in written})[0] <= 1e-5
        assert worst(state(stock), {key: expected[key] for key in written})[0] <= 1e-5


def test_an_adapter_without_rows_has_a_gradient_of_zeros(meshes: Meshes) -> None:
    model = parallelize_moe(adapted("qwen3-moe", NAMES), meshes)
    tokens, _, _ = batch(0, 0)
    model(input_ids=tokens, labels=tokens, adapter_ids=torch.zeros(ROWS).int()).loss.backward()
    for name, grad in state(model, grads=True).items():
        assert bool(grad.any()) == name.startswith("first/"), name


def test_rows_without_ids_use_the_sum_of_adapters(meshes: Meshes) -> None:
    tokens = batch(0, 0)[0]
    model = adapted("qwen3-moe", NAMES)
    expected = model(input_ids=tokens).logits
    parallelize_moe(model, meshes)
    logits = model(input_ids=tokens).logits.detach()
    assert worst({"": logits}, {"": expected.detach()})[0] <= 1e-5


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (
            torch.zeros(3).int(),
            {},
            r"adapter_ids \(torch.int32\) must be int32 or int64 \[4\]: ",
        ),
        ([0, 0, 0, 0], {}, r"adapter_ids \(list\) must be int32 or int64 \[4\]: pass one id per"),
        (
            torch.tensor([0, 1, 2, 3]),
            {},
            r"adapter_ids \(\[0, 1, 2, 3\]\) must lie in \[0, 3\)",
        ),
        (
            torch.zeros(ROWS).int(),
            dict(moe={"balance": BalanceConfig(micro_batch_coef=0.1)}),
            r"adapter_ids must be left out, because BalanceConfig and MoEConfig.capacity of the",
        ),
    ],
)
def test_ids_that_are_refused(meshes: Meshes, ids: Any, options: Any, message: str) -> None:
    model = parallelize_moe(adapted("qwen3-moe", NAMES), meshes, **options)
    with pytest.raises(ValueError, match=message) as error:
        model(input_ids=batch(0, 0)[0], adapter_ids=ids)
    assert "\n" not in str(error.value)
