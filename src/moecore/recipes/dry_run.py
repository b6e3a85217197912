"""--dry-run: prints a run's resolved options, its plan of memory and time, and its first batch."""

from collections.abc import Callable
from dataclasses import replace

from moecore.base.text import format_bytes
from moecore.models import DecoderConfig
from moecore.parallel.mesh import ParallelConfig
from moecore.planning import TrainingRun, TransformersModel, plan_memory, plan_time
from moecore.planning.costs import CostTable
from moecore.planning.gpus import find_time_refusal, get_gpu
from moecore.recipes.data import StepBatch
from moecore.recipes.options import RunConfig, ShardedConfig
from moecore.recipes.parser import format_toml

MAX_TOKENS = 64  # of the first row that are printed


def make_planned_run(
    args: ShardedConfig,
    model: DecoderConfig | TransformersModel,
    parallel: ParallelConfig,
    num_gpus: int,
) -> TrainingRun:
    """Convert the options of a command to a bf16 run, the input of `moecore.planning`."""
    if isinstance(model, DecoderConfig):
        model = replace(model, max_seq_len=max(model.max_seq_len, args.seq_len))
    data_ranks = parallel.dp_replicate * parallel.dp_shard
    return args.make_training_run(
        model,
        num_gpus,
        args.gpu,
        parallel,
        num_micro_batches=args.count_micro_batches(data_ranks),
        state=args.optimizer,
    )


def print_plan(args: RunConfig, run: TrainingRun | None) -> int:
    """Print options and the plan of `run` (None = no plan); return 1 if memory is too small."""
    print(format_toml(args))
    if run is None:
        print("no plan: moecore.planning does not model reference models yet")
        return 0
    plan, gpu = plan_memory(run), get_gpu(args.gpu)
    peak, memory = plan.largest.num_bytes, gpu.memory
    pinned, host = plan.count_pinned_bytes(gpu), gpu.host_memory
    print(f"plan for {run.num_gpus} {args.gpu}:")
    print(plan.table())
    refusal = find_time_refusal(run.precision, args.gpu)
    print(refusal or plan_time(run, CostTable.of(args.gpu)).line)
    if pinned:
        print(f"pinned host memory of a server: {format_bytes(pinned)} of {format_bytes(host)}")
    fits = peak <= memory and pinned <= host
    verdict = "fits" if fits else "does not fit: moecore plan finds options that do"
    print(f"peak memory {format_bytes(peak)} of {format_bytes(memory)}: {verdict}")
    return 0 if fits else 1


def print_batch(batch: StepBatch, decode: Callable[[list[int]], str]) -> None:
    """Print a batch's shape and first row; `decode` converts token ids to text."""
    micro_batches, rows, tokens = batch.tokens_ABT.shape
    labels, real, _, total = batch.count_labels_and_tokens().tolist()
    print(
        f"first batch of rank 0: {micro_batches} micro-batch(es) of {rows} row(s) of {tokens} "
        f"tokens; {real} of {total} tokens are no padding, {labels} have labels"
    )
    row = batch.tokens_ABT[0, 0, :MAX_TOKENS].tolist()
    print(f"first tokens: {row}")
    print(f"first text: {decode(row)!r}")
