import json
import math
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecore.cli import main
from moecore.io.hf.convert import hf_to_native
from moecore.recipes import generate, tiny_model

transformers = pytest.importorskip("transformers", minversion="5", reason="the commands use it")
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 8, "moe_intermediate_size": 16}
TEXTS = ["def f():\n    return 1\n", "one two three"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    tiny_model.write_tiny_model(folder / "tiny", **SIZES)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "texts.jsonl").write_text(lines)
    return folder / "tiny"


def stock(path: Path) -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    return model, transformers.AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("is_chat", [False, True])
def test_greedy_tokens_are_those_of_transformers(is_chat: bool, tiny: Path, capsys: Any) -> None:
    words = ["generate", str(tiny), "--prompt", "What is ast?", "--max-new-tokens", "6"]
    assert main([*words, *["--chat"] * is_chat]) == 0
    printed = capsys.readouterr().out
    model, tokenizer = stock(tiny)
    ids = tokenizer("What is ast?", return_tensors="pt")["input_ids"]
    if is_chat:
        chat = [{"role": "user", "content": "What is ast?"}]
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
    out = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    answer = tokenizer.decode(out)
    assert printed == ("" if is_chat else "What is ast?") + answer + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chat", "--prompt", "a"], "--prompt must fit the chat template of PATH: only tools"),
        (["--prompt", "\ud800"], "--prompt must fit the tokenizer of PATH: "),
    ],
    ids=["template", "surrogate"],
)
def test_a_prompt_that_cannot_be_encoded_is_one_line(words, message, tiny, tmp_path, capsys):
    shutil.copytree(tiny, tmp_path / "model")
    template = "{{ raise_exception('only tools\nare allowed') }}"
    for file in (tmp_path / "model").glob("*.jinja"):
        file.unlink()
    config = tmp_path / "model" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    assert main(["generate", str(tmp_path / "model"), *words]) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert len([line for line in error.splitlines() if line.startswith("moecore: ")]) == 1


def test_a_run_its_checkpoints_and_one_checkpoint_are_the_model(tiny, tmp_path, capsys) -> None:
    step = hf_to_native(tiny, tmp_path / "checkpoints", step=3)
    (tmp_path / "config.toml").write_text(f"model = {json.dumps(str(tiny))}\n")
    texts = set()
    for path in (tiny, tmp_path, tmp_path / "checkpoints", step):
        assert main(["generate", str(path), "--prompt", "What is", "--max-new-tokens", "6"]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


def test_a_checkpoint_without_a_config_names_the_conversion(tiny, tmp_path, capsys) -> None:
    step = hf_to_native(tiny, tmp_path / "checkpoints", step=3)
    (tmp_path / "config.toml").write_text('preset = "tiny"\n')
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 1
    error = capsys.readouterr().err
    words = re.findall("moecore (checkpoint convert .*) NEW_DIR --config CONFIG", error)[0].split()
    assert words[-1] == str(step)
    assert main([*words, str(tmp_path / "new"), "--config", str(tiny)]) == 0


def test_a_model_of_more_ids_than_bytes_must_have_a_tokenizer(tiny, tmp_path, capsys) -> None:
    (run := tmp_path / "run").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny / name, run / name)
    for words in (["generate", str(run), "--prompt=a"], ["evaluate", str(run), "--data=python:"]):
        assert main(words) == 1
        assert "must have a tokenizer for its 2048 ids: copy tok" in capsys.readouterr().err
    (run / "config.toml").write_text('tokenizer = "bytes"\n')  # the run trained on bytes
    assert main(["generate", str(run), "--prompt=a", "--max-new-tokens=1"]) == 0


@pytest.mark.parametrize("command", ["generate TINY --prompt=a", "finetune --model TINY --data a"])
def test_a_package_that_is_not_installed_is_one_line(command, tiny, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # then imports fail
    assert main(command.replace("TINY", str(tiny)).split()) == 1
    assert capsys.readouterr().err == (
        "moecore: transformers must be installed for this command: "
        "pip install '.[hf]' in a clone of moecore\n"
    )


def test_documents_are_cut_and_limited() -> None:
    documents = [list(text) for text in (b"abcd", b"a", b"ab", b"abc")]
    source = SimpleNamespace(documents=documents, tokenize=None)
    assert [ids.tolist() for ids in generate.iterate_documents(source, 3, 3, 256)] == [
        [[97, 98, 99]],
        [[97, 98]],
    ]
    assert len(list(generate.iterate_documents(source, 3, None, 256))) == 3


@torch.no_grad()
def test_the_loss_is_that_of_each_document_alone(tiny: Path, capsys: Any) -> None:
    words = ["evaluate", str(tiny), "--data", str(tiny.parent / "texts.jsonl"), "--seq-len", "8"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    model, tokens = stock(tiny)[0], generate.Tokenizer(str(tiny))
    losses = list[float]()
    for text in TEXTS:
        ids = torch.tensor([tokens(text)[:8]])
        logits = model(ids).logits[0, :-1].float()
        losses += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").tolist()
    mean = sum(losses) / len(losses)
    found = re.findall(r"[\d.]+", printed.partition(": ")[2])
    assert [float(found[0]), int(found[2])] == [pytest.approx(mean, abs=1e-4), len(losses)]
    assert float(found[1]) == pytest.approx(math.exp(mean), rel=1e-4)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("generate missing --prompt a", 1, "Hugging Face directory or a run: it is not there"),
        ("generate TINY/.. --prompt a", 1, "a run: it has neither config.json nor checkpoints"),
        ("generate TINY --prompt=", 1, "--prompt must have at least one token"),
        ("evaluate TINY --data missing.jsonl", 1, "missing.jsonl must be a readable file"),
        ("evaluate TINY --data a,weight=x", 2, "SourceOptions.weight ('x') must be a finite numbe"),
        ("evaluate TINY --data IDS", 1, "line 2: token id (2048) must be >= 0 and < vocab_size"),
        ("evaluate TINY --data TINY/chats.jsonl", 1, "number of lines, or set another field"),
        (
            "evaluate TINY --data TINY/chats.jsonl,field=messages",
            1,
            "chats.jsonl line 1: token ids ([{'role': 'user', 'content': 'What does abc",
        ),
        ("evaluate --data a", 2, "PATH must be set"),
        ("grpo --model a --data b", 2, "--reward must be set"),
    ],
)
def test_wrong_arguments_are_one_line(words, code, message, tiny, capsys) -> None:
    ids = tiny.parent / "ids.jsonl"
    ids.write_text('{"text": [1, 2047]}\n{"text": [2048, 1]}\n')
    assert main(words.replace("TINY", str(tiny)).replace("IDS", str(ids)).split()) == code
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("moecore: ") and message in line


def test_adapters_are_those_of_the_merged_export(finetune, tiny, tmp_path) -> None:
    peft = pytest.importorskip("peft", reason="adapters are those of peft")
    words = f"--model {tiny} --data {tiny}/chats.jsonl --max-steps 3 --seq-len 128 --batch-size 1"
    words += f" --lr 1e-2 --checkpoint-every 0 --eval-share 0 --lora-rank 4 --run-dir {tmp_path}"
    assert finetune.run_rank(finetune.parse_arguments(words.split())) == 0
    base, tokenizer = stock(tiny)
    ids = tokenizer("What does ast.parse do?", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        before = base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()(ids).logits
        merged = stock(tmp_path / "export")[0](ids).logits
    assert (merged - adapted).abs().max() < 1e-5 < 1e-3 < (merged - before).abs().max()
