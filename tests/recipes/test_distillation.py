"""`moecore finetune --objective distill` against stock transformers models and torch's AdamW."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file

from moecore.models.distillation import Distillation
from moecore.packing import PackedBatchSampler
from moecore.recipes.examples import read_examples
from moecore.recipes.tiny_model import write_tiny_model
from tests.families.transformers.family_models import SIZES, config_values
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
    "tp-cp": ("--tp 2 --cp 2 --ep 2 --batch-size 2 --grad-accum 2", FULL, 4),
    "pp": ("--pp 2 --schedule zero-bubble --ep 2 --batch-size 1 --grad-accum 2", TOP_K, 1),
}
# From log-probabilities that another layout has written. The slices of cp ranks are those of
# tests/models/test_distillation.py.
STORED = {
    "data": ("--ep 2 --batch-size 1", TOP_K, 1),
    "pp": LAYOUTS["pp"],
}
WRITTEN = "--tp 2 --ep 2 --batch-size 2"


def train(rank: int, device: torch.device, folder: Path) -> None:
    """Run all; files of the second data rank come late."""
    save = safetensors.torch.save_file
    safetensors.torch.save_file = lambda *args: (time.sleep(rank / 4), save(*args))
    live, stored = f"--distill-teacher {folder}/teacher", f"--distill-log-probs {folder}/k"
    runs = [(f"{live} {stored} --run-dir {folder}/write {WRITTEN}", make_options("reverse", 24))]
    runs += [
        (f"{source} --run-dir {folder}/{start}{layout} {degrees}", options)
        for start, source, layouts in (("", live, LAYOUTS), ("stored-", stored, STORED))
        for layout, (degrees, options, _) in layouts.items()
    ]
    for words, options in runs:
        words += f" {COMMON} --distill-kl-type {options.kl_type} --model {folder / 'student'} "
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
    stored = {f"stored-{layout}": case for layout, case in STORED.items()}
    for layout, (_, options, unit) in (LAYOUTS | stored).items():
        losses = [line["loss"] for line in metrics(tmp_path / layout)]
        wanted = train_stock(tmp_path, examples, unit, options)
        assert losses == pytest.approx(wanted, rel=1e-5), layout
    live, found = (
        load_file(tmp_path / layout / "export" / "model.safetensors")
        for layout in ("pp", "stored-pp")
    )
    assert all((found[name] - tensor).abs().max() <= 1e-5 for name, tensor in live.items())
    for path in (tmp_path / "k").iterdir():
        tensors = load_file(path)
        assert tensors["top_log_probs"].shape == (int(tensors["is_answer"].sum()), 24)


WORDS = "--objective distill --distill-teacher {teacher}"
BAD_WORDS = {
    "--objective distill": "--objective (distill) must have a teacher: give --distill-teacher",
    "--distill-teacher {teacher}": "--objective (sft) must be distill with options of [distill]",
    f"{WORDS} --no-fused-loss": "--no-fused-loss must not go with --objective distill",
    f"{WORDS} --dynamic-cp 9": "--dynamic-cp must not go with --objective distill",
    f"{WORDS} --distill-kd-ratio 0": "--distill-kd-ratio (0.0) must be a finite number > 0",
    f"{WORDS}/none": "--distill-teacher ({teacher}/none) must be a Hugging Face directory",
    f"{WORDS} --distill-log-probs a": "Distillation.top_k (None) must be set with teacher and",
    f"{WORDS} --distill-top-k 2 --distill-log-probs {{teacher}}": "must be a new directory",
    "--objective distill --distill-top-k 2": "Distillation.teacher (None) must be set, or",
    WORDS: "must have the tokens and vocab_size (2048) of --model, not others (2056)",
}


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    from moecore.recipes.finetune import build_reference, check_options, parse_arguments

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
    config.write_text(json.dumps(config_values("jamba", SIZES | {"vocab_size": 2048})))
    meshes: Any = SimpleNamespace(device_type="cpu")
    with pytest.raises(ValueError, match="must read packed rows, but layer_types"):
        build_reference(parse_arguments(model), teacher, meshes, meshes)


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    from moecore.recipes.chat import Example
    from moecore.recipes.teacher_files import TeacherFiles

    tokens, is_answer = torch.tensor([5, 6, 7, 8]).int(), torch.tensor([True, False, True, True])
    good = {
        "vocab_size": torch.tensor([9]),
        "cu_seqlens": torch.tensor([0, 4]),
        "input_ids": tokens,
        "is_answer": is_answer,
        "top_ids": torch.tensor([[8, 0, 3], [1, 2, 4]]).int(),
        "top_log_probs": torch.tensor([[-0.1, -3.0, -4.0], [-0.5, -1.0, -5.0]]),
    }
    bad: dict[str, tuple[dict[str, Any], str]] = {
        "vocab_size": ({"vocab_size": torch.tensor([10])}, "must have the vocab_size (9) of --mod"),
        "top_ids": (
            {"top_ids": torch.tensor([[9, 0, 3], [1, 2, 4]]).int()},
            "must have top_ids",
        ),
        "dtype": (
            {"top_ids": torch.ones(2, 3).long()},
            "must have top_ids of torch.int32, not",
        ),
        "shape": ({"is_answer": ~is_answer}, "must have the shapes of its cu_seqlens, not {"),
        "start": (
            {"cu_seqlens": torch.tensor([0, 6, 4])},
            "must have the shapes of its cu_seqlens, not {",
        ),
        "dims": (
            {"top_ids": torch.zeros(2, dtype=torch.int32)},
            "must have top_ids [M, k], k >= 1",
        ),
        "order": (
            {"top_log_probs": good["top_log_probs"].flip(1)},
            "must have finite top_log_probs in descending order",
        ),
        "nan": (
            {"top_log_probs": good["top_log_probs"] * torch.nan},
            "must have finite top_log_probs in descending order",
        ),
    }
    for name, (tensors, wanted) in {"good": ({}, ""), **bad}.items():
        (tmp_path / name).mkdir()
        save_file(good | tensors, tmp_path / name / "a.safetensors")
        if wanted:
            with pytest.raises(ValueError) as error:
                TeacherFiles(tmp_path / name, vocab_size=9, top_k=None)
            text = str(error.value)
            assert text.startswith("--distill-log-probs (") and wanted in text and "\n" not in text
    example = Example(tokens, is_answer)
    files = TeacherFiles(tmp_path / "good", vocab_size=9, top_k=2)
    files.check([example])
    ids, log_probs = files.read([example, example])
    assert torch.equal(ids, good["top_ids"][:, :2].repeat(2, 1))
    assert torch.equal(log_probs, good["top_log_probs"][:, :2].repeat(2, 1))
    with pytest.raises(ValueError, match=r"1 of 2 are missing, the first of 3 tokens"):
        files.check([example, example.cut(3)])
    with pytest.raises(ValueError, match=r"--distill-top-k \(4\) must be <= the tokens that --dis"):
        TeacherFiles(tmp_path / "good", vocab_size=9, top_k=4)
    with pytest.raises(ValueError, match=r"must have .safetensors files: write them first"):
        TeacherFiles(tmp_path / "none", vocab_size=9, top_k=4)
