import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from moecore.recipes.corpora import SourceOptions
from moecore.recipes.generate import encode_prompt
from moecore.recipes.grpo_job import read_prompts
from moecore.recipes.preferences import encode_preference
from moecore.recipes.rows import ColumnNames, DatasetOptions, Row
from tests.packing.test_corpus_files import BIN, IDX, written

source_of = SourceOptions.from_word
TEXTS = [f"document {i} " * (1 + i % 4) for i in range(30)]


def tokens_of(pretrain: ModuleType, word: str, *, workers: int = 0, steps: int = 20) -> Any:
    """Rows of one source, without padding."""
    from moecore.recipes.data import BatchShape

    source = pretrain.open_source(source_of(word), pretrain.Tokenizer("bytes"))
    options = pretrain.CorpusOptions(row_tokens=16, shuffle_buffer=7, partitions=8)
    shape = BatchShape(data_ranks=1, grad_accum=2, batch_size=2, seq_len=16)
    steps_of = pretrain.CorpusSteps([source], options, shape, data_rank=0, workers=workers)
    batches = [steps_of.next_batch() for _ in range(steps)]
    steps_of.sampler.close()
    return batches


def test_paths_of_each_kind(pretrain: ModuleType, tmp_path: Path) -> None:
    prefix = written(tmp_path, idx=IDX, bin_=BIN)
    (tmp_path / "b.jsonl").write_text('{"body": "ab"}\n{"body": [1, 2]}\n')
    for word, wanted in {
        f"{prefix}": [[1, 2, 3, 258], [], [7, 8]],
        f"{prefix}.bin": [[1, 2, 3, 258], [], [7, 8]],
        f"{tmp_path}/b.jsonl,field=body": [[97, 98], [1, 2]],
    }.items():
        source = pretrain.open_source(source_of(word), pretrain.Tokenizer("bytes"))
        assert [list(source.tokenize(document)) for document in source.documents] == wanted


def test_broken_lines_are_counted_and_left_out(pretrain: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ab"}\n\n{"text": \n{"body": "c"}\n{"text": "d"}\n')
    source = pretrain.open_source(
        source_of(f"{path},skip_invalid=true"), pretrain.Tokenizer("bytes")
    )
    assert [source.tokenize(document) for document in source.documents] == [[97, 98], [100]]
    assert (source.documents.num_invalid, source.documents.num_empty) == (2, 1)
    with pytest.raises(ValueError, match=r"a\.jsonl line 3 must be a JSON object with 'text', not"):
        pretrain.open_source(source_of(f"{path}"), pretrain.Tokenizer("bytes"))


@pytest.mark.parametrize("blank", ["\r", "   ", "\t\r", "\ufeff", "\x85", "\xa0\u2028"])
def test_each_reader_leaves_out_lines_without_content(blank, pretrain, tmp_path) -> None:
    from moecore.recipes.rows import ColumnNames, DatasetOptions, read_rows

    path = tmp_path / "a.jsonl"
    text = f'\ufeff{{"text": "a\u2028"}}\r\n{blank}\n{{"text": "b"}}{blank}\n{blank}'
    path.write_bytes(text.encode())
    source = pretrain.open_source(source_of(f"{path}"), pretrain.Tokenizer("bytes"))
    texts = [bytes(source.tokenize(document)).decode() for document in source.documents]
    assert texts == ["a\u2028", "b"]
    rows = read_rows([path], "--data", DatasetOptions())
    assert [row.select_columns(ColumnNames())["text"] for row in rows] == ["a\u2028", "b"]


def test_the_last_documents_are_held_out(pretrain: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("one document")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS * 2))
    lines, plain = (
        pretrain.open_source(source_of(f"{tmp_path / name}"), pretrain.Tokenizer("bytes"))
        for name in ("a.jsonl", "plain")
    )
    (kept,), (held,) = pretrain.split_sources([lines])
    found = [[bytes(of.tokenize(d)).decode() for d in of.documents] for of in (kept, held)]
    assert found == [(TEXTS * 2)[:57], (TEXTS * 2)[57:]] and held.name == lines.name
    assert held.documents.location(0) == lines.documents.location(57)
    assert kept.documents.fingerprint != held.documents.fingerprint
    assert list(plain.documents) == ["one document"]
    with pytest.raises(ValueError, match=r"plain\) must have a number of documents >= 2 with --ev"):
        pretrain.split_sources([plain])


