"""moecore's own decoder model: config, presets, module, loss and tensor parallelism."""

from moecore.models.config import (
    DecoderConfig,
    GatedDeltaConfig,
    Mamba2Config,
    MLAConfig,
    SparseKeysConfig,
    YarnConfig,
)
from moecore.models.decoder import Decoder
from moecore.models.log_probs import LogProbLoss, linear_log_probs, make_adapter_loss
from moecore.models.loss import linear_cross_entropy
from moecore.models.presets import PRESETS, at_width, preset, with_latent_experts
from moecore.models.size import active_params, document_cost, flops_per_token, num_params

__all__ = [
    "PRESETS", "Decoder", "DecoderConfig", "GatedDeltaConfig", "LogProbLoss", "MLAConfig",
    "Mamba2Config", "SparseKeysConfig", "YarnConfig",
    "active_params", "at_width", "document_cost", "flops_per_token", "linear_cross_entropy",
    "linear_log_probs", "make_adapter_loss", "num_params", "preset", "with_latent_experts",
]  # fmt: skip
