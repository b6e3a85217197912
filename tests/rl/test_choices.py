from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moecore import MoEConfig
from moecore.moe.routed_experts import RoutedExperts
from moecore.rl import RouterReplay
from tests.moe.moe_cases import make_layer
from tests.rl import replay_cases

CONFIG = MoEConfig(dim=16, hidden_dim=8, num_experts=6, top_k=2)


class TwoLayers(nn.Module):
    """MoE, dense, MoE; the second only where asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = make_layer(CONFIG, seed=1)
        self.dense = nn.Linear(16, 16)
        self.second = make_layer(CONFIG, seed=2)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        x = x + self.first(x)
        x = x + self.dense(x)
        return x + self.second(x) if both else x


@pytest.fixture
def replay() -> RouterReplay:
    torch.manual_seed(0)
    return RouterReplay(TwoLayers())


def random_ids(*shape: int, E: int = 6, K: int = 2) -> Tensor:
    """Distinct ids in a row, [*shape, K]."""
    return torch.rand(*shape, E).argsort(-1)[..., :K]


def ids(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


GOOD = ids([[0, 1], [5, -1], [-1, -1]])


BAD: dict[str, tuple[Any, str]] = {
    "missing": ({"first": [GOOD]}, r"choices \(of 1 layers\) must have layer 'second'"),
    "unknown": (
        {"first": [GOOD], "second": [GOOD], "third": []},
        r"choices\['third'\] must name one of the layers 'first', 'second'",
    ),
    "columns": (
        {"first": [GOOD], "second": [GOOD, GOOD[:, :1]]},
        r"choices\['second'\]\[1\] \(3, 1\) must have the shape \[tokens, 2\]",
    ),
    "dims": ({"first": [GOOD[0]], "second": [GOOD]}, r"choices\['first'\]\[0\] \(2,\) must have"),
    "dtype": (
        {"first": [GOOD.float()], "second": [GOOD]},
        r"choices\['first'\]\[0\] \(torch.float32\) must be integers",
    ),
    "high": (
        {"first": [ids([[0, 1], [2, 6]])], "second": [GOOD]},
        r"choices\['first'\]\[0\]\[1, 1\] \(6\) must lie in \[0, num_experts \(6\)\), or be -1",
    ),
    "low": (
        {"first": [GOOD], "second": [GOOD, ids([[-2, 1]])]},
        r"choices\['second'\]\[1\]\[0, 0\] \(-2\) must lie in",
    ),
    "wraps": (
        {"first": [torch.tensor([[2**32, 1]])], "second": [GOOD]},
        r"choices\['first'\]\[0\]\[0, 0\] \(4294967296\) must lie in",
    ),
    "repeated": (
        {"first": [ids([[0, 1], [3, 3]])], "second": [GOOD]},
        r"choices\['first'\]\[0\]\[1\] \(\[3, 3\]\) must not repeat an expert",
    ),
}


def refused(replay, message, choices, error=ValueError, **options) -> None:
    """Hold that a replay is an error before any forward, and leaves no router changed."""
    with pytest.raises(error, match=message), replay.replay(choices, **options):
        pytest.fail("must be refused on entry")
    assert not taken(replay)


def taken(replay: RouterReplay) -> bool:
    return any(layer.get_part("router").tape is not None for layer in replay.layers.values())


@pytest.mark.parametrize("name", BAD)
def test_bad_choices_are_refused_before_any_forward(name: str, replay: RouterReplay) -> None:
    choices, message = BAD[name]
    refused(replay, message, choices)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"first": [GOOD.float()]}, r"weights \(of 'first'\) must have the layers and forwards"),
        ({"first": [], "second": [GOOD.float()]}, r"must have the layers and forwards"),
        (
            {"first": [torch.ones(3, 2)], "second": [torch.ones(3, 1)]},
            r"weights\['second'\]\[0\] \(torch.float32 \(3, 1\)\) must be floating \(3, 2\)",
        ),
        (
            {"first": [torch.ones(3, 2)], "second": [GOOD]},
            r"weights\['second'\]\[0\] \(torch.int32 \(3, 2\)\) must be floating",
        ),
        (
            {"first": [torch.full((3, 2), torch.nan)], "second": [torch.ones(3, 2)]},
            r"weights\['first'\]\[0\]\[0, 0\] \(nan\) must be finite and >= 0",
        ),
    ],
)
def test_bad_weights_are_refused_before_any_forward(weights, message, replay) -> None:
    refused(replay, message, {"first": [GOOD], "second": [GOOD]}, weights=weights)


def test_experts_that_choose_have_a_column_each() -> None:
    layer = make_layer(replace(CONFIG, assignment="expert_choice"))
    replay, wrong = RouterReplay(layer), torch.full((3, 6), -1)
    wrong[2, 4] = 3
    refused(replay, r"\[2, 4\] \(3\) must be e or -1 in column e", {"": [wrong]})
    message = r"unrecorded \('route'\) must be 'drop'"
    refused(replay, message, {"": []}, NotImplementedError, unrecorded="route")


def test_forward_without_an_entry(replay: RouterReplay) -> None:
    choices = {"first": [GOOD, GOOD], "second": [GOOD]}
    x = torch.randn(3, 16)
    message = r"choices\['second'\] \(1 forwards\) must have forward 1"
    with pytest.raises(ValueError, match=message), replay.replay(choices):
        replay.model(x)
        replay.model(x)
    assert not taken(replay)


def test_forward_of_other_tokens(replay: RouterReplay) -> None:
    message = r"choices\['first'\]\[0\] \(3 tokens\) must have the tokens of forward 0 \(4\)"
    choices = {"first": [GOOD], "second": [GOOD]}
    with pytest.raises(ValueError, match=message), replay.replay(choices):
        replay.model(torch.randn(4, 16))
    assert not taken(replay)


def test_entries_that_are_left(replay: RouterReplay) -> None:
    choices, x = {"first": [GOOD], "second": [GOOD]}, torch.randn(3, 16)
    message = r"choices\['second'\] \(1 forwards\) must all be replayed, but forward 0 was not"
    with pytest.raises(RuntimeError, match=message), replay.replay(choices):
        replay.model(x, both=False)
    assert not taken(replay)
    with replay.replay(choices, strict=False):
        replay.model(x, both=False)
    with pytest.raises(KeyError, match="first of all"), replay.replay(choices):
        raise KeyError("first of all")


def test_one_at_a_time_and_everything_restored(replay: RouterReplay) -> None:
    choices, x = {"first": [GOOD], "second": [GOOD]}, torch.randn(3, 16)
    before = replay.model(x)
    hooks = (len(replay.model._forward_hooks), len(replay.model._forward_pre_hooks))
    taken_already = r"router of layer 'first' must not be recorded or replayed already"
    with replay.record():
        with pytest.raises(ValueError, match=taken_already), replay.replay(choices):
            pytest.fail("must be refused on entry")
        with pytest.raises(ValueError, match=taken_already), replay.record():
            pytest.fail("must be refused on entry")
        replay.model(x)
    assert len(replay.choices()["first"]) == 1
    with pytest.raises(ZeroDivisionError), replay.replay(choices):
        assert taken(replay)
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), replay.record():
        raise ZeroDivisionError
    with pytest.raises(ValueError, match=r"choices \(None\) must have been recorded"):
        replay.choices()
    assert not taken(replay)
    assert hooks == (len(replay.model._forward_hooks), len(replay.model._forward_pre_hooks))
    assert torch.equal(replay.model(x), before)


def test_no_forward_after_one_that_failed(replay: RouterReplay) -> None:
    choices = {"first": [GOOD] * 2, "second": [GOOD] * 2}
    message = "forward of TwoLayers must not follow one that failed"
    with pytest.raises(RuntimeError, match=message), replay.replay(choices):
        with pytest.raises(ValueError, match="must have the tokens of forward 0"):
            replay.model(torch.randn(5, 16))
        replay.model(torch.randn(3, 16))


CALLS: dict[str, tuple[Callable[[RouterReplay], Any], str]] = {
    "no MoE layer": (
        lambda replay: RouterReplay(nn.Linear(2, 2)),
        r"model \(Linear\) must hold MoELayers: call parallelize_moe",
    ),
    "routers of the model": (
        lambda replay: RouterReplay(nn.ModuleDict({"mlp": RoutedExperts(CONFIG)})),
        r"must hold MoELayers: the experts 'mlp' have a router of the model itself",
    ),
    "layer name": (
        lambda replay: RouterReplay(replay.model, layers=["dense"]),
        r"layers \('dense'\) must be one of 'first', 'second'",
    ),
    "select outside": (lambda replay: replay.select(0), r"select\(0\) must be called inside"),
    "engine dims": (
        lambda replay: replay.from_engine(random_ids(2, 3)),
        r"indices \(2, 3, 2\) must be \[batch, sequence, 2 layers, top_k\]",
    ),
    "engine layers": (
        lambda replay: replay.from_engine(random_ids(2, 3, 3)),
        r"indices \(2, 3, 3, 2\) must be \[batch, sequence, 2 layers, top_k\].*None for those",
    ),
    "engine names": (
        lambda replay: replay.from_engine(random_ids(2, 3, 2), ["first", "first"]),
        r"layer_names \(\['first', 'first'\]\) must name each of 'first', 'second' once",
    ),
    "engine top_k": (
        lambda replay: replay.from_engine(random_ids(2, 3, 2, K=3)),
        r"indices\[..., 0, :\] of layer 'first', row \(6, 3\) must have the shape \[tokens, 2\]",
    ),
    "engine range": (
        lambda replay: replay.from_engine(random_ids(2, 3, 2) + 6),
        r"indices\[..., 0, :\] of layer 'first', row\[0, 0\] \(\d+\) must lie in \[0, num_experts",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_cannot_be(name: str, replay: RouterReplay) -> None:
    call, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        call(replay)


def test_options_that_do_not_exist(replay: RouterReplay) -> None:
    choices = {"first": [GOOD], "second": [GOOD]}
    message = r"unrecorded \('guess'\) must be one of 'drop', 'route'"
    refused(replay, message, choices, unrecorded="guess")
    with replay.replay(choices, strict=False), pytest.raises(ValueError, match=r"\(-1\) must be"):
        replay.select(-1)


def test_recordings_are_copies(replay: RouterReplay) -> None:
    """What is replayed is what was given, whatever happens to the tensors afterwards."""
    x = torch.randn(3, 16)
    given = {"first": [GOOD.clone()], "second": [GOOD.clone()]}
    with replay.replay(given):
        expected = replay.model(x)
    with replay.replay(given):
        given["first"][0].fill_(0)
        assert torch.equal(replay.model(x), expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_engine_layout(dtype: Any, replay: RouterReplay) -> None:
    indices_BSLK = random_ids(2, 5, 2).numpy().astype(dtype)
    choices = replay.from_engine(indices_BSLK)
    for i, name in enumerate(["first", "second"]):
        assert choices[name][0].dtype == torch.int32
        assert choices[name][0].tolist() == indices_BSLK[:, :, i].reshape(10, 2).tolist()


def test_engine_with_dense_layers_another_order_and_several_forwards(replay: RouterReplay) -> None:
    every = [random_ids(2, 5, 3), random_ids(1, 4, 3)]
    every[0][1, 3:] = -1
    choices = replay.from_engine(every, ["second", None, "first"])
    assert list(choices) == ["first", "second"]
    for forward, indices_BSLK in enumerate(every):
        assert torch.equal(choices["first"][forward], indices_BSLK[:, :, 2].flatten(0, 1).int())
        assert torch.equal(choices["second"][forward], indices_BSLK[:, :, 0].flatten(0, 1).int())


def test_tokens_that_the_engine_did_not_run() -> None:
    """ "drop" leaves them to the shared expert, "route" to the router as it is."""
    model, (x,) = replay_cases.make_model(replay_cases.CONFIGS["shared"]), replay_cases.batches(1)
    replay = RouterReplay(model)
    gaps = replay_cases.recorded(model, [x])
    for records in gaps.values():
        records[0][4:9] = -1
        records[0][10, 1] = -1  # a choice of one expert, not a gap
    replay_cases.randomize(model, 3, only="router.weight")
    seen: list[Tensor] = []
    for layer in replay_cases.layers_of(model):
        layer.get_part("router").register_forward_hook(
            lambda m, a, out: seen.append(out.chosen_ids_TK)
        )
    with replay.replay(gaps):
        dropped = model(x)
    for found, name in zip(seen, gaps, strict=True):
        assert torch.equal(found, gaps[name][0])
    seen.clear()
    with replay.replay(gaps, unrecorded="route"):
        routed = model(x)
    live: list[Tensor] = []
    for found, name in zip(seen, gaps, strict=True):
        kept = torch.ones(24, dtype=torch.bool)
        kept[4:9] = False
        assert torch.equal(found[kept], gaps[name][0][kept]) and (found[~kept] >= 0).all()
        live.append(found)
    # The whole choice, written out, is the same replay.
    with replay.replay({name: [ids] for name, ids in zip(gaps, live, strict=True)}):
        assert torch.equal(model(x), routed)
    assert not torch.equal(routed, dropped)
    # The first layer sees the same input live, so that its router makes the same choice alone.
    seen.clear()
    model(x)
    assert torch.equal(seen[0][4:9], live[0][4:9])
