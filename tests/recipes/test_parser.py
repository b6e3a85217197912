import importlib
import json
import os
import re
import socket
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from moecore import NVLinkOptions
from moecore.base.command_options import list_options, read_field_texts
from moecore.cli import main
from moecore.models import Decoder, DecoderConfig, preset
from moecore.planning.flags import PlanConfig, parse_run
from moecore.recipes import finetune, grpo, train
from moecore.recipes import pretrain as pretrain_module
from moecore.recipes.dry_run import make_planned_run
from moecore.recipes.parser import format_toml, parse

FLAGS = (
    "--data a.jsonl,weight=0.5,field=body b,name=x,stream=true --cp 2 --lr 1e-4 --plain-host"
    " --offload attention norm --offload-fraction 0.5 --recompute gemm_last --row-factor exact"
    " --no-overlap-weight-grads --reduce-dtype bfloat16 --documents whole --scaling tensorwise"
    " --num-heads 8 --top-k 4 --capacity-factor 1.5 --dp-shard -1"
)
FILE = """
data = [{path = "a.jsonl", weight = 0.5, field = "body"}, "b,name=x,stream=true"]
cp = 2
lr = 1e-4
plain_host = true
dp_shard = -1
[memory]
offload = ["attention", "norm"]
offload_fraction = 0.5
recompute = "gemm_last"
[nvlink]
row_factor = "exact"
overlap_weight_grads = false
[fsdp]
reduce_dtype = "bfloat16"
[corpus]
documents = "whole"
[recipe]
scaling = "tensorwise"
[model]
num_heads = 8
[moe]
top_k = 4
[capacity]
factor = 1.5
"""


