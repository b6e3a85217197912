"""Ranks that share rows but receive other arguments: each of these ranks raises, and loses nothing.

A step has two micro-batches, of 2 x 8 and of 4 x 4 tokens: all ranks have seen both shapes when
one rank receives something else. Rank 1 does in the first forward, ranks 1 and 3 in a later one,
so that each of the two groups that share rows has a rank that differs.
"""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore import (
    ContextOptions,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
    build_meshes,
    clip_grad_norm_,
    parallelize_moe,
)
from moecore.base.rank_checks import gather_objects
from moecore.models import Decoder
from moecore.parallel.arguments import ADVICE
from tests.helpers.errors import error_of
from tests.helpers.grids import asked_for
from tests.helpers.ranks import run_ranks
from tests.parallel.small_decoder import small_decoder

pytestmark = pytest.mark.slow

WORLD, ROWS, LENGTH = 4, 2, 8
ODD = 1  # the rank that is given something else
CONFIG = small_decoder(16, 8, vocab_size=60, num_heads=2, max_seq_len=4 * LENGTH)
# Ranks 0 and 1 share rows, and so do 2 and 3; with stages 0 and 2 as well, and 1 and 3.
LAYOUTS: dict[str, tuple[ParallelConfig, dict[str, Any], dict[str, Any]]] = {
    "tp": (ParallelConfig(tp=2), {}, {}),
    "cp": (ParallelConfig(cp=2), {}, {}),
    "dynamic cp": (
        ParallelConfig(ep=2),
        dict(context=ContextOptions(dynamic=True), loss="sum"),
        dict(cp=2, num_tokens=2 * ROWS * LENGTH),
    ),
    "stages": (ParallelConfig(pp=2, tp=2), dict(pipeline=PipelineConfig(schedule="1f1b")), {}),
}
Change = Callable[[dict[str, Any]], Any]


def qwen3_moe() -> nn.Module:
    from tests.families.transformers.hf_models import qwen3_moe

    return qwen3_moe(num_hidden_layers=1)


OF_FAMILY = {"transformers tp": ParallelConfig(tp=2, ep=2), "transformers cp": ParallelConfig(cp=2)}
LAYOUTS |= {name: (parallel, {}, {}) for name, parallel in OF_FAMILY.items()}


