"""Distributed checkpoints: save, load on any layout, find the newest; and dense models made MoE."""

from moecore.checkpoint.directory import latest
from moecore.checkpoint.store import load, save
from moecore.checkpoint.upcycle import UpcycleOptions, upcycle_mlp
from moecore.checkpoint.upcycle_models import (
    MLPNames,
    upcycle_config,
    upcycle_decoder,
    upcycle_modules,
    upcycle_state_dict,
)

__all__ = [
    "MLPNames",
    "UpcycleOptions",
    "latest",
    "load",
    "save",
    "upcycle_config",
    "upcycle_decoder",
    "upcycle_mlp",
    "upcycle_modules",
    "upcycle_state_dict",
]
