"""transformers models on four ranks equal one process: logits, both losses and every gradient.

python -m pytest tests/families/transformers/test_hf_ranks.py -m gpu     on 4 GPUs, tokens by nvlink
"""

import copy
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore import DenseOptions, ParallelConfig, build_meshes, parallelize_moe
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.torch_private import HAS_SEPARATE_PIECES
from moecore.parallel.model.parallel_state import get_capacity
from tests.families.transformers import hf_models
from tests.helpers.ranks import ranks_fixture, run_ranks

FOLDINGS = {
    "ep4": dict(ep=4),
    "ep2-edp2": dict(ep=2, edp_shard=2),
    "ep2-etp2": dict(ep=2, etp=2),
    "etp2-replicate2": dict(dp_replicate=2, dp_shard=2, edp_replicate=2, edp_shard=1, etp=2),
    "tp2-ep4": dict(tp=2, ep=4),
}
TP4 = "tp4-ep2"  # more ranks than key heads
FOLDINGS[TP4] = dict(tp=4, ep=2)
# Plain training; transformers' own checkpointing; loss="sum"; DenseOptions.compile.
Variant = Literal["", "checkpointing", "sum", "compile"]
CASES: list[tuple[str, str, Variant]] = [
    (name, folding, "")
    for name in hf_models.ARCHITECTURES
    for folding in FOLDINGS
    if folding != TP4 or name in ("qwen3-moe", "deepseek-v3", "gpt-oss")
    if HAS_SEPARATE_PIECES or "etp" not in folding or name == "gpt-oss"
]
CASES += [("qwen2-moe", "ep2-edp2", "checkpointing"), ("mixtral", "ep2-edp2", "sum")]
GPU_CASES: list[tuple[str, str, Variant]] = [
    *CASES,
    ("qwen3-moe", "ep4", "compile"),
    ("deepseek-v3", "ep2-edp2", "compile"),
]


def name_of(case: tuple[str, str, Variant]) -> str:
    return "/".join(case).rstrip("/")


def batches(device: torch.device) -> list[dict[str, Tensor]]:
    """Two sequences on each data rank, and another number of tokens and of padding."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for r in range(4):
        ids = torch.randint(0, 61, (2, 5 + 2 * r), generator=generator)
        mask = torch.ones_like(ids)
        mask[r % 2, ids.shape[1] - r :] = 0  # none on rank 0
        labels = ids.masked_fill(mask == 0, -100)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        found.append({name: tensor.to(device) for name, tensor in batch.items()})
    return found


def forward(model, batch, variant) -> tuple[Tensor, list[Tensor]]:
    """Return the loss, and what to compare: real tokens' logits, loss and own balance loss."""
    kwargs = {}
    if variant == "sum":  # the own balance loss stays a mean, so its coefficient is divided
        model.router_aux_loss_coef = model.config.router_aux_loss_coef / 4
        every = batches(batch["labels"].device)
        targets = [int((b["labels"][:, 1:] != -100).sum()) for b in every]
        kwargs["num_items_in_batch"] = sum(targets)
    out = model(**batch, use_cache=False, **kwargs)
    logits = out.logits.detach()[batch["attention_mask"].bool()]
    values = [logits, out.loss.detach()]
    if getattr(out, "aux_loss", None) is not None:
        values.append(out.aux_loss.detach())
    return out.loss, values


def named(values: list[list[Tensor]]) -> dict[str, Tensor]:
    return {f"value/{r}/{i}": v for r, rank in enumerate(values) for i, v in enumerate(rank)}


def run_sharded(model, folding, variant, device) -> dict[str, Tensor]:
    meshes = build_meshes(ParallelConfig(**FOLDINGS[folding]), device.type)
    parallelize_moe(
        model,
        meshes,
        dispatch="nvlink" if device.type == "cuda" else "auto",
        loss="sum" if variant == "sum" else "mean",
        dense=DenseOptions(compile=variant == "compile"),
    )
    if variant == "checkpointing":
        hf_models.enable_checkpointing(model)
    num, found = 4 // meshes.data_ranks, []
    for i in range(num * meshes.data_rank, num * (meshes.data_rank + 1)):
        loss, values = forward(model, batches(device)[i], variant)
        (loss / num).backward()
        found.append([value.cpu() for value in values])
    get_capacity(model).wait_and_raise_errors()
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, found)
    by_batch = [values for rank in every[::num] for values in rank]
    return on_host(named(by_batch) | hf_models.whole_gradients(model))


def on_host(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in found.items()}


