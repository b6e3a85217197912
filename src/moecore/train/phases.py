"""Phases of `parallelize_moe` for compilation, activation memory and CUDA graphs."""

from torch import nn

from moecore.parallel.model.parallel_state import ParallelState
from moecore.parallel.model.phases import group_blocks_by_stage
from moecore.train.graphs.regions import compile_blocks, find_compiled_modules, graph_blocks
from moecore.train.memory.apply import apply_memory_options, apply_stash
from moecore.train.memory.compiled import make_inductor_options
from moecore.train.memory.frozen_offload import FrozenOffload
from moecore.train.memory.param_offload import offload_params


def apply_compile(model: nn.Module, state: ParallelState) -> None:
    """If `DenseOptions.compile`, compile the code between MoE layers, and set `state.compiled`."""
    if not state.request.dense.compile:
        return
    blocks = state.list_blocks(model)
    compile_blocks(blocks, options=make_inductor_options(blocks, state.request.memory))
    state.compiled = {module for block in blocks for module in find_compiled_modules(block)}


def apply_recompute_and_offload(model: nn.Module, state: ParallelState) -> None:
    """Apply `MemoryOptions` to blocks in place; set `state.offload`, `state.stash` (None = off)."""
    blocks, request = state.list_blocks(model), state.request
    device = request.meshes.device
    chunks = group_blocks_by_stage(model, blocks, state)
    peers = None if chunks is None else request.meshes.dense.get_group("pp")
    state.offload = apply_memory_options(
        blocks,
        request.memory,
        device,
        compiled_modules=state.compiled,
        blocks_by_stage=chunks,
        peers=peers,
    )
    state.stash = apply_stash(
        blocks, request.memory, device, compiled_modules=state.compiled, peers=peers
    )


def apply_frozen_offload(model: nn.Module, state: ParallelState) -> None:
    """If `MemoryOptions.offload_frozen`, move the 4-bit experts to host memory."""
    if state.request.memory.offload_frozen:
        experts = [layer.get_part("experts") for layer in state.layers.values()]
        FrozenOffload(experts, state.request.meshes.device)


def apply_param_offload(_model: nn.Module, state: ParallelState) -> None:
    """If `MemoryOptions.offload_params`, move all shards to host memory."""
    if state.request.memory.offload_params:
        assert state.engine is not None, "an earlier phase has made the engine"
        offload_params(state.engine, state.request.meshes.device)


def apply_cuda_graphs(model: nn.Module, state: ParallelState) -> None:
    """Replace the parts of blocks in `DenseOptions.graph_scopes` by CUDA graphs, in place."""
    scopes = state.request.graph_scopes
    if not scopes:
        return
    blocks = state.list_blocks(model)
    chunks = group_blocks_by_stage(model, blocks, state)
    names = dict(zip(blocks, state.plan.blocks, strict=True))
    group = state.request.meshes.micro_batch_group
    for chunk in [blocks] if chunks is None else chunks.values():
        graph_blocks({names[block]: block for block in chunk}, scopes, group)
