"""`choose_meshes`: builds default meshes from the numbers of experts and of ranks per host."""

import math
import os
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.distributed as dist

from moecore.base.fabric import read_nvlink_domain_id
from moecore.base.failures import share_errors
from moecore.base.rank_checks import gather_objects
from moecore.parallel.mesh import (
    Meshes,
    ParallelConfig,
    build_meshes,
    count_ranks_per_fabric,
    read_launcher_number,
    start_process_group,
)


def start_default_group() -> None:
    """Initialise the default process group, unless it exists; with NCCL if a GPU is available."""
    if not dist.is_initialized():
        start_process_group(_get_device_type())


def choose_meshes(expert_counts: Iterable[int]) -> Meshes:
    """Build the dense and the expert mesh over all ranks, with the largest possible ep. Collective.

    `expert_counts` has each MoE layer's number of experts. The degree ep is the largest common
    divisor of these numbers and of the number of ranks of a host (or NVLink domain). Example: 6
    experts and hosts of 4 ranks give ep 2. A model without MoE layers has ep 1.
    """
    domain, place = _count_domain_ranks()
    counts = sorted(set(expert_counts))
    ep = math.gcd(domain, *counts) if counts else 1
    reason = "the model has no MoE layers"
    if counts:
        experts = f"{' and '.join(map(str, counts))} experts"
        ranks = f"{domain} rank{'s' * (domain > 1)} of {place}"
        reason = f"ep ({ep}) is the largest number that divides {experts} and {ranks}"
    return replace(build_meshes(ParallelConfig(ep=ep)), reason=reason)


def _get_device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _count_domain_ranks() -> tuple[int, str]:
    """Return the number of consecutive ranks with fast links, and a name for these ranks.

    The name is "an NVLink domain" if every GPU is in a domain across hosts, "the world" without
    LOCAL_WORLD_SIZE, otherwise "a host". Collective.
    """
    world_size = dist.get_world_size()
    if "LOCAL_WORLD_SIZE" not in os.environ:  # one process, or a launcher that names no hosts
        return world_size, "the world"
    with share_errors():
        local_size = read_launcher_number("LOCAL_WORLD_SIZE", world_size)
    if _get_device_type() == "cuda":
        domain_size = count_ranks_per_fabric(read_nvlink_domain_id())
        if domain_size is not None:
            return domain_size, "an NVLink domain"
    # Hosts of 8 and of 4 ranks have neighbours by 4: then no group crosses from host to host.
    return math.gcd(world_size, *gather_objects(local_size)), "a host"
