"""Launches of compiled kernels with prepared arguments, without Triton's own handling of arguments.

At every launch Triton names, reads and looks up every argument, which costs three times the host
time of the launch. Here functions are generated for a kernel and the types of its arguments. They
compute the key of the compiled kernel and the arguments of Triton's launcher in C, and call it:

    (kernel, types of arguments, names of constants) -> _Site
    (device, dtypes, alignments, ... of arguments, constants) -> _Entry of the site

The key distinguishes all that Triton's own key distinguishes. Triton does the first launch of each
key, which is cached, and every launch that this file does not support: another release of Triton,
the interpreter, hooks, tuples as arguments, integers beyond int32. `tests/kernels/test_prepared.py`
tests the private names of Triton that this file uses.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:

    class TensorDescriptor:  # type: ignore[no-redef]
        """Stands for Triton's on meta, where kernels are recorded with their tensors."""

        @staticmethod
        def from_tensor(x: Tensor, *_: Any) -> Tensor:
            """Return the tensor."""
            return x

    GluonDescriptor = TensorDescriptor

try:
    import triton
    from triton.backends.nvidia import driver as nvidia
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    _run, _knobs = JITFunction.run, triton.knobs.runtime
    _enter, _exit = _knobs.launch_enter_hook, _knobs.launch_exit_hook
    # The launcher of another release takes other arguments.
    IS_SUPPORTED = (
        triton.__version__.startswith("3.6.") and os.environ.get("TRITON_INTERPRET") != "1"
    )
except (ImportError, AttributeError):
    IS_SUPPORTED = False

current_device = torch.accelerator.current_device_index
GPU_FLAG = "is_cuda"  # attribute of tensors whose addresses kernels may read
MAX_ENTRIES = 512  # of a site; more entries clear the site
MAX_DESCRIPTORS = 8192  # in the cache; a layer has about 20
INT32 = "-2147483648 <= {0} <= 2147483647"


class Descriptor:
    """Base class of TMA descriptors, which have a tensor's address, but no reference to it."""

    kind: int  # number of the dtype, block and layout, for which kernels are compiled
    _encoded: tuple[Any, ...] | None = None

    def encoded(self) -> tuple[Any, ...]:
        """Return the arguments for Triton's C launcher; () before the first launch of this kind."""
        if self._encoded is None:
            meta = _METAS.get(self.kind)
            if meta is None:
                return ()
            self._encoded = tuple(nvidia.make_tensordesc_arg(self, meta))
        return self._encoded


class _GluonDescriptor(GluonDescriptor, Descriptor): ...


class _TritonDescriptor(TensorDescriptor, Descriptor): ...


