"""Operations for autograd, torch.compile and dispatch modes, with little host time in plain eager.

Compilation, fake tensors and selective checkpointing need a custom op of torch. In plain eager code
a custom op costs about three times the host time of an `autograd.Function`, more than a launch. So
an `Op` has both forms, and each call chooses.
"""

import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from moecore.base.torch_private import is_inside_custom_ops, is_plain_eager

Out = TypeVar("Out")
PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def make_setup_context(saved_inputs: slice, option_inputs: slice = slice(0)) -> Callable[..., None]:
    """Return an `Op`'s `setup_context`, which saves inputs[saved_inputs] for backward.

    It stores inputs[option_inputs], which are not tensors, as `ctx.others`.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[saved_inputs])
        ctx.others = inputs[option_inputs]

    return setup_context


class Op(Generic[Out]):
    """A differentiable operation as an `autograd.Function` and as a custom op of torch.

    Plain eager calls use the function. Both have the same bits, saved tensors and errors.

    Args:
        name: the attribute `custom` is the custom op `moecore::<name>`.
        forward: the computation; its annotations are the schema. Outputs share no memory with
            inputs, and each tensor is an argument, not an element of a list.
        fake: takes the arguments of `forward` and returns empty outputs.
        setup_context: as in `autograd.Function`; see `make_setup_context`.
        backward: backward(ctx, *grads); None = not differentiable.
        mutates_args: names of the arguments written to; not together with `backward`.
        schema: replaces the annotations of a forward with `*args`.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Out],
        fake: Callable[..., Any],
        *,
        setup_context: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
        mutates_args: tuple[str, ...] = (),
        schema: str | None = None,
    ) -> None:
        assert not (mutates_args and backward), name
        registered: Any = torch.library.custom_op(
            f"moecore::{name}", forward, mutates_args=mutates_args, schema=schema
        )
        registered.register_fake(fake)
        self._apply: Callable[..., Out] | None = None
        if backward is not None:
            registered.register_autograd(backward, setup_context=setup_context)
            # Forward also saves: with a separate `setup_context`, torch would bind the arguments to
            # the signature at every call.

            def forward_and_save(ctx: Any, *args: Any) -> Any:
                output = forward(*args)
                if setup_context is not None:
                    setup_context(ctx, args, output)
                return output

            methods: Any = dict(
                forward=staticmethod(forward_and_save), backward=staticmethod(backward)
            )
            # Profiles show the name of the custom op.
            function: Any = type(f"moecore::{name}", (torch.autograd.Function,), methods)
            self._apply = function.apply
        self.custom: Callable[..., Out] = getattr(torch.ops.moecore, name).default
        self._forward = forward
        parameters = list(inspect.signature(forward).parameters)
        self._mutated = [parameters.index(arg) for arg in mutates_args]

    def __call__(self, *args: Any) -> Out:
        """Return `forward(*args)`, by the form for this call; all arguments are positional."""
        if not is_plain_eager():
            return self.custom(*args)
        is_recorded = False
        for arg in args:
            if isinstance(arg, Tensor):
                if not is_plain(arg):
                    return self.custom(*args)
                is_recorded = is_recorded or arg.requires_grad
        if is_recorded and torch.is_grad_enabled():
            # Without a backward, the custom op raises when a gradient is computed.
            return self.custom(*args) if self._apply is None else self._apply(*args)
        mutated = [args[i] for i in self._mutated if args[i] is not None]
        if mutated:
            torch.autograd.graph.increment_version(mutated)
        return self._forward(*args)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is no subclass, not lazily negated, and on meta only in a dry run."""
    return (
        type(tensor) in PLAIN_TYPES
        and (not tensor.is_meta or is_inside_custom_ops())
        and not tensor.is_neg()
    )
