"""y = x @ weight^T + bias with its three products in FP8.

    forward          y  = x  (summed over K, e4m3)      @ weight (over K, e4m3)
    input gradient   dx = dy (over N, recipe's format)  @ weight (over N, e4m3)
    weight gradient  dw = dy (over T, recipe's format)  @ x      (over T, e4m3)

Plain eager code runs a linear as one autograd node. Compilers and dispatch modes see a custom op.

Letters: T tokens, K input features, N output features; M and N rows of the operands of `multiply`.
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

from moecore.base.options.precision import Recipe
from moecore.base.params import check_has_values, get_local_param, has_values
from moecore.base.regions import run_product
from moecore.base.torch_private import (
    get_autocast_dtype,
    is_plain_eager,
    sum_version_counters,
    unsafe_view,
)
from moecore.kernels.experts.contract import GradTarget, find_sink
from moecore.kernels.grouped.wgrad import scale_and_store_grad
from moecore.kernels.linear import Gradients, LinearProducts, backward, linear
from moecore.kernels.ops import Op, is_plain
from moecore.kernels.rows.cast import compute_amax, quantise_matrix
from moecore.kernels.rows.scaling import ALIGNED, KINDS, Blocks, OperandPair, get_values_and_scales
from moecore.kernels.rows.shard_blocks import make_dense_operand, transpose_operand
from moecore.moe.amax_history import AmaxHistory, OperandName
from moecore.moe.param_reader import get_fp8_blocks
from moecore.precision.scaled_product import multiply_fp8


def flatten_rows(x: Tensor) -> Tensor:
    """Reshape x [..., columns] to a matrix [tokens, columns]."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def restore_dims(y_MN: Tensor, like: Tensor) -> Tensor:
    """Reshape y_MN to [..., N] with the leading dims of `like`; drop rows of padding."""
    # No view, as in `nn.Linear`: the caller may change the output in place.
    T = like.numel() // like.shape[-1]
    if like.ndim == 2 and y_MN.shape[0] == T:
        return y_MN
    return unsafe_view(y_MN[:T], [*like.shape[:-1], y_MN.shape[1]])  # type: ignore[no-any-return]


class InputCastCache:
    """A cache of one quantised input for linears with equal inputs, such as q, k and v."""

    def __init__(self) -> None:
        self._input: weakref.ref[Tensor] | None = None
        self._version = 0
        self._operands: OperandPair | None = None
        self._users: list[object] = []

    def __reduce__(self) -> Any:  # a copy starts empty
        """Pickle and copy the cache as an empty cache."""
        return InputCastCache, ()

    def get_operands(self, x: Tensor, user: Any, recipe: Recipe, columnwise: bool) -> OperandPair:
        """Return x quantised for forward and, if `columnwise`, for the weight gradient.

        x is quantised again if it has changed, or if the linear `user` has read the cached result.
        """
        operands, version = self._operands, sum_version_counters(x)
        is_hit = self._input is not None and self._input() is x and self._version == version
        is_hit = is_hit and not x.is_inference() and user not in self._users  # has no version
        if operands is None or not is_hit or (columnwise and not operands.columns):
            operands = cast_input(x, recipe, columnwise=columnwise)
            self._input, self._version = weakref.ref(x, self._drop_if_freed), version
            self._operands, self._users = operands, []
        self._users.append(user)
        return operands

    def _drop_if_freed(self, input: weakref.ref[Tensor]) -> None:
        """Empty the cache if `input`, which was freed, is the cached input."""
        if self._input is input:
            self._input = self._operands = None


def cast_input(
    x: Tensor,
    recipe: Recipe,
    *,
    columnwise: bool,
    amax: Tensor | None = None,
    new_amax: Tensor | None = None,
) -> OperandPair:
    """Quantise an input x [..., K] for forward and, if `columnwise`, for the weight gradient.

    The largest entry of `amax`, fp32 [n], gives the scale; None = x's amax. `new_amax`, fp32 [1],
    is raised in place to x's amax.
    """
    kind, power_of_two = KINDS[recipe.activation_block], recipe.power_of_two
    return quantise_matrix(
        x, kind, power_of_two=power_of_two, columnwise=columnwise, amax=amax, new_amax=new_amax
    )


