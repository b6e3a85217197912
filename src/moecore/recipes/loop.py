"""The training loop of all recipes: ranks, steps, metrics, checkpoints and errors.

`run_command` starts the ranks. Each rank executes `run`, which calls the loop `train`, which calls
`train_step` for each optimizer step. A recipe's `TrainingJob` has its data, loss and results.

Note "a step ahead": a GPU stays busy at the end of a step if the next step is launched already. The
host therefore waits for nothing in a step. It reads a step's metrics after it has launched the next
step, or before a checkpoint. An overflow may be noticed one step later, but is never in a
checkpoint.
"""

import gc
import math
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moecore.base.progress import show_progress
from moecore.base.streams import copy_to_device
from moecore.io import Saver
from moecore.io.checkpoint.ranks import run_on_first_rank
from moecore.parallel.mesh import start_process_group
from moecore.recipes.errors import (
    ARGUMENT_ERRORS,
    RUN_ERRORS,
    DivergedError,
    print_error,
    print_rank_error,
    print_run_error,
    silence_background_errors,
)
from moecore.recipes.hangs import METRICS, PEERS
from moecore.recipes.job import TrainingJob
from moecore.recipes.launch import (
    check_environment,
    exit_at_interrupt,
    exit_rank,
    launch,
    record_stop_signals,
)
from moecore.recipes.metrics import LaunchedStep, Moment, measure_peak_memory
from moecore.recipes.options import RunConfig
from moecore.recipes.process import (
    bind_to_gpu,
    check_deterministic,
    check_profile,
    collect_garbage,
    disable_garbage_collection,
    trace_steps,
    use_deterministic_algorithms,
)
from moecore.recipes.report import RunReport, make_run_dir
from moecore.recipes.resume import (
    clear_memory,
    describe_continuation,
    get_checkpoint_dir,
    open_memory_saver,
    read_latest_step,
    save_config,
)
from moecore.recipes.rollback import ROLLED_BACK, check_rollback, roll_back
from moecore.recipes.schedule import is_due
from moecore.recipes.stragglers import COMPUTE, DATA, OPTIMIZER, PhaseTimer
from moecore.train import move_experts

CPU_RANKS = 2
KEPT_CHECKPOINTS = 2
ConfigT = TypeVar("ConfigT", bound=RunConfig)
MOST_NAN = 10  # steps in turn without a finite loss; each is skipped, so weights stay


def run_command(
    parse_arguments: Callable[[Sequence[str] | None], ConfigT],
    words: Sequence[str] | None = None,
    *,
    run_rank: Callable[[ConfigT], int],
    check: Callable[[ConfigT, int], object],
    dry_run: Callable[[ConfigT], int],
) -> int:
    """Start the ranks of a command, or under torchrun run this rank; return the exit status.

    `run_rank` is a module-level function that calls `run`. `check(args, world_size)` raises
    ValueError for options that cannot run on `world_size` ranks.
    """
    is_rank = "RANK" in os.environ
    try:
        args = parse_arguments(words)
        if args.dry_run:
            return dry_run(args)
        gpus, world_size = torch.cuda.device_count(), count_ranks(args)
        if not is_rank:
            if gpus and world_size > gpus:
                raise ValueError(f"--ranks ({world_size}) must be <= the number of GPUs ({gpus})")
            check(args, world_size)
            make_run_dir(args.run_dir)
            get_checkpoint_dir(args)
    except ARGUMENT_ERRORS as error:
        return print_error(error)
    if is_rank:
        exit_at_interrupt()
        exit_rank(run_rank(args))
    code = launch(run_rank, args, world_size)
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        print(f"moecore: stopped: {describe_continuation(args)}", file=sys.stderr, flush=True)
    return code


def count_ranks(args: RunConfig) -> int:
    """Return --ranks; if it is not set, the number of GPUs, or two without GPUs."""
    return int(args.ranks or torch.cuda.device_count() or CPU_RANKS)


