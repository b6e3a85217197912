"""`PipelineLayout`: the parts of a model that each virtual stage runs, parsed from a string.

    "Et*3|(tt|)*29m|L"  ->  "Ettt", "tt", .., "tt", "m", "L"  ->  Stage 0 .. Stage 31

`E` is the embedding, `t` a transformer layer, `m` a multi-token prediction module, `L` the head
and the loss, `|` the border of two stages. `(..)` is a group, and `*3` repeats the letter or group
before it. A stage may be empty. Each of pp ranks has `chunks(pp)` stages. The schedule decides
which stages (`Schedule.rank_of`).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Annotated, Any

from moecore.base.fields import (
    Bound,
    CheckedRecord,
    FieldErrors,
    PositiveOrZero,
    check_arguments,
    check_value,
    quote,
)

MAX_LETTERS = 2**16  # limit of an expanded layout
NumStages = Annotated[int, Bound(">=", 1), Bound("<=", MAX_LETTERS)]
NumMTPLayers = Annotated[int, Bound(">=", 0), Bound("<=", MAX_LETTERS)]
TOKEN = re.compile(r"[EtmL|()]|\*[0-9]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """The layers of a model that one virtual stage runs."""

    index: int  # 0 .. num_stages - 1, in the order of forward
    embedding: bool  # whether the stage has the embedding
    layers: tuple[int, ...]  # consecutive indices of transformer layers
    mtp: tuple[int, ...]  # consecutive indices of multi-token prediction modules
    loss: bool  # whether the stage has the head and the loss

    @property
    def letters(self) -> str:
        """The stage in the letters of a layout string, such as "Ettt"."""
        return "E" * self.embedding + "t" * len(self.layers) + "m" * len(self.mtp) + "L" * self.loss


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineLayout:
    """The pipeline stages of a model, from `parse_layout`, `even_layout` or `balanced_layout`."""

    stages: tuple[Stage, ...]  # in the order of forward
    num_layers: int  # number of transformer layers
    num_mtp_layers: int  # number of multi-token prediction modules

    def chunks(self, pp: NumStages) -> int:
        """Return the number of stages per rank; ValueError if pp does not divide the stages."""
        check_value("pp", pp, NumStages)
        chunks, rest = divmod(len(self.stages), pp)
        if rest:
            num_stages = (chunks + 1) * pp
            even = _make_even_layout_text(self.num_layers, self.num_mtp_layers, num_stages)
            raise ValueError(
                f"layout ({quote(self.text)}) must have a number of stages that pp ({pp}) divides, "
                f"found {len(self.stages)}: use {even!r} of {num_stages}"
            )
        return chunks

    @property
    def text(self) -> str:
        """The shortest layout string of these stages, which `parse_layout` can read."""
        return _join_stage_letters([stage.letters for stage in self.stages])


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutCosts(CheckedRecord):
    """Time of a model's embedding, layers and head for one micro-batch, in any unit."""

    embedding: PositiveOrZero = 0.0  # the embedding
    layers: tuple[PositiveOrZero, ...]  # each transformer layer
    mtp: tuple[PositiveOrZero, ...] = ()  # each multi-token prediction module
    loss: PositiveOrZero = 0.0  # the head and the loss
    bound: frozenset[int] = frozenset()  # layers that cannot be the first layer of a stage

    def _find_field_errors(self) -> FieldErrors:
        if not self.layers:
            yield "layers", "have a cost per transformer layer: pass at least one"
        elif not self.bound <= {*range(1, len(self.layers))}:
            yield "bound", f"be of layers 1 to {len(self.layers) - 1}: leave the others out"