def test_a_file_stands_for_flags_and_flags_win(pretrain: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(FILE)
    args = pretrain.parse_arguments(FLAGS.split())
    config = ["--config", str(tmp_path / "a.toml")]
    assert replace(pretrain.parse_arguments(config), config=None) == args
    assert args.memory.offload == ("attention", "norm")
    assert args.memory.recompute == "gemm_last" and args.nvlink.row_factor == "exact"
    assert args.nvlink.overlap_weight_grads is False and args.parallel["dp_shard"] == -1
    assert args.fsdp.reduce_dtype == torch.bfloat16 and args.plain_host is True
    words = ["--cp", "4", "--offload-fraction", "1.0", "--offload", "--num-heads", "2"]
    both = pretrain.parse_arguments([*config, *words])
    assert (both.parallel["cp"], both.memory.offload, both.model["num_heads"]) == (4, (), 2)


def test_dim_is_of_the_decoder_and_its_experts(pretrain: ModuleType) -> None:
    config = pretrain.parse_arguments(["--preset", "tiny", "--dim", "64"]).make_decoder_config()
    assert (config.dim, config.moe.dim) == (64, 64)


def test_a_run_saves_what_makes_the_same_run(pretrain: ModuleType, tmp_path: Path) -> None:
    args = pretrain.parse_arguments([*FLAGS.split(), "--run-dir", str(tmp_path), "--aux-loss", "1"])
    config = args.make_decoder_config()
    (tmp_path / "config.toml").write_text(format_toml(args.resolve()))
    again = pretrain.parse_arguments(["--config", str(tmp_path / "config.toml")])
    assert again.make_decoder_config() == config and config.moe.capacity.factor == 1.5
    assert pretrain.make_corpus_options(again, config, 2) == pretrain.make_corpus_options(
        args, config, 2
    )
    assert format_toml(again.resolve()) == format_toml(args.resolve())
    for name in ("data", "optimizer", "memory", "nvlink", "fsdp", "recipe", "parallel"):
        assert getattr(again, name) == getattr(args, name), name


COMMANDS = {
    "train": train.TrainConfig,
    "pretrain": pretrain_module.PretrainConfig,
    "finetune": finetune.FinetuneConfig,
    "grpo": grpo.GRPOConfig,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_flag_of_its_own_and_a_text(name: str) -> None:
    options = list_options(COMMANDS[name])
    flags = [option.flag for option in options]
    assert len(set(flags)) == len(flags)
    assert [option.key for option in options if not option.text] == []
    assert {"lr", "run-dir", "ep", "warmup-steps"} <= set(flags)
    for record in {option.table for option in options if option.table}:
        assert record in read_field_texts(COMMANDS[name]), record


def test_help_has_each_table_as_a_group_and_each_default(pretrain: ModuleType, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        pretrain.parse_arguments(["--help"])
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert printed.startswith("usage: moecore pretrain [-h] [OPTIONS] Pre-train a Mixture-of-Exp")
    assert "optimizer options" in printed and "The optimizers of a run." in printed
    assert "--router-lr-factor FLOAT learning rate of routers over" in printed
    assert printed.count("(default: 0.1)") >= 2
    assert printed.count("--lr-schedule {cosine,linear,wsd,constant}") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"cp = ", "must be TOML: "),
        (b"cp = 1\ncp = 1", "must be TOML: "),
        (b"cp = " + b"9" * 5000, "must be TOML: "),
        (b"cp = '\xff'", "must be UTF-8: invalid start byte at byte 6"),
        (b"data = " + b"[" * 3000 + b"]" * 3000, "must be TOML that nests less deeply"),
        (b"steppes = 3", "must have no steppes, which no flag has: did you mean steps"),
        (b"config = 'b.toml'", "must have no config, which no flag has"),
        (b"no_plain_host = true", "must have no no_plain_host, .*: did you mean plain_host"),
        (b"hf_config = 'a'\nhf-config = 'a'", "must have one of hf_config and hf-config"),
        (b"[memory]\noffloads = []", "must have no memory.offloads, which no flag has"),
        (b"[memory]\noffload = {a = 1}", "memory.offload .* must be an array, each one of"),
        (b"[memory]\noffload = [['norm']]", "memory.offload .* must be an array, each one of"),
        (b"[nvlink]\noverlap_weight_grads = 'no'", "overlap_weight.* must be True or False"),
        (b"data = [{weight = 1}]", "data .* must have a path, which is a string"),
        (b"data = [{path = 'a', weight = {}}]", "data .* must be valid: SourceOptions.weight"),
        (
            b"data = [{path = 'a', weight = 'x'}]",
            "data .* must be valid: SourceOptions.weight .* a finite number",
        ),
        (b"plain_host = 1", r"plain_host \(1\) must be True or False"),
        (b"steps = [1]", r"steps \(\[1\]\) must be a whole number >= 1"),
        (b"steps = 1.5", r"steps \(1.5\) must be a whole number >= 1"),
        (b"run_dir = 3", r"run_dir \(3\) must be a Path"),
        (b"lr = 1979-05-27", "lr .* must be a finite number > 0"),
    ],
    ids=lambda value: value[:40] if isinstance(value, bytes) else "",
)
def test_a_wrong_file_is_one_line(content, message, pretrain, tmp_path) -> None:
    (tmp_path / "a.toml").write_bytes(content)
    with pytest.raises(ValueError, match=rf"--config \(.*a.toml\).*{message}") as error:
        pretrain.parse_arguments(["--config", str(tmp_path / "a.toml")])
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_a_key_may_be_spelled_as_its_flag(pretrain: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        "hf-config = 'a'\n[memory]\noffload = ['norm']\noffload-fraction = 0.5"
    )
    args = pretrain.parse_arguments(["--config", str(tmp_path / "a.toml")])
    assert (args.hf_config, args.memory.offload_fraction) == (Path("a"), 0.5)


SPECIAL_FILES = {
    "fifo": "must be a plain file",
    "socket": "must be a readable file: No such device",
    "folder": "must be a file, not a directory: name a file in it",
    "missing": "must be a readable file: No such file",
    "large": "must have <= [0-9]+ bytes, not 1099511627776",
    "nul\0": "must be a plain file",
    "x" * 5000: "must be a readable file: File name too long",
    "/dev/zero": "must be a plain file",
}


@pytest.fixture
def special(tmp_path: Path) -> Path:
    """A folder with files that no script can read."""
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(tmp_path / "socket"))
    (tmp_path / "folder").mkdir()
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    return tmp_path


