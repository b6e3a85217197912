"""The dispatcher that calls NCCL EP (`nccl.ep`): stores inside of an NVLink domain, RDMA between.

    x_TD, Routing -> dispatch -> ExpertInput (S source rows, R expert rows) -> experts
                  -> combine  -> y_TD

    dispatch = its forward dispatch     backward: its backward combine, of rows and weights
    combine  = its forward combine      backward: its backward dispatch

Legend: T local tokens, C maximum tokens of one call, D model dim, K experts per token, G ranks of
the group (ep), S source rows, R expert rows.

NCCL EP sends a token once to every rank that needs it, and between domains once to each domain. It
sums in fp32. A handle has the routing of one call, which backward reads. When the autograd graph
of a forward is freed, its handles return to their group and are reused.

Source: `nccl_ep/include/nccl_ep.h` of github.com/NVIDIA/nccl-extensions, high throughput and flat.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base import get_install_command
from moecore.base.rank_checks import gather_objects
from moecore.base.streams import record_host_wait
from moecore.kernels.rows.index import build_index
from moecore.kernels.rows.record import Rows
from moecore.moe.dispatch.collectives import LayerCheck, all_gather_rows, exchange_with_grad
from moecore.moe.placement import ExpertPlacement
from moecore.moe.records import Dispatcher, ExpertInput, Routing

MAX_TOKENS = 8192  # C; longer forwards are several calls
MIN_TOKENS = 64
MAX_CHOICES = 32  # K
ROW_ALIGNMENT = 16  # bytes
EXPERT_ALIGNMENT = 4  # experts of a domain
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_NCCL = (2, 30, 7)
MIN_CAPABILITY = (9, 0)
INSTALL = f"{get_install_command('nccl-ep')}, or use 'alltoall'"


def find_nccl_ep_problem(group: dist.ProcessGroup, device_type: str) -> str | None:
    """Return the reason why some rank of a group cannot run NCCL EP, or None. Collective."""
    problems = gather_objects(_find_local_nccl_ep_problem(device_type), group)
    return next((problem for problem in problems if problem is not None), None)


def _find_local_nccl_ep_problem(device_type: str) -> str | None:
    if device_type != "cuda":
        return f"must go with device_type ({device_type!r}) = 'cuda': use 'alltoall'"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        text = ".".join(map(str, capability))
        return f"must have GPUs of capability 9.0 or later (here {text}): use 'alltoall'"
    try:
        import nccl.core
        import nccl.ep
    except (ImportError, RuntimeError) as error:
        return f"must have nccl.ep ({str(error).splitlines()[0]}): {INSTALL}"
    versions = nccl.core.get_version().libnccl
    if versions is None or versions.version.release < MIN_NCCL:
        text = "none" if versions is None else str(versions.version)
        min_version = ".".join(map(str, MIN_NCCL))
        return f"must have NCCL {min_version} or later loaded (here {text}): {INSTALL}"
    names, home = ("NCCL_EP_JIT_NVCC", "NVCC"), os.environ.get("CUDA_HOME")
    path = None if home is None else str(Path(home) / "bin")
    if not any(map(os.environ.get, names)) and shutil.which("nvcc", path=path) is None:
        return "must find nvcc, which compiles its kernels at first use: set CUDA_HOME"
    return None


class EPGroups:
    """The NCCL EP groups that the layers of a model share, and their communicator.

    All ranks of `group` together allocate them at first use, and `close` frees them. NVLink
    connects `ranks_per_domain` consecutive ranks.
    """

    def __init__(self, group: dist.ProcessGroup, ranks_per_domain: int) -> None:
        self.group, self.ranks_per_domain = group, min(ranks_per_domain, group.size())
        self._communicator: Any = None
        self._groups: dict[tuple[int, int, int], EPGroup] = {}

    def get_group(self, num_experts: int, row_bytes: int, max_tokens: int) -> EPGroup:
        """Return the NCCL EP group for these sizes. Collective at first use, which allocates."""
        # Powers of two, so that few groups are created if the number of tokens changes.
        num_tokens = min(MAX_TOKENS, max(MIN_TOKENS, 1 << (max_tokens - 1).bit_length()))
        key = (num_experts, row_bytes, num_tokens)
        if key not in self._groups:
            self._groups[key] = self._make_group(*key)
        return self._groups[key]

    def _make_group(self, num_experts: int, row_bytes: int, max_tokens: int) -> EPGroup:
        """Return a new NCCL EP group for at most `max_tokens` rows of `row_bytes`. Collective."""
        from nccl import ep
        from nccl.ep.interop.torch import get_nccl_comm_from_group

        if self._communicator is None:
            self._communicator = get_nccl_comm_from_group(self.group)
        config = ep.GroupConfig(
            algorithm=ep.Algorithm.HIGH_THROUGHPUT,
            num_experts=num_experts,
            max_dispatch_tokens_per_rank=max_tokens,
            max_token_bytes=row_bytes,
        )
        group = ep.Group.create(self._communicator, config)
        return EPGroup(group, num_experts // self.group.size(), max_tokens)

    def close(self) -> None:
        """Free groups and communicator; backwards of earlier forwards cannot run. Collective."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()
        if self._communicator is not None:
            self._communicator.destroy()
            self._communicator = None


