"""Attention between blocks of queries and keys, forward and backward, without autograd."""

from moecore.kernels.attention.attention import attention_backward as attention_backward
from moecore.kernels.attention.attention import attention_forward as attention_forward
from moecore.kernels.attention.contract import AttentionMask as AttentionMask
from moecore.kernels.attention.contract import add_sinks as add_sinks
from moecore.kernels.attention.contract import compute_sinks_grad as compute_sinks_grad
from moecore.kernels.attention.contract import merge_blocks as merge_blocks
