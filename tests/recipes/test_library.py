import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tools.claims import find_figures, read_claims

from moecore.cli import main
from moecore.planning import plan_memory, plan_time
from moecore.planning.costs import CostTable
from moecore.planning.gpus import get_gpu
from moecore.planning.memory import MemoryPlan
from moecore.recipes import finetune, grpo, pretrain
from moecore.recipes.dry_run import make_planned_run
from moecore.recipes.hf_model import count_experts
from moecore.recipes.library import CONFIGS, ShippedRecipe, list_recipe_names
from moecore.recipes.options import get_moe_config

COMMANDS = {"moecore pretrain": pretrain, "moecore finetune": finetune, "moecore grpo": grpo}
# What config.json of the published models has where the class of transformers has another default.
CONFIGS_OF_HUB: dict[str, dict[str, Any]] = {
    "qwen3": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "head_dim": 128,
        "norm_topk_prob": True,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 24,
        "num_local_experts": 32,
    },
    "moonlight": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "vocab_size": 163840,
        "max_position_embeddings": 8192,
    },
}
RUN_DIRS = {"tiny": "tiny-pretrain"}  # `moecore tiny-model` of the pages makes runs/tiny
LARGE = re.compile(r"(256|1024)x|next|gpt-oss|qwen3-30b")  # plans of over ten seconds
PLANNED = [
    pytest.param(name, marks=pytest.mark.nightly if LARGE.search(name) else [])
    for name in list_recipe_names()
    if ShippedRecipe.read(name).facts["result"].startswith("planned ")
]


@pytest.mark.parametrize("name", list_recipe_names())
def test_a_recipe_says_what_it_needs_and_parses(name: str) -> None:
    recipe = ShippedRecipe.read(name)
    assert recipe.title.endswith(".") and {"machine", "data", "result"} < recipe.facts.keys()
    command = COMMANDS[recipe.facts["command"]]
    args = command.parse_arguments([str(CONFIGS / f"{name}.toml")])
    assert args.run_dir == Path("runs") / RUN_DIRS.get(name, name)
    if getattr(args, "gpus", None) is not None:
        assert recipe.facts["machine"] == f"{args.gpus} x {args.gpu}"


def test_recipes_are_of_all_commands_and_families() -> None:
    assert len(list_recipe_names()) >= 12
    assert {
        ShippedRecipe.read(name).facts["command"] for name in list_recipe_names()
    } == COMMANDS.keys()


def model_of(name: str, command: object, args: Any) -> tuple[Any, int]:
    """Return the model that the command plans, and its number of experts."""
    if command is pretrain:
        config = args.make_decoder_config()
        return config, get_moe_config(config).num_experts
    reason = "plans of fine-tuning read its classes"
    transformers = pytest.importorskip("transformers", minversion="5", reason=reason)
    values = next(v for family, v in CONFIGS_OF_HUB.items() if name.startswith(family))
    model = finetune.make_planned_model(args, values)
    return model, count_experts(transformers.AutoConfig.for_model(**values))


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_is_that_of_the_comment(name: str) -> None:
    recipe = ShippedRecipe.read(name)
    command = COMMANDS[recipe.facts["command"]]
    args = command.parse_arguments([str(CONFIGS / f"{name}.toml")])
    model, experts = model_of(name, command, args)
    parallel = args.make_parallel_config(args.gpus, num_experts=experts)
    run = make_planned_run(args, model, parallel, args.gpus)
    peak = plan_memory(run).largest.num_bytes
    assert peak <= get_gpu(args.gpu).memory
    told = recipe.facts["result"]
    assert float(re.findall(r"([\d.]+) GB", told)[0]) == pytest.approx(peak / 1e9, rel=0.02)
    if "tokens/s" in told:
        rate = float(re.findall(r"([\d,]+) tokens/s", told)[0].replace(",", ""))
        seconds = plan_time(run, CostTable.of(args.gpu)).seconds
        tokens = args.seq_len * args.batch_size * args.grad_accum
        p = run.resolved
        assert rate == pytest.approx(tokens / seconds / (p.tp * p.cp * p.pp), rel=0.02)


