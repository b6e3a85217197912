"""The phases of `parallelize_moe` that change what blocks run and what they save for backward."""

from __future__ import annotations

from torch import nn

from moecore.parallel.model.parallel_state import ParallelState
from moecore.parallel.model.phases import chunks_of
from moecore.train.graphs.regions import compile_blocks, compiled_modules, graph_blocks
from moecore.train.memory.apply import apply_memory, apply_stash
from moecore.train.memory.compiled import inductor_options


def compile_dense(model: nn.Module, found: ParallelState) -> None:
    """Compile the code between two MoE layers, if it was asked for."""
    if not found.request.dense.compile:
        return
    blocks = found.blocks(model)
    compile_blocks(blocks, options=inductor_options(blocks, found.request.memory))
    found.compiled = {module for block in blocks for module in compiled_modules(block)}


def save_less(model: nn.Module, found: ParallelState) -> None:
    """Recompute, offload and store in pages what the memory options name."""
    blocks, request = found.blocks(model), found.request
    how = request.memory, request.meshes.device
    chunks = chunks_of(model, blocks, found)
    found.offload = apply_memory(blocks, *how, compiled=found.compiled, stages=chunks)
    found.stash = apply_stash(blocks, *how, compiled=found.compiled)


def graph_dense(model: nn.Module, found: ParallelState) -> None:
    """Make CUDA graphs of parts of each block, if they were asked for."""
    if not found.request.dense.graph:
        return
    blocks = found.blocks(model)
    chunks = chunks_of(model, blocks, found)
    names = dict(zip(blocks, found.plan.blocks, strict=True))
    for chunk in [blocks] if chunks is None else chunks.values():
        graph_blocks({names[block]: block for block in chunk})
