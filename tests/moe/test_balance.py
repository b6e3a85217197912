import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from moecore import BalanceConfig, MoEConfig, MoELayer
from moecore.moe.balance import LOSS_NAMES, BalanceGroups, LoadTracker
from moecore.moe.micro_batch import MicroBatch
from moecore.moe.records import Routing
from moecore.moe.state import MoEState
from tests.helpers.operations import Operations
from tests.moe.moe_cases import BASE, assert_equal_to_scale, leaves, make_layer
from tests.moe.reference import moe_reference

FIELDS = {
    "micro_batch": "micro_batch_coef",
    "sequence": "sequence_coef",
    "global_batch": "global_batch_coef",
    "z": "z_loss_coef",
}


def only(name: str, coef: float) -> BalanceConfig:
    return BalanceConfig(**{FIELDS[name]: coef})


def routing_from(ids_TK: Tensor, logits_TE: Tensor) -> Routing:
    """The weights play no part in any loss."""
    ids_TK = ids_TK.int()
    return Routing(
        expert_ids_TK=ids_TK, weights_TK=ids_TK.float(), logits_TE=logits_TE, chosen_ids_TK=ids_TK
    )


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("limit", ["bias", "groups", "both"])
@pytest.mark.parametrize("loss", ["micro_batch", "sequence", "global_batch"])
def test_losses_count_best_scores_where_bias_or_groups_choose(loss, limit, masked) -> None:
    """DeepSeek-V3's f and P by hand, in two micro-batches; metrics count the choice."""
    groups: Any = {} if limit == "bias" else dict(num_groups=4, top_groups=1)
    config = replace(
        BASE,
        score_function="sigmoid",
        expert_bias=limit != "groups",
        balance=only(loss, 0.5),
        **groups,
    )
    layer = make_layer(config)
    if config.expert_bias:
        layer.router.expert_bias.copy_(torch.linspace(-2, 2, 8))
    state, params = make_state(layer), leaves(layer)
    state.set_num_micro_batches(2)
    mask = (torch.arange(6) >= 4).expand(2, 6) if masked else torch.zeros(2, 6, dtype=torch.bool)
    choices_E, seen_E, total = torch.zeros(8), torch.zeros(8), torch.zeros(())
    for x in torch.randn(2, 2, 6, 32):
        (layer(x, mask if masked else None) * 0).sum().backward()
        choices_E += moe_reference(x, params, config, padding_mask_BT=mask).counts_E
        scores = (x @ params["router.weight"].T).sigmoid()
        best = torch.zeros_like(scores).scatter(-1, scores.topk(2).indices, 1.0) * ~mask[..., None]
        scores = scores / scores.sum(-1, keepdim=True) * ~mask[..., None]
        seen_E, n = seen_E + best.sum((0, 1)), (~mask).sum(1, keepdim=True)
        if loss == "sequence":
            value = 8 * (best.sum(1) / n / 2 * scores.sum(1) / n).sum(1).mean()
        else:
            f_E = best.sum((0, 1)) / n.sum() / 2
            f_E = seen_E / seen_E.sum() if loss == "global_batch" else f_E
            value = 8 * (f_E * scores.sum((0, 1)) / n.sum()).sum()
        total = total + 0.5 * value / 2
    total.backward()
    assert_equal_to_scale(layer.router.weight.grad, params["router.weight"].grad)
    metrics = state.finish_step()
    assert metrics.compute_total_aux_loss() == pytest.approx(float(total.detach()), rel=1e-5)
    assert torch.equal(metrics.tokens_per_expert["layers.0"], choices_E.long())
    assert not torch.equal(seen_E, choices_E), "the test must tell the two apart"


def make_state(*layers: MoELayer, **kwargs: Any) -> MoEState:
    named: dict[str, Any] = {f"layers.{i}": layer for i, layer in enumerate(layers)}
    return MoEState(named, BalanceGroups(**kwargs.pop("groups", {})), **kwargs)


def test_nothing_is_counted_without_gradients_or_without_backward() -> None:
    layer = make_layer(replace(BASE, balance=only("z", 0.5)))
    state, x = make_state(layer), torch.randn(3, 6, 32)
    with torch.no_grad():
        layer(x)
    layer.eval()(x)
    layer.train()(x)  # a forward whose loss is thrown away
    metrics = state.finish_step()
    assert not any(counts.any() for counts in metrics.tokens_per_expert.values())
    assert metrics.compute_total_aux_loss() == 0.0
    assert set(metrics.compute_load_max_over_mean().values()) == {0.0}


