from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import log_softmax

pytest.importorskip("verl", reason="the batches are verl's, which extra `verl` has")

from tensordict import TensorDict
from verl.utils import seqlen_balancing, tensordict_utils
from verl.workers.config import FSDPOptimizerConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.utils.losses import sft_loss

from moecore.integrations.verl import MoECoreEngine, MoECoreEngineConfig
from tests.families.transformers.hf_models import random_model
from tests.helpers.ranks import run_ranks

LENGTHS = [(3, 5), (2, 9), (4, 1), (1, 6)]  # of prompt and response, per rank
LR, CLIP, TEMPERATURE = 1e-2, 0.5, 0.8


class ModelConfig:
    """What the engine reads of verl's `HFModelConfig`, which needs a tokenizer."""

    def __init__(self, path: str) -> None:
        self.local_path = path


def sequences(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(1, 61, (a + b,), generator=generator) for a, b in LENGTHS]


def batch(rank: int, **more: Any) -> TensorDict:
    def nested(rows: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    ids = sequences(rank)
    masks = [torch.arange(a + b) >= a for a, b in LENGTHS]
    fields = {"input_ids": nested(ids), "loss_mask": nested([mask.float() for mask in masks])}
    fields["position_ids"] = nested([torch.arange(len(x)) for x in ids])
    data = TensorDict(fields, batch_size=[len(ids)])
    how = dict(use_dynamic_bsz=False, micro_batch_size_per_gpu=2, temperature=TEMPERATURE)
    tensordict_utils.assign_non_tensor(data, **how | more)
    return data


def by_hand(model: nn.Module, rank: int) -> list[Tensor]:
    """Log-probabilities of the tokens behind each position of a rank's sequences."""
    found = []
    for ids in sequences(rank):
        log_p = log_softmax(model(ids[None]).logits[0, :-1] / TEMPERATURE, -1)
        found.append(log_p.gather(1, ids[1:, None])[:, 0])
    return found


def train_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: int) -> float:
    """A step on the mean over all responses' tokens; return the norm of its gradient."""
    rows = [by_hand(model, rank) for rank in range(ranks)]
    learned = [
        row[a - 1 :] for of_rank in rows for row, (a, _) in zip(of_rank, LENGTHS, strict=True)
    ]
    (-torch.cat(learned).mean()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def distance(found: dict[str, Tensor], model: nn.Module) -> float:
    """The largest, of matrices by their published names."""
    wanted = dict(model.named_parameters())
    return max(
        float((tensor - wanted[n]).abs().max()) for n, tensor in found.items() if n in wanted
    )


def drive(rank: int, device: torch.device, folder: str) -> dict[str, Any]:
    ranks = dist.get_world_size()
    seqlen_balancing.get_device_name = lambda: device.type  # verl has no platform without GPUs
    stock = random_model("qwen3-moe")
    if rank == 0:
        stock.save_pretrained(f"{folder}/model")
    dist.barrier()
    parallel = {"ep": ranks, "edp_shard": 1}
    config = MoECoreEngineConfig(dtype="float32", parallel=parallel)
    small = {"eps": 1e-3}  # or rounding errors of gradients near 0 become steps of lr
    optimizer = FSDPOptimizerConfig(
        lr=LR,
        weight_decay=0.1,
        clip_grad=CLIP,
        override_optimizer_config=small,
        lr_scheduler_type="cosine",
        total_training_steps=4,
        min_lr_ratio=0.0,
    )
    engine: MoECoreEngine = EngineRegistry.new(
        model_type="language_model",
        backend="moecore",
        model_config=ModelConfig(f"{folder}/model"),
        engine_config=config,
        optimizer_config=optimizer,
        checkpoint_config=None,
    )
    engine.initialize()
    plain = copy.deepcopy(stock)
    adamw = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.1, **small)
    with engine.eval_mode(), torch.no_grad():
        by_size = batch(
            rank, calculate_entropy=True, use_dynamic_bsz=True, max_token_len_per_gpu=16
        )
        scored = engine.infer_batch(by_size)["model_output"]
    pairs = zip(scored["log_probs"].unbind(), by_hand(stock, rank), strict=True)
    found: dict[str, Any] = {"log-probs": max(float((a[:-1] - b).abs().max()) for a, b in pairs)}
    found["entropy"] = [len(row) for row in scored["entropy"].unbind()]
    found["norms"] = []
    for number in range(3):
        with engine.train_mode():
            out = engine.train_batch(batch(rank), partial(sft_loss, None))
        found["norms"].append((out["metrics"]["grad_norm"], train_by_hand(plain, adamw, ranks)))
        lr = engine.lr_scheduler_step()
        adamw.param_groups[0]["lr"] = LR * (1 + math.cos(math.pi * (number + 1) / 4)) / 2
        found["rates"] = (lr, adamw.param_groups[0]["lr"])
        engine.to("cpu")
        if number == 1:
            engine.save_checkpoint(f"{folder}/saved", global_step=number)
        engine.to("cuda")  # back to its device
        if number == 1:
            again = {n: t.clone() for n, t in engine.get_per_tensor_param()[0]}
    weights, adapter = engine.get_per_tensor_param()
    found["weights"] = distance({n: t.clone() for n, t in weights}, plain)
    engine.load_checkpoint(f"{folder}/saved")
    loaded = dict(engine.get_per_tensor_param()[0])
    found["loaded"] = all(torch.equal(loaded[n], again[n]) for n in again)
    found["data"] = (engine.get_data_parallel_rank(), engine.get_data_parallel_size(), adapter)
    return found


def test_two_ranks_train_as_stock_transformers(tmp_path: Path) -> None:
    found = run_ranks(2, drive, str(tmp_path))
    assert found["log-probs"] < 1e-5 and found["entropy"] == [a + b for a, b in LENGTHS]
    for ours, stock in found["norms"]:
        assert ours == pytest.approx(stock, rel=1e-5)
    assert found["weights"] < 1e-5 and found["loaded"]
    assert found["rates"][0] == pytest.approx(found["rates"][1]) and found["data"] == (0, 2, None)


def test_what_is_not_computed_is_refused() -> None:
    config = MoECoreEngineConfig(parallel={"cp": 2, "ep": 2})
    with pytest.raises(ValueError, match=r"parallel \({'cp': 2}\) must have pp, tp and cp of 1"):
        MoECoreEngine(ModelConfig(""), config, FSDPOptimizerConfig())


def test_steps_of_grpo_under_ray(tmp_path: Path) -> None:
    """verl's workers in Ray actors: rollouts of `generate`, and verl's advantages and loss."""
    ray = pytest.importorskip("ray", reason="the workers are Ray's actors, which verl depends on")
    for name in ("fastapi", "uvicorn"):
        pytest.importorskip(name, reason=f"verl's workers import {name}, which extra `verl` has")
    from tests.integrations.verl_ray import drive as drive_workers

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        found = drive_workers(str(tmp_path), num_steps=2)
    finally:
        ray.shutdown()
    for step in found:
        assert step["log-probs"] < 2e-5
        ours, stock = step["norms"]
        assert len(ours) == 2 and ours == pytest.approx(stock, rel=1e-5)
        assert step["clipped"][-1] > 0.1  # ratios of the second mini-batch lie around the clips
        assert torch.cat(step["advantages"]).abs().max() > 0.5
    assert found[-1]["weights"] < 1e-5
