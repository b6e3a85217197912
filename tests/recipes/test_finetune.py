"""moecore finetune from a tiny model to an exported one, against stock transformers.

The oracle trains transformers' own model, one example at a time, neither packed nor padded, by
torch's AdamW. Two ranks, one rank, and a run that stopped and went on compute the same.
"""

import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from moecore import (
    FSDPOptions,
    MemoryOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.precision import Precision
from moecore.cli import main
from moecore.families import use_causal_attention
from moecore.models import flops_per_token
from moecore.packing import PackedBatchSampler
from moecore.parallel.model.parallel_state import get_parallel_state
from moecore.planning.recipe import format_recipe
from moecore.planning.run import OptimizerOptions, TrainingRun
from moecore.planning.transformers import TransformersModel
from moecore.recipes import hf_model, optimizer
from tests.families.transformers.family_models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.recipes.graph_stand_in import GraphStandIn
from tests.recipes.launched import metrics, rank_of_command
from tests.recipes.test_train import tensors

transformers = pytest.importorskip("transformers", minversion="5")
STEPS, STOP_AT = 6, 5
ROWS, TOKENS = 8, 96  # of a step
SIZES = dict(hidden_size=32, num_hidden_layers=2, head_dim=8, moe_intermediate_size=16)
COMMON = f"--lr 3e-3 --seq-len {TOKENS} --batch-size 2 --max-steps {STEPS} --eval-every 3"
SAVING = "--checkpoint-every 2"
WIDE = dict(hidden_size=128, num_hidden_layers=2, head_dim=32, moe_intermediate_size=128)
TWO_RANKS, ONE_RANK = "--grad-accum 2 --ep 2", "--grad-accum 4 --recompute"
SHARED = {"cp": "--ep 2", "tp": "--ep 2", "pp": "--schedule zero-bubble"}  # rows of both ranks


class Stopped(BaseException):
    """The host went down."""


def arguments(folder: Path, run: str, more: str) -> list[str]:
    model = [] if "--config" in more else ["--model", str(folder / "tiny")]
    where = [*model, "--run-dir", str(folder / run)]
    return [*where, "--data", str(folder / "tiny" / "some.jsonl"), *f"{COMMON} {more}".split()]


def least_memory(folder: Path) -> TrainingRun:
    """The planned run of the wide model in bf16 in which all options save memory."""
    return TrainingRun(
        model=TransformersModel.of(folder / "wide-bf16"),
        num_gpus=2,
        parallel=ParallelConfig(ep=2),
        seq_len=TOKENS,
        batch_size=2,
        num_micro_batches=2,
        fsdp=FSDPOptions(
            param_dtype=torch.bfloat16,
            experts_strategy="optim_grads_params",
            fp8_param_gather=True,
        ),
        memory=MemoryOptions(
            offload=("attention", "experts"),
            recompute=("norm", "rope", "qkv_proj"),
        ),
        precision=Precision.of("blockwise"),
        optimizer=OptimizerOptions(
            moment_dtype="float8_e4m3fn",
            master_remainder=True,
            offload_fraction=1.0,
        ),
    )


def check_planned(run: TrainingRun, *, model: Any, optimizers: list[Any], **_: Any) -> None:
    """The run has each option of the plan."""
    request, (adamw,) = get_parallel_state(model).request, optimizers
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert adamw.master_remainder and adamw.moment_dtype == torch.float8_e4m3fn
    assert (request.memory, request.fsdp) == (run.memory, run.fsdp)
    assert request.precision == run.precision and request.meshes.parallel == run.resolved


def on_two_ranks(rank: int, device: torch.device, folder: Path) -> list[str]:
    """Run straight, then with a stop; return what each start prints on this rank."""
    script = importlib.import_module("moecore.recipes.finetune")
    loop = importlib.import_module("moecore.recipes.loop")

    def start(run: str, words: str = f"{TWO_RANKS} {SAVING}", wanted: int = 0) -> str:
        is_saved = "config.toml" in words
        all_words = words.split() if is_saved else arguments(folder, run, words)
        code, said = rank_of_command(rank, device, "finetune", 2, all_words)
        assert code == wanted, said
        return said

    straight = start("straight")
    with patch.object(script, "compute_examples_digest", lambda examples: f"of rank {rank}"):
        other = start("other", wanted=2)
    start("dynamic", f"{TWO_RANKS} --checkpoint-every 0 --dynamic-cp {TOKENS // 2}")
    with patch.object(
        importlib.import_module("moecore.recipes.data"), "GraphedForwardBackward", GraphStandIn
    ):
        start("graphs", f"{TWO_RANKS} --checkpoint-every 0 --cuda-graph")
    assert len(GraphStandIn.captures) == 1, "all steps have the same shapes"
    for degree, more in SHARED.items():
        start(degree, f"--grad-accum 4 --{degree} 2 {more} --checkpoint-every 0")
    start("wide", f"--model {folder / 'wide'} {TWO_RANKS} --checkpoint-every 0")
    planned, file = least_memory(folder), folder / "plan.toml"
    if rank == 0:
        file.write_text(format_recipe(planned, folder / "wide-bf16"))
    torch.distributed.barrier()
    make_job = script.FineTuning.__init__
    with (
        patch.object(script.FineTuning, "__init__", autospec=True, side_effect=make_job) as job,
        patch.object(optimizer, "StateOffload", wraps=optimizer.StateOffload) as offload,
    ):
        start("small", f"--config {file} --checkpoint-every 0")
    check_planned(planned, **job.call_args.kwargs)
    assert offload.call_args.kwargs == {"fraction": 1.0}
    train_step = loop.train_step

    def stops(job: Any, step: int, **options: Any) -> Any:
        if step == STOP_AT:
            raise Stopped
        return train_step(job, step, **options)

    with patch.object(loop, "train_step", stops), pytest.raises(Stopped):
        start("stopped")
    if rank == 0:
        (folder / "stopped" / ".export.draft").mkdir()  # of an export that was stopped, too
    saved = f"{folder}/stopped/config.toml"
    resumed = start("stopped", saved)  # by its own file
    export = folder / "stopped" / "export"  # as of a shorter run
    (export / "config.json").write_text("{}")
    os.utime(export, (0, 0))
    return [straight, resumed, start("stopped", f"{saved} --checkpoint-every 3"), other]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of all runs on two ranks, and what they print."""
    folder = tmp_path_factory.mktemp("runs")
    make = importlib.import_module("moecore.recipes.tiny_model").write_tiny_model
    make(folder / "tiny", **SIZES)
    make(folder / "wide", **WIDE)
    config = json.loads((folder / "tiny" / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts")  # as published
    (folder / "tiny" / "config.json").write_text(json.dumps(config))
    shutil.copytree(folder / "wide", folder / "wide-bf16")
    weights = folder / "wide-bf16" / "model.safetensors"
    narrow = {name: tensor.bfloat16() for name, tensor in load_file(weights).items()}
    save_file(narrow, weights, metadata={"format": "pt"})
    chats = (folder / "tiny" / "chats.jsonl").read_text().splitlines()[:40]
    (folder / "tiny" / "some.jsonl").write_text("\n".join(chats))
    return folder, run_ranks(2, on_two_ranks, folder)


def in_this_process(script: ModuleType, folder: Path, run: str, more: str) -> int:
    return script.run_rank(script.parse_arguments(arguments(folder, run, more)))


def stock(path: Path) -> Any:
    """Return transformers' own model of a directory; on memory that is aligned as any other."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def loss_of(model: Any, example: Any) -> tuple[torch.Tensor, int]:
    """Return the sum over an example's answers, and how many tokens these have."""
    tokens_1T = example.tokens_T.long()[None]
    logits_TV = model(input_ids=tokens_1T[:, :-1]).logits[0]
    learned_T = example.is_answer_T[1:]
    labels_N = tokens_1T[0, 1:][learned_T]
    return F.cross_entropy(logits_TV[learned_T], labels_N, reduction="sum"), len(labels_N)


def exported(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights that a run leaves, by their published names."""
    files = (run / "export").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def mean_loss(model: Any, examples: list[Any]) -> float:
    with torch.no_grad():
        sums = [loss_of(model, example) for example in examples]
    return float(sum(s for s, _ in sums)) / sum(n for _, n in sums)


def examples_of(finetune: ModuleType, folder: Path) -> tuple[list[Any], list[Any]]:
    args = finetune.parse_arguments(arguments(folder, "unused", ""))
    _, examples, held_out = finetune.read_data(args, vocab_size=9999)
    return examples, held_out


def steps_of(examples: list[Any], multiple: int = 1) -> Iterator[list[int]]:
    """Yield the examples of each step, packed into its rows, with lengths of a multiple."""
    lengths = [-(-len(one.tokens_T) // multiple) * multiple for one in examples]
    sampler = PackedBatchSampler(lengths, TOKENS, rows=ROWS)
    while True:
        yield from sampler


def oracle(finetune, folder, multiple=1) -> tuple[list[float], list[float], Any]:
    """Return the losses of all steps, the gradient norms, and the model that was trained."""
    from moecore.recipes.schedule import LearningRateSchedule

    examples, _ = examples_of(finetune, folder)
    steps, model = steps_of(examples, multiple), stock(folder / "tiny").train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        parts = [loss_of(model, examples[number]) for number in next(steps)]
        loss = sum(part for part, _ in parts) / sum(n for _, n in parts)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.param_groups[0]["lr"] = 3e-3 * LearningRateSchedule().compute_factor(
            step, num_steps=STEPS, count_steps=int
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, model.eval()


def test_two_ranks_equal_stock_transformers(runs, finetune) -> None:
    folder, printed = runs
    lines = metrics(folder / "straight")
    losses, norms, model = oracle(finetune, folder)
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-5)
    assert [line["grad_norm"] for line in lines] == pytest.approx(norms, rel=1e-4)
    assert losses[-1] < losses[0] - 0.1
    _, held_out = examples_of(finetune, folder)
    after = mean_loss(model, held_out)
    assert lines[-1]["eval_loss"] == pytest.approx(after, rel=1e-5)
    assert [i for i, line in enumerate(lines, 1) if "eval_loss" in line] == [3, 6]
    before = mean_loss(stock(folder / "tiny"), held_out)
    assert f"eval loss {before:.3f} before the first step" in printed[0]
    assert "to step 6 on 2 cpu ranks (dp_shard=2 ep=2): 38 examples, 2 held out" in printed[0]


def test_one_rank_computes_the_same_and_routes_no_padding(runs, finetune, tmp_path, monkeypatch):
    folder, _ = runs
    shutil.copytree(folder / "tiny", tmp_path / "tiny")
    (tmp_path / "tiny" / "generation_config.json").unlink()  # which an export then makes
    routed: list[float] = []
    loop = importlib.import_module("moecore.recipes.loop")
    launched = loop.LaunchedStep

    def seen(**fields: Any) -> Any:
        counts_of = fields["result"].metrics.tokens_per_expert
        routed.extend(float(counts.sum()) for counts in counts_of.values())
        return launched(**fields)

    monkeypatch.setattr(loop, "LaunchedStep", seen)
    words = f"{ONE_RANK} --checkpoint-every 0 --peak-tflops 2"
    assert in_this_process(finetune, tmp_path, "one", words) == 0
    examples, _ = examples_of(finetune, folder)
    steps = [next(numbers) for numbers in [steps_of(examples)] * STEPS]
    real = [sum(len(examples[number].tokens_T) for number in step) for step in steps]
    assert routed == [2.0 * count for count in real for _ in range(2)]  # top 2, in both layers
    assert max(len(step) for step in steps) > ROWS and min(real) < ROWS * TOKENS - 9
    logged = (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()
    lines, config = map(json.loads, logged), finetune.find_decoder_config(tmp_path / "tiny")
    for line, step, tokens in zip(lines, steps, real, strict=True):
        lengths = [len(examples[number].tokens_T) for number in step]
        flops = sum(n * flops_per_token(config, n) for n in lengths)
        assert line["mfu"] == pytest.approx(flops / tokens * line["tokens_per_second"] / 2e12)
        assert line["padding_share"] == pytest.approx(1 - tokens / (ROWS * TOKENS))
    found, wanted = metrics(tmp_path / "one"), metrics(folder / "straight")
    for name in ("loss", "eval_loss", "lr", "answer_tokens"):
        pair = [[line[name] for line in lines if name in line] for lines in (found, wanted)]
        assert len(pair[0]) in (2, STEPS) and pair[0] == pytest.approx(pair[1], rel=1e-5), name
    made = json.loads((tmp_path / "one" / "export" / "generation_config.json").read_text())
    assert made["eos_token_id"] == 2


def test_ranks_with_other_data_raise(runs: tuple[Path, list[str]]) -> None:
    other = runs[1][3]
    assert (
        "--data ('38 examples, digest of rank 0' on rank 0, '38 examples, digest of rank 1" in other
    )
    assert "must be the same on every" in other


def test_steps_as_graphs_compute_the_same(runs: tuple[Path, list[str]]) -> None:
    folder, _ = runs
    found, wanted = metrics(folder / "graphs"), metrics(folder / "straight")
    assert [row["loss"] for row in found] == [row["loss"] for row in wanted]
    assert [row["grad_norm"] for row in found] == [row["grad_norm"] for row in wanted]


def test_a_cp_for_each_micro_batch_computes_the_same(runs, finetune) -> None:
    folder, _ = runs
    examples, _ = examples_of(finetune, folder)
    assert max(len(one.tokens_T) for one in examples) > TOKENS // 2  # shared by two ranks
    found, wanted = metrics(folder / "dynamic"), metrics(folder / "straight")
    for name in ("loss", "eval_loss", "answer_tokens", "grad_norm"):
        pair = [[line[name] for line in lines if name in line] for lines in (found, wanted)]
        assert len(pair[0]) in (2, STEPS) and pair[0] == pytest.approx(pair[1], rel=1e-5), name


@pytest.mark.parametrize("degree", SHARED)
def test_ranks_that_share_rows_or_layers_compute_the_same(degree, runs, finetune) -> None:
    folder, _ = runs
    found, wanted = metrics(folder / degree), metrics(folder / "straight")
    values = {name: [row[name] for row in wanted] for name in ("loss", "grad_norm")}
    after = wanted[-1]["eval_loss"]
    if degree == "cp":  # two chunks a rank: lengths that are multiples of 4 fill rows otherwise
        *every, model = oracle(finetune, folder, 4)
        values = dict(zip(values, every, strict=True))
        after = mean_loss(model, examples_of(finetune, folder)[1])
    assert [row["loss"] for row in found] == pytest.approx(values["loss"], rel=1e-5)
    assert [row["grad_norm"] for row in found] == pytest.approx(values["grad_norm"], rel=1e-4)
    assert found[-1]["eval_loss"] == pytest.approx(after, rel=1e-5)
    mine, theirs = (exported(folder / run) for run in (degree, "straight"))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items() if degree != "cp" else ():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=2e-4)


def test_a_run_that_stopped_goes_on_bit_for_bit(runs: tuple[Path, list[str]]) -> None:
    folder, (_, resumed, again, _) = runs
    assert "from step 4 to step 6" in resumed and "before the first step" not in resumed
    assert "is finished at step 6" in again and " -> " not in resumed
    assert "checkpoint_every: 2 -> 3 (does not change the numbers)\n" in again
    assert again.count(" -> ") == 1
    straight, stopped = folder / "straight", folder / "stopped"
    assert metrics(stopped) == metrics(straight)
    mine, theirs = tensors(stopped, STEPS), tensors(straight, STEPS)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)
    files = sorted(p.name for p in (straight / "export").iterdir())
    assert sorted(p.name for p in (stopped / "export").iterdir()) == files
    for name in files:
        pair = [(run / "export" / name).read_bytes() for run in (straight, stopped)]
        assert pair[0] == pair[1], name
    assert not (stopped / ".export.draft").exists()


def test_the_export_is_what_vllm_reads(runs: tuple[Path, list[str]]) -> None:
    """Names of vLLM's loader of Qwen3-MoE, which stacks experts and q, k, v itself."""
    folder, _ = runs
    export = folder / "straight" / "export"
    names = load_file(export / "model.safetensors").keys()
    last = {f"model.layers.1.mlp.experts.7.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert names > last | {"model.layers.1.self_attn.q_proj.weight", "lm_head.weight"}
    config = json.loads((export / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"] and config["dtype"] == "float32"
    assert config["num_experts"] == 8 and config["moe_intermediate_size"] == 16
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (export / name).read_bytes() == (folder / "tiny" / name).read_bytes()
    given = [
        json.loads((p / "generation_config.json").read_text()) for p in (export, folder / "tiny")
    ]
    assert given[0] == given[1]


def test_stock_transformers_reload_it_with_equal_logits(runs, finetune) -> None:
    folder, _ = runs
    export = folder / "straight" / "export"
    reloaded = stock(export).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    question = [{"role": "user", "content": "What does abc.abstractmethod do?"}]
    ids = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    job = finetune.build_job(finetune.parse_arguments(arguments(folder, "straight", ONE_RANK)))
    seen: list[torch.Tensor] = []
    job.model.register_forward_hook(lambda m, args, out: seen.append(out.logits))
    job.model.eval()
    with torch.no_grad():
        job.model(**hf_model.make_causal_lm_inputs(torch.tensor(1), ids, ids, ids < 0))
        assert (seen[0] - reloaded(ids).logits).abs().max() < 1e-5 and job.start == STEPS
    _, held_out = examples_of(finetune, folder)
    wanted = metrics(folder / "straight")[-1]["eval_loss"]
    assert mean_loss(reloaded, held_out) == pytest.approx(wanted, rel=1e-5)


def test_the_loss_is_the_models_own(finetune: ModuleType) -> None:
    """Granite divides its logits."""
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=16, num_hidden_layers=1)
    config = transformers.GraniteMoeConfig(num_attention_heads=4, logits_scaling=4.0, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    tokens_BT = torch.randint(0, 61, (2, 9))
    labels_BT = tokens_BT.masked_fill(torch.rand(2, 9) < 0.3, -100)
    count = (labels_BT[:, 1:] != -100).sum()
    wanted = model(input_ids=tokens_BT, labels=labels_BT).loss
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), loss="sum")
    next_BT = F.pad(labels_BT[:, 1:], (0, 1), value=-100)
    given = tokens_BT, next_BT, torch.zeros_like(tokens_BT, dtype=torch.bool)
    found = model(**hf_model.make_causal_lm_inputs(count, *given)).loss
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize("family", ["qwen3_moe", "minimax_m2", "llama4", "jamba"])
def test_padding_is_routed_in_no_kind_of_layer(family: str, finetune: ModuleType) -> None:
    """A MoELayer, experts behind a router of transformers, and those of a block of its own.

    Documents meet in rows of all but the last, whose Mamba layers read rows.
    """
    from moecore.recipes.chat import Example
    from moecore.recipes.data import BatchShape
    from moecore.recipes.examples import make_packed_steps

    model = tiny_model(family)
    packs = finetune.can_pack_documents(model)
    assert packs == (family != "jamba")
    if packs:
        use_causal_attention(model)
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), loss="sum")
    examples = [
        Example(torch.randint(52, 61, (n,)).int(), torch.arange(n) % 3 > 0) for n in (10, 6)
    ]
    job = finetune.FineTuning.__new__(finetune.FineTuning)
    job.packs, job.device = packs, torch.device("cpu")

    def run(groups: list[list[Any]], rows: int, tokens: int) -> Any:
        step, total = TrainStep(model, num_micro_batches=len(groups)), 0.0
        shape = BatchShape(data_ranks=1, grad_accum=1, batch_size=rows, seq_len=tokens)
        where = {"seed": None, "data_rank": 0, "packs": packs}
        for group in groups:
            batch = make_packed_steps(group, shape, **where).next_batch()
            for parts in job.iterate_micro_batches(batch):
                with step.micro_batch():
                    loss = model(**hf_model.make_causal_lm_inputs(torch.tensor(3), *parts)).loss
                    loss.backward()
                total += float(loss.detach())
        grads = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        model.zero_grad()
        return total, grads, step.finish().metrics.tokens_per_expert

    alone = run([[example] for example in examples], 1, 10)
    padded = run([examples], 1 if packs else 2, 18)
    assert padded[0] == pytest.approx(alone[0], rel=1e-5)
    for name, grad in alone[1].items():
        torch.testing.assert_close(padded[1][name], grad, rtol=1e-3, atol=1e-5)
    assert padded[2].keys() == alone[2].keys()
    assert all(torch.equal(padded[2][name], counts) for name, counts in alone[2].items())


OTHER_RUNS = {
    "--seed 1": "--seed (1) must be 0 as in ",
    "--grad-accum 2": "rows per step (4) must be 8 as in ",
    "--seq-len 40": "--data (38 examples, digest ",
    "--model {other}": "--model (other) must be tiny as in ",
    "--objective distill --distill-teacher {other}": "--objective (distill) must be sft as in ",
}


@pytest.mark.parametrize("more", OTHER_RUNS)
def test_a_run_goes_on_with_its_own_data_and_model(more, runs, finetune, tmp_path, capsys) -> None:
    folder, _ = runs
    shutil.copytree(folder / "tiny", tmp_path / "other")
    words = f"{ONE_RANK} {more.format(other=tmp_path / 'other')}"
    capsys.readouterr()
    assert in_this_process(finetune, folder, "straight", words) == 2
    error = capsys.readouterr().err.strip()
    assert OTHER_RUNS[more] in error and len(error.splitlines()) == 1, error


def edit(model: Path, **fields: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | fields))


