"""Every MoE family of the installed transformers, tiny and random: two ranks against one process.

The ranks compute again in backward what no product gives; the one process keeps it.
Each trains, is saved, loaded, exported as stock saves it and loaded again: every family a step on
one folding, and one of each structure of experts two steps on all three, since a folding cuts the
tensors of experts and nothing else. One of each structure of attention runs with tp = 2 as well,
and under --nightly every family. So does a step over two pipeline stages, or why there is none, and
one of adapters (`family_cases.py`). Families that are refused are a list with reasons, which must
be exact.
"""

import re
import tempfile
import traceback
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from moecore import Meshes, MoELayer, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.base.options.context import ContextOptions
from moecore.base.options.memory import MemoryOptions
from moecore.base.torch_private import HAS_SEPARATE_PIECES
from moecore.families import use_causal_attention
from moecore.families.family import swap_blocks
from moecore.families.fp32_modules import SELECTION_BIASES, set_dtypes
from moecore.families.transformers.context import CausalContext
from moecore.families.transformers.packing import find_packing_problem
from moecore.families.transformers.stock import find_towers
from moecore.families.transformers.tp_plans import OUTPUTS, plan_modules
from moecore.io import Saver, export_hf, load, load_hf
from moecore.parallel.model.parallel_state import get_moe_state
from tests.families.transformers import family_cases
from tests.families.transformers.family_models import batch, family_names, loss_of, tiny_model
from tests.helpers.grids import beside
from tests.helpers.parts import on_parts
from tests.helpers.ranks import run_ranks
from tests.helpers.whole import gather_whole

pytestmark = pytest.mark.slow

REFUSED = {
    "dbrx": "the matrices of all experts are one of two dims",
    "diffusion_gemma": "parameters of experts must not be shared with another module",
    "jetmoe": "experts in attention",
    "muse_spark": "a norm of each expert's output is not built yet",
    "nllb_moe": "experts are a dict of modules",
    "switch_transformers": "experts are a dict of modules",
}
NOT_CUT = ("inkling", "zaya")  # refused with tp > 1
ROOT = Path(__file__).parents[3]
BEGIN, END = "<!-- families -->", "<!-- end of families -->"
FOLDINGS = (dict(ep=2), dict(edp_shard=2), dict(etp=2))[: 2 + HAS_SEPARATE_PIECES]
TP = len(FOLDINGS)  # the place of a folding whose two ranks share both batches
PP, LORA = TP + 1, TP + 2
COLUMNS = {PP: (family_cases.over_stages, dict(pp=2))}
if find_spec("peft") is not None:
    COLUMNS[LORA] = (family_cases.with_adapters, dict(ep=2))
