"""Losses, first gradients and metrics of `moecore finetune` on two ranks and of TRL."""

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from moecore.io import save_adapters
from moecore.packing import PackedBatchSampler
from moecore.recipes.examples import split_examples
from moecore.recipes.tiny_model import write_tiny_model
from tests.helpers.ranks import run_ranks
from tests.recipes.launched import metrics, rank_of_command

RUNS = {"full": "", "adapters": "--lora-rank 4 --lora-alpha 32"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """An objective's run: its own options, the rows of a rank and step, and tokens of a row."""

    objective: str
    words: str
    rows: int
    tokens: int
    eval_share: float
    steps: int = 4
    rate: float = 1e-3

    @property
    def command(self) -> str:
        return (
            f"--objective {self.objective} {self.words} --ep 2 --lr {self.rate} --batch-size 1 "
            f"--grad-accum {self.rows} --seq-len {self.tokens} --max-steps {self.steps} "
            "--lr-schedule constant --warmup-steps 0 --eval-every 4 "
            f"--eval-share {self.eval_share} --checkpoint-every 0"
        )


def make_folder(folder: Path) -> list[Any]:
    """Write a tiny model and return the pairs that come with it."""
    sizes = dict(hidden_size=32, num_hidden_layers=2, head_dim=8, moe_intermediate_size=16)
    write_tiny_model(folder / "tiny", **sizes)
    return [json.loads(x) for x in (folder / "tiny" / "pairs.jsonl").read_text().splitlines()]


def train_on_two_ranks(folder: Path, case: Case, rows: Sequence[Any]) -> dict[str, Tensor]:
    """Run with all weights and with adapters; return the first gradients of all weights."""
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    grads: dict[str, Tensor] = run_ranks(2, _train, folder, case, over_gloo=True)
    return grads


def _train(rank: int, device: torch.device, folder: Path, case: Case) -> dict[str, Tensor]:
    script = importlib.import_module("moecore.recipes.finetune")
    tuning = script.JOBS[case.objective]
    forward_backward, build_model = tuning.forward_backward, script.build_model
    grads: dict[str, Tensor] = {}

    def start(run: str) -> None:
        def seen(job: Any, *args: Any) -> Tensor:
            loss = forward_backward(job, *args)
            if not grads:
                params = job.model.named_parameters()
                grads.update({name: param.grad.full_tensor() for name, param in params})
            return loss

        def build(*args: Any, **options: Any) -> Any:
            model = build_model(*args, **options)
            if run == "adapters":
                save_adapters(model, folder / "first")
            return model

        words = f"--model {folder / 'tiny'} --data {folder / 'rows.jsonl'} {case.command} "
        words += f"{RUNS[run]} --run-dir {folder / run}"
        with (
            patch.object(tuning, "forward_backward", seen),
            patch.object(script, "build_model", build),
        ):
            code, said = rank_of_command(rank, device, "finetune", 2, words.split())
        assert code == 0, said

    for run in RUNS:
        start(run)
    return grads


class Recorded:
    """Keeps the loss of each step, and the gradients of the first one before they are clipped."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.losses = [*getattr(self, "losses", []), float(loss)]
        if len(self.losses) == 1:
            params = self.model.named_parameters()
            self.first = {n: p.grad.clone() for n, p in params if p.grad is not None}
        return loss


def train_stock(
    trainer_class: Any, config_class: Any, folder: Path, case: Case, run: str, rows: Sequence[Any]
) -> Any:
    """Return a trainer of TRL after it has trained on the rows of both ranks in their order."""
    import datasets
    import transformers

    train, held_out = split_examples(list(rows), share=case.eval_share, seed=0)
    steps = iter(PackedBatchSampler([1] * len(train), 1, rows=2 * case.rows, seed=0))
    train = [train[i] for _ in range(case.steps) for i in next(steps)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "tiny", dtype=torch.float32)
    if run == "adapters":
        peft = pytest.importorskip("peft", reason="adapters, of extra `lora`")
        model = peft.PeftModel.from_pretrained(model, folder / "first", is_trainable=True)
    args = config_class(
        str(folder / "stock"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2 * case.rows,
        per_device_eval_batch_size=2 * case.rows,
        max_steps=case.steps,
        learning_rate=case.rate,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_length=case.tokens,
        logging_steps=1,
        router_aux_loss_coef=0.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = trainer_class(
        model,
        args=args,
        train_dataset=datasets.Dataset.from_list(train),
        eval_dataset=datasets.Dataset.from_list(held_out),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "tiny"),
    )
    trainer.train()
    return trainer


def compare(
    folder: Path, run: str, trainer: Any, grads: dict[str, Tensor], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Compare losses, gradients, metrics and the loss of held out rows; return metrics.jsonl."""
    found = metrics(folder / run)
    assert [line["loss"] for line in found] == pytest.approx(trainer.losses, rel=1e-5)
    if run == "full":
        assert grads.keys() == trainer.first.keys()
        for name, grad in trainer.first.items():
            error = (grads[name] - grad).abs().max() / grad.abs().max()
            assert error < 1e-5, name
    log = [entry for entry in trainer.state.log_history if "rewards/margins" in entry]
    for name in names:
        pair = [line[name] for line in found], [entry[name] for entry in log]
        assert pair[0] == pytest.approx(pair[1], rel=1e-4, abs=1e-5), name
    after = trainer.evaluate()["eval_loss"]
    assert found[-1]["eval_loss"] == pytest.approx(after, rel=1e-4)
    return found
