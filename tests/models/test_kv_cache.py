from dataclasses import replace
from typing import Any

import pytest
import torch

from moecore.models import Decoder, DecoderConfig, preset

NUM_PROMPT, NUM_NEW = 5, 7
CONFIGS: dict[str, DecoderConfig] = {
    "tiny": preset("tiny"),
    "qk norm": preset("tiny-qwen3"),
    "window": replace(preset("tiny"), windows=(3,)),
    "sinks": replace(preset("tiny-qwen3"), attention_sinks=True, windows=(3, 0)),
    "latent": preset("tiny-deepseek-v3"),
}


def generated(config: DecoderConfig) -> tuple[list[int], Decoder, torch.Tensor, torch.Tensor]:
    """Return the tokens of each forward, the model, a prompt and its greedy continuation."""
    torch.manual_seed(0)
    model = Decoder(config).eval()
    model.init_weights(1)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    lengths: list[int] = []
    model.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    prompt_BT = torch.randint(config.vocab_size, (2, NUM_PROMPT))
    with torch.no_grad():
        out_BT = model.generate(prompt_BT, NUM_NEW, temperature=0.0)
    return lengths[:], model, prompt_BT, out_BT


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_full_forwards(name: str) -> None:
    lengths, model, tokens_BT, out_BT = generated(CONFIGS[name])
    assert lengths == [NUM_PROMPT] + [1] * (NUM_NEW - 1)
    with torch.no_grad():
        for _ in range(NUM_NEW):
            logits_BV = model(tokens_BT)[:, -1]
            tokens_BT = torch.cat([tokens_BT, logits_BV.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(out_BT, tokens_BT) and model.model.cache is None


@pytest.mark.parametrize(
    "config",
    [preset("tiny-qwen3-next"), replace(preset("tiny"), max_seq_len=NUM_PROMPT + NUM_NEW - 1)],
    ids=["linear attention", "too long"],
)
def test_other_models_run_full_forwards(config: DecoderConfig) -> None:
    lengths, _, _, out_BT = generated(config)
    longest = config.max_seq_len
    assert lengths == [min(NUM_PROMPT + n, longest) for n in range(NUM_NEW)]
    assert out_BT.shape == (2, NUM_PROMPT + NUM_NEW)


def test_a_compiled_layer_keeps_nothing(monkeypatch: Any) -> None:
    model = Decoder(preset("tiny"))
    assert model.model.can_cache
    block: Any = model.model.layers[1]
    block.attend = block.attend
    assert not model.model.can_cache
