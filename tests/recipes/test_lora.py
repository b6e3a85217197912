import importlib
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from moecore.families.transformers.lora_options import LoRAOptions, add_adapters
from moecore.io import save_adapters
from moecore.kernels.rows.four_bit import dequantise, quantise
from moecore.packing import PackedBatchSampler
from moecore.recipes.tiny_model import write_tiny_model
from tests.families.transformers.family_models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.recipes.launched import metrics, rank_of_command
from tests.recipes.test_finetune import loss_of

transformers = pytest.importorskip("transformers", minversion="5")
peft = pytest.importorskip("peft")
STEPS, ROWS, TOKENS, RATE, EPS = 5, 4, 96, 3e-3, 1e-4  # rows of a step
# eps is larger than rounding errors of gradients near 0, which Adam would make steps of the rate.
FILE = f"""
epochs = 9
max_steps = {STEPS}
seq_len = {TOKENS}
batch_size = 2
ep = 2
eval_every = 0
checkpoint_every = 0

[lora]
rank = 4
alpha = 24

[optimizer]
lr = {RATE}
eps = {EPS}

[schedule]
lr_schedule = "constant"
warmup_steps = 0
"""


def on_two_ranks(rank: int, device: torch.device, folder: Path) -> None:
    """Run, and write the adapters before the first step."""
    script = importlib.import_module("moecore.recipes.finetune")
    build_model = script.build_model

    def build(*args: Any, **options: Any) -> Any:
        model = build_model(*args, **options)
        save_adapters(model, folder / "first")
        return model

    with patch.object(script, "build_model", build):
        code, said = rank_of_command(rank, device, "finetune", 2, [str(folder / "lora.toml")])
    assert code == 0, said


def train_stock(folder: Path, examples: list[Any], kind: Any) -> tuple[list[float], Any]:
    """Return the losses of peft's own steps, one example at a time, and the model.

    `kind` is the 4-bit format through which the experts' values have gone; None = none.
    """
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "tiny", dtype=torch.float32)
    for name, param in base.named_parameters():
        if kind is not None and ".experts." in name:
            param.data = dequantise(quantise(param.data, kind), torch.float32)
    model = peft.PeftModel.from_pretrained(base, folder / "first", is_trainable=True)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, RATE, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    steps = iter(PackedBatchSampler([len(e.tokens_T) for e in examples], TOKENS, rows=ROWS))
    losses = []
    for _ in range(STEPS):
        parts = [loss_of(model, examples[number]) for number in next(steps)]
        loss = sum(part for part, _ in parts) / sum(count for _, count in parts)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model


# Of one layer's experts, of all layers' attention, and of a part of a name that no layer ends in.
PATTERNS = """
rank_pattern = ["layers.0.mlp.experts.gate_up_proj=3", "[qk]_proj=2"]
alpha_pattern = ['1\\.mlp\\.experts\\.down_proj=7', "k_proj=5"]
"""
CASES = [
    pytest.param(PATTERNS, None, id="patterns"),
    pytest.param("", "nf4", id="nf4-in-host-memory"),
    pytest.param('[fp8]\nfrozen = "nvfp4"', "nvfp4", id="nvfp4"),
    pytest.param("dora = true\nexperts = false", None, id="dora"),
    pytest.param("rslora = true", None, marks=pytest.mark.nightly, id="rslora"),
]


@pytest.mark.parametrize(("more", "kind"), CASES)
def test_two_ranks_equal_peft(more: str, kind: Any, tmp_path: Path) -> None:
    from moecore.recipes.examples import read_examples

    tiny, data = tmp_path / "tiny", tmp_path / "some.jsonl"
    sizes = (32, 16) if kind is None else (64, 64)
    write_tiny_model(
        tiny, hidden_size=sizes[0], num_hidden_layers=2, head_dim=8, moe_intermediate_size=sizes[1]
    )
    data.write_text("\n".join((tiny / "chats.jsonl").read_text().splitlines()[:40]))
    paths = {"model": str(tiny), "data": [str(data)], "run_dir": str(tmp_path / "run")}
    options = paths | ({"precision": kind, "offload_frozen": True} if kind == "nf4" else {})
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in options.items()]
    file = FILE.replace("alpha = 24\n", f"alpha = 24\n{more}\n")
    (tmp_path / "lora.toml").write_text("".join(lines) + file)
    run_ranks(2, on_two_ranks, tmp_path, over_gloo=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    examples = read_examples([data], tokenizer, seq_len=TOKENS).examples
    losses, model = train_stock(tmp_path, examples, kind)
    found = [line["loss"] for line in metrics(tmp_path / "run")]
    assert found == pytest.approx(losses, rel=1e-5) and losses[-1] < losses[0] - 0.02
    wanted = peft.get_peft_model_state_dict(model)
    adapters = load_file(tmp_path / "run" / "adapters" / "adapter_model.safetensors")
    first = load_file(tmp_path / "first" / "adapter_model.safetensors")
    assert adapters.keys() == wanted.keys()
    assert any(("magnitude" if "dora" in more else "experts") in name for name in wanted)
    for name, tensor in wanted.items():
        assert (adapters[name] - tensor).abs().max() < 1e-5, name
        assert not torch.equal(tensor, first[name]), name
    merged = load_file(tmp_path / "run" / "export" / "model.safetensors")
    for name, tensor in model.merge_and_unload().named_parameters():
        if ".self_attn." in name:
            assert torch.allclose(merged[name].float(), tensor, rtol=0.01, atol=1e-4), name
        elif name.endswith("down_proj"):
            for e, matrix in enumerate(tensor):
                file_name = name.replace("down_proj", f"{e}.down_proj.weight")
                value = merged[file_name].float()
                assert torch.allclose(value, matrix, rtol=0.01, atol=1e-4), file_name
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export")
    with torch.no_grad():
        pair = [loss_of(m, examples[0])[0].item() for m in (reloaded.eval(), model.eval())]
    assert pair[0] == pytest.approx(pair[1], rel=1e-5)


BAD_PATTERNS = {
    "q_proj": "be PATTERN=NUMBER",
    "(=3": "be PATTERN=NUMBER",
    "q=0": "be PATTERN=NUMBER",
}


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
def test_patterns_that_do_not_fit(name: str) -> None:
    for entry, wanted in BAD_PATTERNS.items():
        with pytest.raises(ValueError, match=rf"LoRAOptions.{name} \(.*must {wanted}"):
            LoRAOptions(**{name: (entry,)})
    with pytest.raises(
        ValueError, match=r"\('no_proj'\) must match a layer with adapters, such as"
    ):
        add_adapters(tiny_model("qwen3_moe"), LoRAOptions(**{name: ("q_proj=2", "no_proj=3")}))
