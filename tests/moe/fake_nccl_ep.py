"""NCCL EP's Python API over any process group, high throughput and flat, for ranks without GPUs.

It does what `nccl_ep.h` and its kernels do, and refuses what they refuse or assert. Received
choices are those of local experts in their order, behind them ids -1 and weights 0. Outputs are NaN
where a call does not write them. All ranks must make the same calls in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

MOST_TOKENS, MOST_CHOICES = 8192, 32


class Algorithm(IntEnum):
    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class Layout(IntEnum):
    UNSET = 0
    EXPERT_MAJOR = 1
    RANK_MAJOR = 2
    FLAT = 3


class PassDir(IntEnum):
    FWD = 0
    BWD = 1


class ExpertIdKind(IntEnum):
    AUTO = 0
    LOCAL = 1
    GLOBAL = 2


class Tensor:
    """A descriptor of a contiguous tensor."""

    def __init__(self, buffer: torch.Tensor) -> None:
        assert buffer.ndim and buffer.is_contiguous()
        self.buffer = buffer


@dataclass(kw_only=True)
class GroupConfig:
    algorithm: Algorithm = Algorithm.LOW_LATENCY
    num_experts: int = 0
    max_dispatch_tokens_per_rank: int = 0
    max_recv_tokens_per_rank: int = 0
    max_token_bytes: int = 0


@dataclass(kw_only=True)
class LayoutInfo:
    expert_counters: Tensor | None = None
    recv_total_counter: Tensor | None = None
    recv_topk_idx_kind: ExpertIdKind = ExpertIdKind.AUTO


@dataclass(kw_only=True)
class DispatchConfig:
    pass_direction: PassDir = PassDir.FWD


CombineConfig = DispatchConfig


@dataclass(kw_only=True)
class DispatchInputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None


@dataclass(kw_only=True)
class DispatchOutputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    topk_idx: Tensor | None = None


CombineInputs = CombineOutputs = DispatchInputs


class Communicator:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.is_open = group, True

    def destroy(self) -> None:
        assert self.is_open
        self.is_open = False


class Group:
    made = 0  # by this process, as the next ones
    calls: list[str] = []  # noqa: RUF012

    def __init__(self, comm: Communicator, config: GroupConfig) -> None:
        self.comm, self.config, self.is_open, self.handles = comm, config, True, 0

    @classmethod
    def create(cls, comm: Communicator, config: GroupConfig) -> Group:
        assert comm.is_open and config.algorithm == Algorithm.HIGH_THROUGHPUT
        assert 0 < config.max_dispatch_tokens_per_rank <= MOST_TOKENS
        assert config.max_dispatch_tokens_per_rank % 2 == 0 and config.max_recv_tokens_per_rank == 0
        assert config.max_token_bytes > 0 and config.max_token_bytes % 16 == 0
        assert config.num_experts > 0 and config.num_experts % comm.group.size() == 0
        assert config.num_experts % 4 == 0  # of one domain
        Group.made += 1
        made = Group(comm, config)
        made.exchange("create", (config.num_experts, config.max_dispatch_tokens_per_rank))
        return made

    def create_handle(self, layout, topk_idx, *, layout_info=None, config=None, stream) -> Handle:
        assert layout == Layout.FLAT
        self.handles += 1
        handle = Handle(self, topk_idx.buffer.shape[1])
        handle.update(topk_idx, layout_info=layout_info, stream=stream)
        return handle

    def destroy(self) -> None:
        assert self.is_open
        self.is_open = False

    def exchange(self, call: str, mine: Any) -> list[Any]:
        """Return what all ranks bring to the same call."""
        assert self.is_open
        found: list[Any] = [None] * self.comm.group.size()
        dist.all_gather_object(found, (call, mine), group=self.comm.group)
        assert {name for name, _ in found} == {call}, [name for name, _ in found]
        Group.calls.append(call)
        return [value for _, value in found]


class Handle:
    def __init__(self, group: Group, top_k: int) -> None:
        assert top_k <= min(MOST_CHOICES, group.config.num_experts)
        self.group, self.top_k, self.is_open = group, top_k, True

    def update(self, topk_idx, *, layout_info=None, stream) -> None:
        ids = topk_idx.buffer
        assert self.is_open and ids.shape[1] == self.top_k
        assert ids.dtype in (torch.int32, torch.int64)
        assert ids.shape[0] <= self.group.config.max_dispatch_tokens_per_rank
        assert int(ids.max()) < self.group.config.num_experts if ids.numel() else True
        self.ids = self.group.exchange("update", ids.clone())
        num_local = self.group.config.num_experts // len(self.ids)
        self.first = dist.get_rank(self.group.comm.group) * num_local
        self.here = [((i >= self.first) & (i < self.first + num_local)) for i in self.ids]
        self.order = [is_here.any(1).nonzero().flatten() for is_here in self.here]
        assert layout_info is not None and layout_info.recv_topk_idx_kind == ExpertIdKind.LOCAL
        for counter in (layout_info.recv_total_counter, layout_info.expert_counters):
            assert counter is not None and counter.buffer.dtype == torch.int32
        total, experts = layout_info.recv_total_counter, layout_info.expert_counters
        total.buffer.fill_(sum(len(order) for order in self.order))  # type: ignore[union-attr]
        chosen = torch.cat([i[h] for i, h in zip(self.ids, self.here, strict=True)]) - self.first
        experts.buffer.copy_(torch.bincount(chosen, minlength=num_local))  # type: ignore[union-attr]

    def dispatch(self, inputs, outputs, *, layout_info=None, config=None, stream) -> None:
        is_forward = config is None or config.pass_direction == PassDir.FWD
        assert self.is_open and inputs.tokens is not None and outputs.tokens is not None
        x, weights, out = inputs.tokens.buffer, inputs.topk_weights, outputs.tokens.buffer
        me, rows = dist.get_rank(self.group.comm.group), sum(len(order) for order in self.order)
        assert x.shape[0] == self.ids[me].shape[0] and out.shape == (rows, x.shape[1])
        assert out.dtype == x.dtype and x.shape[1] * x.itemsize % 16 == 0
        assert x.shape[1] * x.itemsize <= self.group.config.max_token_bytes
        assert (weights is not None) == is_forward
        assert (outputs.topk_weights is not None) == (outputs.topk_idx is not None) == is_forward
        name = "dispatch" if is_forward else "backward dispatch"
        mine = (x.clone(), None if weights is None else weights.buffer.clone())
        came = self.group.exchange(name, mine)
        parts = [x for x, _ in came]
        out.copy_(torch.cat([p[o] for p, o in zip(parts, self.order, strict=True)]))
        if not is_forward:
            return
        out_w, out_i = outputs.topk_weights.buffer, outputs.topk_idx.buffer  # type: ignore[union-attr]
        assert out_w.shape == out_i.shape == (rows, self.top_k)
        assert out_w.dtype == torch.float32 and out_i.dtype == torch.int64
        assert weights is not None and weights.buffer.shape == self.ids[me].shape
        out_w.zero_()
        out_i.fill_(-1)
        for row, (r, t) in enumerate(self._sources()):
            for k, (expert, column) in enumerate(self._local(r, t)):
                out_i[row, k], out_w[row, k] = expert - self.first, came[r][1][t, column]

    def combine(self, inputs, outputs, *, config=None, stream) -> None:
        is_forward = config is None or config.pass_direction == PassDir.FWD
        assert self.is_open and inputs.tokens is not None and outputs.tokens is not None
        y, weights, out = inputs.tokens.buffer, inputs.topk_weights, outputs.tokens.buffer
        me, rows = dist.get_rank(self.group.comm.group), sum(len(order) for order in self.order)
        assert y.shape[0] == rows and out.shape == (self.ids[me].shape[0], y.shape[1])
        assert y.dtype == out.dtype and y.dtype in (torch.bfloat16, torch.float16, torch.float32)
        assert (weights is not None) == (outputs.topk_weights is not None) == (not is_forward)
        name = "combine" if is_forward else "backward combine"
        sources, given_back = self._sources(), []
        for row, (r, t) in enumerate(sources):
            back = {}
            if weights is not None:
                assert weights.buffer.shape == (rows, self.top_k)
                for k, (_, column) in enumerate(self._local(r, t)):
                    back[column] = float(weights.buffer[row, k])
            given_back.append(back)
        sums = torch.zeros(out.shape, dtype=torch.float32)
        given = torch.zeros(self.ids[me].shape)
        # In the order of ranks.
        for part in self.group.exchange(name, (sources, y.float(), given_back)):
            for (r, t), row, back in zip(*part, strict=True):
                if r == me:
                    sums[t] += row
                    for column, value in back.items():
                        given[t, column] = value
        out.copy_(sums)
        if outputs.topk_weights is not None:
            assert outputs.topk_weights.buffer.dtype == torch.float32
            outputs.topk_weights.buffer.copy_(given)

    def destroy(self) -> None:
        assert self.is_open
        self.is_open = False

    def _sources(self) -> list[tuple[int, int]]:
        return [(r, int(t)) for r, order in enumerate(self.order) for t in order]

    def _local(self, r: int, t: int) -> list[tuple[int, int]]:
        """Return the experts here of a token, and their columns, in the order of experts."""
        columns = self.here[r][t].nonzero().flatten().tolist()
        return sorted((int(self.ids[r][t, k]), k) for k in columns)


@contextmanager
def installed() -> Iterator[None]:
    """Return a context in which `nccl.ep` is this module."""
    names = ("nccl", "nccl.ep", "nccl.ep.interop", "nccl.ep.interop.torch")
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules["nccl.ep"] = sys.modules[__name__]
    modules["nccl"].ep = modules["nccl.ep"]
    modules["nccl.ep.interop.torch"].get_nccl_comm_from_group = Communicator
    saved = {name: sys.modules.get(name) for name in names}
    sys.modules |= modules
    try:
        yield
    finally:
        for name, module in saved.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
