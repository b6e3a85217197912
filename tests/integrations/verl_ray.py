"""verl's training worker in Ray actors without GPUs, and steps of GRPO that a driver runs by it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from tensordict import TensorDict
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils import tensordict_utils
from verl.workers.config import (
    ActorConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

from moecore.integrations.verl import MoECoreEngineConfig
from tests.families.transformers.hf_models import random_model

REPO = Path(__file__).parents[2]
RANKS, PROMPTS, GROUP, MINI_BATCH = 4, 4, 4, 8
MOST_NEW, END, TEMPERATURE = 6, 1, 0.8
LR, CLIP_GRAD, CLIP, KL_COEF, EPS = 1e-3, 0.5, 0.02, 0.1, 1e-3


class PlatformCPU(PlatformCUDA):
    """The platform that verl lacks."""

    device_name = "cpu"
    device_module: Any = SimpleNamespace(
        get_device_name=lambda: "CPU", max_memory_allocated=lambda: 0, max_memory_reserved=lambda: 0
    )

    def is_available(self) -> bool:
        return True


set_platform(PlatformCPU())


class Worker(TrainingWorker):
    """verl's worker, which also gives its weights to the driver."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        dist.init_process_group("gloo")  # verl's own call names the CPU twice
        super().__init__(config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, Tensor]:
        """Return whole tensors by Hugging Face names."""
        return {name: tensor.clone() for name, tensor in self.engine.get_per_tensor_param()[0]}


def start(folder: str, parallel: dict[str, int], dynamic: bool) -> RayWorkerGroup:
    """Return a group of workers with a model of the folder, and the loss of GRPO."""
    words = {str(i): i for i in range(61)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=str(END), pad_token="0"
    ).save_pretrained(folder)
    optimizer = FSDPOptimizerConfig(
        lr=LR, weight_decay=0.1, clip_grad=CLIP_GRAD, override_optimizer_config={"eps": EPS}
    )
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(path=folder, override_config={"attn_implementation": "sdpa"}),
        engine_config=MoECoreEngineConfig(
            dtype="float32",
            parallel=parallel,
            dynamic_context=dynamic,
            max_token_len_per_gpu=8,
            infer_max_token_len_per_gpu=8,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=2,
            infer_micro_batch_size_per_gpu=4,
        ),
        optimizer_config=optimizer,
    )
    paths = os.pathsep.join([str(REPO / "src"), str(REPO), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": paths, "VERL_ENGINE_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}
    workers = RayWorkerGroup(
        RayResourcePool([RANKS], use_gpu=False, max_colocate_count=1),
        RayClassWithInitArgs(ray.remote(Worker), config=config),
        device_name="cpu",
        worker_env=env,
    )
    workers.reset()
    actor = ActorConfig(
        strategy="moecore",
        clip_ratio=CLIP,
        clip_ratio_low=CLIP,
        clip_ratio_high=CLIP,
        use_kl_loss=True,
        kl_loss_coef=KL_COEF,
        kl_loss_type="low_var_kl",
        ppo_micro_batch_size_per_gpu=2,
        rollout_n=GROUP,
    )
    workers.set_loss_fn(partial(ppo_loss, actor))
    return workers


def synced(plain: nn.Module, workers: RayWorkerGroup) -> nn.Module:
    """Return a stock model with the weights of the workers."""
    weights = workers.weights()[0]
    made: Any = type(plain)
    found: nn.Module = made.from_pretrained(None, config=plain.config, state_dict=weights)
    return found.eval()


def sample(model: nn.Module, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return prompts, and responses by transformers' `generate`, groups end to end."""
    torch.manual_seed(seed)
    prompts, responses = [], []
    for length in range(2, 2 + PROMPTS):
        ids = torch.randint(2, 61, (1, length))
        out = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            temperature=TEMPERATURE,
            max_new_tokens=MOST_NEW,
            num_return_sequences=GROUP,
            eos_token_id=END,
            pad_token_id=0,
        )[:, length:]
        for row in out:
            ends = (row == END).nonzero()
            responses.append(row[: int(ends[0]) + 1] if len(ends) else row)
            prompts.append(ids[0])
    return prompts, responses


def log_probs(model: nn.Module, prompt: Tensor, response: Tensor) -> Tensor:
    """Return those of a response, by a stock model."""
    ids = torch.cat([prompt, response])
    logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1).gather(1, response[:, None])[:, 0]


def advantages_of(responses: list[Tensor]) -> list[Tensor]:
    """Return verl's advantages of GRPO; the reward is the share of even tokens."""
    rewards = torch.zeros(len(responses), MOST_NEW)
    mask = torch.zeros(len(responses), MOST_NEW)
    for i, row in enumerate(responses):
        rewards[i, len(row) - 1] = (row % 2 == 0).float().mean()
        mask[i, : len(row)] = 1
    groups = np.arange(len(responses)) // GROUP
    found, _ = compute_grpo_outcome_advantage(rewards, mask, groups)
    return [row[: len(ids)] for row, ids in zip(found, responses, strict=True)]


