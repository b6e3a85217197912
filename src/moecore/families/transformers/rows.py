"""Hooks that pass documents and padding from a transformers model's forward to its layers.

`MaskReader` passes padding to MoE layers if the model uses its own attention. `RowReader`, which
`use_causal_attention` creates, passes documents to attention layers and MoE layers:

    arguments of a forward     arguments of transformers' FlashAttention, or a `PackedBatch`
    `Sequence`                 one record of these arguments, passed to every attention layer
    attention                  reads the record (`families/transformers/attention.py`)
    MoE layers                 receive documents and padding, also when backward recomputes them

Under context parallelism cp ranks receive equal full rows; the model gets this rank's tokens.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moecore.attention.context_parallel.local_tokens import (
    ContextParallel,
    LocalTokens,
    check_document_lengths,
    select_cp_ranks,
)
from moecore.attention.sequence import Sequence, make_packed_sequence, shift_rows
from moecore.families.transformers import stock
from moecore.families.transformers.experts import get_image_mask, has_vision_experts
from moecore.families.transformers.linear_attention import SEQUENCE
from moecore.families.transformers.packing import (
    LongestPosition,
    find_one_document_problem,
    find_packing_problem,
    find_unsupported_layer,
)
from moecore.models.loss import IGNORE_INDEX, count_labels
from moecore.moe.layer import MoELayer, RoutedLayer

READER = "_moecore_rows"  # attribute of a model that has a reader
# Names of a `PackedBatch`, and of transformers' FlashAttention. Keys and queries have equal bounds.
DOCUMENTS = ("cu_seqlens", "cu_seq_lens_q")
LONGEST = ("max_seqlen", "max_length_q")
ROW_INPUTS = ("cu_seqlens", "max_seqlen", "padding_mask", "num_tokens")
TOKENS = ("input_ids", "inputs_embeds")
READ = (*DOCUMENTS, *LONGEST, "padding_mask", "num_tokens", "cu_seq_lens_k", "max_length_k")
ONE_SEQUENCE = "give rows of one sequence each"  # a fix in error texts
MASKED = ("eager", "sdpa")  # attention that reads only its mask, and no positions
Kwargs = dict[str, Any]
Choose = Callable[[Tensor], Tensor]  # selects a layer's tokens: [B, T] -> [N]


class RowReader:
    """Hooks that pass a forward's document bounds and padding to attention, as a `Sequence`."""

    def __init__(self, model: Any) -> None:
        self.cp: ContextParallel | None = None  # cp ranks; None = this rank has full rows
        self.groups: Mapping[int, ContextParallel] = {}  # cp of a forward -> its ranks
        self._model, base = model, stock.get_base_model(model)
        self._other = find_packing_problem(model) or find_one_document_problem(model)
        self._longest = LongestPosition(base)
        model.register_forward_pre_hook(_pass_divisor, with_kwargs=True)
        base.register_forward_pre_hook(self._pass_sequence, with_kwargs=True)
        self.hook_layers(model)

    def hook_layers(self, model: Any) -> None:
        """Add hooks that give the model's MoE layers document boundaries and padding mask."""
        choices = _make_token_selectors(model.base_model)
        for block in _list_entries(model.base_model):
            layers = [m for m in block.modules() if isinstance(m, RoutedLayer)]
            layers = [layer for layer in layers if not hasattr(layer, SEQUENCE)]
            for reader in (block, *block.children()) if layers else ():
                reader.register_forward_pre_hook(partial(_store_sequence, layers), with_kwargs=True)
            for layer in layers:
                setattr(layer, SEQUENCE, Sequence())
                tell = partial(_pass_stored_sequence, choices.get(layer, Tensor.flatten))
                # Reads full rows, so it runs before the hook that slices them for tp ranks.
                layer.register_forward_pre_hook(tell, with_kwargs=True, prepend=True)

    def build_sequence(self, tokens: Tensor, inputs: Kwargs) -> Sequence:
        """Return documents, padding and this cp rank's tokens; `tokens` has unsharded rows."""
        cu_seqlens = _get_first_argument(inputs, DOCUMENTS)
        longest = _get_first_argument(inputs, LONGEST)
        mask_BT, ranks = inputs.get("padding_mask"), self.select_ranks(inputs.get("cp"))
        sequence = _make_sequence(tokens, cu_seqlens, longest, self._other)
        if cu_seqlens is None and inputs.get("position_ids") is not None:
            raise ValueError(
                "position_ids must be None after use_causal_attention without cu_seq_lens_q, "
                "because documents are not looked for in them: pass both, or rows of one sequence "
                "each"
            )
        if cu_seqlens is not None or ranks is not None:
            stock.refuse_tower_inputs(
                self._model, inputs, "packed documents (cu_seqlens) and context parallelism (cp)"
            )
        if ranks is not None:
            if cu_seqlens is not None:
                check_document_lengths(cu_seqlens, ranks.size)
            shape = tokens.shape[0], tokens.shape[1]
            local_tokens = LocalTokens(ranks, shape, sequence.cu_seqlens, sequence.max_seqlen)
            sequence = replace(sequence, local_tokens=local_tokens)
        if mask_BT is not None:
            mask_BT = sequence.slice_local(mask_BT.to(tokens.device))
        return replace(sequence, padding_mask_BT=mask_BT)

    def select_ranks(self, cp: int | None) -> ContextParallel | None:
        """Return the cp ranks for the forward argument `cp`; None = no context parallelism."""
        return select_cp_ranks(cp, self.cp, self.groups)

    def _pass_sequence(self, base: nn.Module, args: Any, kwargs: Kwargs) -> stock.Arguments:
        """Forward pre-hook: replace packing arguments by a `Sequence`; slice tokens over cp."""
        tokens = get_tokens(args, kwargs)
        sequence = kwargs.get(SEQUENCE) or self.build_sequence(tokens, kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in READ}
        kwargs[SEQUENCE] = sequence
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = sequence.positions_BT
        B, T = tokens.shape[:2]
        self._longest.num_tokens = None if sequence.local_tokens is None else T
        if sequence.local_tokens is not None:
            if positions is None:
                positions = torch.arange(T, device=tokens.device)[None]
            positions = sequence.slice_local(positions.expand(B, T))
            args, kwargs = (), kwargs | {"input_ids": sequence.slice_local(tokens)}
        if positions is not None:
            kwargs["position_ids"] = positions
        return args, kwargs


