"""The plans of runs near a planned run: the choices of the interactive page of `--html`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from moecore.base.options.memory import MemoryOptions
from moecore.base.text import format_bytes
from moecore.models import DecoderConfig
from moecore.planning.costs import CostTable
from moecore.planning.gpus import find_time_refusal, get_gpu
from moecore.planning.memory import MemoryPlan, plan_memory
from moecore.planning.option_sets import OPTIONS
from moecore.planning.run import TrainingRun
from moecore.planning.times import TimePlan, plan_time

SCALES = (0.5, 1, 2, 4)  # factors on the given run's sequence length and batch size
TOO_LARGE = "not planned: a choice with fewer tokens does not fit"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The figures of a choice's plan; without `ranks` the choice was too large to be planned."""

    line: str  # the time and the peak memory as text
    fits: bool = False
    ranks: Sequence[dict[str, int]] = ()  # of each pipeline rank, the bytes by kind
    seconds: float | None = None  # of a step; None = not modelled
    tokens_per_second: float | None = None  # of a GPU


def make_choice(plan: MemoryPlan, time_plan: TimePlan | str, table: CostTable) -> Choice:
    """Return the figures of a memory plan and a time plan (or why the time is not modelled)."""
    gpu, peak = get_gpu(table.gpu), plan.largest.num_bytes
    fits = peak <= gpu.memory and plan.count_pinned_bytes(gpu) <= gpu.host_memory
    line = time_plan if isinstance(time_plan, str) else time_plan.line
    memory = f"peak memory {format_bytes(peak)} of {format_bytes(gpu.memory)}"
    return Choice(
        line=f"{line}; {memory}{'' if fits else ': does not fit'}",
        fits=fits,
        ranks=[dict(rank.device) for rank in plan.ranks],
        seconds=getattr(time_plan, "seconds", None),
        tokens_per_second=getattr(time_plan, "tokens_per_gpu_second", None),
    )


def format_key(run: TrainingRun) -> str:
    """Return a run's key among the choices: "sequence length,batch size,recomputed parts"."""
    return f"{run.seq_len},{run.batch_size},{' '.join(run.memory.parts) or 'nothing'}"


def plan_choices(run: TrainingRun, table: CostTable) -> dict[str, dict[str, Any]]:
    """Return the fields of each valid `Choice` near `run`, by `format_key`.

    The sets of recomputed parts are the set of `run`, none, and the first set of each overhead in
    `OPTIONS`.
    A choice is planned if it is `run`, or if the same recompute fits with the next smaller
    sequence length and the next smaller batch size. A plan takes about 0.3 s of CPU time.
    """
    plain = replace(run, memory=replace(run.memory, recompute=()))
    by_overhead = dict[str | None, MemoryOptions]()
    for option in OPTIONS:
        memory = replace(plain.memory, recompute=option.apply(plain, table.gpu).memory.recompute)
        if memory.recompute:
            by_overhead.setdefault(option.overhead, memory)
    memories = {m.parts: m for m in (plain.memory, *by_overhead.values(), run.memory)}
    choices, too_large = dict[str, Choice](), set[tuple[Any, ...]]()
    for memory, (i, length), (j, rows) in product(
        memories.values(), enumerate(SCALES), enumerate(SCALES)
    ):
        model, seq_len = run.model, int(length * run.seq_len)
        try:
            if isinstance(model, DecoderConfig):
                model = replace(model, max_seq_len=max(model.max_seq_len, seq_len))
            batch_size = int(rows * run.batch_size)
            other = replace(run, model=model, seq_len=seq_len, batch_size=batch_size, memory=memory)
            key, smaller = format_key(other), {(memory, i - 1, j), (memory, i, j - 1)}
            if other != run and smaller & too_large:
                choice = Choice(line=TOO_LARGE)
            else:
                refusal = find_time_refusal(run.precision, table.gpu)
                time_plan = refusal or plan_time(other, table)
                choice = make_choice(plan_memory(other), time_plan, table)
        except (ValueError, NotImplementedError):  # half a row, or options that exclude each other
            continue
        choices[key] = choice
        if not choice.fits:
            too_large.add((memory, i, j))
    return {key: asdict(choice) for key, choice in choices.items()}
