import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import ExpertLayout, MoEConfig
from moecore.models import Decoder, preset
from moecore.moe.experts import Experts
from moecore.moe.shared_experts import SharedExpert
from moecore.parallel.model.clip import clip_and_step
from moecore.train import MatrixCut, Muon, assign_matrices
from moecore.train.optim.matrices import MatrixAssignment
from moecore.train.optim.muon import orthogonalize, orthogonalize_all

STEPS = 3
CONVERGING = (15 / 8, -10 / 8, 3 / 8)  # singular values go to 1, slowly at first
CONFIG = MoEConfig(dim=10, hidden_dim=6, num_experts=3, top_k=2)


def linears() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = [(16, 32), (32, 16), (16, 16)]
    return nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in sizes))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for i, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + i)
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def polar(x: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return (u @ vh).to(x.dtype)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_of_torch(adjust: Any, nesterov: bool) -> None:
    ours, torchs = linears(), linears()
    options: dict[str, Any] = dict(lr=1e-2, adjust_lr_fn=adjust, nesterov=nesterov)
    first = Muon(assign_matrices(ours), **options)
    train(ours, first, range(STEPS))
    other = torch.optim.Muon(torchs.parameters(), **options)
    train(torchs, other, range(STEPS))
    assert first.param_groups[0].keys() - {"fused"} == other.param_groups[0].keys()
    second = Muon(assign_matrices(ours), **options)  # goes on from torch's state
    second.load_state_dict(other.state_dict())
    train(ours, second, range(STEPS, 2 * STEPS))
    train(torchs, other, range(STEPS, 2 * STEPS))
    for a, b in zip(ours.parameters(), torchs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 8, 5), (1, 7, 7), (2, 4, 20)])
def test_results_are_orthogonal(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x[0, 0] = x[0, 1]  # of lower rank, as gradients are
    x += 1e-3 * torch.randn(shape, generator=torch.Generator().manual_seed(2))
    near = orthogonalize(x, steps=40, coefficients=CONVERGING)
    torch.testing.assert_close(near, polar(x), rtol=1e-4, atol=1e-4)
    usual = orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(3)))
    assert torch.linalg.svdvals(usual).min() > 0.3 and torch.linalg.svdvals(usual).max() < 1.3
    half = orthogonalize(x.bfloat16())
    assert half.dtype == torch.bfloat16 and torch.linalg.svdvals(half.float()).max() < 1.3
    assert not orthogonalize(torch.zeros(shape)).any()


def test_batches_are_the_matrices_one_by_one() -> None:
    shapes = [(2, 4, 6), (1, 6, 4), (3, 4, 6), (0, 4, 6)]
    matrices = [torch.randn(shape) for shape in shapes]
    for x, found in zip(matrices, orthogonalize_all(matrices), strict=True):
        assert found.shape == x.shape
        for one, got in zip(x, found, strict=True):
            torch.testing.assert_close(got, orthogonalize(one[None])[0], rtol=1e-5, atol=1e-5)


LAYOUTS = [
    ExpertLayout(),
    ExpertLayout(gate_up="concatenated"),
    ExpertLayout(gate_up="interleaved"),
    ExpertLayout(gate_up="concatenated", transposed=True),
    ExpertLayout(gate_up="interleaved", transposed=True),
    ExpertLayout(gate_up="separate"),
]