class MaskReader:
    """Hooks that pass padding mask and documents only to MoE layers; attention is unchanged."""

    def __init__(self, model: Any) -> None:
        self._model, self._state, self._has_warned = model, threading.local(), False
        base: Any = model.base_model
        model.register_forward_pre_hook(_pass_divisor, with_kwargs=True)
        base.register_forward_pre_hook(self._read_row_inputs, with_kwargs=True)
        base.register_forward_hook(self._hook_backward)
        choices = _make_token_selectors(base)
        for layer in base.modules():
            if isinstance(layer, RoutedLayer):
                tell = partial(self._pass_running_sequence, choices.get(layer, Tensor.flatten))
                layer.register_forward_pre_hook(tell, with_kwargs=True, prepend=True)
        self._unchecked = {
            block
            for block in _list_entries(base)
            if any(isinstance(module, RoutedLayer) for module in block.modules())
        }
        for block in self._unchecked:
            block.register_forward_pre_hook(self._check_packed_rows, with_kwargs=True)

    def _check_packed_rows(self, block: nn.Module, args: Any, kwargs: Kwargs) -> None:
        """Forward pre-hook: check once per block that documents do not attend to each other."""
        if block not in self._unchecked or not self._model.training or hasattr(self._model, READER):
            return
        self._unchecked.discard(block)
        positions_BT, mask = kwargs.get("position_ids"), kwargs.get("attention_mask", "not told")
        if not isinstance(positions_BT, Tensor) or positions_BT.ndim != 2 or positions_BT.is_meta:
            return
        begins = (positions_BT[:, 1:] == 0).nonzero().tolist()  # (row, token before a document)
        text = self._model.config.get_text_config()
        other = find_unsupported_layer(self._model)
        of_documents = find_one_document_problem(self._model)
        if begins and of_documents is not None:
            raise ValueError(
                f"position_ids must be of rows of one sequence each for a model with "
                f"{of_documents}, which does not keep documents apart: give such rows"
            )
        if begins and other is not None:
            self._unchecked.clear()
            warnings.warn(
                f"position_ids are of several documents a row, and {other} may not keep them "
                "apart: give rows of one sequence each",
                stacklevel=2,
            )
        elif begins and text._attn_implementation in MASKED and _attends_to_next(mask, *begins[0]):
            name, implementation = type(self._model).__name__, text._attn_implementation
            raise ValueError(
                f"position_ids must be of rows of one sequence each for {name} with "
                f"{implementation!r} attention, whose mask does not read them: "
                "call use_causal_attention(model) before parallelize_moe"
            )

    def _read_row_inputs(
        self, base: nn.Module, args: Any, kwargs: Kwargs
    ) -> stock.Arguments | None:
        """Forward pre-hook: store the forward's `Sequence` and remove arguments of moecore."""
        if hasattr(self._model, READER):  # the RowReader passes padding too
            return None
        inputs = stock.bind_arguments(base, args, kwargs)
        tokens = _get_first_argument(inputs, TOKENS)
        if tokens is None:
            return None
        self._state.sequence = self._build_sequence(tokens, inputs)
        return args, {name: value for name, value in kwargs.items() if name not in ROW_INPUTS}

    def _build_sequence(self, tokens: Tensor, inputs: Kwargs) -> Sequence:
        """Return a forward's documents and padding; ValueError if attention would mix documents."""
        cu_seqlens, mask_BT = inputs.get("cu_seqlens"), inputs.get("padding_mask")
        other, fix = None, ONE_SEQUENCE
        if cu_seqlens is not None:
            of_documents = find_one_document_problem(self._model)
            other = find_packing_problem(self._model, has_row_inputs=False) or of_documents
            if find_packing_problem(self._model) is None and of_documents is None:
                fix = "call use_causal_attention(model)"
        sequence = _make_sequence(tokens, cu_seqlens, inputs.get("max_seqlen"), other, fix)
        if cu_seqlens is not None and inputs.get("position_ids") is None:
            raise ValueError(
                "cu_seqlens must come with position_ids, by which transformers keeps documents "
                "apart: pass both, or call use_causal_attention(model)"
            )
        mask = inputs.get("attention_mask")
        if mask_BT is None and isinstance(mask, Tensor) and mask.ndim == 2:
            mask_BT = mask[:, -tokens.shape[1] :] == 0  # without the keys of a cache
        elif mask_BT is None and mask is not None and cu_seqlens is None:
            self._warn_of_padding(mask)
        if mask_BT is not None:
            mask_BT = mask_BT.to(tokens.device)
        return replace(sequence, padding_mask_BT=mask_BT)

    def _warn_of_padding(self, mask: Any) -> None:
        has_layers = any(isinstance(m, RoutedLayer) for m in self._model.modules())
        if self._has_warned or not self._model.training or not has_layers:
            return
        self._has_warned = True
        kind = f"{mask.ndim} dims" if isinstance(mask, Tensor) else type(mask).__name__
        warnings.warn(
            f"attention_mask ({kind}) names no padding, so MoE layers route and count all "
            "positions: pass padding_mask ([B, T], True = padding) or cu_seqlens too",
            stacklevel=2,
        )

    def _hook_backward(self, base: nn.Module, args: Any, output: Any) -> None:
        """Forward hook: restore the `Sequence` in backward, for MoE layers that it recomputes."""
        sequence, self._state.sequence = getattr(self._state, "sequence", None), None
        if sequence is None or (sequence.padding_mask_BT is None and sequence.cu_seqlens is None):
            return
        hidden = output if isinstance(output, Tensor) else output[0]
        stock.restore_in_backward(hidden, self._state, "sequence", sequence)

    def _pass_running_sequence(
        self, select_tokens: Choose, layer: nn.Module, args: Any, kwargs: Kwargs
    ) -> stock.Arguments | None:
        """Forward pre-hook of a MoE layer: pass documents and padding of the model's forward."""
        sequence = getattr(self._state, "sequence", None)
        if sequence is None:
            return None
        return _add_document_arguments(sequence, select_tokens, layer, args, kwargs)


