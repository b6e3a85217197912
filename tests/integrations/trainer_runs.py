"""Runs of MoETrainer beside stock Trainer under DDP, on the ranks that a test file has spawned."""

import copy
import os
import random
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")

from transformers import Trainer, TrainerCallback, TrainingArguments

from moecore import ContextOptions, FSDPOptions, ParallelConfig, build_meshes, parallelize_moe
from moecore.families import use_causal_attention
from moecore.integrations.transformers import MoETrainer
from moecore.io import load_hf
from moecore.packing import PackedCollator, ScheduledCollator
from tests.families.transformers.hf_models import random_model

COMMON: dict[str, Any] = dict(
    use_cpu=True,
    per_device_train_batch_size=2,
    per_device_eval_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    adam_epsilon=1e-3,  # or rounding errors of gradients near 0 become steps of lr
    max_grad_norm=1.0,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)


def enter_launcher(rank: int, device: torch.device, folder: str) -> None:
    """Set what torchrun sets: accelerate looks there, although the group is running."""
    COMMON["use_cpu"] = device.type == "cpu"
    local = rank if device.index is None else device.index  # ranks may share a GPU
    port = Path(folder) / "port"
    if rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port.write_text(str(free.getsockname()[1]))
    dist.barrier()
    world = str(dist.get_world_size())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=world)
    os.environ.update(LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=port.read_text(), HF_HUB_OFFLINE="1")


def rows(count: int, seed: int = 3) -> list[dict[str, Tensor]]:
    """Sequences of 4 to 14 tokens, the first third of each without labels."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(4, 15, (), generator=generator))
        ids = torch.randint(1, 61, (length,), generator=generator)
        labels = ids.clone()
        labels[: length // 3] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def padded(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad on the right; padding has no labels."""

    def whole(name: str, value: int) -> Tensor:
        parts = [row[name] for row in batch]
        return nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=value)

    ids = whole("input_ids", 0)
    return {"input_ids": ids, "labels": whole("labels", -100), "attention_mask": (ids != 0).long()}


def of_bins(collate: Callable[..., Any], bins: list[list[dict[str, Tensor]]]) -> Any:
    return collate([row for one in bins for row in one])


def packed(documents: list[dict[str, Tensor]]) -> Any:
    """Pack the documents of two bins into as many rows."""
    return PackedCollator(row_tokens=32, rows=2, multiple=4, shift_labels=False)(documents)


def make_model(**options: Any) -> nn.Module:
    return random_model("qwen3-moe", **options)


def sharded(model: nn.Module, cp: int = 1, tp: int = 1, **options: Any) -> nn.Module:
    return parallelize_moe(model, build_meshes(ParallelConfig(ep=2, cp=cp, tp=tp)), **options)


def trainer_of(cls, model, folder, *, data=14, **options):
    """Return a trainer of `data` rows, 7 of 8 rows' micro-batches per epoch and rank."""
    callbacks, collate = options.pop("callbacks", None), options.pop("collate", None)
    scheduled = options.pop("scheduled", None)
    args = TrainingArguments(folder, **COMMON | options)
    of_pairs = None if collate is None else partial(of_bins, collate)
    return cls(
        model,
        args,
        data_collator=scheduled or of_pairs or padded,
        train_dataset=rows(data) if of_pairs is None else pairs(2 * data),
        eval_dataset=rows(5, seed=4) if of_pairs is None else pairs(6, seed=4),
        callbacks=callbacks,
    )


def pairs(count: int, **how: Any) -> list[list[dict[str, Tensor]]]:
    """Return bins of two of the sequences of `rows`."""
    found = rows(count, **how)
    return [found[i : i + 2] for i in range(0, count, 2)]


def logged(trainer: Trainer, *names: str) -> list[list[float]]:
    """Return the values of a run's log, for each name those of all entries that have it."""
    history = trainer.state.log_history
    return [[entry[name] for entry in history if name in entry] for name in names]


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters on the CPU, assembled. Collective."""
    found = {}
    for name, param in model.named_parameters():
        value = param.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found[name] = whole.to("cpu", copy=True)
    return found


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest difference of an element, and where it is."""
    assert found.keys() == expected.keys()
    differences = [(float((found[n] - expected[n]).abs().max()), n) for n in expected]
    return max(differences)


def against_stock(folder: str, options: dict[str, Any], **config: Any) -> dict[str, Any]:
    """Train one model by both trainers, and by stock Trainer in fp64.

    Returns both logs, and the largest distance of each trainer's final parameters from fp64.
    """
    model = make_model(**config)
    start, in_fp64 = whole(model), copy.deepcopy(model).double()
    in_fp64.set_experts_implementation("eager")  # torch's grouped product has no fp64
    stock, double = (
        trainer_of(Trainer, one, folder, **options) for one in (copy.deepcopy(model), in_fp64)
    )
    stock.train()
    double.train()
    exact = whole(double.model)
    ours = trainer_of(MoETrainer, sharded(model), folder, **options)
    ours.train()
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return {
        "stock": logged(stock, *names),
        "ours": logged(ours, *names),
        "error": furthest(whole(ours.model), exact),
        "stock error": furthest(whole(stock.model), exact),
        "moved": furthest(whole(stock.model), start),
        "log": [entry for entry in ours.state.log_history if "loss" in entry][-1],
    }


