from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import (
    BalanceConfig,
    MoELayer,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.rank_checks import gather_objects
from moecore.models import Decoder, preset
from moecore.moe.balance import LOSS_NAMES
from tests.helpers.errors import error_of
from tests.helpers.ranks import run_ranks
from tests.moe.moe_cases import BASE, leaves, make_layer
from tests.moe.reference import moe_reference
from tests.moe.test_balance import only

pytestmark = pytest.mark.slow

WORLD, COEF = 3, 0.5
# Whether each rank has tokens, in each micro-batch.
CASES: dict[str, list[tuple[bool, ...]]] = {
    "no rank": [(False, False, False)],
    "two ranks, all later": [(False, False, True), (False, False, False)],
    "both": [(False, False, False), (True, False, True), (True, True, False)],
    "uneven": [(True, True, False), (False, False, True)],  # three pairs: each weighs 1/3
}
# Documents of each data rank in each of two micro-batches; seven of eight pairs have tokens.
DOCUMENTS = [[[9, 1, 4], []], [[5, 2], [14, 1, 3]], [[8, 8, 2, 6], [7, 3]], [[2, 1], [4, 6, 5]]]
LAYOUTS: list[dict[str, int]] = [dict(ep=2), dict(tp=2), dict(cp=2), dict(pp=2), dict(ep=2, tp=2)]


class Model(nn.Module):
    """A layer alone, so that a loss of 0 leaves the auxiliary losses."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, padding_mask_BT: Tensor | None = None) -> Tensor:
        return self.layer(x, padding_mask_BT).sum() * 0


def tokens(rank: int, place: int) -> Tensor:
    return torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(10 * place + rank))


def expected(name: str, case: list[tuple[bool, ...]]) -> tuple[float, Tensor]:
    """Return the mean over the pairs of micro-batch and rank with tokens, and its gradient."""
    config = replace(BASE, balance=only(name, COEF))
    params, pairs = leaves(make_layer(config)), []
    seen_E = torch.zeros(config.num_experts)
    for place, have in enumerate(case):
        outs = [moe_reference(tokens(r, place), params, config) for r in range(WORLD) if have[r]]
        seen_E = seen_E + sum(out.counts_E for out in outs)
        share_E = seen_E / seen_E.sum().clamp(min=1)
        losses = [
            COEF * config.num_experts * (share_E * out.mean_scores_E).sum()
            if name == "global_batch"
            else out.losses[name]
            for out in outs
        ]
        pairs += losses
    if not pairs:
        return 0.0, torch.zeros_like(params["router.weight"])
    mean = torch.stack(pairs).mean()
    mean.backward()
    return float(mean), params["router.weight"].grad


def found_of(rank: int, name: str, case: list[tuple[bool, ...]], how: str, loss: Any) -> Any:
    config = replace(BASE, balance=only(name, COEF))
    model: Any = Model(make_layer(config))
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), loss=loss)
    step = TrainStep(model, num_micro_batches=len(case))
    batches = []
    for place, have in enumerate(case):
        x = tokens(rank, place)
        if how == "rows" and not have[rank]:
            x = x[:0]
        batches.append(dict(x=x, padding_mask_BT=torch.full(x.shape[:2], not have[rank])))
    if how == "rows":
        step.announce(batches)
        for batch in batches:
            with step.micro_batch():
                model(batch["x"]).backward()
    else:
        step.forward_backward(batches)
    grad = model.layer.router.weight.grad
    grad = torch.zeros(()) if grad is None else grad.full_tensor()
    return float(step.finish().metrics.aux_losses["layer"][LOSS_NAMES.index(name)]), grad


def refusal_of_a_loop(numbers: tuple[int, int]) -> str:
    """Return the error of a step whose micro-batches have these rows and were not announced."""
    model: Any = Model(make_layer(replace(BASE, balance=only("z", COEF))))
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"))
    step = TrainStep(model, num_micro_batches=2)
    for place, number in enumerate(numbers):
        with step.micro_batch():
            model(tokens(0, place)[:number]).backward()
    error = error_of(step.finish)
    step.drop()
    return error


def worker(rank: int, _device: torch.device) -> Any:
    wrong: list[Any] = []
    for numbers, ranks in (((2, 0), "[3, 0]"), ((2, min(rank, 1)), "[3, 2]")):
        refusal = refusal_of_a_loop(numbers)
        if not refusal.startswith(
            f"micro-batches (with tokens on {ranks} ranks) must be announced"
        ):
            wrong.append(refusal)
    for name in LOSS_NAMES:
        for label, case in CASES.items():
            value, grad = expected(name, case)
            ways = [("padding", "mean"), ("rows", "sum")]
            for how, loss in ways if label in ("both", "uneven") else ways[:1]:
                got, got_grad = found_of(rank, name, case, how, loss)
                near = abs(got - value) <= 1e-5 * abs(value)
                near &= bool((got_grad - grad).abs().max() <= 1e-5 * grad.abs().max())
                wrong += [] if near else [(name, label, how, got, value)]
    return gather_objects(wrong)


def test_what_has_no_tokens_weighs_nothing() -> None:
    assert run_ranks(WORLD, worker) == [[]] * WORLD


def decoder(z_loss_coef: float) -> Decoder:
    config = preset("tiny-qwen3")
    assert config.moe is not None
    balance = BalanceConfig(micro_batch_coef=6 * z_loss_coef, z_loss_coef=z_loss_coef)
    return Decoder(replace(config, moe=replace(config.moe, balance=balance)))


def batch_of(document: list[int]) -> dict[str, Tensor]:
    padding = 8 - len(document)
    labels = [*document[1:], *[-100] * (9 - max(len(document), 1))]
    return dict(
        tokens_BT=torch.tensor([document + [0] * padding]),
        labels_BT=torch.tensor([labels]),
        padding_mask_BT=torch.tensor([[False] * len(document) + [True] * padding]),
    )


@cache
def router_gradients(document: tuple[int, ...], z_loss_coef: float) -> dict[str, Tensor]:
    """Return the gradients of one document alone in a plain process."""
    model = decoder(z_loss_coef)
    model(**batch_of(list(document))).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if "router" in name}
    return {name: grad for name, grad in grads.items() if grad is not None}


def layouts_worker(rank: int, _device: torch.device) -> Any:
    wrong = []
    for layout in LAYOUTS:
        meshes = build_meshes(ParallelConfig(**layout), "cpu")
        documents = [document for of_rank in DOCUMENTS[: meshes.data_ranks] for document in of_rank]
        main = [router_gradients(tuple(document), 0.0) for document in documents if document]
        total = [router_gradients(tuple(document), 0.05) for document in documents if document]
        wanted = {
            # The main loss is the mean over all pairs, an auxiliary loss over those with tokens.
            name: sum(a[name] for a in main) / len(documents)
            + sum(b[name] - a[name] for a, b in zip(main, total, strict=True)) / len(main)
            for name in total[0]
        }
        pipeline = PipelineConfig() if meshes.parallel.pp > 1 else None
        model = parallelize_moe(decoder(0.05), meshes, pipeline=pipeline)
        step = TrainStep(model, num_micro_batches=2)
        step.forward_backward([batch_of(document) for document in DOCUMENTS[meshes.data_rank]])
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for name in (name for name in wanted if name in found):  # in one order on all ranks
            grad, want = found[name].full_tensor(), wanted[name]
            if (grad - want).abs().max() > 1e-5 * want.abs().max():
                wrong.append((layout, name, float((grad - want).abs().max() / want.abs().max())))
        step.finish()
    return gather_objects(wrong)


def test_every_layout_has_the_mean_over_what_has_tokens() -> None:
    assert run_ranks(4, layouts_worker) == [[]] * 4