def _attends_to_next(mask: Any, row: int, token_idx: int) -> bool:
    """Whether token `token_idx + 1` of a row attends to token `token_idx`; mask None = causal."""
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return mask is None
    value = mask[row % len(mask), 0, token_idx + 1, token_idx]
    return bool(value if mask.dtype == torch.bool else value == 0)


class ModalityHooks:
    """Hooks that select text or image tokens for the MoE modules of a block with both kinds."""

    def __init__(self, block: nn.Module) -> None:
        self._state = threading.local()
        block.register_forward_pre_hook(self._store_image_mask, with_kwargs=True)

    def _store_image_mask(self, block: nn.Module, args: Any, kwargs: Kwargs) -> None:
        self._state.kinds_BT = get_image_mask(block, args, kwargs)

    def select_text(self, x_BT: Tensor) -> Tensor:
        """Return the values [N] of `x_BT` at text tokens. Host sync if the forward has images."""
        kinds_BT = self._state.kinds_BT
        return x_BT.flatten() if kinds_BT is None else x_BT[kinds_BT == 0]  # host sync

    def select_images(self, x_BT: Tensor) -> Tensor:
        """Return the values [N] of `x_BT` at image tokens. Host sync if the forward has images."""
        kinds_BT = self._state.kinds_BT
        return x_BT.flatten()[:0] if kinds_BT is None else x_BT[kinds_BT != 0]