def parse_layout(
    text: str, *, num_layers: NumStages, num_mtp_layers: NumMTPLayers = 0
) -> PipelineLayout:
    """Parse a layout string such as "Et*3|(tt|)*29m|L", see `PipelineConfig`; spaces are ignored.

    Raises:
        ValueError: if the string is malformed, or does not have the model's numbers of layers.
    """
    check_arguments(parse_layout, locals())
    letters = _expand_layout_text(text)
    counts = {letter: letters.count(letter) for letter in "tm"}
    order = "".join(letter for letter, _ in groupby(letters.replace("|", "")))
    problem = ""
    if not letters.startswith("E") or letters.count("E") > 1:
        problem = f"have one E, at its start, found {letters.count('E')}"
    elif not letters.endswith("L") or letters.count("L") > 1:
        problem = f"have one L, at its end, found {letters.count('L')}"
    elif "mt" in order:
        problem = "have every m after the last t"
    elif counts["t"] != num_layers:
        problem = f"have one t per layer, found {counts['t']} for num_layers ({num_layers})"
    elif counts["m"] != num_mtp_layers:
        modules = f"num_mtp_layers ({num_mtp_layers})"
        problem = f"have one m per MTP module, found {counts['m']} for {modules}"
    if problem:
        even = _make_even_layout_text(num_layers, num_mtp_layers, letters.count("|") + 1)
        raise ValueError(f"layout ({quote(text)}) must {problem}: use {even!r}")
    return _make_layout(letters.split("|"))


def even_layout(
    num_layers: NumStages,
    *,
    num_stages: NumStages,
    num_mtp_layers: NumMTPLayers = 0,
    bound_layers: frozenset[int] = frozenset(),
) -> PipelineLayout:
    """Return a layout with equal numbers of layers per stage; first stages may have one more.

    The first stage has the embedding. The last stage has MTP modules, head and loss. If a stage
    would begin with a layer in `bound_layers`, it begins with the nearest layer not in the set.
    """
    check_arguments(even_layout, locals())
    return parse_layout(
        _make_even_layout_text(num_layers, num_mtp_layers, num_stages, bound_layers),
        num_layers=num_layers,
        num_mtp_layers=num_mtp_layers,
    )


def balanced_layout(costs: LayoutCosts, *, num_stages: NumStages) -> PipelineLayout:
    """Return the layout whose slowest stage has the least cost.

    If several layouts have this cost, the layout with the fewest layers in the last stage is
    chosen. If several layouts remain, the layout with the least sum of squared stage costs is
    chosen.
    """
    check_arguments(balanced_layout, locals())
    letters = "E" + "t" * len(costs.layers) + "m" * len(costs.mtp) + "L"
    parts = [0.0, *accumulate([costs.embedding, *costs.layers, *costs.mtp, costs.loss])]
    # Parts with which a stage can begin.
    places = [i for i in range(len(parts)) if i - 1 not in costs.bound]
    sums = [parts[place] for place in places]
    max_cost = _find_min_bottleneck(sums, num_stages)
    max_cost *= 1 + 1e-9  # sums of equal costs differ in the last bit
    borders = [places[i] for i in _find_stage_borders(sums, num_stages, max_cost)]
    return _make_layout([letters[i:j] for i, j in pairwise(borders)])


def _expand_layout_text(text: str) -> str:
    """Return the letters of a layout string with expanded groups and repetitions, no spaces."""
    plain = re.sub(r"\s", "", text)
    tokens = TOKEN.findall(plain)
    if "".join(tokens) != plain:
        wrong = quote(TOKEN.sub(" ", plain).split()[0])
        _raise_layout_error(text, f"be of E, t, m, L, |, ( ) and *n, found {wrong}", "remove it")
    groups: list[list[str]] = [[]]  # open groups, with the expanded items of each
    sizes = [0]  # number of letters in each open group
    for token in tokens:
        if token == "(":
            groups.append([])
            sizes.append(0)
        elif token == ")":
            if len(groups) == 1:
                _raise_layout_error(text, "have a ( for each )", "remove the )")
            inner = "".join(groups.pop())
            groups[-1].append(inner)
            sizes.pop()
            sizes[-1] += len(inner)
        elif token[0] == "*":
            if not groups[-1]:
                _raise_layout_error(text, f"have a letter or a group before {token}", "remove it")
            times = int(token[1:6]) if len(token) <= 6 else MAX_LETTERS + 1
            letters, limit = len(groups[-1][-1]), f"have at most {MAX_LETTERS} letters"
            if letters * times > MAX_LETTERS:
                _raise_layout_error(text, limit, f"lower {token[:9]}")
            groups[-1][-1] *= times
            sizes[-1] += letters * (times - 1)
        else:
            groups[-1].append(token)
            sizes[-1] += 1
        if sizes[-1] > MAX_LETTERS:
            _raise_layout_error(text, f"have at most {MAX_LETTERS} letters", "lower a repetition")
    if len(groups) > 1:
        _raise_layout_error(text, "have a ) for each (", "close the group")
    return "".join(groups[0])


