"""Replaces the loss of a transformers model by a `LogProbLoss` for one forward.

    model(input_ids, log_prob_loss=...)     uses the labels of the `LogProbLoss`
    the model's forward                     calls `loss_function` with the output of its head
    this module's `loss_function`           for lazy `Logits`: computes log-probabilities in chunks
                                            for logits that the model scaled or capped: reads them

Under context parallelism `context.py` slices the labels before the model and all-reduces the losses
over cp. All cp ranks compute one loss from full rows, and each rank contributes a share of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.families.transformers import stock
from moecore.families.transformers.head import IS_SCORED, Logits
from moecore.families.transformers.rows import READER, SEQUENCE
from moecore.models.log_probs import LogProbLoss

ARGUMENT = "log_prob_loss"  # keyword argument of a forward
OWN_LOSS = "_loss_function"  # attribute of a model whose loss function was set


def accept_log_prob_losses(model: nn.Module) -> None:
    """Make forwards of transformers models accept a `LogProbLoss` as argument `log_prob_loss`."""
    for outer in stock.find_outermost_models(model):
        if hasattr(outer, "get_output_embeddings"):
            outer.register_forward_pre_hook(_set_loss_function, with_kwargs=True)
            outer.register_forward_hook(_restore_loss_function, always_call=True)


def _set_loss_function(model: Any, args: Any, kwargs: dict[str, Any]) -> stock.Arguments | None:
    """Forward pre-hook: set labels and loss function of the `log_prob_loss` argument, if given."""
    if ARGUMENT not in kwargs:
        return None
    loss: LogProbLoss = kwargs[ARGUMENT]
    if (name := stock.get_loss_name(model)) != stock.CAUSAL_LOSS:
        raise NotImplementedError(
            f"log_prob_loss must be of a causal language model, whose forward calls loss_function: "
            f"the loss of {type(model).__name__} is {name or 'its own'}, so compute "
            "log-probabilities from its logits"
        )
    if kwargs.get("cu_seqlens") is not None and not hasattr(model, READER):
        raise ValueError(
            f"cu_seqlens with a log_prob_loss must be of a model after use_causal_attention(model),"
            f" because not every model keeps documents apart by position_ids: call it on the "
            f"{type(model).__name__} before parallelize_moe"
        )
    if stock.bind_arguments(model, args, kwargs).get("labels") is not None:
        raise ValueError("labels must be None with a log_prob_loss, which has its own")
    setattr(model, IS_SCORED, vars(model).get(OWN_LOSS))
    model.loss_function = partial(_compute_loss, loss)
    kwargs = {name: value for name, value in kwargs.items() if name != ARGUMENT}
    kwargs["labels"] = loss.labels_BT
    if stock.has_extra_keywords(model):
        kwargs["shift_labels"] = loss.labels_BT  # these labels are already shifted
    return args, kwargs


def _restore_loss_function(model: Any, _args: Any, _output: Any) -> None:
    if not hasattr(model, IS_SCORED):
        return
    earlier_function = getattr(model, IS_SCORED)
    delattr(model, IS_SCORED)
    if earlier_function is None:
        delattr(model, OWN_LOSS)
    else:
        model.loss_function = earlier_function


def _compute_loss(
    loss: LogProbLoss, /, logits: Tensor, labels: Tensor, *_: Any, **keywords: Any
) -> Tensor:
    """`loss_function` of transformers: compute `loss` of logits [B, T, V]; cp ranks: loss / cp."""
    if isinstance(logits, DTensor):
        raise NotImplementedError(
            "log_prob_loss must be of a model whose head is whole: use tp with a Decoder"
        )
    local_tokens = getattr(keywords.get(SEQUENCE), "local_tokens", None)
    gather: Callable[[Tensor], Tensor] = (
        (lambda x: x) if local_tokens is None else local_tokens.gather
    )
    if isinstance(logits, Logits):
        source = logits.source
        log_probs = source.multiply_gradient_by_tp(
            loss.compute_from_hidden(
                source.hidden, source.weight, labels, gather, group=source.tp_group
            )
        )
    else:
        log_probs = loss.compute_from_logits(logits, labels, gather)
    return log_probs if local_tokens is None else log_probs / local_tokens.cp.size
