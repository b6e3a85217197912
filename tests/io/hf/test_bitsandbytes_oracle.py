"""Directories of transformers with bitsandbytes are read with its values, and ours by both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moecore.io import export_hf, load_hf
from moecore.moe.stored_weights import get_four_bit_blocks, read_four_bit_values
from tests.families.transformers.hf_models import random_model, transformers
from tests.io.hf.test_bitsandbytes import SIZES, frozen_model

bnb = pytest.importorskip("bitsandbytes", reason="an oracle, which extra `oracles` has")
pytest.importorskip("accelerate", reason="transformers needs it to load bitsandbytes' weights")


def dequantised(model: Any) -> dict[str, torch.Tensor]:
    """The values that bitsandbytes computes, in the dtype of the model."""
    found = {}
    for name, param in model.named_parameters():
        if isinstance(param, bnb.nn.Params4bit):
            param = bnb.functional.dequantize_4bit(param.data, param.quant_state)
        found[name] = param.detach()
    return found


@pytest.mark.parametrize("nested", [False, True])
def test_directories_of_transformers(no_group_left: None, tmp_path: Path, nested: bool) -> None:
    random_model("qwen2-moe", **SIZES).bfloat16().save_pretrained(tmp_path / "wide")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested
    )
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(tmp_path / "wide", dtype=torch.bfloat16, quantization_config=config)
    theirs.save_pretrained(tmp_path / "stored")
    expected = dequantised(theirs)
    assert sum(p.dtype == torch.uint8 for p in theirs.parameters()) >= 2 * 7
    plain = random_model("qwen2-moe", **SIZES).bfloat16()
    load_hf(tmp_path / "stored", plain, cast=True)
    for name, param in plain.named_parameters():
        assert torch.equal(param, expected[name]), name
    ours = frozen_model()
    load_hf(tmp_path / "stored", ours, cast=True)
    for name, param in ours.named_parameters():
        blocks = get_four_bit_blocks(param)
        if blocks is not None and ".experts." not in name:
            assert torch.equal(read_four_bit_values(blocks, param.dtype), expected[name]), name


def test_transformers_reads_an_export(no_group_left: None, tmp_path: Path) -> None:
    ours = frozen_model()
    export_hf(ours, tmp_path / "ours", quantization="bitsandbytes")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    found = dequantised(theirs)
    assert sum(isinstance(p, bnb.nn.Params4bit) for p in theirs.parameters()) == 2 * 7
    for name, param in ours.named_parameters():
        blocks = get_four_bit_blocks(param)
        value = param.to_local() if blocks is None else read_four_bit_values(blocks, param.dtype)  # type: ignore[attr-defined]
        assert torch.equal(found[name], value), name
