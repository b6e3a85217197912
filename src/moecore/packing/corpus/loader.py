"""`CorpusLoader` iterates over the batches of a data rank, and saves its position.

Documents are divided into L partitions. Partition l reads the documents with ordinals l, l + L,
l + 2L, ... of each source. Row i of a run is the next row of partition i mod L. So rows do not
depend on the number of ranks or workers. The position has the number of rows that all ranks have
received, and the cursor of each source in each partition.

If ranks * workers * rows of a batch divides L, no two workers read one partition. Otherwise some
workers read the same partition, and each worker skips the rows of the other workers.
"""

import hashlib
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, Self, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from moecore.base.fields import Count, CountOrZero, check_arguments, quote
from moecore.base.rank_checks import gather_objects
from moecore.packing.collate import PackedBatch, Rows, build_batch
from moecore.packing.corpus.files import shorten_text
from moecore.packing.corpus.partitions import Partition
from moecore.packing.corpus.position import (
    Cursors,
    check_equal_facts,
    check_stream_document_counts,
    collect_facts,
    merge_states,
    parse_state,
)
from moecore.packing.corpus.sources import (
    CorpusError,
    CorpusOptions,
    CorpusSource,
    DocumentReader,
    IndexedDocuments,
    OrderedDocuments,
    StreamedDocuments,
)
from moecore.packing.documents import hash_values

PARTITIONS_PER_ROW = 8  # with up to 8 workers per rank, no two workers read one partition
JOB_SIGNALS = {signal.SIGINT, signal.SIGTERM}  # which a launcher or a terminal sends to all


