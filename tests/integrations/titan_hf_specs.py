"""Tiny Hugging Face models, `hf_NAME` for a name of `CONFIGS`, on seeded random tokens.

torchtitan 0.2 imports this module by `--experimental.custom_import`, 0.3 by `--module`.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from moecore import BalanceConfig
from moecore.models import DecoderConfig
from tests.families.transformers.hf_models import ARCHITECTURES, MODELS
from tests.integrations.titan_runs import EOS, V03, VOCAB

BALANCE = BalanceConfig(micro_batch_coef=0.01, bias_update_rate=0.01)


def config(name: str, **options: Any) -> Any:
    """A tiny config whose initial weights are large enough that experts are seen in the loss."""
    return MODELS[name](vocab_size=VOCAB, initializer_range=0.2, **options).config


CONFIGS = {name.replace("-", "_"): config(name) for name in ARCHITECTURES}
CONFIGS |= {
    "tiny": config("qwen3-moe", attn_implementation="sdpa"),
    "own_loss": config("qwen3-moe", output_router_logits=True),
    "tied": config("qwen3-moe", tie_word_embeddings=True),
    "assets": None,
    "kind": {"model_type": "qwen3_moe"},
}
BALANCES: dict[str, BalanceConfig | None] = dict.fromkeys(CONFIGS)
CONFIGS["balanced"], BALANCES["balanced"] = CONFIGS["deepseek_v3"], BALANCE

if V03:
    from moecore.integrations.torchtitan.v03.jobs import decoder_job, hf_job
    from tests.integrations.titan_v03_specs import tiny

    def job(source: Any, balance: BalanceConfig | None) -> Any:
        return tiny(hf_job(source, balance=balance))

    # torchtitan finds a job by the name of a function of this module.
    for name, source in CONFIGS.items():
        globals()[f"hf_{name}"] = partial(job, source, BALANCES[name])
else:
    from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

    from moecore.integrations.torchtitan.v02.specs import add_labels, decoder_spec, hf_spec
    from tests.integrations.titan_specs import build_random_tokens

    def local(spec: TrainSpec) -> TrainSpec:
        loader = add_labels(build_random_tokens)
        return replace(
            spec,
            build_dataloader_fn=loader,
            build_tokenizer_fn=lambda job: SimpleNamespace(eos_id=EOS),
        )

    for name, source in CONFIGS.items():
        spec = hf_spec({"tiny": source}, balance=BALANCES[name])
        register_train_spec(f"hf_{name}", local(spec))


def register_decoder(decoder: DecoderConfig) -> None:
    """Register `same_decoder`: the decoder without the balance loss of its config."""
    assert decoder.moe is not None
    decoder = replace(decoder, moe=replace(decoder.moe, balance=BalanceConfig()))
    if V03:
        globals()["same_decoder"] = lambda: tiny(decoder_job(decoder))
    else:
        register_train_spec("same_decoder", local(decoder_spec({"tiny": decoder})))
