"""Documents of different lengths: packed rows, and schedules for dynamic context parallelism.

docs/sequences.md describes each public name, and docs/pretraining.md describes corpora.
"""

from moecore.packing.bins import PackedBatchSampler, pack_documents, pack_lengths
from moecore.packing.collate import (
    PackedBatch,
    PackedCollator,
    invert_token_indices,
    padded_lengths,
    select_token_indices,
    split_batch,
)
from moecore.packing.corpus.files import JsonLines
from moecore.packing.corpus.loader import CorpusLoader
from moecore.packing.corpus.megatron import MegatronDocuments
from moecore.packing.corpus.scheduled_batch import ScheduledCollator, ScheduledLoader
from moecore.packing.corpus.sources import CorpusError, CorpusOptions, CorpusSource
from moecore.packing.documents import CutDocuments, DocumentCost, MeasuredCost
from moecore.packing.schedule import schedule_documents

__all__ = [
    "CorpusError", "CorpusLoader", "CorpusOptions", "CorpusSource", "CutDocuments", "DocumentCost",
    "JsonLines", "MeasuredCost", "MegatronDocuments", "PackedBatch", "PackedBatchSampler",
    "PackedCollator", "ScheduledCollator", "ScheduledLoader", "invert_token_indices",
    "pack_documents", "pack_lengths", "padded_lengths", "schedule_documents",
    "select_token_indices", "split_batch",
]  # fmt: skip
