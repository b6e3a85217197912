"""Registers `small_decoder`: moecore's tiny DeepSeek-V3 with the vocabulary that text.py makes."""

from __future__ import annotations

from dataclasses import replace

from torchtitan.protocols.train_spec import register_train_spec

from moecore.integrations.torchtitan.v02.specs import decoder_spec
from moecore.models import preset

SMALL = replace(preset("tiny-deepseek-v3"), vocab_size=512)

register_train_spec("small_decoder", decoder_spec({"small": SMALL}))
