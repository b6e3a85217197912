"""`moecore finetune --adapters`: each adapter equals stock peft's, trained alone on its data."""

import importlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from moecore.io import save_adapters
from moecore.packing import PackedBatchSampler
from moecore.recipes.examples import read_examples
from moecore.recipes.tiny_model import write_tiny_model
from tests.helpers.ranks import run_ranks
from tests.recipes.launched import metrics, rank_of_command
from tests.recipes.test_finetune import loss_of

transformers = pytest.importorskip("transformers", minversion="5")
peft = pytest.importorskip("peft")
STEPS, ROWS, TOKENS, RATE, EPS = 4, 2, 96, 3e-3, 1e-4  # rows of a step and adapter
NAMES = {"short": 14, "long": 26}  # examples of each adapter
EVALUATED = "short.jsonl"  # by all adapters
CLIP = 0.05  # below all norms, and the norms of the adapters differ
COMMON = (
    f"--lora-rank 4 --lr {RATE} --eps {EPS} --seq-len {TOKENS} --max-steps {STEPS} "
    f"--max-norm {CLIP} "
    "--lr-schedule constant --warmup-steps 0 --checkpoint-every 2 --ep 2 "
)
LAYOUTS = {  # data ranks times rows times micro-batches = ROWS; and documents are padded for cp
    "data": ("--batch-size 1", 1),
    "cp": ("--cp 2 --batch-size 1 --grad-accum 2", 4),
    "tp": ("--tp 2 --batch-size 2", 1),
}


def train(rank: int, device: torch.device, folder: Path) -> None:
    """Run all layouts, the first with a stop; write the adapters before the first step."""
    script = importlib.import_module("moecore.recipes.finetune")
    build_model = script.build_model

    def build(*args: Any, **options: Any) -> Any:
        model = build_model(*args, **options)
        for name in NAMES:
            save_adapters(model, folder / "first" / name, adapter=name)
        return model

    data = " ".join(f"{name}={folder / name}.jsonl" for name in NAMES)
    for layout, (degrees, _) in LAYOUTS.items():
        words = f"--eval-every 0 {COMMON} {degrees} --model {folder / 'tiny'} --adapters {data} "
        words += f"--run-dir {folder / layout}"
        words += f" --eval-every {STEPS} --eval-data {folder / EVALUATED}" if layout == "tp" else ""
        stops = ["--max-steps 2", ""] if layout == "data" else [""]
        for stop in stops:
            with patch.object(script, "build_model", build if stop else build_model):
                arguments = f"{words} {stop}".split()
                code, said = rank_of_command(rank, device, "finetune", 2, arguments)
            assert code == 0, said
        if layout == "data":
            assert "from step 2" in said or rank


def train_stock(folder: Path, name: str, unit: int) -> tuple[list[float], dict[str, Any], float]:
    """Return losses, final tensors and eval loss of peft's own steps of one adapter.

    The steps have an example at a time.
    """
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "tiny", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, folder / "first" / name, is_trainable=True)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, RATE, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tiny")
    examples, evaluated = (
        read_examples([folder / file], tokenizer, seq_len=TOKENS).examples
        for file in (f"{name}.jsonl", EVALUATED)
    )
    lengths = [-(-len(e.tokens_T) // unit) * unit for e in examples]
    sampler = PackedBatchSampler(lengths, TOKENS, rows=ROWS)
    steps, losses = [batch for _ in range(STEPS) for batch in sampler][:STEPS], []
    for numbers in steps:
        parts = [loss_of(model, examples[number]) for number in numbers]
        loss = sum(part for part, _ in parts) / sum(count for _, count in parts)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, CLIP)
        assert norm > CLIP
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        parts = [loss_of(model, example) for example in evaluated]
    loss = float(sum(part for part, _ in parts)) / sum(count for _, count in parts)
    return losses, peft.get_peft_model_state_dict(model), loss


def test_adapters_equal_separate_runs(tmp_path: Path) -> None:
    tiny = tmp_path / "tiny"
    sizes = dict(hidden_size=32, num_hidden_layers=2, head_dim=8, moe_intermediate_size=16)
    write_tiny_model(tiny, **sizes)
    lines = (tiny / "chats.jsonl").read_text().splitlines()
    for name, count in NAMES.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines[:count]))
        del lines[:count]
    run_ranks(2, train, tmp_path, over_gloo=True)
    for layout, (_, unit) in LAYOUTS.items():
        found = metrics(tmp_path / layout)
        means = torch.zeros(STEPS, dtype=torch.float64)
        for name in NAMES:
            losses, tensors, eval_loss = train_stock(tmp_path, name, unit)
            if layout == "tp":
                assert found[-1][f"eval_loss/{name}"] == pytest.approx(eval_loss, rel=1e-5)
            assert [line[f"loss/{name}"] for line in found] == pytest.approx(losses, rel=1e-5)
            means += torch.tensor(losses) / len(NAMES)
            folder = tmp_path / layout / "adapters" / name
            stored, first = (
                load_file(path / "adapter_model.safetensors")
                for path in (folder, tmp_path / "first" / name)
            )
            assert stored.keys() == tensors.keys()
            for key, tensor in tensors.items():
                assert (stored[key] - tensor).abs().max() < 1e-5, (layout, name, key)
                assert not torch.equal(tensor, first[key]), key
            peft.PeftConfig.from_pretrained(folder)
        assert [line["loss"] for line in found] == pytest.approx(means.tolist(), rel=1e-5)


LORA = "--lora-rank 4 --adapters"
BAD_WORDS = {
    "": "--data must be set: give it",
    "--adapters a=b": "--adapters must go with options of [lora]: give --lora-rank",
    f"{LORA} b": "--adapters (b) must be NAME=DATA, with letters",
    f"{LORA} a.b=c": "--adapters (a.b=c) must be NAME=DATA, with letters",
    f"{LORA} train=b": "--adapters (train=b) must not have the name of a method of nn.Module",
    f"{LORA} a=b --data c": "--data ((PosixPath('c'),)) must not go with --adapters",
    f"{LORA} a=b --aux-loss 0.1": "--aux-loss (0.1) must not go with --adapters",
    f"{LORA} a=b --clones": "--clones (True) must not go with --adapters",
    f"{LORA} a=b --pp 2 --ep 1": "--pp (True) must not go with --adapters",
    f"{LORA} a=b --no-lora-experts --lora-dora": "--lora-dora (True) must not go with --adapters",
    f"{LORA} a=b --optimizer muon": "--optimizer (muon) must be adamw with --lora-rank",
    f"{LORA} a=b --objective dpo": "--objective (dpo) must not go with --adapters",
}


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    from moecore.recipes.finetune import check_options, parse_arguments

    tiny = tmp_path / "tiny"
    sizes = dict(hidden_size=32, num_hidden_layers=2, head_dim=8, moe_intermediate_size=16)
    write_tiny_model(tiny, **sizes)
    for words, wanted in BAD_WORDS.items():
        with pytest.raises(ValueError) as error:
            check_options(parse_arguments(["--model", str(tiny), *words.split()]), 2)
        assert wanted in str(error.value) and "\n" not in str(error.value), words
    args = parse_arguments(["--model", str(tiny), *f"{LORA} a=b c=d a=e".split()])
    assert args.list_adapters() == {"a": (Path("b"), Path("e")), "c": (Path("d"),)}
