import copy
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from moecore.base.options.memory import GEMM_LAST, OFFLOADED, RECOMPUTED, MemoryOptions
from moecore.base.regions import recompute_products
from moecore.base.saved_tensors import Handle, use_packer
from moecore.models import Decoder, preset
from moecore.train.memory.apply import apply_memory_options
from moecore.train.memory.recompute import recompute, share_region_outputs

CPU = torch.device("cpu")
PRESETS = ("tiny", "tiny-qwen3", "tiny-qwen3-next", "tiny-nemotron-h", "tiny-shared")
PRESETS += ("tiny-deepseek-v3",)
PRODUCTS = (F.linear, F.scaled_dot_product_attention)
# What a preset has: warnings of other parts are errors here.
PARTS = {
    "tiny": ("norm", "rope", "qkv_proj", "expert_fc1"),
    "tiny-qwen3": ("norm", "rope", "qkv_proj", "moe"),
    "tiny-qwen3-next": ("norm", "rope", "qkv_proj", "shared_experts"),
    "tiny-nemotron-h": ("norm", "qkv_proj", "mlp", "shared_experts"),
    "tiny-shared": ("norm", "activation", "qkv_proj", "mlp", "shared_experts", "expert_fc1"),
    "tiny-deepseek-v3": ("norm", "activation", "rope", "mla_up_proj", "mlp", "shared_experts"),
}


def build(name: str, parts: Any = ()) -> Decoder:
    """Return a decoder that keeps what the parts leave it."""
    model = Decoder(preset(name))
    for layer in (m for m in model.modules() if hasattr(m, "recompute_fc1")):
        layer.recompute_fc1 = "expert_fc1" in parts
    apply_memory_options([*model.layers, *model.mtp], MemoryOptions(recompute=parts), CPU)
    return model