def with_documents(given: dict[str, Any]) -> None:
    ends = torch.arange(0, ROWS * LENGTH + 1, LENGTH // 2, dtype=torch.int32)
    given |= dict(cu_seqlens=ends, max_seqlen=LENGTH // 2)


def of_shape(given: dict[str, Any], *shape: int) -> dict[str, Any]:
    return given | {n: given[n].reshape(shape) for n in ("tokens_BT", "labels_BT")}


CHANGES: dict[str, tuple[Change, str]] = {
    "tokens": (lambda given: given.update(tokens_BT=60 - given["tokens_BT"]), "tokens_BT"),
    "labels": (lambda given: given.update(labels_BT=-given["labels_BT"]), "labels_BT"),
    "length": (
        lambda given: given.update({n: given[n][:, 2:] for n in ("tokens_BT", "labels_BT")}),
        "and 1 more",
    ),
    "shape of as many tokens": (lambda given: given.update(of_shape(given, 4, 4)), "and 1 more"),
    "dtype": (lambda given: given.update(tokens_BT=given["tokens_BT"].int()), "tokens_BT"),
    "padding": (
        lambda given: given.update(padding_mask_BT=given["tokens_BT"] < 30),
        "names of arguments",
    ),
}
OF_NATIVE: dict[str, tuple[Change, str]] = {
    "number of labels": (lambda given: given.update(num_tokens=1), "num_tokens"),
    "documents": (with_documents, "names of arguments"),
}
OF_TRANSFORMERS: dict[str, tuple[Change, str]] = {
    "Python value": (lambda given: given.update(use_cache=0), "use_cache")
}


def changes_of(layout: str) -> dict[str, tuple[Change, str]]:
    return CHANGES | (OF_TRANSFORMERS if layout in OF_FAMILY else OF_NATIVE)


LATE = [(False, False), (True, False), (True, True)]  # (fused, is_slow) of `Late`
CASES = [(layout, name) for layout in LAYOUTS for name in changes_of(layout)]


def inputs(layout: str) -> list[dict[str, Any]]:
    """Return the micro-batches of this rank's data rank."""
    parallel, _, more = LAYOUTS[layout]
    data = dist.get_rank() // 2 if parallel.pp == 1 else 0
    generator = torch.Generator().manual_seed(data)
    tokens, labels = torch.randint(1, 60, (2, 2 * ROWS, LENGTH), generator=generator)
    whole = dict(num_tokens=8 * LENGTH) | more if layout not in OF_FAMILY else {"use_cache": False}
    parts = zip(tokens.split(ROWS), labels.split(ROWS), strict=True)
    first, second = (dict(tokens_BT=x, labels_BT=y) | whole for x, y in parts)
    return [first, of_shape(second, 4, 4)]


def named(layout: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by the names that the model has for them."""
    if layout not in OF_FAMILY:
        return given
    names = dict(tokens_BT="input_ids", labels_BT="labels", padding_mask_BT="attention_mask")
    return {names.get(name, name): value for name, value in given.items()}


def build(layout: str) -> Any:
    parallel, options, _ = LAYOUTS[layout]
    torch.manual_seed(0)
    plain = qwen3_moe() if layout in OF_FAMILY else Decoder(CONFIG)
    return parallelize_moe(plain, build_meshes(parallel, "cpu"), **options)


def run(step, layout, change=None, *, odd, place=0, runs=TrainStep.forward_backward):
    """Return the error of a step that `odd` ranks change, or its losses; drop the step."""
    given = inputs(layout)
    if change is not None and dist.get_rank() in odd:
        change(given[place])
    losses, problem = None, None
    try:
        losses = runs(step, [named(layout, one) for one in given])
    except ValueError as error:
        problem = str(error)
    step.drop()
    return problem, losses


def steps_of(layout: str) -> dict[str, Any]:
    """Return what a model's first step raises, and what later steps do."""
    step = TrainStep(build(layout), num_micro_batches=2)
    change = CHANGES["tokens"][0]
    found: dict[str, Any] = {"first": run(step, layout, change, odd=[ODD])[0]}
    found["right"] = run(step, layout, odd=[])
    for name, (each, _) in changes_of(layout).items():
        found[name] = run(step, layout, each, odd=[ODD, WORLD - 1])[0]
    found["second"] = run(step, layout, change, place=1, odd=[ODD, WORLD - 1])[0]
    found["losses"] = run(
        step, layout, change, odd=[ODD, WORLD - 1], runs=TrainStep.compute_losses
    )[0]
    found["again"] = run(step, layout, odd=[])
    return found


class Late:
    """A step whose contents are compared on the device, driven with CPU tensors."""

    def __init__(self, *, fused: bool | None, is_slow: bool) -> None:
        self.model = build("tp")
        optimizer: Any = None
        if fused is not None:
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=fused)
        self.step = TrainStep(self.model, optimizer, num_micro_batches=2)
        # Only odd ranks see a verdict before they wait for one: the others must raise with them.
        self._sees = not is_slow or dist.get_rank() % 2 == 1

    def run(self, what: Callable[[], Any]) -> Any:
        """Return what a function returns, or the text of its error."""
        with (
            patch("moecore.parallel.arguments.is_on_host", return_value=False),
            patch("moecore.base.streams.HostCopyOfTensor.has_arrived", return_value=self._sees),
        ):
            try:
                return what()
            except ValueError as error:
                return str(error)

    def forward_backward(self, *, odd: Sequence[int], change: str = "tokens") -> Any:
        given = inputs("tp")
        if dist.get_rank() in odd:
            CHANGES[change][0](given[1])
        return self.run(lambda: self.step.forward_backward(given))

    def weights(self) -> list[Tensor]:
        return [param.to_local().clone() for param in self.model.parameters()]


def late_errors(*, fused: bool, is_slow: bool) -> dict[str, Any]:
    """Return what steps do of which rank 1, or ranks 1 and 3, have other tokens."""
    late, found = Late(fused=fused, is_slow=is_slow), dict[str, Any]()
    found["first"] = late.forward_backward(odd=[])
    late.run(late.step.finish)
    before = late.weights()
    found["forward"] = late.forward_backward(odd=[ODD, WORLD - 1])
    found["finish"] = late.run(lambda: bool(late.step.finish().is_skipped))
    found["next forward"] = late.forward_backward(odd=[])
    late.step.drop()
    found["one group"] = late.forward_backward(odd=[ODD]), late.run(late.step.finish)
    found["check"] = late.run(late.step.check)
    found["is unchanged"] = all(map(torch.equal, before, late.weights()))
    found["shapes"] = late.forward_backward(odd=[ODD, WORLD - 1], change="length")
    late.step.drop()
    found["again"] = late.forward_backward(odd=[])
    found["skipped"] = late.run(lambda: bool(late.step.finish().is_skipped))
    found["has trained"] = not any(map(torch.equal, before, late.weights()))
    return found


def late_errors_of_a_loop() -> dict[str, Any]:
    """Return what a loop without a `TrainStep` sees, which clips its gradients."""
    late = Late(fused=None, is_slow=False)
    late.forward_backward(odd=[ODD])
    norm = late.run(lambda: clip_grad_norm_(late.model, 1.0))
    grads = [param.grad for param in late.model.parameters()]
    return {"finite": norm.finite, "grads": grads.count(None) == len(grads)}


def line_of_a_rank_that_compares_alone() -> str:
    """Return the error of a comparison in which other ranks do not take part."""
    ended = RuntimeError("gloo timed out")
    with patch("moecore.parallel.arguments.find_differences", side_effect=ended):
        return error_of(lambda: run(TrainStep(build("tp"), num_micro_batches=2), "tp", odd=[]))


def worker(rank: int, _device: torch.device, layouts: list[str]) -> Any:
    found: dict[Any, Any] = {"alone": line_of_a_rank_that_compares_alone()}
    for layout in layouts:
        found[layout] = steps_of(layout)
    for fused, is_slow in LATE:
        found["late", fused, is_slow] = late_errors(fused=fused, is_slow=is_slow)
    found["loop"] = late_errors_of_a_loop()
    return gather_objects(found)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("transformers", minversion="5")
    return run_ranks(WORLD, worker, asked_for(request, "layout"), over_gloo=True)


def are_refused(errors: Sequence[Any], name: str) -> bool:
    refused = f"must be the same {ADVICE.strip()}"
    return all(isinstance(e, str) and refused in e and name in e and "\n" not in e for e in errors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_forward_raises_on_every_rank(layout: str, found: Any) -> None:
    errors = [of_rank[layout]["first"] for of_rank in found]
    name = named(layout, {"tokens_BT": None}).popitem()[0]
    assert are_refused(errors if layout == "stages" else errors[: ODD + 1], name), errors
    assert all(error is not None for error in errors), "every rank raises"


@pytest.mark.parametrize(("layout", "change"), CASES)
def test_a_later_forward_raises_on_the_ranks_that_share_its_rows(layout, change, found) -> None:
    errors = [of_rank[layout][change] for of_rank in found]
    name = changes_of(layout)[change][1]
    assert are_refused(errors, named(layout, {name: None}).popitem()[0]), errors


@pytest.mark.parametrize("layout", LAYOUTS)
def test_later_micro_batches_and_losses_without_gradients_are_compared(layout, found) -> None:
    for which in ("second", "losses"):
        errors = [of_rank[layout][which] for of_rank in found]
        assert are_refused(errors, named(layout, {"tokens_BT": None}).popitem()[0]), errors


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_error_loses_nothing(layout: str, found: Any) -> None:
    for of_rank in found:
        (error, before), (error_after, after) = of_rank[layout]["right"], of_rank[layout]["again"]
        assert error is None and error_after is None
        assert before.isfinite().all() and before.shape == (2,) and torch.equal(before, after)


@pytest.mark.parametrize(("fused", "is_slow"), LATE)
def test_contents_on_a_device_skip_the_step_and_raise_later(fused, is_slow, found) -> None:
    of_ranks = [of_rank["late", fused, is_slow] for of_rank in found]
    for late in of_ranks:
        assert late["first"].shape == late["again"].shape == late["forward"].shape == (2,)
        # With a fused optimizer the host does not wait for the norm: the next forward raises.
        raises, passes = ("next forward", "finish") if fused else ("finish", "next forward")
        assert are_refused([late[raises]], "contents of tokens_BT"), late[raises]
        assert late["finish"] is True if fused else late["next forward"].shape == (2,), late[passes]
        assert are_refused([late["shapes"]], "labels_BT")
        assert late["is unchanged"] and not late["skipped"] and late["has trained"]
    sharing, others = of_ranks[: ODD + 1], of_ranks[ODD + 1 :]
    assert are_refused([one["check"] if fused else one["one group"][1] for one in sharing], "tok")
    for one in others:
        assert one["check"] is None and one["one group"][1].is_skipped, "no rank steps"


def test_a_loop_that_clips_loses_the_gradients_of_other_contents(found: Any) -> None:
    assert all(of_rank["loop"] == {"finite": False, "grads": True} for of_rank in found)


def test_a_rank_that_compares_alone_names_the_rows(found: Any) -> None:
    assert all(
        "comparison of rows, which ranks take by meshes.data_rank" in f["alone"] for f in found
    )
