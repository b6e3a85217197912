"""LoRA options of the commands, and `add_adapters`, which adds LoRA before `parallelize_moe`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from moecore.base.fields import CheckedRecord, Count, FieldErrors
from moecore.families.transformers.lora import PEFT_PREFIX, find_file_names
from moecore.train.optim.matrices import HEADS, ROUTERS


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRAOptions(CheckedRecord):
    """LoRA adapters of peft; all other weights are frozen.

    Attributes:
        rank: columns of A and rows of B.
        alpha: numerator of the scale of B A: alpha / rank, or with `rslora` alpha / sqrt(rank).
        rslora: whether the scale is rank-stabilised (arXiv:2312.03732).
        dora: whether a trained vector is the norm of each row of W + scale B A (arXiv:2402.09353);
            requires `experts` False.
        rank_pattern: "PATTERN=RANK" for layers of another rank, as in peft: a regular expression
            that the end of a layer's name matches. The first match counts.
        alpha_pattern: "PATTERN=ALPHA" for layers of another alpha.
        target_modules: last parts of the names of linear layers with adapters; () = all linear
            layers except the head, routers, out_proj of Mamba layers, and names that peft replaces.
        experts: whether the stacked matrices of experts have adapters.
    """

    rank: Count = 16
    alpha: Count = 32
    rslora: bool = False
    dora: bool = False
    rank_pattern: tuple[str, ...] = ()
    alpha_pattern: tuple[str, ...] = ()
    target_modules: tuple[str, ...] = ()
    experts: bool = True

    def _find_field_errors(self) -> FieldErrors:
        if self.dora and self.experts:
            yield "experts", "be False with dora (True), which peft has only for linears: set it"
        for name in ("rank_pattern", "alpha_pattern"):
            try:
                numbers = _read_patterns(getattr(self, name))
                is_valid = all(re.compile(x) and number > 0 for x, number in numbers.items())
            except (re.error, ValueError):
                is_valid = False
            if not is_valid:
                yield name, "be PATTERN=NUMBER, regular expressions with numbers >= 1: correct it"


def add_adapters(model: nn.Module, options: LoRAOptions, *names: str) -> Any:
    """Add LoRA adapters to a model on meta, before `parallelize_moe`; return its PeftModel."""
    names = names or ("default",)
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("[lora] must have peft installed: pip install peft") from None
    modules = dict(model.named_modules())
    paths = [
        name.split(".")
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    ]
    linears = {path[-1] for path in paths if not ROUTERS & {*path}} - HEADS
    linears = _drop_converted_names(model, linears)
    file_names = find_file_names(
        model, [f"{PEFT_PREFIX}{'.'.join(path)}.lora_A.weight" for path in paths]
    )
    linears -= {name.split(".")[-3] for name, file_name in file_names.items() if file_name is None}
    routers = rf"(.*\.)?({'|'.join(sorted(ROUTERS))})(\..*)?"
    has_router_linears = any(ROUTERS & {*path} and path[-1] in linears for path in paths)
    for name in options.target_modules:
        if name not in linears:
            raise ValueError(
                f"LoRAOptions.target_modules ({name!r}) must be linear layers of the model "
                f"({', '.join(sorted(linears))}): correct it"
            )
    # Fused operations of Mamba layers read the weight of out_proj, and peft may refuse it.
    defaults = linears - {
        "out_proj" for module in modules.values() if hasattr(module, "ssm_state_size")
    }
    experts = _list_expert_matrices(modules) if options.experts else set()
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        use_rslora=options.rslora,
        use_dora=options.dora,
        rank_pattern=_read_patterns(options.rank_pattern),
        alpha_pattern=_read_patterns(options.alpha_pattern),
        target_modules=sorted(options.target_modules or defaults),
        exclude_modules=routers if has_router_linears else None,
        target_parameters=sorted(experts) or None,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():  # peft's check of patterns does not know the experts' names
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match")
        adapted_model = get_peft_model(model, config, adapter_name=names[0], low_cpu_mem_usage=True)
        for name in names[1:]:
            adapted_model.add_adapter(name, config, low_cpu_mem_usage=True)
    tuner: Any = adapted_model.base_model
    tuner.set_adapter(list(names) if len(names) > 1 else names[0])
    adapted: list[str] = tuner.targeted_module_names + tuner.targeted_parameter_names
    for pattern in _read_patterns(options.rank_pattern + options.alpha_pattern):
        if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in adapted):
            raise ValueError(
                f"LoRAOptions.rank_pattern and alpha_pattern ({pattern!r}) must match a layer with "
                f"adapters, such as {adapted[0]}: correct it"
            )
    return adapted_model


def _drop_converted_names(model: Any, linears: set[str]) -> set[str]:
    """Return `linears` without the names that peft takes for experts of transformers 4.

    In models whose experts were linears, such as DeepSeek-V3, peft replaces gate_proj and up_proj
    by adapters of rank 2r on the stacked gate_up_proj, also when it loads a file. It adds no
    adapters to shared experts and dense MLPs then.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    probe = LoraConfig(target_modules=sorted(linears))
    convert_peft_config_for_transformers(probe, model, None)
    names: Any = probe.target_modules
    return {*names}


def _list_expert_matrices(modules: Mapping[str, Any]) -> set[str]:
    """Return the last three parts of the names of stacked matrices that can have adapters."""
    names = set()
    for path, module in modules.items():
        if type(module).__name__ == "Llama4TextExperts":  # which does not have the attribute
            module.is_transposed = True
        for name, param in module.named_parameters(recurse=False):
            num_matrices = getattr(module, "num_routed_experts", len(param))  # of LongCat-Flash
            if param.ndim == 3 and ".experts." in f"{path}." and len(param) == num_matrices:
                names.add(".".join([*path.split("."), name][-3:]))
    return names


def _read_patterns(entries: Sequence[str]) -> dict[str, int]:
    """Return {regular expression: number} of entries "PATTERN=NUMBER"."""
    return {name: int(number) for name, _, number in (x.rpartition("=") for x in entries)}