def run_plain(model: nn.Module, variant: Variant) -> dict[str, Tensor]:
    """One process, one batch after the other; the loss is the mean, or the sum, of theirs."""
    device = next(model.parameters()).device
    outputs = [forward(model, batch, variant) for batch in batches(device)]
    total = torch.stack([loss for loss, _ in outputs]).sum()
    (total if variant == "sum" else total / 4).backward()
    return on_host(named([values for _, values in outputs]) | hf_models.whole_gradients(model))


def mixed_precision_errors(device: torch.device) -> dict[str, tuple[float, float]]:
    """Each router's gradient in bf16: its error, and that of the plain model in bf16.

    Under mixed precision a router is an FSDP2 unit, and its logits leave it by another way than
    its output.
    """
    model = hf_models.random_model("mixtral", router_aux_loss_coef=0.5, output_router_logits=True)
    model.to(device)
    exact = run_plain(copy.deepcopy(model), "")
    low = run_plain(copy.deepcopy(model).bfloat16(), "")
    meshes = build_meshes(ParallelConfig(**FOLDINGS["ep2-edp2"]), device.type)
    parallelize_moe(model, meshes, fsdp=FSDPOptions(param_dtype=torch.bfloat16))
    loss, _ = forward(model, batches(device)[meshes.data_rank], "")
    loss.backward()
    found = on_host(hf_models.whole_gradients(model))
    return {
        name: tuple(float((g[name].float() - exact[name]).norm()) for g in (found, low))
        for name in found
        if name.endswith("gate.weight")
    }


def generated(device: torch.device) -> list[tuple[list[int], list[int]]]:
    """What each rank generates, each another number of tokens, and what one process does."""
    model = hf_models.random_model("qwen3-moe").to(device).eval()
    plain = copy.deepcopy(model)
    meshes = build_meshes(ParallelConfig(**FOLDINGS["ep4"]), device.type)
    parallelize_moe(model, meshes)
    rank = dist.get_rank()
    prompt = batches(device)[rank]["input_ids"][:1]
    options = {"max_new_tokens": 2 + 2 * rank, "do_sample": False, "eos_token_id": None}
    found = model.generate(prompt, **options)
    expected = plain.generate(prompt, **options)
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, (found[0].tolist(), expected[0].tolist()))
    return every


def worker(rank, device, cases) -> dict[str, Any]:
    errors: dict[str, tuple[float, str]] = {}
    expected: dict[tuple[str, Variant], dict[str, Tensor]] = {}
    for case in cases:
        name, folding, variant = case
        own_loss = {"router_aux_loss_coef": 0.5, "output_router_logits": True}
        options = dict(vocab_size=64) | (own_loss if name in hf_models.WITH_BALANCE_LOSS else {})
        model = hf_models.random_model(name, **options).to(device)
        plain = copy.deepcopy(model)
        found = run_sharded(model, folding, variant, device)
        assert ("value/0/2" in found) == (name in hf_models.WITH_BALANCE_LOSS)
        if rank == 0:
            key = (name, variant if variant == "sum" else "")
            if key not in expected:
                expected[key] = run_plain(plain, variant)
            errors[name_of(case)] = hf_models.worst(found, expected[key])
    return {"fp32": errors, "bf16": mixed_precision_errors(device), "generated": generated(device)}


results = ranks_fixture(4, worker, "case")


@pytest.fixture(scope="module")
def gpu_results() -> dict[str, Any]:
    return run_ranks(4, worker, GPU_CASES, device_type="cuda")


def check(case: tuple[str, str, Variant], results: dict[str, Any]) -> None:
    error, where = results["fp32"][name_of(case)]
    assert error <= 1e-5, f"{where}: {error}"


def check_mixed_precision(results: dict[str, Any]) -> None:
    assert len(results["bf16"]) == 2
    for name, (error, plain_error) in results["bf16"].items():
        assert error <= 2 * plain_error, name


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_one_process(case: tuple[str, str, Variant], results: dict[str, Any]) -> None:
    check(case, results)


def test_mixed_precision(results: dict[str, Any]) -> None:
    check_mixed_precision(results)


def check_generated(results: dict[str, Any]) -> None:
    lengths = set()
    for found, expected in results["generated"]:
        assert found == expected
        lengths.add(len(found))
    assert len(lengths) == 4


def test_generate_with_ranks_that_end_at_different_lengths(results: dict[str, Any]) -> None:
    check_generated(results)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=name_of)
def test_equals_one_process_on_gpus(case, gpu_results) -> None:
    check(case, gpu_results)


@pytest.mark.gpu
def test_mixed_precision_on_gpus(gpu_results: dict[str, Any]) -> None:
    check_mixed_precision(gpu_results)


@pytest.mark.gpu
def test_generate_on_gpus(gpu_results: dict[str, Any]) -> None:
    check_generated(gpu_results)
