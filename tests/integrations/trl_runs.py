"""SFT, DPO, GRPO of TRL, by its own trainers under DDP and by the same with MoETrainer in front."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from moecore.base.rank_checks import gather_objects
from moecore.integrations.transformers import MoETrainer
from tests.integrations.trainer_runs import COMMON, furthest, logged, make_model, sharded, whole


class MoESFTTrainer(MoETrainer, SFTTrainer):
    pass


class MoEDPOTrainer(MoETrainer, DPOTrainer):
    pass


class MoEGRPOTrainer(MoETrainer, GRPOTrainer):
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


class SeededBegin(TrainerCallback):
    """Two trainers of a process sample by the same random numbers, other ones on each rank."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        torch.manual_seed(dist.get_rank())


def grpo(folder: str) -> dict[str, Any]:
    """Ranks end sampling at different lengths, and each trainer samples from its own model."""
    samples: dict[type, list[Any]] = {}

    def trainer(cls: type[GRPOTrainer], model: nn.Module) -> GRPOTrainer:
        def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
            samples.setdefault(cls, []).append(completion_ids)
            return [sum(i % 7 for i in ids) / len(ids) for ids in completion_ids]

        numbers = dict(max_steps=3, eval_strategy="no", num_generations=4, beta=0.0)
        args = GRPOConfig(folder, **options(**numbers, max_completion_length=8))
        data = Dataset.from_list([{"prompt": text(i, 3 + i % 3)} for i in range(12)])
        common = dict(train_dataset=data, processing_class=tokenizer(), callbacks=[SeededBegin()])
        return cls(model, reward, args, **common)

    model: Any = make_model()
    model.generation_config.eos_token_id = list(range(1, 61, 3))
    stock = trainer(GRPOTrainer, copy.deepcopy(model))
    names = ("loss", "grad_norm", "reward", "entropy")
    found = compare(stock, trainer(MoEGRPOTrainer, sharded(model)), *names)
    lengths = [len(ids) for ids in samples[GRPOTrainer][0]]
    same = samples[GRPOTrainer] == samples[MoEGRPOTrainer]
    return found | {"same samples": gather_objects(same), "longest": gather_objects(max(lengths))}
