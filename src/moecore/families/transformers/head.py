"""The head of a causal language model of transformers, whose loss needs no logits of all tokens.

In a training forward with labels the head returns `Logits`, a tensor subclass that references the
hidden states and the head's weight and has no values. `F.cross_entropy`, which transformers' loss
calls, computes the loss in chunks (`models/loss.py`). Any other operation, such as a model's scale
or cap on logits, computes the values first, so results equal the stock model's results.

Under tensor parallelism each tp rank has some rows of the vocabulary:

    ids_BT -> local rows, otherwise 0 -> all-reduced -> x_BTD
    x_BTD -> logits of the local rows -> all-gathered -> logits_BTV

A loss that reads no logits is computed from the local logits and exchanges three numbers per token.

Legend: B rows, T tokens of a row, D model dim, V vocabulary.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from typing_extensions import override

from moecore.base.options.precision import Recipe
from moecore.base.torch_private import sum_version_counters, tree_map_only
from moecore.families.transformers.stock import bind_arguments, find_outermost_models
from moecore.kernels.linear import PlainProducts
from moecore.models.loss import IGNORE_INDEX, linear_cross_entropy
from moecore.models.tensor_parallel import TensorParallel
from moecore.moe.dispatch.collectives import exchange_with_grad
from moecore.precision.plain import ProductLinear

# Functions that read no values.
_PROPERTIES = (
    *("shape", "ndim", "dtype", "device", "layout"),
    *("requires_grad", "grad_fn", "is_leaf", "is_cuda", "is_meta"),
)
METADATA_FUNCTIONS = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES]
    + [getattr(Tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "__len__")]
)
_STATE = threading.local()
TP = "_moecore_vocabulary_ranks"  # attribute of a head: the tp ranks that have parts of its rows
IS_SCORED = "_moecore_is_scored"  # attribute of a model in a forward with a `log_prob_loss`


@dataclass(eq=False)
class LogitsSource:
    """The hidden states and head weight from which `Logits` are computed."""

    hidden: Tensor  # [..., D]
    weight: Tensor  # [V, D], unsharded for this forward
    version: int  # version of the weight's values
    tp: TensorParallel | None = None  # ranks that shard the weight's rows; None = replicated
    recipe: Recipe | None = None  # precision of the loss's products; None = the weight's dtype
    has_ended: bool = False  # whether the model's forward has ended
    is_over: bool = False  # whether the loss's backward has begun, after which weights change

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The tp group over which the head's weight is sharded; None = the weight is replicated."""
        return None if self.tp is None else self.tp.group

    def multiply_gradient_by_tp(self, loss: Tensor) -> Tensor:
        """Return `loss`; backward multiplies its gradient by the number of tp ranks."""
        # Each tp rank starts backward with 1 / tp of the gradient: `GradientShareHooks`.
        if self.tp is None:
            return loss
        size = self.tp.size
        return exchange_with_grad(loss, torch.clone, lambda grad: grad * size)

    def free_hidden(self, _grad: Tensor) -> None:
        """Backward hook of the loss: free the hidden states; logits can then not be computed."""
        self.is_over, self.hidden = True, self.hidden[:0]


class Logits(Tensor):
    """Logits [..., V] whose values are computed from hidden states and weight on first use."""

    source: LogitsSource

    @staticmethod
    def make_lazy(source: LogitsSource, shape: torch.Size, dtype: torch.dtype) -> Logits:
        """Return logits of a shape [..., V] and dtype that `source` computes on first use."""
        # Code that bypasses __torch_function__ reads NaN.
        memory = source.hidden.new_full((), math.nan, dtype=dtype, requires_grad=False)
        logits = memory.expand(shape).as_subclass(Logits)
        logits.source = source
        return logits

    def compute_values(self) -> Tensor:
        """Return the logits as a plain tensor, differentiable only during the model's forward."""
        source = self.source
        is_gone = source.is_over or sum_version_counters(source.weight) != source.version
        if source.has_ended and (is_gone or torch.is_grad_enabled()):
            raise ValueError(
                "logits of a training forward with labels must be read before backward and under "
                "torch.no_grad(), because the loss was computed without them: pass "
                "parallelize_moe(memory=MemoryOptions(fused_loss=False))"
            )
        if source.recipe is not None and not source.has_ended:
            warnings.warn(
                "Precision.fp8_head (True) is not used: the model does more with its logits than "
                "transformers' standard loss does",
                stacklevel=2,
            )
        values = F.linear(source.hidden, source.weight)
        values = values if source.tp is None else source.tp.gather_last_dim(values)
        return values.to(self.dtype).view(self.shape)

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        return f"Logits(shape={tuple(self.shape)}, dtype={self.dtype}, not computed)"

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA_FUNCTIONS:
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        convert = WITHOUT_VALUES.get(func)
        if convert is not None and (lazy := convert(*args, **kwargs)) is not None:
            return lazy
        if func is Tensor.detach:  # the values need no gradient
            with torch.no_grad():
                return args[0].compute_values()
        values = tree_map_only(Logits, Logits.compute_values, (args, dict(kwargs)))
        return func(*values[0], **values[1])


