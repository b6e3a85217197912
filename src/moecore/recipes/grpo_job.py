"""The job of `moecore grpo`, its reward functions and its prompts.

    def reward(prompts, completions, **columns) -> list[float]

`prompts` has the prompt of each completion, a text or a list of messages. `completions` has texts,
or for prompts of messages lists with one assistant's message. `columns` has a list for each other
column of --data, and completion_ids, the tokens. The result is one number per completion.

Two models share each device. `parallelize_moe` has sharded the policy over all ranks. Each rank has
a full copy of the sampler, a transformers model with `generate`. The parts of a step are

    sync      `Engine.weights` streams the policy's weights into the sampler
    sample    a group of completions of each of the rank's prompts; training state is offloaded
    score     the reward function; advantages are relative to the group
    train     forward and backward of GRPO's loss, and `TrainStep.finish`

Legend: P prompts of a rank, G completions of each, n = P * G.
"""

import importlib
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.fields import CheckedRecord, Count, Positive
from moecore.base.progress import track_progress
from moecore.io.hf.stream import WeightStream
from moecore.packing.corpus.files import shorten_text
from moecore.recipes.chat import is_chat, tokenize_prompt
from moecore.recipes.data import Steps, make_generator
from moecore.recipes.errors import RewardError
from moecore.recipes.hf_model import export_run
from moecore.recipes.job import TrainingJob
from moecore.recipes.loop import print_on_rank_0
from moecore.recipes.metrics import Metrics
from moecore.recipes.rows import ColumnNames, DatasetOptions, as_messages, parse_tools, read_rows
from moecore.rl import GRPO, Engine, Rollouts, group_advantages

Reward = Callable[..., Sequence[float]]


def load_reward(path: str) -> Reward:
    """Import and return the function MODULE:FUNCTION, also from the working directory."""
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function: Reward = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # of any kind: a module is code
        raise ValueError(
            f"--reward ({path}) must be MODULE:FUNCTION that imports: {shorten_text(error)}"
        ) from None
    if not callable(function):
        raise ValueError(f"--reward ({path}) must name a function: correct it")
    return function


def call_reward(
    reward: Reward, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]
) -> Tensor:
    """Return the reward of each completion, fp32 [n]; RewardError unless all are finite."""
    if not completions:
        return torch.zeros(0, dtype=torch.float32, device="cpu")
    try:
        values = [float(v) for v in reward(prompts=prompts, completions=completions, **columns)]
    except Exception as error:  # of any kind: it is code of the user's own
        line = f"{type(error).__name__}: {error}"
        frames = traceback.extract_tb(error.__traceback__)[1:2]  # of the reward function
        places = [f" ({f.filename} line {f.lineno})" for f in frames if f.filename != __file__]
        raise RewardError(
            f"--reward must return numbers: {' '.join(line.split())[:300]}{''.join(places)}"
        ) from error
    if len(values) != len(completions) or not all(map(math.isfinite, values)):
        raise RewardError(
            f"--reward returned {len(values)} values, which must be one finite number for each of "
            f"{len(completions)} completions: correct it"
        )
    return torch.tensor(values, dtype=torch.float32, device="cpu")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: its text or messages, its token ids, and the columns for a reward function."""

    content: Any
    ids: list[int]
    columns: Mapping[str, Any]


def read_prompts(
    files: Sequence[Path],
    tokenizer: Any,
    *,
    options: DatasetOptions | None,
    columns: ColumnNames | None,
    max_tokens: int,
) -> list[Prompt]:
    """Return the prompts of the files, in order; ValueError for a row of more than `max_tokens`."""
    names, prompts = columns or ColumnNames(), list[Prompt]()
    rows = read_rows(files, "--data", options or DatasetOptions())
    for row in track_progress(rows, "tokenizing", unit="prompts"):
        content = dict(row.parse())
        prompt = as_messages(content.pop(names.prompt, None))
        if not isinstance(prompt, str) and not is_chat(prompt):
            raise ValueError(
                f"{row.location} must have {names.prompt}, a text or messages: correct the row or "
                "columns.prompt"
            )
        try:
            ids = tokenize_prompt(tokenizer, prompt, parse_tools(names.rename_columns(content)))
        except Exception as error:  # of any kind: a template is code
            raise ValueError(
                f"{row.location} must fit the tokenizer of --model: {shorten_text(error)}"
            ) from None
        if not 0 < len(ids) <= max_tokens:
            raise ValueError(
                f"{row.location} ({len(ids)} tokens) must have 1 to {max_tokens} tokens, --seq-len "
                "without --max-new-tokens: raise --seq-len, or leave the row out"
            )
        prompts.append(Prompt(prompt, ids, content))
    if not prompts:
        raise ValueError(f"--data ({' '.join(map(str, files))}) must have a prompt: add rows")
    return prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions(CheckedRecord):
    """How completions of prompts are sampled and rewarded.

    Attributes:
        reward: "MODULE:FUNCTION". The function receives (prompts, completions, **columns) and
            returns a number per completion, as in TRL.
        group: completions per prompt.
        max_new_tokens: maximum tokens of a completion.
        temperature: divisor of the logits.
    """

    reward: str
    group: Count = 16
    max_new_tokens: Count = 256
    temperature: Positive = 1.0


@dataclass(frozen=True, slots=True)
class Samples:
    """One rank's completions of a step: `Rollouts` with advantages, and rewards, fp32 [n]."""

    rollouts: Rollouts
    rewards_n: Tensor

    def count_labels_and_tokens(self) -> Tensor:
        """Return int64 [4]: tokens of completions, all tokens, number of completions, and 0."""
        num_new = int(self.rollouts.response_mask_N.sum())
        counts = [num_new, len(self.rollouts.tokens_N), len(self.rewards_n), 0]
        return torch.tensor(counts, dtype=torch.int64, device="cpu")


