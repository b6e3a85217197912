import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch

from moecore.packing import CutDocuments, pack_documents, pack_lengths


def lognormal(number: int, *, longest: int, seed: int = 0, mean: float = 6.0) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(mean, 1.0, number)
    return np.clip(drawn, 1, longest).astype(np.int64)


def first_fit_decreasing(lengths: list[int], bin_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = (b for b in bins if sum(lengths[j] for j in b) + lengths[i] <= bin_tokens)
        chosen = next(fits, None)
        if chosen is None:
            bins.append([i])
        else:
            chosen.append(i)
    return [sorted(b) for b in bins]


def test_bins_are_those_of_first_fit_decreasing() -> None:
    assert [b.tolist() for b in pack_lengths([3, 6, 4, 2, 5], 8)] == [[1, 3], [0, 4], [2]]
    for seed in range(20):
        lengths = lognormal(3 * seed, longest=64, seed=seed, mean=3.0)
        bins = [b.tolist() for b in pack_lengths(lengths, 64)]
        assert bins == first_fit_decreasing(lengths.tolist(), 64)
        assert [b.tolist() for b in pack_lengths(torch.tensor(lengths), 64)] == bins


def test_a_million_documents_fill_their_bins_in_seconds() -> None:
    lengths = lognormal(1_000_000, longest=4096)
    begin, bins = time.process_time(), pack_lengths(lengths, 4096)
    assert time.process_time() - begin < 10 and lengths.sum() / (len(bins) * 4096) > 0.999
    assert (np.add.reduceat(lengths[bins.documents], bins.offsets[:-1]) <= 4096).all()
    assert np.array_equal(np.sort(bins.documents), np.arange(1_000_000))


@pytest.mark.parametrize(("window", "fill"), [(256, 0.99), (4096, 0.999)])
def test_a_stream_is_packed_within_its_window(window: int, fill: float) -> None:
    lengths = lognormal(20_000, longest=4096)
    read = 0

    def documents() -> Iterator[dict[str, Any]]:
        nonlocal read
        for number, length in enumerate(lengths):
            read += 1
            yield {"input_ids": range(length), "number": number}

    bins, left = [], 0
    for packed in pack_documents(documents(), 4096, window=window):
        left += len(packed)
        assert read - left < window  # of what was read, no more waits
        bins.append([row["number"] for row in packed])
        assert sum(lengths[i] for i in bins[-1]) <= 4096
    assert sorted(i for b in bins for i in b) == list(range(20_000))
    assert lengths.sum() / (len(bins) * 4096) > fill
    assert bins == [
        [row["number"] for row in b] for b in pack_documents(documents(), 4096, window=window)
    ]


def test_a_stream_may_be_endless_and_no_document_waits_forever() -> None:
    documents = ([0] * (5 if i == 3 else 4) for i in count())  # 5 of 8 tokens never fill a bin
    packed = list(islice(pack_documents(documents, 8, window=8), 4))
    assert [0] * 5 in [document for b in packed for document in b]


def test_long_documents_are_cut_by_choice() -> None:
    document = {"input_ids": list(range(10)), "labels": list(range(1, 11)), "text": "no token"}
    bins = list(pack_documents([document, [7, 7]], 4, too_long="cut"))
    pieces = [p for b in bins for p in b]
    assert [4, 5, 6, 7] in [p["input_ids"] for p in pieces if isinstance(p, dict)]
    assert {"input_ids": [8, 9], "labels": [9, 10]} in pieces and [7, 7] in pieces
    cut = CutDocuments([[0, 1, 2], document, torch.arange(4)], [3, 10, 4], 4)
    assert cut.lengths.tolist() == [3, 4, 4, 2, 4] and len(cut) == 5
    assert cut[2] == {"input_ids": [4, 5, 6, 7], "labels": [5, 6, 7, 8]}
    assert [len(d["input_ids"] if isinstance(d, dict) else d) for d in cut] == [3, 4, 4, 2, 4]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack_lengths([3, 9], 8), r"^lengths \(9 of document 1\) must be <= the tokens of"),
        (lambda: pack_lengths([3, 0], 8), r"^lengths \(0 of document 1\) must be >= 1 and < 2\*\*"),
        (lambda: pack_lengths([2**31], 8), r"^lengths \(2147483648 of document 0\) must be >= 1"),
        (lambda: pack_lengths([[3], [1, 2]], 8), r"^lengths \(\[\[3\], \[1, 2\]\]\) must be one"),
        (lambda: pack_lengths(torch.ones(2), 8), r"^lengths \(tensor.* must be one whole number"),
        (lambda: next(pack_documents([[1], [1] * 9], 8)), r"^documents \(number 1, 9 tokens\)"),
        (lambda: next(pack_documents([[]], 8)), r"^documents \(number 0, 0 tokens\) must have >="),
        (lambda: next(pack_documents(["text"], 8)), r"^documents \('text'\) must be token ids or"),
        (
            lambda: next(pack_documents([{"text": "a"}], 8)),
            r"^documents \(a row with \['text'\]\) must have input_ids: tokenize it$",
        ),
        (lambda: CutDocuments([[1]], [1, 2], 4), r"^lengths \(2 numbers\) must be one per docum"),
        (lambda: CutDocuments(iter([]), [1], 4), r"^documents \(<.*\) must have a length and item"),
    ],
)
def test_errors(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
