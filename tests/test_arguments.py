import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from moecore import BalanceConfig, LayerLayout, MoEConfig, MoELayer, ParallelConfig, build_meshes
from moecore.base.fields import quote
from moecore.base.options.precision import Precision, Recipe
from moecore.io import (
    UpcycleOptions,
    decoder_config_from_hf,
    latest,
    load,
    load_hf,
    read_manifest,
    set_latest,
    verify,
)
from moecore.io.hf.buckets import WeightBucket
from moecore.io.hf.convert import hf_to_native, native_to_hf
from moecore.io.hf.stream import WeightStream
from moecore.io.hf.transfer import BucketHandle
from moecore.models import Decoder, preset
from moecore.moe.expert_layout import ExpertLayout
from moecore.packing import (
    CorpusLoader,
    CorpusOptions,
    CorpusSource,
    PackedBatchSampler,
    PackedCollator,
    schedule_documents,
)
from moecore.parallel import Costs, LayoutCosts, Timeline, make_schedule
from moecore.parallel.fsdp.plan import ShardPlan
from moecore.planning import CostTable, SearchRequest, TrainingRun
from moecore.planning.dry_run import DryRun
from moecore.planning.layouts import Layout
from moecore.planning.memory import MemoryPlan
from moecore.planning.record import Work
from moecore.planning.times import TimePlan
from moecore.rl import RouterReplay
from moecore.train import assign_matrices
from moecore.train.step import TrainStep
from tests.base.test_fields import RECORDS
from tests.test_api import SECTIONS

TINY = preset("tiny")
LAYER = MoEConfig(dim=16, hidden_dim=8, num_experts=4, top_k=2)
REPLAY = RouterReplay(MoELayer(LAYER))
META = Decoder(TINY, device="meta")
OPTIONS = UpcycleOptions(expansion=2, granularity=2, top_k=2)
NOTHING: dict[str, Any] = dict.fromkeys(("layers", "linears", "params", "units", "blocks"), ())
NAMES = dict.fromkeys(("model", "device_type", "dispatcher", "dispatcher_reason"), "")
SOURCES = [CorpusSource(name="a", documents=[[1]])]
ROWS = CorpusOptions(row_tokens=4)
PLAN = ShardPlan(parallel=ParallelConfig(dp_shard=1, edp_shard=1), **NOTHING, **NAMES)
TABLE = CostTable.of("h200-141")
RUN = TrainingRun(model=TINY, num_gpus=1, seq_len=8)
TOKENS = torch.ones(1, 4, dtype=torch.long)

# What is no call: types of annotations, protocols, and records that moecore itself fills.
NO_CALLS = {
    *("Adapter", "Choices", "Dispatcher", "DispatcherName", "ExpertBackend", "LossConvention"),
    *("ExchangeError", "ExpertInput", "GradientNorm", "LoadReport", "Manifest", "Meshes"),
    *("MatrixAssignment", "MoEOverrides", "WidthRates"),
    *(
        "Bins",
        "CorpusError",
        "DocumentGroup",
        "PackedBatch",
        "ScheduledBatch",
        "DocumentSchedule",
        "ContextParallelModel",
    ),
    "DynamicContextModel",
    *("MoEMetrics", "PRESETS", "Routing", "StepResult", "TensorParallelModel"),
    *("AxisPlacement", "FlatLayout", "FlatSlot", "LayerPlan", "ParamPlan", "ShardPlan", "UnitPlan"),
    *("RankBytes", "RoleBytes", "MemoryPlan", "RankMemory"),
    *(
        "Candidate",
        "Change",
        "DryRun",
        "FittingCandidate",
        "Layout",
        "OptionGain",
        "Report",
        "SearchResult",
        "StepTime",
        "TimePlan",
        "QueuedLaunch",
    ),
    *("Action", "Overlap", "PipelineError", "PipelineLayout", "Schedule", "Stage", "Timeline"),
    *("WeightBucket", "WeightStream", "WeightsVersion"),
    *("Objective", "ObjectiveResult", "TokenScores"),
    *("GRPO", "GSPO"),  # with the fields of PPO
    "MoETrainer",  # its arguments are those of transformers' Trainer
}
# Without a rule in the annotations: optimizers of torch check these in their own words.
ADAMW = ("lr", "betas", "eps", "weight_decay", "moment_dtype")
ELSEWHERE = {(optimizer, name) for optimizer in ("AdamW", "HostAdamW") for name in ADAMW}
# Types that an annotation may name for each hostile value: with one of them it may be taken.
WRONG: list[tuple[Any, str]] = [
    (None, "None|Optional|Any|object"),
    ("no such", "str|HFConfig|Any|object"),
    (b"no", "Any|object"),
    (1.5, "float|Positive|PositiveOrZero|MaxNorm|Any|object"),
    (True, "bool|Any|object"),
    (-1, "int|Seed|float|Any|object"),
    ([], "Sequence|Iterable|Collection|Optimizers|Schedulers|ParamsT|Lengths|Any|object"),
    ({}, "Mapping|MoEOverrides|HFConfig|ParamsT|Iterable|Collection|dict|Any|object"),
    ([1], r"Any|object|Iterable|Lengths|Sequence\[(float|StageBytes)"),
    ({1: 2}, "Any|object|Iterable"),
    (object(), "Any|object"),
    (MoEConfig, "type|Callable|AssignmentRule|Computation|OwnActivation|Progress|Any|object"),
    (Path("no/such"), "PathLike|HFConfig|Any|object"),
    (torch.ones(2), "Tensor|Any|object"),
]


