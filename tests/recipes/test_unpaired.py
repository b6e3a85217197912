"""KTO by `moecore finetune` on two ranks, against TRL's KTOTrainer in one process."""

from __future__ import annotations

import importlib
import json
import math
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from moecore.io import save_adapters
from moecore.recipes import finetune
from moecore.recipes.examples import compute_examples_digest, read_examples
from moecore.recipes.finetune import check_objective
from moecore.recipes.preferences import encode_unpaired_preference, make_unpaired_batch
from moecore.recipes.tiny_model import make_tokenizer, write_tiny_model
from moecore.rl import KTO, Rollouts
from tests.helpers.ranks import run_ranks
from tests.recipes.launched import metrics, rank_of_command

transformers = pytest.importorskip("transformers", minversion="5")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
STEPS, ROWS, TOKENS, RATE = 4, 3, 40, 1e-3  # rows of a rank and step
BETA, DESIRABLE, UNDESIRABLE = 0.3, 1.5, 0.75
WORDS = (
    f"--objective kto --kto-beta {BETA} --kto-desirable-weight {DESIRABLE} "
    f"--kto-undesirable-weight {UNDESIRABLE} --ep 2 --lr {RATE} --batch-size {ROWS} "
    f"--seq-len {TOKENS} --max-steps {STEPS} --lr-schedule constant --warmup-steps 0 "
    "--eval-every 4 --eval-share 0.25 --checkpoint-every 0"
)
RUNS = {"full": "", "adapters": "--lora-rank 4 --lora-alpha 32"}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return labelled completions, some of them longer than the row, from pairs."""
    lines = (folder / "tiny" / "pairs.jsonl").read_text().splitlines()[:36]
    rows = []
    for i, pair in enumerate(map(json.loads, lines)):
        label = i % 3 != 1
        completion = pair["chosen" if label else "rejected"]
        rows.append({"prompt": pair["prompt"], "completion": completion, "label": label})
    return rows


def on_two_ranks(rank: int, device: torch.device, folder: Path) -> dict[str, Tensor]:
    """Run with all weights and with adapters; return the first gradients of all weights."""
    script = importlib.import_module("moecore.recipes.finetune")
    tuning = script.JOBS["kto"]
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

        words = f"--model {folder / 'tiny'} --data {folder / 'rows.jsonl'} {WORDS} {RUNS[run]}"
        words += f" --run-dir {folder / run}"
        with (
            patch.object(tuning, "forward_backward", seen),
            patch.object(script, "build_model", build),
        ):
            code, said = rank_of_command(rank, device, "finetune", 2, words.split())
        assert code == 0, said

    for run in RUNS:
        start(run)
    return grads


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("kto")
    write_tiny_model(
        folder / "tiny", hidden_size=32, num_hidden_layers=2, head_dim=8, moe_intermediate_size=16
    )
    text = "".join(f"{json.dumps(row)}\n" for row in rows_of(folder))
    (folder / "rows.jsonl").write_text(text)
    return folder, run_ranks(2, on_two_ranks, folder, over_gloo=True)


class RecordingTrainer(trl.KTOTrainer):
    """Keeps losses and the first gradients; completions rotate among the rows of one rank."""

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, name: str) -> Any:
        with patch.object(args, "per_device_train_batch_size", ROWS):
            return super()._prepare_dataset(dataset, processing_class, args, name)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), float(loss)]
        if len(self.losses) == 1:
            params = self.model.named_parameters()
            self.first = {n: p.grad.clone() for n, p in params if p.grad is not None}
        return loss


def stock(folder: Path, run: str, train: list[Any], held_out: list[Any]) -> RecordingTrainer:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "tiny", dtype=torch.float32)
    if run == "adapters":
        peft = pytest.importorskip("peft")
        model = peft.PeftModel.from_pretrained(model, folder / "first", is_trainable=True)
    args = trl.KTOConfig(
        str(folder / "stock"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2 * ROWS,
        per_device_eval_batch_size=2 * ROWS,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_length=TOKENS,
        beta=BETA,
        desirable_weight=DESIRABLE,
        undesirable_weight=UNDESIRABLE,
        logging_steps=1,
        router_aux_loss_coef=0.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = RecordingTrainer(
        model,
        args=args,
        train_dataset=datasets.Dataset.from_list(train),
        eval_dataset=datasets.Dataset.from_list(held_out),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "tiny"),
    )
    trainer.train()
    return trainer


def order_of(folder: Path) -> tuple[list[Any], list[Any]]:
    """Return the rows as the run trains on them, and those that are held out."""
    from moecore.packing import PackedBatchSampler
    from moecore.recipes.examples import split_examples

    rows = rows_of(folder)
    train, held_out = split_examples(rows, share=0.25, seed=0)
    steps = iter(PackedBatchSampler([1] * len(train), 1, rows=2 * ROWS, seed=0))
    return [train[i] for _ in range(STEPS) for i in next(steps)], held_out


@pytest.mark.parametrize("run", RUNS)
def test_two_ranks_equal_trl(run: str, runs: tuple[Path, dict[str, Tensor]]) -> None:
    folder, grads = runs
    train, held_out = order_of(folder)
    trainer = stock(folder, run, train, held_out)
    found = metrics(folder / run)
    assert [line["loss"] for line in found] == pytest.approx(trainer.losses, rel=1e-5)
    if run == "full":
        assert grads.keys() == trainer.first.keys()
        for name, grad in trainer.first.items():
            error = (grads[name] - grad).abs().max() / grad.abs().max()
            assert error < 1e-5, name
    log = [entry for entry in trainer.state.log_history if "rewards/margins" in entry]
    rewards = [f"rewards/{name}" for name in ("chosen", "rejected", "margins")]
    for name in (*rewards, "kl", "logps/chosen", "logps/rejected"):
        pair = [line[name] for line in found], [entry[name] for entry in log]
        assert pair[0] == pytest.approx(pair[1], rel=1e-4, abs=1e-5), name
    assert found[-1]["kl"] > 0.01 and found[-1]["rewards/margins"] > 0.01
    after = trainer.evaluate()["eval_loss"]
    assert found[-1]["eval_loss"] == pytest.approx(after, rel=1e-4)


def test_completions_rotate_and_labels_are_signs(tmp_path: Path) -> None:
    """A prompt has the full completion of the row before it, cut only with its own prompt."""
    rows = [("a b c", " d e f", True), ("a", " b c", False)]
    lines = [
        json.dumps(dict(zip(("prompt", "completion", "label"), row, strict=True))) for row in rows
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    tokenizer = make_tokenizer([("a b c", "d e f")])
    read = {"encode": encode_unpaired_preference}
    (first, second) = read_examples([path], tokenizer, seq_len=99, **read).examples
    length = len(first.sequence.tokens_T) - 1
    cut = read_examples([path], tokenizer, seq_len=length, **read).examples
    batch = make_unpaired_batch(cut, length)
    rollouts, mismatched = batch.rollouts, batch.mismatched
    assert rollouts.lengths == [length, len(second.sequence.tokens_T)]
    assert rollouts.advantages_N is not None
    assert rollouts.advantages_N.tolist() == [1.0] * length + [-1.0] * rollouts.lengths[1]
    prompts = [x.sequence.tokens_T[~x.sequence.is_answer_T].tolist() for x in (first, second)]
    expected = [
        (prompts[0] + second.completion_T.tolist())[:length],
        (prompts[1] + first.completion_T.tolist())[:length],
    ]
    assert mismatched.tokens_N.tolist() == list(chain(*expected))
    mask = [[i >= len(p) for i in range(len(e))] for p, e in zip(prompts, expected, strict=True)]
    assert mismatched.response_mask_N.tolist() == list(chain(*mask))
    assert batch.count_labels_and_tokens().tolist() == [
        2, sum(rollouts.lengths), int(rollouts.response_mask_N.sum()), 0
    ]  # fmt: skip


def test_the_digest_has_labels(tmp_path: Path) -> None:
    tokenizer, digests = make_tokenizer([("a", "b")]), set()
    for label in (True, False):
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps({"prompt": "a", "completion": "b", "label": label}))
        found = read_examples([path], tokenizer, seq_len=99, encode=encode_unpaired_preference)
        digests.add(compute_examples_digest(found.examples))
    assert len(digests) == 2


BAD_ROWS = {
    '{"prompt": "a", "label": true}': "must have prompt and completion, both texts or both",
    '{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}], "label": true}': (
        "must have prompt and completion, both texts or both messages"
    ),
    '{"prompt": "a", "completion": "b"}': "must have label, true or false, not None",
    '{"prompt": "a", "completion": "b", "label": 1}': "must have label, true or false, not 1",
    '{"prompt": "", "completion": "b", "label": true}': "must have a prompt before each completion",
}


@pytest.mark.parametrize("line", BAD_ROWS)
def test_rows_without_a_label_or_prompt(line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line)
    tokenizer = make_tokenizer([("a", "b")])
    with pytest.raises(ValueError, match=BAD_ROWS[line]) as error:
        read_examples([path], tokenizer, seq_len=9, encode=encode_unpaired_preference)
    assert f"--data ({path}) line 1 must" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "words, wanted",
    {
        "--objective kto --cuda-graph": "--cuda-graph must not go with --objective kto",
        "--objective kto --dynamic-cp 8": "--dynamic-cp must not go with --objective kto",
        "--objective dpo --kto-beta 0.1": "--objective (dpo) must be kto with options of [kto]",
    }.items(),
)
def test_options_that_do_not_fit(words: str, wanted: str) -> None:
    args = finetune.parse_arguments(["--model", "a", "--data", "b", *words.split()])
    with pytest.raises(ValueError) as error:
        check_objective(args)
    assert wanted in str(error.value)


def test_the_kl_term_is_no_option() -> None:
    with pytest.raises(ValueError, match="--kto-kl must be a flag of moecore finetune"):
        finetune.parse_arguments(["--model", "a", "--data", "b", "--kto-kl", "1"])


def test_a_step_of_one_row_is_refused(runs: tuple[Path, Any]) -> None:
    words = f"--objective kto --model {runs[0] / 'tiny'} --data b --batch-size 1"
    args = finetune.parse_arguments(words.split())
    with pytest.raises(ValueError, match=r"--batch-size \(1\) must be >= 2 with --objective kto"):
        finetune.check_options(args, 2)


def test_losses_by_hand() -> None:
    rollouts = Rollouts.of([[1], [2]], [[3, 4], [5]])
    rollouts = rollouts.replace(
        advantages_N=rollouts.expand_to_tokens(torch.tensor([1.0, -1.0])),
        ref_log_probs_N=torch.tensor([9.0, -1.0, -2.0, 9.0, -3.0]),
    )
    log_probs_N = torch.tensor([0.0, -0.5, -1.5, 0.0, -1.0])
    objective = KTO(beta=0.5, desirable_weight=2.0, undesirable_weight=3.0, kl=0.25)
    found = objective.compute_losses(log_probs_N, rollouts)
    good, bad = 0.5 * (1.0 - 0.25), 0.5 * (0.25 - 2.0)
    assert found.tolist() == pytest.approx(
        [2 * (1 - 1 / (1 + math.exp(-good))), 3 * (1 - 1 / (1 + math.exp(-bad)))]
    )