@dataclass(kw_only=True)
class Reinforcement(TrainingJob[Samples]):
    """The job of `moecore grpo`; `sampler` is an unsharded copy of the policy that generates."""

    batches: Steps[list[Prompt]]
    sampler: Any
    tokenizer: Any
    reward: Reward
    sampling: SamplingOptions
    reference: Any  # of the KL penalty; None = none, or the policy without its LoRA adapters

    unit = "token"
    chosen_by = "--data and --batch-size"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.objective: GRPO = self.args.grpo
        self.engine = Engine(
            self.model, self.owner, max_tokens=self.args.seq_len, reference=self.reference
        )
        self.weights: WeightStream = self.engine.weights(bucket_bytes=1 << 24, layout="fused")
        end = self.sampler.generation_config.eos_token_id
        end = self.tokenizer.eos_token_id if end is None else end
        self._ends = set(end if isinstance(end, list) else [end])
        # A model's own may change the probabilities, such as by a repetition penalty.
        self.sampler.generation_config = type(self.sampler.generation_config)()

    def print_start(self) -> None:
        """Print the model, the ranks and the data of the run."""
        prompts, group = self.args.batch_size, self.sampling.group
        progress = f"{self.describe_start('from its weights')} to step {self.args.steps}"
        print_on_rank_0(
            f"GRPO of {self.args.model} {progress} on {self.describe_ranks()}: {group} completions "
            f"of each of {prompts} prompts per data rank"
        )

    def next_batch(self, step: int) -> Samples:
        """Sync the sampler, sample completions and score them. Collective."""
        key = f"{self.args.seed}/{step}/{self.meshes.data_rank}"
        torch.manual_seed(make_generator(key).initial_seed())
        prompts = [p for p in self.batches.next_batch() for _ in range(self.sampling.group)]
        state = self.sampler.state_dict()
        with torch.no_grad():
            for name, tensor in self.weights:  # with merged LoRA adapters
                state[name].copy_(tensor)
        self.engine.offload("all")
        responses = self.sample_completions([prompt.ids for prompt in prompts]) if prompts else []
        self.engine.onload("all")
        rewards_n = self.score(prompts, responses)
        rollouts = Rollouts.of(
            [p.ids for p in prompts], responses, temperature=self.sampling.temperature
        )
        groups_n = torch.arange(len(prompts), device="cpu") // self.sampling.group
        advantages_N = rollouts.expand_to_tokens(group_advantages(rewards_n, groups_n))
        return Samples(rollouts.replace(advantages_N=advantages_N), rewards_n)

    def drop_batch(self, step: int) -> None:
        """Read and ignore the prompts of a step that a rollback has removed from the run."""
        self.batches.next_batch()

    def score(self, prompts: Sequence[Prompt], responses: Sequence[list[int]]) -> Tensor:
        """Return rewards, fp32 [n]; store mean and standard deviation of all ranks. Collective."""
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        completions = [
            text if isinstance(prompt.content, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        names = {name for prompt in prompts for name in prompt.columns}
        columns = {name: [p.columns.get(name) for p in prompts] for name in sorted(names)}
        columns["completion_ids"] = list(responses)
        rewards_n = call_reward(self.reward, [p.content for p in prompts], completions, columns)
        values_n = rewards_n.double()
        moments = torch.stack([values_n.sum(), values_n.square().sum()])
        moments = torch.cat([moments, moments.new_full((1,), len(rewards_n))]).to(self.device)
        dist.all_reduce(moments)
        total, squares, number = moments.tolist()
        mean = total / number
        self.data_metrics = {
            "reward": mean,
            "reward_std": max(squares / number - mean**2, 0.0) ** 0.5,
        }
        return rewards_n

    def sample_completions(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Sample a completion of each prompt; return its token ids up to an end token, if any."""
        T = max(map(len, prompts))
        pad_id = self.tokenizer.pad_token_id
        pad_id = min(self._ends) if pad_id is None else pad_id
        tokens = [[pad_id] * (T - len(ids)) + ids for ids in prompts]
        masks = [[0] * (T - len(ids)) + [1] * len(ids) for ids in prompts]
        ids_nT, mask_nT = torch.tensor([tokens, masks], dtype=torch.int64, device="cpu")
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
        return [cut_after_end(response, self._ends) for response in output_nT[:, T:].tolist()]

    def forward_backward(self, num_labels: Tensor, batch: Samples) -> Tensor:
        """Run forward and backward; return (mean loss over all ranks) / (number of data ranks)."""
        rollouts = batch.rollouts
        if self.objective.kl_coef:
            scores = self.engine.reference_log_probs(rollouts)
            rollouts = rollouts.replace(ref_log_probs_N=scores.log_probs_N)
        loss = self.engine.forward_backward(rollouts, self.objective).loss
        return loss / self.meshes.data_ranks  # of the mean, which every rank has

    def compute_metrics(self, counts: list[int], seconds: float) -> Metrics:
        """Return "response_tokens", the mean length of completions, from the samples' counts."""
        return {"response_tokens": counts[0] / counts[2]}

    def finish(self) -> None:
        """Export the trained model to RUN_DIR/export. Collective."""
        export_run(self)


def cut_after_end(response: list[int], end_ids: set[int]) -> list[int]:
    """Return the tokens of a response up to and including the first that is in `end_ids`."""
    place = next((i for i, token in enumerate(response) if token in end_ids), len(response))
    return response[: place + 1]