def halves(experts: Experts) -> list[Tensor]:
    """All matrices of experts, [E, out, in]: gate, up, down; written without the code's indices."""
    layout, w1, w2 = experts.layout, experts.w1.detach(), experts.w2.detach()
    if layout.gate_up == "separate":
        return [w1, experts.w3.detach(), w2]
    if layout.transposed:
        w1, w2 = w1.mT, w2.mT
    if layout.gate_up == "split":
        return [w1[:, 0], w1[:, 1], w2]
    if layout.gate_up == "interleaved":
        return [w1[:, ::2], w1[:, 1::2], w2]
    return [*w1.chunk(2, dim=1), w2]


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_experts_are_stepped_one_by_one(layout: ExpertLayout, adjust: Any) -> None:
    torch.manual_seed(0)
    experts, gradients = Experts(CONFIG, layout=layout), Experts(CONFIG, layout=layout)
    for param, grad in zip(experts.parameters(), gradients.parameters(), strict=True):
        nn.init.normal_(param)
        nn.init.normal_(grad)
        param.grad = grad.detach()
    before = [m.clone() for m in halves(experts)]
    options: dict[str, Any] = dict(ns_coefficients=CONVERGING, ns_steps=40, adjust_lr_fn=adjust)
    options |= dict(lr=0.1, weight_decay=0.5, ns_dtype=torch.float32)
    Muon(assign_matrices(experts), **options).step()
    for old, new, grad in zip(before, halves(experts), halves(gradients), strict=True):
        outputs, inputs = old.shape[1:]
        factor = 0.2 * max(old.shape[1:]) ** 0.5
        if adjust == "original":
            factor = max(1.0, outputs / inputs) ** 0.5
        wanted = old * (1 - 0.1 * 0.5) - 0.1 * factor * polar(grad)
        torch.testing.assert_close(new, wanted, rtol=1e-3, atol=2e-4)
    # All matrices as one would be another step.
    together = polar(torch.cat(list(halves(gradients)[0])))
    assert not torch.allclose(together[:6], polar(halves(gradients)[0][0]), atol=1e-2)


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_normuon_by_definition(layout: ExpertLayout) -> None:
    """Algorithm 1 of arXiv:2510.05491 on each matrix alone, [outputs, inputs], norms kept."""
    torch.manual_seed(0)
    experts = Experts(CONFIG, layout=layout)
    for param in experts.parameters():
        nn.init.normal_(param)
    wanted = [m.clone().unbind() for m in halves(experts)]
    momenta, means = ([[torch.zeros(())] * 3 for _ in wanted] for _ in range(2))
    options: dict[str, Any] = dict(ns_dtype=torch.float32, weight_decay=0.5)
    optimizer = Muon(assign_matrices(experts), lr=0.1, beta2=0.6, **options)
    for _ in range(STEPS):
        gradients = Experts(CONFIG, layout=layout)
        for param, grad in zip(experts.parameters(), gradients.parameters(), strict=True):
            param.grad = nn.init.normal_(grad).detach()
        optimizer.step()
        for i, matrices in enumerate(halves(gradients)):
            for e, g in enumerate(matrices):
                momenta[i][e] = m = 0.95 * momenta[i][e] + 0.05 * g
                o = orthogonalize((0.05 * g + 0.95 * m)[None])[0]
                means[i][e] = v = 0.6 * means[i][e] + 0.4 * (o * o).mean(1)
                divided = o / v.sqrt()[:, None]
                divided *= o.norm() / divided.norm()
                factor = 0.2 * max(o.shape) ** 0.5
                wanted[i][e].mul_(1 - 0.1 * 0.5).sub_(0.1 * factor * divided)
    for found, own in zip(halves(experts), wanted, strict=True):
        torch.testing.assert_close(found, torch.stack(own), rtol=1e-5, atol=1e-5)
    numels = [s["second_momentum_buffer"].numel() for s in optimizer.state.values()]
    assert sum(numels) == CONFIG.num_experts * (2 * CONFIG.hidden_dim + CONFIG.dim)


def test_normuon_takes_what_torch_has() -> None:
    """A state dict without means starts them at zero, and does not turn them off."""
    model, other = linears(), linears()
    torchs = torch.optim.Muon(other.parameters(), lr=1e-2)
    train(other, torchs, range(1))
    ours = Muon(assign_matrices(model), lr=1e-2, beta2=0.9)
    ours.load_state_dict(torchs.state_dict())
    train(model, ours, range(1, 2))
    assert all(s["second_momentum_buffer"].all() for s in ours.state.values())
    by_inputs = assign_matrices(model, (("0.weight", MatrixCut(dim=1, sizes=(8, 8))),))
    with pytest.raises(ValueError, match=r"MatrixCut\.dim \(1\) must be 0, that of outputs"):
        Muon(by_inputs, beta2=0.9)


