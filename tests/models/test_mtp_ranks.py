"""Latent attention and multi-token prediction under parallelize_moe: four ranks against plain code.

Every case compares losses, every gradient and the experts' counts with the mean (or sum) over data
ranks of what `plain_losses` gives for each rank's batch.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from moecore import ParallelConfig, build_meshes, parallelize_moe
from moecore.models import DecoderConfig
from moecore.models.block import Block
from moecore.parallel.model.parallel_state import get_moe_state
from tests.helpers.ranks import ranks_fixture
from tests.models.plain_decoder import plain_losses
from tests.models.test_mtp import CONFIGS, make
from tests.models.test_tensor_parallel import relative, worst_over_ranks
from tests.parallel.fsdp.units import is_unit

pytestmark = pytest.mark.slow

T, DENSE_LAST = 12, "grouped, tied, dense, 2"
CASES: dict[str, dict[str, Any]] = {
    "ep2": dict(parallel=dict(ep=2), loss="sum"),
    "ep2 over tp2": dict(parallel=dict(tp=2, ep=2), recompute=True),
    "ep4 over tp2, sum": dict(parallel=dict(tp=2, ep=4), loss="sum", padded=True),
    "hsdp, etp2": dict(parallel=dict(dp_replicate=2, ep=2, etp=2)),
    "dense last layer": dict(parallel=dict(ep=2), config=DENSE_LAST),
    "detached": dict(parallel=dict(tp=2, ep=2), recompute=True, config="latent, 2, detached"),
    "repeated, ep4 over tp2": dict(
        parallel=dict(tp=2, ep=4), recompute=True, config="latent, repeated"
    ),
    "repeated, hsdp, etp2": dict(
        parallel=dict(dp_replicate=2, ep=2, etp=2), loss="sum", config="latent, repeated"
    ),
}


def batches(config: DecoderConfig, data_ranks: int, padded: bool) -> list[tuple[Tensor, Tensor]]:
    """One batch per data rank; where padded, the last four positions do not exist."""
    g = torch.Generator().manual_seed(11)
    result = []
    for _ in range(data_ranks):
        text = torch.randint(0, config.vocab_size, (2, T + 1), generator=g)
        labels = text[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=g) < 0.3] = -100
        if padded:
            labels[:, -4:] = -100
        result.append((text[:, :-1], labels))
    return result


def expected(config, data, loss, padded) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Per data rank the main loss and those ahead, and the gradient of all ranks' total."""
    model = make(config)
    params = {n: p.detach().requires_grad_() for n, p in model.named_parameters()}
    state = {**dict(model.named_buffers()), **params}
    num_tokens = sum(int((y != -100).sum()) for _, y in data) if loss == "sum" else None
    share, values = 1 / len(data), []
    for tokens, labels in data:
        end = T - 4 if padded else T
        losses = plain_losses(state, config, tokens[:, :end], labels[:, :end], num_tokens)
        losses.aux = [a * (share if loss == "sum" else 1) for a in losses.aux]
        total = losses.total(config) * (1 if loss == "sum" else share)
        total.backward()
        values.append(torch.stack([losses.main, *losses.ahead]).detach())
    return values, {n: p.grad for n, p in params.items()}


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    config, loss, padded = (
        CONFIGS[case.get("config", "latent, 2")],
        case.get("loss", "mean"),
        case.get("padded", False),
    )
    meshes = build_meshes(ParallelConfig(**case["parallel"]), "cpu")
    data = batches(config, meshes.data_ranks, padded)
    values, gradients = expected(config, data, loss, padded)
    model = make(config)
    if case.get("recompute"):
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    parallelize_moe(model, meshes, loss=loss)
    tokens, labels = data[meshes.data_rank]
    options: dict[str, Any] = {}
    if loss == "sum":
        options["num_tokens"] = sum(int((y != -100).sum()) for _, y in data)
    if padded:
        options["padding_mask_BT"] = (torch.arange(T) >= T - 4).expand(2, T)
    got = model(tokens, labels, **options)
    got.backward()
    want = values[meshes.data_rank]
    total = want[0] + config.mtp_loss_coef * want[1:].mean()
    errors = {"loss": relative(got.detach(), total)}
    errors["ahead"] = relative(model.mtp_losses, want[1:])
    for name, param in model.named_parameters():
        clean = name.replace("_checkpoint_wrapped_module.", "")
        errors[clean] = relative(param.grad.full_tensor(), gradients[clean])
    counts = {
        name.replace("_checkpoint_wrapped_module.", ""): int(count.sum())
        for name, count in get_moe_state(model).finish_step().tokens_per_expert.items()
    }
    model.zero_grad()
    generated = model.generate(data[0][0][:, :3], 2, temperature=0)
    return {
        "errors": worst_over_ranks(errors),
        "counts": counts,
        "units": [is_unit(model, m) for m in model.mtp],
        "generated": generated,
        "data_ranks": meshes.data_ranks,
    }


def run_after_generate() -> list[float]:
    """The modules' loss after generation and a change of the weights, here and in one process."""
    config = CONFIGS["latent, 1"]
    meshes = build_meshes(ParallelConfig(ep=2), "cpu")
    tokens, labels = batches(config, meshes.data_ranks, False)[meshes.data_rank]
    losses = []
    for model in (make(config), parallelize_moe(make(config), meshes)):
        model.generate(tokens, 1, temperature=0)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.5)
        model(tokens, labels)
        losses.append(float(model.mtp_losses))
    return losses


def worker(rank: int, device: torch.device, names: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {name: run_case(CASES[name]) for name in names}
    results["generate"] = run_after_generate()
    return results


results = ranks_fixture(4, worker, "name")


@pytest.mark.parametrize("name", CASES)
def test_equals_plain_code(results, name):
    errors = results[name]["errors"]
    assert not {k: e for k, e in errors.items() if not e <= 1e-5}
    config = CONFIGS[CASES[name].get("config", "latent, 2")]
    assert len(errors) == 2 + len(list(make(config).parameters()))


@pytest.mark.parametrize("name", [n for n in CASES if n != "dense last layer"])
def test_every_layer_counts_the_positions_that_exist(results, name):
    end = T - 4 if CASES[name].get("padded") else T
    choices = 2 * results[name]["data_ranks"] * 2  # sequences, and experts per token
    counts = {"mtp.0.block.mlp": choices * (end - 1), "mtp.1.block.mlp": choices * (end - 2)}
    if "repeated" in name:
        counts = {"mtp.0.block.mlp": choices * (end - 1 + end - 2 + end - 3)}
    assert results[name]["counts"] == {
        "model.layers.1.mlp": choices * end,
        "model.layers.2.mlp": choices * end,
        **counts,
    }
    assert results[name]["units"] == [True] * len(counts)


@pytest.mark.parametrize("name", CASES)
def test_generate_is_that_of_one_process(results, name):
    config = CONFIGS[CASES[name].get("config", "latent, 2")]
    prompt = batches(config, 1, False)[0][0][:, :3]
    assert torch.equal(results[name]["generated"], make(config).generate(prompt, 2, temperature=0))


def test_generation_leaves_no_old_weights_behind(results):
    """Modules that do not run must not be gathered ahead of time either."""
    plain, sharded = results["generate"]
    assert sharded == pytest.approx(plain, rel=1e-5)
