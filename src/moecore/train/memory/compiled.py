"""`MemoryOptions.recompute` for blocks under torch.compile, by marks on nodes of the joint graph.

Inductor partitions the joint graph of forward and backward so that the fewest bytes are saved, and
recomputes no matrix product. Its heuristics save values that a product reads, such as a norm's
output, queries and keys. A mark of torch's selective activation checkpointing makes Inductor
recompute these values:

    norm, attention, MLP       all except products, attention, communication and random numbers
    "qkv_proj" and similar     products of the modules with this name, too
"""

import math
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from moecore.base.options.memory import MemoryOptions
from moecore.base.torch_private import CustomGraphPass
from moecore.train.memory.parts import find_part_recompute, find_parts
from moecore.train.memory.recompute import SMALL

PRODUCT = re.compile(r"(^|_)(mm|addmm|convolution)(_|$)")
OPERATOR = type(torch.ops.aten.mm.default)
SCORES = re.compile(r"^_scaled_dot_product|(^|_)(bmm|baddbmm)$")  # or what they are made of


@dataclass(frozen=True)
class RecomputeMarks(CustomGraphPass):
    """An Inductor pass that marks which nodes of a joint forward-backward graph are recomputed."""

    parts: frozenset[str]  # last names of the modules whose values are dropped
    products: frozenset[str]  # of those whose products run again, too

    def __call__(self, graph: Graph) -> None:
        """Set `node.meta["recompute"]` of the selected nodes of a joint graph, in place."""
        for node in graph.nodes:
            if self._is_recomputed(node):
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE

    def uuid(self) -> str:
        """Return the cache key by which Inductor identifies this pass."""
        return f"moecore.train.memory.compiled 1 {list(map(sorted, (self.parts, self.products)))}"

    def _is_recomputed(self, node: Node) -> bool:
        """Return whether a node's value is recomputed in backward instead of saved."""
        modules = {_get_last_name(p) for p, _ in node.meta.get("nn_module_stack", {}).values()}
        if node.op != "call_function" or not modules & self.parts:
            return False
        if node.target is operator.getitem:
            return "recompute" in node.args[0].meta  # type: ignore[union-attr]
        if not isinstance(node.target, OPERATOR):
            return False
        library, name, _ = str(node.target).split(".")
        if SCORES.search(name) or torch.Tag.nondeterministic_seeded in node.target.tags:
            return False
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):  # much smaller than its inputs
            inputs = [n.meta["val"] for n in node.all_input_nodes if "val" in n.meta]
            sizes = [_count_bytes(x) for x in inputs if isinstance(x, torch.Tensor)]
            if _count_bytes(value) * SMALL <= max(sizes, default=0):
                return False
        if library in ("aten", "prims") and not PRODUCT.search(name):
            return True
        return library in ("aten", "moecore") and bool(modules & self.products)


def make_inductor_options(blocks: Iterable[nn.Module], options: MemoryOptions) -> dict[str, Any]:
    """Return options of torch.compile with which Inductor recomputes selected parts of blocks."""
    parts, products = set[str](), set[str]()
    for block in blocks:
        for part in find_parts(block):
            use, name = find_part_recompute(part, set(options.parts)), _get_last_name(part.name)
            if use.parts:
                parts.add(name)
            products.update(child or name for child in use.products)
    marks = RecomputeMarks(frozenset(parts), frozenset(products))
    return {"joint_custom_pre_pass": marks} if parts else {}


def _get_last_name(module_path: str) -> str:
    """Return the last name of a module's path: "self_attn" for "L['self'].self_attn"."""
    name: str = re.findall(r"\w+", module_path)[-1]
    return name


def _count_bytes(x: torch.Tensor) -> int:
    """Return the size in bytes of a fake tensor; a dynamic dim counts as its hint."""
    sizes: list[int] = [n if isinstance(n, int) else n.node.hint for n in x.shape]
    return math.prod(sizes) * x.element_size()
