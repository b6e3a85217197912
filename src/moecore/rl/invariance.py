"""Batch invariance of a parallelized model: its context, and the check of the model.

A token's log-probability then has the same bits for all sequences in its row, all positions of its
sequence in the row, and all dp, ep and pp. `kernels/invariant` has the matrix products. Outputs of
experts are added in the order of a token's choices (`moe/dispatch/local.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from moecore.families.transformers.compressed_attention import find_compressed_attention
from moecore.families.transformers.packing import find_longest_position_readers
from moecore.families.transformers.sparse_attention import find_sparse_attention
from moecore.kernels.invariant import batch_invariant
from moecore.moe.dispatch.local import ChoiceDispatcher, LocalDispatcher
from moecore.moe.layer import RoutedLayer
from moecore.parallel.model.parallel_state import ParallelState

SAME_ORDER = 2  # choices: their sum is the same in either order


@contextmanager
def use_batch_invariance(layers: Mapping[str, RoutedLayer], device_type: str) -> Iterator[None]:
    """Return a context with batch-invariant kernels; expert outputs are summed in top-k order."""
    with ExitStack() as undo:
        undo.enter_context(batch_invariant(device_type))
        for layer in layers.values():
            inner, num_choices = layer.dispatcher, layer.config.choices_per_token
            if num_choices > SAME_ORDER and not isinstance(inner, LocalDispatcher):
                undo.callback(setattr, layer, "dispatcher", inner)
                layer.dispatcher = ChoiceDispatcher(inner, num_choices)
        yield


def check_batch_invariance(model: nn.Module, state: ParallelState) -> None:
    """Raise ValueError for a model whose results depend on other tokens or a token's position."""
    for name, value, fix in _find_invariance_obstacles(model, state):
        raise ValueError(f"{name} ({value}) must {fix} for an Engine with batch_invariant=True")


def _find_invariance_obstacles(
    model: nn.Module, state: ParallelState
) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, requirement as text) of each option that rules out batch invariance."""
    request, degrees = state.request, state.request.meshes.parallel
    for axis in ("tp", "cp", "etp"):
        if getattr(degrees, axis) > 1:
            yield axis, getattr(degrees, axis), "be 1, because its ranks each add a part of a sum,"
    if request.is_dynamic:
        yield "ContextOptions.dynamic", True, "be False, because ranks each add a part of a sum,"
    if request.precision is not None:
        yield "precision", request.precision, "be None, because scales may be of many tokens,"
    if request.dispatch.fp8:
        yield "DispatchOptions.fp8", True, "be False, because ep would change what is rounded,"
    if request.expert_backend not in ("auto", "triton", "torch"):
        yield "expert_backend", repr(request.expert_backend), "be 'auto', 'triton' or 'torch'"
    for name in ("compile", "graph"):
        if getattr(request.dense, name):
            fix = "be False, because what was compiled keeps its own products,"
            yield f"DenseOptions.{name}", True, fix
    if state.compiled:
        yield "modules that are compiled", len(state.compiled), "be none"
    if request.meshes.parallel.ep > 1 and state.plan.dispatcher == "nvlink":
        fix = "be another one, because it adds experts where they are,"
        yield "DispatchOptions.name", "'nvlink'", fix
    for name, layer in state.layers.items():
        config, suffix = layer.config, f"of layer {name!r}"
        if config.capacity is not None:
            yield f"capacity {suffix}", config.capacity, "be None, because it compares tokens,"
        if config.assignment != "learned":
            yield f"assignment {suffix}", repr(config.assignment), "be 'learned'"
        if config.balance.bias_per_micro_batch:
            yield f"bias_per_micro_batch {suffix}", True, "be False"
        if config.router_jitter:
            yield f"router_jitter {suffix}", config.router_jitter, "be 0"
    model_config = getattr(model, "config", None)
    types = getattr(model_config, "layer_types", None) or ()
    if "linear_attention" in types:
        yield "layer_types", "'linear_attention'", "have attention alone"
    for module in (*find_sparse_attention(model), *find_compressed_attention(model)):
        yield "a layer of sparse attention", type(module).__name__, "not be in the model"
    for name, rope_type, _ in find_longest_position_readers(model):
        fix = "have angles that do not depend on the longest sequence of a row, as 'yarn' has,"
        yield f"rope_type of {name!r}", repr(rope_type), fix
    if linear := getattr(model_config, "linear_attention", None):
        yield "linear_attention", linear, "be None"
    if sparse := getattr(getattr(model_config, "mla", None), "sparse", None):
        yield "mla.sparse", sparse, "be None, because keys are scored in chunks of tokens,"
