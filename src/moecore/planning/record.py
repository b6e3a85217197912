"""WorkRecorder: the launches and allocations of a rank's step, on meta in a fake world.

The recorder counts the storages of plain tensors. A DTensor counts by its local tensor. Sizes are
rounded as torch's allocator rounds them.

Legend: R rows of experts, e experts of a rank, M N K the sizes of one product, B rows, T tokens of
a row, H heads, d and v dims of a head.
"""

import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from math import prod
from operator import itemgetter
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moecore.base.fields import Bound, CheckedRecord, CountOrZero, FieldErrors
from moecore.base.streams import DryQueues, record_host_wait
from moecore.base.torch_private import (
    DispatchMode,
    get_local_tensor,
    get_storage_key,
    is_host_memory,
    list_open_ranges,
    tree_map_only,
)
from moecore.kernels.linear_attention.chunked import ScanSize
from moecore.kernels.meta import get_meta_repeats
from moecore.kernels.ops import PLAIN_TYPES
from moecore.models.tp_products import GATHER_SLICES, SEND_SLICES
from moecore.moe.dispatch.exchange import COPY, REDUCE, SPREAD
from moecore.train.memory.on_meta import META, PLAIN_VALUES, list_tensors

Kind = Literal["product", "grouped product", "attention", "rows", "collective", "copy"]
Many = Annotated[int, Bound(">=", 0), Bound("<", 2**100)]  # FLOP of long rows exceed 2**63
DIMS = {
    "product": ("M", "N", "K"),
    "grouped product": ("experts", "rows", "N", "K"),
    "attention": ("B", "H", "T", "d", "v"),
    "collective": ("ranks",),
}


@dataclass(frozen=True, slots=True)
class Work(CheckedRecord):
    """A device operation: the name, kind, FLOPs, bytes, shape and dtype that decide its time."""

    name: str  # of the kernel or of torch's operation, such as "aten.mm"
    kind: Kind  # decides the formula of its time
    flops: Many  # of products and attention
    # Bytes that are read and written. A collective counts the bytes that this rank sends and
    # receives, and a message in one direction twice. A copy from or to the host counts once.
    num_bytes: Many
    shape: tuple[CountOrZero, ...]  # `DIMS`, with the rows of all experts; otherwise anything
    dtype: str  # of the operands, such as "bfloat16" or "float8_e4m3fn"

    def _find_field_errors(self) -> FieldErrors:
        dims = DIMS.get(self.kind, self.shape)
        if len(self.shape) != len(dims):
            yield "shape", f"be ({', '.join(map(str, dims))}) of kind {self.kind!r}: pass these"


class QueuedLaunch(NamedTuple):
    """A recorded launch of a device operation; launches are numbered in the host's launch order."""

    work: Work
    stream: int  # the launches of a stream run in order
    dependencies: frozenset[int]  # launches that must finish before this launch starts
    host_dependencies: frozenset[int]  # launches that the host waited for since the last launch
    node_ranks: int = 0  # the number of a collective's ranks in this rank's domain
    phases: tuple[str, ...] = ()  # the profiler marks around the launch, the outermost first
    times: int = 1  # consecutive runs; the host launches the next operation after the first run


PRODUCTS = {"mm": 0, "bmm": 0, "scaled_mm_v2": 0, "addmm": 1, "addmm_": 1}  # where a and b begin
INDEX_SCORES = "_index_scores_kernel"  # of queries of all heads by keys
# Of queries and selected keys: positions of the arguments [queries, heads, dims of a product].
SELECTED_KEYS = {
    "_sparse_attention_fwd_kernel": (0, 4),
    "_sparse_attention_bwd_scores_kernel": (0, 3),
    "_sum_selected_rows_kernel": (3,),
    "_sparse_attention_bwd_k_kernel": (1, 5),
}
GROUPED_PRODUCT = "scaled_grouped_mm"  # torch's in FP8
WITHOUT_WORK = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "set_", "alias")
SLICES = (GATHER_SLICES, SEND_SLICES)  # beside products of tp ranks
EXCHANGES = (COPY, REDUCE, SPREAD, *SLICES)
ALL_TO_ALL = re.compile("all.?to.?all|spread|reduce_kernel|dispatch|combine")
HOST_COPIES = ("copy to host", "copy to device")
SUMS = "_fp32"  # of a product that writes or adds gradients in fp32
Args = Sequence[Any]


