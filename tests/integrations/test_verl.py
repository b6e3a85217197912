"""verl's engine on six or eight ranks: each layout trains as stock transformers in one process."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

pytest.importorskip("verl", reason="the batches are verl's, which extra `verl` has")

from tensordict import TensorDict
from verl.utils import seqlen_balancing, tensordict_utils
from verl.workers.config import FSDPOptimizerConfig
from verl.workers.config.engine import EngineRouterReplayConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.utils.losses import sft_loss

from moecore.base.rank_checks import gather_objects
from moecore.integrations.verl import MoECoreEngine, MoECoreEngineConfig
from tests.families.transformers.hf_models import random_model
from tests.helpers.errors import error_of
from tests.helpers.ranks import ranks_fixture

WORLD, STEPS, LAYERS, EXPERTS = 6, 3, 3, 6
LENGTHS = [(3, 5), (2, 9), (4, 1), (1, 6)] * 3  # of prompt and response
LR, CLIP, TEMPERATURE = 1e-2, 0.5, 0.8
DYNAMIC = dict(dynamic_context=True)
OFFLOAD = dict(param_offload=True, optimizer_offload=True)
# name -> degrees, other fields of the engine's configuration
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp6-ep3": (dict(ep=3), {}),
    "hsdp3-dp2-ep3-etp2": (dict(dp_replicate=3, dp_shard=2, ep=3, etp=2), {}),
    "cp3-dp2-ep2": (dict(cp=3, ep=2), {}),
    "dp3-tp2-ep3": (dict(tp=2, ep=3), OFFLOAD),
    "pp3-cp2-ep2": (dict(pp=3, cp=2, ep=2), OFFLOAD),
    "cp3-tp2-ep6": (dict(cp=3, tp=2, ep=6), OFFLOAD),
    "dynamic-dp6-ep3": (dict(ep=3), DYNAMIC | OFFLOAD),
    "dynamic-pp3-dp2-ep2": (dict(pp=3, ep=2), DYNAMIC),
}
ALL_AXES = {"pp2-cp2-tp2-ep2": (dict(pp=2, cp=2, tp=2, ep=2), OFFLOAD)}
FP16 = dict(dtype="float16")
REPLAYS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "replay cp3-dp2-ep2": (dict(cp=3, ep=2), OFFLOAD),
    "replay pp3-tp2-ep2": (dict(pp=3, tp=2, ep=2), OFFLOAD),
    "replay dynamic-dp6-ep3": (dict(ep=3), DYNAMIC | OFFLOAD),
    "replay fp16 cp3-dp2-ep2": (dict(cp=3, ep=2), OFFLOAD | FP16),
    "replay fp16 pp3-tp2-ep2": (dict(pp=3, tp=2, ep=2), OFFLOAD | FP16),
    "replay fp16 dynamic-dp6-ep3": (dict(ep=3), DYNAMIC | OFFLOAD | FP16),
}


class ModelConfig:
    """What the engine reads of verl's `HFModelConfig`, which needs a tokenizer."""

    def __init__(self, path: str) -> None:
        self.local_path = path


def stock_model() -> nn.Module:
    return random_model("qwen3-moe", num_hidden_layers=LAYERS, num_experts=EXPERTS)


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 61, (a + b,), generator=generator) for a, b in LENGTHS]


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch(part: slice, routes: list[Tensor] | None = None, **more: Any) -> TensorDict:
    """Return the sequences of a data rank as verl's batch."""
    ids, lengths = sequences()[part], LENGTHS[part]
    masks = [(torch.arange(a + b) >= a).float() for a, b in lengths]
    fields = {"input_ids": nested(ids), "loss_mask": nested(masks)}
    fields["position_ids"] = nested([torch.arange(len(x)) for x in ids])
    if routes is not None:
        fields["routed_experts"] = nested(routes[part])
    data = TensorDict(fields, batch_size=[len(ids)])
    how = dict(use_dynamic_bsz=False, micro_batch_size_per_gpu=2, temperature=TEMPERATURE)
    how["max_token_len_per_gpu"] = 8  # of a row with dynamic cp
    tensordict_utils.assign_non_tensor(data, **how | more)
    return data


def by_hand(model: nn.Module) -> list[Tensor]:
    """Log-probabilities of the tokens behind each position of all sequences."""
    found = []
    for ids in sequences():
        log_p = log_softmax(model(ids[None]).logits[0, :-1] / TEMPERATURE, -1)
        found.append(log_p.gather(1, ids[1:, None])[:, 0])
    return found


def learning_rate(steps: int) -> float:
    return LR * (1 + math.cos(math.pi * steps / 4)) / 2


SMALL = {"eps": 1e-3}  # or rounding errors of gradients near 0 become steps of lr


def train_by_hand() -> dict[str, Any]:
    """Steps on the mean over all responses' tokens."""
    model = stock_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, **SMALL)
    found: dict[str, Any] = {"log-probs": [x.detach() for x in by_hand(model)]}
    found |= {"losses": [], "norms": []}
    for number in range(STEPS):
        rows = zip(by_hand(model), LENGTHS, strict=True)
        loss = -torch.cat([row[a - 1 :] for row, (a, _) in rows]).mean()
        loss.backward()
        found["losses"].append(float(loss.detach()))
        found["norms"].append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = learning_rate(number + 1)
    return found | {"weights": {n: x.detach() for n, x in model.named_parameters()}}