@pytest.mark.parametrize("name", SPECIAL_FILES, ids=lambda name: name[:9].strip("\0"))
def test_a_special_file_is_one_line_for_each_reader(name, pretrain, special) -> None:
    """A reader that opened the FIFO would wait for ever."""
    examples = importlib.import_module("moecore.recipes.examples")
    path = special / name
    for option, read_path in (
        ("--config", lambda: pretrain.parse_arguments(["--config", str(path)])),
        (
            "--eval-data",
            lambda: examples.read_examples([path], None, seq_len=9, option="--eval-data"),
        ),
    ):
        with pytest.raises(ValueError, match=rf"^{option} \(.*{SPECIAL_FILES[name]}") as error:
            read_path()
        assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--offload attic", "invalid choice 'attic' for argument '--offload'"),
        ("--prefetch-blocks x", "--prefetch-blocks: invalid literal for int"),
        ("--prefetch-blocks", "Missing value for argument '--prefetch-blocks'"),
        ("--prefetch-blocks -1", "--prefetch-blocks (-1) must be a whole number >= 0"),
        ("--reduce-dtype quick", "--reduce-dtype ('quick') must be one of torch.float32"),
        ("--stepps 3", "--stepps must be a flag of moecore pretrain: did you mean --steps?"),
        ("--steps 3 stray", "Unrecognized options: stray"),
    ],
)
def test_a_wrong_flag_is_one_line(pretrain: ModuleType, words: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        pretrain.parse_arguments(words.split())
    assert message in str(error.value) and "\n" not in str(error.value)


PLANNED = (
    "--pp 2 --schedule interleaved --chunks 1 --micro-batches 4",
    "--ep 2 --recompute gemm_last --offload experts --dense-strategy optim --moments bfloat16",
    "--ep 2 --row-factor 3 --fp8-dispatch --master-remainder --state-offload 0.5 --batch-size 2",
    "--dp-replicate 2 --tp 1 --experts-strategy optim_grads",
)


@pytest.mark.parametrize("flags", PLANNED)
def test_a_planned_run_is_a_file_of_options(pretrain, tmp_path, flags) -> None:
    """Every field of the planned run comes back from the file."""
    file = tmp_path / "plan.toml"
    command = f"plan --preset tiny --gpus 2 --seq-len 128 {flags} --call --write {file}"
    words = command.split()
    assert main(words) == 0
    run = parse_run(parse(PlanConfig, words[1:], prog="moecore plan"))
    args = pretrain.parse_arguments(["--config", str(file), "--data", __file__])
    config, _ = pretrain.check_options(args, 2)
    balance = run.model.moe.balance  # which a plan does not choose
    config = replace(config, moe=replace(config.moe, balance=balance))
    assert replace(config, max_seq_len=run.model.max_seq_len) == run.model
    assert args.make_parallel_config(2, num_experts=config.moe.num_experts) == run.resolved
    assert args.make_fsdp_options(torch.bfloat16) == run.fsdp
    assert args.make_memory_options() == run.memory
    assert args.make_pipeline_options() == run.pipeline
    dispatch = args.make_dispatch_options()
    assert (dispatch.nvlink or NVLinkOptions()) == (run.nvlink or NVLinkOptions())
    sent = run.resolved.ep > 1
    # "auto" is "nvlink" on the planned GPUs, and CPU ranks take it too.
    has_stash = run.memory.stash is not None
    assert dispatch.name == ("nvlink" if sent and has_stash else "auto")
    assert dispatch.fp8 == run.fp8_dispatch
    sizes = args.seq_len, args.batch_size, args.grad_accum
    assert sizes == (run.seq_len, run.batch_size, run.num_micro_batches)
    found, planned = args.optimizer, run.optimizer
    assert found.moment_dtype == planned.moment_dtype
    assert found.master_remainder == planned.master_remainder
    assert found.state_offload == planned.offload_fraction
    assert args.precision is None and args.dtype == "bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["planning", "memory"])
def test_a_plan_from_which_a_page_trains_fits(page, tmp_path, monkeypatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text().replace("\\\n", "")
    (command,) = re.findall("^moecore (plan .*--write plan.toml)$", text, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0 and (tmp_path / "plan.toml").exists()


SHARED = (
    "--seq-len 64 --batch-size 4 --ep 2 --row-factor 1.5 --dense-strategy optim --fp8-dispatch"
    " --master-remainder --state-offload 0.5 --offload attention --stash --precision nf4"
    " --dispatcher nvlink --prefetch-blocks 2 --lora-rank 2"
)
TUNED = (
    "--data a --memory-recompute gemm_last qkv_proj --moment-dtype bfloat16 --grad-accum 4"
    " --recompute"
)
SAME_PLANNED = "--recompute gemm_last qkv_proj --moments bfloat16 --micro-batches 4"


def test_a_plan_of_finetuning_is_that_of_its_dry_run(tmp_path: Path) -> None:
    """Both commands build equal records of equal options, with the class that is trained."""
    pytest.importorskip("transformers", minversion="5", reason="the class that is trained")
    qwen3 = dict(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"])
    qwen3 |= dict(num_hidden_layers=2, hidden_size=64, vocab_size=128, moe_intermediate_size=32)
    qwen3 |= dict(num_attention_heads=8, num_key_value_heads=4, head_dim=16, norm_topk_prob=True)
    qwen3 |= dict(num_experts=8, num_experts_per_tok=2, max_position_embeddings=64)
    qwen3 |= dict(rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False)
    (tmp_path / "config.json").write_text(json.dumps(qwen3))
    tuned, planned = (f"{SHARED} {text}".split() for text in (TUNED, SAME_PLANNED))
    args = finetune.parse_arguments(["--model", str(tmp_path), *tuned])
    model = finetune.make_planned_model(args, tmp_path)
    trained = make_planned_run(args, model, args.make_parallel_config(8, num_experts=8), 8)
    command = ["--config", str(tmp_path), "--gpus", "8", *planned]
    for more, changes in (
        (["--checkpointing"], {}),
        (["--finetune"], dict(model=replace(model, recompute=False))),
    ):
        run = parse_run(parse(PlanConfig, [*command, *more], prog="moecore plan"))
        assert replace(run, parallel=run.resolved) == replace(trained, **changes)
    command = command[: command.index("--lora-rank")]
    native = parse_run(parse(PlanConfig, command, prog="moecore plan")).model
    assert isinstance(native, DecoderConfig)  # which `moecore pretrain --hf-config` trains


def test_what_a_file_of_options_cannot_have(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "plan.toml"
    command = "plan --preset tiny --gpus 2 --ep 2 --seq-len 128 --stash --row-factor None"
    command = f"{command} --write {file}"
    assert main(command.split()) == 1
    assert "nvlink.row_factor (None) must be a number" in capsys.readouterr().err
    assert not file.exists()


def test_options_of_the_planned_optimizer(pretrain: ModuleType) -> None:
    model = Decoder(preset("tiny"), dtype=torch.bfloat16)
    words = "--moment-dtype bfloat16 --master-remainder --state-offload 0.5"
    (adamw,) = pretrain.parse_arguments(words.split()).optimizer.build_optimizers(model)
    assert hasattr(adamw, "bring_state_back")  # of a StateOffload
    state = adamw.prepare_state(next(model.parameters()))
    assert {t.dtype for name, t in state.items() if name.startswith("exp")} == {torch.bfloat16}
    assert len(state) == 4  # the step, two moments and the remainder
    words = ["--data", __file__, "--master-remainder", "--optimizer", "muon"]
    with pytest.raises(ValueError, match=r"master_remainder \(True\) must be False with optimizer"):
        pretrain.parse_arguments(words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--preset tiny-qwen3", {"global_batch_coef": 0.05}),
        ("--preset moonlight-16b-a3b", {"bias_update": "quantile", "bias_update_rate": 1.0}),
        ("--preset deepseek-v3", {"bias_update": "sign", "bias_update_rate": 1e-3}),
        ("--preset tiny-qwen3 --z-loss-coef 0.1", {"z_loss_coef": 0.1}),
        ("--preset tiny-qwen3 --aux-loss 0.01", {"micro_batch_coef": 0.01}),
    ],
)
def test_a_run_without_options_of_balance_has_some(pretrain, words, expected) -> None:
    args = pretrain.parse_arguments([*words.split(), "--data", __file__])
    balance = args.make_decoder_config().moe.balance
    assert {name: getattr(balance, name) for name in expected} == expected
    if "global_batch_coef" not in expected:
        assert balance.global_batch_coef == 0.0
