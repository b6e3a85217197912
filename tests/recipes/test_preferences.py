import importlib
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from moecore.io import save_adapters
from moecore.recipes.examples import read_examples
from moecore.recipes.preferences import encode_preference
from moecore.recipes.rows import ColumnNames
from moecore.recipes.tiny_model import make_tokenizer, write_tiny_model
from tests.helpers.ranks import run_ranks
from tests.recipes.launched import metrics, rank_of_command

transformers = pytest.importorskip("transformers", minversion="5")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
STEPS, PAIRS, TOKENS, RATE = 4, 2, 96, 1e-3  # pairs of a rank and step
BETA = 0.3
WORDS = (
    f"--objective dpo --dpo-beta {BETA} --ep 2 --lr {RATE} "
    f"--batch-size {PAIRS} --seq-len {TOKENS} --max-steps {STEPS} --lr-schedule constant "
    "--warmup-steps 0 --eval-every 4 --eval-share 0.2 --checkpoint-every 0"
)
RUNS = {"full": "", "adapters": "--lora-rank 4 --lora-alpha 32"}


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "tiny" / "pairs.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[:24]]


def on_two_ranks(rank: int, device: torch.device, folder: Path) -> dict[str, Tensor]:
    """Run with all weights and with adapters; return the first gradients of all weights."""
    script = importlib.import_module("moecore.recipes.finetune")
    tuning = script.JOBS["dpo"]
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

        words = f"--model {folder / 'tiny'} --data {folder / 'pairs.jsonl'} {WORDS} {RUNS[run]}"
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
    folder = tmp_path_factory.mktemp("dpo")
    write_tiny_model(
        folder / "tiny", hidden_size=32, num_hidden_layers=2, head_dim=8, moe_intermediate_size=16
    )
    text = "".join(f"{json.dumps(row)}\n" for row in rows_of(folder))
    (folder / "pairs.jsonl").write_text(text)
    return folder, run_ranks(2, on_two_ranks, folder, over_gloo=True)


