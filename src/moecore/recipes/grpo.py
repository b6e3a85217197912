r"""Teach a tiny Mixture-of-Experts model sums, by reward alone: sample, score, train, sync.

    moecore grpo                                     CPU: 2 processes; else all GPUs
    moecore grpo --ranks 1 --steps 50
    torchrun --nproc-per-node 8 -m moecore grpo --ep 8 --batch-size 4

A prompt is "3+4=", the best response "7" and the end. A digit that is right is worth half a point,
and so is to end behind the first digit. The model begins with random weights and sees no answer.

Two models share each device. The policy is trained: `parallelize_moe` has sharded it over all
ranks. The sampler is transformers' own model, whole on each rank, with its `generate`. A step is

    sync      `Engine.weights` streams the policy's weights into the sampler
    sample    a group of responses to each of the rank's prompts, the training off the device
    score     0, 0.5 or 1 point per response; advantages are those within a group
    train     forward and backward of GRPO's loss, and `TrainStep.finish`

The steps are those of loop.py, as in train.py: metrics.jsonl and curves.png have the reward, and a
run that is started again with the same arguments goes on from its last checkpoint.

Legend: P prompts of a rank, G responses to each, n = P * G.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moecore.base.options.layer import BalanceConfig
from moecore.families import use_causal_attention
from moecore.io import WeightStream
from moecore.parallel.mesh import build_meshes
from moecore.parallelize import parallelize_moe
from moecore.recipes.job import TrainingJob
from moecore.recipes.loop import batch_shape, begins, ranks_of, run, say, start
from moecore.recipes.metrics import Metrics
from moecore.recipes.optimizer import RECIPE, optimizer_of
from moecore.recipes.options import (
    add_degrees,
    count,
    parallel_config,
    positive_int,
)
from moecore.recipes.records import add_records, parse
from moecore.recipes.report import make_run_dir
from moecore.rl import GRPO, Engine, Rollouts, group_advantages

PLUS, EQUALS, END, VOCABULARY = 10, 11, 12, 13  # digits are tokens 0 to 9
SUMS = torch.tensor([(a, PLUS, b, EQUALS) for a in range(5) for b in range(5)])
MAX_NEW_TOKENS = 3
NUM_EXPERTS = 8


@dataclass(frozen=True, slots=True)
class Samples:
    """What a rank has sampled in a step.

    Attributes:
        rollouts: with advantages.
        rewards_n: fp32.
    """

    rollouts: Rollouts
    rewards_n: Tensor

    def counts(self) -> Tensor:
        """Return tokens of responses, tokens, responses and half points: int64 [4]."""
        numbers = (
            self.rollouts.response_mask_N.sum(),
            len(self.rollouts.tokens_N),
            len(self.rewards_n),
            (2 * self.rewards_n).sum(),
        )
        return torch.tensor([int(number) for number in numbers])


@dataclass(kw_only=True)
class Reinforcement(TrainingJob[Samples]):
    """A policy on sums.

    Attributes:
        sampler: transformers' own model.
        engine: of the policy, `model`.
        weights: of the policy, for the sampler.
    """

    sampler: Any

    unit = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = Engine(self.model, self.owner, max_tokens=self.args.seq_len)
        self.weights: WeightStream = self.engine.weights(bucket_bytes=1 << 24, layout="fused")

    def begin(self) -> None:
        """Print what is trained."""
        prompts, group = self.args.batch_size, self.args.group
        progress = f"{begins(self, 'from scratch')} to step {self.args.steps} on {ranks_of(self)}"
        say(f"GRPO {progress}: {group} responses to each of {prompts} prompts per data rank")

    def next_batch(self, step: int) -> Samples:
        """Sample and score. A step's random numbers are its own, so a run may stop behind any."""
        args, data_ranks = self.args, self.meshes.data_ranks
        torch.manual_seed((args.seed + step) * data_ranks + self.meshes.data_rank)
        prompts_P4 = SUMS[torch.randint(len(SUMS), (args.batch_size,))]
        prompts_n4 = prompts_P4.repeat_interleave(args.group, 0)
        groups_n = torch.arange(args.batch_size).repeat_interleave(args.group)
        self.sync()
        self.engine.offload("all")
        responses = self.generate(prompts_n4, do_sample=True)
        self.engine.onload("all")
        pairs = zip(prompts_n4.tolist(), responses, strict=True)
        rewards_n = torch.tensor([reward(prompt, response) for prompt, response in pairs])
        rollouts = Rollouts.of(prompts_n4.tolist(), responses)
        advantages_N = rollouts.spread(group_advantages(rewards_n, groups_n))
        return Samples(rollouts.replace(advantages_N=advantages_N), rewards_n)

    @torch.no_grad()
    def sync(self) -> None:
        """Give the sampler the policy's weights. Collective."""
        state = self.sampler.state_dict()
        for name, tensor in self.weights:
            state[name].copy_(tensor)

    def generate(self, prompts_n4: Tensor, *, do_sample: bool) -> list[list[int]]:
        """Return a response to each prompt, with its end if it has one."""
        options: dict[str, Any] = {"do_sample": do_sample, "max_new_tokens": MAX_NEW_TOKENS}
        if do_sample:
            options["top_k"] = 0
        prompts_n4 = prompts_n4.to(self.device)
        mask_n4 = torch.ones_like(prompts_n4)
        ids_nT = self.sampler.generate(prompts_n4, attention_mask=mask_n4, **options)
        return [until_end(response) for response in ids_nT[:, prompts_n4.shape[1] :].tolist()]

    def forward_backward(self, num_labels: Tensor, batch: Samples) -> Tensor:
        """Train on the rollouts as the policy that has sampled them: ratios are 1."""
        objective = GRPO(kl_coef=0.0)
        loss = self.engine.forward_backward(batch.rollouts, objective).loss
        return loss / self.meshes.data_ranks  # of the mean, which every rank has

    def more_metrics(self, counts: list[int], seconds: float) -> Metrics:
        """Return the mean reward and length of responses."""
        response_tokens, _, responses, half_points = counts
        return {
            "reward": half_points / 2 / responses,
            "response_tokens": response_tokens / responses,
        }

    def finish(self) -> None:
        """Print how many sums are right."""
        self.sync()
        responses = self.generate(SUMS, do_sample=False)
        right = sum(reward(*pair) == 1 for pair in zip(SUMS.tolist(), responses, strict=True))
        say(f"{right} of {len(SUMS)} sums are right, without sampling")