InputGrad = tuple[Tensor | None, Any]  # dx, and dy as `compute_weight_grad` takes it


class LinearCall(NamedTuple):
    """The arguments of one forward of a quantised linear: operands, amax tensors and settings."""

    # quantised x for y, x for dw, and weight for y; None = `multiply` quantises the operand
    x_rows: Any = None
    x_row_scales: Any = None
    x_columns: Any = None
    x_column_scales: Any = None
    weight_rows: Any = None
    weight_scales: Any = None
    # the amax that scales an operand; None or 0 = the operand's own amax
    x_amax: Any = None
    weight_amax: Any = None
    dy_amax: Any = None
    # amax of this step for delayed scaling, raised in place; None = not recorded
    x_new_amax: Any = None
    weight_new_amax: Any = None
    dy_new_amax: Any = None
    has_all_amax: bool = True  # whether no amax is 0
    recipe: Recipe = Recipe()
    dtype: Any = None  # of the product


class QuantisedProducts(LinearProducts):
    """Computes y, dx and dw of one linear from operands quantised by a recipe. No host sync.

    The output has the dtype of x, or autocast's. It is differentiable once in x, weight and bias.
    """

    op: ClassVar[Op]  # the result of `make_quantised_op` for the class

    def __init__(self, recipe: Recipe, input_cache: InputCastCache | None = None) -> None:
        self.recipe = recipe
        self.inputs = input_cache or InputCastCache()
        self.history = AmaxHistory(recipe.amax_history) if recipe.amax_history else None
        self._recipe_text = json.dumps(asdict(recipe))

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, training: bool = True
    ) -> Tensor:
        """Return x @ weight^T + bias, by matmuls of quantised operands."""
        return run_product(self._run, x, weight, bias, training)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        """Return the description of the recipe."""
        return self.recipe.describe()

    def _run(self, x: Tensor, param: Tensor, bias: Tensor | None, training: bool) -> Tensor:
        """Return y, by one autograd node in eager code, otherwise by the custom op `op`."""
        weight_NK = get_local_param(param, needs_values=False)
        check_linear_operands(x, weight_NK, self.recipe)
        call = self.prepare(x, param, weight_NK, training)
        bias_N = None if bias is None else get_local_param(bias)
        call = call._replace(dtype=get_autocast_dtype(x) or x.dtype)  # as of `nn.Linear`
        if not (is_plain_eager() and is_plain(x) and is_plain(weight_NK)):
            y: Tensor = self.op(x, weight_NK, bias_N, *call[:-2], self._recipe_text, call.dtype)
            return y
        if not torch.is_grad_enabled():
            return self.forward(x, weight_NK, bias_N, call)
        may_defer = self.defers and weight_NK.requires_grad
        sink = find_sink(param, weight_NK.shape) if may_defer else None
        return linear((x, weight_NK, bias_N, call), type(self), sink)

    def get_past_amax(self, operand: OperandName) -> Tensor | None:
        """Return an operand's amax over earlier steps, fp32 [1]; None without delayed scaling."""
        return None if self.history is None else self.history.get_max_amax(operand)

    @abstractmethod
    def prepare(self, x: Tensor, param: Tensor, weight_NK: Tensor, training: bool) -> LinearCall:
        """Return the settings of one forward, with quantised operands or the amax that scales them.

        `param` is the weight, maybe a DTensor, and `weight_NK` its local tensor. If `training`, the
        amax of x is recorded for delayed scaling.
        """

    @staticmethod
    @abstractmethod
    def multiply(x_TK: Tensor, weight_NK: Tensor, call: LinearCall) -> Tensor:
        """Return x @ weight^T, from the operands in `call`; rows after the first T are padding."""

    @staticmethod
    @abstractmethod
    def compute_input_grad(dy_TN: Tensor, weight_NK: Tensor | None, call: LinearCall) -> InputGrad:
        """Return dx (None if `weight_NK` is None), and dy in the form for `compute_weight_grad`."""

    @classmethod
    def forward(cls, x: Tensor, weight_NK: Tensor, bias_N: Any, call: LinearCall) -> Tensor:
        """Return y [..., N] = x [..., K] @ weight^T + bias; `bias_N` None = no bias."""
        y = restore_dims(cls.multiply(flatten_rows(x), weight_NK, call), x)
        return y if bias_N is None else y.add_(bias_N)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], y: Tensor) -> None:
        """Save for backward in `ctx`; `inputs` are x, weight, bias and `LinearCall`."""
        x, weight_NK, bias_N, call = inputs
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        # x is saved as the operand of dw if forward made it, and the weight in its dtype.
        columns = (x, None) if call.x_columns is None else call[2:4]
        columns = columns if wants_weight else (None, None)
        ctx.save_for_backward(*columns, weight_NK if wants_x else None, *call[6:9])
        # Gathered blocks belong to the FSDP unit, and autograd checks the saved weight's version.
        rows, scales = (None, None) if has_values(weight_NK) else call[4:6]
        # Each backward changes `dy_new_amax` in place, so autograd must not check its version.
        settings = LinearCall(has_all_amax=call.has_all_amax, recipe=call.recipe)
        ctx.call = settings._replace(
            weight_rows=rows, weight_scales=scales, dy_new_amax=call.dy_new_amax
        )
        ctx.dtypes = (x.dtype, weight_NK.dtype, None if bias_N is None else bias_N.dtype)

    @classmethod
    def compute_gradients(cls, ctx: Any, dy: Tensor) -> Gradients:
        """Return dx, the operands of `compute_weight_grad` (None if not needed) and dbias."""
        x, x_scales, weight_NK, x_amax, weight_amax, dy_amax = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        call = ctx.call._replace(x_column_scales=x_scales, dtype=x_dtype)
        call = call._replace(x_amax=x_amax, weight_amax=weight_amax, dy_amax=dy_amax)
        _, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        dy_TN = flatten_rows(dy)
        dx, columns = cls.compute_input_grad(dy_TN, weight_NK, call)
        dbias_N = dy_TN.sum(0, dtype=torch.float32).to(bias_dtype) if wants_bias else None
        return (
            None if dx is None else restore_dims(dx, dy),
            (columns, x, call._replace(dtype=weight_dtype)) if wants_weight else None,
            dbias_N,
        )