def test_errors_of_sources_are_short(pretrain: ModuleType) -> None:
    from moecore.recipes.corpora import DocumentEncoder

    long, bytes_ = "x" * 5000, pretrain.Tokenizer("bytes")
    row = {f"field_{i}": "" for i in range(5000)}
    for call in (
        lambda: DocumentEncoder(bytes_, long)(row),
        lambda: source_of(f"{long},{long}=1"),
        lambda: source_of(f"{long},weight={long}"),
        lambda: pretrain.open_source(source_of(long), bytes_),
        lambda: pretrain.open_source(source_of(f"{long}.jsonl"), bytes_),
        lambda: pretrain.open_source(source_of(f"{long},stream=true"), bytes_),
    ):
        with pytest.raises(ValueError, match=r"must (have|be)") as error:
            call()
        assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (".", r"^--data \(\.\) must be a .jsonl, .parquet or text file"),
        ("/", r"^--data \(/\) must be a .jsonl, .parquet or text file"),
        ("empty.txt", r"^--data \(empty.txt\) must have text, but it is empty: leave it out"),
    ],
)
def test_paths_without_documents_are_refused(path, message, pretrain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=message):
        pretrain.open_source(source_of(path), pretrain.Tokenizer("bytes"))


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["/data/web.v2.jsonl", "hf:org/books", "/x/code_text"], ["web.v2", "books", "code_text"]),
        (["a/web.jsonl", "b/web.jsonl", "b/code.jsonl"], ["a/web", "b/web", "code"]),
        (["a/web.jsonl", "a/web"], ["a/web.jsonl", "a/web"]),
        (["a/x.jsonl,name=y", "b/y.jsonl"], ["y", "b/y"]),
        (["x.jsonl", "x.jsonl"], ["x.jsonl", "x.jsonl"]),  # refused where sources are joined
        ([".", "/"], [".", "/"]),
    ],
)
def test_a_source_is_called_as_its_file(words, names, pretrain) -> None:
    """In any order: a run goes on under the names of its checkpoint."""
    for order in (1, -1):
        args = pretrain.parse_arguments(["--data", *words[::order]])
        assert [source.name for source in args.data] == names[::order]


# What the tokenizer adds around a text, its bos and eos tokens, and the borders of a document.
BORDERS = {
    "none": (None, "<s>", "</s>", [], [2]),
    "begin": ("<s> $A", "<s>", "</s>", [1], [2]),
    "begin and end": ("<s> $A </s>", "<s>", "</s>", [1], [2]),
    "end": ("$A </s>", None, "</s>", [], [2]),
    "equal": ("</s> $A", "</s>", "</s>", [2], [2]),
    "two to begin": ("<m> <s> $A", "<s>", "</s>", [5, 1], [2]),
    "another end": ("<s> $A <m>", "<s>", "</s>", [1], [5, 2]),
    "no end": ("<s> $A", "<s>", None, [1], []),
}


def tokenizer_of(template: str | None, bos: str | None, eos: str | None) -> Any:
    """A tokenizer whose ids are <unk> 0, <s> 1, </s> 2, a 3, b 4, <m> 5."""
    transformers = pytest.importorskip("transformers", minversion="5")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = {"<s>": 1, "</s>": 2, "<m>": 5}
    words = models.WordLevel({"<unk>": 0, "a": 3, "b": 4, **special}, unk_token="<unk>")
    made = Tokenizer(words)
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(special))
    if template is not None:
        made.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=list(special.items())
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token=bos, eos_token=eos
    )


