"""`moecore finetune --objective distill` against stock transformers models and torch's AdamW."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moecore.models.distillation import Distillation
from moecore.packing import PackedBatchSampler
from moecore.recipes.examples import read_examples
from moecore.recipes.tiny_model import write_tiny_model
from tests.helpers.ranks import run_ranks
from tests.models.test_distillation import make_options, plain_loss
from tests.recipes.launched import metrics, rank_of_command

transformers = pytest.importorskip("transformers", minversion="5", reason="it trains them")
STEPS, ROWS, TOKENS, RATE, EPS = 3, 4, 96, 1e-3, 1e-4
STUDENT = dict(hidden_size=32, num_hidden_layers=2, head_dim=8, moe_intermediate_size=16)
TEACHER = STUDENT | dict(hidden_size=48, num_hidden_layers=4, moe_intermediate_size=24)
COMMON = (
    f"--objective distill --distill-temperature 1.7 --distill-kd-ratio 0.3 --lr {RATE} --eps {EPS} "
    f"--seq-len {TOKENS} --max-steps {STEPS} --lr-schedule constant --warmup-steps 0 "
    "--eval-every 0 --checkpoint-every 0"
)
FULL, TOP_K = make_options("forward", None), make_options("reverse", 20)
LAYOUTS = {  # data ranks times rows times micro-batches = ROWS; and documents are padded for cp
    "data": ("--ep 2 --batch-size 1", TOP_K, 1),
    "tp-cp": ("--tp 2 --cp 2 --ep 2 --batch-size 2 --grad-accum 2", FULL, 4),
    "pp": ("--pp 2 --ep 2 --batch-size 1 --grad-accum 2", FULL, 1),
}


def train(rank: int, device: torch.device, folder: Path) -> None:
    for layout, (degrees, options, _) in LAYOUTS.items():
        words = (
            f"{COMMON} {degrees} --distill-kl-type {options.kl_type} --run-dir {folder / layout} "
        )
        words += f"--model {folder / 'student'} --distill-teacher {folder / 'teacher'} "
        words += f"--data {folder / 'some.jsonl'}"
        words += "" if options.top_k is None else f" --distill-top-k {options.top_k}"
        code, said = rank_of_command(rank, device, "finetune", 4, words.split())
        assert code == 0, said


def train_stock(folder: Path, examples: list[Any], unit: int, options: Distillation) -> list[float]:
    """Return the losses of transformers' models on one example at a time."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    student, teacher = (load(folder / name, dtype=torch.float32) for name in ("student", "teacher"))
    optimizer = torch.optim.AdamW(student.parameters(), RATE, (0.9, 0.95), EPS, weight_decay=0.0)
    lengths = [-(-len(e.tokens_T) // unit) * unit for e in examples]
    steps, losses = iter(PackedBatchSampler(lengths, TOKENS, rows=ROWS)), []
    head = torch.eye(student.config.vocab_size)
    for _ in range(STEPS):
        total = count = 0
        for example in (examples[number] for number in next(steps)):
            ids_1T, labels = example.tokens_T.long()[None, :-1], example.tokens_T.long()[1:]
            labels = labels.where(example.is_answer_T[1:], -100)
            z, y = (model(ids_1T).logits[0] for model in (student, teacher))
            number = int((labels != -100).sum())
            total += plain_loss((z, head, labels), (y, head), options) * number
            count += number
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / count)
    return losses


def test_four_ranks_equal_stock_models(tmp_path: Path) -> None:
    for name, sizes in (("student", STUDENT), ("teacher", TEACHER)):
        write_tiny_model(tmp_path / name, **sizes)
    data = tmp_path / "some.jsonl"
    lines = (tmp_path / "student" / "chats.jsonl").read_text().splitlines()[:24]
    data.write_text("\n".join(lines))
    run_ranks(4, train, tmp_path, over_gloo=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "student")
    examples = read_examples([data], tokenizer, seq_len=TOKENS).examples
    for layout, (_, options, unit) in LAYOUTS.items():
        losses = [line["loss"] for line in metrics(tmp_path / layout)]
        wanted = train_stock(tmp_path, examples, unit, options)
        assert losses == pytest.approx(wanted, rel=1e-5), layout


WORDS = "--objective distill --distill-teacher {teacher}"
BAD_WORDS = {
    "--objective distill": "--objective (distill) must have a teacher: give --distill-teacher",
    "--distill-teacher {teacher}": "--objective (sft) must be distill with options of [distill]",
    f"{WORDS} --dynamic-cp 9": "--dynamic-cp must not go with --objective distill",
    f"{WORDS} --distill-kd-ratio 0": "--distill-kd-ratio (0.0) must be a finite number > 0",
    f"{WORDS}/none": "--distill-teacher ({teacher}/none) must be a Hugging Face directory",
    WORDS: "must have the tokens and vocab_size (2048) of --model, not others (2056)",
}


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    from moecore.recipes.finetune import check_options, parse_arguments

    write_tiny_model(tmp_path / "student", **STUDENT)
    teacher = tmp_path / "teacher"
    write_tiny_model(teacher, **STUDENT)
    config = teacher / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 2056}))
    model = ["--model", str(tmp_path / "student"), "--data", "a"]
    for words, wanted in BAD_WORDS.items():
        with pytest.raises(ValueError) as error:
            check_options(parse_arguments([*model, *words.format(teacher=teacher).split()]), 1)
        text = str(error.value)
        assert wanted.format(teacher=teacher) in text and "\n" not in text, words
