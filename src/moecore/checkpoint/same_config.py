"""Whether two configs of a native decoder give the same numbers from the same weights.

Names and shapes do not tell: another top_k, score function or rope_theta fits every tensor. What
only training reads may differ, because it changes between runs that go on from each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import Any

from torch import nn

from moecore.models.config import DecoderConfig
from moecore.models.decoder import Decoder

# num_mtp_layers is here because names tell of it.
TRAINING = frozenset(
    {
        *("num_mtp_layers", "mtp_loss_coef", "ce_chunk_tokens", "max_seq_len"),
        *("moe.balance", "moe.router_jitter", "moe.router_dtype", "moe.capacity"),
    }
)


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two configs differ.

    Attributes:
        name: its path, such as moe.top_k.
        ours: how the first config has it; of a record only whether it is given.
        theirs: likewise, of the second.
    """

    name: str
    ours: str
    theirs: str


def differences(
    ours: DecoderConfig,
    theirs: DecoderConfig | Mapping[str, Any] | None,
    *,
    skipped: Collection[str] = TRAINING,
) -> list[Difference]:
    """Return the fields that differ; none where `theirs` describes no native decoder.

    Args:
        ours: of a decoder.
        theirs: likewise, or what JSON made of one. A field that it lacks has its default: it was
            written before the field was there.
        skipped: paths of fields that may differ.
    """
    values = asdict(theirs) if isinstance(theirs, DecoderConfig) else theirs
    required = {field.name for field in fields(DecoderConfig) if field.default is MISSING}
    if values is None or not required <= values.keys():
        return []
    return list(_differing(ours, values, "", skipped))


def own_config(model: nn.Module) -> DecoderConfig | None:
    """Return the config of the one native decoder that a model is or holds; else None."""
    found = [module.config for module in model.modules() if isinstance(module, Decoder)]
    return found[0] if len(found) == 1 else None


def _differing(
    ours: Any, theirs: Mapping[str, Any], prefix: str, skipped: Collection[str]
) -> Iterator[Difference]:
    for field in fields(ours):
        name = prefix + field.name
        mine, other = getattr(ours, field.name), theirs.get(field.name, field.default)
        if name in skipped or other is MISSING:
            continue
        if is_dataclass(mine) and isinstance(other, Mapping):
            yield from _differing(mine, other, f"{name}.", skipped)
        elif _plain(mine) != _plain(other):
            yield Difference(name, _shown(mine), _shown(other))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return "given" if is_dataclass(value) or isinstance(value, Mapping) else repr(value)