class EPGroup:
    """One NCCL EP group, and its unused handles. A handle stores the routing of one call."""

    def __init__(self, group: Any, num_local_experts: int, max_tokens: int) -> None:
        self.num_tokens, self.num_local = max_tokens, num_local_experts
        self._group, self._handles = group, list[Any]()
        self._idle = defaultdict[int, list[Any]](list)  # by the choices of a token

    def exchange_routing(self, ids_TK: Tensor, max_tokens: int) -> ForwardHandles:
        """Exchange physical expert ids with all ranks; return this forward's handles. Host sync."""
        from nccl import ep

        chunks = [ids_TK[i : i + self.num_tokens] for i in range(0, max_tokens, self.num_tokens)]
        device, stream = ids_TK.device, _get_stream_handle(ids_TK)
        counts = torch.zeros(len(chunks), 1 + self.num_local, dtype=torch.int32, device=device)
        forward_handles = ForwardHandles(self, [len(chunk) for chunk in chunks], ids_TK.shape[1])
        idle = self._idle[forward_handles.top_k]
        for chunk_CK, counts_N in zip(chunks, counts, strict=True):
            ids = ep.Tensor(chunk_CK.long().contiguous())
            info = ep.LayoutInfo(
                recv_total_counter=ep.Tensor(counts_N[:1]),
                expert_counters=ep.Tensor(counts_N[1:]),
                recv_topk_idx_kind=ep.ExpertIdKind.LOCAL,
            )
            options: Any = dict(layout_info=info, stream=stream)
            if idle:
                handle = idle.pop()
                handle.update(ids, **options)
            else:
                handle = self._group.create_handle(ep.Layout.FLAT, ids, **options)
                self._handles.append(handle)
            forward_handles.handles.append(handle)
        for num_rows, *choices in counts.tolist():
            forward_handles.rows.append(num_rows)
            forward_handles.num_choices += sum(choices)
        return forward_handles

    def return_handles(self, forward_handles: ForwardHandles) -> None:
        """Make the handles of a forward available to later forwards."""
        self._idle[forward_handles.top_k] += forward_handles.handles

    def close(self) -> None:
        """Free handles and buffers."""
        for handle in self._handles:
            handle.destroy()
        self._group.destroy()
        self._handles.clear()
        self._idle.clear()