class _Address(NamedTuple):
    """Dtype and address of a tensor, in place of the tensor in a descriptor."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


class _Entry(NamedTuple):
    """A compiled kernel on a device, and the arguments of its C launcher that never change."""

    launch: Callable[..., None]  # Triton's launcher in C
    stream: Callable[[int], int]  # device -> address of its current stream
    head: tuple[Any, ...]  # arguments of `launch` after grid and stream
    tail: tuple[None, ...]  # placeholders of named constants


class _Site(NamedTuple):
    """The cached launches of a kernel for one list of argument types and constant names."""

    read: Callable[..., tuple[Any, ...]]  # arguments -> their device and the rest of their key
    launch: Callable[..., bool]  # see `launch_prepared`
    entries: dict[tuple[Any, ...], _Entry | None]  # None = Triton launches


_SITES: dict[tuple[Any, ...], _Site | None] = {}
_KINDS: dict[tuple[Any, ...], int] = {}  # of descriptors
_METAS: dict[int, Any] = {}  # kind of descriptor -> how Triton encodes it
_DESCRIPTORS: dict[tuple[Any, ...], Any] = {}


def launch_prepared(
    kernel: Any, grid: tuple[int, int], args: tuple[Any, ...], constants: dict[str, Any]
) -> bool:
    """Launch a kernel from the cache that `store_launch` fills; return whether it was cached.

    If the result is False, the caller must launch by Triton.
    """
    if not (IS_SUPPORTED and _has_no_launch_hooks(kernel)):
        return False
    site = _SITES.get((kernel.fn, tuple(map(type, args)), *constants))
    if site is None:
        return False
    return site.launch(site.entries.get, current_device, grid, constants.values(), *args)


def store_launch(
    kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], compiled_kernel: Any
) -> None:
    """Cache `compiled_kernel`, which Triton launched, for `launch_prepared`, if supported."""
    if (
        not (IS_SUPPORTED and _has_no_launch_hooks(kernel))
        or type(compiled_kernel) is not CompiledKernel
    ):
        return
    name = (kernel.fn, tuple(map(type, args)), *constants)
    if name not in _SITES:
        functions = _generate_launch_functions(kernel, args)
        _SITES[name] = None if functions is None else _Site(*functions, {})
    site = _SITES[name]
    if site is None:
        return
    key = (*site.read(*args), *constants.values())
    if key in site.entries:
        return
    if len(site.entries) >= MAX_ENTRIES:
        site.entries.clear()
    site.entries[key] = _make_entry(kernel, args, compiled_kernel)


def make_descriptor(
    tensor: Tensor, block_shape: tuple[int, ...], choose_layout: Callable[..., Any] | None = None
) -> Any:
    """Return a TMA descriptor for blocks of a tensor.

    If the tensor has more dims than the block, all dims but the last are flattened. Descriptors are
    cached by address, so the tensor must live until the launch. `choose_layout` maps (dtype,
    `block_shape`) to the shared-memory layout of a Gluon kernel; None = a Triton kernel.
    """
    strides = (tensor.dtype, tensor.shape, tensor.stride())
    key = (tensor.data_ptr(), *strides, block_shape, choose_layout)
    desc = _DESCRIPTORS.get(key)
    if desc is not None:
        return desc
    layout = None if choose_layout is None else choose_layout(tensor.dtype, block_shape)
    flat = tensor if tensor.ndim == len(block_shape) else tensor.view(-1, tensor.shape[-1])
    if not IS_SUPPORTED or tensor.is_meta:
        if layout is None:
            return TensorDescriptor.from_tensor(flat, list(block_shape))
        return GluonDescriptor.from_tensor(flat, list(block_shape), layout)
    shape: Any = (_Address(tensor.dtype, key[0]), flat.shape, flat.stride(), list(block_shape))
    desc = _TritonDescriptor(*shape) if layout is None else _GluonDescriptor(*shape, layout)
    desc.kind = _KINDS.setdefault((tensor.dtype, block_shape, str(layout)), len(_KINDS))
    if len(_DESCRIPTORS) >= MAX_DESCRIPTORS:
        _DESCRIPTORS.clear()
    _DESCRIPTORS[key] = desc
    return desc


def _has_no_launch_hooks(kernel: Any) -> bool:
    """Return whether Triton would launch without side effects: no hooks and no recorder."""
    return (
        JITFunction.run is _run
        and _knobs.launch_enter_hook is _enter
        and _knobs.launch_exit_hook is _exit
        and not (_enter.calls or _exit.calls or kernel.pre_run_hooks or _knobs.debug)
    )


def _generate_launch_functions(kernel: Any, args: tuple[Any, ...]) -> tuple[Any, Any] | None:
    """Return generated (read, launch) for the types of `args`; None = a type is not supported."""
    reads, key, values, device = [], [], [], None
    for i, (arg, param) in enumerate(zip(args, kernel.params, strict=False)):
        name, kind = f"a{i}", type(arg)
        if param.is_constexpr or param.annotation:
            return None
        if kind in (Tensor, torch.nn.Parameter):
            device = device or name
            reads.append(f"p{i} = {name}.data_ptr()")
            key += [f"{name}.dtype", f"p{i} & 15 == 0", f"{name}.{GPU_FLAG}"]
            values.append(f"p{i}")
        elif kind is int:
            key.append(INT32.format(name))
            if not param.do_not_specialize:
                key += [f"{name} == 1", f"{name} & 15 == 0"]
            values.append(name)
        elif kind in (float, bool, type(None)):
            values.append(name)
        elif isinstance(arg, Descriptor):
            key.append(f"{name}.kind")
            values.append(f"*{name}.encoded()")
        else:
            return None
    if device is None:
        return None
    names = ", ".join(f"a{i}" for i in range(len(args)))
    pointers, parts = "; ".join(reads), ", ".join([f"{device}.get_device()", *key])
    text = f"""
def read({names}):
    {pointers}
    return ({parts},)

def launch(entry_of, current_device, grid, constants, {names}):
    {pointers}
    key = ({parts}, *constants)
    entry = entry_of(key)
    if entry is None or key[0] != current_device():
        return False
    stream = entry.stream(key[0])
    entry.launch(*grid, 1, stream, *entry.head, {", ".join(values)}, *entry.tail)
    return True
"""
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    return namespace["read"], namespace["launch"]


def _make_entry(kernel: Any, args: tuple[Any, ...], compiled_kernel: Any) -> _Entry | None:
    """Return the cached launch of `compiled_kernel` for these arguments; None = not supported."""
    types = [compiled_kernel.src.signature.get(name) for name in kernel.arg_names]
    matches = [_is_supported_argument(arg, kind) for arg, kind in zip(args, types, strict=False)]
    if not all(matches) or any(kind != "constexpr" for kind in types[len(args) :]):
        return None
    launcher, metadata = compiled_kernel.run, compiled_kernel.metadata
    if type(launcher) is not nvidia.CudaLauncher or metadata.global_scratch_size:
        return None
    if metadata.profile_scratch_size:
        return None
    launch, descriptors = launcher.launch, [arg for arg in args if isinstance(arg, Descriptor)]
    if descriptors:  # Triton's function encodes them, then calls that of C
        cells = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))
        launch, metas = cells["launcher"].cell_contents, cells["tensordesc_meta"].cell_contents
        for desc, meta in zip(descriptors, metas, strict=True):
            if meta is None or _METAS.setdefault(desc.kind, meta) != meta:
                return None
    flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    launch_metadata = compiled_kernel.packed_metadata
    head = (compiled_kernel.function, *flags, None, None, launch_metadata, None, None, None)
    stream = triton.runtime.driver.active.get_current_stream
    return _Entry(launch, stream, head, (None,) * (len(types) - len(args)))


def _is_supported_argument(argument: Any, triton_type: Any) -> bool:
    """Return whether Triton's C launcher accepts `argument` for a parameter of `triton_type`."""
    if isinstance(argument, Tensor):
        return bool(getattr(argument, GPU_FLAG)) and str(triton_type).startswith("*")
    if isinstance(argument, Descriptor):
        return str(triton_type).startswith("tensordesc<")
    if type(argument) is int:
        return triton_type == "i32" or (triton_type == "constexpr" and argument == 1)
    return triton_type == {float: "fp32", bool: "u1", type(None): "constexpr"}.get(type(argument))  # type: ignore[no-any-return]
