"""Exports of linears in bitsandbytes' NF4 format, as transformers stores them; `quant.py` reads it.

A weight that is stored in NF4 is collected in fp32 and quantised again. The new codes and scales
equal the stored ones, because each group has a code of +1 or -1, or only zeros.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from moecore.base.rank_checks import gather_objects
from moecore.io.checkpoint.ranks import get_rank_and_world
from moecore.io.hf.collect import Collector, ErrorKeeper, Item
from moecore.io.hf.export_plan import ExportPlan
from moecore.io.hf.quant import BNB_STATES
from moecore.kernels.rows.four_bit import FORMATS, dequantise, quantise
from moecore.moe.stored_weights import get_four_bit_blocks

GROUP = FORMATS["nf4"].group
Quantization = Literal["bitsandbytes"]


@dataclass(frozen=True, slots=True)
class NF4Item(Item):
    """A tensor in the file format of bitsandbytes, computed from the fp32 weight `origin`."""

    origin: Item
    weight_dtype: torch.dtype  # dtype of the weight without quantisation
    constant: Tensor | None = None  # the tensor, if it does not depend on the weight


def plan_nf4_items(plan: ExportPlan) -> list[Item]:
    """Return the tensors to write; linears stored in NF4 have bitsandbytes' format. Collective.

    Adds quantization_config to `plan.values`. Raises ValueError if no linear is stored in NF4.
    """
    local_names = []
    for name, tensor in plan.tensors.items():
        blocks = get_four_bit_blocks(tensor)
        if blocks is not None and blocks.kind == "nf4" and tensor.ndim == 2:
            local_names.append(name)
    names = {name for names in gather_objects(local_names) for name in names}
    items, unquantised_modules = list[Item](), ["lm_head"]
    for item in plan.items:
        is_matrix = len(item.shape) == 2 and item.name.endswith(".weight")
        if is_matrix and all(source in names for source, _ in item.parts):
            items += _make_nf4_items(item)
        else:
            items.append(item)
            if is_matrix and ".experts." not in item.name:  # no linears of transformers
                unquantised_modules.append(item.name.removesuffix(".weight"))
    if len(items) == len(plan.items):
        raise ValueError(
            "quantization ('bitsandbytes') must have linears that are stored in NF4: use "
            "Precision(frozen='nf4', frozen_dense=True), or pass None"
        )
    compute = {i.weight_dtype for i in items if isinstance(i, NF4Item)}
    plan.values["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_compute_dtype": str(min(compute, key=str)).removeprefix("torch."),
        "llm_int8_skip_modules": sorted(set(unquantised_modules)),
    }
    return items


def _make_nf4_items(item: Item) -> Iterator[NF4Item]:
    """Yield the tensors that store the weight `item` in NF4."""
    dtype = str(item.dtype).removeprefix("torch.")
    state = {"quant_type": "nf4", "blocksize": GROUP, "dtype": dtype, "shape": [*item.shape]}
    data = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8, device="cpu")
    table = torch.tensor(FORMATS["nf4"].values, dtype=torch.float32, device="cpu")
    numel = math.prod(item.shape)
    for suffix, shape, tensor_dtype, constant in (
        ("", (numel // 2, 1), torch.uint8, None),
        (".absmax", (numel // GROUP,), torch.float32, None),
        (".quant_map", (16,), torch.float32, table),
        (BNB_STATES[0], tuple(data.shape), torch.uint8, data),
    ):
        yield NF4Item(
            item.name + suffix,
            shape,
            tensor_dtype,
            item.parts,
            origin=replace(item, dtype=torch.float32),
            weight_dtype=item.dtype,
            constant=constant,
        )


class NF4Collector(ErrorKeeper):
    """Assembles tensors with `collector`, and quantises the weights of `NF4Item`s.

    A file stores all scales before the codes, so the codes are cached until they are requested.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        # By weight and writer rank; the keys are equal on all ranks.
        self._codes: dict[tuple[str, int], Tensor | None] = {}
        # Sums of squares on this rank: of rounding errors, and of weights.
        self._squares = torch.zeros(2, dtype=torch.float64, device="cpu")

    def compute_error(self) -> float:
        """Return the norm of all rounding errors over the norm of the weights. Collective."""
        error, weight = torch.stack(gather_objects(self._squares)).sum(0)
        return float((error / weight).sqrt())

    def collect_tensor(self, item: Item, writer_rank: int) -> Tensor | None:
        """Return the full tensor on the CPU of rank `writer_rank`, and None on other ranks."""
        if not isinstance(item, NF4Item):
            return self._collector.collect_tensor(item, writer_rank)
        if item.constant is not None:
            return item.constant if get_rank_and_world()[0] == writer_rank else None
        key, is_scale = (item.origin.name, writer_rank), item.dtype.is_floating_point
        if not is_scale and key in self._codes:
            return self._codes.pop(key)
        weight, scales = self._collector.collect_tensor(item.origin, writer_rank), None
        self._codes[key] = None
        with self._keep_error():
            if weight is not None:
                blocks = quantise(weight, "nf4")
                errors = dequantise(blocks, torch.float32).sub_(weight)
                self._squares += torch.stack([x.double().square().sum() for x in (errors, weight)])
                scales = blocks.scales.flatten()
                self._codes[key] = blocks.values.reshape(-1, 1)
        return scales if is_scale else self._codes.pop(key)

    def raise_error(self) -> None:
        """Raise the first stored error of this rank, and drop cached codes."""
        self._codes.clear()
        ErrorKeeper.raise_error(self)
        self._collector.raise_error()