class RecordingTrainer(trl.DPOTrainer):
    """Keeps the loss of each step, and the gradients of the first one before they are clipped."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), float(loss)]
        if len(self.losses) == 1:
            params = self.model.named_parameters()
            self.first = {n: p.grad.clone() for n, p in params if p.grad is not None}
        return loss

    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def stock(folder: Path, run: str, train: list[Any], held_out: list[Any]) -> RecordingTrainer:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "tiny", dtype=torch.float32)
    if run == "adapters":
        peft = pytest.importorskip("peft")
        model = peft.PeftModel.from_pretrained(model, folder / "first", is_trainable=True)
    args = trl.DPOConfig(
        str(folder / "stock"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2 * PAIRS,
        per_device_eval_batch_size=2 * PAIRS,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_length=TOKENS,
        beta=BETA,
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
    train, held_out = split_examples(rows, share=0.2, seed=0)
    steps = iter(PackedBatchSampler([1] * len(train), 1, rows=2 * PAIRS, seed=0))
    return [train[i] for _ in range(STEPS) for i in next(steps)], held_out


@pytest.mark.parametrize("run", RUNS)
def test_two_ranks_equal_trl(run: str, runs: tuple[Path, dict[str, Tensor]]) -> None:
    folder, grads = runs
    train, held_out = order_of(folder)
    trainer = stock(folder, run, train, held_out)
    found = metrics(folder / run)
    assert [line["loss"] for line in found] == pytest.approx(trainer.losses, rel=1e-5)
    assert found[0]["loss"] == pytest.approx(0.693147, rel=1e-5)  # the policy is the reference
    assert abs(trainer.losses[-1] - trainer.losses[0]) > 0.01
    if run == "full":
        assert grads.keys() == trainer.first.keys()
        for name, grad in trainer.first.items():
            error = (grads[name] - grad).abs().max() / grad.abs().max()
            assert error < 1e-5, name
    log = [entry for entry in trainer.state.log_history if "rewards/margins" in entry]
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
        pair = [line[name] for line in found], [entry[name] for entry in log]
        assert pair[0] == pytest.approx(pair[1], rel=1e-4, abs=1e-5), name
    after = trainer.evaluate()["eval_loss"]
    assert found[-1]["eval_loss"] == pytest.approx(after, rel=1e-4)


def test_the_tokens_are_trls(runs: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """Texts and chats, with and without a prompt of their own."""
    ask, right, wrong = (
        turn(r, c) for r, c in (("user", "2 + 2?"), *[("assistant", a) for a in "45"])
    )
    forms = {
        "chat": {"prompt": [ask], "chosen": [right], "rejected": [wrong]},
        "no prompt": {"chosen": [ask, right], "rejected": [ask, wrong]},
        "text": {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5, or 6"},
        "text without prompt": {"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"},
    }
    tiny = runs[0] / "tiny"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    for name, row in forms.items():
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps(row))
        args = trl.DPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[])
        data = datasets.Dataset.from_list([row])
        trainer = trl.DPOTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)
        (wanted,) = trainer.train_dataset
        found = read_examples([path], tokenizer, seq_len=99, encode=encode_preference)
        (pair,) = found.examples
        for part, ids in zip(
            pair.parts, (wanted["chosen_ids"], wanted["rejected_ids"]), strict=True
        ):
            assert part.tokens_T.tolist() == wanted["prompt_ids"] + ids, name
            assert part.tokens_T[part.is_answer_T].tolist() == ids, name


BAD_ROWS = {
    "{}": "must have chosen and rejected, both texts or both messages",
    '{"chosen": "a", "rejected": [{"role": "assistant", "content": "b"}]}': "must have chosen and",
    '{"prompt": "q", "chosen": [{"role": "assistant", "content": "a"}], '
    '"rejected": [{"role": "assistant", "content": "b"}]}': "must have prompt in the form of",
    '{"prompt": [{"role": "user", "content": "q"}], "chosen": "q a", "rejected": "q b"}': (
        "must have prompt in the form of its completions"
    ),
    '{"chosen": "a", "rejected": "b"}': "must have a prompt before each completion: add one",
}


@pytest.mark.parametrize("line", BAD_ROWS)
def test_rows_that_are_no_pairs(line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line)
    tokenizer = make_tokenizer([("a", "b")])
    with pytest.raises(ValueError, match=BAD_ROWS[line]) as error:
        read_examples([path], tokenizer, seq_len=9, encode=encode_preference)
    assert f"--data ({path}) line 1 must" in str(error.value) and "\n" not in str(error.value)


def test_other_columns_and_one_message(tmp_path: Path) -> None:
    """As ShareGPT's preferences have them: conversations, and a message of each answer."""
    path = tmp_path / "a.jsonl"
    row = {
        "talk": [turn("user", "a")],
        "good": turn("assistant", "b"),
        "bad": turn("assistant", "c"),
    }
    path.write_text(json.dumps(row))
    names = ColumnNames(prompt="talk", preferred="good", rejected="bad")
    tokenizer = make_tokenizer([("a b", "c")])
    found = read_examples([path], tokenizer, seq_len=9999, encode=encode_preference, columns=names)
    ((good, bad),) = (pair.parts for pair in found.examples)
    for part, key in ((good, "good"), (bad, "bad")):
        chat = [*row["talk"], row[key]]
        ids = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
        assert part.tokens_T.tolist() == ids


@pytest.mark.parametrize(
    "words, wanted",
    {
        "--objective dpo --cuda-graph": "--cuda-graph must not go with --objective dpo",
        "--objective dpo --dynamic-cp 8": "--dynamic-cp must not go with --objective dpo",
        "--dpo-beta 0.1": "--objective (sft) must be dpo with options of [dpo]",
    }.items(),
)
def test_options_that_do_not_fit(words: str, wanted: str) -> None:
    from moecore.recipes import finetune
    from moecore.recipes.finetune import check_objective

    args = finetune.parse_arguments(["--model", "a", "--data", "b", *words.split()])
    with pytest.raises(ValueError) as error:
        check_objective(args)
    assert wanted in str(error.value)
