"""A unit's gradients: they are summed over micro-batches and reduced to the shards.

    kernels ---> sums, laid out as the unsharded unit ---> .grad of the shards
    autograd --copy--^                  reduce-scatter over shards, all-reduce over replicas

A kernel with a `GradSink` writes a weight gradient directly into the sums, in the reduce dtype.
If one rank owns the unit and gradients do not accumulate, kernels write to `.grad` of the shards.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from moecore.base.torch_private import (
    call_accumulate_hooks,
    foreach_div_,
    get_local_tensor,
    has_gradient_hooks,
    has_tensor_hooks,
    is_gloo,
    will_run_node,
)
from moecore.kernels.experts.contract import ComputeGrad, GradSink, GradTarget
from moecore.parallel.fsdp.buffers import Buffer
from moecore.parallel.fsdp.deferred import WeightGradients, WeightProduct
from moecore.parallel.fsdp.params import UnitParam, UnitViews, copy_all, make_views
from moecore.parallel.fsdp.plan import FlatLayout, UnitOptions
from moecore.parallel.fsdp.transport import UnitStreams, UnitTransport

MAX_EXACT_COUNT = 256  # largest number of ranks that bf16 counts exactly


class Gradients:
    """Sums the gradients of a unit (FSDP2's parameter group) and reduces the sums to the shards.

    If `transport` is None, the unit is not sharded. `replicas` are the groups of the all-reduce.
    With `options.accumulates` gradients are reduced once per step, otherwise once per micro-batch.
    """

    def __init__(
        self,
        params: Sequence[UnitParam],
        layout: FlatLayout,
        *,
        transport: UnitTransport | None,
        replicas: Sequence[dist.ProcessGroup],
        options: UnitOptions,
        streams: UnitStreams,
    ) -> None:
        self.reduces = True  # whether `reduce_to_shards` reduces the sums, or only accumulates
        self._accumulates = options.accumulates
        self.buffer: Buffer[Gradients] | None = None  # shared sums; None = new for each reduction
        self.deferred: WeightGradients | None = None  # None = products are computed in backward
        self._params, self._layout, self._streams = list(params), layout, streams
        self._transport, self._replicas = transport, list(replicas)
        self.spans_ranks = transport is not None or bool(replicas)  # whether ranks sum gradients
        self._is_direct = not (self.spans_ranks or self._accumulates)  # kernels write to `.grad`
        device_type = streams.device_type
        self._host_reads = transport.host_reads if transport is not None else device_type == "cpu"
        self._host_reads &= all(is_gloo(group, device_type) for group in replicas)
        self.dtype, self.divisor = options.reduce_dtype, options.divisor
        # Sets of parameter indices.
        self._kernel_grads: set[int] = set()  # kernels wrote the gradient in this backward
        self._deferred_grads: set[int] = set()  # the gradient belongs to the other part (D or W)
        self._filled: set[int] = set()  # the sums contain a gradient
        self._divided: set[int] = set()  # a kernel has already divided the sum by `divisor`
        # Whether a backward of the unit's modules has ended on all ranks (`UnevenRanks`), so that
        # other ranks may have gradients that this rank does not have.
        self.is_expected = False
        self._sums: UnitViews | None = None  # views of the sums while they are in use
        self._buffer_views: UnitViews | None = None  # views of `buffer`
        self._num_flags = 3 * len(self._params)
        self._trained_before: set[int] | None = None  # trained parameters at the last reduction
        sizes = list[int]()  # of the reduced flat tensor: gap, shard, gap, shard, .., gap, flags
        for slot in layout.slots:
            sizes += [slot.shard_offset - sum(sizes), slot.shard_numel]
        self._sizes = [*sizes, layout.shard_numel - sum(sizes), self._num_flags]
        self._flags: dict[Any, Tensor] = {}  # flags of the last reduction
        # Parameters with a gradient only on other ranks -> whether kernels divided it there.
        self._remote_grads: dict[int, bool] = {}

    def make_sink(self, param_idx: int, grad_shape: torch.Size) -> GradSink | None:
        """Return a `GradSink`, to which kernels pass a gradient; None = no gradient is needed."""
        unsharded = self._params[param_idx].unsharded
        if unsharded is None or not (unsharded.requires_grad and torch.is_grad_enabled()):
            return None
        return _ParamGradSink(self, param_idx, unsharded, grad_shape)

    def compute_and_accumulate(
        self, param_idx: int, grad_shape: torch.Size, compute_grad: ComputeGrad, *operands: Any
    ) -> Tensor | None:
        """Accumulate a gradient, or defer it; return it to autograd if a kernel cannot write it."""
        if self.defer_matmul(param_idx, grad_shape, compute_grad, *operands):
            return None
        target = self._choose_target(param_idx, grad_shape)
        if target is None:
            return compute_grad(*operands, GradTarget())
        if target.out is not None:
            torch.autograd.graph.increment_version(target.out)
        grad = compute_grad(*operands, target)
        self._kernel_grads.add(param_idx)
        param = self._params[param_idx]
        if not self._is_direct:
            if param_idx not in self._filled:
                self._divided.add(param_idx)
            self._filled.add(param_idx)
        elif target.out is None:  # else the kernel has added it
            param.accumulate_grad(grad.view(param.shard.shape))
        return None

    def defer_matmul(
        self, param_idx: int, grad_shape: torch.Size, compute_grad: ComputeGrad, *operands: Any
    ) -> bool:
        """Store a gradient's matmul as a `WeightProduct`; return False if deferral is off."""
        if self.deferred is None:
            return False
        product = WeightProduct.from_operands(param_idx, grad_shape, compute_grad, operands)
        self.deferred.store_product(self, product)
        self._deferred_grads.add(param_idx)
        return True

    @torch.no_grad()
    def compute_deferred(self, products: deque[WeightProduct]) -> None:
        """Compute deferred weight-gradient matmuls and empty `products`. May communicate."""
        if not self._accumulates:
            numbers = {product.param_idx for product in products}
            self._deferred_grads = self._list_trained_idxs() - numbers
        while products:
            index, shape, compute, operands, _ = product = products.popleft()
            product.wait_for_operands()
            del product
            param, grad = self._params[index], None
            if param.is_partial:  # `reduce_to_shards` sums it over tensor parallel ranks
                grad = compute(*operands, GradTarget())
            else:
                grad = self.compute_and_accumulate(index, shape, compute, *operands)
            if grad is not None:
                param.add_grad(grad)

    def _choose_target(self, param_idx: int, grad_shape: torch.Size) -> GradTarget | None:
        """Return where a kernel writes a gradient; None = the kernel returns it to autograd."""
        param, scale = self._params[param_idx], 1.0 / self.divisor
        if not self._is_direct:
            sums = self._acquire_sums()
            if sums is None:
                return None
            adds = param_idx in self._filled
            scale = 1.0 if adds and param_idx not in self._divided else scale
            out = sums.parameters[param_idx].view(grad_shape)
            return GradTarget(out, accumulate=adds, scale=scale)
        grad = param.sharded.grad
        if grad is None or param.shard_copies is not None or has_tensor_hooks(param.sharded):
            return GradTarget(dtype=param.dtype, scale=scale)
        local = get_local_tensor(grad)
        fits = local.dtype == param.dtype and local.is_contiguous() and not grad.requires_grad
        if not fits or local.shape != param.shard.shape:
            return None
        return GradTarget(local.view(grad_shape), accumulate=True, scale=scale)

    def is_complete(self) -> bool:
        """Whether all gradients of the unit in the running backward have been computed."""
        for i, param in enumerate(self._params):
            unsharded = param.unsharded
            if i in self._kernel_grads or i in self._deferred_grads or unsharded is None:
                continue
            has_grad = unsharded.grad is not None or not unsharded.requires_grad
            if not has_grad and will_run_node(get_gradient_edge(unsharded).node):
                return False
        return True

    @torch.no_grad()
    def reduce_to_shards(self) -> None:
        """Add gradients to the sums; if `self.reduces`, reduce the sums to `.grad`. Collective."""
        grads = dict[int, Tensor]()
        for i, param in enumerate(self._params):
            if param.unsharded is not None and param.unsharded.grad is not None:
                grads[i] = param.pop_grad(param.unsharded)
        kernel_grads, self._kernel_grads = self._kernel_grads, set()
        deferred_grads, self._deferred_grads = self._deferred_grads, set()
        if self._is_direct:
            self.is_expected = False
            self._accumulate_unreduced(grads, kernel_grads)
            return
        trained = self._list_trained_idxs()
        is_changed = self._trained_before not in (None, trained)  # other ranks may differ
        self.is_expected &= self.spans_ranks and bool(trained - deferred_grads)
        has_sums = grads or self._filled or is_changed or self.is_expected
        if not (has_sums and (grads or self.reduces)):
            return
        sums = self._acquire_sums() or self._allocate_sums()
        new = [i for i in grads if i not in self._filled]
        copy_all([sums.parameters[i] for i in new], [grads[i] for i in new])
        for i in self._filled.intersection(grads):
            alpha = 1.0 / self.divisor if i in self._divided else 1.0
            sums.parameters[i].add_(grads[i], alpha=alpha)
        self._filled.update(grads)
        grads.clear()  # frees the gradients before the reduction
        if self.reduces:
            self._trained_before = trained
            self._reduce_sums(sums, trained.difference(deferred_grads, self._filled))
            self._release_sums()

    def _list_trained_idxs(self) -> set[int]:
        return {i for i, param in enumerate(self._params) if param.sharded.requires_grad}

    def drop_unreduced(self) -> None:
        """Discard all gradients that have not been reduced."""
        self._deferred_grads.clear()
        for param in self._params:
            if param.unsharded is not None:
                param.unsharded.grad = None
        self._release_sums()

    def clear_events(self) -> None:
        """Clear the buffer's completed CUDA event, because a graph capture must not wait for it."""
        if self.buffer is not None:
            self.buffer.last_use.clear()

    def _acquire_sums(self) -> UnitViews | None:
        """Return views of memory for the sums; None while another unit uses the shared buffer."""
        if self._sums is None:
            if self.buffer is None:
                self._sums = self._allocate_sums()
            elif self.buffer.holder is None:
                self.buffer.holder = self
                self.buffer.last_use.wait()
                if self._buffer_views is None:
                    self._buffer_views = self._make_sum_views(self.buffer.get_flat(self._device))
                self._sums = self._buffer_views
        return self._sums

    def _allocate_sums(self) -> UnitViews:
        if self.buffer is not None:
            self.buffer.check_is_replaceable()
        numel = self._layout.buffer_numel + self._num_flags
        return self._make_sum_views(torch.empty(numel, dtype=self.dtype, device=self._device))

    def _make_sum_views(self, flat_sums: Tensor) -> UnitViews:
        return make_views(self._params, flat_sums, self._layout.unsharded_numel)

    @property
    def _device(self) -> torch.device:
        return self._params[0].device

    def _reduce_sums(self, sums: UnitViews, missing_params: set[int]) -> None:
        """Reduce-scatter and all-reduce the sums, and accumulate into `.grad` of the shards.

        Collective. This rank sends zeros for `missing_params`, because other ranks may have their
        gradients. The flags of `_make_param_flags` are also summed, and the host waits for them if
        parameters are missing. Without a gradient on any rank, `.grad` is not changed.
        """
        streams, indices = self._streams, sorted(self._filled | missing_params)
        regions = [sums.regions[i] for i in indices]
        for i, region in zip(indices, regions, strict=True):
            param = self._params[i]
            if i in missing_params:
                region.zero_()
            elif param.is_strided:
                parts = sums.parameters[i].chunk(param.num_ranks, dim=param.slot.dim)
                torch.stack(parts, out=region.view(param.num_ranks, *param.shard_shape))
        flags = self._make_param_flags()
        if self._transport is None:
            flat, shards = sums.flat, regions
            flat[-self._num_flags :].copy_(flags)
        else:  # allocated on the current stream, which frees it
            flat = flags.new_empty(sum(self._sizes))
            shards = self._view_reduced_shards(flat, indices)
        all_flags = flat[-self._num_flags :]
        if self.buffer is not None and self.buffer.registered is not None:
            flags = sums.flat[-flags.numel() :].copy_(flags)  # the launch must read no other memory
        with streams.use_reduce_stream():
            if self._transport is not None:
                self._transport.reduce_scatter([*shards, all_flags], [*regions, flags])
                if sums is self._buffer_views and self.buffer is not None:
                    self.buffer.last_use.record()
                else:
                    streams.record_reduce_stream(sums.flat)
            for group in self._replicas:
                dist.all_reduce(flat, group=group)
            if not missing_params:
                self._remote_grads = {}
            if (missing_params or self._host_reads) and not (
                flat.is_meta or (flat.is_cuda and torch.cuda.is_current_stream_capturing())
            ):
                num_users, divided, trained = all_flags.view(3, -1).tolist()
                self._remote_grads = {i: divided[i] > 0 for i in missing_params if num_users[i]}
                self._check_trained_on_all_ranks(trained)
            indices_with_grad = {*self._filled, *self._remote_grads}  # on any rank
            pairs = zip(indices, shards, strict=True)
            local_grads = [(i, shard) for i, shard in pairs if i in indices_with_grad]
            divided_grads = self._divided | {i for i, d in self._remote_grads.items() if d}
            undivided = [shard for i, shard in local_grads if i not in divided_grads]
            if undivided and self.divisor != 1.0:
                foreach_div_(undivided, self.divisor)
            streams.record_reduce_stream(flat)
            if flat.dtype != self._params[0].dtype:
                indices = [i for i, _ in local_grads]
                cast = self._view_reduced_shards(flat.to(self._params[0].dtype), indices)
                local_grads = list(zip(indices, cast, strict=True))
            for i, shard in local_grads:
                param = self._params[i]
                n = param.shard.numel()
                part = shard if shard.numel() == n else shard[:n]
                param.accumulate_grad_with_hooks(part.view(param.shard.shape))

    def _check_trained_on_all_ranks(self, ranks_by_param: Sequence[float]) -> None:
        num_ranks = self._layout.ranks if self._transport is not None else 1
        num_ranks *= math.prod(group.size() for group in self._replicas)
        unequal = [i for i, ranks in enumerate(ranks_by_param) if 0 < ranks < num_ranks]
        if unequal and num_ranks <= MAX_EXACT_COUNT:
            param = self._params[unequal[0]]
            raise ValueError(
                f"requires_grad of {param.slot.param} ({param.sharded.requires_grad} on rank "
                f"{dist.get_rank()}, True on {ranks_by_param[unequal[0]]:.0f} of {num_ranks} ranks)"
                " must be the same on all ranks that share it: call requires_grad_ on every rank"
            )

    def _make_param_flags(self) -> Tensor:
        """Return flags [ranks, 3, params]: has a gradient, a kernel has divided it, is trained."""
        trained = frozenset(self._list_trained_idxs())
        key = frozenset(self._filled), frozenset(self._divided), trained
        if key not in self._flags:
            ranks = 1 if self._transport is None else self._layout.ranks
            flags = [float(i in has) for has in key for i in range(len(self._params))]
            flag_values = torch.tensor(flags * ranks, dtype=self.dtype, device=self._device)
            self._flags = {key: flag_values}
        return self._flags[key]

    def _view_reduced_shards(self, flat_sums: Tensor, param_idxs: Sequence[int]) -> list[Tensor]:
        """Return views of the padded shards of these parameters in the reduced flat tensor."""
        pieces = flat_sums.split(self._sizes)
        return [pieces[2 * i + 1] for i in param_idxs]

    def _release_sums(self) -> None:
        """Drop the views of the sums, so that other units can use the shared buffer."""
        self.is_expected = False
        self._filled.clear()
        self._divided.clear()
        self._sums = None
        if self.buffer is not None and self.buffer.holder is self:
            self.buffer.holder = None

    def _accumulate_unreduced(self, grads: dict[int, Tensor], kernel_params: set[int]) -> None:
        """Add `grads` (by parameter index) / divisor to `.grad` of the shards; call all hooks."""
        for i in kernel_params.difference(grads):  # whose gradients kernels have written
            if self._params[i].shard_copies is not None:
                self._params[i].wait_for_host_grad()
            call_accumulate_hooks(self._params[i].sharded)
        if not grads:
            return
        dtype, shards = self._params[0].dtype, list(grads.values())
        if {grad.dtype for grad in shards} - {dtype}:
            sizes = [grad.numel() for grad in shards]
            flat = torch.empty(sum(sizes), dtype=dtype, device=self._device)
            cast = [x.view(g.shape) for x, g in zip(flat.split(sizes), shards, strict=True)]
            copy_all(cast, shards)
            shards = cast
        if self.divisor != 1.0:
            foreach_div_(shards, self.divisor)
        for i, shard in zip(grads, shards, strict=True):
            self._params[i].accumulate_grad_with_hooks(shard)


class _ParamGradSink:
    """Adds gradients that kernels compute for one unsharded parameter to its unit's sums."""

    def __init__(
        self, gradients: Gradients, param_idx: int, param: nn.Parameter, grad_shape: torch.Size
    ) -> None:
        self._gradients, self._index = gradients, param_idx
        self._param, self._shape = param, grad_shape
        self._node = get_gradient_edge(param).node

    def accumulate(self, compute: ComputeGrad, *operands: Any) -> Tensor | None:
        """Compute a gradient and add it to the sums, or defer it, or return it for autograd."""
        if not self._may_take_gradient():
            return compute(*operands, GradTarget())
        return self._gradients.compute_and_accumulate(self._index, self._shape, compute, *operands)

    def defer(self, compute: ComputeGrad, *operands: Any) -> bool:
        """Store the matmul for `WeightGradients.run`; return False if it cannot be deferred."""
        return self._may_take_gradient() and self._gradients.defer_matmul(
            self._index, self._shape, compute, *operands
        )

    def _may_take_gradient(self) -> bool:
        """Whether kernels may write the gradient, because neither hooks nor autograd read it."""
        return (
            self._param.requires_grad  # it may have been frozen after the forward
            and not (torch.is_grad_enabled() or has_gradient_hooks(self._param))
            and will_run_node(self._node)
        )