def with_mamba(model: Path) -> None:
    config = tiny_model("jamba").config
    config.vocab_size, config.max_position_embeddings = 3000, 256
    config.save_pretrained(model)


def as_it_is(model: Path) -> None:
    pass


def with_experts_in_attention(model: Path) -> None:
    transformers.JetMoeConfig(vocab_size=3000, num_hidden_layers=1).save_pretrained(model)


def without(pattern: str) -> Callable[[Path], None]:
    return lambda model: [file.unlink() for file in model.glob(pattern)] and None


REFUSED: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "no tokenizer": (without("tokenizer*"), "", "must have a tokenizer: copy tokenizer.json"),
    "dense": (
        transformers.LlamaConfig().save_pretrained,
        "",
        "must have routed experts: llama has none",
    ),
    "vocabulary": (
        partial(edit, vocab_size=99),
        "",
        "must be < vocab_size (99) of its config.json",
    ),
    "refused block": (with_experts_in_attention, "", "its model has experts in attention"),
    "no family": (
        partial(edit, model_type="unheard"),
        "",
        "must have a config.json of transformers",
    ),
    "no directory": (shutil.rmtree, "", "must be a Hugging Face directory with config.json"),
    "held out": (as_it_is, "--eval-data no.txt", "--eval-data (no.txt) must be a readable file"),
    "not packed": (
        with_mamba,
        "--dynamic-cp 96",
        "--dynamic-cp (96) must be left out for JambaFor",
    ),
    "rows of other lengths": (
        with_mamba,
        "--cuda-graph",
        "--cuda-graph must be left out for Jamba",
    ),
    "too long": (as_it_is, "--seq-len 9999", "--seq-len (9999) must be <= max_position_embeddings"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_input_is_one_line(name, runs, finetune, tmp_path, capsys) -> None:
    change, more, wanted = REFUSED[name]
    shutil.copytree(runs[0] / "tiny", tmp_path / "tiny")
    data = ["--data", str(runs[0] / "tiny" / "some.jsonl")]
    change(tmp_path / "tiny")
    words = [*arguments(tmp_path, "run", more), *data]
    capsys.readouterr()
    assert finetune.run_rank(finetune.parse_arguments(words)) == 2
    error = capsys.readouterr().err.strip()
    assert wanted in error and len(error.splitlines()) == 1, error
    assert error.startswith("moecore: error: ")


def test_the_tiny_directory_is_made_once(runs, one_rank, monkeypatch, capsys) -> None:
    assert main(["tiny-model", str(runs[0] / "tiny")]) == 1
    assert "moecore: OUT (" in capsys.readouterr().err


def test_a_run_in_the_least_memory_learns_the_same(runs: tuple[Path, list[str]]) -> None:
    """A planned one: `check_planned` says that it has all options; bf16 and FP8 round."""
    folder, _ = runs
    small, wide = (
        [row["loss"] for row in metrics(folder / r) if "loss" in row] for r in ("small", "wide")
    )
    assert len(small) == STEPS
    for found, wanted in zip(small, wide, strict=True):
        assert abs(found - wanted) <= 1e-3 * wanted
    exports = (
        load_file(folder / run / "export" / "model.safetensors") for run in ("small", "wide")
    )
    assert len({frozenset(export) for export in exports}) == 1