def test_a_forgotten_number_of_micro_batches_is_an_error_once() -> None:
    layer = make_layer(replace(BASE, balance=only("z", 0.5)))
    state = make_state(layer)
    for _ in range(2):
        layer(torch.randn(3, 32)).sum().backward()
    with pytest.raises(ValueError, match=r"num_micro_batches \(1\) must equal.*saw 2"):
        state.finish_step()
    layer(torch.randn(3, 32)).sum().backward()
    state.finish_step()


def test_a_layer_that_runs_twice_in_a_forward_says_so() -> None:
    """Its losses, their gradients and its counts are those of two layers with tied weights."""
    config = replace(BASE, balance=only("z", 0.5))
    layer, first, second = (MoELayer(config, runs=n) for n in (2, 1, 1))
    for other in (first, second):
        other.load_state_dict(layer.state_dict())
    x_TD, found = torch.randn(3, 32), []
    for layers in ((layer,), (first, second)):
        state = make_state(*layers)
        layers[-1](layers[0](x_TD)).sum().backward()
        metrics = state.finish_step()
        counts = torch.stack(list(metrics.tokens_per_expert.values())).sum(0)
        found.append((metrics.compute_total_aux_loss(), counts))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert torch.equal(found[0][1], found[1][1])
    for name, param in layer.named_parameters():
        grads = [dict(other.named_parameters())[name].grad for other in (first, second)]
        torch.testing.assert_close(param.grad, sum(grads), rtol=1e-5, atol=1e-6, msg=name)
    state = make_state(layer)
    layer(x_TD).sum().backward()
    with pytest.raises(ValueError, match=r"num_micro_batches \(1\) must equal.*saw 1"):
        state.finish_step()


def test_a_skipped_step_moves_no_bias() -> None:
    config = replace(BASE, expert_bias=True, balance=BalanceConfig(bias_update_rate=0.1))
    layer = make_layer(config)
    state, before = make_state(layer), layer.router.expert_bias.clone()
    layer(torch.randn(5, 32)).sum().backward()
    metrics = state.finish_step(is_skipped=True)
    assert int(next(iter(metrics.tokens_per_expert.values())).sum()) == 5 * config.top_k
    assert torch.equal(layer.router.expert_bias, before)
    layer(torch.randn(5, 32)).sum().backward()
    state.finish_step()
    assert not torch.equal(layer.router.expert_bias, before)


@pytest.mark.parametrize("update", ["sign", "quantile"])
def test_a_frozen_routers_bias_stays(update: Any) -> None:
    balance = BalanceConfig(bias_update_rate=0.1, bias_update=update)
    config = replace(BASE, expert_bias=True, balance=balance, score_function="sigmoid")
    frozen, trained = make_layer(config), make_layer(config)
    frozen.router.requires_grad_(False)  # its experts train, so it is counted
    state = MoEState({"frozen": frozen, "trained": trained}, BalanceGroups())
    before = {layer: layer.router.expert_bias.clone() for layer in (frozen, trained)}
    trained(frozen(torch.randn(5, 32))).sum().backward()
    metrics = state.finish_step()
    assert int(metrics.tokens_per_expert["frozen"].sum()) == 5 * config.top_k
    assert torch.equal(frozen.router.expert_bias, before[frozen])
    assert not torch.equal(trained.router.expert_bias, before[trained])


def test_global_batch_loss_refuses_a_recompute_that_would_differ() -> None:
    layer = make_layer(replace(BASE, balance=only("global_batch", 0.5)))
    state = make_state(layer)
    state.set_num_micro_batches(2)
    batches = torch.randn(2, 5, 32, requires_grad=True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False).sum()

    for x in batches:
        forward(x).backward()
    state.finish_step()
    with pytest.raises(NotImplementedError, match="several forwards before a backward"):
        (forward(batches[0]) + forward(batches[1])).backward()


def test_a_layer_without_losses_launches_nothing_before_backward() -> None:
    config = replace(BASE, num_experts=4)
    tracker, y = LoadTracker(config), torch.ones(3, 5, requires_grad=True)
    routing = routing_from(torch.tensor([[0, 1], [2, -1], [0, 2]]), torch.zeros(3, 4))
    with Operations(lambda func, _: str(func)) as record:
        out = tracker.attach_losses(y, routing, MicroBatch(), None)
    assert set(record.found) == {"aten.detach.default"}
    out.sum().backward()
    assert tracker.counts is not None and tracker.counts.choices_E.tolist() == [2, 1, 2, 0]


