import statistics
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moecore import ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.models import Decoder, preset
from moecore.train import AdamW
from moecore.train.spikes import FEWEST, NORMAL, SpikeLimit, SpikeOptions
from tests.helpers.ranks import run_ranks

SPIKE, STEPS = 20, 24


def limit_by_hand(norms: list[float], factor: float) -> float:
    middle = statistics.median_low(norms)
    return middle + factor * NORMAL * statistics.median_low(abs(x - middle) for x in norms)


def test_the_limit_is_that_of_the_definition() -> None:
    limit = SpikeLimit(SpikeOptions(window=20, factor=4.0), torch.device("cpu"))
    norms = [float(i * i % 17) / 4 + 1 for i in range(50)]
    for i, norm in enumerate(norms):
        before = norms[max(0, i - 20) : i]
        expected = limit_by_hand(before, 4.0) if len(before) >= FEWEST else float("inf")
        assert float(limit.compute_limit()) == pytest.approx(expected)
        for bad in (float("nan"), float("inf")):
            limit.record_norm(torch.tensor(bad))  # not recorded
        limit.record_norm(torch.tensor(norm))
    other = SpikeLimit(SpikeOptions(window=16, factor=4.0), torch.device("cpu"))
    other.load_state_dict(limit.state_dict())
    assert float(other.compute_limit()) == pytest.approx(limit_by_hand(norms[-16:], 4.0))


def test_a_lasting_change_of_the_norm_is_followed() -> None:
    limit = SpikeLimit(SpikeOptions(window=16), torch.device("cpu"))
    skipped = []
    for i in range(60):
        norm = torch.tensor(1.0 + 0.01 * (i % 5) + 9.0 * (i >= 30))
        skipped.append(bool(norm > limit.compute_limit()))
        limit.record_norm(norm)
    assert skipped[30] and not any(skipped[:30]) and not any(skipped[40:])


def spiking_steps(rank: int, device: torch.device, optimizer: str) -> list[dict[str, Any]]:
    """Run steps of which one has a loss that is multiplied by 1,000; it resumes in between."""
    model = parallelize_moe(
        Decoder(preset("tiny"), device="meta"), build_meshes(ParallelConfig(), "cpu")
    )
    model.to_empty(device="cpu")
    model.init_weights(0)
    make = {"AdamW": AdamW, "torch": torch.optim.SGD}[optimizer]
    owner = TrainStep(model, make(model.parameters(), lr=1e-4), skip_spikes=SpikeOptions())
    generator, found = torch.Generator().manual_seed(rank), dict[str, Any](skipped=[], changed=[])
    for step in range(STEPS):
        if step == SPIKE - 1:
            state = owner.state_dict()
            owner = TrainStep(model, owner.optimizers, skip_spikes=SpikeOptions())
            owner.load_state_dict(state)
        tokens = torch.randint(256, (1, 33), generator=generator)
        before = [p.detach().clone() for p in model.parameters()]
        with owner.micro_batch():
            loss = model(tokens[:, :-1], tokens[:, 1:])
            (loss * (1e3 if step == SPIKE else 1.0)).backward()
        done = owner.finish()
        found["skipped"].append(done.to_dict()["skipped"])
        pairs = zip(before, model.parameters(), strict=True)
        found["changed"].append(any(not torch.equal(a, b) for a, b in pairs))
    found["norm"] = float(done.norm or 0)
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, found)
    return of_ranks


@pytest.mark.parametrize("optimizer", ["AdamW", "torch"])
def test_a_spike_changes_nothing_on_any_rank(optimizer: str) -> None:
    of_ranks = run_ranks(2, spiking_steps, optimizer)
    for found in of_ranks:
        assert found["skipped"] == [float(step == SPIKE) for step in range(STEPS)]
        assert found["changed"] == [step != SPIKE for step in range(STEPS)]
        assert found["norm"] == of_ranks[0]["norm"] > 0
