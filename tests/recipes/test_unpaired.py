"""KTO by `moecore finetune` on two ranks, against TRL's KTOTrainer in one process."""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from moecore.recipes import finetune
from moecore.recipes.examples import compute_examples_digest, read_examples
from moecore.recipes.preferences import encode_unpaired_preference, make_unpaired_batch
from moecore.recipes.tiny_model import make_tokenizer
from moecore.rl import KTO, Rollouts
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
BETA, DESIRABLE, UNDESIRABLE = 0.3, 1.5, 0.75
CASE = Case(
    objective="kto",
    words=f"--kto-beta {BETA} --kto-desirable-weight {DESIRABLE} "
    f"--kto-undesirable-weight {UNDESIRABLE}",
    rows=3,
    tokens=40,
    eval_share=0.25,
)


def label_pairs(pairs: list[Any]) -> list[dict[str, Any]]:
    """Return labelled completions, some of them longer than the row, from pairs."""
    rows = []
    for i, pair in enumerate(pairs[:36]):
        label = i % 3 != 1
        completion = pair["chosen" if label else "rejected"]
        rows.append({"prompt": pair["prompt"], "completion": completion, "label": label})
    return rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("kto")
    rows = label_pairs(make_folder(folder))
    return folder, rows, train_on_two_ranks(folder, CASE, rows)


class RecordingTrainer(Recorded, trl.KTOTrainer):
    """Completions rotate among the rows of one rank."""

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, name: str) -> Any:
        with patch.object(args, "per_device_train_batch_size", CASE.rows):
            return super()._prepare_dataset(dataset, processing_class, args, name)


@pytest.mark.parametrize("run", RUNS)
def test_two_ranks_equal_trl(run: str, runs: tuple[Path, list[Any], dict[str, Tensor]]) -> None:
    folder, rows, grads = runs
    config = partial(
        trl.KTOConfig, beta=BETA, desirable_weight=DESIRABLE, undesirable_weight=UNDESIRABLE
    )
    trainer = train_stock(RecordingTrainer, config, folder, CASE, run, rows)
    rewards = [f"rewards/{name}" for name in ("chosen", "rejected", "margins")]
    names = (*rewards, "kl", "logps/chosen", "logps/rejected")
    last = compare(folder, run, trainer, grads, names)[-1]
    assert last["kl"] > 0.01 and last["rewards/margins"] > 0.01


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
    assert make_unpaired_batch(cut[:1], length).mismatched.num_sequences == 0


def test_the_digest_has_labels(tmp_path: Path) -> None:
    tokenizer, digests = make_tokenizer([("a", "b")]), set()
    for label in (True, False):
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps({"prompt": "a", "completion": "b", "label": label}))
        found = read_examples([path], tokenizer, seq_len=99, encode=encode_unpaired_preference)
        digests.add(compute_examples_digest(found.examples))
    assert len(digests) == 2


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