def test_counts_are_kept_in_place() -> None:
    """A CUDA graph writes to the tensors that it was captured with, whatever happens between."""
    layer = make_layer(replace(BASE, balance=only("global_batch", 0.5)))
    state, x = make_state(layer), torch.randn(3, 32)
    tracker, addresses = layer.tracker, set()
    assert tracker.counts is None, "nothing is allocated before it is needed"
    for _ in range(3):
        layer(x).sum().backward()
        addresses.add((tracker.counts.choices_E.data_ptr(), tracker.counts.losses.data_ptr()))
        metrics = state.finish_step()
        assert not tracker.counts.choices_E.any() and not tracker.counts.losses.any()
        assert int(metrics.tokens_per_expert["layers.0"].sum()) == 3 * BASE.top_k
        assert float(metrics.compute_total_aux_loss()) > 0.4
    assert len(addresses) == 1


def test_losses_are_means_though_replays_are_not_seen() -> None:
    layer = make_layer(replace(BASE, balance=only("z", 0.5)))
    state, x = make_state(layer), torch.randn(3, 32)
    layer(x).sum().backward()
    once = state.finish_step().compute_total_aux_loss()
    state.set_num_micro_batches(2)
    for _ in range(2):
        layer(x).sum().backward()
    layer.tracker.num_micro_batches = 0  # what two replays of a graph leave behind
    assert state.finish_step().compute_total_aux_loss() == pytest.approx(once)


def test_large_counts_stay_exact() -> None:
    layer = make_layer(BASE)
    state = make_state(layer)
    layer(torch.randn(3, 32)).sum().backward()
    layer.tracker.counts.choices_E.copy_((1 << 40) + torch.arange(8))
    counts = state.finish_step().tokens_per_expert["layers.0"]
    assert counts.tolist() == [(1 << 40) + i for i in range(8)]