@pytest.mark.parametrize("beta2", [None, 0.9])
def test_signals_clip_and_skip(beta2: float | None) -> None:
    """A skipped step leaves bits; a scaled one equals a step with smaller gradients."""
    signalled, plain = linears(), linears()
    options: dict[str, Any] = dict(lr=1e-2, ns_dtype=torch.float32, beta2=beta2)
    ours, others = (Muon(assign_matrices(m), **options) for m in (signalled, plain))
    train(signalled, ours, range(1))
    train(plain, others, range(1))
    for param in signalled.parameters():
        param.grad = torch.full_like(param, torch.nan)
    before = [p.detach().clone() for p in signalled.parameters()]
    states = [value.clone() for s in ours.state.values() for value in s.values()]
    assert len(states) == (3 if beta2 is None else 6)
    norm = clip_and_step(signalled, 1.0, [ours])
    assert norm.skipped and all(map(torch.equal, before, signalled.parameters()))
    assert all(map(torch.equal, states, (v for s in ours.state.values() for v in s.values())))
    for a, b in zip(signalled.parameters(), plain.parameters(), strict=True):
        generator = torch.Generator().manual_seed(5)
        a.grad = torch.randn(a.shape, generator=generator)
        b.grad = a.grad.clone()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    others.step()
    assert clip_and_step(signalled, 0.1, [ours]).total > 1
    for a, b in zip(signalled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_tensor_as_lr_and_weights_in_bf16() -> None:
    wide, narrow = linears(), linears().bfloat16()
    with torch.no_grad():
        for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
            a.copy_(b)
    train(wide, Muon(assign_matrices(wide), lr=torch.tensor(1e-2)), range(1))
    optimizer = Muon(assign_matrices(narrow), lr=1e-2)
    train(narrow, optimizer, range(1))
    for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert optimizer.state[b]["momentum_buffer"].dtype == torch.float32
        torch.testing.assert_close(b.float(), a, rtol=2**-8, atol=2e-3)


def test_copies_go_on() -> None:
    model = linears()
    optimizer = Muon(assign_matrices(model), lr=1e-2, beta2=0.9)
    train(model, optimizer, range(1))
    other, copied = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(1, STEPS))
    train(other, copied, range(1, STEPS))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def reasons(assignment: MatrixAssignment) -> dict[str, str]:
    return {name: decision.reason for name, decision in assignment.decisions.items()}


def test_who_is_stepped_by_what() -> None:
    model = Decoder(preset("tiny"))
    assignment = assign_matrices(model)
    found = reasons(assignment)
    assert found["model.embed_tokens.weight"] == "an embedding"
    assert found["lm_head.weight"] == "a head" and found["model.norm.weight"] == "a vector"
    stepped = {n for n, d in assignment.decisions.items() if d.layout is not None}
    assert {"model.layers.1.mlp.router.weight", "model.layers.1.mlp.experts.w1"} <= stepped
    assert set(found) == {name for name, _ in model.named_parameters()}
    muon, adamw = set(assignment.matrices), set(assignment.adamw_params)
    assert not muon & adamw and muon | adamw == set(model.parameters())
    assert "muon   model.layers.1.mlp.experts.w2: 8 x (" in str(assignment)
    frozen = assign_matrices(model.requires_grad_(False))
    assert not frozen.decisions
    with pytest.raises(ValueError, match=r"\(0 parameters\) must have a matrix for Muon"):
        Muon(frozen)


def test_shared_experts_and_tied_heads() -> None:
    config = replace(CONFIG, shared_hidden_dim=4, shared_gate=True)
    decisions = assign_matrices(SharedExpert(config)).decisions
    assert decisions["w1"].layout is not None and decisions["gate"].layout is None
    assert decisions["w1"].layout.shapes == [(4, 10), (4, 10)]
    tied = nn.ModuleDict({"body": nn.Linear(4, 9, bias=False), "embed": nn.Embedding(9, 4)})
    tied["body"].weight = tied["embed"].weight
    assert reasons(assign_matrices(tied)) == {"body.weight": "an embedding"}