def test_measured_figures_are_claims() -> None:
    recipes = map(ShippedRecipe.read, list_recipe_names())
    measured = [recipe.facts["measured"] for recipe in recipes if "measured" in recipe.facts]
    claims = {claim.figure for claim in read_claims().values() if claim.status == "measured"}
    assert len(measured) == 4
    for text in measured:
        figures = [figure for _, figure in find_figures(text)]
        assert len(figures) == 2 and set(figures) <= claims, text


def test_a_copy_trains_and_replaces_nothing(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", "tiny"]) == 0
    assert capsys.readouterr().out == "run it with: moecore pretrain tiny.toml\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.json", "tiny.toml"]
    assert main(["recipes", "copy", "tiny"]) == 1
    assert "must not exist yet" in capsys.readouterr().err
    assert main(["recipes", "show", "tiny"]) == 0
    assert capsys.readouterr().out == (tmp_path / "tiny.toml").read_text()
    assert main(["pretrain", "tiny.toml", "--dry-run", "--gpu", "h100-80"]) == 0
    printed = capsys.readouterr().out
    assert "[optimizer]" in printed and "peak memory" in printed
    assert "first batch of rank 0: 1 micro-batch(es) of 4 row(s) of 256 tokens" in printed
    monkeypatch.setattr(MemoryPlan, "count_pinned_bytes", lambda _, gpu: gpu.host_memory + 1)
    assert main(["pretrain", "tiny.toml", "--dry-run", "--gpu", "h100-80"]) == 1
    assert "pinned host memory of a server: " in (printed := capsys.readouterr().out)
    assert ": does not fit: moecore plan" in printed and not (tmp_path / "runs").exists()


def test_no_recipe_trains_into_a_directory_that_the_pages_make() -> None:
    """`moecore tiny-model DIR` refuses a directory that exists, and a reader follows many pages."""
    root = Path(__file__).parents[2]
    recipes = [file.read_text() for file in CONFIGS.glob("*.toml")]
    pages = [file.read_text() for file in (root / "README.md", *(root / "docs").glob("*.md"))]
    made = set(re.findall(r"moecore tiny-model (runs/\w+)", "\n".join(recipes + pages)))
    run_dirs = [tomllib.loads(text)["run_dir"] for text in recipes]
    assert {"runs/tiny", "runs/sums"} <= made and not made & set(run_dirs)
    assert len(set(run_dirs)) == len(run_dirs)


def test_recipes_that_there_are_not(capsys: Any) -> None:
    assert main(["recipes", "show", "gpt-9"]) == 2
    assert "NAME (gpt-9) must be a recipe" in capsys.readouterr().err
    assert main(["recipes", "list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(list_recipe_names())


@pytest.mark.slow
def test_the_wheel_trains_in_an_empty_directory(tmp_path: Path) -> None:
    """Built, unpacked and run without the repository; test_pretrain.py kills such a run."""
    wheel, site, work = (tmp_path / name for name in ("wheel", "site", "work"))
    root = Path(__file__).parents[2]
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", str(wheel), str(root)], check=True)
    (archive,) = wheel.glob("*.whl")
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(archive), str(site)], check=True)
    work.mkdir()

    def moecore(words: str, code: int = 0) -> str:
        environ = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "moecore", *words.split()],
            cwd=work,
            env=environ,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr[-3000:]
        return done.stdout

    moecore("recipes copy tiny")
    size = "--steps 2 --seq-len 64 --batch-size 1 --workers 0"
    moecore(f"pretrain tiny.toml {size} --run-dir run")
    metrics = (work / "run" / "metrics.jsonl").read_text()
    assert re.findall(r'"step": (\d)', metrics) == ["1", "2"]
    assert moecore("generate run --prompt abc --max-new-tokens 4").startswith("abc")
