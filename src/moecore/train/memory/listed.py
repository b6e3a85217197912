"""What MoE layers and blocks save for backward, as text: the counts of `kept.py`."""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any

import torch
from torch import nn

from moecore.base.fields import Count
from moecore.base.options.memory import OFFLOADED, MemoryOptions
from moecore.base.tables import columns, shown_bytes
from moecore.models import Decoder
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.layer import MoELayer, RoutedLayer
from moecore.parallel.attached import attached
from moecore.parallel.shard.units import find_blocks
from moecore.train.graphs.regions import compiled_modules
from moecore.train.memory.kept import kept_bytes

COLUMNS = (*OFFLOADED[:-1], "routing", "rest", "all", "recomputed", "in host memory")
TOKENS = 1024  # of which a layer's bytes per token are counted
Batch = Annotated[tuple[Count, Count], "pass (sequences, tokens of each)"]
How = dict[str, Any]  # arguments of `kept_bytes`


def how_computed(model: nn.Module) -> How:
    """Return where and in which dtypes a model computes; one on meta without meshes on a GPU."""
    found = attached(model)
    if found is None:
        device_type = next((p.device.type for p in model.parameters()), "meta")
        return dict(device_type="cuda" if device_type == "meta" else device_type)
    how: How = dict(device_type=found.request.meshes.device_type)
    dtype = found.request.fsdp.param_dtype
    if dtype is not None:
        routers = [unit.modules for unit in found.plan.units if unit.role == "routers"]
        own = {p for name in chain(*routers) for p in model.get_submodule(name).parameters()}
        how["dtype_of"] = lambda p: p.dtype if p in own or not p.is_floating_point() else dtype
    return how


def layer_line(layer: RoutedLayer, how: How) -> str:
    """Return what a layer saves of a token for its backward, by part."""
    config, experts = layer.config, layer.part("experts")
    options = MemoryOptions(recompute=("expert_fc1",) if experts.recompute_fc1 else ())
    weight = next(experts.parameters())
    dtype = how["dtype_of"](weight) if "dtype_of" in how else weight.dtype
    x_TD = torch.empty(TOKENS, config.dim, dtype=dtype, device="meta").requires_grad_()
    inputs = [x_TD]
    if not isinstance(layer, MoELayer):  # the choice is the model's own
        inputs += [x_TD.new_empty(TOKENS, config.top_k, dtype=torch.int64)]
        inputs += [x_TD.new_empty(TOKENS, config.top_k, dtype=torch.float32).requires_grad_()]
    (kept,) = kept_bytes(layer, [layer], lambda copy: copy(*inputs), options=options, **how).blocks
    parts = [
        f"{part.replace('_', ' ')} {shown_bytes(n / TOKENS)}" for part, n in kept.device.items()
    ]
    more = "; FC1 is recomputed" if experts.recompute_fc1 else ""
    dispatcher = layer.dispatcher
    is_sent_twice = isinstance(dispatcher, NVLinkDispatcher) and not dispatcher.keeps_rows
    more += "; rows are sent once more in backward" if is_sent_twice else ""
    return f"{shown_bytes(kept.num_bytes / TOKENS)} per token and layer: {', '.join(parts)}{more}"


def batch_lines(model: nn.Module, batch: Batch) -> list[str]:
    """Return what blocks save of a batch, those that are alike in one row, and the sums."""
    tokens_BT = torch.zeros(batch, dtype=torch.int64)
    blocks, how, options, found = find_blocks(model), how_computed(model), None, attached(model)
    if found is not None:
        options = found.request.memory
        if found.request.compile_dense:
            how["compiled"] = frozenset(m for block in blocks for m in compiled_modules(block))
    more: dict[str, Any] = {}
    if isinstance(model, Decoder):
        more = dict(labels_BT=tokens_BT)  # multi-token prediction is part of the loss
    elif hasattr(model, "get_input_embeddings"):  # of transformers
        more = dict(use_cache=False, position_ids=torch.arange(batch[1])[None])
    kept, whole = (
        kept_bytes(model, blocks, lambda copy: copy(tokens_BT, **more), options=asked, **how).blocks
        for asked in (options or MemoryOptions(), MemoryOptions())
    )
    rows: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for i, (one, all_of_it) in enumerate(zip(kept, whole, strict=True)):
        sums = {"all": one.num_bytes, "in host memory": sum(one.host.values())}
        sums["recomputed"] = all_of_it.num_bytes - sum(sums.values())
        shown = tuple((name, n) for name, n in {**one.device, **sums}.items() if n)
        rows.setdefault(shown, []).append(i)
    names = [name for name in COLUMNS if any(name in dict(row) for row in rows)]
    table = [("layers", *(name.replace("_", " ") for name in names))]
    for row, layers in rows.items():
        cells = {name: shown_bytes(n / tokens_BT.numel()) for name, n in row}
        table.append((_ranges(layers), *(cells.get(name, "-") for name in names)))
    here = shown_bytes(sum(one.num_bytes for one in kept))
    host = sum(sum(one.host.values()) for one in kept)
    return [
        f"saved for backward per token, of {batch[0]} x {batch[1]} tokens",
        *columns(table),
        f"all layers: {here}" + (f", {shown_bytes(host)} in host memory" if host else ""),
    ]


def _ranges(numbers: list[int]) -> str:
    """Return numbers in order as text: 0, 2 to 5."""
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][-1] + 1:
            found[-1][1:] = [n]
        else:
            found.append([n])
    return ", ".join(" to ".join(map(str, ends)) for ends in found)