COLUMNS_BY_DAY = (
    ("afmoe", PP),
    ("deepseek_v4", PP),
    ("llama4", LORA),
    ("longcat_flash", PP),
    ("longcat_flash", LORA),
)
WITH_TP = {
    "qwen3_moe": "fewer key heads, norms per head",
    "qwen2_moe": "biases of queries, keys and values, a shared expert with a gate",
    "deepseek_v3": "latents, a dense MLP",
    "gpt_oss": "sinks, biases of outputs",
    "olmoe": "norms over all heads",
    "qwen3_next": "gates among queries; linear attention in the order of key heads",
    "qwen3_5_moe": "its queries, keys and values one below the other, in one linear",
    "kimi_linear": "decays of channels, of a gate within linear attention",
    "granitemoehybrid": "a state space model whose ranks share its group of keys and queries",
    "afmoe": "gates; a router's matrix below the router",
    "lfm2_moe": "a MoE block that stays transformers' own",
    "qwen3_vl_moe": "a tower",
    "granitemoeshared": "gate and up of a dense MLP in one matrix",
    "minimax": "queries, keys and values in one linear, head after head",
}
ON_ALL = {
    "qwen3_moe": "gate and up of an expert in one matrix, out before in",
    "qwen2_moe": "the same beside a shared expert with a gate",
    "llama4": "in before out, beside a shared expert without one",
    "gpt_oss": "in before out, gate and up interleaved, with biases",
    "nemotron_h": "no gate",
    "step3p7": "an activation of its own",
    "longcat_flash": "experts that return their input",
}
EVERY_DAY = ("qwen3_moe",)  # the others of `ON_ALL` run on one folding
TP_BY_DAY = (  # others are in test_tensor_parallel.py and test_hf_ranks.py
    "deepseek_v4",
    "qwen3_next",
    "granitemoehybrid",
    "lfm2_moe",
)
# With those above, every path of the package that a family takes on two ranks.
BY_DAY = (
    *WITH_TP,
    *ON_ALL,
    "bailing_hybrid",
    "deepseek_v4",
    "ernie4_5_vl_moe",
    "gemma4",
    "glm5_next",
    "openai_privacy_filter",
    "unlimited_ocr",
    "zaya",
)
# The degrees of the plan in the table, and families that are planned by day.
DEGREES = ("--ep", "2")
PLANNED = {
    "minimax": "linear attention",
    "lfm2_moe": "a router of its own",
    "longcat_flash": "two attentions in a layer",
    "deepseek_v32": "a config that the native decoder cannot express",
    "gemma4": "a config whose layers differ",
    "dots3_note": "layers of several head sizes",
}
SEARCHED = ("minimax", "deepseek_v32")
STEPS, RATE, VOCABULARY = 2, 0.1, 64  # tokens, which tp ranks have parts of
# The gradient of a factor on outputs that are normed afterwards is a difference of large numbers,
# of which stock transformers is 5e-5 away from fp64.
# Hyper-connections normalise in turns; there stock is up to 2e-5 away.
# Stock is up to 3e-5 away from fp64 in decays of lara_mini, 2e-5 in the loops of inkling2_loop.
TOLERANCES = {"gemma4": 2e-4, "deepseek_v4": 5e-5, "hy_v4": 5e-5, "glm5_next": 5e-5}
TOLERANCES |= {"lara_mini": 5e-5, "inkling2_loop": 5e-5}
Found = dict[str, Tensor]


def taken() -> list[str]:
    return [name for name in family_names() if name not in REFUSED]


def cases(*, nightly: bool) -> list[tuple[str, int]]:
    """Return families with the index of their folding, and representatives with the others."""
    first = [(name, i % len(FOLDINGS)) for i, name in enumerate(taken())]
    first = [case for case in first if nightly or case[0] in BY_DAY]
    others = [
        (name, i) for name in (ON_ALL if nightly else EVERY_DAY) for i in range(len(FOLDINGS))
    ]
    over_tp = taken() if nightly else TP_BY_DAY
    columns = [(name, i) for name in taken() for i in COLUMNS]
    return [
        *first,
        *(case for case in others if case not in first),
        *((name, TP) for name in over_tp if name not in NOT_CUT),
        *(case for case in columns if nightly or case in COLUMNS_BY_DAY),
    ]


def steps_of(family: str) -> range:
    """Return its steps: a second one has what an optimizer changed, whichever the family."""
    return range(STEPS if family in ON_ALL else 1)


def reference(family: str) -> tuple[nn.Module, Found]:
    """A stock model that sees both ranks' batches; losses, first gradients, last parameters."""
    model, found = tiny_model(family, vocab_size=VOCABULARY), {}
    for i in steps_of(family):
        for rank in range(2):
            loss = loss_of(model, batch(model, 2 * i + rank))
            (loss / 2).backward()
            found[f"loss/{i}/{rank}"] = loss.detach()
        grads = gradients(model)
        found[f"norm/{i}"] = torch.stack([g.double().norm() for g in grads.values()]).norm()
        if i == 0:
            found |= {f"grad/{n}": g.clone() for n, g in grads.items()}
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param -= RATE * param.grad
        model.zero_grad()
    found |= {f"state/{n}": t for n, t in model.state_dict().items()}
    return model, without_unused_rows(found)


def without_unused_rows(found: Found) -> Found:
    """Cut rows of FC1 of experts that return their input: no checkpoint has them."""
    of_fc1 = {name: name.replace("experts.gate_up_proj", "experts.down_proj") for name in found}
    for name, other in of_fc1.items():
        unused = found[name][len(found[other]) :] if other != name else ()
        assert not name.startswith("grad/") or not any(row.any() for row in unused)
        found[name] = found[name] if other == name else found[name][: len(found[other])]
    return found


