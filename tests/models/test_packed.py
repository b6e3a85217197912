from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore import BalanceConfig, CapacityConfig, MemoryOptions, MoEConfig, MoELayer
from moecore.models import Decoder
from moecore.moe.micro_batch import sort_by_position
from moecore.train.graphs.regions import compile_blocks
from moecore.train.memory.apply import apply_memory_options
from tests.models.plain_decoder import plain_losses
from tests.models.test_mtp import CONFIGS, HYBRID, make
from tests.models.test_padding import with_balance

PER_DOCUMENT = BalanceConfig(sequence_coef=0.2)
NO_LOSS = BalanceConfig()


class Packed:
    """A batch of packed documents, some with padding behind their tokens.

    Args:
        config: the decoder.
        lengths: of the documents, padding included; their sum fills the rows.
        rows: B.
        padding: of each document.
    """

    def __init__(self, config, lengths, rows=1, padding=None) -> None:
        g = torch.Generator().manual_seed(7)
        self.lengths, padding = lengths, padding or [0] * len(lengths)
        total = sum(lengths)
        text = torch.randint(0, config.vocab_size, (total + 1,), generator=g)
        ends = torch.tensor(lengths).cumsum(0)
        self.real = [n - p for n, p in zip(lengths, padding, strict=True)]
        self.cu_seqlens = torch.cat((torch.zeros(1, dtype=ends.dtype), ends))
        places = torch.cat([torch.arange(n) for n in lengths])
        limits = torch.cat([torch.full((n,), r) for n, r in zip(lengths, self.real, strict=True)])
        self.mask = (places >= limits).view(rows, -1)
        self.tokens = text[:-1].view(rows, -1)
        labels = text[1:].view(rows, -1).clone()
        labels[torch.rand(labels.shape, generator=g) < 0.1] = -100
        self.labels = labels.masked_fill(self.mask, -100)
        self.num_tokens = int((self.labels != -100).sum())
        self.options: dict[str, Any] = dict(cu_seqlens=self.cu_seqlens)
        if self.mask.any():
            self.options["padding_mask_BT"] = self.mask

    def run(self, model: Decoder) -> Tensor:
        """Return the loss of the model."""
        options = dict(num_tokens=self.num_tokens, **self.options)
        loss: Tensor = model(self.tokens, self.labels, **options)
        return loss

    def expected(self, model: Decoder) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss, those of the modules ahead, and the gradients, document by document."""
        config = model.config
        # In fp64, so that fp32's own error counts once.
        params = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
        state = {**dict(model.named_buffers()), **params}
        num_documents, values = sum(n > 0 for n in self.real), []
        starts = self.cu_seqlens.tolist()
        for start, length in zip(starts, self.real):  # noqa: B905
            if not length:
                continue
            part = slice(start, start + length)
            cut = self.tokens.flatten()[None, part], self.labels.flatten()[None, part]
            losses = plain_losses(state, config, *cut, self.num_tokens)
            losses.aux = [value / num_documents for value in losses.aux]
            losses.total(config).backward()
            values.append(torch.stack([losses.main, *losses.ahead]).detach())
        main, *ahead = sum(values)
        total = main + config.mtp_loss_coef * sum(ahead) / max(1, len(ahead))
        return total, torch.stack(ahead or [main]), {n: p.grad for n, p in params.items()}


def errors(model: Decoder, batch: Packed) -> dict[str, float]:
    """Return the relative error of the loss and of every gradient."""
    want, ahead, gradients = batch.expected(model)
    loss = batch.run(model)
    loss.backward()
    found = {"loss": abs(loss.item() / want.item() - 1)}
    if model.mtp_losses is not None:
        found["ahead"] = (model.mtp_losses / ahead - 1).abs().max().item()
    for name, param in model.named_parameters():
        scale = gradients[name].abs().max()
        assert scale > 0, name
        found[name] = float((param.grad - gradients[name]).abs().max() / scale)
    return found


@pytest.mark.parametrize(("rows", "padding"), [(1, None), (2, [2, 0, 4, 1, 0, 0])])
@pytest.mark.parametrize(
    "name",
    [
        "latent, 2",
        "grouped, tied, dense, 1",
        "windows, sinks, biases, 1",
        "linear, gates, 1",
        "hybrid",
    ],
)
def test_every_gradient_is_that_of_documents_one_by_one(name, rows, padding) -> None:
    """Documents of one row or across rows; the balance loss is the mean over documents."""
    config = with_balance(HYBRID if name == "hybrid" else CONFIGS[name], PER_DOCUMENT)
    batch = Packed(config, [5, 11, 9, 7, 0, 0], rows, padding)
    found = errors(make(config), batch)
    assert max(found.values()) <= 1e-5, max(found.items(), key=lambda item: item[1])


def test_documents_shorter_than_what_is_predicted() -> None:
    config = with_balance(CONFIGS["latent, 2"], NO_LOSS)
    found = errors(make(config), Packed(config, [1, 2, 16, 1, 3, 1]))
    assert max(found.values()) <= 1e-5, max(found.items(), key=lambda item: item[1])


def test_angles_restart_with_each_document() -> None:
    """Scores only know the distance, so that no loss above depends on it."""
    model = make(CONFIGS["latent, 1"])
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    rows = model.model.build_sequence(tokens).rotary
    packed = model.model.build_sequence(tokens, cu_seqlens=torch.tensor([0, 4, 9, 12])).rotary
    places = [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]
    assert torch.equal(packed.cos_Td, rows.cos_Td[places])
    assert torch.equal(packed.sin_Td, rows.sin_Td[places])


def test_padding_reaches_no_expert() -> None:
    config = with_balance(CONFIGS["latent, 1"], NO_LOSS)
    batch, model = Packed(config, [5, 11, 9, 7], padding=[2, 0, 4, 1]), make(config)
    batch.run(model).backward()
    for name, layer in model.named_modules():
        if isinstance(
            layer, MoELayer
        ):  # the module ahead has no target at the end of each document
            num_real = 25 - 4 * name.startswith("mtp")
            assert layer.tracker.counts.choices_E.sum() == num_real * config.moe.top_k


def test_what_backward_computes_again_or_offloads() -> None:
    config = with_balance(CONFIGS["grouped, tied, dense, 1"], PER_DOCUMENT)
    batch, plain = Packed(config, [5, 11, 8]), make(config)
    batch.run(plain).backward()
    model = make(config)
    options = MemoryOptions(recompute="gemm_last", offload=("rest",))
    apply_memory_options([*model.layers, *model.mtp], options, torch.device("cpu"))
    batch.run(model).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def test_compiled_blocks() -> None:
    config = with_balance(CONFIGS["grouped, tied, dense, 1"], PER_DOCUMENT)
    plain, model = make(config), make(config)
    compile_blocks([*model.layers, *model.mtp], backend="aot_eager")
    for lengths in ([5, 11, 8], [3, 20, 1], [6, 2, 16]):
        batch, found = Packed(config, lengths), []
        for one in (plain, model):
            one.zero_grad()
            batch.run(one).backward()
            found.append([p.grad for p in one.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_drops_by_position_count_places_in_documents() -> None:
    """Tokens 0 1 2 | 3 4: places 0 1 2 0 1, so token 3 goes before token 1."""
    cu_seqlens = torch.tensor([0, 3, 5, 5], dtype=torch.int32)
    order = sort_by_position(5, 1, None, torch.device("cpu"), cu_seqlens)
    assert order.tolist() == [0, 3, 1, 4, 2]
    mask = torch.tensor([False, True, False, True, False])  # places of 0, 2 and 4: 0 1 0
    order = sort_by_position(5, 1, mask, torch.device("cpu"), cu_seqlens)
    assert [t for t in order.tolist() if not mask[t]] == [0, 4, 2]
    config = MoEConfig(
        dim=16,
        hidden_dim=16,
        num_experts=2,
        top_k=1,
        capacity=CapacityConfig(factor=0.5, drop="position"),
    )
    layer = MoELayer(config)
    layer.init_weights(std=0.1, key="moe", seed=0)
    x = torch.ones(1, 8, 16)  # one expert, of which two tokens are taken
    for cu, taken in (([0, 8], [0, 1]), ([0, 5, 8], [0, 5])):
        y = layer(x, cu_seqlens=torch.tensor(cu, dtype=torch.int32))
        assert y[0].abs().sum(-1).nonzero().flatten().tolist() == taken
    with pytest.raises(ValueError, match=r"cu_seqlens \(\(2,\), torch.int64\) must be int32"):
        layer(x, cu_seqlens=torch.tensor([0, 8]))


def test_refusals() -> None:
    config = replace(CONFIGS["latent, 1"], max_seq_len=8, mla=replace(CONFIGS["latent, 1"].mla))
    model = make(config)
    tokens = torch.zeros(1, 12, dtype=torch.int64)
    for options, message in (
        ({}, r"sequence length \(12\) must be <= max_seq_len \(8\)"),
        (dict(cu_seqlens=torch.tensor([0, 9, 12])), r"sequence length \(9\) must be <= max_seq"),
        (dict(cu_seqlens=torch.tensor([0, 9])), r"cu_seqlens \(first and last \(0, 9\)\) must"),
        (dict(max_seqlen=4), r"max_seqlen \(4\) must be None without cu_seqlens"),
        (dict(cu_seqlens=[0, 12]), "cu_seqlens .* must be a Tensor or None"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens, **options)
    assert model(tokens, cu_seqlens=torch.tensor([0, 8, 12])).shape == (1, 12, config.vocab_size)