class ForwardHandles:
    """The NCCL EP handles of one forward, one per chunk of at most C tokens; none on meta.

    `tokens` has the number of tokens of each chunk. When the object is deleted with its autograd
    graph, later forwards can use the handles.
    """

    dtype: torch.dtype  # of the tokens, and so of all sums

    def __init__(self, group: EPGroup | None, tokens: list[int], top_k: int) -> None:
        self.tokens, self.top_k, self.num_choices = tokens, top_k, 0  # R
        self.rows: list[int] = []
        self.handles: list[Any] = []
        self._group = group

    def __del__(self) -> None:
        if self._group is not None:
            self._group.return_handles(self)

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Send tokens; return received rows [S, D], local expert ids (or -1) and weights [S, K]."""
        S, K, self.dtype = sum(self.rows), self.top_k, x_TD.dtype
        rows_SD = x_TD.new_empty(S, x_TD.shape[1])
        weights_SK = weights_TK.new_empty(S, K)
        ids_SK = torch.empty_like(weights_SK, dtype=torch.int64)
        send_buffers, outputs = (x_TD, weights_TK), (rows_SD, weights_SK, ids_SK)
        for ep, handle, (x, w), (rows, weights, ids) in self._iterate_chunks(send_buffers, outputs):
            outs = ep.DispatchOutputs(tokens=rows, topk_weights=weights, topk_idx=ids)
            inputs = ep.DispatchInputs(tokens=x, topk_weights=w)
            handle.dispatch(inputs, outs, stream=_get_stream_handle(x_TD))
        return rows_SD, ids_SK, weights_SK

    def combine(self, y_SD: Tensor) -> Tensor:
        """Send rows y_SD to their tokens' ranks, and return each token's sum, [T, D]."""
        y_TD = y_SD.new_empty(sum(self.tokens), y_SD.shape[1])
        for ep, handle, (out,), (y,) in self._iterate_chunks((y_TD,), (y_SD.contiguous(),)):
            inputs, outs = ep.CombineInputs(tokens=y), ep.CombineOutputs(tokens=out)
            handle.combine(inputs, outs, stream=_get_stream_handle(y_SD))
        return y_TD

    def compute_row_grads(self, dy_TD: Tensor) -> Tensor:
        """Run combine's backward: send tokens' gradients dy_TD; return gradients of rows [S, D]."""
        dy_SD = dy_TD.new_empty(sum(self.rows), dy_TD.shape[1])
        for ep, handle, (x,), (out,) in self._iterate_chunks((dy_TD.contiguous(),), (dy_SD,)):
            inputs, outs = ep.DispatchInputs(tokens=x), ep.DispatchOutputs(tokens=out)
            config = ep.DispatchConfig(pass_direction=ep.PassDir.BWD)
            handle.dispatch(inputs, outs, config=config, stream=_get_stream_handle(dy_TD))
        return dy_SD

    def compute_token_grads(self, dx_SD: Tensor, dweights_SK: Tensor) -> tuple[Tensor, Tensor]:
        """Run dispatch's backward: return gradients of tokens [T, D] and routing weights [T, K]."""
        T = sum(self.tokens)
        dx_TD = dx_SD.new_empty(T, dx_SD.shape[1])
        dweights_TK = dweights_SK.new_empty(T, self.top_k)
        grads = (dx_SD.contiguous(), dweights_SK.contiguous())
        for ep, handle, outs, (dx, dw) in self._iterate_chunks((dx_TD, dweights_TK), grads):
            inputs = ep.CombineInputs(tokens=dx, topk_weights=dw)
            config = ep.CombineConfig(pass_direction=ep.PassDir.BWD)
            outputs = ep.CombineOutputs(tokens=outs[0], topk_weights=outs[1])
            handle.combine(inputs, outputs, config=config, stream=_get_stream_handle(dx_SD))
        return dx_TD, dweights_TK

    def _iterate_chunks(
        self, token_tensors: tuple[Tensor, ...], row_tensors: tuple[Tensor, ...]
    ) -> Iterator[tuple[Any, Any, list[Any], list[Any]]]:
        """Yield module `ep`, a chunk's handle, and `ep.Tensor`s of its tokens and of its rows."""
        if not self.handles:
            return
        from nccl import ep

        parts = (
            [x.split(self.tokens) for x in token_tensors],
            [x.split(self.rows) for x in row_tensors],
        )
        for i, handle in enumerate(self.handles):
            tokens, rows = ([ep.Tensor(x[i]) for x in xs] for xs in parts)
            yield ep, handle, tokens, rows