@pytest.mark.parametrize("kind", BORDERS)
def test_documents_begin_and_end_once(kind: str, pretrain: ModuleType, tmp_path: Path) -> None:
    """In pre-training and in fine-tuning, whether or not the text spells the borders itself."""
    chat = importlib.import_module("moecore.recipes.chat")
    template, bos, eos, begin, end = BORDERS[kind]
    hf = tokenizer_of(template, bos, eos)
    hf.save_pretrained(tmp_path)
    tokenizer = pretrain.Tokenizer(str(tmp_path))
    names = {1: "<s>", 2: "</s>", 5: "<m>"}
    before, after = (" ".join(names[i] for i in part) for part in (begin, end))
    ids = [*begin, 3, 4, *end]
    for text in ("a b", f"a b {after}", f"{before} a b", f"{before} a b {after} {after}"):
        assert tokenizer(text) == ids, text
        (whole,) = chat.encode_record({"text": text}, hf, seq_len=99, location="")
        first, _, second = text.rpartition(" b")
        both = {"prompt": first, "completion": f" b{second}"}
        (answer,) = chat.encode_record(both, hf, seq_len=99, location="")
        for found, learned in ((whole, 2), (answer, 1)):
            assert found.tokens_T.tolist() == ids, text
            wanted = [False] * (len(begin) + 2 - learned) + [True] * (learned + len(end))
            assert found.is_answer_T.tolist() == wanted, text
        pair = Row("row", {"prompt": first, "chosen": f" b{second}", "rejected": f" a{second}"})
        (preference,) = encode_preference(pair, hf, 99, DatasetOptions(), ColumnNames())
        tokens = [part.tokens_T.tolist() for part in preference.parts]
        assert tokens == [ids, [*begin, 3, 3, *end]], text
        answers = [part.is_answer_T.tolist() for part in preference.parts]
        assert answers == [wanted, wanted], text
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text(json.dumps({"prompt": text}) + "\n")
        (prompt,) = read_prompts([prompts], hf, options=None, columns=None, max_tokens=99)
        assert prompt.ids == encode_prompt(tokenizer, text, is_chat=False) == [*begin, 3, 4], text
    assert tokenizer("a </s> <m> b") == [*begin, 3, 2, 5, 4, *end]  # a border inside is a token
    assert tokenizer("") == []


@pytest.mark.slow
def test_data_sets_on_disk_and_streamed(pretrain: ModuleType, tmp_path: Path) -> None:
    """A stream has all its rows in every worker, and the rows of a list in the same order."""
    datasets = pytest.importorskip("datasets", reason="sources are its data sets")
    dataset = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(30))})
    dataset.save_to_disk(tmp_path / "disk")
    folder = tmp_path / "files"
    folder.mkdir()
    for part in range(2):  # as many as workers
        rows = [json.dumps({"text": text}) for text in TEXTS[15 * part : 15 * part + 15]]
        (folder / f"{part}.jsonl").write_text("\n".join(rows) + "\n")
    # The order depends on the path. 30 steps have 15 rows of each of the 8 partitions: 240 tokens,
    # more than the four longest documents of a partition's first epoch.
    on_disk = tokens_of(pretrain, f"{tmp_path}/disk", steps=30)
    stream = f"hf:{folder},stream=true"
    alone = tokens_of(pretrain, stream, steps=30)
    shared = tokens_of(pretrain, stream, workers=2, steps=30)
    for one, two in zip(alone, shared, strict=True):
        assert torch.equal(one.tokens_ABT, two.tokens_ABT)
    for batches in (on_disk, alone):
        tokens = torch.cat([batch.tokens_ABT.flatten() for batch in batches])
        found, wanted = (
            torch.bincount(torch.as_tensor(list(part)), minlength=128)
            for part in (bytes(tokens.tolist()), "".join(TEXTS).encode())
        )
        assert len(tokens) == 1920 and (found >= wanted).all()
    with pytest.raises(ValueError, match=r"--data \(hf:.*none\) must be a data set that loads"):
        tokens_of(pretrain, f"hf:{tmp_path}/none")


def test_steps_count_labels_and_documents(pretrain: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    for batch in tokens_of(pretrain, f"{tmp_path}/a.jsonl", steps=3):
        labels, tokens, *_ = batch.count_labels_and_tokens().tolist()
        assert labels == int((batch.labels_ABT >= 0).sum()) and tokens == 2 * 2 * 16
        borders = batch.cu_seqlens_An
        assert (borders.diff() >= 0).all() and (borders[:, -1] == 32).all()
        assert borders.shape[1].bit_count() == 1  # a power of two