def parallel(family: str, meshes: Meshes, folder: Path, to: int) -> tuple[Found, list[str]]:
    """The same of two ranks, after a round trip through a checkpoint; exports what it ends with.

    Returns:
        Numbers on rank `to`, and the family's row of the table.
    """
    memory = MemoryOptions(recompute="gemm_last")
    model = parallelize_moe(tiny_model(family, vocab_size=VOCABULARY), meshes, memory=memory)
    found = {}
    optimizer, num = on_parts(torch.optim.SGD)(model.parameters(), lr=RATE), 2 // meshes.data_ranks
    step = TrainStep(model, optimizer, num_micro_batches=num)
    for i in steps_of(family):
        losses = []
        for place in range(num):
            with step.micro_batch():
                loss = loss_of(model, batch(model, 2 * i + place + meshes.data_rank))
                (loss / num).backward()
            losses.append(loss.detach().float())
        every = [torch.empty(num) for _ in range(2)]
        dist.all_gather(every, torch.stack(losses))
        assert num == 1 or torch.equal(*every)  # tp ranks have the same rows
        found |= {f"loss/{i}/{rank}": value for rank, value in enumerate(torch.cat(every)[:2])}
        if i == 0:
            found |= gather_whole({f"grad/{n}": g for n, g in gradients(model).items()}, to)
        finished = step.finish()
        found[f"norm/{i}"] = torch.tensor(finished.norm.total)
        counted = finished.metrics.tokens_per_expert
        assert all(int(n.sum()) > 0 for n in counted.values()), counted
    with Saver(folder / "checkpoints" / family, model, None) as saver:
        saved = saver.save(1, wait=True)
    refill(model, lambda: load(saved, model))
    exported = folder / "exports" / family
    export_hf(model, exported)
    refill(model, lambda: load_hf(exported, model))
    found |= gather_whole({f"state/{n}": t for n, t in model.state_dict().items()}, to)
    return found, [family, *described(model)] if num == 1 else []  # tp has cut it


def described(model: nn.Module) -> list[str]:
    """Return the class of a model, whose router chooses, what experts compute and tp cuts.

    Then whether packed documents are kept apart and cp ranks may hold parts of them, and what is
    fp32 where the rest is bf16, which test_bf16.py compares with stock for every family.
    """
    layers = list(get_moe_state(model).layers.values())
    routers = {"moecore's" if layer.get_part("router") else own_router(model) for layer in layers}
    experts = {
        "its own" if layer.get_part("experts").own_activation else layer.config.activation
        for layer in layers
    }
    name, other = type(model).__name__, find_packing_problem(model)
    rows = "yes, of text" if find_towers(model) else "yes"
    parts = rows if other is None else f"no, {other}"
    kept = {n.removesuffix(".weight").split(".")[-1] for n in set_dtypes(model, torch.bfloat16)}
    kept -= {*SELECTION_BIASES, "inv_freq", "original_inv_freq"}  # which are fp32 in each
    bf16 = f"yes; fp32: {', '.join(sorted(kept))}" if kept else "yes"
    return [name, " ".join(sorted(routers)), " ".join(sorted(experts)), cut_of(model), parts, bf16]


def own_router(model: nn.Module) -> str:
    """Return why a model keeps its router, which the record of its class says."""
    reasons = family_cases.OWN_ROUTERS
    (reason,) = {reasons[n] for m in model.modules() if (n := type(m).__name__) in reasons}
    return f"its own: {reason}"


def cut_of(model: nn.Module) -> str:
    """Return what tp ranks have parts of, and what of the attention stays whole."""
    cuts, whole = plan_modules(model, 2)
    kinds = {"attention" if cut.row in OUTPUTS else "MLPs" for cut in cuts.values()}
    if not kinds:
        layers = [m for m in model.modules() if isinstance(m, MoELayer)]
        return "tokens of MoE layers" if layers else "refused"
    classes = re.findall(r"\((\w+)\), whose", " ".join(whole))
    return ", ".join(sorted(kinds, reverse=True)) + (
        f"; not {', '.join(classes)}" if classes else ""
    )


