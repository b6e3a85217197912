"""Which dispatcher carries tokens, as far as one rank knows."""

from __future__ import annotations

from moecore.base.options.nvlink import NVLinkOptions
from moecore.moe.dispatch.peer_memory import find_known_problem
from moecore.parallel.request import Request


def choose_dispatcher(request: Request) -> tuple[str, str]:
    """Return the dispatcher and why; "auto" where only the GPUs of the group can tell.

    Raises:
        ValueError: when nvlink is asked for by name and cannot work.
    """
    meshes, name = request.meshes, request.dispatcher
    num_ranks = meshes.parallel.ep * meshes.parallel.etp
    if num_ranks == 1:
        return "local", "ep * etp is 1"
    if name not in ("auto", "nvlink"):
        return name, "asked for"
    problem = find_known_problem(num_ranks, meshes.device_type)
    if name == "nvlink":
        if problem is not None:
            raise ValueError(f"dispatcher ('nvlink') {problem}")
        return "nvlink", "asked for"
    if meshes.device_type == "cuda":
        problem = _memory_problem(request) or problem
    if problem is not None:
        return "alltoall", f"'nvlink' {problem.partition(': ')[0]}"
    return "auto", "'nvlink' if all GPUs of the group reach each other's memory, else 'alltoall'"


def _memory_problem(request: Request) -> str | None:
    """Return why nvlink must be asked for by name: its shapes are static, so its room is too."""
    options = request.nvlink or NVLinkOptions()
    if options.row_factor is not None or options.exact_rows or request.memory.stash is not None:
        return None
    ep = request.meshes.parallel.ep
    return (
        "must have NVLinkOptions.row_factor (None), or every layer keeps room for any "
        f"routing, up to ep ({ep}) times the expert rows of a balanced one: set it, 2.0 say, or "
        "MemoryOptions.stash"
    )