def packs(folder: str) -> dict[str, Any]:
    """Train on documents packed into rows, and on rows of one each by stock Trainer."""
    options: dict[str, Any] = dict(max_steps=4, save_strategy="steps", save_steps=2, data=16)
    options["include_num_input_tokens_seen"] = "non_padding"
    stock = trainer_of(Trainer, make_model(), f"{folder}/stock", collate=padded, **options)
    stock.train()
    runs = [stock]
    for name, stops in (("once", 0), ("twice", 2), ("twice", 0)):
        model = make_model()
        use_causal_attention(model)
        trainer = trainer_of(
            MoETrainer,
            sharded(model),
            f"{folder}/{name}",
            collate=packed,
            callbacks=[StopsAfter(stops)],
            **options,
        )
        trainer.train(resume_from_checkpoint=len(runs) == 3)
        runs.append(trainer)
    found = [logged(one, "loss", "grad_norm", "num_input_tokens_seen") for one in runs]
    weights = [whole(one.model) for one in runs]
    return {
        "logs": [found[0], found[1], found[3]],
        "distance": furthest(weights[1], weights[0]),
        "resumed": furthest(weights[3], weights[1])[0],
        "stopped": furthest(weights[2], weights[1])[0],
    }


OF_ROWS: dict[str, Any] = dict(
    max_steps=4,
    data=8,
    eval_strategy="steps",
    eval_steps=2,
    save_strategy="steps",
    save_steps=2,
    include_num_input_tokens_seen="non_padding",
)


def rows_of(trainer: Trainer) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Return the log and the parameters at the end of a run of `OF_ROWS`."""
    names = ("loss", "grad_norm", "eval_loss", "num_input_tokens_seen")
    return logged(trainer, *names), whole(trainer.model)


def over_tp(folder: str) -> Any:
    """Train two tp ranks."""
    trainer = trainer_of(MoETrainer, sharded(make_model(), tp=2), folder, collate=padded, **OF_ROWS)
    trainer.train()
    return rows_of(trainer)


def over_cp(folder: str) -> Any:
    """Train two cp ranks."""
    trainer = trainer_of(MoETrainer, sharded(make_model(), cp=2), folder, collate=packed, **OF_ROWS)
    trainer.train()
    with pytest.raises(ValueError, match=r"compute_metrics must be None with ParallelConfig.cp"):
        MoETrainer(trainer.model, trainer.args, eval_dataset=pairs(2), compute_metrics=max)
    with pytest.raises(ValueError, match=r"prediction_loss_only \(False\) must be True with"):
        trainer.predict(trainer.eval_dataset)
    smoothed = replace(trainer.args, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match=r"label_smoothing_factor \(0.1\) must be 0 with"):
        MoETrainer(trainer.model, smoothed, train_dataset=pairs(2), eval_dataset=pairs(2))
    return rows_of(trainer)


DYNAMIC = (
    OF_ROWS
    | dict(data=21, per_device_train_batch_size=7, per_device_eval_batch_size=5)
    | dict(gradient_accumulation_steps=1)
)


def over_dynamic_cp(folder: str) -> dict[str, Any]:
    """Train on plans of 7 documents, at once, to a stop, and from there on."""
    found: dict[str, Any] = {"runs": [], "cps": set()}
    sizes = {"max_tokens": 8, "data_ranks": dist.get_world_size()}
    collator = ScheduledCollator(data_rank=dist.get_rank(), **sizes)
    dynamic: dict[str, Any] = dict(loss="sum", context=ContextOptions(dynamic=True))
    for name, stops in (("once", 0), ("twice", 2), ("twice", 0)):
        model = sharded(make_model(), **dynamic)
        options = dict(scheduled=collator, callbacks=[StopsAfter(stops)], **DYNAMIC)
        trainer = trainer_of(MoETrainer, model, f"{folder}/{name}", **options)
        trainer.train(resume_from_checkpoint=len(found["runs"]) == 2)
        found["runs"].append(rows_of(trainer))
    for batch in trainer.get_train_dataloader():
        found["cps"] |= {*batch.cps}
    other = ScheduledCollator(
        data_rank=dist.get_rank(), **sizes | {"max_tokens": 8 + 6 * dist.get_rank()}
    )
    trainer = trainer_of(MoETrainer, model, f"{folder}/other", **options | dict(scheduled=other))
    with pytest.raises(ValueError) as info:
        trainer.evaluate()
    return found | {"refused": str(info.value)}


class Draws(TrainerCallback):
    """Records what the generators give after each step."""

    def __init__(self) -> None:
        self.drawn: list[tuple[float, float, float]] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.drawn.append((random.random(), np.random.normal(), float(torch.rand(()))))


class StopsAfter(TrainerCallback):
    """Ends a run early, as a kill would, but for the save that is under way."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self._step


