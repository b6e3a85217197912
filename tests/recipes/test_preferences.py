import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.recipes.examples import read_examples
from moecore.recipes.finetune import parse_arguments
from moecore.recipes.finetune_config import check_objective
from moecore.recipes.preferences import encode_preference, encode_unpaired_preference
from moecore.recipes.rows import ColumnNames
from moecore.recipes.tiny_model import make_tokenizer
from tests.recipes.trl_parity import (
    RUNS,
    Case,
    Recorded,
    compare,
    make_folder,
    train_on_two_ranks,
    train_stock,
)

transformers = pytest.importorskip("transformers", reason="models of extra `hf`")
trl = pytest.importorskip("trl", reason="the oracle, of extra `trl`")
datasets = pytest.importorskip("datasets", reason="what TRL reads, of extra `train`")
BETA = 0.3
CASE = Case(objective="dpo", words=f"--dpo-beta {BETA}", rows=2, tokens=96, eval_share=0.2)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("dpo")
    rows = make_folder(folder)[:24]
    return folder, rows, train_on_two_ranks(folder, CASE, rows)


class RecordingTrainer(Recorded, trl.DPOTrainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


@pytest.mark.parametrize("run", RUNS)
def test_two_ranks_equal_trl(run: str, runs: tuple[Path, list[Any], dict[str, Tensor]]) -> None:
    folder, rows, grads = runs
    config = partial(trl.DPOConfig, beta=BETA)
    trainer = train_stock(RecordingTrainer, config, folder, CASE, run, rows)
    names = [f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")]
    found = compare(folder, run, trainer, grads, names)
    assert found[0]["loss"] == pytest.approx(0.693147, rel=1e-5)  # the policy is the reference
    assert abs(trainer.losses[-1] - trainer.losses[0]) > 0.01


def test_the_tokens_are_trls(
    runs: tuple[Path, list[Any], dict[str, Tensor]], tmp_path: Path
) -> None:
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


PAIRS = {
    "{}": "must have chosen and rejected, both texts or both messages",
    '{"chosen": "a", "rejected": [{"role": "assistant", "content": "b"}]}': "must have chosen and",
    '{"prompt": "q", "chosen": [{"role": "assistant", "content": "a"}], '
    '"rejected": [{"role": "assistant", "content": "b"}]}': "must have prompt in the form of",
    '{"prompt": [{"role": "user", "content": "q"}], "chosen": "q a", "rejected": "q b"}': (
        "must have prompt in the form of its completions"
    ),
    '{"chosen": "a", "rejected": "b"}': "must have a prompt before each completion: add one",
}
COMPLETIONS = {
    '{"prompt": "a", "label": true}': "must have prompt and completion, both texts or both",
    '{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}], "label": true}': (
        "must have prompt and completion, both texts or both messages"
    ),
    '{"prompt": "a", "completion": "b"}': "must have label, true or false, not None",
    '{"prompt": "a", "completion": "b", "label": 1}': "must have label, true or false, not 1",
    '{"prompt": "", "completion": "b", "label": true}': "must have a prompt before each completion",
}
BAD_ROWS = [(encode_preference, *row) for row in PAIRS.items()]
BAD_ROWS += [(encode_unpaired_preference, *row) for row in COMPLETIONS.items()]


@pytest.mark.parametrize(("encode", "line", "wanted"), BAD_ROWS)
def test_rows_that_are_no_pairs_or_completions(encode, line, wanted, tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line)
    tokenizer = make_tokenizer([("a", "b")])
    with pytest.raises(ValueError, match=wanted) as error:
        read_examples([path], tokenizer, seq_len=9, encode=encode)
    assert f"--data ({path}) line 1 must" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("is_repeated", [False, True])
def test_other_columns_and_one_message(is_repeated: bool, tmp_path: Path) -> None:
    """As ShareGPT's preferences have them: conversations, and a message of each answer."""
    path = tmp_path / "a.jsonl"
    row = {
        "talk": [turn("user", "a")],
        "good": turn("assistant", "b"),
        "bad": turn("assistant", "c"),
    }
    full_chats = {key: [*row["talk"], row[key]] for key in ("good", "bad")}
    path.write_text(json.dumps(row | full_chats if is_repeated else row))
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
        "--objective kto --cuda-graph": "--cuda-graph must not go with --objective kto",
        "--objective kto --dynamic-cp 8": "--dynamic-cp must not go with --objective kto",
        "--objective dpo --kto-beta 0.1": "--objective (dpo) must be kto with options of [kto]",
    }.items(),
)
def test_options_that_do_not_fit(words: str, wanted: str) -> None:
    args = parse_arguments(["--model", "a", "--data", "b", *words.split()])
    with pytest.raises(ValueError) as error:
        check_objective(args)
    assert wanted in str(error.value)
