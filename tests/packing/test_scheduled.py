"""Steps with a cp for each micro-batch: the documents of a CorpusLoader's rows, and its positions.

Four ranks train a decoder with experts on them for three steps, against one process on those rows.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moecore import (
    BalanceConfig,
    ContextOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.packing import (
    CorpusError,
    CorpusLoader,
    CorpusOptions,
    CorpusSource,
    PackedBatch,
    ScheduledBatch,
    ScheduledLoader,
)
from tests.helpers.ranks import run_ranks
from tests.models.test_context_parallel import GROUPED
from tests.models.test_mtp import make

ROWS, ROW_TOKENS, MAX_TOKENS = 4, 512, 192
LENGTHS = (500, 260, 90, 40, 30, 200, 350, 8, 1, 120, 60, 77)
STEPS = 3
Pieces = list[tuple[list[int], list[int]]]


def corpus(vocab_size: int, count: int = 120) -> list[list[int]]:
    ids = np.random.default_rng(0)
    return [ids.integers(0, vocab_size, LENGTHS[i % 12]).tolist() for i in range(count)]


def options_of(**changes: Any) -> CorpusOptions:
    how: dict[str, Any] = {"row_tokens": ROW_TOKENS, "partitions": 3, "window": 12}
    return CorpusOptions(**how | changes)


def scheduled(corpus: Any, ranks: int, workers: int = 0, **options: Any) -> Any:
    source, how = CorpusSource(name="all", documents=corpus), options_of(**options)
    where = {"rows": ROWS, "max_tokens": MAX_TOKENS, "data_ranks": ranks, "workers": workers}
    return [ScheduledLoader([source], how, data_rank=rank, **where) for rank in range(ranks)]


def plain(corpus: Any, **options: Any) -> CorpusLoader:
    source = CorpusSource(name="all", documents=corpus)
    return CorpusLoader([source], options_of(**options), rows=ROWS)


def pieces_of(batch: PackedBatch) -> Pieces:
    """Return ids and labels of each document, without padding."""
    is_token = ~batch["padding_mask"].flatten()
    cu = batch["cu_seqlens"].tolist()
    found = []
    for start, stop in pairwise(cu):
        own = is_token[start:stop]
        ids, labels = (batch[name].flatten()[start:stop][own] for name in ("input_ids", "labels"))
        if own.any():
            found.append((ids.tolist(), labels.tolist()))
    return found


def of_all(batches: list[ScheduledBatch]) -> Pieces:
    """Return the documents of a step, those that ranks share once, after a look at its shape."""
    assert len({len(batch.cps) for batch in batches}) == 1
    found, held = [], 0
    for number in range(len(batches[0].cps)):
        rank = 0
        while rank < len(batches):
            cp, first = batches[rank].cps[number], batches[rank].micro_batches[number]
            tokens = first["input_ids"].numel() // cp
            assert first["input_ids"].shape[0] == 1 and tokens <= MAX_TOKENS
            for other in batches[rank : rank + cp]:
                assert other.cps[number] == cp
                assert torch.equal(other.micro_batches[number]["input_ids"], first["input_ids"])
            found += pieces_of(first)
            rank, held = rank + cp, held + tokens * cp
    labels = sum(label != -100 for _, of in found for label in of)
    lengths = [len(ids) for ids, _ in found]
    counts = torch.stack([batch.counts() for batch in batches]).sum(0).tolist()
    assert counts == [labels, sum(lengths), sum(n * n for n in lengths), held]
    assert {batch.num_labels for batch in batches} == {labels}
    assert len({batch.digest for batch in batches}) == 1
    return sorted(found)


@pytest.mark.parametrize(("rule", "ranks"), [*product(("split", "whole"), (3, 4))])
def test_a_step_has_the_documents_of_the_rows(rule: str, ranks: int) -> None:
    changes = {"documents": rule, "row_tokens": MAX_TOKENS if ranks == 3 else ROW_TOKENS}
    loaders, rows = scheduled(corpus(1000), ranks, **changes), plain(corpus(1000), **changes)
    sizes = set()
    for _ in range(STEPS):
        batches = [next(loader) for loader in loaders]
        assert of_all(batches) == sorted(pieces_of(next(rows)))
        sizes |= {cp for batch in batches for cp in batch.cps}
    assert sizes == ({1} if ranks == 3 else {1, 2, 4})


def test_ranks_without_documents_get_padding_of_short_documents() -> None:
    rows = {"row_tokens": 16, "documents": "whole", "window": 1, "partitions": 1}
    batches = [next(loader) for loader in scheduled([[1, 2, 3]], 20, **rows)]
    assert len(of_all(batches)) == ROWS
    for (batch,) in (batch.micro_batches for batch in batches):
        assert batch["max_seqlen"] == 16 and batch["cu_seqlens"].diff().max() == 16
    assert any(batch.micro_batches[0]["padding_mask"].all() for batch in batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_goes_on_on_other_ranks(workers: int) -> None:
    documents = corpus(1000)
    before = scheduled(documents, 2, workers, row_tokens=384)
    rows, after = plain(documents, row_tokens=384), scheduled(documents, 4, row_tokens=384)
    for _ in range(2):
        assert of_all([next(loader) for loader in before]) == sorted(pieces_of(next(rows)))
    states = [json.loads(json.dumps(loader.state_dict())) for loader in before]
    assert states[0] == states[1] == json.loads(json.dumps(rows.state_dict()))
    for loader in after:
        loader.load_state_dict(states[0])
    for _ in range(2):
        assert of_all([next(loader) for loader in after]) == sorted(pieces_of(next(rows)))


@pytest.mark.parametrize(
    ("max_tokens", "options", "message"),
    [
        (192, {"multiple": 2}, "CorpusOptions.multiple (2) must be 1: groups pad to their own cp"),
        (191, {}, "max_tokens (191) must be even: cp ranks hold two chunks"),
        (192, {"row_tokens": 500}, "row_tokens (500) must be a multiple of 8, two chunks of each"),
        (100, {}, "max_tokens (100) must be >= 128, what each of 4 ranks, the most of a group,"),
    ],
)
def test_refusals(max_tokens: int, options: dict[str, Any], message: str) -> None:
    source = CorpusSource(name="all", documents=[[1]])
    where = {"rows": 1, "max_tokens": max_tokens, "data_ranks": 4}
    with pytest.raises(ValueError) as info:
        ScheduledLoader([source], options_of(**options), **where)
    assert str(info.value).startswith(message)


CONFIG = replace(GROUPED, max_seq_len=2048)
CONFIG = replace(CONFIG, moe=replace(CONFIG.moe, num_experts=8, balance=BalanceConfig()))


def one_process() -> dict[str, list[float]]:
    """Train on the rows, one forward a step."""
    model, rows = make(CONFIG), plain(corpus(CONFIG.vocab_size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for _ in range(STEPS):
        batch = next(rows)
        names = {n: batch[n] for n in ("cu_seqlens", "max_seqlen")}
        names["padding_mask_BT"] = batch["padding_mask"]
        loss = model(batch["input_ids"], batch["labels"], num_tokens=batch["num_tokens"], **names)
        loss.backward()
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        found["loss"].append(loss.item())
        found["grad_norm"].append(float(torch.stack(norms).norm()))
        optimizer.step()
        optimizer.zero_grad()
    return found


def four_ranks(rank: int, device: torch.device) -> dict[str, Any]:
    meshes = build_meshes(ParallelConfig(ep=4), "cpu")
    model = make(CONFIG)
    parallelize_moe(model, meshes, loss="sum", context=ContextOptions(dynamic=True))
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.5))
    source = CorpusSource(name="all", documents=corpus(CONFIG.vocab_size))
    shape = {"rows": ROWS, "max_tokens": MAX_TOKENS, "data_ranks": meshes.data_ranks}
    loader = ScheduledLoader([source], options_of(), data_rank=meshes.data_rank, **shape)
    found: dict[str, Any] = {"loss": [], "grad_norm": [], "cps": []}
    for _ in range(STEPS):
        batch = next(loader)
        step.num_micro_batches = len(batch.cps)
        loss = batch.loss_of(step.forward_backward(batch.inputs("cpu")))
        done = step.finish()
        dist.all_reduce(loss)
        found["loss"].append(loss.item())
        found["grad_norm"].append(done.to_dict()["grad_norm"])
        of_ranks: list[Any] = [None] * 4
        dist.all_gather_object(of_ranks, batch.cps)
        found["cps"].append({cp for cps in of_ranks for cp in cps})
    source = CorpusSource(name="all", documents=[[1, 2, 3 + (rank == 2)]])
    other = ScheduledLoader([source], options_of(), data_rank=rank, **shape)
    with pytest.raises(CorpusError) as info:
        next(other)
    return found | {"error": str(info.value)}


@pytest.mark.slow
def test_four_ranks_train_as_one_process() -> None:
    found, wanted = run_ranks(4, four_ranks), one_process()
    assert found["cps"] == [{1, 2, 4}] * STEPS
    for name in ("loss", "grad_norm"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-5), name
    assert wanted["loss"][2] < wanted["loss"][0] - 0.01
    error = found["error"]
    assert error.startswith("documents or plan of the step up to row 4 ('")
    assert error.endswith("give all ranks the same files, tokenizer, options and cost")
    assert "\n" not in error