def _view_as_rows(logits: Logits, *shape: Any) -> Logits | None:
    """Return lazy fp32 logits viewed as [-1, V]; None = values are needed for this view."""
    vocabulary = logits.shape[-1]
    is_flat = shape == (-1, vocabulary) and logits.dtype == torch.float32
    flat = torch.Size((logits.numel() // vocabulary, vocabulary))
    return Logits.make_lazy(logits.source, flat, logits.dtype) if is_flat else None


def _compute_cross_entropy(
    logits: Any,
    labels_N: Tensor,
    weight: None = None,
    size_average: None = None,
    ignore_index: int = IGNORE_INDEX,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Compute `F.cross_entropy` of lazy logits [N, V] in chunks of tokens.

    Returns None for options that need all logits, such as class weights or label smoothing.
    """
    unsupported = (weight, size_average, reduce)
    is_plain = all(other is None for other in unsupported) and label_smoothing == 0.0
    is_known = reduction in ("mean", "sum") and ignore_index == IGNORE_INDEX
    is_logits = isinstance(logits, Logits) and logits.ndim == 2 and not logits.source.has_ended
    if not (is_plain and is_known and is_logits and labels_N.dtype == torch.int64):
        return None
    source = logits.source
    loss: Tensor = linear_cross_entropy(
        source.hidden.flatten(0, -2),
        source.weight,
        labels_N,
        num_tokens=1 if reduction == "sum" else None,
        group=source.tp_group,
        recipe=source.recipe,
    )
    loss = source.multiply_gradient_by_tp(loss)
    if loss.requires_grad:
        loss.register_hook(source.free_hidden)
    return loss


WITHOUT_VALUES: Mapping[Any, Callable[..., Tensor | None]] = {
    Tensor.float: lambda logits: Logits.make_lazy(logits.source, logits.shape, torch.float32),
    Tensor.view: _view_as_rows,
    F.cross_entropy: _compute_cross_entropy,
}


class HeadWithoutLogits(nn.Linear):
    """A linear head without bias that returns `Logits` in training forwards with labels."""

    loss_recipe: Recipe | None = None

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Return lazy `Logits` in a forward of the model with labels, otherwise values."""
        forwards = _get_running_forwards()
        is_cut = isinstance(self.weight, DTensor)  # over tensor parallel ranks
        if not forwards or forwards[-1].head is not self or is_cut or torch.compiler.is_compiling():
            return super().forward(input)
        tp: TensorParallel | None = getattr(self, TP, None)
        source = LogitsSource(
            input, self.weight, sum_version_counters(self.weight), tp, self.loss_recipe
        )
        forwards[-1].sources.append(source)
        ranks = 1 if source.tp is None else source.tp.size
        shape = torch.Size((*input.shape[:-1], ranks * self.weight.shape[0]))
        return Logits.make_lazy(source, shape, input.dtype)


@dataclass(eq=False)
class RunningForward:
    """A running forward of a model, and the hidden states of the lazy `Logits` it has returned."""

    model: nn.Module
    head: nn.Module | None  # the head that returns `Logits`; None = heads return values
    sources: list[LogitsSource] = field(default_factory=list)


def _get_running_forwards() -> list[RunningForward]:
    """Return the list of running forwards of this thread, outermost first; callers change it."""
    if not hasattr(_STATE, "forwards"):
        _STATE.forwards = []
    forwards: list[RunningForward] = _STATE.forwards
    return forwards


def find_plain_heads(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Linear]]:
    """Yield each transformers model whose head is an `nn.Linear` without bias, with the head."""
    for outer in find_outermost_models(model):
        head: Any = getattr(outer, "get_output_embeddings", lambda: None)()
        # A subclass, such as an adapter's, may compute another function. A schedule that defers
        # weight gradients has changed the class of all linears.
        is_deferred = type(head) is ProductLinear and type(head.products) is PlainProducts
        if (type(head) is nn.Linear or is_deferred) and head.bias is None:
            yield outer, head


def fuse_loss(model: nn.Module, recipe: Recipe | None) -> None:
    """Compute head and loss together in chunks of tokens, in place; `recipe` None = no FP8."""
    for outer, head in find_plain_heads(model):
        head.__class__ = HeadWithoutLogits
        head.loss_recipe = recipe  # type: ignore[assignment]
        outer.register_forward_pre_hook(_begin_forward, with_kwargs=True)
        outer.register_forward_hook(_end_forward, always_call=True)


def _begin_forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: the head returns lazy logits if this forward has labels and trains."""
    has_labels = bind_arguments(model, args, kwargs).get("labels") is not None
    trains = model.training and torch.is_grad_enabled()
    trains = has_labels and (trains or hasattr(model, IS_SCORED))
    _get_running_forwards().append(
        RunningForward(model, model.get_output_embeddings() if trains else None)
    )


def _end_forward(model: nn.Module, _args: Any, _output: Any) -> None:
    """Forward hook: detach the hidden states of lazy logits, which get no gradient from now on."""
    forwards = _get_running_forwards()
    if not forwards or forwards[-1].model is not model:
        return  # another hook has refused the arguments
    for source in forwards.pop().sources:
        source.hidden, source.has_ended = source.hidden.detach(), True


def hook_vocabulary(model: nn.Module, tp: TensorParallel) -> list[nn.Module]:
    """Add tp collectives to embeddings and heads; return modules to shard in the vocabulary dim."""
    # Other classes, and a vocabulary that tp does not divide, are replicated.
    embeddings = list[nn.Module]()
    for outer in find_outermost_models(model):
        get = (getattr(outer, f"get_{side}_embeddings", None) for side in ("input", "output"))
        ends: list[Any] = [None if of is None else of() for of in get]
        parts = [m for m in ends if getattr(m, "weight", None) is not None]
        if any(m.weight.shape[0] % tp.size or not _is_plain_linear_or_embedding(m) for m in parts):
            continue
        for module in parts:
            if isinstance(module, nn.Embedding):
                VocabularyHooks(tp, module)
            else:
                setattr(module, TP, tp)
                module.register_forward_hook(_gather_logits)
            embeddings.append(module)
    return embeddings


def _is_plain_linear_or_embedding(module: Any) -> bool:
    """Whether a module is a linear without bias, or an embedding without max_norm and scaling."""
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.scale_grad_by_freq
    return type(module) is nn.Linear and module.bias is None


class VocabularyHooks:
    """Hooks of a vocabulary-sharded embedding: look up local ids, then all-reduce the result."""

    def __init__(self, tp: TensorParallel, embedding: nn.Embedding) -> None:
        self._tp, self._state = tp, threading.local()
        self._rows = embedding.num_embeddings // tp.size
        embedding.register_forward_pre_hook(self._localize_ids)
        embedding.register_forward_hook(self._reduce_embeddings)

    def _localize_ids(self, embedding: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Forward pre-hook: map ids and padding index to local rows; None = no local padding."""
        ids, *rest = args
        local_ids, self._state.is_other = self._tp.find_local_rows(ids, self._rows)
        padding = self._state.padding_idx = embedding.padding_idx
        if padding is not None:  # the row without a gradient
            padding -= self._tp.rank * self._rows
            embedding.padding_idx = padding if 0 <= padding < self._rows else None
        return local_ids, *rest

    def _reduce_embeddings(self, embedding: Any, _args: Any, x: Tensor) -> Tensor:
        """Forward hook: set embeddings of other ranks' ids to 0, then all-reduce."""
        embedding.padding_idx = self._state.padding_idx
        return self._tp.all_reduce(x.masked_fill(self._state.is_other[..., None], 0))


def _gather_logits(head: Any, _args: Any, logits: Tensor) -> Tensor:
    """Forward hook of a head: all-gather logits over the vocabulary; `Logits` gather on use."""
    if isinstance(logits, Logits):
        return logits
    tp: TensorParallel = getattr(head, TP)
    return tp.gather_last_dim(logits)