def _raise_layout_error(text: str, relation: str, fix: str) -> None:
    raise ValueError(f"layout ({quote(text)}) must {relation}: {fix}")


def _make_even_layout_text(
    num_layers: int,
    num_mtp_layers: int,
    num_stages: int,
    bound_layers: frozenset[int] = frozenset(),
) -> str:
    """Return a layout string with equal numbers of layers per stage, as `even_layout` describes."""
    base_size, num_larger = divmod(num_layers, num_stages)
    first = [base_size * stage + min(stage, num_larger) for stage in range(num_stages + 1)]
    free = [0, *(layer for layer in range(1, num_layers) if layer not in bound_layers), num_layers]
    if bound_layers:
        first = [min((abs(layer - want), layer) for layer in free)[1] for want in first]
    stages = ["t" * (j - i) for i, j in pairwise(first)]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * num_mtp_layers + "L"
    return _join_stage_letters(stages)


def _join_stage_letters(stage_letters: Sequence[str]) -> str:
    """Join each stage's letters, such as "Ettt", into a short layout string with repetitions."""
    short = [re.sub(r"(.)\1{2,}", lambda run: f"{run[1]}*{len(run[0])}", s) for s in stage_letters]
    text = ""
    for stage, run in groupby(short[:-1]):
        times = len(list(run))
        text += min(f"{stage}|" * times, f"({stage}|)*{times}", key=len)
    return text + short[-1]


def _make_layout(stage_letters: Sequence[str]) -> PipelineLayout:
    """Return the layout with these letters for each stage, such as "Ettt"; number its layers."""
    first = {letter: [0, *accumulate(s.count(letter) for s in stage_letters)] for letter in "tm"}

    def indices(letter: str, stage: int) -> tuple[int, ...]:
        return tuple(range(first[letter][stage], first[letter][stage + 1]))

    parsed = []
    for i, letters in enumerate(stage_letters):
        ends: Any = dict(embedding="E" in letters, loss="L" in letters)
        parsed.append(Stage(index=i, layers=indices("t", i), mtp=indices("m", i), **ends))
    return PipelineLayout(
        stages=tuple(parsed), num_layers=first["t"][-1], num_mtp_layers=first["m"][-1]
    )


def _find_min_bottleneck(cu_costs: Sequence[float], num_stages: int) -> float:
    """Return the least possible cost of the slowest stage; cumulative costs begin with 0."""
    last = len(cu_costs)
    limits = sorted({cu_costs[j] - cu_costs[i] for i in range(last) for j in range(i + 1, last)})

    def suffices(max_cost: float) -> bool:
        stages, start = 1, 0
        for end in range(1, last):
            if cu_costs[end] - cu_costs[start] > max_cost:
                stages, start = stages + 1, end - 1
                if cu_costs[end] - cu_costs[start] > max_cost:
                    return False
        return stages <= num_stages

    return limits[bisect_left(limits, True, key=suffices)]


def _find_stage_borders(cu_costs: Sequence[float], num_stages: int, max_cost: float) -> list[int]:
    """Return the borders of stages of cost <= `max_cost`, with the least sum of squared costs."""
    last = len(cu_costs) - 1
    # Stage 0 has the embedding and the last stage has the loss, so both are not empty.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]  # by end: sum of squares, start
    for stage in range(num_stages):
        ends: dict[int, tuple[float, int]] = {}
        for start, (squares, _) in best[-1].items():
            for end in range(start, len(cu_costs)):
                if cu_costs[end] - cu_costs[start] > max_cost:
                    break
                is_open = (stage == 0 and end == 0) or (stage < num_stages - 1 and end == last)
                candidate = (squares + (cu_costs[end] - cu_costs[start]) ** 2, start)
                if not is_open and (end not in ends or candidate < ends[end]):
                    ends[end] = candidate
        best.append(ends)
    borders = [last]
    if num_stages > 1:  # the fewest parts in the last stage
        borders.append(max(s for s in best[-2] if cu_costs[last] - cu_costs[s] <= max_cost))
    for ends in best[len(best) - len(borders) : 0 : -1]:
        borders.append(ends[borders[-1]][1])
    return borders[::-1]