def compute_operation_work(
    name: str, args: Args, kwargs: Mapping[str, Any], out: Any, *, writes: bool
) -> Work | None:
    """Return the work of operation `name` with result `out`; None for views (`writes` False)."""
    if not writes or name in WITHOUT_WORK or not (tensors := list_tensors(args, kwargs, out)):
        return None
    if name in PRODUCTS:
        return _make_matmul_work(name, args, tensors)
    if name == GROUPED_PRODUCT:
        (R, K), (*_, N) = args[0].shape, args[1].shape
        e = args[1].shape[0]
        if out.ndim == 3:  # of weights' gradients: [N, R] times [R, K] of each expert's rows
            (N, R), (e, _, K) = args[0].shape, out.shape
        return _make_grouped_work(name, (e, R, N, K), tensors)
    if "attention" in name:
        heads = [t for t in tensors if t.ndim == 4]
        if name.startswith("flash_attention"):  # [B, T, H, d], or packed documents [B * T, H, d]
            heads = [t.transpose(1, 2) for t in heads or _unpack_documents(tensors, args)]
        lookback = kwargs.get("window_size_left", -1)
        return _make_attention_work(name, heads, "backward" in name, window=lookback + 1)
    return Work(name, "rows", 0, _count_bytes(tensors), (), _format_dtype(tensors[0]))


def compute_kernel_work(name: str, args: Args) -> Work:
    """Return the work (FLOP, bytes and sizes) of a moecore kernel `name` with arguments `args`."""
    if name in EXCHANGES:
        ranks, num_bytes = args
        return Work(name, "collective", 0, num_bytes, (ranks,), "bfloat16")
    tensors = [t for t in (getattr(arg, "base", arg) for arg in args) if isinstance(t, Tensor)]
    if args and isinstance(args[0], ScanSize):
        scan, num_bytes = args[0], _count_bytes(tensors)
        return Work(name, "attention", scan.flops, num_bytes, scan.shape, _format_dtype(tensors[0]))
    if name == INDEX_SCORES:
        return _make_matmul_work("mm", (args[0], args[1].mT), tensors, name)
    if (general_name := name.removeprefix("sm90")) in SELECTED_KEYS:
        factors = [args[i] for i in SELECTED_KEYS[general_name]]
        sizes = prod(factors[0].shape[:2]), args[2].shape[1], sum(x.shape[2] for x in factors)
        num_bytes, dtype = _count_bytes(tensors), _format_dtype(factors[0])
        return Work(name, "product", 2 * prod(sizes), num_bytes, sizes, dtype)
    if name.startswith("attention"):
        return _make_attention_work(name, tensors, name.endswith("bwd"))
    if name in PRODUCTS:
        return _make_matmul_work(name, args, tensors)
    if (shape := _find_grouped_shape(name, args)) is not None:
        return _make_grouped_work(name, shape, tensors)
    dtype = _format_dtype(tensors[0]) if tensors else "uint8"
    kind: Kind = "copy" if name in HOST_COPIES else "rows"
    return Work(name, kind, 0, _count_bytes(tensors), (), dtype)


def compute_collective_work(name: str, args: Args, num_ranks: int) -> Work:
    """Return the work (bytes and ranks) of collective `name` with `args` on `num_ranks` ranks."""
    tensors, n = list_tensors(args), num_ranks
    dtype = _format_dtype(tensors[0]) if tensors else "uint8"
    tensor_bytes = sum(t.nbytes for t in tensors)
    if "send" in name or "recv" in name:  # it uses one of a link's two directions
        num_bytes = 2 * tensor_bytes
    elif ALL_TO_ALL.search(name):  # the rank's local share is not sent
        num_bytes = tensor_bytes * (n - 1) // n
    elif "gather" in name or "scatter" in name:  # the full tensor, and one share of it
        num_bytes = 2 * tensor_bytes * (n - 1) // (n + 1)
    else:  # one tensor; a sum passes every rank twice
        num_bytes = (4 if name.startswith("allreduce") else 2) * tensor_bytes * (n - 1) // n
    return Work(name, "collective", 0, num_bytes, (n,), dtype)


