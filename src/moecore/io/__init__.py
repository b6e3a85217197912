"""Files in and out: checkpoints, Hugging Face directories, other trainers' files, upcycling.

Names are imported on first use: Hugging Face directories need safetensors (extra `hf`), which a
model without Hugging Face does not.
"""

from moecore.base.first_use import first_use

_NAMES = {
    "checkpoint.directory": "latest prune set_latest",
    "checkpoint.manifest": "Manifest read_manifest",
    "checkpoint.saver": "Saver",
    "checkpoint.store": "load save verify",
    "hf.config": "decoder_config_from_hf",
    "hf.convert": "hf_to_native native_to_hf",
    "hf.export": "export_hf",
    "hf.buckets": "WeightBucket",
    "hf.changes": "WeightsVersion",
    "hf.stream": "WeightStream stream_weights",
    "hf.transfer": "open_bucket receive_weights send_weights share_bucket",
    "hf.load": "LoadReport init_hf load_hf",
    "hf.lora": "init_adapters load_adapters merge_adapters save_adapters",
    "interchange.convert": "dcp_to_native native_to_dcp",
    "upcycle.models": "MLPNames upcycle_config upcycle_decoder upcycle_modules upcycle_state_dict",
    "upcycle.upcycle": "UpcycleOptions upcycle_mlp",
}
__all__ = [name for names in _NAMES.values() for name in names.split()]
__getattr__ = first_use(__name__, _NAMES)
