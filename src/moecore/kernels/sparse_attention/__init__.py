"""Latent attention to the keys that an indexer selects for each query, under autograd."""

from moecore.kernels.sparse_attention.attention import sparse_attention as sparse_attention
from moecore.kernels.sparse_attention.contract import IndexerHeads as IndexerHeads
from moecore.kernels.sparse_attention.contract import KeySpans as KeySpans
from moecore.kernels.sparse_attention.contract import LatentHeads as LatentHeads
from moecore.kernels.sparse_attention.contract import SparseOutput as SparseOutput
from moecore.kernels.sparse_attention.index import select_in_spans as select_in_spans