class NCCLEPDispatcher(Dispatcher):
    """Sends each token once to every rank that owns at least one of its experts, by NCCL EP."""

    waits_on_host = True
    can_alternate = False

    def __init__(self, placement: ExpertPlacement, groups: EPGroups) -> None:
        self.placement, self._groups = placement, groups
        self.layer_check = LayerCheck(placement.group, placement.layer)

    @torch.compiler.disable
    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertInput:
        """Send tokens to experts' ranks; return the experts' input. 2 collectives, 2 host syncs."""
        p, (T, K) = self.placement, routing.destinations_TK.shape
        _check_sendable_inputs(x_TD, routing, p, self._groups.ranks_per_domain)
        if x_TD.is_meta:
            forward_handles = ForwardHandles(None, [T], K)
            forward_handles.rows.append(p.group.size() * p.compute_balanced_tokens(T, K))
            forward_handles.num_choices = p.compute_balanced_rows(T, K)
            record_host_wait()
        else:
            note = self.layer_check.encode_layer(x_TD)
            local_numbers = torch.tensor([[T, note]], device=x_TD.device, dtype=torch.int64)
            numbers, notes = zip(*all_gather_rows(local_numbers, p.group).tolist(), strict=True)
            self.layer_check.check_encoded_layers(notes)
            max_tokens = max(1, *numbers)
            num_experts, row_bytes = p.num_physical * p.ep, x_TD.shape[1] * x_TD.itemsize
            group = self._groups.get_group(num_experts, row_bytes, max_tokens)
            forward_handles = group.exchange_routing(routing.destinations_TK, max_tokens)
        rows_SD, ids_SK, weights_SK = _EPDispatch.apply(x_TD, routing.weights_TK, forward_handles)
        index = build_index(
            ids_SK.int(),
            weights_SK,
            first_expert=0,
            num_local_experts=p.num_physical,
            row_multiple=routing.rows_multiple,
            max_pairs=forward_handles.num_choices,
        )
        return ExpertInput(Rows(rows_SD), index, forward_handles)

    @torch.compiler.disable
    def combine(self, y_SD: Tensor, plan: ForwardHandles) -> Tensor:
        """Send partial sums to their tokens' ranks, and return y_TD, summed in fp32."""
        if y_SD.dtype != plan.dtype:
            raise ValueError(
                f"dtype of the experts' output ({y_SD.dtype}) must be that of their input "
                f"({plan.dtype}) for dispatcher ('nccl_ep'): use 'alltoall'"
            )
        return exchange_with_grad(y_SD, plan.combine, plan.compute_row_grads)


def _check_sendable_inputs(
    x_TD: Tensor, routing: Routing, placement: ExpertPlacement, ranks_per_domain: int
) -> None:
    """Raise ValueError on all ranks for inputs that NCCL EP cannot send."""
    (_, D), K = x_TD.shape, routing.destinations_TK.shape[1]
    experts = placement.num_physical * ranks_per_domain
    relation = None
    if x_TD.dtype not in DTYPES or D * x_TD.itemsize % ROW_ALIGNMENT:
        relation = (
            f"rows ({D} x {x_TD.dtype}) must be fp32, bf16 or fp16 and multiples of "
            f"{ROW_ALIGNMENT} bytes"
        )
    elif K > MAX_CHOICES:
        relation = f"top_k ({K}) must be <= {MAX_CHOICES}"
    elif experts % EXPERT_ALIGNMENT:
        multiple = f"must be a multiple of {EXPERT_ALIGNMENT}"
        relation = f"experts of a domain ({experts}, clones too) {multiple}"
    elif routing.pad:
        relation = "CapacityConfig.pad (True) must be False"
    if relation is not None:
        raise ValueError(f"{relation} with dispatcher ('nccl_ep'): use 'alltoall'")


def _get_stream_handle(x: Tensor) -> int:
    """Return the CUDA handle of the current stream of a tensor's device; 0 = CPU."""
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


class _EPDispatch(torch.autograd.Function):
    """Autograd function of `ForwardHandles.dispatch`. Backward is `compute_token_grads`."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, handles: ForwardHandles
    ) -> tuple[Tensor, ...]:
        rows_SD, ids_SK, weights_SK = handles.dispatch(x_TD.contiguous(), weights_TK.contiguous())
        ctx.handles = handles
        ctx.like = rows_SD.shape, rows_SD.dtype, rows_SD.device
        ctx.mark_non_differentiable(ids_SK)
        ctx.set_materialize_grads(False)
        return rows_SD, ids_SK, weights_SK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, None]:
        # Every rank takes part, so missing gradients become zeros.
        (drows_SD, _, dweights_SK), (shape, dtype, device) = grads, ctx.like
        if drows_SD is None:
            drows_SD = torch.zeros(shape, dtype=dtype, device=device)
        if dweights_SK is None:
            shape_SK = shape[0], ctx.handles.top_k
            dweights_SK = torch.zeros(shape_SK, device=device, dtype=torch.float32)
        return *ctx.handles.compute_token_grads(drows_SD, dweights_SK), None