_recipe_of = functools.cache(lambda text: Recipe(**json.loads(text)))
_SCHEMA = (
    "(Tensor x, Tensor weight_NK, Tensor? bias_N, "
    + ", ".join(f"Tensor? {name}" for name in LinearCall._fields[:12])
    + ", bool has_all_amax, str recipe, ScalarType dtype) -> Tensor"
)


def make_quantised_op(name: str, products: type[QuantisedProducts]) -> Op:
    """Return custom op `name`, which runs `products` under torch.compile and dispatch modes."""

    def unflatten_inputs(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return x, weight, bias and `LinearCall` from the op's flat arguments."""
        *tensors, recipe, dtype = arguments
        call: tuple[Any, ...] = (*tensors[3:], _recipe_of(recipe), dtype)
        return *tensors[:3], LinearCall(*call)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the tensors and settings of `products.setup_context` for backward."""
        products.setup_context(ctx, unflatten_inputs(inputs), output)
        ctx.products, ctx.sink = products, None  # an operator takes no sink

    def fake(x: Tensor, weight_NK: Tensor, *options: Any) -> Tensor:
        """Return an empty y."""
        return x.new_empty(*x.shape[:-1], weight_NK.shape[0], dtype=options[-1])

    def forward(*arguments: Any) -> Tensor:
        """Return y by `products.forward`."""
        return products.forward(*unflatten_inputs(arguments))

    return Op(name, forward, fake, setup_context=setup_context, backward=backward, schema=_SCHEMA)


class Fp8Products(QuantisedProducts):
    """Computes y, dx and dw of one linear by moecore's cast kernels and torch's scaled matmul.

    N and K are multiples of 16. Linears of the same input share `inputs`. The cast of the forward
    also makes the operand of the weight gradient, which is saved for backward instead of x.
    """

    def prepare(self, x: Tensor, param: Tensor, weight_NK: Tensor, training: bool) -> LinearCall:
        """Quantise x and the weight; return them and the amax tensors as a `LinearCall`."""
        history = self.history
        seen = {} if history is None else history.get_current_amax(x.device, training=training)
        columns = torch.is_grad_enabled() and weight_NK.requires_grad
        has_all_amax = history is None or history.has_all_amax
        x_amax = choose_amax(self.get_past_amax("input"), x, has_all_amax=has_all_amax)
        x_operands = self._cast_x(x, columns, x_amax, seen.get("input"))
        weight_rows, weight_amax = self._cast_weight(param, weight_NK, seen.get("weight"))
        return LinearCall(
            *get_values_and_scales(x_operands.rows),
            *get_values_and_scales(x_operands.columns),
            *get_values_and_scales(weight_rows),
            weight_amax=weight_amax,
            dy_amax=self.get_past_amax("gradient"),
            dy_new_amax=seen.get("gradient"),
            has_all_amax=has_all_amax,
            recipe=self.recipe,
        )

    def _cast_weight(
        self, param: Tensor, weight_NK: Tensor, new_amax: Tensor | None
    ) -> tuple[Blocks | None, Tensor | None]:
        """Return the weight quantised for forward, and its amax, which backward reads.

        `new_amax`, fp32 [1] or None, is raised in place to the amax.
        """
        # No copy is cached: all-gathers and fused optimizers write values without a new version.
        kind = KINDS[self.recipe.weight_block]
        if not has_values(weight_NK):
            return _read_gathered_operand(param, weight_NK, kind, new_amax), None
        weight_amax = self.get_past_amax("weight")
        if weight_amax is None and self.recipe.scaling == "tensorwise":
            # Shards are quantised as one rank would quantise the full weight. Activations and
            # gradients have a local amax: an all-reduce would wait for the slowest rank.
            with torch.no_grad():
                weight_amax = all_reduce_max(compute_amax(get_local_param(param)), param)
        elif self.history is not None:  # after steps of zeros, each shard has its own scale
            weight_amax = choose_amax(
                weight_amax, weight_NK, has_all_amax=self.history.has_all_amax
            )
        power_of_two = self.recipe.power_of_two
        amax: Any = dict(amax=weight_amax, new_amax=new_amax)
        pair = quantise_matrix(weight_NK, kind, power_of_two=power_of_two, columnwise=False, **amax)
        return pair.rows, weight_amax

    def _cast_x(
        self, x: Tensor, columnwise: bool, amax: Tensor | None, new_amax: Tensor | None
    ) -> OperandPair:
        """Return x quantised for forward and, with `columnwise`, for the weight gradient.

        Without delayed scaling, linears of the same input share the result. Otherwise `amax` is the
        past amax, and `new_amax` is raised in place to x's amax.
        """
        if self.history is None and not torch.compiler.is_compiling():
            return self.inputs.get_operands(x, self, self.recipe, columnwise)
        # A compiler computes equal casts once by itself.
        return cast_input(x, self.recipe, columnwise=columnwise, amax=amax, new_amax=new_amax)

    @staticmethod
    def multiply(x_TK: Tensor, weight_NK: Tensor, call: LinearCall) -> Tensor:
        """Return y = x @ weight^T of the operands in `call`, in `call.dtype`."""
        x = Blocks(call.x_rows, call.x_row_scales, KINDS[call.recipe.activation_block])
        weight = Blocks(call.weight_rows, call.weight_scales, KINDS[call.recipe.weight_block])
        return multiply_fp8(x, weight, call.dtype)

    @staticmethod
    def compute_input_grad(dy_TN: Tensor, weight_NK: Tensor | None, call: LinearCall) -> InputGrad:
        """Return (dx or None if `weight_NK` is None, quantised dy for `compute_weight_grad`)."""
        recipe = call.recipe
        operands = quantise_matrix(
            dy_TN,
            KINDS[recipe.activation_block],
            recipe.grad_format,
            power_of_two=recipe.power_of_two,
            rowwise=weight_NK is not None,
            columnwise=call.x_column_scales is not None,
            amax=choose_amax(call.dy_amax, dy_TN, has_all_amax=call.has_all_amax),
            new_amax=call.dy_new_amax,
        )
        if weight_NK is None or operands.rows is None:
            return None, operands.columns
        weight = _transpose_weight(weight_NK, call)
        return multiply_fp8(operands.rows, weight, call.dtype), operands.columns

    @staticmethod
    def compute_weight_grad(
        dy: Blocks, x_KT: Tensor, call: LinearCall, target: GradTarget
    ) -> Tensor:
        """Return dw = dy^T x, new or in `target.out` (overwritten, or added if `accumulate`)."""
        x = Blocks(x_KT, call.x_column_scales, KINDS[call.recipe.activation_block])
        grad = multiply_fp8(dy, x, call.dtype)
        return scale_and_store_grad(grad, *target)


Fp8Products.op = make_quantised_op("fp8_linear", Fp8Products)


def _transpose_weight(weight_NK: Tensor, call: LinearCall) -> Blocks:
    """Return the quantised weight^T for dx, from the weight's all-gathered blocks if it has any."""
    kind = KINDS[call.recipe.weight_block]
    if call.weight_rows is not None:
        rows = Blocks(call.weight_rows, call.weight_scales, kind)
        return transpose_operand(rows, weight_NK.shape[1])
    power_of_two = call.recipe.power_of_two
    operands = quantise_matrix(
        weight_NK, kind, power_of_two=power_of_two, rowwise=False, amax=call.weight_amax
    )
    assert operands.columns is not None
    return operands.columns


def choose_amax(past_amax: Tensor | None, x: Tensor, *, has_all_amax: bool) -> Tensor | None:
    """Return the amax that determines the scale, fp32 [n]; None = without delayed scaling.

    The result is `past_amax`, or x's amax if the history is empty (`past_amax` is 0). If
    `has_all_amax`, no history is empty, and x is not read.
    """
    return past_amax if past_amax is None or has_all_amax else compute_amax(x, past_amax)


def all_reduce_max(tensor: Tensor, param: Tensor) -> Tensor:
    """Return `tensor`, all-reduced by MAX over the mesh dims that shard the weight `param`."""
    if isinstance(param, DTensor):
        for mesh_dim, placement in enumerate(param.placements):
            if not placement.is_replicate():
                tensor = tensor.clone()
                dist.all_reduce(tensor, dist.ReduceOp.MAX, param.device_mesh.get_group(mesh_dim))
    return tensor


def find_weight_problem(weight: Tensor, recipe: Recipe | None = None) -> str | None:
    """Return why FP8 matmuls of a recipe (None = any) do not support a weight, or None.

    The text is equal on the ranks that shard the weight.
    """
    multiple = ALIGNED if recipe is None else recipe.weight_multiple
    # Tensor parallelism may have sharded the weight [N, K]; FSDP has not yet.
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


def check_linear_operands(x: Tensor, weight_NK: Tensor, recipe: Recipe) -> None:
    """Raise a ValueError if a recipe does not support this input with this local weight."""
    if isinstance(x, DTensor):
        raise ValueError("x (a DTensor) must be a plain tensor for FP8 products: pass x.to_local()")
    reason = find_weight_problem(weight_NK, recipe)
    if reason is not None:
        raise ValueError(f"weight must fit FP8 products, but {reason}: leave it in its dtype")
    if x.shape[-1:] != weight_NK.shape[1:]:
        raise ValueError(
            f"x {list(x.shape)} must have the columns of weight ({list(weight_NK.shape)}): fix x"
        )


def read_gathered_blocks(scale_kind: str | None, param: Tensor, weight_NK: Tensor) -> Blocks:
    """Return a weight's all-gathered FP8 blocks of `scale_kind`, or raise NotImplementedError."""
    blocks = None if torch.compiler.is_compiling() else get_fp8_blocks(param)
    if blocks is None or blocks.kind != scale_kind:
        check_has_values(weight_NK)
    assert blocks is not None, "it has no values"
    return blocks


def _read_gathered_operand(
    param: Tensor, weight_NK: Tensor, scale_kind: str, new_amax: Tensor | None
) -> Blocks:
    """Return a weight's all-gathered FP8 blocks as the operand of the forward's matmul.

    Args:
        param: the parameter, which has the blocks of its last all-gather as an attribute.
        weight_NK: the unsharded weight, whose values are not read.
        scale_kind: of the blocks that the matmul needs.
        new_amax: fp32 [1], raised in place to the weight's amax, or None.
    """
    blocks = read_gathered_blocks(scale_kind, param, weight_NK)
    if new_amax is not None and blocks.amax is not None:
        with torch.no_grad():
            new_amax.copy_(torch.maximum(new_amax, blocks.amax.masked_fill(blocks.amax.isinf(), 0)))
    return make_dense_operand(blocks)