def test_overrides() -> None:
    model = linears()
    cut = MatrixCut(sizes=(4, 2, 2), repeats=2)
    assignment = assign_matrices(model, (("1.*", cut), ("2.weight", "adamw"), ("*", "muon")))
    layouts = [d.layout for d in assignment.decisions.values()]
    shapes = [[(32, 16)], [(8, 32), (4, 32), (4, 32)], None]
    assert [layout and layout.shapes for layout in layouts] == shapes
    train(model, Muon(assignment), range(1))
    columns = Experts(CONFIG, layout=ExpertLayout(gate_up="concatenated", transposed=True))
    halved = MatrixCut(dim=1, sizes=(columns.w1.shape[-1] // 2,), repeats=2)
    layout = assign_matrices(columns, (("w1", halved),)).decisions["w1"].layout
    assert layout is not None and layout.sections == halved and layout.transposed
    with pytest.raises(ValueError, match=r"param_group \(\(16, 16\)\) must hold matrices"):
        Muon(assignment).add_param_group({"params": [model[2].weight]})
    with pytest.raises(ValueError, match=r"overrides \('3\.\*'\) must match"):
        assign_matrices(model, (("3.*", "adamw"),))
    with pytest.raises(ValueError, match=r"sum\(sizes\) \* repeats = rows \(32\)"):
        assign_matrices(model, (("0.weight", MatrixCut(sizes=(5, 5))),))
    with pytest.raises(ValueError, match="must be 'adamw' for 0"):
        assign_matrices(nn.Sequential(nn.Linear(2, 3)), (("0.bias", "muon"),))
    with pytest.raises(ValueError, match=r"momentum \(1\.0\) must be"):
        Muon(assign_matrices(model), momentum=1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    dict(
        lr=math.nan, weight_decay=-0.1, momentum=1.0, ns_steps=0, adjust_lr_fn="rms", beta2=1.5
    ).items(),
)
def test_groups_that_were_edited_are_checked(name: str, value: Any) -> None:
    """By a step, before any group has moved."""
    model = linears()
    optimizer = Muon(assign_matrices(model), beta2=0.9)
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()]})
    optimizer.param_groups[1][name] = value
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=rf"MuonOptions\.{name} \({value!r}\) must be"):
        train(model, optimizer, range(1))
    assert all(map(torch.equal, before, model.parameters()))


def test_queries_keys_and_values_in_one() -> None:
    """transformers' own split of rows, by numbers in their place."""
    pytest.importorskip("transformers")
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=3,
        linear_value_head_dim=5,
    )
    net = Qwen3NextGatedDeltaNet(config, 0)
    linear, ba = net.in_proj_qkvz, net.in_proj_ba
    places = torch.arange(linear.out_features)[None, None]
    split = net.fix_query_key_value_ordering(places, torch.zeros(1, 1, ba.out_features))
    layout = assign_matrices(net).decisions["in_proj_qkvz.weight"].layout
    parts = layout.list_parts(linear.weight)
    assert [part.rows.tolist() for part in parts] == [s.flatten().tolist() for s in split[:4]]
    net.num_k_heads, net.num_v_heads = 1, 2  # of a rank, with tp = 2
    assert assign_matrices(net).decisions["in_proj_qkvz.weight"].layout == layout
    net.in_proj_qkv = nn.Linear(4, 32, bias=False)
    net.key_dim, net.value_dim = 3, 10
    assert assign_matrices(net).decisions["in_proj_qkv.weight"].layout.sections.sizes == (6, 6, 20)
    unknown = nn.ModuleDict({"qkv": nn.Linear(4, 12, bias=False)})
    assert "unknown order" in reasons(assign_matrices(unknown))["qkv.weight"]


@pytest.mark.gpu
@pytest.mark.parametrize("ns_dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_does_what_a_cpu_does_and_the_host_waits_for_nothing(ns_dtype: torch.dtype) -> None:
    models = linears(), linears().cuda()
    optimizers = [Muon(assign_matrices(m), lr=1e-2, ns_dtype=ns_dtype) for m in models]
    for seed in range(2):
        for model in models:
            for i, param in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(10 * seed + i)
                param.grad = torch.randn(param.shape, generator=generator).to(param.device)
        clip_and_step(models[0], 1.0, optimizers[:1])
        torch.cuda.set_sync_debug_mode("error" if seed else "default")  # state is made first
        try:
            clip_and_step(models[1], 1.0, optimizers[1:])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    bound = 1e-5 if ns_dtype == torch.float32 else 2e-3
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=bound, atol=bound)
