"""Distributed checkpoints: save, load on any layout, find the newest; and dense models made MoE."""

from moecore.checkpoint.directory import latest, prune, set_latest
from moecore.checkpoint.manifest import Manifest, read_manifest
from moecore.checkpoint.saver import Saver
from moecore.checkpoint.store import load, save
from moecore.checkpoint.verify import verify
from moecore.upcycle.models import (
    MLPNames,
    upcycle_config,
    upcycle_decoder,
    upcycle_modules,
    upcycle_state_dict,
)
from moecore.upcycle.upcycle import UpcycleOptions, upcycle_mlp

__all__ = [
    "MLPNames",
    "Manifest",
    "Saver",
    "UpcycleOptions",
    "latest",
    "load",
    "prune",
    "read_manifest",
    "save",
    "set_latest",
    "upcycle_config",
    "upcycle_decoder",
    "upcycle_mlp",
    "upcycle_modules",
    "upcycle_state_dict",
    "verify",
]
