"""Hugging Face safetensors directories in and out; needs safetensors (extra `hf`)."""

from moecore.checkpoint.hf.config import decoder_config_from_hf
from moecore.checkpoint.hf.convert import hf_to_native, native_to_hf
from moecore.checkpoint.hf.export import export_hf
from moecore.checkpoint.hf.init import init_hf
from moecore.checkpoint.hf.load import LoadReport, load_hf

__all__ = [
    "LoadReport",
    "decoder_config_from_hf",
    "export_hf",
    "hf_to_native",
    "init_hf",
    "load_hf",
    "native_to_hf",
]
