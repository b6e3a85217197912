from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moecore import BalanceConfig
from moecore.models import DecoderConfig
from tests.models.plain_decoder import plain_losses
from tests.models.test_mtp import CONFIGS, make

ALL_LOSSES = BalanceConfig(
    micro_batch_coef=0.1, sequence_coef=0.2, global_batch_coef=0.3, z_loss_coef=0.01
)


def padded(config: DecoderConfig, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and mask of 16 positions; padding holds tokens like any other."""
    g = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, config.vocab_size, (len(lengths), 17), generator=g)
    mask = torch.arange(16) >= torch.tensor(lengths)[:, None]
    return tokens[:, :-1], tokens[:, 1:].masked_fill(mask, -100), mask


def with_balance(config: DecoderConfig, balance: BalanceConfig) -> DecoderConfig:
    return replace(config, moe=replace(config.moe, balance=balance))


def assert_equal_to_cut(model, lengths, groups, aux_share) -> None:
    """Compare with the sum over groups of equally long sequences."""
    tokens, labels, mask = padded(model.config, lengths)
    num_tokens = int((labels != -100).sum())
    params = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    values = []
    for group in groups:
        n = lengths[group.start]
        state = {**dict(model.named_buffers()), **params}
        cut = tokens[group, :n], labels[group, :n]
        losses = plain_losses(state, model.config, *cut, num_tokens)
        losses.aux = [value * aux_share for value in losses.aux]
        losses.total(model.config).backward()
        values.append(torch.stack([losses.main, *losses.ahead]).detach())
    loss = model(tokens, labels, num_tokens=num_tokens, padding_mask_BT=mask)
    loss.backward()
    main, *ahead = sum(values)
    torch.testing.assert_close(model.mtp_losses, torch.stack(ahead), rtol=1e-5, atol=0)
    total = main + model.config.mtp_loss_coef * torch.stack(ahead).mean()
    torch.testing.assert_close(loss, total, rtol=1e-5, atol=0)
    for name, param in model.named_parameters():
        want = params[name].grad
        assert (param.grad - want).abs().max() <= 1e-5 * want.abs().max(), name


@pytest.mark.parametrize("name", ["latent, 2", "grouped, tied, dense, 1"])
def test_equally_long_sequences_with_every_balance_loss(name):
    config = with_balance(CONFIGS[name], ALL_LOSSES)
    assert_equal_to_cut(make(config), (11, 11, 11), [slice(0, 3)], aux_share=1.0)


@pytest.mark.parametrize("name", ["latent, 2", "grouped, tied, dense, 1"])
def test_sequences_of_every_length(name):
    """The sequence loss is the mean over sequences; the others count over the whole batch."""
    config = with_balance(CONFIGS[name], BalanceConfig(sequence_coef=0.2))
    groups = [slice(i, i + 1) for i in range(4)]
    assert_equal_to_cut(make(config), (16, 3, 9, 12), groups, aux_share=1 / 4)