def run(
    args: ConfigT,
    build_job: Callable[[ConfigT], TrainingJob[Any]],
    plan: Callable[[ConfigT], list[ConfigT]] = lambda args: [args],
) -> int:
    """Train a run's stages, whose options `plan` returns; return this rank's exit status."""
    try:
        check_environment()
    except ARGUMENT_ERRORS as error:
        return print_error(error)
    try:
        if args.deterministic:
            use_deterministic_algorithms()
        if args.ranks not in (None, world_size := int(os.environ["WORLD_SIZE"])):
            raise ValueError(
                f"--ranks ({args.ranks}) must equal torchrun's ({world_size}): drop it"
            )
        check_rollback(stages := plan(args))
        if len(stages) > 1:  # without those that the newest checkpoint has completed
            if not dist.is_initialized():  # one rank reads the directory for all
                start_process_group("cuda" if torch.cuda.is_available() else "cpu")
            step = read_latest_step(stages[0])
            stages = [stage for stage in stages[:-1] if stage.steps > step] + stages[-1:]
    except ARGUMENT_ERRORS as error:
        return print_rank_error(error, int(os.environ["RANK"]))
    for stage_args in stages:
        is_last = stage_args is stages[-1]
        while (code := run_stage(stage_args, build_job, is_last=is_last)) == ROLLED_BACK:
            pass
        if code:
            return code
    clear_memory(stages[-1])
    dist.barrier()
    return 0


def run_stage(
    args: ConfigT, build_job: Callable[[ConfigT], TrainingJob[Any]], *, is_last: bool
) -> int:
    """Build and train one stage; return the exit status, or `ROLLED_BACK` after loss spikes."""
    code = 0
    try:
        job = build_job(args)
        args = job.args  # with the number of steps, which may depend on the data
        if args.deterministic:
            check_deterministic(job.model, job.device)
        check_profile(args, job.start)
        if args.move_experts_every:
            move_experts(job.model, job.optimizers, {})  # checks the model and moves nothing
        if not args.plain_host:
            bind_to_gpu()
    except ARGUMENT_ERRORS as error:
        return print_rank_error(error, int(os.environ["RANK"]))
    try:
        save_config(args, job.toml)
        if job.start < args.steps:
            if job.stage.name:
                print_on_rank_0(f"stage {job.stage.name}: steps {job.start + 1} to {args.steps}")
            job.print_start()
            if job.device.type == "cuda":
                print_on_rank_0("the first step compiles kernels, which takes up to a minute")
            with silence_background_errors():
                code = train(job)
            if code not in (0, ROLLED_BACK):
                if multiprocessing.parent_process() is None:  # else the launcher says it
                    print_on_rank_0(f"moecore: stopped: {describe_continuation(args)}")
                return code
        else:
            print_on_rank_0(f"{args.run_dir} is finished at step {job.start}{job.finish_note}")
        if code == ROLLED_BACK:
            roll_back(args, job.spikes, job.left_out)
        if is_last and not code:
            job.finish()
        else:
            job.close()
    except RUN_ERRORS as error:
        return print_run_error(error, args, saves_memory=job.saves_memory)
    if not is_last or code:  # before the next model is made
        del job
        gc.collect()
        torch.cuda.empty_cache()
    return code


