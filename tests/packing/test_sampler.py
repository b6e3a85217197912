import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from moecore.packing import PackedBatchSampler, PackedCollator
from tests.packing.test_bins import lognormal

LENGTHS = lognormal(9000, longest=1024, mean=5.0)  # more than one window


def make(rank: int = 0, ranks: int = 1, **changes: Any) -> PackedBatchSampler:
    options: dict[str, Any] = dict(rows=2, seed=3) | changes
    return PackedBatchSampler(LENGTHS, 1024, data_rank=rank, data_ranks=ranks, **options)


def epoch_of(ranks: int, **changes: Any) -> list[list[list[int]]]:
    """Return the batches of an epoch, [batch][rank]."""
    made = [list(make(rank, ranks, **changes)) for rank in range(ranks)]
    assert len({len(batches) for batches in made}) == 1
    return [list(of_ranks) for of_ranks in zip(*made, strict=True)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_document_once_per_epoch_in_full_bins(shuffle: bool) -> None:
    batches = epoch_of(3, shuffle=shuffle)
    documents = [d for batch in batches for ids in batch for d in ids]
    assert Counter(documents) == Counter(range(len(LENGTHS)))
    assert LENGTHS.sum() / (len(batches) * 3 * 2 * 1024) > 0.99
    first = batches[0][0]
    assert (first[0] == 0) != shuffle and len(make(2, 3, shuffle=shuffle)) == len(batches)


def test_epochs_and_seeds_differ_and_repeat() -> None:
    sampler = make()
    first, second = list(sampler), list(sampler)
    assert sampler.epoch == 2 and first != second
    assert first == list(make()) and first != list(make(seed=4))
    other = make()
    other.set_epoch(1)
    assert list(other) == second
    one_bin = make(rows=1)
    bins = [{tuple(sorted(b)) for b in one_bin if len(b) > 2} for _ in range(2)]
    assert len(bins[0] & bins[1]) < 0.1 * len(bins[0])  # other neighbours, too


@pytest.mark.parametrize(("ranks", "rows"), [(3, 2), (2, 1), (6, 4)])
def test_a_stopped_epoch_goes_on_with_the_same_bins(ranks: int, rows: int) -> None:
    """Also on other ranks and rows: 5 batches of 3 x 2 bins, then the rest of the bins."""
    whole = epoch_of(3)
    stopped = [make(rank, 3) for rank in range(3)]
    for sampler in stopped:
        for _, _ in zip(range(5), sampler, strict=False):
            pass
    states = [json.loads(json.dumps(sampler.state_dict())) for sampler in stopped]
    assert states[0] == states[1] == states[2] and states[0]["bins"] == 30
    going_on = [make(rank, ranks, rows=rows) for rank in range(ranks)]
    for sampler in going_on:
        sampler.load_state_dict(states[0])
        sampler.set_epoch(0)  # as trainers do; the position stays
        assert sampler.state_dict() == states[0]
    rest = [list(sampler) for sampler in going_on]
    assert len(set(map(len, rest))) == 1
    if (ranks, rows) == (3, 2):
        assert rest == [[batch[rank] for batch in whole[5:]] for rank in range(3)]
    flat = [d for of_ranks in zip(*rest, strict=True) for ids in of_ranks for d in ids]
    assert flat == [d for batch in whole[5:] for ids in batch for d in ids]
    assert [list(sampler) for sampler in going_on] == [  # and so does the next epoch
        list(after(make(rank, ranks, rows=rows), epoch=1)) for rank in range(ranks)
    ]


def after(sampler: PackedBatchSampler, epoch: int) -> PackedBatchSampler:
    sampler.set_epoch(epoch)
    return sampler


def test_workers_fetch_ahead_and_the_state_is_that_of_training() -> None:
    lengths = LENGTHS[:1000]
    documents = [torch.full((int(length),), i) for i, length in enumerate(lengths)]
    collator = PackedCollator(row_tokens=1024, rows=2)

    def loader_of(sampler: PackedBatchSampler) -> DataLoader[Any]:
        return DataLoader(documents, batch_sampler=sampler, collate_fn=collator, num_workers=1)

    def batch_of(loader: DataLoader[Any], stop: int) -> tuple[list[torch.Tensor], Any]:
        made, state = [], None
        for number, batch in enumerate(loader, start=1):
            made.append(batch["input_ids"])
            if number == stop:
                state = loader.batch_sampler.state_dict(batches=number)  # type: ignore[union-attr]
                assert loader.batch_sampler.state_dict() != state  # type: ignore[union-attr]
        return made, state

    whole, state = batch_of(loader_of(PackedBatchSampler(lengths, 1024, rows=2)), stop=4)
    resumed = PackedBatchSampler(lengths, 1024, rows=2)
    resumed.load_state_dict(state)
    rest, _ = batch_of(loader_of(resumed), stop=-1)
    assert len(whole) > 20 and len(rest) == len(whole) - 4
    assert all(map(torch.equal, rest, whole[4:]))


def test_the_end_of_an_epoch_is_the_beginning_of_the_next() -> None:
    sampler = make()
    number = len(list(sampler))
    assert sampler.state_dict() == sampler.state_dict(batches=number)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["bins"]) == (1, 0)


def test_few_documents_give_every_rank_a_batch() -> None:
    samplers = [PackedBatchSampler([5, 6], 8, data_rank=r, data_ranks=4) for r in range(4)]
    batches = [list(sampler) for sampler in samplers]
    assert sorted(len(batch[0]) for batch in batches) == [0, 0, 1, 1]
    empty = next(batch[0] for batch in batches if not batch[0])
    assert PackedCollator(row_tokens=8)(empty)["padding_mask"].all()


def test_errors() -> None:
    state = make().state_dict()
    wrong: list[tuple[Any, str]] = [
        (lambda: PackedBatchSampler([], 8), r"^lengths \(\[\]\) must have at least one document"),
        (lambda: PackedBatchSampler([9], 8), r"^lengths \(9 of document 0\) must be <= the token"),
        (lambda: make(2, 2), r"^data_rank \(2\) must be < data_ranks \(2\): count from 0$"),
        (lambda: make(seed=4).load_state_dict(state), r"^state\['seed'\] \(3\) must be that of"),
        (
            lambda: PackedBatchSampler(np.ones(3, int), 1024, seed=3).load_state_dict(state),
            r"^state\['documents'\] \('\w+'\) must be that of this sampler \('\w+'\): make it",
        ),
        (lambda: make().load_state_dict({}), r"^state \(\{\}\) must have 'epoch': pass a state"),
        (lambda: make().load_state_dict(state | {"bins": -1}), r"^state\['bins'\] \(-1\) must be"),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()
