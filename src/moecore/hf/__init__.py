"""Hugging Face: transformers' models as they are, and safetensors directories in and out.

Names are imported on first use: reading and writing directories needs safetensors (extra `hf`),
which a model without Hugging Face does not.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "LoadReport": "load",
    "decoder_config_from_hf": "config",
    "export_hf": "export",
    "hf_to_native": "convert",
    "init_adapters": "lora_files",
    "init_hf": "init",
    "load_adapters": "lora_files",
    "load_hf": "load",
    "merge_adapters": "lora_merge",
    "native_to_hf": "convert",
    "save_adapters": "lora_files",
    "use_causal_attention": "attention",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