def refill(model: nn.Module, fill: Callable[[], Any]) -> None:
    """Check that numbers that were lost come back."""
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(9.0)
    fill()
    pairs = zip(before, model.parameters(), strict=True)
    assert all(torch.equal(local(a), local(b)) for a, b in pairs)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> Found:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def worst(found: Found, expected: Found) -> tuple[float, str]:
    """The largest error relative to its tensor's largest value, and where it is.

    A gradient that is nearly zero beside the others is measured by them.
    """
    grads = [g for n, g in expected.items() if n.startswith("grad/")]
    largest = max((float(g.abs().max()) for g in grads), default=0.0)
    errors = [(0.0, "")]
    for name in found.keys() | expected.keys():
        if name not in found or name not in expected:
            missing = found.get(name, expected.get(name))
            errors.append((float(missing.abs().max()), f"{name} of one side"))
            continue
        scale = float(expected[name].abs().max()) if expected[name].numel() else 1.0
        scale = max(scale, 1e-3 * largest if name.startswith("grad/") else 1e-8)
        difference = (found[name].double() - expected[name].double()).abs()
        errors.append((float(difference.max()) / scale if difference.numel() else 0.0, name))
    return max(errors)


def differs_from_stock(model: Any, family: str, folder: Path, state: Found) -> str:
    """Compare the tensors of an export with those that stock saves; return what differs."""
    tied = {"lm_head.weight"} if getattr(model.config, "tie_word_embeddings", False) else set()
    expected = revert_weight_conversion(model, {n: t for n, t in state.items() if n not in tied})
    files = (folder / "exports" / family).glob("*.safetensors")
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if found.keys() != expected.keys():
        return f"names {sorted(found.keys() ^ expected.keys())[:3]}"
    return next((n for n in found if not torch.equal(found[n], expected[n])), "")


def worker(rank: int, device: torch.device, folder: str, nightly: bool) -> dict[Any, Any]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = cases(nightly=nightly)
    families = [*dict.fromkeys(name for name, _ in chosen)]
    owners = {name: i % 2 for i, name in enumerate(families)}
    expected = {name: reference(name) for name in families[rank::2]}
    foldings = [*FOLDINGS, dict(tp=2), *(folding for _, folding in COLUMNS.values())]
    meshes = [build_meshes(ParallelConfig(**folding), "cpu") for folding in foldings]
    report: dict[tuple[str, int], Any] = {}
    for case in chosen:
        name, folding = case
        here = Path(folder, str(folding))
        try:
            if folding in COLUMNS:
                cell, found, wanted = COLUMNS[folding][0](name, meshes[folding])
                error = worst(found, without_unused_rows(wanted))
                report[case] = {"worst": error, "cell": cell, "stock": ""}
                continue
            found, row = parallel(name, meshes[folding], here, owners[name])
            if name in expected:
                stock, wanted = expected[name]
                report[case] = {"worst": worst(found, wanted), "row": row}
                state = {n[6:]: t for n, t in found.items() if n.startswith("state/")}
                report[case]["stock"] = differs_from_stock(stock, name, here, state)
        except Exception:
            report[case] = {"error": traceback.format_exc()}
    reports: list[Any] = [None, None]
    dist.all_gather_object(reports, report)
    return dict(sorted((reports[1] | reports[0]).items()))


