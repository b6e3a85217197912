import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

import moecore
from moecore import BalanceConfig, MoEConfig, MoELayer
from moecore.base.fields import (
    Bound,
    CheckedRecord,
    Count,
    FieldErrors,
    OneOf,
    Positive,
    check_value,
    quote,
)
from moecore.base.options.dispatch import NVLinkOptions
from moecore.base.options.layer import CapacityConfig
from moecore.base.options.precision import Recipe
from moecore.kernels.rows.activation import ActivationOptions
from moecore.models.config import DecoderConfig, MLAConfig
from moecore.planning import CostTable
from moecore.planning.gpus import GPUS
from moecore.planning.record import Work
from moecore.rl import PPO
from moecore.train import MatrixCut


@dataclass(frozen=True, kw_only=True)
class Window(CheckedRecord):
    size: Count
    share: Annotated[float, Bound(">=", 0), Bound("<", 1), "use 0.5"] = 0.0
    shape: Literal["flat", "hann"] | None = None
    places: tuple[Count, ...] = ()
    pair: tuple[float, float] = (0.0, 1.0)
    dtype: Annotated[torch.dtype, OneOf((torch.float32, torch.bfloat16))] = torch.float32
    name: str = ""
    flag: bool = False
    open: Annotated[Count | Literal[-1], "use -1 for the rest"] = -1

    def _find_field_errors(self) -> FieldErrors:
        if self.share > self.size / 8:
            yield "share", f"be <= size ({self.size}) / 8: lower it"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 0}, "size (0) must be a whole number >= 1: pass an int"),
        ({"size": 2**31}, "size (2147483648) must be a whole number >= 1 and <= 2147483647: pass"),
        ({"share": 1}, "share (1) must be a finite number >= 0 and < 1: use 0.5"),
        ({"share": float("nan")}, "share (nan) must be a finite number >= 0 and < 1: use 0.5"),
        ({"share": 0.5}, "share (0.5) must be <= size (2) / 8: lower it"),
        ({"shape": "a\nb"}, r"shape ('a\nb') must be one of 'flat', 'hann' or None: choose one"),
        ({"places": (1, 0)}, "places ((1, 0)) must be a tuple, each a whole number >= 1: pass"),
        ({"pair": (0.0,)}, "pair ((0.0,)) must be a tuple of 2, each a finite number: pass"),
        ({"dtype": "bf16"}, "dtype ('bf16') must be one of torch.float32, torch.bfloat16: choose"),
        ({"name": 3}, "name (3) must be a string: pass a str"),
        ({"flag": torch.ones(2, 2)}, "flag (tensor([[1., 1.], [1., 1.]])) must be True or False:"),
        ({"flag": np.True_}, "must be True or False: pass a bool"),
        ({"open": -2}, "open (-2) must be a whole number >= 1 or -1: use -1 for the rest"),
    ],
)
def test_messages(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Window(**{"size": 2} | values)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("Window.")


def test_what_is_taken() -> None:
    Window(size=1, shape="flat", places=(1, 2), pair=(0, 1e30), name="a\nb", open=3)
    check_value("rate", 1, float)
    message = r"^rate \(-1\) must be a finite number > 0: pass a float$"
    with pytest.raises(ValueError, match=message):
        check_value("rate", -1, Annotated[float, Bound(">", 0)])
    with pytest.raises(TypeError, match=r"must be one that base/fields\.py knows"):
        check_value("f", 1, "int")
    check_value("f", len, Callable[[], int])
    with pytest.raises(ValueError, match=r"^f \(1\) must be a function: pass a function$"):
        check_value("f", 1, Callable[[], int])


@pytest.mark.parametrize("value", [2, np.float64(0.5), np.float64(2)])
def test_a_float_field_stores_a_float(value: Any) -> None:
    for stored in (
        MoEConfig(**LAYER, routed_scaling_factor=value).routed_scaling_factor,
        PPO(clip_high=value).clip_high,  # or None
        NVLinkOptions(row_factor=value).row_factor,  # or "exact"
        Window(size=2, pair=(0.0, value)).pair[1],
    ):
        assert type(stored) is float and stored == value
    assert Window(size=2, open=3).open == 3 and type(Window(size=2, share=0).share) is float


@pytest.mark.parametrize(
    ("value", "relation"),
    [
        (10**30, "a finite number, as an int at most 9007199254740992: pass a float"),
        (2**53 + 1, "a finite number, as an int at most 9007199254740992: pass a float"),
        (10**400, "a finite number > 0"),
        *(
            (value, "a finite number > 0")
            for value in (0, -1, math.nan, -math.inf, True, Fraction(1, 2), Decimal(1))
        ),
        *((np.float32(0.5), "a finite number > 0"), (np.int64(2), "a finite number > 0")),
        (math.inf, "a finite number > 0"),
    ],
)
def test_a_float_field_refuses_other_numbers(value: Any, relation: str) -> None:
    with pytest.raises(ValueError) as caught:
        MoEConfig(**LAYER, routed_scaling_factor=value)
    message = str(caught.value)
    assert message.startswith("MoEConfig.routed_scaling_factor (") and "\n" not in message
    assert relation in message
    with pytest.raises(ValueError, match=r"^tau "):  # an argument of a function likewise
        check_value("tau", value, Positive)


def test_a_value_is_shown_in_one_short_line() -> None:
    assert quote("a\u2028b\n") == r"'a\u2028b\n'" and quote(10**5000) == "a value of type int"
    assert len(quote(torch.ones(50, 50))) == 80 and "\n" not in quote(torch.ones(50, 50))


class Hostile:
    """No truth, no equality, no text."""

    def _refuse(self, *_: object) -> Any:
        raise RuntimeError("do not ask me")

    __bool__ = __eq__ = __repr__ = __len__ = _refuse  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


SRC = Path(moecore.__file__).parent
LAYER: dict[str, Any] = dict(dim=16, hidden_dim=8, num_experts=8, top_k=2)
LINEAR: dict[str, Any] = dict(num_k_heads=2, num_v_heads=4, head_k_dim=8, head_v_dim=8)
MLA = MLAConfig(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
DECODER: dict[str, Any] = dict(
    vocab_size=32, dim=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8
)
WORK: dict[str, Any] = dict(
    name="aten.mm", kind="product", flops=16, num_bytes=24, shape=(2, 2, 2), dtype="bfloat16"
)
MUON: dict[str, Any] = dict(lr=0.1, weight_decay=0.1, momentum=0.9, nesterov=True, eps=1e-7)
MUON |= dict(ns_coefficients=(3.0, -4.0, 2.0), ns_steps=5, adjust_lr_fn="original")
RUN: dict[str, Any] = dict(model=DecoderConfig(**DECODER, mlp_hidden_dim=8), num_gpus=4, seq_len=8)
H200 = replace(CostTable.of("h200-141"), points=())
TOKENS = torch.ones(2).long()
# Valid arguments of each record that has no default for every field, by the name of its class.
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "MoEConfig": [
        LAYER,
        LAYER | dict(score_function="sigmoid", expert_bias=True, shared_hidden_dim=8),
        LAYER | dict(num_groups=4, top_groups=2, normalize_weights=False),
    ],
    "ParamGroup": [{"pattern": "*"}],
    "CapacityConfig": [{"factor": 1.0}],
    "MatrixCut": [{"sizes": (2, 4)}],
    "MatrixLayout": [dict(batch=1, rows=6, columns=4, sections=MatrixCut(sizes=(2, 4)))],
    "YarnConfig": [dict(factor=2.0, original_max_seq_len=64)],
    "SparseKeysConfig": [dict(num_heads=2, head_dim=4, top_k=3)],
    **{name: [LINEAR] for name in ("LinearAttentionConfig", "GatedDeltaConfig", "Mamba2Config")},
    "MLAConfig": [{f.name: getattr(MLA, f.name) for f in fields(MLA)}],
    "DecoderConfig": [DECODER | dict(moe=MoEConfig(**LAYER)), DECODER | dict(mlp_hidden_dim=8)],
    "UpcycleOptions": [dict(expansion=2, granularity=2, top_k=2)],
    "ActivationOptions": [{"kind": "swiglu"}],
    "ExpertMLPOptions": [{"activation": ActivationOptions(kind="swiglu")}],
    "Precision": [{"recipe": Recipe()}],
    "Distillation": [{"teacher": Path("teacher")}],
    "MeasuredCost": [dict(lengths=(2, 4), seconds={1: (1.0, 2.0)})],
    "PackedCollator": [{"row_tokens": 4}],
    "ScheduledCollator": [{"max_tokens": 4}],
    "CorpusOptions": [{"row_tokens": 4}],
    "CorpusSource": [{"name": "a", "documents": [[1]]}],
    "AdamWOptions": [dict(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)],
    "MuonOptions": [MUON],
    "LayoutCosts": [{"layers": (1.0, 2.0)}],
    "Costs": [dict.fromkeys(("forward", "backward_inputs", "backward_weights"), (1.0, 2.0))],
    "TrainingRun": [RUN],
    "SearchRequest": [RUN],
    "TransformersModel": [{"values": "{}", "source": "DIR"}],
    "Work": [WORK],
    "Point": [dict(work=Work(**WORK), seconds=1.0)],
    "ExposedShare": [dict(share=0.3, gpu="h200-141", record="tp/a.jsonl")],
    "CostTable": [{f.name: getattr(H200, f.name) for f in fields(H200)}],
    "Gpu": [{f.name: getattr(GPUS["h200-141"], f.name) for f in fields(GPUS["h200-141"])}],
    "StoredFile": [dict(size=8, sha256="0" * 64)],
    "ManifestFacts": [dict(step=1, world_size=1, versions={}, config=None)],
    "OwnObjective": [{"function": print}],
    "LogProbLoss": [dict(labels_BT=TOKENS[None], function=print)],
    "Rollouts": [
        dict(tokens_N=TOKENS, cu_seqlens=torch.tensor([0, 2]), response_mask_N=TOKENS.cumsum(0) > 1)
    ],
    "StageLength": [dict(name="short", steps=1)],
    "SourceOptions": [{"path": "a.jsonl"}],
    "SamplingOptions": [dict(reward="rewards:length")],
}
VALUES: list[Any] = [
    *(True, False, None, 0, 1, -1, 2, 3, 4, 8, 2**31, 2**63, 10**400, -(10**5000)),
    *(0.0, -0.0, 0.5, 1.0, 2.5, -0.1, 1e-320, 1e18, 1e38, 1e39, 1e300),
    *(float("nan"), float("inf"), 3 + 4j, 1e6, 1e-9),
    *("", "False", "no", "2", "a\nb", "x" * 500, b"relu", "sigmoid", "post", "relu2", "quantile"),
    *("clamped_swiglu", "sinkhorn", "expert_choice", "position", "float64", "interleaved"),
    *(np.array([1, 2]), np.array([]), np.array(2), np.True_, np.int64(2), np.float64(0.5)),
    *(torch.tensor(1), torch.tensor(True), torch.ones(2, 2), torch.tensor([]), torch.float32),
    *((), (0,), (0, 1), (1, 0), (0.9, 1.0), [], [1], {}, set(), object(), int, len, Hostile()),
    *(MoEConfig, CapacityConfig, CapacityConfig(factor=1.5, eval_factor=1e6), MLA),
    *(CapacityConfig(factor=1e-300), CapacityConfig(factor=0.5, drop="position", pad=True)),
    *(BalanceConfig(micro_batch_coef=1e38, sequence_coef=1e38, z_loss_coef=1e38),),
    *(BalanceConfig(bias_update_rate=1e38), BalanceConfig(global_batch_coef=0.1)),
    BalanceConfig(bias_update_rate=1.0, bias_update="quantile", bias_per_micro_batch=True),
]


def find_records() -> list[tuple[type, dict[str, Any]]]:
    """Return every record of choices in src, a CheckedRecord, with its valid arguments."""
    classes: list[tuple[str, set[str], str]] = []
    for file in SRC.rglob("*.py"):
        module = ".".join(file.relative_to(SRC.parent).with_suffix("").parts)
        for name, bases in re.findall(r"^class (\w+)\((.*?)\):", file.read_text(), re.M | re.S):
            classes.append((name, set(re.findall(r"\w+", bases)), module))
    found: dict[str, str] = {}
    bases = {"CheckedRecord"}
    while more := {name: m for name, of, m in classes if of & bases and name not in found}:
        found |= more
        bases |= more.keys()
    assert found.keys() >= ARGUMENTS.keys()
    names = sorted(found, key=lambda name: (name != "MoEConfig", name))
    records = {name: getattr(import_module(found[name]), name) for name in names}
    return [(records[name], valid) for name in names for valid in ARGUMENTS.get(name, [{}])]


RECORDS = find_records()


def argument_sets() -> Iterator[tuple[type, dict[str, Any], set[str]]]:
    """Yield record, arguments and those that were drawn: first each value of each field alone."""
    for record, valid in RECORDS:
        for field in fields(record):
            for value in VALUES:
                yield record, valid | {field.name: value}, {field.name}
    draw = random.Random(0)
    for _ in range(3000):
        record, valid = RECORDS[draw.randrange(3 if draw.random() < 0.7 else len(RECORDS))]
        names = [field.name for field in fields(record)]
        drawn = {name: draw.choice(VALUES) for name in draw.sample(names, min(3, len(names)))}
        yield record, valid | drawn, set(drawn)


def trains(config: MoEConfig) -> None:
    layer = MoELayer(config)
    layer.init_weights(std=0.1, key="moe", seed=0)
    layer.get_part("experts").set_backend("sequential")  # of any dims
    x = torch.randn(2, 3, config.dim, requires_grad=True)
    layer(x).sum().backward()
    with torch.no_grad():
        layer.eval()(x)


def test_hostile_arguments_are_one_line_or_a_layer_that_trains() -> None:
    torch.manual_seed(0)
    problems, num_built, distinct = [], 0, set()
    for record, arguments, drawn in argument_sets():
        what = f"{record.__name__}({', '.join(f'{n}={quote(arguments[n])}' for n in drawn)})"
        try:
            built = record(**arguments)
        except (ValueError, NotImplementedError) as error:
            message = str(error)
            if "\n" in message or len(message) > 500 or not any(n in message for n in drawn):
                problems.append(f"{what}: {message!r}")
            continue
        except Exception as error:
            problems.append(f"{what}: {error!r}")
            continue
        num_built += 1
        if not isinstance(built, MoEConfig) or built in distinct:
            continue
        distinct.add(built)
        if len(distinct) % 2:  # the others would take as long again
            continue
        try:
            trains(built)
        except Exception as error:
            problems.append(f"{what}: forward: {error!r}")
    assert not problems, f"{len(problems)}: " + "\n".join(problems[:20])
    assert num_built > 500 and len(distinct) > 200, (num_built, len(distinct))
