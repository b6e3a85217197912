"""Steps with a cp for each micro-batch: the documents of a CorpusLoader's rows, and its positions.

Four ranks train a decoder with experts on them for three steps, against one process on those rows.
"""

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
    PipelineConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.rank_checks import gather_objects
from moecore.families import use_causal_attention
from moecore.packing import (
    CorpusError,
    CorpusLoader,
    CorpusOptions,
    CorpusSource,
    PackedBatch,
    PackedCollator,
    ScheduledCollator,
    ScheduledLoader,
)
from moecore.packing.corpus.scheduled_batch import DECODER, TRANSFORMERS, ScheduledBatch
from moecore.parallel.pipeline.stages import get_loss
from tests.families.transformers.hf_models import random_model
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
    cu, found = batch["cu_seqlens"].tolist(), []
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
    counts = torch.stack([batch.count_labels_and_tokens() for batch in batches]).sum(0).tolist()
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
        assert batch["max_seqlen"] == 8 and batch["cu_seqlens"].diff().max() == 8
    assert any(batch.micro_batches[0]["padding_mask"].all() for batch in batches)


def test_documents_of_a_dataset_keep_their_own_labels() -> None:
    documents: list[Any] = [{"input_ids": ids} for ids in corpus(90, 12)]
    documents[1]["labels"] = [-100] * 200 + documents[1]["input_ids"][200:]
    documents[2]["assistant_masks"] = [i % 3 for i in range(90)]
    where = {"max_tokens": MAX_TOKENS, "data_ranks": 4}
    batches = [ScheduledCollator(data_rank=rank, **where)(documents) for rank in range(4)]
    row = PackedCollator(row_tokens=sum(LENGTHS))(documents)
    assert of_all(batches) == sorted(pieces_of(row))
    assert batches[0].num_labels == int(row["num_tokens"]) < batches[0].num_tokens - 200
    assert batches[0].num_tokens == sum(LENGTHS)
    other = [*documents[:-1], {**documents[-1], "labels": [-100] * 77}]
    assert ScheduledCollator(**where)(other).digest != batches[0].digest


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
    assert str(info.value).removeprefix("ScheduledCollator.").startswith(message)


def test_a_collator_is_of_a_rank_of_the_run() -> None:
    with pytest.raises(ValueError, match=r"data_rank \(4\) must be < data_ranks \(4\): take both"):
        ScheduledCollator(max_tokens=192, data_rank=4, data_ranks=4)


CONFIG = replace(GROUPED, max_seq_len=2048)
CONFIG = replace(CONFIG, moe=replace(CONFIG.moe, num_experts=8, balance=BalanceConfig()))


VOCABULARY = 60  # of both models at least


def made(transformers: bool) -> Any:
    model: Any = make(CONFIG)
    if transformers:
        model = random_model("qwen3-moe", max_position_embeddings=2048)
        use_causal_attention(model)
    return model


def one_process(transformers: bool) -> dict[str, list[float]]:
    """Train on the rows, one forward a step."""
    model, rows = made(transformers), plain(corpus(VOCABULARY))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for _ in range(STEPS):
        batch = next(rows)
        names = TRANSFORMERS if transformers else DECODER
        inputs: dict[str, Any] = {name: batch[key] for name, key in names.items()}
        loss = get_loss(model(**inputs, num_tokens=batch["num_tokens"]))
        loss.backward()
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        found["loss"].append(loss.item())
        found["grad_norm"].append(float(torch.stack(norms).norm()))
        optimizer.step()
        optimizer.zero_grad()
    return found


def trained(transformers: bool, parallel: ParallelConfig, **options: Any) -> dict[str, Any]:
    """Train ranks of these degrees; return what they log and the cps of each step."""
    meshes, model = build_meshes(parallel, "cpu"), made(transformers)
    parallelize_moe(model, meshes, loss="sum", context=ContextOptions(dynamic=True), **options)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.5))
    source = CorpusSource(name="all", documents=corpus(VOCABULARY))
    shape = {
        "rows": ROWS,
        "max_tokens": ROW_TOKENS // 2 if parallel.pp > 1 else MAX_TOKENS,
        "data_ranks": meshes.data_ranks,
    }
    loader = ScheduledLoader([source], options_of(), data_rank=meshes.data_rank, **shape)
    found: dict[str, Any] = {"loss": [], "grad_norm": [], "cps": []}
    for _ in range(STEPS if parallel.pp == 1 else 2):
        batch = next(loader)
        step.num_micro_batches = len(batch.cps)
        loss = batch.compute_local_loss(
            step.forward_backward(batch.inputs("cpu", transformers=transformers))
        )
        done = step.finish()
        dist.all_reduce(loss)
        found["loss"].append(loss.item() / parallel.pp)
        found["grad_norm"].append(done.to_dict()["grad_norm"])
        found["cps"].append({cp for cps in gather_objects(batch.cps) for cp in cps})
    return found


def four_ranks(rank: int, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"data ranks": trained(False, ParallelConfig(ep=4))}
    for transformers in (False, True):
        stages = trained(transformers, ParallelConfig(pp=2, ep=2), pipeline=PipelineConfig())
        found["stages of transformers" if transformers else "stages"] = stages
    shape = {"rows": ROWS, "max_tokens": MAX_TOKENS, "data_ranks": 4}
    documents = [[1, 2, 3 + (rank == 2 and i == 1)] for i in range(64)]  # 1 is not sampled
    source = CorpusSource(name="all", documents=documents)
    other = ScheduledLoader([source], options_of(), data_rank=rank, **shape)
    with pytest.raises(CorpusError) as info:
        next(other)
    return found | {"error": str(info.value)}


@pytest.mark.slow
@pytest.mark.nightly  # test_dynamic_context.py trains these groups beside one process
def test_four_ranks_train_as_one_process() -> None:
    found, cps = run_ranks(4, four_ranks), {"data ranks": [{1, 2, 4}] * STEPS}
    for how in ("data ranks", "stages", "stages of transformers"):
        wanted = one_process(transformers="transformers" in how)
        assert found[how]["cps"] == cps.get(how, [{2}, {1, 2}])
        for name in ("loss", "grad_norm"):
            numbers = found[how][name]
            assert numbers == pytest.approx(wanted[name][: len(numbers)], rel=1e-5), (how, name)
        assert wanted["loss"][2] < wanted["loss"][0] - 0.01
    error = found["error"]
    assert error.startswith("documents or plan of the step up to row 4 ('")
    assert error.endswith("give all ranks the same files, tokenizer, options and cost")
    assert "\n" not in error