def run(*, nightly: bool) -> dict[tuple[str, int], Any]:
    """Return what every case did; two processes."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(2, worker, folder, nightly)


def table(ran: dict[tuple[str, int], Any]) -> list[str]:
    """Return the lines of the table in docs/huggingface.md."""
    whole = {name: result["row"] for (name, i), result in sorted(ran.items()) if i < TP}
    cells = {name: [ran[name, i]["cell"] for i in COLUMNS] for name in whole}
    rows = [[*row, *cells[name]] for name, row in whole.items()]
    head = ["family", "class", "router", "activation of experts", "cut over tp", "documents, cp"]
    head += ["bf16", "pp", "LoRA"]
    lines = [head, ["---"] * len(head), *rows]
    lines += [[], ["refused", "why"], ["---", "---"], *map(list, REFUSED.items())]
    return ["| " + " | ".join(cells) + " |" if cells else "" for cells in lines]


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> dict[tuple[str, int], Any]:
    return run(nightly=request.config.option.nightly or torch.cuda.is_available())


def marked() -> list[Any]:
    always = cases(nightly=False)
    more = [case for case in cases(nightly=True) if case not in always]
    return [*always, *(pytest.param(*case, marks=pytest.mark.nightly) for case in more)]


@pytest.mark.parametrize(("family", "folding"), marked())
def test_two_ranks_equal_one_process(ran, family, folding) -> None:
    result = ran[family, folding]
    assert "error" not in result, result["error"]
    error, name = result["worst"]
    assert error <= TOLERANCES.get(family, 1e-5), f"{name}: {error}"
    assert result["stock"] == ""


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_refused(family: str, meshes: Meshes) -> None:
    """On meta: nothing is computed."""
    with torch.device("meta"):
        model = tiny_model(family)
    with pytest.raises((NotImplementedError, ValueError), match=re.escape(REFUSED[family])):
        parallelize_moe(model, meshes)


@pytest.mark.parametrize("family", beside(taken(), [f for f in taken() if f not in BY_DAY]))
def test_documents_are_kept_apart_or_refused(family: str) -> None:
    """Packed documents against each in a row of its own; cp refuses what documents do."""
    model, cuts = tiny_model(family), [0, 3, 8, 9, 18]
    ids_BT = torch.randint(52, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = {"input_ids": ids_BT, "cu_seq_lens_q": torch.tensor(cuts)}
    other = find_packing_problem(model)
    if other is not None:
        with pytest.raises(NotImplementedError, match=re.escape(f"because {other} needs whole")):
            CausalContext(model).context_options(ContextOptions(), 2, 1)
        return
    CausalContext(model).context_options(ContextOptions(), 2, 1)
    with torch.no_grad():
        alone = [model(input_ids=ids_BT.view(1, -1)[:, a:b]).logits for a, b in pairwise(cuts)]
        use_causal_attention(model)
        want, got = torch.cat(alone, 1), model(**given).logits
    assert (got.view(want.shape) - want).abs().max() <= 5e-6 * want.abs().max()


def page() -> list[str]:
    """Return the lines of the table in docs/huggingface.md, of families that are installed."""
    text = (ROOT / "docs" / "huggingface.md").read_text()
    lines = text.partition(BEGIN)[2].partition(END)[0].split("\n")[1:-1]
    names = {"family", "---", *family_names()}
    return [row for row in lines if row.count("|") <= 8 or row.split("|")[1].strip() in names]


def column(index: int) -> dict[str, str]:
    """Return a cell of each family's row; -2 is the last one."""
    rows = [row.split("|") for row in page() if row.count("|") > 8]
    return {row[1].strip(): row[index].strip() for row in rows}


@pytest.mark.parametrize("family", beside(taken(), [f for f in taken() if f not in PLANNED]))
def test_every_family_is_planned(family: str, no_group_left: None) -> None:
    assert family_cases.cell_of_plan(family, *DEGREES) == "yes"


@pytest.mark.parametrize("family", SEARCHED)
def test_a_search_plans_what_degrees_plan(family: str, no_group_left: None) -> None:
    assert family_cases.cell_of_plan(family) == family_cases.cell_of_plan(family, *DEGREES)


def test_the_page_has_what_is_cut_to_stages() -> None:
    """Of every family; numbers over two stages are of few by day."""
    cells = column(-3)
    with torch.device("meta"):
        models = {family: tiny_model(family) for family in taken()}
    found = {family: family_cases.cell_of_stages(model) for family, model in models.items()}
    for family, model in models.items():  # mistral_large4 since transformers 5.24
        if any(name.endswith("rotary_emb.alpha") for name, _ in model.named_parameters()):
            cells[family] = "no, modules in front of its layers"
    assert {family: cells[family] for family in found} == found


@pytest.mark.parametrize("family", NOT_CUT)
def test_what_tp_cannot_cut(family: str) -> None:
    with torch.device("meta"):
        model = tiny_model(family)
    swap_blocks(model, {})
    assert plan_modules(model, 2)[0] == {}


@pytest.mark.nightly  # it has every family
def test_the_page_has_what_ran(ran: dict[tuple[str, int], Any]) -> None:
    """python -m tools.write_families writes it."""
    pytest.importorskip("peft", reason="a column is of its adapters")
    assert page() == table(ran)
