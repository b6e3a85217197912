"""Applies `MemoryOptions` to a model's blocks, in place.

Offload is applied outside of recomputation. It therefore offloads only the tensors that a
recomputed region still saves: the region's inputs and the outputs of its matrix products.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from moecore.base.fields import quote
from moecore.base.options.memory import GEMM_LAST, MemoryOptions, Recomputed
from moecore.base.rank_checks import gather_objects
from moecore.base.regions import recompute_products
from moecore.moe.backends import find_backend_computation
from moecore.moe.layer import RoutedLayer
from moecore.train.memory.offload import Offload, call_in_context, wrap_forward
from moecore.train.memory.parts import find_part_recompute, find_parts
from moecore.train.memory.recompute import recompute, share_region_outputs
from moecore.train.memory.stash import Stash


def apply_memory_options(
    blocks: Sequence[nn.Module],
    options: MemoryOptions,
    device: torch.device,
    *,
    compiled_modules: Set[nn.Module] = frozenset(),
    blocks_by_stage: Mapping[int, Sequence[nn.Module]] | None = None,
    peers: dist.ProcessGroup | None = None,
) -> Offload | None:
    """Apply recomputation and offload to blocks in place; return the `Offload`, None if it is off.

    Modules in compiled code (`compiled_modules`) do not change. `blocks_by_stage` maps the index of
    a pipeline stage to its blocks; None = no pipeline. `peers` is a group with one
    rank of each pipeline stage; None = no pipeline. A selected part that no stage has is warned of.
    """
    # "expert_fc1" of the options is the experts' own: see `Experts.set_backend`. In compiled code
    # the compiler recomputes (`make_inductor_options`), and nothing is offloaded.
    if blocks_by_stage is None and isinstance(options.offload_fraction, tuple):
        raise ValueError(
            f"MemoryOptions.offload_fraction ({quote(options.offload_fraction)}) must be one "
            "number where blocks are no stages: pass a float"
        )
    _apply_recompute(blocks, options, compiled_modules, peers)
    if not options.offload:
        return None
    names = _map_offloaded_parts(blocks, options, compiled_modules, peers)
    offload = Offload(device, max_host_bytes=options.offload_host_bytes)
    fraction = options.offload_fraction
    for index, chunk in ({0: blocks} if blocks_by_stage is None else blocks_by_stage).items():
        chunk_fraction = fraction[index] if isinstance(fraction, tuple) else fraction
        offload.attach(chunk, names.get, chunk_fraction)
    return offload


def apply_stash(
    blocks: Sequence[nn.Module],
    options: MemoryOptions,
    device: torch.device,
    *,
    compiled_modules: Set[nn.Module] = frozenset(),
    peers: dist.ProcessGroup | None = None,
) -> Stash | None:
    """Let uncompiled MoE layers save padded rows in a `Stash`; return it, or None if none does.

    `peers` as in `apply_memory_options`.
    """
    if options.stash is None:
        return None
    modules = (module for block in blocks for module in block.modules())
    layers: list[Any] = [m for m in modules if _has_spare_rows(m) and m not in compiled_modules]
    if not _unite_stages(set(layers) and {"stash"}, peers):
        warnings.warn(
            "MemoryOptions.stash is not used: no MoE layer of a block has room for more rows than "
            "come (dispatcher 'nvlink', or a capacity with pad), and experts 'triton' or 'torch' "
            "without biases",
            stacklevel=6,
        )
    if not layers:
        return None
    stash = Stash(device, options.stash, sum(layer.runs for layer in layers))
    stash.attach(blocks, dict.fromkeys(layers, "moe").get)
    return stash


def _has_spare_rows(module: nn.Module) -> bool:
    """Whether a module is an MoE layer whose experts save padded buffers with unused rows."""
    if not isinstance(module, RoutedLayer):
        return False
    experts, capacity = module.get_part("experts"), module.config.capacity
    pads = capacity is not None and capacity.pad
    make_spec, needs_autograd = experts.make_spec(), experts.needs_autograd
    separate = find_backend_computation(experts.backend, make_spec, needs_autograd=needs_autograd)
    return module.dispatcher.has_spare_rows(pads=pads) and separate is None


def _unite_stages(parts: Set[str], peers: dist.ProcessGroup | None) -> Set[str]:
    """Return the union of the parts that pipeline stages have. Collective over `peers`."""
    return parts if peers is None else {part for of in gather_objects(parts, peers) for part in of}


def _apply_recompute(
    blocks: Iterable[nn.Module],
    options: MemoryOptions,
    compiled_modules: Set[nn.Module],
    peers: dist.ProcessGroup | None,
) -> None:
    """Make backward recompute the selected parts of blocks; warn if an option selects none."""
    recompute_parts = set(options.parts) - {"expert_fc1"}
    if not recompute_parts:
        return
    used_parts: set[Recomputed] = set()
    for block in blocks:
        for part in list(find_parts(block)):
            use = find_part_recompute(part, recompute_parts)
            used_parts |= use.parts
            name, kind, module = part
            if not use.parts or module in compiled_modules:
                continue
            if kind == "moe":  # fully; other parts except for saved matmuls
                wrap_forward(module, _run_checkpointed)
                continue
            for child in use.products:
                wrap_forward(module.get_submodule(child), call_in_context, recompute_products)
            wrap_forward(module, _run_as_region, name, kind != "norm")
        wrap_forward(block, call_in_context, share_region_outputs)
    if recompute_parts.issuperset(GEMM_LAST):  # a block need not have all three
        recompute_parts.difference_update(GEMM_LAST)
    unused_parts = recompute_parts - _unite_stages(used_parts, peers)
    unused = [part for part in options.parts if part in unused_parts]
    if unused:
        text = f"MemoryOptions.recompute ({unused[0]!r}) is not used: no block has it"
        warnings.warn(text, stacklevel=7)


def _map_offloaded_parts(
    blocks: Iterable[nn.Module],
    options: MemoryOptions,
    compiled_modules: Set[nn.Module],
    peers: dist.ProcessGroup | None,
) -> dict[nn.Module, str]:
    """Return module -> kind, such as "mlp", of parts to offload; warn if an option selects none."""
    kinds: dict[nn.Module, str] = {}
    for block in blocks:
        inside: set[nn.Module] = set()
        for _, kind, module in find_parts(block):
            if module in inside:
                continue
            if kind != "moe":
                inside.update(module.modules())
            if kind in options.offload and module not in compiled_modules:
                kinds[module] = kind
        if "rest" in options.offload:
            kinds[block] = "rest"
    used_parts = _unite_stages({*kinds.values()}, peers)
    unused = [part for part in options.offload if part not in used_parts]
    if unused:
        warnings.warn(
            f"MemoryOptions.offload ({unused[0]!r}) is not used: no block has it outside of what "
            "is compiled",
            stacklevel=7,
        )
    return kinds


def _run_as_region(
    forward: Callable[..., Any],
    region_name: str,
    has_products: bool,
    args: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Return the result of `forward`, whose saved values backward recomputes."""
    types = (cls for argument in (*args, *kwargs.values()) for cls in type(argument).__mro__)
    if any(cls.__name__ == "Cache" for cls in types):  # recomputation would fill it twice
        return forward(*args, **kwargs)
    return recompute(region_name, forward, args, kwargs, has_products=has_products)


def _run_checkpointed(forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