def _make_matmul_work(name: str, args: Args, tensors: Sequence[Tensor], kernel: str = "") -> Work:
    """Return the work of matmul `name` on `tensors`; the work has the name `kernel` if given."""
    a, b = args[PRODUCTS[name] :][:2]
    M, N, K = shape = prod(a.shape[:-1]), b.shape[-1], a.shape[-1]
    num_bytes, dtype = _count_bytes(tensors), _format_dtype(a)
    return Work(kernel or name, "product", 2 * M * N * K, num_bytes, shape, dtype)


def _unpack_documents(tensors: Sequence[Tensor], args: Args) -> list[Tensor]:
    """Convert packed tensors [n * T, heads, d] to [n documents, T tokens, heads, d] on meta."""
    T = max(arg for arg in args if type(arg) is int)
    heads = [t for t in tensors if t.ndim == 3]
    return [t.new_empty(-(-len(t) // T), T, *t.shape[1:], device="meta") for t in heads]


def _make_attention_work(
    name: str, tensors: Sequence[Tensor], is_backward: bool, *, window: int = 0
) -> Work:
    """Return the work of causal attention on (q, k, v, ..); `window` keys per query, 0 = all."""
    heads = tensors[1:] if name.endswith("backward") else tensors  # torch's begins with dO
    (B, H, T, d), v = heads[0].shape, heads[2].shape[-1]
    seen = min(T, window or T)
    flops = B * H * seen * (2 * T - seen) * (d + v) * (5 if is_backward else 2) // 2
    shape = (B, H, T, d, v)
    return Work(name, "attention", flops, _count_bytes(tensors), shape, _format_dtype(heads[0]))


def _make_grouped_work(name: str, shape: tuple[int, ...], tensors: Sequence[Tensor]) -> Work:
    """Return the work of grouped product `name` with shape (experts, rows, N, K) on `tensors`."""
    flops, dtype = 2 * prod(shape[1:]), _format_dtype(tensors[0])
    if dtype == "uint8":  # two FP4 values in a byte
        dtype = "float4_e2m1fn"
    if any(t.dtype == torch.float32 and t.ndim == 3 for t in tensors):
        name += SUMS
    return Work(name, "grouped product", flops, _count_bytes(tensors), shape, dtype)


def _find_grouped_shape(name: str, args: Args) -> tuple[int, int, int, int] | None:
    """Return (experts, rows, N, K) of a grouped kernel's arguments; None for other kernels."""
    match name:
        case "sm90_bf16_grouped_kernel":
            a, b, h, out = args[0], args[1], args[4], args[6]
            (R, K), N = a.shape, (out if h is None else h).shape[1]
            return prod(b.shape) // (N * K), R, N, K
        case "sm90_bf16_grouped_nn_act_bwd_kernel":
            R, D, F = args[-3:]
            return prod(args[2].shape) // (D * F), R, F, D
        case "sm90_bf16_grouped_wgrad_kernel":
            y_RN, (e, M, N) = args[2], args[7:10]
            return e, y_RN.shape[0], N, M
        case "sm90_fp8_grouped_nt_kernel":
            b, out_RN, K, N = args[1], args[5], *args[7:9]
            return prod(b.shape) // (N * K), out_RN.shape[0], N, K
        case "sm90_fp8_grouped_wgrad_kernel":
            x, (e, M, N) = args[0], args[7:10]
            return e, prod(x.shape) // M, N, M
        case "block_scaled_grouped_gemm_kernel":
            out_RN, (e, N, K) = args[7], args[8:11]
            return e, out_RN.shape[0], N, K
        case "block_scaled_grouped_wgrad_kernel":
            e, M, N, W = args[8:12]
            return e, W, N, M
        case "mixed_grouped_wgrad_kernel":
            e, M, N, P = args[6:10]
            return e, P, N, M
        case "mixed_grouped_gemm_kernel" | "_grouped_gemm_fwd_kernel":
            out_RN, (e, N, K) = args[5], args[6:9]
            return e, out_RN.shape[0], N, K
        case "_grouped_gemm_activation_fwd_kernel":
            h_RC, (e, _, D) = args[5], args[7:10]
            return e, *h_RC.shape, D
        case "grouped_mm":
            a_RK, b_eKN, out = args
            if out.ndim == 3:  # of weights' gradients: [M, R] by [R, N] of each expert's rows
                e, M, N = out.shape
                return e, b_eKN.shape[0], N, M
            e, K, N = b_eKN.shape
            return e, a_RK.shape[0], N, K
    return None


def _count_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors; views of the same elements count once."""
    sizes = {(get_storage_key(t), t.storage_offset(), t.shape): t.nbytes for t in tensors}
    return sum(sizes.values())


def _format_dtype(x: Tensor) -> str:
    """Return a tensor's dtype as text, such as "bfloat16"."""
    return str(x.dtype).removeprefix("torch.")


ALIGNMENT = 512  # bytes; torch's allocator rounds sizes up to multiples
FOREACH = "foreach"
RESIDENT, GRADIENTS, OPTIMIZER = "held", "gradients", "optimizer step"
KINDS = {"F": "activations: outside", "B": "backward"}  # of memory outside a layer's parts
OUTER = ("activations: rest", "activations: routing")  # parts that contain other parts
END = "end"  # clipping and the optimizer
Pass = Literal["F", "B"]
PASSES: tuple[Pass, ...] = get_args(Pass)


class PartStart(NamedTuple):
    """The state of a recording when the host begins the forward or backward of a module."""

    direction: Pass
    part: str  # "embedding", "layer 3", "predictions" (all MTP modules), "head"; END at the end
    first: int  # the number of launches before it
    level: int  # the allocated bytes
    top: int  # the peak of the allocated bytes until the next start
    kinds: Mapping[str, int] = MappingProxyType({})  # `level` by kind
    top_kinds: Mapping[str, int] = MappingProxyType({})  # `top` by kind


class WorkRecorder(DispatchMode):
    """A dispatch mode that records the allocations and launches of a rank's step on meta."""

    def __init__(self, ranks_per_domain: int) -> None:
        super().__init__()
        self._domain = ranks_per_domain
        self.level = self.peak = self._top = self._resident_bytes = self._first = 0
        # Bytes by kind: `RESIDENT` at `start_recording`, else by pass and part of the model.
        self.kinds, self._top_kinds = Counter[str](), Counter[str]()
        self._open_kinds = [RESIDENT]  # kinds of the parts that have begun
        self.queues = DryQueues()
        self.queued: list[QueuedLaunch] = []
        self.starts: list[PartStart] = []
        self.params: list[Tensor] = []  # their gradients are a kind of their own
        self.offloads: dict[str, Counter[str]] = {}  # bytes of each part's last forward, by kind
        self._offloaded_keys = set[int]()  # of this forward
        self._sizes: dict[int, tuple[int, str]] = {}  # bytes and kind
        self._ended: dict[Any, Any] = {}  # collective -> its result

    def start_recording(self) -> None:
        """Discard the recorded launches. Memory that is allocated now is counted as resident."""
        self.peak, self.queued, self._first = self.level, [], self.queues.length
        self.starts, self._top, self._resident_bytes = [], self.level, self.level
        self._open_kinds = [KINDS["F"]]  # what a step allocates before its first part
        self._sizes = {key: (size, RESIDENT) for key, (size, _) in self._sizes.items()}
        self.kinds, self._top_kinds = (Counter({RESIDENT: self.level}) for _ in range(2))

    def begin_part(self, direction: Pass, part: str) -> None:
        """Record that a part of the model, such as "layer 3", begins a forward or backward."""
        with torch.DisableTorchFunction():  # gradients of parameters are a kind of their own
            for grad in (param.grad for param in self.params if param.grad is not None):
                key = get_storage_key(get_local_tensor(grad))
                size, kind = self._sizes.get(key, (0, RESIDENT))
                if kind == KINDS["B"]:
                    self._sizes[key] = size, GRADIENTS
                    self.kinds.update({kind: -size, GRADIENTS: size})
        level = self.level if self.starts else self._resident_bytes
        kinds = self.kinds if self.starts else Counter({RESIDENT: self._resident_bytes})
        self.end_part()
        launch = len(self.queued)
        self.starts.append(PartStart(direction, part, launch, level, level, kinds.copy(), kinds))
        self._open_kinds = [OPTIMIZER if part == END else KINDS[direction]]
        if direction == "F":
            self.offloads[part], self._offloaded_keys = Counter(), set()

    def end_part(self) -> None:
        """Store the peak memory since the last `begin_part` in the `PartStart` of that call."""
        if self.starts:
            self.starts[-1] = self.starts[-1]._replace(top=self._top, top_kinds=self._top_kinds)
            self._top, self._top_kinds = self.level, self.kinds.copy()

    @contextmanager
    def attribute_allocations(self, part: str) -> Iterator[None]:
        """Return a context whose allocations count for `part` of a block, such as "attention"."""
        kind = self._open_kinds[-1]
        if len(self._open_kinds) == 1 or kind in OUTER:
            kind = f"activations: {part}"
        outside, self._open_kinds = self._open_kinds, [*self._open_kinds, kind]
        try:
            yield
        finally:
            self._open_kinds = outside

    def count_offload(self, tensor: Tensor) -> None:
        """Count a saved tensor's storage as offloaded in the part whose forward runs."""
        with torch.DisableTorchFunction():
            key = get_storage_key(tensor)
        if key not in self._offloaded_keys:
            self._offloaded_keys.add(key)
            size, kind = self._sizes[key]
            self.offloads[self.starts[-1].part][kind] += size

    def count_storage(self, tensor: Tensor) -> bool:
        """Count bytes of a storage not seen before; return whether it is new and on the GPU."""
        key = get_storage_key(tensor)
        if key in self._sizes:
            return False
        if is_host_memory():
            self._sizes[key] = 0, RESIDENT
            return False
        storage = tensor.untyped_storage()
        size, kind = -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT, self._open_kinds[-1]
        self._sizes[key] = size, kind
        self.level += size
        self.kinds[kind] += size
        self.peak = max(self.peak, self.level)
        if self.level > self._top:
            self._top, self._top_kinds = self.level, self.kinds.copy()
        weakref.finalize(storage, self._free_storage, key)
        return True

    def _free_storage(self, storage_id: int) -> None:
        """Subtract the bytes of a storage that torch has freed."""
        size, kind = self._sizes.pop(storage_id)
        self.level -= size
        self.kinds[kind] -= size

    def record_kernel(self, name: str, args: Sequence[Any]) -> None:
        """Record a moecore kernel launch; the callback of `record_launches_on_meta`."""
        with torch.DisableTorchFunction():
            self._append_launch(compute_kernel_work(name, args))

    def _append_launch(self, work: Work, node_ranks: int = 0) -> None:
        """Append a launch of `work`; `node_ranks` = a collective's number of ranks in a domain."""
        # Launches are numbered from `start_recording`, and earlier launches are left out.
        first = self._first
        dependencies, host_dependencies = (
            frozenset(n - first for n in numbers if n >= first)
            for numbers in self.queues.launch_operation()
        )
        order = self.queues.current.number, dependencies, host_dependencies, node_ranks
        self.queued.append(QueuedLaunch(work, *order, list_open_ranges(), get_meta_repeats()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:  # DTensor calls the operation again with local tensors
            return NotImplemented
        with torch.DisableTorchFunction():  # reads of the recorder are no operations of a step
            return self._record_operation(func, args, kwargs or {})

    def _record_operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a torch operation on meta, record its allocations and launch, return its result."""
        if func.is_view:  # half of a step's operations
            return func(*args, **kwargs)
        namespace, name, writes = _parse_operation(func)
        if namespace == "c10d":
            return self._record_collective(func, name, args, kwargs)
        if name == "local_scalar_dense" and args[0].is_meta:
            record_host_wait()
            return 0  # a flag that the host reads: no gradient overflows
        is_foreach = writes and name.startswith(FOREACH)  # whose form on meta reads values
        try:
            memo = _get_memo(func, _make_cache_key([*args, *kwargs.items()], {}))
        except TypeError:  # of arguments that are no plain tensors and numbers
            memo = []
        makes, work = memo or (None, None)
        out = makes(args) if makes else None if is_foreach else func(*args, **kwargs)
        for tensor in list_tensors(out):
            if type(tensor) in PLAIN_TYPES and tensor.is_meta:
                writes |= self.count_storage(tensor)
        if makes is None:
            work = compute_operation_work(name, args, kwargs, out, writes=writes)
            if writes and (makes := _make_result_factory(func, args, out)) is not None:
                memo += makes, work
        if work is not None and writes:
            self._append_launch(work)
        return out

    def _record_collective(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record a collective's launch; return a completed c10d `Work` without communication."""
        groups = [x for x in args if isinstance(x, torch.ScriptObject)]
        ranks = max((_list_group_ranks(x) for x in groups), key=len, default=[dist.get_rank()])
        domain = dist.get_rank() // self._domain
        neighbours = [rank for rank in ranks if rank // self._domain == domain]
        self._append_launch(compute_collective_work(name, args, len(ranks)), len(neighbours))
        if func not in self._ended:  # one finished result stands for all
            empty = torch.empty(0, dtype=torch.float32, device="cpu")
            args, kwargs = tree_map_only(Tensor, lambda _: empty, (args, kwargs))
            args = [[] if isinstance(x, list) and x and isinstance(x[0], int) else x for x in args]
            self._ended[func] = func(*args, **kwargs)
        return self._ended[func]


def _make_result_factory(func: Any, args: Args, out: Any) -> Callable[[Args], Any] | None:
    """Return a function from `args` to an output like `out`; None = the operation must run."""
    if torch.Tag.inplace_view in func.tags:
        return None
    if args and out is args[0]:
        return itemgetter(0)
    if type(out) is not Tensor or not out.is_meta:
        return None
    make = partial(torch.empty_strided, out.shape, out.stride(), dtype=out.dtype, device=META)
    has_full_storage = make().untyped_storage().nbytes() == out.untyped_storage().nbytes()
    is_new = get_storage_key(out) not in map(get_storage_key, list_tensors(args))
    return (lambda _: make()) if has_full_storage and is_new else None


VALUES = PLAIN_VALUES | {torch.memory_format, torch.layout}
_get_memo = lru_cache(maxsize=1 << 14)(lambda *_: list[Any]())  # by operation and form


def _make_cache_key(value: Any, storage_numbers: dict[int, int]) -> tuple[Any, ...]:
    """Return a cache key of an argument: a value, or a tensor's metadata and storage number."""
    kind = type(value)
    if kind in PLAIN_TYPES:
        number = storage_numbers.setdefault(get_storage_key(value), len(storage_numbers))
        place = value.storage_offset(), number, value.device
        return value.shape, value.stride(), value.dtype, place
    if kind in (list, tuple):
        return kind, tuple([_make_cache_key(item, storage_numbers) for item in value])
    if kind not in VALUES:  # a key would keep what is no value, such as a storage
        raise TypeError(f"an argument of type {kind}")
    return kind, value


@cache
def _parse_operation(func: Any) -> tuple[str, str, bool]:
    """Return an operation's namespace, its name without underscores, whether it writes in place."""
    namespace, name = func.name().split("::")
    name, _, overload = name.lstrip("_").partition(".")
    return namespace, name, name.endswith("_") or overload.endswith("out")


def _list_group_ranks(group: Any) -> list[int]:
    """Return the ranks of a process group; an empty list if `group` is no process group."""
    try:
        return dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
    except RuntimeError:
        return []
