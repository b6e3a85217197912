"""y = x @ weight^T + bias with its three products in FP8.

    forward          y  = x  (summed over K, e4m3)      @ weight (over K, e4m3)
    input gradient   dx = dy (over N, recipe's format)  @ weight (over N, e4m3)
    weight gradient  dw = dy (over T, recipe's format)  @ x      (over T, e4m3)

In plain eager code a linear is one node of autograd, and nothing lies between it and the launches
of `cast` and torch's product. Compilers and dispatch modes see custom operators.

Letters: T tokens, K input features, N output features; M and N rows of the operands of `product`.
"""

from __future__ import annotations

import functools
import json
import weakref
from abc import abstractmethod
from dataclasses import asdict
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from moecore.base.options.precision import Recipe
from moecore.base.params import check_values, has_values, local_param
from moecore.base.regions import as_product
from moecore.base.torch_private import autocast_dtype, is_plain_eager, unsafe_view, version
from moecore.kernels.experts.contract import GradTarget, sink_of
from moecore.kernels.grouped.wgrad import put_grad
from moecore.kernels.linear import Gradients, LinearProducts, backward, linear
from moecore.kernels.ops import Op, is_plain
from moecore.kernels.rows.cast import amax, cast
from moecore.kernels.rows.scaling import ALIGNED, KINDS, Blocks, OperandPair, parts_of
from moecore.kernels.rows.shard_blocks import as_operand, transpose_operand
from moecore.moe.amax_history import AmaxHistory, OperandName
from moecore.moe.param_reader import gathered_blocks
from moecore.precision.scaled_product import product