class Routed(nn.Module):
    """The part of a layer that matters here: logits, a choice, and the losses on the output."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.tracker = LoadTracker(config)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 32 * 8).view(8, 32).sin())

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(x, self.weight).float()
        ids = logits.topk(2).indices
        y = x * logits.sum(-1, keepdim=True).to(x.dtype)
        return self.tracker.attach_losses(
            y, routing_from(ids, logits), MicroBatch(num_sequences=2), None
        )


@pytest.mark.parametrize("loss", [None, "micro_batch", "global_batch", "z"])
def test_a_compiled_model_counts_and_learns_the_same(loss: str | None) -> None:
    config = replace(BASE, balance=only(loss, 0.5) if loss else BalanceConfig())
    plain, compiled = Routed(config), Routed(config)
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    forward = torch.compile(compiled, backend=backend)
    for seed in range(3):
        x = torch.randn(6, 32, generator=torch.Generator().manual_seed(seed))
        plain(x).square().sum().backward()
        forward(x).square().sum().backward()
    torch.testing.assert_close(compiled.weight.grad, plain.weight.grad)
    assert backend.frame_count == 1, "the tracker's state must not recompile"
    with torch.no_grad():
        torch.compile(compiled, backend=backend, fullgraph=True)(x)
    a, b = plain.tracker, compiled.tracker
    assert a.num_micro_batches == b.num_micro_batches == 3 and b.num_in_flight == 0
    torch.testing.assert_close(b.counts.choices_E, a.counts.choices_E, rtol=0, atol=0)
    torch.testing.assert_close(b.counts.losses, a.counts.losses)
    assert int(b.counts.choices_E.sum()) == 3 * 6 * 2  # type: ignore[union-attr]


@pytest.mark.gpu
def test_counts_follow_a_layer_to_another_device() -> None:
    routed = Routed(replace(BASE, balance=only("global_batch", 0.5)))
    for device in ("cpu", "cuda"):
        x = torch.ones(6, 32, device=device)
        routed.to(device)(x).sum().backward()
        assert routed.tracker.counts.choices_E.device.type == device
    assert int(routed.tracker.counts.choices_E.sum()) == 2 * 6 * 2  # type: ignore[union-attr]


@pytest.mark.gpu
@pytest.mark.parametrize("loss", [None, *LOSS_NAMES])
def test_a_cuda_graph_counts_at_each_replay(loss: str | None) -> None:
    config = replace(BASE, balance=only(loss, 0.5) if loss else BalanceConfig())
    plain, graphed = Routed(config).cuda(), Routed(config).cuda()
    batches = torch.randn(3, 6, 32, device="cuda")
    static = batches[0].clone()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    plain(static)  # cuBLAS creates its handle, which a capture cannot do
    with (
        pytest.raises(ValueError, match=r"counts \(None\) must exist before a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        graphed(static)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graphed(static).square().sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    graphed.tracker.reset()
    graphed.weight.grad = None
    with torch.cuda.graph(graph):
        graphed(static).square().sum().backward()
    assert graphed.tracker.num_micro_batches == 0, "a capture is no micro-batch"
    for _ in range(2):  # two steps: the second starts from zero
        plain.tracker.reset()
        graphed.tracker.reset()
        for x in batches:
            plain.weight.grad = None
            plain(x).square().sum().backward()
            static.copy_(x)
            graph.replay()
            # The capture made the gradient, so each replay writes it anew.
            torch.testing.assert_close(graphed.weight.grad, plain.weight.grad)
        a, b = plain.tracker, graphed.tracker
        assert torch.equal(a.counts.choices_E, b.counts.choices_E)  # type: ignore[arg-type]
        torch.testing.assert_close(a.counts.losses, b.counts.losses)


def test_sum_convention_divides_by_data_ranks() -> None:
    layer = make_layer(BASE)
    state = make_state(layer, groups={"data_ranks": 4}, loss="sum")
    assert layer.tracker.gradient_scale == 0.25
    state.set_num_micro_batches(2)
    assert layer.tracker.gradient_scale == 0.125
    state = make_state(layer, groups={"data_ranks": 4}, loss="mean")
    assert layer.tracker.gradient_scale == 1.0
    with pytest.raises(ValueError, match=r"num_micro_batches \(0\) must be a whole number >= 1"):
        state.set_num_micro_batches(0)


def test_fp16_needs_a_loss_scale_that_reaches_the_losses() -> None:
    layer = make_layer(replace(BASE, balance=only("z", 0.1)))
    x = torch.randn(4, BASE.dim, requires_grad=True)
    (layer(x) * 0).sum().backward()
    plain = layer.router.weight.grad.clone()
    layer.router.weight.grad, state = None, make_state(layer)
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(
            ValueError, match=r"\(torch.float16\) must not be fp16 with auxiliary losses"
        ),
    ):
        layer(x)
    scale = torch.tensor(1.0)
    state.set_loss_scale(scale)
    with torch.autocast("cpu", torch.float16):
        y = layer(x)
    scale.fill_(64.0)  # read in backward, where it lies
    (y * 0).sum().backward()
    torch.testing.assert_close(layer.router.weight.grad, 64 * plain)
    del scale
    assert state.loss_scale is None, "it ends with its owner"


def test_losses_have_no_second_derivative() -> None:
    layer = make_layer(replace(BASE, balance=only("z", 0.1)))
    x = torch.randn(4, BASE.dim, requires_grad=True)
    with pytest.raises(NotImplementedError, match="auxiliary losses have no second derivative"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)


def test_two_backwards_of_one_forward_count_once_and_losses_refuse_the_second() -> None:
    x = torch.randn(4, BASE.dim, requires_grad=True)
    layer = make_layer(BASE)
    y = layer(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert layer.tracker.num_micro_batches == 1
    assert layer.tracker.counts.choices_E.sum() == 4 * BASE.top_k
    y = make_layer(replace(BASE, balance=only("z", 0.1)))(x).sum()
    y.backward(retain_graph=True)
    with pytest.raises(NotImplementedError, match="auxiliary losses must get their gradient once"):
        y.backward()


@pytest.mark.parametrize("balance", [BalanceConfig(), only("z", 0.1)])
def test_training_in_eval_mode_warns(balance: BalanceConfig) -> None:
    x = torch.randn(4, BASE.dim)
    layer = make_layer(replace(BASE, balance=balance)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = layer(x).sum()  # an evaluation that forgets no_grad trains nothing
    with pytest.warns(UserWarning, match="in eval mode balances and counts nothing"):
        y.backward()


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("bias_update_rate", {"score_function": "sigmoid", "expert_bias": True}),
        ("global_batch_coef", {}),
    ],
)
def test_a_loop_without_ends_of_steps_is_told_once(field: str, fields: Any) -> None:
    """Its bias never moves, and its loss counts all earlier steps."""
    config = replace(BASE, **fields, balance=BalanceConfig(**{field: 0.1}))
    x = torch.randn(4, BASE.dim)

    def run(num_backwards: int, *, has_state: bool, ends: bool) -> list[str]:
        layer = make_layer(config)
        state = make_state(layer)
        if has_state:
            state.set_num_micro_batches(num_backwards)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(num_backwards):
                layer(x).sum().backward()
                if ends:
                    state.finish_step()
        return [str(w.message) for w in seen]

    assert run(4, has_state=True, ends=False) == run(3, has_state=False, ends=True) == []
    message = f"BalanceConfig.{field} (0.1) needs the end of each step"
    (found,) = run(4, has_state=False, ends=False)
    assert found.startswith(message) and "TrainStep" in found
