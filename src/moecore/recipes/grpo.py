r"""Train a transformers model by a reward function: sample, score, train, sync.

    moecore tiny-model runs/sums --task sums
    moecore grpo --model runs/sums --data runs/sums/prompts.jsonl --max-new-tokens 3 \
        --reward moecore.recipes.sums:reward --lr 4e-3 --seq-len 256
    torchrun --nproc-per-node 8 -m moecore grpo --config grpo.toml --ep 8

Each row of --data has a prompt; rewards.py says what a reward function gets. Two models share each
device. The policy is trained: `parallelize_moe` has sharded it over all ranks. The sampler is
transformers' own model, whole on each rank, with its `generate`. A step is

    sync      `Engine.weights` streams the policy's weights into the sampler
    sample    a group of completions of each of the rank's prompts, the training off the device
    score     the reward function; advantages are those within a group
    train     forward and backward of GRPO's loss, and `TrainStep.finish`

The steps are those of loop.py: metrics.jsonl and curves.png have the reward, and a run that is
started again with the same arguments continues from its last checkpoint. RUN_DIR/export is the
trained model.

Legend: P prompts of a rank, G completions of each, n = P * G.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.command_options import Fields, Table, make_internal_field
from moecore.base.fields import CheckedRecord, Count, Positive
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.layer import BalanceConfig, MoEOverrides
from moecore.base.rank_checks import find_difference
from moecore.io import WeightStream, load_hf
from moecore.parallel.mesh import Meshes, ParallelConfig, build_meshes
from moecore.parallelize import parallelize_moe
from moecore.recipes.files import naming
from moecore.recipes.hf_model import (
    build_hf,
    export,
    num_experts,
    packs,
    read_config,
    read_tokenizer,
)
from moecore.recipes.hub import model_directory
from moecore.recipes.job import TrainingJob
from moecore.recipes.loop import batch_shape, begins, ranks_of, run, run_command, say
from moecore.recipes.metrics import Metrics
from moecore.recipes.optimizer import OptimizerConfig
from moecore.recipes.options import RunConfig
from moecore.recipes.parser import parse
from moecore.recipes.prompts import Prompt, PromptSteps, read_prompts
from moecore.recipes.report import EXPORT, make_run_dir
from moecore.recipes.rewards import Reward, load_reward, rewards_of
from moecore.recipes.rows import ColumnNames, DatasetOptions
from moecore.rl import GRPO, Engine, Rollouts, group_advantages


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions(CheckedRecord):
    """Completions of prompts, and their rewards.

    Attributes:
        reward: MODULE:FUNCTION of (prompts, completions, **columns) -> list of numbers, as TRL's.
        group: completions of a prompt.
        max_new_tokens: tokens of a completion.
        temperature: logits are divided by it.
    """

    reward: str
    group: Count = 16
    max_new_tokens: Count = 256
    temperature: Positive = 1.0


PREFIX = Table(prefix=True)
# The sampler is unsharded, and rollouts are packed rows of one rank.
UNUSED_DEGREES = tuple(
    item.name for item in fields(ParallelConfig) if item.name not in ("ep", "dp_replicate")
)


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(RunConfig):
    """Train a Hugging Face Mixture-of-Experts model by a reward function.

    Attributes:
        model: a directory of config, tokenizer and weights, or a name of the hub.
        data: rows with a prompt: .jsonl, .parquet, a directory of save_to_disk, or hf:NAME.
        batch_size: prompts per data rank and step.
        seq_len: tokens of a row of packed rollouts.
        sampling: completions and their rewards.
        grpo: the loss.
        dataset: the format of the data.
        columns: the names of the columns of the data.
    """

    model: Path
    data: tuple[Path, ...]
    run_dir: Path = Path("runs/grpo")
    steps: Count = 120
    batch_size: Count = 16
    seq_len: Count = 2048
    grad_accum: Count = make_internal_field(1)
    precision: None = make_internal_field(None)
    cuda_graph: bool = make_internal_field(False)
    eval_every: int = make_internal_field(0)
    peak_tflops: None = make_internal_field(None)
    parallel: Annotated[Fields, Table(record=ParallelConfig, without=UNUSED_DEGREES)] = field(
        default_factory=dict
    )
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6, weight_decay=0.0)
    sampling: SamplingOptions
    grpo: Annotated[GRPO, PREFIX] = GRPO(kl_coef=0.0)
    dataset: Annotated[DatasetOptions, PREFIX] = DatasetOptions()
    columns: Annotated[ColumnNames, PREFIX] = ColumnNames()


@dataclass(frozen=True, slots=True)
class Samples:
    """The completions that a rank has sampled in a step.

    Attributes:
        rollouts: with advantages.
        rewards_n: fp32.
    """

    rollouts: Rollouts
    rewards_n: Tensor

    def counts(self) -> Tensor:
        """Return tokens of completions, tokens, completions and 0: int64 [4]."""
        num_new = int(self.rollouts.response_mask_N.sum())
        return torch.tensor([num_new, len(self.rollouts.tokens_N), len(self.rewards_n), 0])


@dataclass(kw_only=True)
class Reinforcement(TrainingJob[Samples]):
    """A policy on prompts.

    Attributes:
        batches: the prompts.
        sampler: transformers' own model.
        tokenizer: of the policy.
        reward: of completions.
        sampling: how completions are sampled.
        reference: the model of the directory, for the KL penalty; None = there is no penalty.
    """

    batches: PromptSteps
    sampler: Any
    tokenizer: Any
    reward: Reward
    sampling: SamplingOptions
    reference: Any

    unit = "token"
    chosen_by = "--data and --batch-size"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.objective: GRPO = self.args.grpo
        self.engine = Engine(
            self.model, self.owner, max_tokens=self.args.seq_len, reference=self.reference
        )
        self.weights: WeightStream = self.engine.weights(bucket_bytes=1 << 24, layout="fused")
        self._metrics: Metrics = {}
        end = self.sampler.generation_config.eos_token_id
        end = self.tokenizer.eos_token_id if end is None else end
        self._ends = set(end if isinstance(end, list) else [end])

    def begin(self) -> None:
        """Print what is trained."""
        prompts, group = self.args.batch_size, self.sampling.group
        progress = f"{begins(self, 'from its weights')} to step {self.args.steps}"
        say(
            f"GRPO of {self.args.model} {progress} on {ranks_of(self)}: {group} completions of "
            f"each of {prompts} prompts per data rank"
        )

    def next_batch(self, step: int) -> Samples:
        """Sample and score. A step's random numbers depend only on its number, seed and rank."""
        data_ranks = self.meshes.data_ranks
        torch.manual_seed((self.args.seed + step) * data_ranks + self.meshes.data_rank)
        prompts = [p for p in self.batches.next() for _ in range(self.sampling.group)]
        self.sync()
        self.engine.offload("all")
        responses = self.generate([prompt.ids for prompt in prompts]) if prompts else []
        self.engine.onload("all")
        rewards_n = self.score(prompts, responses)
        rollouts = Rollouts.of(
            [p.ids for p in prompts], responses, temperature=self.sampling.temperature
        )
        groups_n = torch.arange(len(prompts)) // self.sampling.group
        advantages_N = rollouts.spread(group_advantages(rewards_n, groups_n))
        return Samples(rollouts.replace(advantages_N=advantages_N), rewards_n)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[list[int]]) -> Tensor:
        """Return the reward of each completion, and note the mean of all ranks. Collective."""
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        completions = [
            text if isinstance(prompt.content, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        names = {name for prompt in prompts for name in prompt.columns}
        columns = {name: [p.columns.get(name) for p in prompts] for name in sorted(names)}
        columns["completion_ids"] = list(responses)
        rewards_n = rewards_of(self.reward, [p.content for p in prompts], completions, columns)
        moments = torch.stack([rewards_n.sum(), rewards_n.square().sum()]).double()
        moments = torch.cat([moments, moments.new_full((1,), len(rewards_n))]).to(self.device)
        dist.all_reduce(moments)
        total, squares, number = moments.tolist()
        mean = total / number
        self._metrics = {"reward": mean, "reward_std": max(squares / number - mean**2, 0.0) ** 0.5}
        return rewards_n

    @torch.no_grad()
    def sync(self) -> None:
        """Give the sampler the policy's weights. Collective."""
        state = self.sampler.state_dict()
        for name, tensor in self.weights:
            state[name].copy_(tensor)

    def generate(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Return a completion of each prompt, with its end if it has one."""
        T = max(map(len, prompts))
        pad_id = self.tokenizer.pad_token_id
        pad_id = min(self._ends) if pad_id is None else pad_id
        ids_nT = torch.tensor([[pad_id] * (T - len(ids)) + ids for ids in prompts])
        mask_nT = torch.tensor([[0] * (T - len(ids)) + [1] * len(ids) for ids in prompts])
        output_nT = self.sampler.generate(
            ids_nT.to(self.device),
            attention_mask=mask_nT.to(self.device),
            do_sample=True,
            temperature=self.sampling.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self.sampling.max_new_tokens,
            eos_token_id=sorted(self._ends),
            pad_token_id=pad_id,
        )
        return [until_end(response, self._ends) for response in output_nT[:, T:].tolist()]

    def forward_backward(self, num_labels: Tensor, batch: Samples) -> Tensor:
        """Train on the rollouts as the policy that has sampled them: ratios are 1."""
        rollouts = batch.rollouts
        if self.reference is not None:
            scores = self.engine.reference_log_probs(rollouts)
            rollouts = rollouts.replace(ref_log_probs_N=scores.log_probs_N)
        loss = self.engine.forward_backward(rollouts, self.objective).loss
        return loss / self.meshes.data_ranks  # of the mean, which every rank has

    def position(self) -> Metrics:
        """Return the mean and the deviation of the rewards of the step."""
        return self._metrics

    def more_metrics(self, counts: list[int], seconds: float) -> Metrics:
        """Return the mean length of completions."""
        return {"response_tokens": counts[0] / counts[2]}

    def finish(self) -> None:
        """Export a directory that `from_pretrained` loads."""
        target = self.args.run_dir / EXPORT
        if self.start < self.args.steps or not target.exists():
            export(self.model, self.args.model, target)
        say(f"{target} is ready for from_pretrained")


def until_end(response: list[int], ends: set[int]) -> list[int]:
    """Return the tokens of a response up to its first end."""
    place = next((i for i, token in enumerate(response) if token in ends), len(response))
    return response[: place + 1]


def read_model(args: GRPOConfig, config: Any, meshes: Meshes) -> Any:
    """Return the model of the directory, sharded over the ranks."""
    device = torch.device(meshes.device_type)
    model = build_hf(config, args.model)
    if not packs(model):
        raise ValueError(
            f"--model ({args.model}) must keep documents of a row apart, which "
            f"{type(model).__name__} does not: see docs/huggingface.md"
        )
    moe = MoEOverrides()
    if args.aux_loss:
        moe["balance"] = BalanceConfig(micro_batch_coef=args.aux_loss)
    fsdp = FSDPOptions(param_dtype=args.compute_dtype(device))
    parallelize_moe(model, meshes, moe=moe, fsdp=fsdp)
    model.to_empty(device=device)
    with naming("--model"):
        load_hf(args.model, model)
    return model


def build_job(args: GRPOConfig) -> Reinforcement:
    """Put policy and sampler on the ranks and load the last checkpoint, if there is one."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    world_size = int(os.environ["WORLD_SIZE"])
    args, config = check(args, world_size)
    sampling = args.sampling
    reward = load_reward(sampling.reward)
    make_run_dir(args.run_dir)
    tokenizer = read_tokenizer(args.model)
    prompts = read_prompts(
        args.data,
        tokenizer,
        options=args.dataset,
        columns=args.columns,
        max_tokens=args.seq_len - sampling.max_new_tokens,
    )
    meshes = build_meshes(args.parallel_config(world_size, num_experts=num_experts(config)))
    facts = {"--model": args.model.resolve().name, "prompts": len(prompts)}
    if (problem := find_difference(facts, meshes.device_type)) is not None:
        raise ValueError(f"{problem} on every rank: give all hosts the same files")
    policy = read_model(args, config, meshes)
    reference = None
    if args.grpo.kl_coef:
        reference = read_model(args, config, meshes).requires_grad_(False).eval()
    dtype = args.compute_dtype(torch.device(meshes.device_type))
    logging.disable_progress_bar()  # each rank would draw one
    sampler = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    return Reinforcement(
        args=args,
        meshes=meshes,
        model=policy,
        optimizers=args.optimizer.build(policy),
        shape=batch_shape(args, meshes.parallel),
        config=config.to_dict(),
        facts={
            "--seed": args.seed,
            "--group": sampling.group,
            "prompts of a step": meshes.data_ranks * args.batch_size,
            **facts,
        },
        batches=PromptSteps(
            prompts,
            rows=args.batch_size,
            data_rank=meshes.data_rank,
            data_ranks=meshes.data_ranks,
            seed=args.seed,
        ),
        sampler=sampler.to(meshes.device_type).eval(),
        tokenizer=tokenizer,
        reward=reward,
        sampling=sampling,
        reference=reference,
    )


def check(args: GRPOConfig, world_size: int) -> tuple[GRPOConfig, Any]:
    """Return the options, with a directory as `model`, and the config of the model.

    Raises:
        ValueError: for options that do not fit the model, and for a reward that does not import.
    """
    args = replace(args, model=model_directory(args.model))
    config = read_config(args.model)
    args.parallel_config(world_size, num_experts=num_experts(config))
    load_reward(args.sampling.reward)
    return args, config


def parse_arguments(words: Sequence[str] | None = None) -> GRPOConfig:
    """Return the options of a run; None = sys.argv."""
    return parse(GRPOConfig, words, prog="moecore grpo")


def main(words: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one of them under torchrun."""
    return run_command(parse_arguments, words, run_rank=run_rank, check=check)


def run_rank(args: GRPOConfig) -> int:
    """Build, train and export on this rank."""
    return run(args, build_job)