class RankBatches(IterableDataset[Any]):
    """The batches of a data rank, each with the loader's position after the batch.

    Items are (batch, {partition: position after the batch}, {source name: number of documents}). A
    partition is a share of the documents of each source.
    """

    def __init__(
        self,
        sources: Sequence[CorpusSource],
        options: CorpusOptions,
        rows: int,
        data_rank: int,
        data_ranks: int,
        collate: Callable[[Rows], Any],  # makes a batch from rows of pieces
    ) -> None:
        self.sources, self._options, self._collate = sources, options, collate
        self.rows = rows
        self.partitions = options.partitions or rows * data_ranks * PARTITIONS_PER_ROW
        self.data_rank, self.data_ranks = data_rank, data_ranks
        self.names = [source.name for source in sources]
        self._facts: dict[str, Any] | None = None
        self.set_start(0, {}, {})

    def set_start(self, row: int, cursors: Cursors, sizes: Mapping[str, int | None]) -> None:
        """Set the position of the next iteration: `row` is the index of its first row.

        `cursors` has positions by partition, `sizes` document counts by source (None = unknown).
        """
        self._first, self._cursors, self._lengths = row, dict(cursors), dict(sizes)

    def get_option_facts(self) -> dict[str, Any]:
        """Return the options and source properties that decide the rows, by name (cached)."""
        if self._facts is None:
            self._facts = collect_facts(self.sources, self._options)
        return self._facts

    def get_values_equal_on_ranks(self) -> dict[str, Any]:
        """Return all values that must be equal on the data ranks, by name."""
        cursors = sorted((n, list(map(tuple, entry))) for n, entry in self._cursors.items())
        position = repr((cursors, self._lengths)).encode()
        return {
            **self.get_option_facts(),
            **{f"weight of {s.name}": s.weight for s in self.sources},
            "vocab_size": self._options.vocab_size,
            "partitions": self.partitions,
            "rows of a batch": self.rows,
            "data_ranks": self.data_ranks,
            "rows before this batch": self._first,
            "position": hashlib.sha256(position).hexdigest()[:16],
        }

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._read_batches()
        except CorpusError as error:  # DataLoader would add a worker's traceback to a raised error
            yield error, {}, {}

    def _read_batches(self) -> Iterator[Any]:
        """Yield (batch, cursors, source lengths); worker i of n has the batches i, i + n, ..."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        period = self.partitions // math.gcd(self.partitions, workers * self.data_ranks * self.rows)
        numbers = range(worker, worker + period * workers, workers)
        indices = (self._find_row_index(n, b) for n in numbers for b in range(self.rows))
        partition_ids = frozenset(index % self.partitions for index in indices)
        readers: dict[str, DocumentReader] = {}
        for i, source in enumerate(self.sources):
            documents = self._make_ordered_documents(i, source, partition_ids)
            readers[source.name] = DocumentReader(source, documents, self._options.vocab_size)
        weights = {source.name: source.weight for source in self.sources}
        partitions: dict[int, Partition] = {}
        for number in range(worker, 2**62, workers):
            row_ids = [self._find_row_index(number, b) for b in range(self.rows)]
            rows = []
            for row in row_ids:
                partition_id = row % self.partitions
                if partition_id not in partitions:
                    partitions[partition_id] = Partition(
                        partition_id,
                        readers,
                        weights,
                        self._cursors.get(partition_id),
                        self._options,
                        partitions=self.partitions,
                    )
                while partitions[partition_id].rows < row // self.partitions:
                    partitions[partition_id].make_next_row()  # another rank's or worker's row
                rows.append(partitions[partition_id].make_next_row())
            batch_ids = {row % self.partitions for row in row_ids}
            cursors = {n: partitions[n].cursors for n in batch_ids}
            lengths = {name: reader.documents.length for name, reader in readers.items()}
            yield self._collate(rows), cursors, lengths

    def _find_row_index(self, batch_idx: int, row_idx: int) -> int:
        return self._first + (batch_idx * self.data_ranks + self.data_rank) * self.rows + row_idx

    def _make_ordered_documents(
        self, source_idx: int, source: CorpusSource, partition_ids: frozenset[int]
    ) -> OrderedDocuments:
        """Return the documents of a source by ordinal, for the partitions `partition_ids`."""
        options = self._options
        key = hash_values(options.seed, "order", source.name) if options.shuffle else None
        if source.is_indexed:
            return IndexedDocuments(source.documents, key, partitions=self.partitions)
        cursors = {n: of_sources[source_idx] for n, of_sources in self._cursors.items()}
        starts = (cursors[n].ordinal if n in cursors else n for n in partition_ids)
        read = (cursor.ordinal for cursor in cursors.values() if cursor.rows)
        return StreamedDocuments(
            source.documents,
            key,
            block=options.shuffle_buffer,
            first=min(starts),
            last=max(read, default=-1),
            partitions=self.partitions,
            partition_ids=partition_ids,
            length=self._lengths.get(source.name),
        )


Batch = TypeVar("Batch")


class PositionedLoader(Generic[Batch]):
    """An endless iterator over this rank's batches that saves and loads its position."""

    def __init__(self, batches: RankBatches, workers: int, *, data_ranks: int) -> None:
        self._batches, self._workers, self._data_ranks = batches, workers, data_ranks
        self._group: dist.ProcessGroup | None = None  # of the data ranks; None = all ranks
        self._has_checked_ranks = False  # since the loader was made or a state was loaded
        self._batch_iterator: Iterator[Any] | None = None
        self._rows = 0  # rows that all ranks have received
        self._loaded: Cursors = {}  # the loaded position of all ranks
        self._cursors: Cursors = {}  # partitions that this rank has read since
        self._last: Cursors = {}  # partitions of the last batch
        self._lengths: dict[str, int | None] = {}

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next batch; the position to save is then after this batch."""
        self._check_ranks_agree()
        if self._batch_iterator is None:
            loader = DataLoader(
                self._batches,
                batch_size=None,
                num_workers=self._workers,
                collate_fn=_identity,
                generator=torch.Generator(),  # torch's default generator is part of a run's state
                prefetch_factor=2 if self._workers else None,
                worker_init_fn=_ignore_job_signals,
            )
            with _restore_sigchld_handler(), _block_job_signals(), torch.device("cpu"):
                self._batch_iterator = iter(loader)  # draws a seed on the CPU
        try:
            batch, cursors, lengths = next(self._batch_iterator)
        except (RuntimeError, OSError, EOFError) as error:
            text = shorten_text(error)
            if not self._workers or text.startswith("Caught "):  # an error that a worker raised
                raise
            self.close()
            raise CorpusError(
                f"a data worker of this rank has ended ({type(error).__name__}: {text}): look for "
                "a lack of memory or a file that was changed, then go on from the last checkpoint"
            ) from error
        if isinstance(batch, CorpusError):
            self.close()
            raise batch
        self._last = cursors
        self._cursors |= cursors
        self._lengths |= lengths
        self._rows += self._batches.rows * self._batches.data_ranks
        result: Batch = batch
        return result

    def _check_ranks_agree(self) -> None:
        """Raise a CorpusError if ranks' sources, options or positions differ. Collective once."""
        if self._has_checked_ranks:
            return
        if self._data_ranks > 1:
            local_facts = self._batches.get_values_equal_on_ranks(), self._batches.data_rank
            facts, numbers = zip(*gather_objects(local_facts, self._group), strict=True)
            check_equal_facts(facts)
            missing = set(range(self._batches.data_ranks)) - set(numbers)
            if missing and dist.is_initialized():
                ranks = f"{min(missing)}, because data_ranks is {self._batches.data_ranks}"
                raise CorpusError(
                    f"data_rank ({quote(sorted(set(numbers)))} on all ranks) must also be {ranks}: "
                    "give each rank its number"
                )
        self._has_checked_ranks = True

    def close(self) -> None:
        """End the worker processes. The next call of `next` starts workers at this position."""
        self._batches.set_start(self._rows, self._loaded | self._cursors, self._lengths)
        self._batch_iterator = None

    def get_epochs(self) -> dict[str, int]:
        """Return {source name: epoch of the last batch}, for a stream 0 until it ends once."""
        epochs = {}
        for i, name in enumerate(self._batches.names):
            ordinal = max((cursors[i].ordinal for cursors in self._last.values()), default=0)
            epochs[name] = ordinal // (self._lengths.get(name) or 2**62)
        return epochs

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch as JSON values, equal on ranks. Collective.

        Raises a CorpusError if options, numbers of batches or a stream's documents differ on ranks.
        """
        local_state = self._make_state(self._cursors)
        states = gather_objects(local_state) if self._batches.data_ranks > 1 else [local_state]
        check_equal_facts([{**state["facts"], "rows taken": state["rows"]} for state in states])
        check_stream_document_counts([state["lengths"] for state in states])
        return merge_states([self._make_state(self._loaded), *states])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a loader with the same sources and options.

        Numbers of ranks, rows and workers may differ, and source weights, which apply to later
        rows. Raises a ValueError for other sources or options, or if `state` is no `state_dict()`.
        """
        check_arguments(PositionedLoader.load_state_dict, locals())
        position = parse_state(state, self._batches.get_option_facts(), self._batches.sources)
        self._batches.partitions = position.partitions
        self._rows, self._lengths = position.rows, position.lengths
        self._cursors, self._last, self._loaded = {}, {}, position.cursors
        self._has_checked_ranks = False
        self.close()

    def _make_state(self, cursors: Cursors) -> dict[str, Any]:
        """Return the state to save, as JSON values, with `cursors` as the position."""
        return {
            "rows": self._rows,
            "partitions": self._batches.partitions,
            "cursors": [[n, [list(cursor) for cursor in cursors[n]]] for n in sorted(cursors)],
            "lengths": self._lengths,
            "facts": self._batches.get_option_facts(),
        }


