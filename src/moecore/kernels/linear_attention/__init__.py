"""Linear attention and short convolutions of packed documents, under autograd."""

from moecore.kernels.linear_attention.contract import DeltaRule as DeltaRule
from moecore.kernels.linear_attention.convolution import causal_convolution as causal_convolution
from moecore.kernels.linear_attention.gated_delta import gated_delta_rule as gated_delta_rule