def tokens(seed: int, T: int = 48) -> Tensor:
    return torch.randint(0, 100, (2, T), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def equal(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    different = [n for n in want if not torch.equal(found[n], want[n])]
    assert found.keys() == want.keys() and not different, different


class Kept:
    """Counts the bytes of storages that a forward keeps, parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        self.own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.found: dict[int, int] = {}
        self.held: list[Tensor] = []  # so that no address is used twice

    def __call__(self, tensor: Tensor) -> Handle | None:
        address = tensor.untyped_storage().data_ptr()
        if address not in self.own:
            self.found[address] = tensor.untyped_storage().nbytes()
            self.held.append(tensor)
        return None


def kept_bytes(model: Decoder) -> int:
    kept = Kept(model)
    with use_packer(kept):
        model.model(tokens(0))
    return sum(kept.found.values())


@contextmanager
def counting(counts: Counter[Any]) -> Iterator[None]:
    """Count the products of forward and backward, which run in this thread on a CPU."""

    class Count(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
            counts[func] += func in PRODUCTS
            return func(*args, **(kwargs or {}))

    with Count():
        yield


@pytest.mark.parametrize("name", PRESETS)
def test_bits_of_a_model_that_keeps_all(name: str) -> None:
    """Fewer bytes are saved, and "gemm_last" runs no product twice."""
    plain, products = build(name), Counter[Any]()
    with counting(products):
        plain(tokens(0), tokens(1)).backward()
    want, bytes_before = gradients(plain), kept_bytes(plain)
    for parts in (GEMM_LAST, PARTS[name]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = build(name, parts if parts == PARTS[name] else "gemm_last")
        found = Counter[Any]()
        with counting(found):
            model(tokens(0), tokens(1)).backward()
        equal(gradients(model), want)
        assert parts != GEMM_LAST or (found == products and products[F.linear])
        assert kept_bytes(model) < 0.9 * bytes_before, parts


def test_forwards_in_flight() -> None:
    plain, model = build("tiny-shared"), build("tiny-shared", "gemm_last")
    found = []
    for one in (plain, model):
        losses = [one(tokens(i), tokens(i + 9)) for i in range(3)]
        for i in (1, 0, 2):
            losses[i].backward()
        found.append(gradients(one))
    equal(found[1], found[0])


def test_values_are_freed_as_backward_uses_them_and_found_again() -> None:
    norm, linear = nn.RMSNorm(16), nn.Linear(16, 16)
    x = torch.randn(8, 16, requires_grad=True)
    alive: list[weakref.ref[Tensor]] = []

    def part(x: Tensor) -> Tensor:
        y = norm(x)
        alive.append(weakref.ref(y.untyped_storage()))
        return y

    kept = linear(part(x))
    assert alive.pop()() is not None and kept.requires_grad
    with share_region_outputs():
        y = linear(recompute("norm", part, (x,))).square() + linear(norm(x)).square()
    assert len(alive) == 1 and alive[0]() is None
    y.sum().backward(retain_graph=True)
    assert len(alive) == 2 and alive[1]() is None
    first, x.grad = x.grad, None
    y.sum().backward()
    assert len(alive) == 3 and torch.equal(first, x.grad)


class Elsewhere:
    """A handle whose tensor comes back in memory of its own, as from the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach().clone()

    def unpack(self) -> Tensor:
        return self.tensor.clone()


def test_a_product_that_is_freed_while_the_function_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(8, 8, requires_grad=True)
    free, keys = list(range(100)), dict[int, int]()

    def key(x: Tensor) -> int:
        """Give the key of the storage that was freed last to the next one, as addresses may be."""
        storage = x.untyped_storage()
        if id(storage) not in keys:
            keys[id(storage)] = free.pop()
            weakref.finalize(storage, lambda i: free.append(keys.pop(i)), id(storage))
        return keys[id(storage)]

    def function(x: Tensor) -> Tensor:
        return (x @ w @ w @ w).sigmoid().tanh()  # the first two products are free by then

    def gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
        with use_packer(Elsewhere), share_region_outputs():
            y = run(torch.ones(4, 8).requires_grad_())
        return torch.autograd.grad(y.sum(), w)[0]

    monkeypatch.setattr("moecore.train.memory.recompute.get_storage_key", key)
    found = gradient(lambda x: recompute("part", function, (x,)))
    assert torch.equal(found, gradient(function))


def test_under_activation_checkpointing_of_the_caller() -> None:
    plain, model = build("tiny-shared"), build("tiny-shared", "gemm_last")
    for block in model.layers:
        forward: Callable[..., Tensor] = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(  # type: ignore[method-assign]
            forward, *args, use_reentrant=False
        )
    for one in (plain, model):
        one(tokens(0), tokens(1)).backward()
    equal(gradients(model), gradients(plain))


def test_autocast_is_that_of_forward() -> None:
    found = []
    for parts in ((), "gemm_last"):
        model = build("tiny-shared", parts)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens(0), tokens(1))
        loss.backward()
        found.append(gradients(model))
    equal(found[1], found[0])


def in_place(x: Tensor) -> Tensor:
    return x * torch.empty_like(x).bernoulli_(0.5)


def of_its_own(x: Tensor) -> Tensor:
    return x * torch.rand(x.shape, generator=OWN)


def chosen(x: Tensor) -> Tensor:
    return x * F.one_hot(torch.multinomial(x.softmax(1), 1)[:, 0], x.shape[1])


def attended(x: Tensor) -> Tensor:
    x_1BTD = x[None, None]
    return F.scaled_dot_product_attention(x_1BTD, x_1BTD, x_1BTD, dropout_p=0.5)[0, 0]


class Noisy(torch.autograd.Function):
    """Draws in a function of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.noise = torch.randn_like(x)
        return x * ctx.noise

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.noise


OWN = torch.Generator()
ALL = tuple(part for part in RECOMPUTED if part not in ("shared_experts", "expert_fc1"))
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": F.dropout,
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "feature_dropout": lambda x: F.dropout1d(x[None])[0],
    "alpha_dropout": lambda x: F.alpha_dropout(x, training=True),
    "dropout in place": lambda x: F.dropout(x * 1.0, inplace=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "multinomial": chosen,
    "gumbel_softmax": F.gumbel_softmax,
    "normal": lambda x: x + torch.normal(0.0, 1.0, x.shape),
    "in place": in_place,
    "a generator of its own": of_its_own,
    "autograd": Noisy.apply,
    "attention": attended,
}


# Norms alone have no products, and no generator of their own.
@pytest.mark.parametrize(
    ("name", "has_products"),
    [(name, has) for name in DRAWS for has in (True, False) if has or "own" not in name],
)
@pytest.mark.parametrize("repeats_products", [True, False])
def test_random_numbers_are_those_of_forward(name, repeats_products, has_products) -> None:
    torch.manual_seed(0)
    x, linear = torch.randn(8, 16, requires_grad=True), nn.Linear(16, 16)

    def part(x: Tensor) -> Tensor:  # what a second run leaves out stands between draws
        for _ in range(2):
            x = linear(mixed(DRAWS[name](F.silu(linear(x)))))
        return DRAWS[name](F.silu(x)).exp()

    def mixed(x: Tensor) -> Tensor:
        with recompute_products() if repeats_products else nullcontext():
            return attended(x)

    def in_region(x: Tensor) -> Tensor:
        return recompute("part", part, (x,), has_products=has_products) * 1.0

    found = []
    for function in (lambda x: part(x) * 1.0, in_region):
        torch.manual_seed(1)
        OWN.manual_seed(1)
        with share_region_outputs():
            ys = [function(x) for _ in range(2)]  # two forwards in flight
        for y in ys:
            torch.rand(1)
            y.square().sum().backward()
        found.append((*ys, x.grad, linear.weight.grad, torch.rand(1), torch.rand(1, generator=OWN)))
        x.grad = linear.weight.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:MemoryOptions.recompute")
@pytest.mark.parametrize("parts", ["gemm_last", *((p,) for p in RECOMPUTED), ALL], ids=str)
def test_attention_dropout_of_a_stock_model(parts: Any) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, intermediate_size=32, moe_intermediate_size=16, vocab_size=100)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=2)
    experts = dict(num_experts=4, num_experts_per_tok=2, attention_dropout=0.3)
    config = transformers.Qwen3MoeConfig(**sizes, **heads, **experts, use_cache=False)
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).train()
    found = []
    for wanted in ((), parts):
        apply_memory_options(model.model.layers, MemoryOptions(recompute=wanted), CPU)
        torch.manual_seed(1)
        for i in range(2):
            model(input_ids=tokens(i, 12), labels=tokens(i, 12)).loss.backward()
        found.append(gradients(model))
    equal(found[1], found[0])


def test_a_copy_runs_its_own_parameters() -> None:
    model = build("tiny-shared", "gemm_last")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    other(tokens(0), tokens(1)).backward()
    plain = build("tiny-shared")
    plain(tokens(0), tokens(1)).backward()
    equal(gradients(other), gradients(plain))


@pytest.mark.parametrize("name", ["tiny-shared", "tiny-deepseek-v3"])
def test_offload_of_every_part_beside_what_is_computed_again(name: str) -> None:
    plain = build(name)
    plain(tokens(0), tokens(1)).backward()
    model = Decoder(preset(name))
    options = MemoryOptions(recompute="gemm_last", offload=OFFLOADED)
    offload = apply_memory_options(model.layers, options, CPU)
    offload.min_bytes = 1
    model(tokens(0), tokens(1)).backward()
    assert offload.out_bytes == offload.candidate_bytes == offload.back_bytes > 0
    assert offload._pool.used_bytes == 0
    equal(gradients(model), gradients(plain))


def run(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with share_region_outputs():
        return recompute("part", function, (x,)) * 1.0


def test_what_backward_could_not_repeat_is_an_error() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="part must not change its input or a product"):
        run(lambda x: (x @ weight).mul_(2).sigmoid().exp(), x)
    widths = iter((8, 4))
    y = run(lambda x: x.sigmoid()[:, : next(widths)].exp().exp(), x)
    with pytest.raises(RuntimeError, match="part must compute the same values in backward"):
        y.sum().backward()
    changed = torch.randn(4, 8, requires_grad=True)
    hidden = changed * 1.0
    y = run(lambda x: x.sigmoid().exp(), hidden)
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="was changed in place since forward"):
        y.sum().backward()


def test_a_failed_forward_leaves_nothing_behind() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ArithmeticError

    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(ArithmeticError):
        run(fails, x)
    run(lambda x: x.sigmoid().exp(), x).sum().backward()
    assert x.grad is not None


def test_options() -> None:
    assert MemoryOptions().parts == () and MemoryOptions(recompute="gemm_last").parts == GEMM_LAST
    with pytest.raises(ValueError, match=r"MemoryOptions.recompute \('fc1'\) must be"):
        MemoryOptions(recompute="fc1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="have each part once"):
        MemoryOptions(recompute=("norm", "norm"))
    with pytest.raises(ValueError, match="have no 'expert_fc1' beside 'moe'"):
        MemoryOptions(recompute=("moe", "expert_fc1"))
    with pytest.raises(ValueError, match=r"offload_fraction \(0.5\) must go with offload"):
        MemoryOptions(offload_fraction=0.5)
    with pytest.raises(ValueError, match=r"offload .* must have each part once"):
        MemoryOptions(offload=("experts", "experts"))
    with pytest.warns(UserWarning, match=r"'mla_up_proj'\) is not used: no block has it"):
        build("tiny", ("norm", "mla_up_proj"))
    with warnings.catch_warnings(action="error"):  # no block of it has an MLP's activation
        build("tiny-qwen3", (*GEMM_LAST, "qkv_proj"))
    assert set(GEMM_LAST) < set(RECOMPUTED)