def train(job: TrainingJob[Any]) -> int:
    """Train to the last step; return 0, or 128 + the signal if a signal ended the training.

    A signal ends the training after a step, with a checkpoint unless `checkpoint_every` is 0. If
    spikes end the training, the result is `ROLLED_BACK`. During spikes no checkpoint is saved.
    """
    args, queue, has_checkpoint = job.args, deque[LaunchedStep](), job.start > 0
    with (
        record_stop_signals() as request,  # until the last save is whole
        open_report(job) as report,
        show_progress("saving", unit="B", as_lines=True) as saving,
        Saver(
            get_checkpoint_dir(args),
            job.model,
            job.optimizers,
            keep=KEPT_CHECKPOINTS,
            config=job.config,
            progress=saving,
        ) as saver,
        open_memory_saver(args, job) as memory_saver,
        nullcontext() if args.plain_host else disable_garbage_collection(),
        job.hangs.watch(),
        trace_steps(args) as end_of_step,
    ):
        for step in range(job.start + 1, args.steps + 1):
            try:
                queue.append(train_step(job, step, stops=bool(request.number)))
                if is_due(step, every=args.eval_every, last_step=args.steps):
                    with measure_wall_time(report, "evaluate"):
                        metrics = queue[-1].extra | job.evaluate()
                    queue[-1] = replace(queue[-1], extra=metrics)
                with measure_wall_time(report, "sample"):
                    job.sample(step)
            except RUN_ERRORS:
                report_steps(job, queue, report)
                raise
            is_checkpoint = is_due(step, every=args.checkpoint_every, last_step=args.steps)
            is_in_memory = memory_saver is not None and step % args.memory_checkpoint_every == 0
            # The line of a step is written before a checkpoint from which a run continues after it.
            is_read = is_checkpoint or is_in_memory or step in (job.start + 1, args.steps)
            report_steps(job, queue, report, pending=0 if is_read else 1)
            if job.is_stopping:
                report_steps(job, queue, report)
            saver.check()  # a save that failed in the background ends the run here
            may_roll_back = job.spikes.may_roll_back(has_checkpoint=has_checkpoint)
            may_save = not job.spikes.length or (step == args.steps and not may_roll_back)
            if may_save and (is_checkpoint or (job.is_stopping and args.checkpoint_every)):
                with measure_wall_time(report, "save"):
                    save_checkpoint(job, saver, step)
                has_checkpoint = True
            elif may_save and memory_saver is not None and is_in_memory:
                memory_saver.check()
                with measure_wall_time(report, "save"):
                    save_checkpoint(job, memory_saver, step)
                has_checkpoint = True
            collect_garbage(step)
            end_of_step()
            if job.is_stopping or may_roll_back:
                break
        job.owner.check()  # the last step's
        # A signal may arrive during the last step of a stage, which no step has read.
        has_signal = torch.tensor(request.number > 0, dtype=torch.int64, device=job.device)
        dist.all_reduce(has_signal, op=dist.ReduceOp.MAX)
        is_stopping = job.is_stopping or bool(has_signal)
    if may_roll_back and not is_stopping:
        return ROLLED_BACK
    if not is_stopping or step == job.stage.last:
        return 0
    return 128 + (request.number or signal.SIGINT)


def save_checkpoint(job: TrainingJob[Any], saver: Saver, step: int) -> None:
    """Save a checkpoint with the data loader's position, in the background."""
    job.owner.check()  # no checkpoint of a step whose tokens got lost
    extra = {"step": step, **job.facts, **job.owner.state_dict(), **job.moves.state_dict()}
    extra |= {"stage": job.stage.name} if job.stage.name else {}
    extra["data"] = job.batches.sampler.state_dict()
    saver.save(step, extra, wait=False)


def open_report(job: TrainingJob[Any]) -> AbstractContextManager[RunReport | None]:
    """Return a context: rank 0's report; None on other ranks. All ranks raise rank 0's errors."""
    reports: list[RunReport] = []
    options: dict[str, Any] = dict(start=job.start, unit=job.unit, load_seconds=job.load_seconds)
    run_on_first_rank(lambda: reports.append(RunReport(job.args, **options)))
    return reports[0] if reports else nullcontext()


def measure_wall_time(report: RunReport | None, category: str) -> AbstractContextManager[None]:
    """Return a context whose duration rank 0 adds to a category of the run's wall time."""
    return nullcontext() if report is None else report.wall_time.measure(category)