def until_end(response: list[int]) -> list[int]:
    """Return the tokens of a response up to its end."""
    return response[: response.index(END) + 1] if END in response else response


def reward(prompt: list[int], response: list[int]) -> float:
    """Return the points of a response."""
    a, _, b, _ = prompt
    return ((response[0] == a + b) + (response[1:] == [END] and response[0] < 10)) / 2


def build_job(args: argparse.Namespace) -> Reinforcement:
    """Put policy and sampler on the ranks and load the last checkpoint, if there is one."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    make_run_dir(args.run_dir)
    degrees = parallel_config(args, int(os.environ["WORLD_SIZE"]), num_experts=NUM_EXPERTS)
    meshes = build_meshes(degrees)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        moe_intermediate_size=64,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=16,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    torch.manual_seed(args.seed)
    policy = Qwen3MoeForCausalLM(config)
    sampler = copy.deepcopy(policy)  # with a config of its own: attention with a cache
    use_causal_attention(policy)
    parallelize_moe(policy, meshes, moe={"balance": BalanceConfig(micro_batch_coef=0.01)})
    return Reinforcement(
        args=args,
        meshes=meshes,
        model=policy,
        optimizers=optimizer_of(args).build(policy),
        shape=batch_shape(args, meshes),
        config=config.to_dict(),
        facts={
            "--seed": args.seed,
            "--group": args.group,
            "prompts of a step": meshes.data_ranks * args.batch_size,
        },
        batches=None,
        sampler=sampler.to(meshes.device_type).eval(),
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of a run; None = those of the command line."""
    parser = argparse.ArgumentParser(
        prog="moecore grpo",
        description="Teach a tiny Mixture-of-Experts model sums, by reward alone.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="TOML; a flag beside it wins")
    add("--run-dir", type=Path, default=Path("runs/grpo"), help="all that a run leaves goes here")
    add("--steps", type=positive_int, default=120, help="optimizer steps of the whole run")
    add("--batch-size", type=positive_int, default=16, help="prompts per data rank and step")
    add("--group", type=positive_int, default=16, help="responses to a prompt")
    add(
        "--seq-len",
        type=positive_int,
        default=256,
        help="tokens of a row, which rollouts are packed into",
    )
    add("--seed", type=count, default=0, help="of first weights, prompts and samples")
    add("--checkpoint-every", type=count, default=100, help="steps; 0 = no checkpoint at all")
    add("--ranks", type=positive_int, help="processes (None = one per GPU, 2 on CPU, torchrun's)")
    add_degrees(parser, ("ep", "dp_replicate"))
    add_records(parser, RECIPE)
    parser.set_defaults(**{"optimizer.lr": 4e-3, "optimizer.weight_decay": 0.0})
    # of the loop, no options here
    parser.set_defaults(dtype=None, grad_accum=1, eval_every=0)
    parser.set_defaults(expert_loads_every=10, plain_host=False)
    parser.set_defaults(peak_tflops=None, profile=0)
    return parse(parser, sys.argv[1:] if arguments is None else arguments)


def main(words: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one of them under torchrun."""
    args = parse_arguments(words)

    def check(world_size: int) -> None:
        parallel_config(args, world_size, num_experts=NUM_EXPERTS).resolve(world_size)

    return start(run_rank, args, check)


def run_rank(args: argparse.Namespace) -> int:
    """Build, train and evaluate on this rank."""
    return run(args, build_job)