def resumed(folder: str) -> dict[str, Any]:
    """Train 6 steps at once, and 3 and 3: dropout, data order and generators go on."""
    options = dict(max_steps=6, save_strategy="steps", save_steps=3, save_total_limit=1)
    found = {}
    for name, stops in (("once", 0), ("before", 3), ("after", 0)):
        draws = Draws()
        trainer = trainer_of(
            MoETrainer,
            sharded(make_model(attention_dropout=0.2)),
            folder + ("/once" if name == "once" else "/twice"),
            callbacks=[draws, StopsAfter(stops)],
            **options,
        )
        trainer.train(resume_from_checkpoint=name == "after")
        found[name] = (logged(trainer, "loss")[0], draws.drawn, whole(trainer.model))
    assert not torch.equal(found["once"][2]["lm_head.weight"], found["before"][2]["lm_head.weight"])
    again = trainer_of(MoETrainer, sharded(make_model()), folder + "/twice", **options)
    try:
        again.train()
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    return {
        "losses": (found["once"][0], found["after"][0]),
        "draws": (found["once"][1][3:], found["after"][1]),
        "distance": furthest(found["after"][2], found["once"][2]),
        "checkpoints": sorted(p.name for p in Path(folder, "twice", "checkpoints").glob("step*")),
        "refusal": refusal,
    }


class NanOnOneRank(MoETrainer):
    """The loss of rank 1 is not a number in the second step."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        is_bad = self.state.global_step == 1 and self.args.process_index == 1
        return loss * float("nan") if is_bad and not kwargs.get("return_outputs") else loss


class Parameters(TrainerCallback):
    """Keeps all parameters after each step."""

    def __init__(self) -> None:
        self.after: list[dict[str, Tensor]] = []

    def on_step_end(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        self.after.append(whole(model))


def skipped(folder: str) -> list[float]:
    """Return how far the parameters move in the second step and in the third."""
    kept, model = Parameters(), sharded(make_model())
    trainer_of(NanOnOneRank, model, folder, max_steps=3, callbacks=[kept]).train()
    return [furthest(kept.after[i + 1], kept.after[i])[0] for i in range(2)]


def in_fp16(folder: str) -> dict[str, Any]:
    """Train 2 steps in fp32, and in fp16 4 at once, and 2 and 2; the second is skipped."""
    fp16 = FSDPOptions(param_dtype=torch.float16)
    options = dict(max_steps=4, save_strategy="steps", save_steps=2)
    runs = {"wide": (0, {}), "once": (0, {"fsdp": fp16}), "twice": (2, {"fsdp": fp16})}
    found = {}
    for name, (stops, how) in (*runs.items(), ("after", (0, {"fsdp": fp16}))):
        trainer = trainer_of(
            NanOnOneRank,
            sharded(make_model(), **how),
            f"{folder}/{'twice' if name == 'after' else name}",
            callbacks=[StopsAfter(stops)],
            **options,
        )
        trainer.train(resume_from_checkpoint=name == "after")
        found[name] = logged(trainer, "loss", "grad_norm", "loss_scale")
        found[f"{name} parameters"] = whole(trainer.model)
    distance = furthest(found.pop("after parameters"), found.pop("once parameters"))
    return found | {"distance": distance[0]}


def best_model(folder: str) -> dict[str, Any]:
    """Train with the highest loss as the best, and come back to its checkpoint."""
    trainer = trainer_of(
        MoETrainer,
        sharded(make_model()),
        folder,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        greater_is_better=True,
    )
    trainer.train()
    losses = logged(trainer, "eval_loss")[0]
    checkpoint = Path(trainer.state.best_model_checkpoint).name
    return {"losses": losses, "best": checkpoint, "now": trainer.evaluate()["eval_loss"]}


def exported(folder: str) -> dict[str, Any]:
    """Export twice into the same directory; load it with transformers."""
    trainer = trainer_of(MoETrainer, sharded(make_model()), folder, max_steps=1)
    trainer.save_model()
    trainer.train()
    Path(folder, "model-00001-of-00002.safetensors").touch()  # as if that export had been larger
    trainer.save_model()
    names = sorted(path.name for path in Path(folder).iterdir())
    loaded = type(make_model()).from_pretrained(folder)
    with torch.device("meta"):
        read = sharded(type(loaded)(loaded.config))
    read.to_empty(device=trainer.args.device)
    load_hf(folder, read)
    found = whole(trainer.model)
    distances = {"distance": furthest(whole(loaded), found), "read": furthest(whole(read), found)}
    return {"files": names, **distances}
