"""Checkpoints, Hugging Face directories, formats of other trainers, and upcycling.

Names are imported on first use, because Hugging Face directories need safetensors (extra `hf`).
"""

from typing import TYPE_CHECKING

from moecore.base.lazy_names import make_lazy_getattr

_NAMES = {
    "checkpoint.directory": "latest prune set_latest",
    "checkpoint.host_memory": "connect_host_memory",
    "checkpoint.manifest": "read_manifest",
    "checkpoint.saver": "Saver",
    "checkpoint.store": "load save verify",
    "hf.config": "decoder_config_from_hf",
    "hf.export": "export_hf",
    "hf.stream": "stream_weights",
    "hf.transfer": "open_bucket receive_weights send_weights share_bucket",
    "hf.load": "init_hf load_hf",
    "hf.lora": "init_adapters load_adapters save_adapters",
    "hf.merge": "merge_adapters",
    "interchange.convert": "dcp_to_native native_to_dcp",
    "upcycle.models": "MLPNames upcycle_config upcycle_decoder upcycle_modules upcycle_state_dict",
    "upcycle.upcycle": "UpcycleOptions",
}
if TYPE_CHECKING:
    from moecore.io.checkpoint.directory import latest as latest
    from moecore.io.checkpoint.directory import prune as prune
    from moecore.io.checkpoint.directory import set_latest as set_latest
    from moecore.io.checkpoint.host_memory import connect_host_memory as connect_host_memory
    from moecore.io.checkpoint.manifest import read_manifest as read_manifest
    from moecore.io.checkpoint.saver import Saver as Saver
    from moecore.io.checkpoint.store import load as load
    from moecore.io.checkpoint.store import save as save
    from moecore.io.checkpoint.store import verify as verify
    from moecore.io.hf.config import decoder_config_from_hf as decoder_config_from_hf
    from moecore.io.hf.export import export_hf as export_hf
    from moecore.io.hf.load import init_hf as init_hf
    from moecore.io.hf.load import load_hf as load_hf
    from moecore.io.hf.lora import init_adapters as init_adapters
    from moecore.io.hf.lora import load_adapters as load_adapters
    from moecore.io.hf.lora import save_adapters as save_adapters
    from moecore.io.hf.merge import merge_adapters as merge_adapters
    from moecore.io.hf.stream import stream_weights as stream_weights
    from moecore.io.hf.transfer import open_bucket as open_bucket
    from moecore.io.hf.transfer import receive_weights as receive_weights
    from moecore.io.hf.transfer import send_weights as send_weights
    from moecore.io.hf.transfer import share_bucket as share_bucket
    from moecore.io.interchange.convert import dcp_to_native as dcp_to_native
    from moecore.io.interchange.convert import native_to_dcp as native_to_dcp
    from moecore.io.upcycle.models import MLPNames as MLPNames
    from moecore.io.upcycle.models import upcycle_config as upcycle_config
    from moecore.io.upcycle.models import upcycle_decoder as upcycle_decoder
    from moecore.io.upcycle.models import upcycle_modules as upcycle_modules
    from moecore.io.upcycle.models import upcycle_state_dict as upcycle_state_dict
    from moecore.io.upcycle.upcycle import UpcycleOptions as UpcycleOptions
else:  # type checkers would take any name for granted
    __all__ = [name for names in _NAMES.values() for name in names.split()]
    __getattr__ = make_lazy_getattr(__name__, _NAMES)
