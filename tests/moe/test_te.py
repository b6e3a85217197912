"""Layers and models whose products are Transformer Engine's, by `te_definition.py`: over ranks too.

Six ranks, so that no two dims of the expert mesh that exceed 1 have one size.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import (
    CapacityConfig,
    CloneOptions,
    DispatchOptions,
    FSDPOptions,
    MemoryOptions,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    TrainStep,
    build_meshes,
)
from moecore import parallelize_moe as parallelize
from moecore.base import transformer_engine as te
from moecore.base.options.precision import Precision, Recipe
from moecore.io import load, save
from moecore.models import Decoder
from moecore.precision.te import TELinearProducts
from moecore.train import AdamW
from moecore.train.graphs.forward_backward import _check_dispatchers
from tests.helpers.ranks import ranks_fixture
from tests.helpers.te_definition import te_defined
from tests.moe.dispatchers import by_stores
from tests.moe.test_experts_fp8_ranks import (
    CONFIG,
    FOLDINGS,
    WORLD,
    gradient_of,
    largest,
    make_decoder,
    run_whole,
)

BLOCKWISE = Recipe(backend="te")
# Folding, dispatcher, clones, whether experts are in FP8.
CASES = [
    ("ep6", "alltoall", None, True),
    ("ep3-edp2", "allgather", None, True),
    ("ep3-etp2", "nvlink", None, True),
    ("ep6", "hierarchical", None, True),
    ("edp6", "local", None, True),
    ("ep3-etp2", "allgather", CloneOptions(per_rank=1, min_share=0.0), True),
    ("ep3-etp2", "alltoall", None, False),
    ("ep3-edp2", "nvlink", None, False),
]


def batch(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(30 + 4 * rank, 128, generator=generator)


def make_layer(backend: Any, recipe: Recipe | None) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(CONFIG)
    layer.get_part("experts").set_backend(backend, recipe=recipe)
    return layer


@cache
def one_process(ranks: tuple[int, ...], is_fp8: bool) -> dict[str, Tensor]:
    """Output, input gradient and gradients of one process: in FP8 its own, else torch's."""
    layer = make_layer("te", BLOCKWISE) if is_fp8 else make_layer("torch", None)
    return run_whole(layer, [batch(rank) for rank in ranks])


def errors(folding, dispatcher, clones, is_fp8, rank) -> dict[str, float]:
    """Relative error of each quantity, the worst of all ranks."""
    model = nn.Sequential(make_layer("torch", None))
    meshes = build_meshes(ParallelConfig(**FOLDINGS[folding]), "cpu", ranks_per_domain=2)
    name: Any = "alltoall" if dispatcher == "nvlink" else dispatcher
    parallelize(
        model,
        meshes,
        dispatch=DispatchOptions(name=name, clones=clones),
        expert_backend="te",
        precision=BLOCKWISE if is_fp8 else None,
        loss="sum",
    )
    if dispatcher == "nvlink":
        model[0].dispatcher = by_stores(model[0].dispatcher.placement, max_tokens=50)
    x = batch(rank).requires_grad_()
    y = model(x)
    y.backward(gradient_of(y))
    found = {n.removeprefix("0."): p.grad.full_tensor() for n, p in model.named_parameters()}
    found |= {"y": y.detach(), "x": x.grad}
    alone, together = one_process((rank,), is_fp8), one_process(tuple(range(WORLD)), is_fp8)
    wrong = {}
    for name, ours in found.items():
        theirs = (alone if name in ("y", "x") else together)[name]
        wrong[name] = float((ours - theirs).norm() / theirs.norm())
    return largest(wrong)


def worker(rank: int, device: torch.device) -> dict[int, Any]:
    with te_defined():
        return {i: errors(*case, rank) for i, case in enumerate(CASES)}


results = ranks_fixture(WORLD, worker)


@pytest.mark.parametrize("i", range(len(CASES)), ids=lambda i: "-".join(map(str, CASES[i][:2])))
def test_ranks_equal_one_process(i: int, results: dict[int, Any]) -> None:
    # Scales of powers of two move exponents alone, so no folding changes what is rounded.
    assert max(results[i].values()) < 1e-5


@pytest.fixture
def defined() -> Iterator[None]:
    with te_defined():
        yield


def decoder() -> Decoder:
    moe = MoEConfig(dim=128, hidden_dim=128, num_experts=4, top_k=2, shared_hidden_dim=64)
    return make_decoder(moe, vocab_size=60)


def trained(steps: int = 2, **how: Any) -> tuple[nn.Module, AdamW, list[float]]:
    model = parallelize(decoder(), build_meshes(ParallelConfig(), "cpu"), **how)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, train(model, optimizer, steps)


def train(model: nn.Module, optimizer: AdamW, steps: int) -> list[float]:
    step, losses = TrainStep(model, optimizer, num_micro_batches=2), []
    tokens = torch.randint(0, 60, (2, 2, 17), generator=torch.Generator().manual_seed(3))
    tokens = tokens.to(next(model.parameters()).device)
    for _ in range(steps):
        for batch_BT in tokens:
            with step.micro_batch():
                loss = model(batch_BT[:, :-1], batch_BT[:, 1:])
                loss.backward()
            losses.append(loss.item())
        step.finish()
    return losses


