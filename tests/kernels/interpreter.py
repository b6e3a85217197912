"""Triton's interpreter without what it computes again for every operation.

Its types are records of Python that it makes anew for each result: most of a small kernel's time.
Here a launch makes each type once, and a comparison of equal shapes ends early. Functions of
`triton.language` are replaced once for all launches. Values are computed
by the same code.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from moecore.kernels.rows.microscaling import unpack_e2m1

CAN_PATCH = hasattr(interpreter, "_patch_lang")  # another release is slower but as right


@contextmanager
def patched() -> Iterator[None]:
    """The interpreter does its bookkeeping once per launch, or once."""
    if not CAN_PATCH:
        yield
        return
    types: dict[Any, dict[str, Any]] = {}
    with ExitStack() as undo:
        to = undo.enter_context(pytest.MonkeyPatch.context())
        _patch_launches(to, types, undo)
        _patch_types(to, types)
        _patch_operations(to)
        _patch_scaled_products(to)
        yield


class _NoScope:
    """What a launch is to undo: nothing."""

    def restore(self) -> None:
        pass


def _patch_launches(to, types, undo) -> None:
    """Replace the functions of `triton.language` once.

    The interpreter does so when a kernel starts, undoes it in the end, and looks for more functions
    at every call of another function by the kernel.
    """
    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[int] = set()
    languages: dict[int, tuple[Any, set[int]]] = {}  # of the globals of a function

    def patch_once(fn: Any) -> Any:
        known, seen = languages.get(id(fn.__globals__), (None, set()))
        if known is None:
            seen = {id(language), id(language.core)} & {id(v) for v in fn.__globals__.values()}
            languages[id(fn.__globals__)] = fn.__globals__, seen
        if not seen <= replaced:
            replaced.update(seen)
            undo.callback(patch_lang(fn).restore)
        return _NoScope()

    def launch_anew(executor: Any, *args: Any, **kwargs: Any) -> None:
        types.clear()  # they have pointers of the last launch
        launch(executor, *args, **kwargs)

    to.setattr(interpreter, "_patch_lang", patch_once)
    to.setattr(interpreter.GridExecutor, "__call__", launch_anew)


def _patch_types(to: pytest.MonkeyPatch, types: dict[Any, dict[str, Any]]) -> None:
    """Make the type of a block once, with the shape that its tensors have."""
    make_block, make_tuple = core.block_type.__init__, core.tuple.__init__
    with_other = core.block_type.with_element_ty
    is_equal, np_dtype_of = core.dtype.__eq__, interpreter._get_np_dtype
    np_dtypes: dict[str, Any] = {}

    def sizes_of(shape: Any) -> tuple[Any, Any]:
        numel = 1
        for size in shape:
            numel *= size
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(numel)

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([s.value if isinstance(s, core.constexpr) else s for s in shape])
        fields = types.get((id(element_ty), sizes))
        if fields is None:
            make_block(self, element_ty, shape)
            self.sizes_of_tensor = sizes_of(self.shape)
            types[id(element_ty), sizes] = dict(vars(self))  # has the element type: its id stays
        else:
            vars(self).update(fields)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.sizes_of_tensor if type.is_block() else of_scalar

    def lazy_tuple(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            make_tuple(self, args, type)

    def type_of_tuple(self: Any) -> Any:
        fields = vars(self)
        if "lazy_type" not in fields:
            fields["lazy_type"] = core._type_for_tuple_values(self.values)
        return fields["lazy_type"]

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype_of(dtype)
        return np_dtypes[name]

    def with_element_ty(self: Any, element_ty: Any) -> Any:
        return self if element_ty is self.element_ty else with_other(self, element_ty)

    to.setattr(core.block_type, "__init__", block_type)
    to.setattr(core.block_type, "with_element_ty", with_element_ty)
    to.setattr(core.tensor, "__init__", tensor)
    to.setattr(core.tuple, "__init__", lazy_tuple)
    set_type = lambda self, value: vars(self).update(lazy_type=value)  # noqa: E731
    to.setattr(core.tuple, "type", property(type_of_tuple, set_type), raising=False)
    to.setattr(core.dtype, "__eq__", lambda self, other: self is other or is_equal(self, other))
    to.setattr(interpreter, "_get_np_dtype", get_np_dtype)
    of_scalar = sizes_of(())


def _patch_scaled_products(to: pytest.MonkeyPatch) -> None:
    """Triton 3.6 interprets no such products, and 3.9 takes scales of E4M3 for E8M0."""
    product: Callable[..., Any] = TritonSemantic.dot_scaled

    def of_constants(semantic: Any, *args: Any) -> Any:
        args = tuple(core.constexpr(arg) if isinstance(arg, str) else arg for arg in args)
        return product(semantic, *args)

    builder = interpreter.InterpreterBuilder
    if not hasattr(builder, "create_dot_scaled"):  # Triton 3.6 wants names of formats as constants
        to.setattr(TritonSemantic, "dot_scaled", of_constants)
    to.setattr(builder, "create_dot_scaled", dot_scaled, raising=False)


def dot_scaled(_, a, a_scales, a_format, b, b_scales, *how) -> Any:
    """Return acc + a @ b of values times scales of their blocks, packed along the summed dim."""
    acc = how[-1]
    product = _widened(a, a.data, a_scales) @ _widened(b, b.data.T, b_scales).T
    return interpreter.TensorHandle(acc.data + product.numpy(), acc.dtype)


def _widened(operand: Any, data: Any, scales: Any) -> torch.Tensor:
    """Return fp32 [rows, summed dim]."""
    values = torch.from_numpy(data.copy())
    if operand.dtype == language.uint8:
        wide = unpack_e2m1(values)
    else:
        wide = values.view(torch.float8_e4m3fn).float()
    dtype = torch.float8_e8m0fnu if scales.dtype == language.uint8 else torch.float8_e4m3fn
    of_blocks = torch.from_numpy(scales.data.copy()).view(dtype).float()
    return wide * of_blocks.repeat_interleave(wide.shape[1] // of_blocks.shape[1], 1)


def _patch_operations(to: pytest.MonkeyPatch) -> None:
    """Equal shapes need no broadcast; without `debug`, Triton ignores an overflow that it found."""
    broadcast: Callable[..., Any] = TritonSemantic.broadcast_impl_value
    find_overflow = TritonSemantic.binary_op_sanitize_overflow_impl

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block():
            if a.shape.values == b.shape.values:
                return lhs, rhs
        elif not a.is_block() and not b.is_block():
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def binary_op_sanitize_overflow_impl(self: Any, *args: Any) -> None:
        if self.builder.options.debug:
            find_overflow(self, *args)

    to.setattr(TritonSemantic, "broadcast_impl_value", broadcast_impl_value)
    name = "binary_op_sanitize_overflow_impl"
    to.setattr(TritonSemantic, name, binary_op_sanitize_overflow_impl)
    to.setattr(interpreter.InterpreterBuilder, "create_splat", splat)


def splat(_: Any, block_type: Any, scalar: Any) -> Any:
    """Fill a block in the dtype of the data: a comparison's handle has that of what it compared.

    Triton 3.9 refuses a mask that is filled as such a handle says.
    """
    data = np.full(block_type.shape, scalar.data.item(), dtype=scalar.data.dtype)
    return interpreter.TensorHandle(data, scalar.dtype.scalar)