def train_step(job: TrainingJob[Any], step: int, *, stops: bool = False) -> LaunchedStep:
    """Launch one optimizer step without a GPU sync; `stops` asks all ranks to stop after it."""
    args, began = job.args, Moment(job.device)
    lr = args.optimizer.lr * job.stage.compute_rate_factor(args.schedule, step)
    for group in (group for optimizer in job.optimizers for group in optimizer.param_groups):
        group["lr"] = lr * group["lr_factor"] * group.get("width_factor", 1.0)
    logs_loads = is_due(step, every=args.expert_loads_every, last_step=args.steps)
    timer = PhaseTimer(job.device) if logs_loads else None

    def measure(phase: str) -> AbstractContextManager[None]:
        """Return a context that watches a phase for hangs, and measures it if `timer` is set."""
        job.hangs.enter(step, phase)
        return nullcontext() if timer is None else timer.measure(phase)

    with measure(DATA):
        for i in range(job.left_out.count_before(step)):
            job.drop_batch(step + i)
        batch = job.next_batch(step)
    copies = dist.get_world_size() // job.meshes.data_ranks  # of equal data: cp and tp ranks
    num_stops = torch.tensor([copies * stops], dtype=torch.int64, device="cpu")
    counts = copy_to_device(torch.cat([batch.count_labels_and_tokens(), num_stops]), job.device)
    job.hangs.enter(step, PEERS)
    dist.all_reduce(counts)
    fetched = Moment(job.device)  # when the last rank has its data
    if timer is not None:
        timer.link_spans = job.stragglers.exchange_messages()
    counts //= copies
    num_labels = counts[0].clamp(min=1)
    with measure(COMPUTE):
        sdc_metrics = job.check_replays(step, num_labels, batch)
        loss = job.forward_backward(num_labels, batch)
    with measure(OPTIMIZER):  # moves the expert biases, too; a nan skips it everywhere
        result = replace(job.finish_step(), lr=lr)  # without the factors of the first group
    orders = job.moves.orders  # of this step
    lines = job.moves.end_step(step, job, result.metrics.tokens_per_expert)
    result = replace(result, metrics=job.stage_metrics.gather(result.metrics))
    dist.all_reduce(loss)
    loss = loss / copies
    times_RP = job.stragglers.gather()
    job.hangs.enter(step, "")
    return LaunchedStep(
        step=step,
        began=began,
        fetched=fetched,
        ended=Moment(job.device),
        loss=loss,
        result=result,
        counts=counts,
        ep=job.meshes.parallel.ep,
        num_experts=job.stage_metrics.num_experts,
        orders=orders,
        lines=lines,
        logs_loads=logs_loads,
        reader=job.reader,
        timer=timer,
        times_RP=times_RP,
        extra=job.get_data_metrics() | sdc_metrics | job.stage.get_metrics(step),
    )


def report_steps(
    job: TrainingJob[Any], queue: deque[LaunchedStep], report: RunReport | None, *, pending: int = 0
) -> None:
    """Pop the oldest steps until `queue` has `pending`; rank 0 writes their metrics to `report`."""
    while len(queue) > pending:
        launched = queue.popleft()
        step = launched.step
        job.hangs.enter(step, METRICS)
        metrics, loads = launched.read_metrics()
        all_counts, times_RP = launched.read_counts_and_times()
        job.hangs.enter(step, "")
        if launched.timer is not None:
            job.stragglers.times = launched.timer.read()
        *counts, num_stops = all_counts
        job.is_stopping |= num_stops > 0
        seconds = launched.began.seconds_until(launched.ended)
        metrics |= {"step_seconds": seconds, "tokens_per_second": counts[1] / seconds}
        metrics |= measure_peak_memory(job.device)
        metrics["data_wait_share"] = launched.began.seconds_until(launched.fetched) / seconds
        metrics |= job.compute_metrics(counts, seconds)
        if report:
            lines = job.stragglers.find_alarms(step, times_RP) if times_RP else []
            lines += launched.lines
            report.log(step, metrics, loads, logs_loads=launched.logs_loads, alarms=lines)
        job.spikes.record(step, metrics)
        job.num_nan = 0 if math.isfinite(metrics["loss"]) else job.num_nan + 1
        if job.num_nan == MOST_NAN:
            raise DivergedError(
                f"loss ({metrics['loss']}) of step {step} and of the {MOST_NAN - 1} before it "
                "must be finite: lower --lr, or start again from a checkpoint before them"
            )


def print_on_rank_0(line: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)