def _make_token_selectors(base: nn.Module) -> dict[nn.Module, Choose]:
    """Return {MoE layer: function that selects its text or image tokens, [B, T] -> [N]}."""
    choose_of = dict[nn.Module, Choose]()
    blocks: list[Any] = [block for block in base.modules() if has_vision_experts(block)]
    for block in blocks:
        reader = ModalityHooks(block)
        choose_of |= dict.fromkeys(block.text_moe.modules(), reader.select_text)
        choose_of |= dict.fromkeys(block.vision_moe.modules(), reader.select_images)
    return choose_of


def _pass_divisor(model: nn.Module, args: Any, kwargs: Kwargs) -> stock.Arguments | None:
    """Forward pre-hook: pass the number of labels, at least 1, as `num_items_in_batch`."""
    inputs = stock.bind_arguments(model, args, kwargs)
    _refuse_lost_labels(inputs)
    number = _get_first_argument(inputs, ("num_items_in_batch", "num_tokens"))
    counts_labels = number is None and inputs.get("labels") is not None
    if counts_labels and stock.has_extra_keywords(model) and stock.has_causal_loss(model):
        number = count_labels(get_shifted_labels(inputs))
    if number is None:
        return None
    number = number.masked_fill(number == 0, 1) if isinstance(number, Tensor) else number or 1
    kwargs = {name: value for name, value in kwargs.items() if name != "num_tokens"}
    return args, kwargs | {"num_items_in_batch": number}


def _refuse_lost_labels(inputs: Kwargs) -> None:
    """Raise ValueError if a document on the CPU spans rows: labels are shifted within rows."""
    cu_seqlens, labels_BT = _get_first_argument(inputs, DOCUMENTS), inputs.get("labels")
    if labels_BT is None or cu_seqlens is None or inputs.get("shift_labels") is not None:
        return
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    B, T = labels_BT.shape
    borders = set(cu_seqlens.tolist())
    position = next((row * T for row in range(1, B) if row * T not in borders), None)
    if position is not None and B * T in borders:  # otherwise `make_packed_sequence` raises
        raise ValueError(
            f"cu_seqlens must have {position}, where a row begins, because labels are shifted "
            f"within rows ({T} tokens): end documents with rows, or pass labels "
            "that are shifted as shift_labels too"
        )


