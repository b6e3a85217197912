import json
from pathlib import Path

import pytest
import torch

from moecore.recipes.generate import read_samples
from tests.recipes import test_pretrain

pytest.importorskip("transformers", reason="it generates from the export")
corpus = test_pretrain.corpus
PROMPTS = ("one two", "three")


@pytest.mark.slow
@pytest.mark.parametrize("degrees", ["--ep 2", "--cp 2 --batch-size 6", "--tp 2"])
def test_two_ranks_generate_what_transformers_does(degrees, corpus, tmp_path) -> None:
    """Greedy tokens after the last step, whose weights are those of the export."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = test_pretrain.words(corpus, tmp_path, f"{degrees} --sample-every 3 --sample-tokens 6")
    config = json.loads((corpus / "config.json").read_text()) | {"vocab_size": 274}  # tp divides it
    (tmp_path / "config.json").write_text(json.dumps(config))
    words[words.index("--hf-config") + 1] = str(tmp_path)
    said = test_pretrain.run_in_forks([*words, "--sample-prompts", *PROMPTS])
    assert "exporting" not in said  # it takes less than five seconds
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(s["step"], s["prompt"]) for s in samples] == [
        (n, p) for n in (3, 6, 8) for p in PROMPTS
    ]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    for sample in samples[-2:]:
        ids = tokenizer(sample["prompt"], return_tensors="pt")
        out_1T = model.generate(**ids, max_new_tokens=6, do_sample=False)
        expected = out_1T[0, ids["input_ids"].shape[1] :].tolist()
        assert sample["tokens"] == expected and sample["text"] == tokenizer.decode(expected)


def test_samples_of_later_steps_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    assert read_samples(file, before=3) == []
    lines = [json.dumps({"step": step, "text": "a"}) for step in (1, 2, 3, 4)]
    file.write_text("\n".join(lines) + "\n")
    assert read_samples(file, before=3) == lines[:2]