def rows_of(x: Tensor) -> Tensor:
    """Return the rows [T, K] of x [..., K]."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def with_dims_of(y_MN: Tensor, x: Tensor) -> Tensor:
    """Return [..., N], the rows of y that are those of x [..., K]; others fill it up."""
    # No view, as of `nn.Linear`: what follows may change it in place.
    T = x.numel() // x.shape[-1]
    if y_MN.shape[0] != T:
        y_MN = y_MN[:T]
    elif x.ndim == 2:
        return y_MN
    y: Tensor = unsafe_view(y_MN, [*x.shape[:-1], y_MN.shape[1]])
    return y


class InputCast:
    """The last quantised input, for modules that read the same one, like q, k and v.

    It holds what it made until the input is freed, another one comes, or one of the modules comes
    a second time.
    """

    def __init__(self) -> None:
        self._input: weakref.ref[Tensor] | None = None
        self._version = 0
        self._operands: OperandPair | None = None
        self._users: list[object] = []

    def __reduce__(self) -> Any:  # a copy starts empty
        return InputCast, ()

    def get(self, x: Tensor, user: object, recipe: Recipe, columns: bool) -> OperandPair:
        """Return what `cast_input` returns."""
        operands = self._operands
        is_hit = self._input is not None and self._input() is x and self._version == version(x)
        is_hit = is_hit and not x.is_inference()  # has no version
        if (
            operands is None
            or not is_hit
            or user in self._users
            or (columns and not operands.columns)
        ):
            operands = cast_input(x, recipe, columns=columns)
            self._input, self._version = weakref.ref(x, self._drop), version(x)
            self._operands, self._users = operands, []
        self._users.append(user)
        return operands

    def _drop(self, input: weakref.ref[Tensor]) -> None:
        if self._input is input:
            self._input = self._operands = None


def cast_input(
    x: Tensor,
    recipe: Recipe,
    *,
    columns: bool,
    amax: Tensor | None = None,
    seen: Tensor | None = None,
) -> OperandPair:
    """Return x [..., K] as operands of the forward and, with `columns`, of the weight gradient."""
    kind, power_of_two = KINDS[recipe.activation_block], recipe.power_of_two
    return cast(x, kind, power_of_two=power_of_two, columns=columns, amax=amax, seen=seen)


InputGradient = tuple[Tensor | None, Any]  # dx, and dy as `weight_grad` takes it


class LinearCall(NamedTuple):
    """Tensors without a gradient, or None, and settings that one call of a linear reads."""

    # operands that are quantised already: x for the forward and for the weight gradient, and the
    # weight for the forward
    x_rows: Any = None
    x_row_scales: Any = None
    x_columns: Any = None
    x_column_scales: Any = None
    weight_rows: Any = None
    weight_scales: Any = None
    # largest magnitudes that scale an operand; None or 0 = the operand's own
    x_amax: Any = None
    weight_amax: Any = None
    dy_amax: Any = None
    # grow to the largest magnitudes of this step
    x_seen: Any = None
    weight_seen: Any = None
    dy_seen: Any = None
    is_sure: bool = True  # no amax is 0
    recipe: Recipe = Recipe()
    dtype: Any = None  # of the product


class QuantisedProducts(LinearProducts):
    """The operation of a linear whose recipe quantises both operands of each product.

    Differentiable once in x, weight and bias. No host sync. The dtype is that of x, or autocast's.
    A subclass has the products: `multiply`, `input_grad` and `weight_grad`.
    """

    op: ClassVar[Op]  # `quantised_op` of the class

    def __init__(self, recipe: Recipe, inputs: InputCast | None = None) -> None:
        self.recipe = recipe
        self.inputs = inputs or InputCast()
        # Of delayed scaling.
        self.history = AmaxHistory(recipe.amax_history) if recipe.amax_history else None
        self._recipe_text = json.dumps(asdict(recipe))

    @override
    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, training: bool = True
    ) -> Tensor:
        y: Tensor = as_product(self._run, x, weight, bias, training)
        return y

    def __repr__(self) -> str:
        return self.recipe.describe()

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None, training: bool) -> Tensor:
        weight_NK = local_param(weight, reads=False)
        check_operands(x, weight_NK, self.recipe)
        call = self.prepare(x, weight, weight_NK, training)
        bias_N = None if bias is None else local_param(bias)
        call = call._replace(dtype=autocast_dtype(x) or x.dtype)  # as of `nn.Linear`
        if not (is_plain_eager() and is_plain(x) and is_plain(weight_NK)):
            y: Tensor = self.op(x, weight_NK, bias_N, *call[:-2], self._recipe_text, call.dtype)
        elif torch.is_grad_enabled():
            may_defer = self.defers and weight_NK.requires_grad
            sink = sink_of(weight, weight_NK.shape) if may_defer else None
            y = linear((x, weight_NK, bias_N, call), type(self), sink)
        else:
            y = self.forward(x, weight_NK, bias_N, call)
        return y

    def past_amax(self, operand: OperandName) -> Tensor | None:
        """Return the operand's largest magnitude of earlier steps; None without a history."""
        return None if self.history is None else self.history.amax(operand)

    @abstractmethod
    def prepare(self, x: Tensor, weight: Tensor, weight_NK: Tensor, training: bool) -> LinearCall:
        """Return what the products of this call read beside x, weight and bias."""

    @staticmethod
    @abstractmethod
    def multiply(x_TK: Tensor, weight_NK: Tensor, call: LinearCall) -> Tensor:
        """Return x @ weight^T; rows after the first T are padding."""

    @staticmethod
    @abstractmethod
    def input_grad(dy_TN: Tensor, weight_NK: Tensor | None, call: LinearCall) -> InputGradient:
        """Return dy @ weight, None without a weight; also dy as `weight_grad` takes it."""

    # weight_grad(dy of `input_grad`, x or its columns, call, target).

    @override
    @classmethod
    def forward(cls, x: Tensor, weight_NK: Tensor, bias_N: Any, call: LinearCall) -> Tensor:
        y = with_dims_of(cls.multiply(rows_of(x), weight_NK, call), x)
        return y if bias_N is None else y.add_(bias_N)

    @override
    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], y: Tensor) -> None:
        x, weight_NK, bias_N, call = inputs
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        # Of x the operand that is summed over tokens, if forward had it. The weight as it is,
        # because units free and gather it, and to quantise it again takes little beside a product.
        columns = (x, None) if call.x_columns is None else call[2:4]
        ctx.save_for_backward(
            *(columns if wants_weight else (None, None)),
            weight_NK if wants_x else None,
            *call[6:9],
        )
        # A unit holds what it has gathered; with the weight autograd checks that it is still there.
        rows, scales = (None, None) if has_values(weight_NK) else call[4:6]
        # `dy_seen` grows from one backward to the next, so autograd must not check it.
        ctx.call = LinearCall(
            weight_rows=rows,
            weight_scales=scales,
            dy_seen=call.dy_seen,
            is_sure=call.is_sure,
            recipe=call.recipe,
        )
        ctx.dtypes = (x.dtype, weight_NK.dtype, None if bias_N is None else bias_N.dtype)

    @override
    @classmethod
    def gradients(cls, ctx: Any, dy: Tensor) -> Gradients:
        x, x_scales, weight_NK, x_amax, weight_amax, dy_amax = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        call = ctx.call._replace(
            x_column_scales=x_scales,
            x_amax=x_amax,
            weight_amax=weight_amax,
            dy_amax=dy_amax,
            dtype=x_dtype,
        )
        _, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        dy_TN = rows_of(dy)
        dx, columns = cls.input_grad(dy_TN, weight_NK, call)
        dbias_N = dy_TN.sum(0, dtype=torch.float32).to(bias_dtype) if wants_bias else None
        return (
            None if dx is None else with_dims_of(dx, dy),
            (columns, x, call._replace(dtype=weight_dtype)) if wants_weight else None,
            dbias_N,
        )


