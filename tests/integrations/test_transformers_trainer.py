import inspect
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from moecore import ContextOptions, ParallelConfig, build_meshes, parallelize_moe
from moecore.families.transformers.guards import ShardedDeviceMap
from moecore.integrations.transformers import MoETrainer, run_state
from moecore.integrations.transformers import arguments as checks
from moecore.integrations.transformers.arguments import (
    REFUSED,
    check_accelerator,
    check_trainer_arguments,
)
from moecore.io import save
from moecore.packing import ScheduledCollator
from tests.families.transformers.hf_models import random_model
from tests.integrations.trainer_runs import padded, rows

# Names of transformers without a public one beside them: parameters that moecore gives or takes.
PRIVATE = {
    "_has_mixed_mesh_grads": ["self", "model"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_load_best_model": ["self"],
    "_track_num_input_tokens": ["self", "inputs"],
    "_save_rng_state": ["self", "output_dir"],
}


@pytest.fixture
def one_process(no_group_left: None) -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    common = dict(use_cpu=True, report_to=[], disable_tqdm=True, max_steps=1)
    return TrainingArguments(str(folder), **common | options)


def sharded(**options: Any) -> nn.Module:
    return parallelize_moe(
        random_model("qwen3-moe"), build_meshes(ParallelConfig(), "cpu"), **options
    )


@pytest.mark.parametrize("name", PRIVATE)
def test_private_names_of_trainer(name: str) -> None:
    assert list(inspect.signature(getattr(Trainer, name)).parameters) == PRIVATE[name]


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_is_refused(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    assert hasattr(args, name)
    check_trainer_arguments(args)
    setattr(args, name, "given")
    with pytest.raises(ValueError, match=rf"{name} \(given\) must be off for MoETrainer: "):
        check_trainer_arguments(args)


def test_arguments_that_do_not_fit_together(tmp_path: Path) -> None:
    args = arguments(tmp_path, accelerator_config={"even_batches": False})
    with pytest.raises(ValueError, match=r"accelerator_config.even_batches \(False\) must be True"):
        check_trainer_arguments(args)
    best = dict(load_best_model_at_end=True, eval_strategy="steps", eval_steps=500)
    args = arguments(tmp_path, save_total_limit=2, **best)
    with pytest.raises(ValueError, match=r"save_total_limit \(2\) must be None with load_best"):
        check_trainer_arguments(args)
    args = arguments(tmp_path)
    args._n_gpu = 4
    with pytest.raises(ValueError, match=r"n_gpu \(4\) must be 1"):
        check_trainer_arguments(args)


def test_models_that_are_refused(one_process: None, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    with pytest.raises(ValueError, match=r"model \(Qwen3MoeForCausalLM\) must be parallelized"):
        MoETrainer(random_model("qwen3-moe"), args)
    with pytest.raises(ValueError, match=r"loss \('sum'\) of parallelize_moe must be 'mean'"):
        MoETrainer(sharded(loss="sum"), args)


class Streamed(IterableDataset[Any]):
    """Documents without a number."""

    def __iter__(self) -> Iterator[Any]:
        return iter(rows(2))


PLANNED = ScheduledCollator(max_tokens=32)
NO_PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    r"data_collator \(function\) must be a ScheduledCollator": ({}, {"data_collator": padded}),
    r"ScheduledCollator.data_ranks \(2\) must be 1": (
        {},
        {"data_collator": ScheduledCollator(max_tokens=32, data_ranks=2)},
    ),
    r"gradient_accumulation_steps \(2\) must be 1": (dict(gradient_accumulation_steps=2), {}),
    r"label_smoothing_factor \(0.1\) must be 0": (dict(label_smoothing_factor=0.1), {}),
    r"compute_loss_func \(<built-in function max>\) must be None": ({}, {"compute_loss_func": max}),
    r"accelerator_config.dispatch_batches \(None\) must be F": ({}, {"train_dataset": Streamed()}),
    r"compute_metrics must be None with ParallelConfig.cp": ({}, {"compute_metrics": max}),
    r"preprocess_logits_for_metrics must be None with ParallelConfig.cp": (
        {},
        {"preprocess_logits_for_metrics": max},
    ),
}


@pytest.mark.parametrize("message", NO_PLANS)
def test_what_steps_of_a_plan_cannot_follow(message, one_process, tmp_path):
    options, given = NO_PLANS[message]
    model = sharded(loss="sum", context=ContextOptions(dynamic=True))
    given = {"data_collator": PLANNED, "train_dataset": rows(2)} | given
    with pytest.raises(ValueError, match=message):
        MoETrainer(model, arguments(tmp_path, **options), **given)


class ReadsLogits(MoETrainer):
    """A trainer with a loss of its own, as TRL's are."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class Predicts(MoETrainer):
    """A trainer with a prediction of its own."""

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return None, model(**inputs).logits, None


def test_logits_of_a_plan_are_refused(one_process: None, tmp_path: Path) -> None:
    model = sharded(loss="sum", context=ContextOptions(dynamic=True))
    given = {"data_collator": PLANNED, "train_dataset": rows(2)}
    with pytest.raises(ValueError, match=r"compute_loss of ReadsLogits must be that of Trainer"):
        ReadsLogits(model, arguments(tmp_path), **given)
    with pytest.raises(ValueError, match=r"prediction_step of Predicts must be that of MoETrainer"):
        Predicts(model, arguments(tmp_path), **given)
    trainer = MoETrainer(model, arguments(tmp_path), **given)
    trainer.compute_loss_func = lambda outputs, labels, **kwargs: outputs.logits.mean()
    with pytest.raises(ValueError, match=r"compute_loss_func \(.*\) must be None with"):
        trainer.train()
    trainer.compute_loss_func = None
    with pytest.raises(ValueError, match=r"prediction_loss_only \(False\) must be True with"):
        trainer.predict(rows(2))
    assert trainer.evaluate(rows(2))["eval_loss"] > 0


def test_streamed_documents_train_by_plans(one_process: None, tmp_path: Path) -> None:
    model = sharded(loss="sum", context=ContextOptions(dynamic=True))
    args = arguments(tmp_path, accelerator_config={"dispatch_batches": False}, save_strategy="no")
    given = {"data_collator": PLANNED, "train_dataset": Streamed()}
    trainer = MoETrainer(model, args, **given)
    assert trainer.train().global_step == 1 and trainer.state.total_flos > 0


def test_adapters_of_trl_come_too_late(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"peft_config \(object\) must be None for MoETrainer"):
        MoETrainer(random_model("qwen3-moe"), arguments(tmp_path), peft_config=object())


def test_data_ranks_that_are_no_processes(one_process, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "world_size", 4)
    message = r"data ranks times cp times tp \(1\) must equal the processes .* \(4\)"
    with pytest.raises(ValueError, match=message):
        MoETrainer(sharded(), arguments(tmp_path))


def test_cpu_ranks_that_accelerate_does_not_join(one_process, tmp_path, monkeypatch):
    """Without use_cpu, accelerate makes no process group of ranks without a GPU."""
    model = sharded()
    groups = SimpleNamespace(data_ranks=2, cp=1)
    state = SimpleNamespace(loss="mean", groups=groups)
    monkeypatch.setattr(checks, "get_moe_state", lambda _: state)
    message = r"must equal the processes of TrainingArguments \(1\): pass .*\(use_cpu=True\)"
    with pytest.raises(ValueError, match=message):
        MoETrainer(model, arguments(tmp_path, use_cpu=False))


def test_an_optimizer_that_was_made_before(one_process: None, tmp_path: Path) -> None:
    model = random_model("qwen3-moe")
    optimizer = torch.optim.AdamW(model.parameters())
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"))
    with pytest.raises(ValueError, match=r"optimizer \(AdamW\) must hold parameters of the model"):
        MoETrainer(model, arguments(tmp_path), optimizers=(optimizer, None))


@pytest.mark.parametrize(
    ("variables", "setting"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, r"mixed_precision \(bf16\)"),
        ({"ACCELERATE_DYNAMO_BACKEND": "eager"}, r"dynamo_backend \(eager\)"),
    ],
)
def test_settings_of_accelerate_launch(variables, setting, one_process, tmp_path, monkeypatch):
    model = sharded()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"{setting} of accelerate's config must be off"):
        MoETrainer(model, arguments(tmp_path), padded, rows(2))


def test_sharding_of_accelerate_launch(one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    check_accelerator(accelerator)
    for kind in DistributedType:
        monkeypatch.setattr(Accelerator, "distributed_type", kind)
        if kind.value.startswith("MULTI_"):
            check_accelerator(accelerator)
        elif kind != DistributedType.NO:
            with pytest.raises(ValueError, match=rf"distributed_type \({kind.value}\) of accel"):
                check_accelerator(accelerator)


class Counts(TrainerCallback, ExportableState):
    def __init__(self, stride: int) -> None:
        self.stride, self.count = stride, 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.count += self.stride

    def state(self) -> dict[str, Any]:
        return {"args": {"stride": self.stride}, "attributes": {"count": self.count}}


def test_callbacks_of_one_class_keep_their_states(one_process: None, tmp_path: Path) -> None:
    options = dict(
        save_strategy="steps", save_steps=1, restore_callback_states_from_checkpoint=True
    )
    for steps, resume in ((1, False), (2, True)):
        args = arguments(tmp_path, **options | dict(max_steps=steps))
        counting = [Counts(1), Counts(100)]
        trainer = MoETrainer(sharded(), args, padded, rows(2), callbacks=counting)
        trainer.train(resume_from_checkpoint=resume)
    found = [c for c in trainer.callback_handler.callbacks if isinstance(c, Counts)]
    assert [c.count for c in found] == [2, 200]


def test_checkpoints_to_resume_from(one_process: None, tmp_path: Path) -> None:
    model = sharded()
    trainer = MoETrainer(model, arguments(tmp_path), padded, rows(2))
    with pytest.raises(ValueError, match=r"resume_from_checkpoint \(True\) must find a checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    path = save(tmp_path / "other", 1, model, None)
    with pytest.raises(ValueError, match=r"must be a checkpoint of MoETrainer"):
        trainer.train(resume_from_checkpoint=path)


def test_adapters_are_saved_as_peft_reads_them(one_process: None, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", minversion="0.21")
    from tests.families.transformers.lora_cases import adapted_model

    model = parallelize_moe(adapted_model("qwen3-moe", {}), build_meshes(ParallelConfig(), "cpu"))
    trainer = MoETrainer(model, arguments(tmp_path, learning_rate=0.1), padded, rows(2))
    trainer.train()
    for _ in range(2):  # the second one takes the place of the first
        trainer.save_model()
    loaded = peft.PeftModel.from_pretrained(random_model("qwen3-moe"), tmp_path)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        found, wanted = (one.eval()(input_ids=ids).logits for one in (loaded, model))
        before = adapted_model("qwen3-moe", {}).eval()(input_ids=ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert (before - wanted).abs().max() > 0.01


class Saves(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = True


def test_a_callback_that_saves_where_nothing_is_saved(one_process: None, tmp_path: Path) -> None:
    args = arguments(tmp_path, save_strategy="no")
    trainer = MoETrainer(sharded(), args, padded, rows(2), callbacks=[Saves()])
    with pytest.raises(ValueError, match=r"save_strategy \('no'\) must be another one"):
        trainer.train()


def test_one_process_of_plain_trainer_is_refused(one_process: None, tmp_path: Path) -> None:
    model = sharded()
    trainer = Trainer(model, arguments(tmp_path), padded, rows(2), eval_dataset=rows(2))
    for action in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match=r"must not be wrapped by Trainer or acce.*MoETrainer"):
            action()
    with pytest.raises(ValueError, match=r"must not be wrapped by Trainer or accelerate"):
        Accelerator(cpu=True).prepare(model)
    assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False).shape[0] == 1


def test_a_device_map_without_entries() -> None:
    found = ShardedDeviceMap("Model")
    assert set(found.values()) == set() and "" not in found
    with pytest.raises(ValueError, match=r"model \(Model\) must not be wrapped"):
        len(found)


def test_generators_come_back_exactly() -> None:
    def draws() -> list[float]:
        found = [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand()]
        return [*found, float(np.random.randint(1 << 30))]

    random.seed(3)
    np.random.seed(4)
    draws()  # half of a pair of normal numbers is cached now
    state = run_state.get_host_rng_state()
    assert state.shape == (run_state.NUM_WORDS,)
    expected = draws()
    draws()
    run_state.set_host_rng_state(state)
    assert draws() == expected
