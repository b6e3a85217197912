import json
import os
import re
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.helpers.grids import asked_for, beside
from tests.helpers.ranks import run_ranks
from tests.integrations.titan_runs import (
    AC,
    ASSETS,
    BATCH,
    COMPILE,
    CP,
    EP,
    IMPORTED,
    PP,
    SEQ_LEN,
    STEPS,
    TITAN,
    TP,
    TWO_BATCHES,
    V03,
    VALIDATION,
    Run,
    adamw,
    assert_close,
    clip,
    close,
    positions,
    prepare,
    refusal,
    samples,
    train,
)

if not TITAN or find_spec("transformers") is None:
    pytest.skip("torchtitan or transformers is not installed", allow_module_level=True)
pytestmark = pytest.mark.slow

SPECS = "tests.integrations.titan_hf_specs"
SEED = 7
ARCHITECTURES = ["qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss"]

# Every run sees four samples a step.
EP2 = {EP: 2, BATCH: 2}
RUNS: dict[str, dict[str, Any]] = {
    "checkpointed": {**EP2, AC: "full"},
    "selective": {**EP2, AC: "selective"},
    "two batches": {
        EP: 2,
        **TWO_BATCHES,
        "moecore__memory__recompute": "gemm_last",
        "moecore__memory__offload": "experts",
    },
    "cp": {EP: 2, CP: 2, BATCH: 4, "moecore__context__way": "a2a"},
    "documents": {**EP2, "moecore__documents": True},
    "dense mesh": {BATCH: 2},
    "compiled": {**EP2, **COMPILE},
    "saving": {
        **EP2,
        "checkpoint__enable": True,
        "checkpoint__interval": 1,
        "checkpoint__last_save_in_hf": True,
        "checkpoint__last_save_model_only": True,
    },
}
RUNS |= dict.fromkeys(ARCHITECTURES, EP2)
NIGHTLY = ["selective", "mixtral", "olmoe"]  # whose blocks are those of families without torchtitan
READ = ("compiled", "saving", "qwen3_moe", "deepseek_v3")  # by other tests as well
SIZED = ["qwen3_moe", "mixtral", "deepseek_v3"]
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "tp": ("tiny", {TP: 2}, r"tensor_parallel_degree \(2\) must be 1 for a Hugging Face model"),
    "pp": ("tiny", {PP: 2, BATCH: 2}, r"pipeline_parallel_degree \(2\) must be 1 for \w*HF"),
    "length": ("tiny", {"training__seq_len": 128}, r"\(128\) must be <= max_position_\w+ \(64\)"),
    "validation": ("tiny", {VALIDATION: True}, r"enable \(True\) must be False"),
    "own loss": ("own_loss", {}, r"output_router_logits \(True\) of the model's config must"),
    "tied": ("tied", {}, r"tie_word_embeddings \(True\) of the model's config must be False"),
    "kind": ("kind", {}, r"flavor \(dict\) must be a transformers config or a directory"),
    "no config": (
        "assets",
        {ASSETS: "nowhere"},
        r"hf_assets_path or flavor \(nowhere\) must be a directory with a config.json",
    ),
    "no weights": ("tiny", {"moecore__hf_weights": "nowhere"}, r"path \(nowhere\) must"),
}


def worker(rank: int, device: torch.device, folder: str, names: set[str]) -> dict[str, Any]:
    prepare()
    results: dict[str, Any] = {}
    for name, options in ((name, of) for name, of in RUNS.items() if name in names):
        model = name if name in ARCHITECTURES else "tiny"
        results[name] = run(model, f"{folder}/{name}", **options)
    results["resumed"] = run(
        "tiny",
        f"{folder}/resumed",
        **{BATCH: 2},
        checkpoint__enable=True,
        checkpoint__initial_load_path=f"{folder}/saving/checkpoint/step-1",
        checkpoint__initial_load_model_only=False,
    )
    results["balanced"] = run("balanced", folder, **EP2)
    results["forced"] = run("balanced", folder, **EP2, debug__moe_force_load_balance=True)
    results["sizes"] = {name: sizes(name, f"{folder}/{rank}") for name in SIZED}
    results["bf16"] = run("tiny", folder, **EP2, training__mixed_precision_param="bfloat16")
    results |= loaded(rank, folder)
    results |= continued(rank, folder, f"{folder}/saving/checkpoint/step-{STEPS}")
    results["refused"] = {
        name: refusal(f"hf_{model}", folder, specs=SPECS, **options)
        for name, (model, options, _) in REFUSED.items()
    }
    results["oracle"] = {
        name: oracle(name) for name in ("tiny", *ARCHITECTURES) if name in {"tiny", *names}
    }
    results["oracle"]["documents"] = oracle("tiny", has_documents=True)
    results["oracle"]["bf16"] = oracle("tiny", torch.bfloat16)
    return results


