"""Documents of different lengths: packed rows, and schedules for dynamic context parallelism.

docs/sequences.md describes each public name, and docs/pretraining.md describes corpora.
"""

from moecore.packing.bins import Bins, pack_documents, pack_lengths
from moecore.packing.collate import PackedBatch, PackedCollator
from moecore.packing.corpus.json_lines import JsonLines
from moecore.packing.corpus.loader import CorpusLoader
from moecore.packing.corpus.megatron import MegatronDocuments
from moecore.packing.corpus.options import CorpusError, CorpusOptions, CorpusSource
from moecore.packing.corpus.scheduled_batch import (
    ScheduledBatch,
    ScheduledCollator,
    ScheduledLoader,
)
from moecore.packing.cost import DocumentCost, MeasuredCost
from moecore.packing.documents import CutDocuments
from moecore.packing.sampler import PackedBatchSampler
from moecore.packing.schedule import DocumentGroup, DocumentSchedule, schedule_documents, serpentine
from moecore.packing.split import indices_of, inverse_of, padded_lengths, part_of

__all__ = [
    "Bins", "CorpusError", "CorpusLoader", "CorpusOptions", "CorpusSource", "CutDocuments",
    "DocumentCost", "DocumentGroup", "DocumentSchedule", "JsonLines", "MeasuredCost",
    "MegatronDocuments", "PackedBatch", "PackedBatchSampler", "PackedCollator", "ScheduledBatch",
    "ScheduledCollator", "ScheduledLoader", "indices_of", "inverse_of", "pack_documents",
    "pack_lengths", "padded_lengths", "part_of", "schedule_documents", "serpentine",
]  # fmt: skip