def engine_of(folder: str, parallel: dict[str, int], **fields: Any) -> MoECoreEngine:
    optimizer = FSDPOptimizerConfig(
        lr=LR,
        weight_decay=0.1,
        clip_grad=CLIP,
        override_optimizer_config=SMALL,
        lr_scheduler_type="cosine",
        total_training_steps=4,
        min_lr_ratio=0.0,
    )
    engine: MoECoreEngine = EngineRegistry.new(
        model_type="language_model",
        backend="moecore",
        model_config=ModelConfig(f"{folder}/model"),
        engine_config=MoECoreEngineConfig(**dict(dtype="float32", parallel=parallel) | fields),
        optimizer_config=optimizer,
        checkpoint_config=None,
    )
    engine.initialize()
    return engine


def part_of(engine: MoECoreEngine) -> slice:
    number = len(LENGTHS) // engine.get_data_parallel_size()
    first = engine.get_data_parallel_rank() * number
    return slice(first, first + number)


def collected(engine: MoECoreEngine, value: Any) -> list[Any]:
    """Return what verl's driver receives: the outputs of data ranks, in their order."""
    is_source = engine.is_mp_src_rank_with_outputs()
    every = gather_objects((engine.get_data_parallel_rank(), is_source, value))
    found = {data_rank: out for data_rank, is_source, out in every if is_source}
    assert sum(entry[1] for entry in every) == len(found) == engine.get_data_parallel_size()
    return [found[data_rank] for data_rank in sorted(found)]


def rows_of(engine: MoECoreEngine, output: dict[str, Any], name: str) -> list[Tensor]:
    """Return an output of all sequences."""
    local = output["model_output"].get(name)
    rows = [] if local is None else [row.clone() for row in local.unbind()]
    return [row for of_rank in collected(engine, rows) for row in of_rank]


def weights_of(engine: MoECoreEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}


def run_case(folder: str, name: str) -> dict[str, Any]:
    """Score, train and save; return what `train_by_hand` returns."""
    parallel, fields = (CASES | ALL_AXES)[name]
    engine, cps = engine_of(folder, parallel, **fields), set[int]()
    engine.module.register_forward_pre_hook(
        lambda model, args, inputs: cps.add(inputs.get("cp", 1)), with_kwargs=True, prepend=True
    )
    part = part_of(engine)
    found: dict[str, Any] = {"offloaded": error_of(lambda: engine.infer_batch(batch(part)))}
    with engine.eval_mode(), torch.no_grad():
        by_size: dict[str, Any] = dict(calculate_entropy=True)
        if not engine.engine_config.dynamic_context:
            by_size |= dict(use_dynamic_bsz=True, max_token_len_per_gpu=16)
        out = engine.infer_batch(batch(part, **by_size))
    found["log-probs"] = rows_of(engine, out, "log_probs")
    found["entropy"] = [len(row) for row in rows_of(engine, out, "entropy")]
    found |= {"losses": [], "norms": [], "rates": []}
    for number in range(STEPS):
        with engine.train_mode():
            out = engine.train_batch(batch(part), partial(sft_loss, None))
        losses = collected(engine, sum(out["loss"]))
        found["losses"].append(sum(losses) / len(losses))
        found["norms"].append(collected(engine, out["metrics"].get("grad_norm"))[-1])
        found["rates"].append(engine.lr_scheduler_step())
        engine.to("cpu")
        if number == 1:
            engine.save_checkpoint(f"{folder}/{name}", global_step=number)
        engine.to("cuda")  # back to its device
        if number == 1:
            saved = weights_of(engine)
    found["weights"] = weights_of(engine)
    engine.load_checkpoint(f"{folder}/{name}")
    loaded = weights_of(engine)
    all_cps = set.union(*gather_objects(cps))
    found["loaded"] = all(torch.equal(loaded[name], saved[name]) for name in saved)
    return found | {"cps": all_cps}


def run_replay(folder: str, parallel: dict[str, int], **fields: Any) -> dict[str, Any]:
    """Record experts, and train with other experts for some tokens."""
    fields |= {"router_replay": EngineRouterReplayConfig(mode="R2")}
    engine = engine_of(folder, parallel, **fields)
    part = part_of(engine)

    def score(**more: Any) -> dict[str, Any]:
        with engine.eval_mode(), torch.no_grad():
            return engine.infer_batch(batch(part, **more))

    found: dict[str, Any] = {"routes": rows_of(engine, score(), "routed_experts")}
    forced = [
        (row + (torch.arange(len(row)) % 3 == 0)[:, None, None]) % EXPERTS
        for row in found["routes"]
    ]
    for row in forced:
        row[-1] = 0  # verl's fill: rollout servers route no last token
    found["log-probs"] = rows_of(engine, score(routes=forced), "log_probs")
    by_routers = score(routes=forced, enable_routing_replay=False)
    found |= {"by routers": rows_of(engine, by_routers, "log_probs"), "norms": []}
    for _ in range(2):
        with engine.train_mode():
            out = engine.train_batch(batch(part, forced), partial(sft_loss, None))
        found["norms"].append(collected(engine, out["metrics"].get("grad_norm"))[-1])
    return found | {"weights": weights_of(engine)}