@pytest.mark.parametrize(
    "how",
    [
        dict(expert_backend="te"),
        dict(precision=BLOCKWISE),
        dict(precision=BLOCKWISE, memory=MemoryOptions(recompute=("expert_fc1", "norm"))),
        dict(precision=Recipe(backend="te", scaling="mxfp8")),
        dict(
            precision=Precision(
                recipe=Recipe(backend="te", scaling="tensorwise", amax_history=2),
                roles=("mlp", "attention"),
            )
        ),
    ],
    ids=["wide", "blockwise", "recompute", "mxfp8", "delayed"],
)
def test_a_model_trains(defined: None, how: dict[str, Any]) -> None:
    """Against moecore's own, of the same scaling or of none."""
    own = dict(how, expert_backend="auto")
    if "precision" in how:
        precision = Precision.of(how["precision"])
        own["precision"] = replace(precision, recipe=replace(precision.recipe, backend="moecore"))
    model, _, losses = trained(**how)
    _, _, expected = trained(**own)
    # moecore's blockwise experts make weight gradients of rows that were quantised along columns.
    bound = 1e-5 if how.get("expert_backend") else 2e-3
    assert losses == pytest.approx(expected, rel=bound)
    linears = [m for m in model.modules() if hasattr(m, "products") and isinstance(m, nn.Linear)]
    assert bool(linears) == ("precision" in how)
    assert all(isinstance(m.products, TELinearProducts) for m in linears)


def test_checkpoints_are_interchangeable(defined: None, tmp_path: Path) -> None:
    model, optimizer, _ = trained(precision=BLOCKWISE)
    path = save(tmp_path, 1, model, optimizer)
    own, again = (trained(0, precision=p) for p in ("blockwise", BLOCKWISE))
    found = []
    for other, of_other, _ in (own, again):
        load(path, other, of_other)
        found.append(train(other, of_other, 1))
    assert found[1] == train(model, optimizer, 1) and found[0] == pytest.approx(found[1], rel=2e-3)
    assert list(own[0].state_dict()) == list(model.state_dict())


def test_padded_rows_and_plain_layers(defined: None) -> None:
    """A plain layer pads its rows; a capacity, no tokens and eval go the same way."""
    layer = make_layer("te", BLOCKWISE)
    assert layer.get_part("experts").rows_multiple == 16 and layer.get_part("experts").waits_on_host
    layer.get_part("experts").set_backend("te")
    assert layer.get_part("experts").rows_multiple == 1
    layer.get_part("experts").set_backend("auto", recipe=BLOCKWISE)
    assert layer(torch.zeros(0, 128)).shape == (0, 128) and "Transformer Engine" in repr(layer)
    limited = replace(CONFIG, capacity=CapacityConfig(factor=1.0, pad=True))
    torch.manual_seed(0)
    small = MoELayer(limited)
    small.load_state_dict(layer.state_dict())
    small.get_part("experts").set_backend("te", recipe=BLOCKWISE)
    own = MoELayer(limited)
    own.load_state_dict(layer.state_dict())
    own.get_part("experts").set_backend("auto", recipe=Recipe())
    x = batch(0)
    torch.testing.assert_close(small(x), own(x), rtol=2e-2, atol=2e-3)


def test_graphs_refuse_what_waits_for_the_host(defined: None) -> None:
    layer = make_layer("te", None)
    state: Any = SimpleNamespace(layers={"0.moe": layer})
    message = "expert_backend of 0.moe ('te') must be 'auto', 'triton' or 'torch' for a CUDA graph"
    with pytest.raises(ValueError, match=re.escape(message)):
        _check_dispatchers(state)
    layer.get_part("experts").set_backend("torch")
    _check_dispatchers(state)


def test_refusals_of_a_call(defined: None) -> None:
    meshes = build_meshes(ParallelConfig(), "cpu")
    gathered = FSDPOptions(fp8_param_gather=True)
    for how, message in (
        (dict(expert_backend="te", precision="blockwise"), "or Recipe.backend ('moecore') 'te'"),
        (dict(expert_backend="torch", precision=BLOCKWISE), "must be 'auto' or 'te' for experts"),
        (dict(precision=BLOCKWISE, fsdp=gathered), "must go with weights that several ranks share"),
        (dict(precision=Recipe(backend="te", scaling="tensorwise", amax_history=2)), "must be 0"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            parallelize(decoder(), meshes, **how)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "how", [dict(expert_backend="te"), dict(precision=Precision(recipe=BLOCKWISE, roles=("mlp",)))]
)
def test_without_transformer_engine_a_call_says_what_to_install(how, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    te.import_transformer_engine.cache_clear()
    with pytest.raises(ValueError, match=r"pip install .*moecore") as it:
        parallelize(decoder(), build_meshes(ParallelConfig(), "cpu"), **how)
    assert "\n" not in str(it.value)