def run(model: str, folder: str, **options: Any) -> Run:
    found = train(f"hf_{model}", folder, **({"specs": SPECS} | options))
    for numbers in (found.grads, found.state):
        for name in list(numbers):
            numbers[name.removeprefix("hf.")] = numbers.pop(name)
    return found


def plain(name: str) -> nn.Module:
    """The model on one process as transformers makes it, with the weights of every run."""
    from transformers import AutoModelForCausalLM

    from moecore.io import init_hf
    from tests.integrations.titan_hf_specs import CONFIGS

    model = AutoModelForCausalLM.from_config(CONFIGS[name]).train()
    init_hf(model, SEED)
    return model


def oracle(name: str, dtype: torch.dtype = torch.float32, *, has_documents: bool = False) -> Run:
    """Plain transformers with parameters of a dtype and AdamW, four samples a step."""
    model, found = plain(name), Run()
    for param in model.parameters():  # not buffers: rotary frequencies stay
        param.data = param.to(dtype)
    optimizer = adamw(model)
    for step in range(STEPS):
        tokens_BT, labels_BT = samples(4 * step, 4, SEQ_LEN)
        inputs = {"input_ids": tokens_BT, "use_cache": False}
        if has_documents:
            inputs["position_ids"] = positions(tokens_BT)
        logits_NV = model(**inputs).logits.flatten(0, 1).float()
        loss = F.cross_entropy(logits_NV, labels_BT.flatten())
        loss.backward()
        found.losses.append(loss.item())
        clip(found, model)
        optimizer.step()
        optimizer.zero_grad()
    found.state = {n: t.detach().clone() for n, t in model.state_dict().items()}
    return found


def loaded(rank: int, folder: str) -> dict[str, Run]:
    """Runs of another seed that begin with the weights of the other runs, read from files."""
    from moecore.io import decoder_config_from_hf
    from tests.integrations.titan_hf_specs import register_decoder

    path = f"{folder}/assets"
    if rank == 0:
        plain("tiny").save_pretrained(path)
    dist.barrier()
    register_decoder(decoder_config_from_hf(path))
    options = {**EP2, "moecore__hf_weights": path, "debug__seed": 9}
    found = {
        "loaded": run("assets", folder, **options, **{ASSETS: path}),
        "loaded decoder": train("same_decoder", folder, specs=SPECS, **options),
    }
    if not V03:
        options = {**EP2, ASSETS: path, "model__flavor": "assets"}
        specs = "examples.torchtitan.local_tokens"
        found["local"] = train("local_moecore_hf", folder, specs=specs, **options)
    return found


def continued(rank: int, folder: str, path: str) -> dict[str, Any]:
    """What transformers, moecore and torchtitan read from the files that torchtitan wrote."""
    from transformers import AutoModelForCausalLM

    from tests.integrations.titan_hf_specs import CONFIGS

    results: dict[str, Any] = {}
    if rank == 0:
        CONFIGS["tiny"].save_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path)
        results["exported"] = {n: t.detach().clone() for n, t in model.state_dict().items()}
    dist.barrier()
    one_step = {**EP2, "training__steps": 1}
    results["by moecore"] = run("tiny", folder, **one_step, moecore__hf_weights=path)
    results["by torchtitan"] = run(
        "tiny",
        f"{folder}/continued",
        **one_step,
        checkpoint__enable=True,
        checkpoint__initial_load_path=path,
        checkpoint__initial_load_in_hf=True,
    )
    return results


def sizes(name: str, folder: str) -> list[tuple[int, int]]:
    """Parameters and FLOPs per token as torchtitan is told, and those of moecore's decoder."""
    from moecore.integrations.torchtitan.models import HFArgs, HFModel
    from moecore.io import decoder_config_from_hf
    from moecore.models import flops_per_token, num_params
    from tests.integrations.titan_hf_specs import CONFIGS

    CONFIGS[name].save_pretrained(f"{folder}/{name}")
    args = HFArgs(f"{folder}/{name}")
    args.update_from_config(SimpleNamespace(training=SimpleNamespace(seq_len=SEQ_LEN)))
    decoder = decoder_config_from_hf(f"{folder}/{name}")
    decoder = replace(decoder, num_mtp_layers=0, mtp_loss_coef=0.0)  # transformers has none
    with torch.device("meta"):
        own = args.get_nparams_and_flops(HFModel(args), SEQ_LEN)
    return [own, (num_params(decoder), int(flops_per_token(decoder, SEQ_LEN)))]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    names = {*READ, *asked_for(request, "trained")}
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(2, worker, os.path.join(folder, "titan"), names, imported=IMPORTED)


