"""The options of `moecore finetune`, and checks of their combinations."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import nn

from moecore.base.command_options import Spelling, Table, make_internal_field
from moecore.base.fields import Bound, Count, CountOrZero
from moecore.families.transformers.lora_options import LoRAOptions
from moecore.models.distillation import Distillation
from moecore.recipes.data import make_batch_shape
from moecore.recipes.files import find_model_directory
from moecore.recipes.finetuning import JOBS
from moecore.recipes.hf_model import count_experts, load_tokenizer, read_config
from moecore.recipes.optimizer import OptimizerConfig
from moecore.recipes.options import ShardedConfig
from moecore.recipes.rows import ColumnNames, DatasetOptions
from moecore.recipes.sdc import SDCOptions
from moecore.rl import DPO, KTO

PREFIX = Table(prefix=True)
FINETUNING = OptimizerConfig(lr=1e-5, weight_decay=0.0)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(ShardedConfig):
    """Fine-tune a Hugging Face Mixture-of-Experts model on chats, prompts or text.

    Attributes:
        model: a directory of config, tokenizer and weights, or a name of the hub.
        data: .jsonl and .parquet files, directories of save_to_disk, hf:NAME, or plain text.
        adapters: "NAME=DATA" of LoRA adapters that are trained at once, each on its own data, in
            place of `data`. The data of a name that is given twice are joined.
        objective: "sft" learns answers; "dpo" prefers chosen to rejected answers; "kto" learns
            which answers are desirable; "distill" learns answers and a teacher's probabilities.
        eval_data: files for evaluation.
        eval_share: share of `data` for evaluation instead of training, if `eval_data` is not set.
        epochs: passes over `data`.
        max_steps: optimizer steps of the run; None = the steps of `epochs`.
        recompute: recompute each decoder layer in backward.
        lora: train LoRA adapters and freeze the weights; None = train all weights.
        dataset: the format of the data.
        columns: the names of the columns of the data.
        dpo: options of objective "dpo".
        kto: options of objective "kto".
        distill: options of objective "distill".
        sdc_check: checks for silent data corruption; None = no checks.
    """

    model: Annotated[Path, Spelling(alias="hf_config")]  # as `moecore plan --write` names it
    data: tuple[Path, ...] = ()
    adapters: tuple[str, ...] = ()
    objective: Literal["sft", "dpo", "kto", "distill"] = "sft"
    eval_data: tuple[Path, ...] = ()
    eval_share: Annotated[float, Bound(">=", 0), Bound("<", 1)] = 0.05
    epochs: Count = 1
    max_steps: Count | None = None
    recompute: bool = False
    run_dir: Path = Path("runs/tuned")
    steps: int = make_internal_field(0)
    batch_size: Count = 4
    seq_len: Count = 1024
    eval_every: CountOrZero = 50
    optimizer: OptimizerConfig = FINETUNING
    lora: Annotated[LoRAOptions | None, PREFIX] = None
    dataset: Annotated[DatasetOptions, PREFIX] = DatasetOptions()
    columns: Annotated[ColumnNames, PREFIX] = ColumnNames()
    dpo: Annotated[DPO | None, PREFIX] = None
    kto: Annotated[KTO | None, Table(prefix=True, without=("kl",))] = None
    distill: Annotated[Distillation | None, PREFIX] = None
    sdc_check: Annotated[SDCOptions | None, PREFIX] = None

    def list_adapters(self) -> dict[str, tuple[Path, ...]]:
        """Return {name: data} of `adapters`."""
        files: dict[str, tuple[Path, ...]] = {}
        for name, _, path in (entry.partition("=") for entry in self.adapters):
            files[name] = (*files.get(name, ()), Path(path))
        return files


def check_adapters(args: FinetuneConfig) -> None:
    """Raise ValueError unless the options have either data, or adapters with options they allow."""
    if args.lora is not None:
        args.optimizer.check_adapters()
    if not args.adapters:
        if not args.data:
            raise ValueError("--data must be set: give it")
        return
    for entry in args.adapters:
        if not re.fullmatch(r"[\w-]+=.+", entry):
            raise ValueError(
                f"--adapters ({entry}) must be NAME=DATA, with letters, digits, _ and - in the "
                "name: correct it"
            )
        if any(
            hasattr(kind(), entry.partition("=")[0]) for kind in (nn.ModuleDict, nn.ParameterDict)
        ):
            raise ValueError(
                f"--adapters ({entry}) must not have the name of a method of nn.Module: rename it"
            )
    if args.lora is None:
        raise ValueError("--adapters must go with options of [lora]: give --lora-rank")
    for option, value in (
        ("--data", args.data),
        ("--objective", args.objective != "sft" and args.objective),
        ("--lora-dora", args.lora.dora),
        ("--aux-loss", args.aux_loss),
        ("--pp", args.get_degree("pp") > 1),
        ("--clones", args.lora.experts and args.make_dispatch_options().clones is not None),
        ("--cuda-graph", args.cuda_graph),
        ("--dynamic-cp", args.sharding.dynamic_cp),
        ("--sdc-check-every", args.sdc_check),
    ):
        if value:
            raise ValueError(f"{option} ({value}) must not go with --adapters: drop it")


def check_objective(args: FinetuneConfig) -> None:
    """Raise ValueError for options that do not apply to the objective."""
    for name, job in JOBS.items():
        options = None if job.options is None else getattr(args, name)
        if options is not None and args.objective != name:
            raise ValueError(
                f"--objective ({args.objective}) must be {name} with options of [{name}]: {options}"
            )
    if args.objective == "distill" and args.distill is None:
        raise ValueError(
            "--objective (distill) must have a teacher: give --distill-teacher its directory, or "
            "--distill-log-probs that of its stored log-probabilities"
        )
    for option, value in (
        ("--no-fused-loss", (args.distill and not args.memory.fused_loss) or None),
        ("--cuda-graph", args.cuda_graph or None),
        ("--dynamic-cp", args.sharding.dynamic_cp),
        ("--sdc-check-every", args.sdc_check),
    ):
        if args.objective != "sft" and value is not None:
            raise ValueError(f"{option} must not go with --objective {args.objective}: drop it")


def check_options(args: FinetuneConfig, world_size: int) -> tuple[FinetuneConfig, Any]:
    """Check options for `world_size` ranks; return (options with local paths, HF config)."""
    args = replace(args, model=find_model_directory(args.model))
    config = read_config(args.model)
    parallel = args.make_parallel_config(world_size, num_experts=count_experts(config))
    args.check_sharding()
    check_adapters(args)
    check_objective(args)
    if args.sdc_check is not None:
        args.sdc_check.check(args)
    args.check_seq_len(parallel)
    shape = make_batch_shape(args, parallel)
    if args.objective == "kto" and shape.grad_accum * shape.batch_size < 2:
        raise ValueError(
            f"--batch-size ({shape.batch_size}) must be >= 2 with --objective kto, whose KL term "
            "pairs each prompt with another completion of its data rank: raise it"
        )
    if args.distill is not None and args.distill.teacher is not None:
        if args.distill.log_probs is not None and args.distill.log_probs.exists():
            raise ValueError(
                f"--distill-log-probs ({args.distill.log_probs}) must be a new directory with "
                "--distill-teacher, which writes it: remove it, or leave out the teacher"
            )
        path = check_teacher(args, args.distill.teacher, config)
        args = replace(args, distill=replace(args.distill, teacher=path))
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest and args.seq_len > longest:
        raise ValueError(
            f"--seq-len ({args.seq_len}) must be <= max_position_embeddings ({longest}) of --model"
        )
    args.logging.check_packages()
    return args, config


def check_teacher(args: FinetuneConfig, teacher: Path, config: Any) -> Path:
    """Return the teacher's local directory; ValueError unless it has the model's tokens."""
    option = "--distill-teacher"
    path = find_model_directory(teacher, option)
    sizes = [x.get_text_config().vocab_size for x in (config, read_config(path, option))]
    tokens, of_teacher = (load_tokenizer(x, option).get_vocab().items() for x in (args.model, path))
    if sizes[0] != sizes[1] or not tokens <= of_teacher:
        raise ValueError(
            f"{option} ({path}) must have the tokens and vocab_size ({sizes[0]}) of --model, not "
            f"others ({sizes[1]}): choose a teacher with the same tokenizer"
        )
    return path
