"""`small_decoder`: the configs of decoders that ranks train within a second; and such decoders."""

from typing import Any

from moecore import MoEConfig, ParallelConfig, build_meshes, parallelize_moe
from moecore.models import Decoder, DecoderConfig


def small_decoder(
    dim: int,
    hidden_dim: int,
    *,
    experts: int = 4,
    shared: int = 0,
    dense: int = 0,
    moe: Any = None,
    **options: Any,
) -> DecoderConfig:
    """Return the config of a decoder; `moe` and `options` replace fields.

    `shared` is the hidden dim of shared experts, `dense` the hidden dim of the MLP in layer 0; 0 =
    none.
    """
    layer = dict(dim=dim, hidden_dim=hidden_dim, num_experts=experts, top_k=2)
    layer |= dict(shared_hidden_dim=shared) | (moe or {})
    shape = dict(vocab_size=61, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
    mlp = dict(dense_layers=(0,), mlp_hidden_dim=dense) if dense else {}
    fields: Any = dict(dim=dim, moe=MoEConfig(**layer), max_seq_len=32) | shape | mlp | options
    return DecoderConfig(**fields)


def parallel_decoder(
    config: DecoderConfig, parallel: ParallelConfig, *, seed: int = 0, **options: Any
) -> Decoder:
    """Return a decoder of the values of this seed, which was parallelized on meta."""
    model = Decoder(config, device="meta")
    parallelize_moe(model, build_meshes(parallel, "cpu"), **options)
    model.to_empty(device="cpu")
    model.init_weights(seed)
    return model