def step_by_hand(model, optimizer, rows):
    """Run a step of GRPO's loss, a mean over tokens; return the norm of its gradient."""
    losses = []
    for row in rows:
        log_p = log_probs(model, row["prompt"], row["response"])
        ratio, log_r = (log_p - row["old"]).exp(), row["ref"] - log_p
        gain = torch.min(
            ratio * row["advantages"], ratio.clip(1 - CLIP, 1 + CLIP) * row["advantages"]
        )
        losses.append(KL_COEF * (log_r.exp() - 1 - log_r) - gain)
    torch.cat(losses).mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def batch_of(prompts: list[Tensor], responses: list[Tensor], **numbers: list[Tensor]) -> TensorDict:
    """Return verl's batch without padding; `numbers` are of the tokens of responses."""
    whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    ones = [torch.ones(len(row)) for row in responses]
    fields = {
        "input_ids": whole,
        "position_ids": [torch.arange(len(row)) for row in whole],
        "loss_mask": [
            torch.cat([torch.zeros(len(p)), one]) for p, one in zip(prompts, ones, strict=True)
        ],
        "prompts": prompts,
        "responses": responses,
        "response_mask": ones,
    }
    every = {
        name: torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        for name, rows in (fields | numbers).items()
    }
    data = TensorDict(every, batch_size=[len(whole)])
    how = {"temperature": TEMPERATURE, "max_response_len": MOST_NEW}
    tensordict_utils.assign_non_tensor(data, **how)
    return data


def scores_of(workers, prompts, responses):
    """Return log-probabilities of responses, by the workers."""
    data = batch_of(prompts, responses)
    tensordict_utils.assign_non_tensor(data, compute_loss=False)
    rows = workers.infer_batch(data).get()["log_probs"].unbind()
    return [row[len(prompt) - 1 : -1] for row, prompt in zip(rows, prompts, strict=True)]


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(found, wanted, strict=True))


def drive(
    folder: str, parallel: dict[str, int], dynamic: bool, num_steps: int
) -> list[dict[str, Any]]:
    """Sample, score, train and sync; return how far each step is from stock transformers."""
    plain = random_model("qwen3-moe").eval()
    plain.save_pretrained(folder)
    reference = random_model("qwen3-moe").eval()
    adamw = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.1, eps=EPS)
    workers, found = start(folder, parallel, dynamic), []
    data_ranks = 1 if dynamic else 2
    for number in range(num_steps):
        sampler = synced(plain, workers)
        prompts, responses = sample(sampler, number)
        olds, advantages = scores_of(workers, prompts, responses), advantages_of(responses)
        with torch.no_grad():
            pairs = list(zip(prompts, responses, strict=True))
            refs = [log_probs(reference, *pair) for pair in pairs]
            apart = distance(olds, [log_probs(sampler, *pair) for pair in pairs])
        numbers = {"old_log_probs": olds, "ref_log_prob": refs, "advantages": advantages}
        data = batch_of(prompts, responses, **numbers)
        if dynamic:  # verl pads what it selects to its own longest response
            tensordict_utils.pop(data, "max_response_len")
        how: dict[str, Any] = {"mini_batch_size": MINI_BATCH, "global_batch_size": MINI_BATCH}
        how |= {"epochs": 1, "dataloader_kwargs": {"shuffle": False}}
        tensordict_utils.assign_non_tensor(data, **how)
        metrics = tensordict_utils.get(workers.train_mini_batch(data).get(), "metrics")
        rows = [
            dict(prompt=p, response=r, old=o, ref=f, advantages=a)
            for (p, r), o, f, a in zip(pairs, olds, refs, advantages, strict=True)
        ]
        norms = [step_by_hand(plain, adamw, mini) for mini in mini_batches(rows, data_ranks)]
        found.append({"log-probs": apart, "norms": (metrics["grad_norm"], norms)})
        found[-1] |= {"clipped": metrics["actor/pg_clipfrac"], "advantages": advantages}
    named = dict(synced(plain, workers).named_parameters())
    names, wanted = zip(*plain.named_parameters(), strict=True)
    found[-1]["weights"] = distance([named[n] for n in names], list(wanted))
    return found


def mini_batches(rows: list[Any], data_ranks: int) -> list[list[Any]]:
    """Return those of the workers; each data rank has a part of all rows in order."""
    own, part = len(rows) // data_ranks, MINI_BATCH // data_ranks
    return [
        [row for rank in range(data_ranks) for row in rows[rank * own + i : rank * own + i + part]]
        for i in range(0, own, part)
    ]