def get_shifted_labels(inputs: Kwargs) -> Tensor:
    """Return `shift_labels` [B, T] if passed, otherwise `labels` shifted left within rows."""
    shifted_BT: Tensor | None = inputs.get("shift_labels")
    return shift_rows(inputs["labels"], 1, IGNORE_INDEX) if shifted_BT is None else shifted_BT


def get_tokens(args: Any, kwargs: Kwargs) -> Tensor:
    """Return a forward's token ids or embeddings; ValueError for a mask or several `args`."""
    if kwargs.get("attention_mask") is not None:
        raise ValueError(
            "attention_mask must be None after use_causal_attention, which would ignore it: give "
            "rows without padding, or leave the model's own attention"
        )
    if len(args) > 1:
        raise ValueError(
            "arguments after input_ids must be given by name after use_causal_attention: a mask "
            "among them would be ignored"
        )
    candidates = [*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
    tokens: Tensor = next(x for x in candidates if x is not None)
    return tokens


def _get_first_argument(inputs: Kwargs, argument_names: tuple[str, ...]) -> Any:
    return next((inputs[name] for name in argument_names if inputs.get(name) is not None), None)


def _make_sequence(
    tokens: Tensor, cu_seqlens: Any, max_seqlen: Any, problem: str | None, fix: str = ONE_SEQUENCE
) -> Sequence:
    """Return the documents in rows of `tokens`; ValueError if `problem` forbids documents."""
    if cu_seqlens is None and max_seqlen is not None:
        raise ValueError(
            f"max_seqlen ({max_seqlen}) must come with cu_seqlens (None), of whose documents it is "
            "the longest: pass both or neither"
        )
    if cu_seqlens is None:
        return Sequence()
    if problem is not None:
        raise ValueError(
            f"cu_seqlens must be None for a model with {problem}, which does not keep documents "
            f"apart: {fix}"
        )
    shape = tokens.shape[0], tokens.shape[1]
    return make_packed_sequence(cu_seqlens, max_seqlen, shape, tokens.device)


def _list_entries(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in a module's outermost `nn.ModuleList`s, such as decoder layers."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _list_entries(child)


def _store_sequence(
    layers: list[RoutedLayer], reader: nn.Module, args: Any, kwargs: Kwargs
) -> None:
    """Forward pre-hook of a block: store its `Sequence` argument on the MoE `layers` in it."""
    if SEQUENCE in kwargs:
        for layer in layers:
            setattr(layer, SEQUENCE, kwargs[SEQUENCE])


def _pass_stored_sequence(
    select_tokens: Choose, layer: nn.Module, args: Any, kwargs: Kwargs
) -> stock.Arguments | None:
    """Forward pre-hook of a MoE layer: pass documents and padding that its block has stored."""
    return _add_document_arguments(getattr(layer, SEQUENCE), select_tokens, layer, args, kwargs)


def _add_document_arguments(
    sequence: Sequence,
    select_tokens: Choose,
    layer: nn.Module,
    args: Any,
    kwargs: Kwargs,
) -> stock.Arguments | None:
    """Return a MoE layer's (args, kwargs) with documents and padding; None = unchanged."""
    mask_BT = sequence.padding_mask_BT
    if isinstance(layer, MoELayer):
        keywords: Kwargs = {"cu_seqlens": sequence.cu_seqlens}
        keywords |= {} if mask_BT is None else {"padding_mask": mask_BT}
        keywords |= {} if sequence.local_tokens is None else {"cp": sequence.local_tokens.cp.size}
        return args, keywords | kwargs
    if mask_BT is None:
        return None
    x_TD, ids_TK, *rest = args
    mask_T = select_tokens(mask_BT)
    if len(mask_T) != len(x_TD):  # tokens of another tower, such as vision, without a mask
        return None
    return (x_TD, ids_TK.masked_fill(mask_T[:, None], -1), *rest), kwargs


def hook_moe_layers(model: nn.Module) -> None:
    """Add hooks that pass documents and padding to the MoE layers of transformers models."""
    for module in list(model.modules()):
        reader: RowReader | None = getattr(module, READER, None)
        if reader is not None:
            reader.hook_layers(module)
    for module in stock.find_outermost_models(model):
        MaskReader(module)