METHODS: tuple[tuple[Any, str], ...] = (
    (ParallelConfig(), "resolve"),
    (MoELayer(LAYER), "init_weights"),
    (MoELayer(LAYER), "set_balance"),
    (META, "init_weights"),
    (META, "forward"),
    (META, "generate"),
    (OPTIONS, "moe_config"),
    *((PackedBatchSampler([1], 4), n) for n in ("set_epoch", "state_dict", "load_state_dict")),
    (CorpusLoader(SOURCES, ROWS), "load_state_dict"),
    (schedule_documents([1], ranks=1, max_tokens=1), "select_rank_groups"),
    *(
        (TABLE, n)
        for n in ("of", "read", "with_gpu", "write", "extend", "seconds", "find_limiting_rate")
    ),
    *((REPLAY, n) for n in ("choices", "replay", "select", "from_engine")),
)


class Group:
    """What is asked of a group of `send_weights`."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        """Do nothing."""

    def size(self) -> int:
        """Return a number."""
        return 2


# Valid values of parameters without a default, by name, and where one name has several types.
VALID: dict[str, Any] = {
    **dict(precision=Precision(recipe=Recipe()), rule=max, make=max, computation=max),
    **dict(model=META, meshes=None, parallel=ParallelConfig(), path="no", root="no", out="no"),
    **dict(optimizer=None, step=1, keep=1, name="tiny", config=TINY, options=OPTIONS, key="a"),
    **dict(layout=LayerLayout(), router={}, experts={}, dense={}, state={}, mlps=[], blocks=[]),
    **dict(names="dcp", plan=PLAN, base=META),
    **dict(moe=LAYER, latent_dim=8),
    **dict(loads_E=TOKENS[0], num_ranks=1, layer=MoELayer(LAYER), order_E=TOKENS[0]),
    **dict(optimizers=None, loads=None),
    **dict(rows=1, lengths=[1], bin_tokens=4, max_tokens=4, ranks=1, cp=1, rank=0, epoch=0),
    **dict(sizes=[1], bytes_per_second=1.0),
    **dict(table=CostTable.of("h200-141")),
    **dict(gpu="h200-141", points=[], source="here", work=Work("copy", "copy", 0, 1, (), "uint8")),
    **dict(
        documents=[[1]], sources=SOURCES, prefix="no", costs=[1.0], cu_seqlens=torch.tensor([0, 2])
    ),
    **dict(pp=1, chunks=1, num_micro_batches=1, text="EtL", num_layers=1, num_stages=1),
    "schedule": make_schedule("1f1b", pp=1, chunks=1, num_micro_batches=1),
    "timeline": Timeline(spans=((),)),
    "costs": [1.0],
    "batch": PackedCollator(row_tokens=4)([[1]]),
    "assignment": assign_matrices(META),
    "run": RUN,
    "request": SearchRequest(model=TINY, num_gpus=1, seq_len=8),
    "folding": Layout(),
    **dict(group=Group(), device="cpu", handle=BucketHandle((), print, ())),
    "stream": object.__new__(WeightStream),
    "bucket": WeightBucket.empty([], torch.device("cpu")),
    **dict(forward_backward=print, choices={}, params=[], forward=None, max_norm=1.0),
    **dict(hidden_ND=TOKENS, weight_VD=TOKENS, labels_N=TOKENS, tokens_BT=TOKENS, seq_len=1),
    **dict(labels_BT=TOKENS, adapter_ids_B=TOKENS, num_labels_N=TOKENS),
    **dict(rewards_n=TOKENS[0].float(), groups_n=[0] * 4, estimator="k1"),
    **dict(log_probs_N=torch.ones(2), ref_log_probs_N=torch.ones(2)),
    **dict(
        world_size=1, balance=BalanceConfig(), max_new_tokens=1, indices=TOKENS, dim=1, hidden_dim=4
    ),
}
# Those of one function alone.
OWN: dict[str, dict[str, Any]] = {
    **{n: {"config": LAYER} for n in ("MoELayer", "RoutedExperts", "adopt", "upcycle_mlp")},
    "adopt_experts": {"config": LAYER, "layout": ExpertLayout()},
    **{n: {"config": {}} for n in ("native_to_hf", "dcp_to_native", "native_to_dcp")},
    "make_schedule": {"name": "1f1b"},
    "CorpusLoader": {"options": ROWS},
    "ScheduledLoader": {"options": ROWS},
    "time_step": {
        "step": DryRun(
            rank=0, resident_bytes=0, peak=0, buffers=0, pages=0, queued=(), starts=(), offloads={}
        )
    },
    "next_change": {"plan": TimePlan(run=RUN, gpu="h100-80", seconds=1.0, parts={}, timeline=None)},
    "draw_memory": {"plan": MemoryPlan(run=RUN, ranks=())},
    "balanced_layout": {"costs": LayoutCosts(layers=(1.0,))},
    "simulate": {"costs": Costs.from_forward((1.0,))},
    "offload_fractions": {"costs": Costs.from_forward((1.0,))},
    "Engine": {"step": object.__new__(TrainStep)},
    "StateOffload": {"optimizer": torch.optim.SGD(META.parameters())},
}


def public_calls() -> dict[str, Callable[..., Any]]:
    """Return what is public and takes arguments, by name."""
    modules = [import_module(name) for name in SECTIONS]
    left_out = NO_CALLS | {record.__name__ for record, _ in RECORDS}
    found = {n: getattr(m, n) for m in modules for n in m.__all__ if n not in left_out}
    return found | {f"{type(o).__name__}.{n}": getattr(o, n) for o, n in METHODS}


def wrong_calls() -> Iterator[tuple[str, str, Callable[..., Any], dict[str, Any]]]:
    """Yield function, parameter, function and arguments with one value of a wrong type."""
    meshes = build_meshes(ParallelConfig(), "cpu")
    for name, function in public_calls().items():
        parameters = inspect.signature(function).parameters.values()
        needed = [p.name for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
        valid = {n: VALID[n] for n in needed} | ({"meshes": meshes} if "meshes" in needed else {})
        valid |= {n: value for n, value in OWN.get(name, {}).items() if n in needed}
        for parameter in parameters:
            allowed = str(parameter.annotation)
            if parameter.kind == parameter.VAR_KEYWORD or (name, parameter.name) in ELSEWHERE:
                continue
            for value, words in WRONG:
                if not re.search(rf"\b({words})\b", allowed):
                    yield name, parameter.name, function, valid | {parameter.name: value}


@pytest.mark.usefixtures("no_group_left")
def test_a_wrong_type_of_any_argument_is_one_line_that_names_it(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # for paths of calls that should have been refused
    problems, number = [], 0
    for name, parameter, function, arguments in wrong_calls():
        number += 1
        what = f"{name}({parameter}={quote(arguments[parameter])})"
        try:
            made = function(**arguments)
            if hasattr(made, "__enter__"):
                made.__enter__()
            problems.append(f"{what} is taken")
        except ValueError as error:
            text = str(error)
            if "\n" in text or len(text) > 500 or not text.startswith(f"{parameter} ("):
                problems.append(f"{what}: {text!r}")
        except Exception as error:
            problems.append(f"{what}: {error!r}")
    assert not problems, f"{len(problems)} of {number}: " + "\n".join(problems[:40])
    assert number > 1500, number


@pytest.mark.parametrize(
    "function",
    [
        lambda path: load(path, META),
        lambda path: load_hf(path, META),
        lambda path: hf_to_native(path, path / "run"),
        lambda path: native_to_hf(path, path / "hf", config={}),
        *(decoder_config_from_hf, read_manifest, set_latest, verify),
    ],
)
def test_a_path_that_is_not_there_is_one_line_that_names_it(function, tmp_path) -> None:
    path = tmp_path / "no such"
    with pytest.raises((ValueError, OSError)) as caught:
        function(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert latest(path) is None and not path.exists()


def test_what_an_engine_gives_must_be_numbers() -> None:
    with pytest.raises(ValueError, match=r"^indices \('no such'\) must be integers, a tensor"):
        REPLAY.from_engine("no such")
