"""Each op of kernels/ alone, against its plain PyTorch reference and the machine's ceiling.

GB/s count the fewest bytes that the op must move (every input read once, every output written
once). So `fraction`, the share of the copy's bandwidth, compares the op with the minimum, including
repeated reads. Each op's docstring gives its bytes; b is 2 bytes (bf16), indices and logits have 4.

Legend: T tokens, D model dim, F expert hidden dim, E experts, K experts per token, R = T * K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.ops import Inputs, Op, Work, backward, make_params, run_op
from benchmarks.session import Ceilings, Session
from benchmarks.shapes import Shape

ROUTINGS = ("learned",)  # the speed of these ops hardly depends on who is hot


def _route(inputs: Inputs) -> tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]:
    """Return the op and its reference as functions of the logits."""
    from moecore.kernels.routing import route as module

    options = module.RouteOptions(
        top_k=inputs.shape.top_k,
        score_function="softmax",
        score_order="pre",
        normalize=True,
        scale=1.0,
        num_groups=1,
        top_groups=1,
    )
    return (
        lambda logits_TE: module.route(logits_TE, None, options),
        lambda logits_TE: module.route_ref(logits_TE, None, options),
    )


def router_logits(inputs: Inputs) -> Work:
    """T D b and the weight E D b read, 4 T E written."""
    from moecore.kernels.routing import router_logits as module

    s, (x_TD, w_ED) = inputs.shape, inputs.linear
    return Work(
        lambda: module.router_logits(x_TD, w_ED, None),
        lambda: module.router_logits_ref(x_TD, w_ED, None),
        2 * (s.tokens + s.num_experts) * s.dim + 4 * s.tokens * s.num_experts,
    )


def router_logits_bwd(inputs: Inputs) -> Work:
    """T D b, E D b and 4 T E read; the gradients T D b and E D b written."""
    from moecore.kernels.routing import router_logits as module

    s = inputs.shape
    return Work(
        backward(lambda x, w: module.router_logits(x, w, None), *inputs.linear),
        backward(lambda x, w: module.router_logits_ref(x, w, None), *inputs.linear),
        4 * (s.tokens + s.num_experts) * s.dim + 4 * s.tokens * s.num_experts,
    )


def route(inputs: Inputs) -> Work:
    """4 T E read; ids and weights written, 8 T K."""
    op, plain = _route(inputs)
    logits_TE = inputs.logits_TE
    num_bytes = 4 * logits_TE.numel() + 8 * inputs.shape.rows
    return Work(lambda: op(logits_TE), lambda: plain(logits_TE), num_bytes)


def route_bwd(inputs: Inputs) -> Work:
    """Logits, ids and the weights' gradient read, 4 T E + 8 T K; 4 T E written."""
    op, plain = _route(inputs)
    logits_TE = inputs.logits_TE
    num_bytes = 8 * logits_TE.numel() + 8 * inputs.shape.rows
    return Work(backward(op, logits_TE), backward(plain, logits_TE), num_bytes)


def build_index(inputs: Inputs) -> Work:
    """Ids and weights are read; row ids, weights and slots written: 20 R bytes."""
    from moecore.kernels.rows import index

    weights_TK, ids_TK = inputs.choice
    options: dict[str, Any] = dict(first_expert=0, num_local_experts=inputs.shape.num_experts)
    plain = options | dict(row_multiple=1, max_rows=inputs.shape.rows)
    return Work(
        lambda: index.build_index(ids_TK, weights_TK, **options),
        lambda: index.build_index_ref(ids_TK, weights_TK, **plain),
        20 * inputs.shape.rows,
    )


def gather_rows(inputs: Inputs) -> Work:
    """T D b read, R D b written, and the index, 4 R read."""
    from moecore.kernels.rows import move as rows

    args, s = (inputs.x_TD, *inputs.index), inputs.shape
    return Work(
        lambda: rows.gather_rows(*args),
        lambda: rows.gather_rows_ref(*args),
        2 * (s.tokens + s.rows) * s.dim + 4 * s.rows,
    )


def sum_rows(inputs: Inputs) -> Work:
    """R D b read, T D b written, and the index, 4 R read."""
    from moecore.kernels.rows import move as rows

    s = inputs.shape
    args = (inputs.random(s.rows, s.dim), *inputs.index)
    return Work(
        lambda: rows.sum_rows(*args),
        lambda: rows.sum_rows_ref(*args),
        2 * (s.tokens + s.rows) * s.dim + 4 * s.rows,
    )