def train(rank: int, device: torch.device, folder: str, names: list[str]) -> dict[str, Any]:
    seqlen_balancing.get_device_name = lambda: device.type  # verl has no platform without GPUs
    if rank == 0:
        stock_model().save_pretrained(f"{folder}/model")
    found = {"stock": gather_objects(train_by_hand() if rank == 0 else None)[0]}
    return found | {name: run_case(folder, name) for name in names}


def worker(rank: int, device: torch.device, folder: str, names: list[str]) -> Any:
    found = train(rank, device, folder, names)
    every = REPLAYS | {"replay dp6-ep3": (dict(ep=3), {})}
    return found | {name: run_replay(folder, p, **more) for name, (p, more) in every.items()}


results = ranks_fixture(WORLD, worker, "name", in_folder=True)
results_of_all_axes = ranks_fixture(8, train, "all_axes", in_folder=True)


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def loaded_by_stock(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by the names of a stock model's parameters."""
    model: Any = stock_model()
    model = type(model).from_pretrained(None, config=model.config, state_dict=weights)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_stock_transformers(name: str, results: Any) -> None:
    check_training(name, CASES[name][1], results)


@pytest.mark.nightly
@pytest.mark.parametrize("all_axes", ALL_AXES)
def test_tp_cp_and_pp_train_as_stock_transformers(all_axes: str, results_of_all_axes: Any) -> None:
    check_training(all_axes, ALL_AXES[all_axes][1], results_of_all_axes)


def check_training(name: str, fields: dict[str, Any], results: Any) -> None:
    stock, found = results["stock"], results[name]
    assert distance([row[:-1] for row in found["log-probs"]], stock["log-probs"]) < 1e-5
    assert found["entropy"] == [a + b for a, b in LENGTHS]
    for key in ("losses", "norms"):
        assert found[key] == pytest.approx(stock[key], rel=1e-5)
    assert found["rates"] == pytest.approx([learning_rate(i + 1) for i in range(STEPS)])
    weights = loaded_by_stock(found["weights"])
    assert weights.keys() == stock["weights"].keys()
    assert distance([weights[n] for n in stock["weights"]], list(stock["weights"].values())) < 1e-5
    assert found["loaded"] and found["cps"] == ({1, 2} if "dynamic" in name else {1})
    if fields.get("param_offload"):
        assert found["offloaded"].startswith("forward must not run while buffers, weights")


@pytest.mark.parametrize("layout", REPLAYS)
def test_replay_is_that_of_data_ranks(layout: str, results: Any) -> None:
    """Over each layout, with offload, and in fp16 up to its rounding."""
    expected, found = results["replay dp6-ep3"], results[layout]
    is_fp16 = REPLAYS[layout][1].get("dtype") == "float16"
    assert all(map(torch.equal, found["routes"], expected["routes"]))
    assert distance(found["by routers"], found["log-probs"]) > 1
    for key in ("log-probs", "by routers"):
        assert distance(found[key], expected[key]) < (5e-2 if is_fp16 else 1e-5)
    bound = 8 * 2.0**-11 if is_fp16 else 1e-5  # of the norm's relative error
    assert found["norms"] == pytest.approx(expected["norms"], rel=bound)
    assert found["weights"].keys() == expected["weights"].keys()
    values = zip(found["weights"].values(), expected["weights"].values(), strict=True)
    assert max(float((a - b).abs().max()) for a, b in values) < (LR / 4 if is_fp16 else 1e-5)


@pytest.mark.parametrize("parallel, dynamic", [({"pp": 2}, False), ({"tp": 2}, True)])
def test_steps_of_grpo_under_ray(parallel: dict[str, int], dynamic: bool, tmp_path: Path) -> None:
    """verl's workers in Ray actors: rollouts of `generate`, and verl's advantages and loss."""
    ray = pytest.importorskip("ray", reason="the workers are Ray's actors, which verl depends on")
    for name in ("fastapi", "uvicorn"):
        pytest.importorskip(name, reason=f"verl's workers import {name}, which extra `verl` has")
    from tests.integrations.verl_ray import drive as drive_workers

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        found = drive_workers(str(tmp_path), parallel | {"ep": 2}, dynamic, num_steps=2)
    finally:
        ray.shutdown()
    for step in found:
        assert step["log-probs"] < 2e-5
        ours, stock = step["norms"]
        assert len(ours) == 2 and ours == pytest.approx(stock, rel=1e-5)
        assert step["clipped"][-1] > 0.1  # ratios of the second mini-batch lie around the clips
        assert torch.cat(step["advantages"]).abs().max() > 0.5
    assert found[-1]["weights"] < 1e-5
