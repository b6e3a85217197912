"""The decoder of `moecore pretrain`, and the tables of its options."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from moecore.base.options.layer import BalanceConfig, CapacityConfig, MoEConfig
from moecore.io import decoder_config_from_hf
from moecore.io.hf.config_fields import read_config
from moecore.models import DecoderConfig, preset
from moecore.packing import CorpusOptions
from moecore.recipes.files import check_directory, naming
from moecore.recipes.optimizer import recipe_tables
from moecore.recipes.options import moe_of
from moecore.recipes.records import build, values_of
from moecore.recipes.rotary import RotaryOptions, write_rotary
from moecore.recipes.samples import SampleOptions, sample_options
from moecore.recipes.sharding import TABLES
from moecore.recipes.steps import BatchRamp

RECORDS: dict[str, type] = {
    "corpus": CorpusOptions,
    "model": DecoderConfig,
    "moe": MoEConfig,
    "capacity": CapacityConfig,
    "balance": BalanceConfig,
    "rotary": RotaryOptions,
    "batch": BatchRamp,
    "samples": SampleOptions,
    **TABLES,
}


# What another option says.
EXCLUDED_FIELDS = (
    *("corpus.row_tokens", "corpus.multiple", "corpus.vocab_size", "corpus.seed", "moe.dim"),
    *("balance.micro_batch_coef", "fsdp.param_dtype", "context.dynamic"),
)


def tables_of(
    args: argparse.Namespace, config: DecoderConfig, records: dict[str, Any]
) -> dict[str, Any]:
    """Return the record of each table of the resolved options."""
    if not args.hf_config:
        moe = moe_of(config)
        of_moe = {"moe": moe, "capacity": moe.capacity, "balance": moe.balance}
        records = {"model": config, **of_moe, **records}
    of_run = {"rotary": RotaryOptions(**values_of(args, "rotary")), "batch": ramp_of(args)}
    return records | recipe_tables(args) | of_run | {"samples": sample_options(args)}


def ramp_of(args: argparse.Namespace) -> BatchRamp:
    """Return the options of [batch] of the arguments."""
    return BatchRamp(**values_of(args, "batch"))


def export_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the config.json of an export: --hf-config with the options of [rotary]."""
    values = read_config(args.hf_config)
    return write_rotary(values, model_config(args)) if values_of(args, "rotary") else dict(values)


def model_config(args: argparse.Namespace) -> DecoderConfig:
    """Return the decoder of config.json, or the preset with the fields that were given."""
    fields = {table: values_of(args, table) for table in ("model", "moe", "capacity")}
    if args.hf_config:
        if any(fields.values()):
            name = next(f"{table}.{name}" for table, of in fields.items() for name in of)
            raise ValueError(f"{name} must be that of --hf-config ({args.hf_config}): set it there")
        if not args.hf_config.exists():
            raise ValueError(
                f"--hf-config ({args.hf_config}) must be a config.json or its directory"
            )
        if args.hf_config.is_dir():
            check_directory(args.hf_config, "--hf-config")
        with naming("--hf-config"):
            config = decoder_config_from_hf(args.hf_config)
    else:
        config = preset(args.preset)
        capacity = build(args, "capacity", CapacityConfig) or moe_of(config).capacity
        config = replace(config, **fields["model"])
        moe = replace(moe_of(config), **fields["moe"], dim=config.dim, capacity=capacity)
        config = replace(config, moe=moe)
    balance = values_of(args, "balance")
    if args.aux_loss is not None:
        balance["micro_batch_coef"] = args.aux_loss
    moe = moe_of(config)
    balance = balance or default_balance(moe)
    moe = replace(moe, balance=replace(moe.balance, **balance))
    return RotaryOptions(**values_of(args, "rotary")).apply(replace(config, moe=moe))


def default_balance(moe: MoEConfig) -> dict[str, Any]:
    """Return the fields of [balance] of a run that sets none.

    A model without an expert bias gets the global-batch loss. A bias with sigmoid scores is solved
    by quantiles. docs/findings.md has the loads of both in the first 300 steps. Published strengths
    of the loss, such as 0.001 of Qwen3-MoE, come from runs of a million steps.
    """
    if not moe.expert_bias:
        return {"micro_batch_coef": 0.0, "global_batch_coef": 0.05}
    if moe.score_function == "sigmoid" and moe.top_groups == moe.num_groups:
        return {"bias_update": "quantile", "bias_update_rate": 1.0}
    return {}