def weighted_activation(inputs: Inputs) -> Work:
    """2 R F b and the weights 4 R read, R F b written."""
    from moecore.kernels.rows import activation as a

    s, num_rows = inputs.shape, inputs.index[2]
    args = (inputs.h_RC, inputs.weights_R, num_rows, a.ActivationOptions(kind="swiglu"))
    return Work(
        lambda: a.weighted_activation(*args),
        lambda: a.weighted_activation_ref(*args),
        6 * s.rows * s.hidden_dim + 4 * s.rows,
    )


def weighted_activation_bwd(inputs: Inputs) -> Work:
    """3 R F b and 4 R read; 3 R F b (dh and the activation) and 4 R (dweights) written."""
    from moecore.kernels.rows import activation as a

    s, num_rows = inputs.shape, inputs.index[2]
    da_RF = inputs.random(s.rows, s.hidden_dim)
    args = (inputs.h_RC, da_RF, inputs.weights_R, num_rows, a.ActivationOptions(kind="swiglu"))
    return Work(
        lambda: a.weighted_activation_bwd(*args),
        lambda: a.weighted_activation_bwd_ref(*args),
        12 * s.rows * s.hidden_dim + 8 * s.rows,
    )


def count_experts(inputs: Inputs) -> Work:
    """The ids are read, 4 R; the counts are small."""
    from moecore.kernels.routing import counts

    ids_TK, E = inputs.choice[1], inputs.shape.num_experts

    def count(add: Callable[[Tensor, Tensor], None]) -> None:
        add(torch.zeros(1, E, dtype=torch.int64, device=inputs.device), ids_TK)

    return Work(
        lambda: count(counts.add_expert_counts),
        lambda: count(counts.add_expert_counts_ref),
        4 * inputs.shape.rows,
    )


def balance_statistics(inputs: Inputs) -> Work:
    """The logits are read, 4 T E; the sums are small."""
    from moecore.kernels.routing import balance

    args = (inputs.logits_TE, 1, "softmax")
    return Work(
        lambda: balance.balance_statistics(*args),
        lambda: balance.balance_statistics_ref(*args),
        4 * inputs.logits_TE.numel(),
    )


def balance_statistics_bwd(inputs: Inputs) -> Work:
    """4 T E read, 4 T E written."""
    from moecore.kernels.routing import balance

    logits_TE = inputs.logits_TE
    return Work(
        backward(lambda x: balance.balance_statistics(x, 1, "softmax"), logits_TE),
        backward(lambda x: balance.balance_statistics_ref(x, 1, "softmax"), logits_TE),
        8 * logits_TE.numel(),
    )


def _streams(inputs: Inputs) -> tuple[Callable[..., Any], Callable[..., Any], list[Tensor]]:
    """Return four-stream mixing around a sublayer, transformers' own mixing, and their inputs."""
    from moecore.kernels import hyper_connections as module

    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    configuration = pytest.importorskip("transformers.models.deepseek_v4")
    T, D, device = inputs.shape.tokens, inputs.shape.dim, inputs.device
    config = configuration.DeepseekV4Config(hidden_size=D, hc_mult=4)
    connection = modeling.DeepseekV4HyperConnection(config).to(device)
    options = module.SinkhornOptions(
        iterations=config.hc_sinkhorn_iters, eps=config.hc_eps, norm_eps=config.rms_norm_eps
    )

    def op(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, y: Tensor) -> Any:
        x, collapsed = module.collapse_streams(streams, fn, base, scale, options)
        return x, module.expand_streams(y, collapsed)

    def plain(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, y: Tensor) -> Any:
        weights = dict(fn=fn, base=base, scale=scale)
        post, comb, x = torch.func.functional_call(connection, weights, (streams[None],))
        post, comb = post[0].to(y.dtype), comb[0].to(y.dtype)
        return x[0], post[..., None] * y[:, None] + comb.mT @ streams

    sizes = ((24, 4 * D), (24,), (3,))
    weights = [0.02 * torch.randn(size, device=device) for size in sizes]
    return op, plain, [inputs.random(T, 4, D), *weights, inputs.random(T, D)]


def hyper_connection(inputs: Inputs) -> Work:
    """Four streams read and written, T 8 D b; the sublayer's input written, its output read."""
    op, plain, given = _streams(inputs)
    num_bytes = 2 * 10 * inputs.shape.tokens * inputs.shape.dim
    return Work(lambda: op(*given), lambda: plain(*given), num_bytes, baseline="transformers")


def hyper_connection_bwd(inputs: Inputs) -> Work:
    """Streams, y and both gradients read, T 10 D b; the gradients of streams and y written, 5."""
    op, plain, given = _streams(inputs)
    num_bytes = 2 * 15 * inputs.shape.tokens * inputs.shape.dim
    ours, theirs = backward(op, *given), backward(plain, *given)
    return Work(ours, theirs, num_bytes, baseline="transformers")