class CorpusLoader(PositionedLoader[PackedBatch]):
    """An endless iterator over the batches of this data rank.

        loader = CorpusLoader([source], CorpusOptions(row_tokens=4096), rows=2, workers=2)
        batch = next(loader)                 # a PackedBatch of 2 rows
        state = loader.state_dict()          # the position after that batch, without prefetches

    A run with other numbers of ranks, rows and workers can load the state. Labels are shifted:
    the label of each token is the next token of its document, also across a cut. The first `next`
    after the start or a load compares the data ranks, so it is collective over all ranks.

    Args:
        sources: sources with different names. Each source's share of the rows is its weight.
        options: options of the rows.
        rows: rows of a batch.
        data_rank: this rank's index, `meshes.data_rank`.
        data_ranks: number of ranks with different batches, `meshes.data_ranks`.
        workers: number of processes that prefetch batches; 0 = `next` reads, tokenizes and packs.
            If the multiprocessing start method is not fork, sources must be picklable.

    Raises:
        ValueError: if `sources` is empty, a name repeats, or `data_rank` >= `data_ranks`.
        CorpusError: from `next`, if a document cannot be read or tokenized, or has ids outside the
            vocabulary. Other ranks do not raise this error, so end all ranks.
    """

    def __init__(
        self,
        sources: Sequence[CorpusSource],
        options: CorpusOptions,
        *,
        rows: Count = 1,
        data_rank: CountOrZero = 0,
        data_ranks: Count = 1,
        workers: CountOrZero = 0,
    ) -> None:
        check_arguments(CorpusLoader.__init__, locals())
        check_sources(sources, data_rank, data_ranks)
        collate = partial(build_batch, row_tokens=options.row_tokens, multiple=options.multiple)
        batches = RankBatches(sources, options, rows, data_rank, data_ranks, collate)
        super().__init__(batches, workers, data_ranks=data_ranks)


def check_sources(sources: Sequence[CorpusSource], data_rank: int, data_ranks: int) -> None:
    """Raise a ValueError if there is no source, names repeat, or `data_rank` >= `data_ranks`."""
    names = [source.name for source in sources]
    if not names or len(set(names)) < len(names):
        relation = "must be at least one, each with a name of its own"
        raise ValueError(f"sources ({quote(names)}) {relation}")
    if data_rank >= data_ranks:
        relation = f"must be < data_ranks ({data_ranks}): count from 0"
        raise ValueError(f"data_rank ({data_rank}) {relation}")


@contextmanager
def _restore_sigchld_handler() -> Iterator[None]:
    """Return a context that restores the previous SIGCHLD handler at its end."""
    # torch's handler raises the death of a worker wherever the main thread is at that moment.
    # Without the handler, the next batch raises it.
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is not before:  # set in the main thread only
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)


@contextmanager
def _block_job_signals() -> Iterator[None]:
    """Return a context that delays signals of the job; workers that start in it inherit the mask.

    A worker imports for seconds before it can ignore Ctrl-C, which would end the worker.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore_job_signals(_: int) -> None:
    """Let only its rank end this worker by SIGTERM; the job's SIGTERM or Ctrl-C stops the rank."""
    if not hasattr(signal, "sigwaitinfo"):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)

    def wait_for_rank() -> None:
        while signal.sigwaitinfo(JOB_SIGNALS).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=wait_for_rank, daemon=True).start()


def _identity(batch: Any) -> Any:
    return batch
