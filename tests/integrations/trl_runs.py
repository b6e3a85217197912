"""SFT and DPO of TRL, by its own trainers under DDP and by the same with MoETrainer in front."""

from __future__ import annotations

import copy
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from moecore.integrations.transformers import MoETrainer
from tests.integrations.trainer_runs import COMMON, furthest, logged, make_model, sharded, whole


class MoESFTTrainer(MoETrainer, SFTTrainer):
    pass


class MoEDPOTrainer(MoETrainer, DPOTrainer):
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    """Words w3 to w60 are tokens 3 to 60."""
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, 61))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def text(start: int, length: int) -> str:
    return " ".join(f"w{3 + (start * 7 + i * 5) % 58}" for i in range(length))


def compare(stock: Any, ours: Any, *names: str) -> dict[str, Any]:
    stock.train()
    ours.train()
    return {
        "stock": logged(stock, *names),
        "ours": logged(ours, *names),
        "distance": furthest(whole(ours.model), whole(stock.model)),
    }


def options(**more: Any) -> dict[str, Any]:
    return COMMON | dict(max_steps=2, bf16=False, eval_strategy="steps", eval_steps=2) | more


def sft(folder: str) -> dict[str, Any]:
    """Completions of several lengths: the loss is on them alone. TRL's own balance loss is on."""
    rows = [
        {"prompt": text(i, 3 + i % 4), "completion": " " + text(i + 1, 2 + i)} for i in range(12)
    ]
    data = Dataset.from_list(rows)

    def trainer(cls: type[SFTTrainer], model: nn.Module) -> SFTTrainer:
        args = SFTConfig(folder, **options())
        common = dict(train_dataset=data, eval_dataset=data, processing_class=tokenizer())
        return cls(model, args, **common)

    model = make_model()
    stock = trainer(SFTTrainer, copy.deepcopy(model))
    names = ("loss", "grad_norm", "mean_token_accuracy", "aux_loss", "eval_loss")
    return compare(stock, trainer(MoESFTTrainer, sharded(model)), *names)


def dpo(folder: str) -> dict[str, Any]:
    """The reference is sharded, too, and another model than the one that is trained."""
    rows = [
        {"prompt": text(i, 3), "chosen": " " + text(i + 1, 2 + i % 5), "rejected": " " + text(i, 4)}
        for i in range(12)
    ]
    data = Dataset.from_list(rows)

    def trainer(cls: type[DPOTrainer], model: nn.Module, reference: nn.Module) -> DPOTrainer:
        args = DPOConfig(folder, **options())
        common = dict(train_dataset=data, eval_dataset=data, processing_class=tokenizer())
        return cls(model, reference, args, **common)

    model, reference = make_model(), make_model(norm_topk_prob=False)
    stock = trainer(DPOTrainer, copy.deepcopy(model), copy.deepcopy(reference))
    ours = trainer(MoEDPOTrainer, sharded(model), sharded(reference))
    return compare(stock, ours, "loss", "grad_norm", "rewards/margins", "eval_loss")