def _adamw(inputs: Inputs, moment_dtype: torch.dtype, *, split: bool = False) -> Work:
    """Return work of a fused AdamW step, with torch's fused AdamW as the baseline."""
    from moecore.kernels import adamw as module
    from moecore.kernels.adamw_formats import MOMENT_BLOCK
    from moecore.kernels.common import cdiv

    s, device = inputs.shape, inputs.device
    experts = max(1, s.num_experts // 8)  # of one of 8 ranks
    sizes = [(experts, 2 * s.hidden_dim, s.dim), (experts, s.dim, s.hidden_dim)]
    options = module.AdamWOptions(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    scale, skip = torch.full((), 1.5, device=device), torch.zeros((), device=device)
    steps = [torch.ones((), device=device) for _ in sizes]

    def state(dtype: torch.dtype, *, split: bool = False) -> module.AdamWTensors:
        kind = torch.bfloat16 if split else torch.float32
        weights, grads = (
            [torch.randn(size, device=device).to(kind) for size in sizes] for _ in range(2)
        )
        moments = [[torch.zeros_like(w, dtype=dtype) for w in weights] for _ in range(2)]
        blocks = [(cdiv(w.numel(), MOMENT_BLOCK), 2) for w in weights if dtype == torch.uint8]
        return module.AdamWTensors(
            weights,
            grads,
            *moments,
            steps,
            range(len(sizes)),
            [torch.zeros(shape, dtype=dtype, device=device) for shape in blocks],
            [torch.zeros_like(w, dtype=torch.int16) for w in weights if split],
        )

    ours, torchs = state(moment_dtype, split=split), state(torch.float32)

    torch_adamw_: Any = torch._fused_adamw_

    def fused() -> None:
        torch_adamw_(
            *(torchs.weights, torchs.grads, torchs.exp_avgs, torchs.exp_avg_sqs, [], torchs.steps),
            lr=options.lr,
            beta1=options.betas[0],
            beta2=options.betas[1],
            weight_decay=options.weight_decay,
            eps=options.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=skip,
        )

    return Work(
        lambda: module.adamw_(ours, options, grad_scale=scale, found_inf=skip),
        fused,
        2 * sum(t.nbytes for row in ours.to_params() for t in row if t is not None)
        - sum(g.nbytes for g in ours.grads),  # which are read alone
        baseline="torch fused",
    )


def adamw(inputs: Inputs) -> Work:
    """Experts of one of 8 ranks: all four tensors read, three written, 28 bytes per element."""
    return _adamw(inputs, torch.float32)


def adamw_bf16_moments(inputs: Inputs) -> Work:
    """The same with 20 bytes per element; torch's moments stay fp32."""
    return _adamw(inputs, torch.bfloat16)


def adamw_fp8_moments(inputs: Inputs) -> Work:
    """The same with 16 bytes per element and a little for exponents."""
    return _adamw(inputs, torch.uint8)


def adamw_least_state(inputs: Inputs) -> Work:
    """bf16 weights and gradients, remainders, FP8 moments: 14 bytes per element."""
    return _adamw(inputs, torch.uint8, split=True)


OPS = (
    Op(router_logits, "tests/kernels/routing/test_router_logits.py"),
    Op(router_logits_bwd, "tests/kernels/routing/test_router_logits.py"),
    Op(route, "tests/kernels/routing/test_route.py"),
    Op(route_bwd, "tests/kernels/routing/test_route.py"),
    Op(build_index, "tests/kernels/rows/test_index.py"),
    Op(gather_rows, "tests/kernels/rows/test_rows.py"),
    Op(sum_rows, "tests/kernels/rows/test_rows.py"),
    Op(weighted_activation, "tests/kernels/rows/test_activation.py"),
    Op(weighted_activation_bwd, "tests/kernels/rows/test_activation.py"),
    Op(count_experts, "tests/kernels/routing/test_counts.py"),
    Op(balance_statistics, "tests/kernels/routing/test_balance_kernels.py"),
    Op(balance_statistics_bwd, "tests/kernels/routing/test_balance_kernels.py"),
    Op(hyper_connection, "tests/kernels/test_hyper_connections.py"),
    Op(hyper_connection_bwd, "tests/kernels/test_hyper_connections.py"),
    Op(adamw, "tests/kernels/test_adamw.py"),
    Op(adamw_bf16_moments, "tests/kernels/test_adamw.py"),
    Op(adamw_fp8_moments, "tests/kernels/test_adamw.py"),
    Op(adamw_least_state, "tests/kernels/test_adamw.py"),
)


@pytest.mark.parametrize("op", make_params(OPS))
def test_kernel(op: Op, shape: Shape, routing: str, session: Session, ceilings: Ceilings) -> None:
    run_op(op, shape, routing, session, ceilings)