@pytest.mark.parametrize("trained", beside([*RUNS, "loaded"], NIGHTLY))
def test_a_run_trains_like_plain_transformers(results: dict[str, Any], trained: str) -> None:
    found, oracles = results[trained], results["oracle"]
    wanted = oracles[trained if trained in oracles else "tiny"]
    assert close(found.losses, wanted.losses), (found.losses, wanted.losses)
    assert close(found.norms, wanted.norms), (found.norms, wanted.norms)
    assert_close(found.grads, wanted.grads)
    assert_close(found.state, wanted.state, 2e-5)  # two updates
    assert not found.plain
    for names in found.expert_meshes:
        assert ("ep" in names) == (trained != "dense mesh"), names


def test_documents_are_apart_and_blocks_share_graphs(results: dict[str, Any]) -> None:
    documents, rows = results["oracle"]["documents"], results["oracle"]["tiny"]
    assert not close(documents.losses, rows.losses, 1e-4) and 2 <= results["compiled"].graphs <= 4
    assert results["qwen3_moe"].graphs == 0


def test_moecores_decoder_begins_with_the_same_files(results: dict[str, Any]) -> None:
    found, wanted = results["loaded decoder"], results["oracle"]["tiny"]
    assert close(found.losses, wanted.losses), (found.losses, wanted.losses)
    assert close(found.norms, wanted.norms), (found.norms, wanted.norms)


@pytest.mark.skipif(V03, reason="the example is of torchtitan 0.2")
def test_local_tokens_follow_the_models_vocabulary(results: dict[str, Any]) -> None:
    assert len(results["local"].losses) == STEPS
    assert results["local"].losses[0] == pytest.approx(results["loaded"].losses[0], rel=0.2)


def test_a_checkpoint_continues_on_another_layout(results: dict[str, Any]) -> None:
    found, wanted = results["resumed"], results["oracle"]["tiny"]
    assert len(found.losses) == 1  # step 2 alone
    assert close(found.losses, wanted.losses[1:])
    assert_close(found.state, wanted.state, 2e-5)


def test_transformers_and_a_new_run_read_what_a_run_wrote(results: dict[str, Any]) -> None:
    assert_close(results["exported"], results["saving"].state, 0)
    found, wanted = results["by moecore"], results["by torchtitan"]
    assert found.losses == wanted.losses
    assert_close(found.grads, wanted.grads, 0)
    assert found.losses[0] < results["saving"].losses[0] - 0.1  # trained on these samples before


def test_bf16_error_is_at_most_twice_that_of_transformers(results: dict[str, Any]) -> None:
    exact, plain_bf16 = results["oracle"]["tiny"].grads, results["oracle"]["bf16"].grads
    for name, grad in results["bf16"].grads.items():
        error = float((grad - exact[name]).norm())
        assert error <= 2 * float((plain_bf16[name] - exact[name]).norm()) + 1e-6, name


def test_balance_reaches_loss_and_bias(results: dict[str, Any]) -> None:
    found, still = results["balanced"], results["deepseek_v3"]
    biases = [n for n in found.state if n.endswith("e_score_correction_bias")]
    assert biases
    for name in biases:
        assert found.state[name].any() and not still.state[name].any()
    for with_loss, without in zip(found.metrics, still.metrics, strict=True):
        assert with_loss["moe/aux_loss"] > 0 == without["moe/aux_loss"]


def test_the_load_is_even_when_the_job_forces_it(results: dict[str, Any]) -> None:
    for forced, free in zip(results["forced"].metrics, results["balanced"].metrics, strict=True):
        assert forced["moe/load_max_over_mean"] == pytest.approx(1, abs=0.05)
        assert free["moe/load_max_over_mean"] > 1.1


@pytest.mark.parametrize("name", SIZED)
def test_size_and_flops_are_those_of_moecores_decoder(results: dict[str, Any], name: str) -> None:
    own, decoder = results["sizes"][name]
    assert own == decoder


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused(results: dict[str, Any], name: str) -> None:
    assert re.search(REFUSED[name][2], results["refused"][name]), results["refused"][name]


def test_stacked_experts_are_not_those_of_a_published_index(tmp_path: Path) -> None:
    """torchtitan would look up each name's file there, after all training."""
    from torchtitan.protocols.state_dict_adapter import StateDictAdapter

    from moecore.integrations.torchtitan.models import HFNames

    names = {"model.layers.0.mlp.experts.0.up_proj.weight": "model-00001-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    names_of_titan = type("Names", (HFNames,), {"__init__": StateDictAdapter.__init__})
    assert names_of_titan(None, str(tmp_path)).fqn_to_index_mapping
    assert HFNames(None, str(tmp_path)).fqn_to_index_mapping is None
