"""The table of docs/performance.md: options with which LoRA of a model fits a GPU, from plans.

    python -m benchmarks.lora_plans

For each model and GPU, the first options of `OPTIONS` whose plan of `COMMAND` fits. A plan fits if
the GPU has 5% more memory than the plan, the error that tests/planning/test_records.py allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from benchmarks.gate import ROOT
from benchmarks.hf_configs import make_hf_config
from moecore.base.options.names import GpuName
from moecore.planning import plan_peak_memory
from moecore.planning.gpus import get_gpu
from moecore.recipes import finetune
from moecore.recipes.dry_run import make_planned_run

PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- plans -->\n", "<!-- end of plans -->"
COMMAND = "moecore finetune --model DIR --data FILE --seq-len 2048 --lora-rank 16"
MODELS = {"gpt-oss-20b": "mxfp4", "moonlight-16b-a3b": "nf4", "qwen3-30b-a3b": "nf4"}
GPUS: tuple[GpuName, ...] = ("rtx4090-24", "l40s-48", "h100-80", "h200-141")
COMPACT = "--moment-dtype bfloat16 --frozen-dense --recompute"
OPTIONS = (  # fastest first; {} is the model's 4-bit format
    "",
    "--recompute",
    "--precision {}",
    "--precision {} --recompute",
    f"--precision {{}} {COMPACT} --batch-size 1",
    f"--precision {{}} {COMPACT} --batch-size 1 --lora-rank 8",
    f"--precision {{}} {COMPACT} --batch-size 1 --offload-frozen",
)
MARGIN = 1.05


def write_table() -> None:
    """Write the table between its marks."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}\n{format_table()}\n{END}{tail}")


def format_table() -> str:
    """Return the table in markdown, a row per model and GPU."""
    lines = ["| model | GPU | options | planned peak, GiB |", "|---|---|---|---|"]
    for model in MODELS:
        for gpu in GPUS:
            options, peak = next(
                (options, peak)
                for options, peak in iterate_plans(model)
                if peak * MARGIN <= get_gpu(gpu).memory
            )
            text = f"`{options}`" if options else "none"
            lines.append(f"| {model} | {gpu} | {text} | {peak / 2**30:.1f} |")
    return "\n".join(lines) + "\n"


def iterate_plans(model: str) -> Iterator[tuple[str, int]]:
    """Yield the options of `COMMAND` and the planned peak bytes, in the order of `OPTIONS`."""
    for options in OPTIONS:
        options = options.format(MODELS[model])
        yield options, plan_bytes(model, options)


@cache
def plan_bytes(model: str, options: str) -> int:
    """Return the planned peak bytes of `COMMAND` with more options."""
    args = finetune.parse_arguments([*COMMAND.split()[2:], *options.split()])
    config = make_hf_config(model).to_dict()
    parallel = args.make_parallel_config(1, num_experts=1)
    run = make_planned_run(args, finetune.make_planned_model(args, config), parallel, 1)
    return max(plan_peak_memory(run))


if __name__ == "__main__":
    write_table()
