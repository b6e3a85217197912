from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import (
    MoELayer,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.rank_checks import gather_objects
from moecore.moe.balance import LOSS_NAMES
from tests.helpers.errors import error_of
from tests.helpers.ranks import run_ranks
from tests.models.plain_decoder import plain_losses
from tests.models.test_mtp import CONFIGS, make
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
# Tokens of the two documents in each of two micro-batches of a data rank. Seven of eight pairs have
# tokens, six have tokens with a next token, and four a token after that.
LENGTHS = [[3, 0], [2, 3], [4, 2], [1, 3]]
LAYOUTS: list[tuple[str, dict[str, int]]] = [
    ("latent, 2", dict(ep=2)),
    ("latent, repeated", dict(tp=2)),
    ("latent, 2", dict(cp=2)),
    ("latent, repeated", dict(pp=2)),
    ("latent, 2", dict(ep=2, tp=2)),
]


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


def batch_of(rank: int, place: int) -> dict[str, Tensor]:
    """Return two documents of `LENGTHS`, each in four places of one row."""
    length = LENGTHS[rank][place]
    generator = torch.Generator().manual_seed(10 * place + rank)
    tokens = torch.randint(0, 60, (2, 4), generator=generator)
    labels, places = tokens.roll(-1, 1), torch.arange(4)
    labels[:, max(length - 1, 0) :] = -100
    return dict(
        tokens_BT=tokens.view(1, 8),
        labels_BT=labels.view(1, 8),
        padding_mask_BT=(places >= length).expand(2, 4).reshape(1, 8),
        cu_seqlens=torch.tensor([0, 4, 8], dtype=torch.int32),
    )


@cache
def decoder_gradients(name: str, data_ranks: int) -> dict[str, Tensor]:
    """Return the gradients of plain PyTorch without padding: each loss's mean over its pairs."""
    model = make(CONFIGS[name])
    params = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    state, config = {**dict(model.named_buffers()), **params}, model.config
    lengths = [length for of_rank in LENGTHS[:data_ranks] for length in of_rank]
    numbers = [sum(n > k for n in lengths) for k in range(1 + config.num_predictions)]
    total = torch.zeros(())
    for rank in range(data_ranks):
        for place, length in enumerate(LENGTHS[rank]):
            if not length:
                continue
            batch = batch_of(rank, place)
            rows = [batch[n].view(2, 4)[:, :length] for n in ("tokens_BT", "labels_BT")]
            losses = plain_losses(state, config, *rows)
            aux = torch.stack(losses.aux).view(-1, len(LOSS_NAMES)).sum(1)  # one of each layer
            losses.aux, num_layers = [], len(aux) - config.num_predictions
            total = total + losses.total(config) / len(lengths)
            total = total + aux[:num_layers].sum() / numbers[0]
            for depth in range(1, min(length, 1 + config.num_predictions)):
                total = total + aux[num_layers + depth - 1] / numbers[depth]
    total.backward()
    return {n: p.grad for n, p in params.items() if p.grad is not None}


def layouts_worker(rank: int, _device: torch.device) -> Any:
    wrong = []
    for config, layout in LAYOUTS:
        meshes = build_meshes(ParallelConfig(**layout), "cpu")
        wanted = decoder_gradients(config, meshes.data_ranks)
        pipeline = PipelineConfig() if meshes.parallel.pp > 1 else None
        model = parallelize_moe(make(CONFIGS[config]), meshes, pipeline=pipeline)
        step = TrainStep(model, num_micro_batches=2)
        step.forward_backward([batch_of(meshes.data_rank, place) for place in (0, 1)])
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        largest = max(want.abs().max() for want in wanted.values())
        for name in (name for name in wanted if name in found):  # in one order on all ranks
            grad, want = found[name].full_tensor(), wanted[name]
            error = (grad - want).abs().max() / max(want.abs().max(), 1e-4 * largest)
            wrong += [(layout, name, float(error))] if error > 1e-5 else []
        step.finish()
    return gather_objects(wrong)


def test_every_layout_has_the_mean_over_what_has_tokens() -> None:
    assert run_ranks(4, layouts_worker) == [[]] * 4