_recipe_of = functools.cache(lambda text: Recipe(**json.loads(text)))
_SCHEMA = (
    "(Tensor x, Tensor weight_NK, Tensor? bias_N, "
    + ", ".join(f"Tensor? {name}" for name in LinearCall._fields[:12])
    + ", bool is_sure, str recipe, ScalarType dtype) -> Tensor"
)


def quantised_op(name: str, products: type[QuantisedProducts]) -> Op:
    """Return what compilers and dispatch modes know of the operation with these products."""

    def inputs_of(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        *tensors, recipe, dtype = arguments
        return *tensors[:3], LinearCall._make((*tensors[3:], _recipe_of(recipe), dtype))

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        products.save(ctx, inputs_of(inputs), output)
        ctx.products, ctx.sink = products, None  # an operator takes no sink

    def fake(x: Tensor, weight_NK: Tensor, *options: Any) -> Tensor:
        return x.new_empty(*x.shape[:-1], weight_NK.shape[0], dtype=options[-1])

    def forward(*arguments: Any) -> Tensor:
        return products.forward(*inputs_of(arguments))

    return Op(name, forward, fake, save=save, backward=backward, schema=_SCHEMA)


class Fp8Products(QuantisedProducts):
    """Products in FP8 by this package's casts and torch's scaled product.

    N and K are multiples of 16. Weights that multiply the same input share `inputs`. The input's
    columns, which the pass of the forward's cast makes too, are saved in place of the input.
    """

    @override
    def prepare(self, x: Tensor, weight: Tensor, weight_NK: Tensor, training: bool) -> LinearCall:
        history = self.history
        seen = {} if history is None else history.record(x.device, training=training)
        columns = torch.is_grad_enabled() and weight_NK.requires_grad
        is_sure = history is None or history.is_sure
        x_amax = scaling_amax(self.past_amax("input"), x, is_sure=is_sure)
        x_operands = self._cast_x(x, columns, x_amax, seen.get("input"))
        weight_rows, weight_amax = self._cast_weight(weight, weight_NK, seen.get("weight"))
        return LinearCall(
            *parts_of(x_operands.rows),
            *parts_of(x_operands.columns),
            *parts_of(weight_rows),
            weight_amax=weight_amax,
            dy_amax=self.past_amax("gradient"),
            dy_seen=seen.get("gradient"),
            is_sure=is_sure,
            recipe=self.recipe,
        )

    def _cast_weight(
        self, weight: Tensor, weight_NK: Tensor, seen: Tensor | None
    ) -> tuple[Blocks | None, Tensor | None]:
        """Return the forward's operand, and the amax that backward's needs."""
        # Once per forward and once per backward. No copy is kept: gathers and fused optimizers put
        # new values into the same memory without a new version. A weight that was gathered in FP8
        # has no values: forward reads what was gathered, and backward transposes it.
        kind = KINDS[self.recipe.weight_block]
        if not has_values(weight_NK):
            return _read_gathered_rows(weight, weight_NK, kind, seen), None
        weight_amax = self.past_amax("weight")
        if weight_amax is None and self.recipe.scaling == "tensorwise":
            # Over the ranks that tensor parallelism cuts it over, so that it is quantised as one
            # rank would. Activations and gradients have their own on every rank: each rank
            # multiplies its own tokens or features alone, and an exchange would wait for the
            # slowest.
            with torch.no_grad():
                weight_amax = max_over_cut(amax(local_param(weight)), weight)
        elif self.history is not None:  # of zeros so far, a cut weight has scales of its parts
            weight_amax = scaling_amax(weight_amax, weight_NK, is_sure=self.history.is_sure)
        power_of_two = self.recipe.power_of_two
        operands = cast(
            weight_NK, kind, power_of_two=power_of_two, columns=False, amax=weight_amax, seen=seen
        )
        return operands.rows, weight_amax

    def _cast_x(
        self, x: Tensor, columns: bool, amax: Tensor | None, seen: Tensor | None
    ) -> OperandPair:
        if self.history is None and not torch.compiler.is_compiling():
            return self.inputs.get(x, self, self.recipe, columns)
        # A compiler computes equal casts once by itself.
        return cast_input(x, self.recipe, columns=columns, amax=amax, seen=seen)

    @override
    @staticmethod
    def multiply(x_TK: Tensor, weight_NK: Tensor, call: LinearCall) -> Tensor:
        x = Blocks(call.x_rows, call.x_row_scales, KINDS[call.recipe.activation_block])
        weight = Blocks(call.weight_rows, call.weight_scales, KINDS[call.recipe.weight_block])
        return product(x, weight, call.dtype)

    @override
    @staticmethod
    def input_grad(dy_TN: Tensor, weight_NK: Tensor | None, call: LinearCall) -> InputGradient:
        recipe = call.recipe
        operands = cast(
            dy_TN,
            KINDS[recipe.activation_block],
            recipe.grad_format,
            power_of_two=recipe.power_of_two,
            rows=weight_NK is not None,
            columns=call.x_column_scales is not None,
            amax=scaling_amax(call.dy_amax, dy_TN, is_sure=call.is_sure),
            seen=call.dy_seen,
        )
        if weight_NK is None or operands.rows is None:
            return None, operands.columns
        return product(
            operands.rows, _weight_columns(weight_NK, call), call.dtype
        ), operands.columns

    @override
    @staticmethod
    def weight_grad(dy: Blocks, x_KT: Tensor, call: LinearCall, target: GradTarget) -> Tensor:
        x = Blocks(x_KT, call.x_column_scales, KINDS[call.recipe.activation_block])
        grad = product(dy, x, call.dtype)
        return put_grad(grad, target.out, target.adds, target.dtype, target.scale)


Fp8Products.op = quantised_op("fp8_linear", Fp8Products)


def _weight_columns(weight_NK: Tensor, call: LinearCall) -> Blocks:
    """Return the weight as operand of the input gradient, summed over N."""
    kind = KINDS[call.recipe.weight_block]
    if call.weight_rows is not None:
        rows = Blocks(call.weight_rows, call.weight_scales, kind)
        return transpose_operand(rows, weight_NK.shape[1])
    power_of_two = call.recipe.power_of_two
    operands = cast(weight_NK, kind, power_of_two=power_of_two, rows=False, amax=call.weight_amax)
    assert operands.columns is not None
    return operands.columns


def scaling_amax(past: Tensor | None, x: Tensor, *, is_sure: bool) -> Tensor | None:
    """Return what x is scaled by, fp32 [n]: a past that may be 0, or its own; None = its own."""
    return past if past is None or is_sure else amax(x, past)


def max_over_cut(value: Tensor, weight: Tensor) -> Tensor:
    """Return the largest value of the ranks that a weight is cut over."""
    # One all-reduce for each mesh dim that cuts it, none for a whole weight.
    if isinstance(weight, DTensor):
        for mesh_dim, placement in enumerate(weight.placements):
            if not placement.is_replicate():
                value = value.clone()
                dist.all_reduce(value, dist.ReduceOp.MAX, weight.device_mesh.get_group(mesh_dim))
    return value


def weight_problem(weight: Tensor, recipe: Recipe | None = None) -> str | None:
    """Return the error text for a weight that a recipe cannot multiply; equal on all ranks."""
    multiple = ALIGNED if recipe is None else recipe.multiple
    # The weight [N, K] is whole or cut by tensor parallelism, not yet over data ranks.
    sizes = list(weight.shape)
    if isinstance(weight, DTensor):
        for mesh_dim, placement in enumerate(weight.placements):
            dim: int | None = getattr(placement, "dim", None)  # of rows, also of some of each half
            if dim is not None:
                parts = weight.device_mesh.size(mesh_dim)
                if sizes[dim] % parts:
                    return f"its weight {sizes} is cut into {parts} parts that are not alike"
                sizes[dim] //= parts
    if len(sizes) != 2 or any(n == 0 or n % multiple for n in sizes):
        return f"its weight {sizes} is no matrix of multiples of {multiple}"
    if not weight.is_floating_point() or weight.element_size() == 1:
        return f"its weight is {weight.dtype}"
    return None


def check_operands(x: Tensor, weight_NK: Tensor, recipe: Recipe) -> None:
    """Raise a ValueError for an input and a weight that a recipe's products do not take."""
    if isinstance(x, DTensor):
        raise ValueError("x (a DTensor) must be a plain tensor for FP8 products: pass x.to_local()")
    reason = weight_problem(weight_NK, recipe)
    if reason is not None:
        raise ValueError(f"weight must fit FP8 products, but {reason}: leave it in its dtype")
    if x.shape[-1:] != weight_NK.shape[1:]:
        raise ValueError(
            f"x ({list(x.shape)}) must have the columns of weight ({list(weight_NK.shape)}): "
            "correct x"
        )


def read_gathered_blocks(kind: str | None, weight: Tensor, weight_NK: Tensor) -> Blocks:
    """Return what was gathered of a weight without values; raise for another kind."""
    blocks = None if torch.compiler.is_compiling() else gathered_blocks(weight)
    if blocks is None or blocks.kind != kind:
        check_values(weight_NK)
    assert blocks is not None, "it has no values"
    return blocks


def _read_gathered_rows(
    weight: Tensor, weight_NK: Tensor, kind: str, seen: Tensor | None
) -> Blocks:
    """Return what was gathered of a weight, as operand of the forward."""
    blocks = read_gathered_blocks(kind, weight, weight_NK)
    if seen is not None and blocks.amax is not None:
        with torch.no_grad():
            seen.copy_(torch.maximum(seen, blocks.amax.masked_fill(blocks.amax.isinf(), 0)))
    return as_operand(blocks)
