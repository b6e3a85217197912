"""Files in and out: checkpoints, Hugging Face directories, other trainers' files, upcycling.

Names are imported on first use: Hugging Face directories need safetensors (extra `hf`), which a
model without Hugging Face does not.
"""

from moecore.base.first_use import first_use

_HOMES = {
    "LoadReport": "hf.load",
    "MLPNames": "upcycle.models",
    "Manifest": "checkpoint.manifest",
    "Saver": "checkpoint.saver",
    "UpcycleOptions": "upcycle.upcycle",
    "dcp_to_native": "interchange.convert",
    "decoder_config_from_hf": "hf.config",
    "export_hf": "hf.export",
    "hf_to_native": "hf.convert",
    "init_adapters": "hf.lora",
    "init_hf": "hf.load",
    "latest": "checkpoint.directory",
    "load": "checkpoint.store",
    "load_adapters": "hf.lora",
    "load_hf": "hf.load",
    "merge_adapters": "hf.lora",
    "native_to_dcp": "interchange.convert",
    "native_to_hf": "hf.convert",
    "prune": "checkpoint.directory",
    "read_manifest": "checkpoint.manifest",
    "save": "checkpoint.store",
    "save_adapters": "hf.lora",
    "set_latest": "checkpoint.directory",
    "upcycle_config": "upcycle.models",
    "upcycle_decoder": "upcycle.models",
    "upcycle_mlp": "upcycle.upcycle",
    "upcycle_modules": "upcycle.models",
    "upcycle_state_dict": "upcycle.models",
    "verify": "checkpoint.store",
}
__all__ = list(_HOMES)
__getattr__ = first_use(__name__, _HOMES)
