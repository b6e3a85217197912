"""LoRA adapters of peft for a transformers model: `LoRAOptions`, and `add_adapters` by them.

`parallelize_moe` then shards the model with its adapters: see `lora.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from moecore.base.fields import CheckedRecord, Count
from moecore.train.optim.matrices import HEADS, ROUTERS


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRAOptions(CheckedRecord):
    """Low-rank adapters of peft in place of a change of all weights.

    Attributes:
        rank: columns of A and rows of B.
        alpha: the update B A is multiplied by alpha / rank, or with `rslora` by alpha / sqrt(rank).
        rslora: whether the scale is rank-stabilised (arXiv:2312.03732).
        target_modules: last parts of the names of linear layers with adapters; () = all linear
            layers except the head and routers.
        experts: whether the stacked matrices of experts have adapters.
    """

    rank: Count = 16
    alpha: Count = 32
    rslora: bool = False
    target_modules: tuple[str, ...] = ()
    experts: bool = True


def add_adapters(model: nn.Module, options: LoRAOptions) -> Any:
    """Add LoRA adapters to a model in place, before `parallelize_moe`; return its PeftModel.

    Raises ValueError without peft, or for a target module that the model does not have.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("[lora] must have peft installed: pip install peft") from None
    linears = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    } - (HEADS | ROUTERS)
    for name in options.target_modules:
        if name not in linears:
            raise ValueError(
                f"LoRAOptions.target_modules ({name!r}) must be linear layers of the model "
                f"({', '.join(sorted(linears))}): correct it"
            )
    experts = {
        ".".join(name.split(".")[-3:])
        for name, param in model.named_parameters()
        if param.ndim == 3 and ".experts." in name
    }
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        use_rslora=options.rslora,
        target_modules=sorted(options.target_modules or linears),
        target_parameters=sorted(experts) if options.experts else None,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)
