"""moecore pretrain: a killed run goes on, on other ranks too; the export is what was trained.

What takes no ranks is in test_corpora.py, test_parser.py and tests/packing/test_corpus.py.
"""

import importlib
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moecore.io import set_latest
from tests.helpers.ranks import run_ranks
from tests.recipes.graph_stand_in import GraphStandIn
from tests.recipes.launched import metrics, rank_of_command
from tests.recipes.launched import run_in_forks as launched_forks

pytest.importorskip("transformers", reason="it reads what a run has exported")
STEPS, SEQ_LEN, EVAL_ROWS = 8, 16, 4
DEAR = ("torch.utils.tensorboard", "matplotlib.figure")  # packages that take seconds to import
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's config and tokenizer, text to mix with token ids, and a file to evaluate on."""
    folder = tmp_path_factory.mktemp("corpus")
    tiny = importlib.import_module("moecore.recipes.tiny_model")
    tokenizer = tiny.make_tokenizer([("one two three", "two three four")])
    tokenizer.save_pretrained(folder)
    tiny.make_model(tokenizer, **SIZES).config.save_pretrained(folder)
    words = "one two three four"
    texts = [{"text": f"{words[: 4 + i % 9]} {i}"} for i in range(40)]
    ids = [{"ids": [5 + (i + j) % 50 for j in range(1 + i % 20)]} for i in range(40)]
    for name, rows in (("text", texts), ("ids", ids), ("held_out", texts[:9])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def words(corpus: Path, run_dir: Path, more: str = "") -> list[str]:
    shape = f"--batch-size 3 --seq-len {SEQ_LEN} --checkpoint-every 4 --aux-loss 0 --workers 1"
    data = f"{corpus}/text.jsonl,name=text {corpus}/ids.jsonl,weight=2,field=ids,name=ids"
    held_out = f"{corpus}/held_out.jsonl,name=web --eval-rows {EVAL_ROWS} --eval-every 3"
    model = f"--hf-config {corpus} --tokenizer {corpus} --run-dir {run_dir} --steps {STEPS}"
    shape += " --base-width 16"  # rates of half the width: groups in checkpoints, a stock export
    return f"{shape} --data {data} --validation {held_out} {model} {more}".split()


def run_in_forks(words: list[str], **options: Any) -> str:
    """Run the ranks of the command; return what rank 0 prints."""
    return launched_forks("pretrain", words, without=DEAR, **options)


def rank_with_graphs(rank, device, words) -> tuple[tuple[int, str], list[list[tuple[int, ...]]]]:
    """Be a rank of the script with a graph's stand-in; return what it captured, too."""
    with patch.object(
        importlib.import_module("moecore.recipes.data"), "GraphedForwardBackward", GraphStandIn
    ):
        return rank_of_command(rank, device, "pretrain", 2, words, DEAR), GraphStandIn.captures


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that never stops."""
    run_dir = tmp_path_factory.mktemp("straight")
    run_in_forks(words(corpus, run_dir))
    return run_dir


def killed(straight: Path, run_dir: Path) -> Path:
    """What a run leaves that is killed in step 7: the checkpoint of step 4, later metrics."""
    shutil.copytree(straight, run_dir)
    set_latest(run_dir / "checkpoints" / "step-000004")
    shutil.rmtree(run_dir / "checkpoints" / "step-000008")
    shutil.rmtree(run_dir / "export")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:6]))
    return run_dir


def assert_near(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for mine, wanted in zip(found, expected, strict=True):
        for name in {"loss", "eval_loss", "grad_norm"} & wanted.keys():
            assert mine[name] == pytest.approx(wanted[name], rel=2e-5), (mine["step"], name)


@pytest.mark.slow
def test_a_killed_run_goes_on_on_any_ranks(corpus: Path, straight: Path, tmp_path: Path) -> None:
    run_dir, wider = killed(straight, tmp_path / "run"), killed(straight, tmp_path / "wider")
    assert "from step 4 to step 8 on 2 cpu ranks" in run_in_forks(words(corpus, run_dir))
    assert metrics(run_dir) == metrics(straight)
    more = f"--config {run_dir}/config.toml --run-dir {wider} --batch-size 2"
    assert "from step 4 to step 8 on 3 cpu ranks" in run_in_forks(more.split(), num_ranks=3)
    assert_near(metrics(wider), metrics(straight))


@pytest.mark.slow
def test_a_pipeline_reports_the_layers_of_all_stages(tmp_path: Path) -> None:
    run = "--preset tiny --tokens random --num-layers 3 --seq-len 16 --batch-size 1 --grad-accum 2"
    run += " --steps 1 --sample-every 0 --eval-every 0 --checkpoint-every 0 --aux-loss 0.01 --pp"
    for pp in (1, 2):
        run_in_forks(f"{run} {pp} --run-dir {tmp_path}/{pp}".split(), num_ranks=pp)
    (one,), (two,) = (metrics(tmp_path / str(pp)) for pp in (1, 2))
    loads = [row.pop(f"expert_loads/model.layers.{i}.mlp") for i in (1, 2) for row in (one, two)]
    assert loads[::2] == loads[1::2] and two == pytest.approx(one, rel=1e-5)
    assert {"balance_loss/model.layers.1.mlp", "balance_loss/model.layers.2.mlp"} <= two.keys()


@pytest.mark.slow
def test_weights_in_host_memory_are_the_same_run(corpus, straight, tmp_path) -> None:
    run_in_forks(words(corpus, tmp_path, "--offload-params"))
    assert metrics(tmp_path) == metrics(straight)
    assert "offload_params = true\n" in (tmp_path / "config.toml").read_text()


@pytest.mark.slow
def test_steps_of_any_number_of_documents_are_graphs(corpus, straight, tmp_path) -> None:
    """The stand-in asserts that all ranks have steps of the same shapes."""
    run = words(corpus, tmp_path / "run", "--cuda-graph")
    (code, said), captures = run_ranks(2, rank_with_graphs, run)
    assert code == 0, said
    assert captures
    assert_near(metrics(tmp_path / "run"), metrics(straight))


def test_other_shapes_are_a_graph_of_their_own(pretrain: ModuleType) -> None:
    graphs, GraphStandIn.captures = importlib.import_module("moecore.recipes.data"), []
    with patch.object(graphs, "GraphedForwardBackward", GraphStandIn):
        graphed = graphs.GraphedStep(torch.sum, torch.nn.Linear(1, 1))
    for number in (2, 2, 2, 2, 3, 3, 3, 3):
        x = torch.rand(number)
        assert graphed(x) == x.sum()
    assert GraphStandIn.captures == [[(2,)], [(3,)]]


@pytest.mark.slow
def test_a_run_goes_on_with_a_cp_per_micro_batch(corpus, straight, tmp_path) -> None:
    run_dir = killed(straight, tmp_path / "run")
    said = run_in_forks(words(corpus, run_dir, f"--dynamic-cp {SEQ_LEN // 2}"))
    assert "from step 4 to step 8 on 2 cpu ranks" in said
    assert f"dynamic_cp = {SEQ_LEN // 2}\n" in (run_dir / "config.toml").read_text()
    for mine, wanted in zip(metrics(run_dir)[4:], metrics(straight)[4:], strict=True):
        assert 0 <= mine["padding_share"] < 1
        for name in {"loss", "eval_loss", "grad_norm"} & wanted.keys():
            assert mine[name] == pytest.approx(wanted[name], rel=2e-5), (mine["step"], name)


@pytest.mark.slow
def test_transformers_has_the_loss_of_the_export(corpus: Path, straight: Path) -> None:
    """On the validation rows, piece by piece, with the tokenizer that lies beside the weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = straight / "export"
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(export)
    lines = (corpus / "held_out.jsonl").read_text().splitlines()
    documents = [
        [*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]
        for line in lines
    ]
    rows, left, total, labels = EVAL_ROWS + 2, SEQ_LEN, 0.0, 0  # 6: micro-batches of 3 on 2 ranks
    for document in documents * 9:
        while document and rows:
            piece, after = document[:left], document[left : left + 1]
            with torch.no_grad():
                logits_TV = model(torch.tensor([piece])).logits[0]
            wanted_T = torch.tensor([*piece[1:], *after], dtype=torch.int64)
            total += float(
                torch.nn.functional.cross_entropy(
                    logits_TV[: len(wanted_T)], wanted_T, reduction="sum"
                )
            )
            labels, left, document = labels + len(wanted_T), left - len(piece), document[left:]
            if not left:
                rows, left = rows - 1, SEQ_LEN
    assert rows == 0
    last = metrics(straight)[-1]
    assert last["eval_loss/web"] == last["eval_loss"] == pytest.approx(total / labels, rel=1e-5)


ERRORS = {
    "--data": "--data ([]) must have at least one source",
    "--data missing.jsonl": "missing.jsonl must be a readable file: No such file",
    "--data missing": "--data (missing) must be a .jsonl, .parquet or text file, the pre",
    "--data a.csv,skip_invalid=true": "--data (a.csv) must be a .jsonl file to have broken lines",
    "--data a.jsonl,size=2": "must have keys of path, weight, name, field",
    "--data a.jsonl,weight=x": "SourceOptions.weight ('x') must be a",
    "--data a.jsonl,weight=0": "SourceOptions.weight (0.0) must be",
    "--tokenizer .": "--tokenizer (.) must have a tokenizer: copy tokenizer.json and",
    "--base-width 3": "dim (3) must leave DecoderConfig.num_heads whole, which is 4 with dim 128",
    "--num-layers 0": "--num-layers (0) must be",
    "--vocab-size 200": "--tokenizer (bytes, 256 ids) must have <= vocab_size (200)",
    "--offload-fraction 0.5": "MemoryOptions.offload_fraction (0.5) must go with offload",
    "--precision blockwise --scaling tensorwise": "--precision (blockwise) must not go with",
    "--layout Et|tL": "--pp (None) must be > 1 with options of [pipeline]",
    "--drop position": "[capacity] ({'drop': 'position'}) must have factor",
    "--hf-config missing": "--hf-config (missing) must be a config.json, its directory or",
    "--config missing.toml": "--config (missing.toml) must be a readable file",
    "--cuda-graph --pp 2": "--cuda-graph must not go with --pp 2, whose micro-batches wait",
    "--cuda-graph --dynamic-cp 512": "--cuda-graph must not go with --dynamic-cp 512, whose",
    "--offload-params --optimizer muon": "--offload-params must not go with --optimizer muon",
    "--offload-params --state-offload 1": "--offload-params must not go with --state-offload",
    "--offload-params --move-experts-every 2": "must not go with --move-experts-every, which sends",
    "--cp 3": "must be a multiple of 6 with --cp 3",
    "--dynamic-cp 128": "--dynamic-cp (128) must be >= what each of 1 data ranks holds",
    "--dynamic-cp 0": "--dynamic-cp (0) must be a multiple of 2 with --tp (1), a power of two",
    "--dynamic-cp 512 --cp 3 --seq-len 240": "--dynamic-cp (512) must go with --cp (3) = 1",
    "--seq-len 4096": "--seq-len (4096) must be <= max_seq_len (512) of the model",
    "--sample-every 2 --sample-prompts": "SampleOptions.sample_every (2) must be 0 without",
    "--sample-every 2 --sample-prompts ab --sample-tokens 511": (
        "sample_tokens (511) and the 2 of prompt 'ab' must be <= max_seq_len (512)"
    ),
    "--sample-every 2 --sample-prompts ab --pp 2": "sample_every (2) must be 0 with --pp 2: sample",
}


@pytest.mark.parametrize("wrong", ERRORS)
def test_wrong_arguments_are_one_line(wrong, pretrain, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    data = [] if "--data" in wrong else ["--data", "a.jsonl"]
    wrong = wrong if wrong != "--data" else ""
    try:
        args = pretrain.parse_arguments(["--run-dir", "run", *data, *wrong.split()])
        pretrain.check_options(args, 3 if "--cp" in wrong else 2 if "--sample" in wrong else 1)
        tokenizer = pretrain.Tokenizer(args.tokenizer)
        for options in args.data:
            pretrain.open_source(options, tokenizer)
    except ValueError as error:
        said = str(error)
        assert "\n" not in said
    assert ERRORS.get(wrong, ERRORS["--data"]) in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (
            '{"text": ',
            2,
            "a.jsonl line 2 must be a JSON object with 'ids', not '{\"text\":' (broken",
        ),
        (
            '{"ids": [1, 256]}',
            1,
            "a.jsonl line 2: token id (256) must be >= 0 and < vocab_size (25",
        ),
        (
            '{"body": "x"}',
            2,
            "a.jsonl line 2 must be a JSON object with 'ids', not '{\"body\": \"x",
        ),
    ],
)
def test_a_bad_document_ends_the_run_with_one_line(line, code, message, pretrain, tmp_path, capsys):
    """Before the first step, or in a worker, whose traceback nobody sees."""
    (tmp_path / "a.jsonl").write_text(f"\r\n{line}")
    arguments = f"--data {tmp_path}/a.jsonl,field=ids --workers 1 --run-dir {tmp_path}/run"
    assert pretrain.run_rank(pretrain.parse_arguments(arguments.split())) == code
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert said.startswith("moecore: error: ") and message in said


@pytest.mark.slow
def test_losses_that_are_not_finite_end_the_run(pretrain, tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' * 3)
    build = pretrain.build_model

    def broken(*args: Any) -> Any:
        model = build(*args)
        next(model.parameters()).data.fill_(float("nan"))
        return model

    monkeypatch.setattr(pretrain, "build_model", broken)
    arguments = f"--data {tmp_path}/a.jsonl --run-dir {tmp_path}/run --workers 0 --num-layers 1"
    arguments += " --batch-size 1 --seq-len 8 --dense-layers --mlp-hidden-dim 0"
    assert pretrain.run_rank(pretrain.parse_arguments(arguments.split())) == 1
    assert "loss (nan) of step 10 and of the 9 before it must be finite" in capsys.readouterr().err
    assert all(line["skipped"] for line in metrics(tmp_path / "run"))
