import json
import os
import re
import resource
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import moecore
from moecore.cli import main
from moecore.io import latest, load, save
from moecore.io.hf.export import export_hf
from moecore.models import Decoder, preset
from tests.io.hf.dirs import write_directory
from tests.io.hf.test_config import TINY_JSON

CONFIG = replace(preset("tiny-deepseek-v3"), ce_chunk_tokens=2048)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three steps and a Hugging Face directory of the same model; only read."""
    home, model = tmp_path_factory.mktemp("cli"), Decoder(CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (1, 2, 3):
        save(home / "run", step, model, optimizer, {"tokens": step * 10})
    export_hf(model, home / "hf", config=TINY_JSON, max_shard_bytes=200_000)
    return home


def run(capsys: Any, *args: object) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


def test_inspect_native(home, capsys):
    code, out, err = run(capsys, "inspect", home / "run")
    assert (code, err) == (0, "")
    facts = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert facts["format"] == "native" and facts["step"] == "3"
    assert facts["steps"] == "step-000001 step-000002 step-000003"
    assert facts["optimizer"] == "True" and facts["extra"] == "tokens=30"
    assert facts["path"] == str(home / "run" / "step-000003")
    assert f"torch={torch.__version__}" in facts["versions"]
    code, out, _ = run(capsys, "inspect", home / "run" / "step-000001", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["step"] == 1 and "steps" not in facts
    entry = facts["tensors"]["model.model.layers.1.mlp.experts.w1"]
    assert entry == {"shape": [8, 2, 32, 64], "dtype": "F32"}
    size = sum(t.nbytes for t in Decoder(CONFIG).state_dict().values())
    rng = torch.get_rng_state().numel()
    assert facts["num_bytes"] == size + rng and facts["elements"] == {"F32": size // 4, "U8": rng}


def test_inspect_hugging_face(home, capsys):
    code, out, err = run(capsys, "inspect", home / "hf", "--tensors")
    assert (code, err) == (0, "")
    assert "model_type   deepseek_v3" in out and "layout       per_expert" in out
    assert f"  F32      {'[32, 64]':<24} model.layers.1.mlp.experts.7.up_proj.weight" in out
    facts = json.loads(run(capsys, "inspect", home / "hf", "--json")[1])
    assert facts["format"] == "Hugging Face" and facts["quantized"] is None
    assert facts["num_tensors"] == len(facts["tensors"]) == 135 and len(facts["files"]) > 2


@pytest.mark.parametrize("path", ["run", "run/step-000001", "hf"])
def test_verify_whole_ones(path, home, capsys):
    code, out, err = run(capsys, "verify", home / path)
    assert (code, err) == (0, "") and "whole" in out
    if path != "hf":
        assert run(capsys, "verify", home / path, "--sizes")[0] == 0


def test_verify_finds_damage(capsys, tmp_path):
    path = save(tmp_path / "run", 1, Decoder(CONFIG), None)
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    code, out, err = run(capsys, "verify", tmp_path / "run")
    assert (code, out) == (1, "") and "another sha256 than the manifest" in err
    assert err.startswith("moecore: ") and err.count("\n") == 1
    assert run(capsys, "verify", path, "--sizes")[0] == 0  # that does not look
    file.write_bytes(data[:-1])
    assert run(capsys, "verify", path, "--sizes")[0] == 1


W0, W1, W2, W3 = (f"model.layers.0.mlp.experts.{e}.w.weight" for e in range(4))
EXPERTS = dict.fromkeys((W0, W1, W3), torch.ones(2))
FUSED, ONES = "model.layers.0.mlp.experts.gate_up_proj", torch.ones(3, 2)
FP8 = {"a.weight": ONES.to(torch.float8_e4m3fn)}


@pytest.mark.parametrize(
    ("state", "config", "problems"),
    [
        (EXPERTS, {}, [f"{W2} is missing"]),
        (EXPERTS, dict(num_experts=3), [f"{W2} is missing", f"{W3} is one too many"]),
        ({FUSED: ONES}, dict(num_local_experts=4), [f"{FUSED} (3, 2) must have 4 experts"]),
        (FP8, {}, ["a.weight (fp8) has no a.weight_scale_inv"]),
    ],
)
def test_verify_lists_what_a_hugging_face_directory_lacks(
    state, config, problems, capsys, tmp_path
):
    write_directory(tmp_path, state, dict(model_type="other") | config)
    code, _, err = run(capsys, "verify", tmp_path)
    assert code == 1
    assert err.splitlines() == [f"moecore: {tmp_path}: {problem}" for problem in problems]


def test_verify_compares_with_the_config(home, capsys, tmp_path):
    state = {}
    for file in (home / "hf").glob("*.safetensors"):
        state |= load_file(file)
    del state["model.layers.2.mlp.experts.4.down_proj.weight"]
    state["model.norm.weight"] = torch.ones(3)
    state["model.odd"] = torch.ones(3)
    write_directory(tmp_path / "hf", state, TINY_JSON)
    (tmp_path / "hf" / "model-00009-of-00009.safetensors").touch()
    code, _, err = run(capsys, "verify", tmp_path / "hf")
    assert code == 1
    assert [line.removeprefix(f"moecore: {tmp_path / 'hf'}: ") for line in err.splitlines()] == [
        "model-00009-of-00009.safetensors holds no tensor of the checkpoint",
        "model.layers.2.mlp.experts.4.down_proj.weight is missing",
        "model.odd is not in the model that config.json describes",
        "model.norm.weight (3,) must be (64,)",
    ]
    write_directory(tmp_path / "two", {"a": torch.ones(2), "b": torch.ones(2)}, {}, num_shards=2)
    index = tmp_path / "two" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"total_size": 16', '"total_size": 17'))
    _, _, err = run(capsys, "verify", tmp_path / "two")
    assert "total_size (17) must be 16, that of the tensors" in err


def test_convert_both_ways(home, capsys, tmp_path):
    code, out, err = run(
        capsys,
        *("convert", home / "run", tmp_path / "hf", "--config", home / "hf"),
        *("--max-shard-size", "0.2MB"),
    )
    assert (code, err) == (0, "")
    assert out == f"{home / 'run' / 'step-000003'} -> {tmp_path / 'hf'}\n"
    for file in (home / "hf").iterdir():
        assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes(), file.name
    code, out, _ = run(capsys, "convert", tmp_path / "hf", tmp_path / "run", "--step", 5)
    path = tmp_path / "run" / "step-000005"
    assert code == 0 and out == f"{tmp_path / 'hf'} -> {path}\n" and latest(path.parent) == path
    model = Decoder(CONFIG)
    model.init_weights(seed=4)
    load(path, model)
    want = Decoder(CONFIG).state_dict()
    assert all(torch.equal(t, want[n]) for n, t in model.state_dict().items())
    code, _, _ = run(
        capsys,
        *("convert", home / "run", tmp_path / "half", "--config", home / "hf" / "config.json"),
        *("--dtype", "bfloat16", "--layout", "fused"),
    )
    facts = json.loads(run(capsys, "inspect", tmp_path / "half", "--json")[1])
    assert code == 0 and facts["layout"] == "fused"
    assert facts["elements"]["F32"] == 3 * 8  # selection biases


def test_what_a_forged_checkpoint_says_is_printed_as_text(capsys, tmp_path):
    """No escape code and no line break of a name or a value reaches the terminal."""
    odd = "a\x1b[31m\nb\u202eé"
    tensors = {odd: torch.ones(2)}
    path = save(
        tmp_path / "run", 1, torch.nn.Linear(2, 2), None, {odd + "x": odd + "\ud800", **tensors}
    )
    code, out, err = run(capsys, "inspect", path, "--tensors")
    assert (code, err) == (0, "")
    shown = r"a\x1b[31m\nb\u202eé"
    assert all(line.isprintable() for line in out.splitlines())
    assert f"extra        {shown}x={shown}" in out
    assert f"F32      [2]                      extra.{shown}" in out
    facts = json.loads(run(capsys, "inspect", path, "--json")[1])
    assert facts["extra"] == {odd + "x": odd + "\ud800"}
    write_directory(tmp_path / "hf", {"a.experts.1.\x1b[2J": torch.ones(2)}, {"model_type": "\x1b"})
    code, out, err = run(capsys, "verify", tmp_path / "hf")
    assert code == 1 and all(line.isprintable() for line in err.splitlines())
    assert len(err.splitlines()) == 1
    write_directory(tmp_path / "bad", {"x": torch.ones(2)}, {"model_type": "\x1b[2J"})
    code, _, err = run(capsys, "convert", tmp_path / "bad", tmp_path / "out")
    assert code == 1 and err.count("\n") == 1 and err.strip().isprintable()


def test_a_training_run_directory_means_its_checkpoints(home, capsys, tmp_path):
    steps = tmp_path / "mine" / "checkpoints"
    shutil.copytree(home / "run", steps)
    (tmp_path / "mine" / "config.toml").touch()
    for path in (tmp_path / "mine", steps, steps / "step-000003"):
        facts = json.loads(run(capsys, "inspect", path, "--json")[1])
        assert facts["path"] == str(steps / "step-000003")
        assert ("steps" in facts) == (path.name != "step-000003")
        code, out, _ = run(capsys, "verify", path, "--sizes")
        assert code == 0 and out.startswith(f"{steps / 'step-000003'}: whole")
    hf = tmp_path / "hf"
    assert run(capsys, "convert", tmp_path / "mine", hf, "--config", home / "hf")[0] == 0
    assert (hf / "config.json").is_file()
    code, out, _ = run(capsys, "prune", tmp_path / "mine", "--keep", 1)
    assert code == 0 and out.splitlines() == [f"removed {steps / f'step-00000{i}'}" for i in (1, 2)]
    assert [path.name for path in steps.glob("step-*")] == ["step-000003"]


TO_NATIVE = ("convert", "{home}/hf", "{tmp}/x")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("inspect", "{tmp}/none"), "none) must be a directory: it is not there"),
        (("inspect", "{tmp}"), "must hold a moecore.json, a config.json, a .metadata or whole"),
        (("convert", "{home}/run", "{tmp}/x"), "--config must name the config.json"),
        ((*TO_NATIVE, "--config", "{home}/hf"), "must be left out: "),
        (("prune", "{home}/run", "--keep", "0"), "--keep (0) must be a whole number >= 1"),
        (("prune", "{tmp}/none", "--keep", "1"), "must be a run: it is not there"),
        (("convert", "a", "b", "--max-shard-size", "5XB"), "('5XB') must be valid: pass a size"),
        (
            ("convert", "{home}/hf", "{tmp}/x", "--layout", "fused"),
            "--layout (fused) must be left out for a target that is native",
        ),
        (("convert", "{home}/hf", "{tmp}/x", "--step", "-1"), "--step (-1) must be a whole"),
        ((*TO_NATIVE, "--step", "one"), "--step: invalid literal for int()"),
        (("convert", "a", "b", "--dtype", "int8"), "invalid choice 'int8'"),
        (("prune", "a"), "--keep must be set: give it"),
        ((), "COMMAND of moecore checkpoint ('') must be one of inspect, verify, convert"),
    ],
)
def test_wrong_usage_is_2(args, message, home, capsys, tmp_path):
    code, out, err = run(capsys, *(a.format(home=home, tmp=tmp_path) for a in args))
    assert (code, out) == (2, "") and message in err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("convert", "{home}/run", "{home}/hf", "--config", "{home}/hf"), "hf) must not exist yet"),
        (("convert", "{home}/hf", "{home}/run"), "run) must be no run yet, but holds latest: cho"),
        (("inspect", "{tmp}/bin"), "pytorch_model.bin) must be safetensors, because unpickling"),
        (("convert", "{tmp}/bin", "{tmp}/x"), "must be given for model_type ('mixtral')"),
    ],
)
def test_problems_are_1(args, message, home, capsys, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "config.json").write_text('{"model_type": "mixtral"}')
    (tmp_path / "bin" / "pytorch_model.bin").touch()
    code, _, err = run(capsys, *(a.format(home=home, tmp=tmp_path) for a in args))
    assert code == 1 and message in err and err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["bin"]


def test_help_and_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"moecore {moecore.__version__}\n"
    assert main(["checkpoint", "--help"]) == 0
    text = capsys.readouterr().out
    for command in ("inspect", "verify", "convert", "prune"):
        assert f"moecore checkpoint {command}" in text
        assert main(["checkpoint", command, "--help"]) == 0
        assert f"moecore checkpoint {command} " in capsys.readouterr().out  # an example
    assert main(["checkpoint", "convert", "--help"]) == 0  # words have the names that errors use
    assert capsys.readouterr().out.splitlines()[0].endswith(" [OPTIONS] SOURCE TARGET")
    assert main(["report"]) == 2 and "TRACE must be set" in capsys.readouterr().err


def test_help_lists_each_command_once_in_its_group(capsys):
    """The error of an unknown command names the commands that exist."""
    assert main(["nothing"]) == 2
    choices = capsys.readouterr().err.partition("must be one of ")[2].partition(":")[0]
    names = set(choices.split(", "))
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines if re.match("  [a-z]", line)]
    assert len(listed) == len(names) and set(listed) == names
    for group in ("training:", "trained models:", "plans:", "diagnosis:"):
        assert lines.count(group) == 1


def test_python_m_moecore(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["moecore", "checkpoint", "verify", "/nowhere"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("moecore", run_name="__main__")
    assert stop.value.code == 2 and "must be a directory" in capsys.readouterr().err


def test_help_imports_no_torch():
    """Torch takes seconds; another process, because this one has it."""
    code = "import sys; from moecore.cli import main; main(sys.argv[1:]); "
    code += "print('torch' in sys.modules or 'tyro' in sys.modules)"
    out = subprocess.check_output([sys.executable, "-c", code, "--help"], text=True)
    assert out.startswith("usage: moecore") and out.splitlines()[-1] == "False"


def test_an_interrupt_of_imports_is_no_traceback():
    """Not even where what is imported swallows it."""
    code = """
import os, signal, sys, time
from moecore import cli

def import_module(name):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except BaseException:
        raise ModuleNotFoundError("swallowed")

cli.import_module = import_module
sys.exit(cli.main(["plan", "--preset", "tiny", "--gpus", "4"]))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "")


SPARSE = 40 * 10**9
LONG = [("x", 10**6), ("a\nb\n", 10**5), ("\x1b[2J", 10**5)]


def spoil(path, kind):
    """Write what a broken copy leaves, or many objects in few bytes."""
    with open(path, "wb") as file:
        if kind == "sparse":
            file.truncate(SPARSE)
        else:
            file.write(b"[" + b"[]," * (4 << 20) + b"[]]")


NATIVE = ["inspect", "verify", "convert", "prune"]


@pytest.mark.parametrize(
    ("file", "commands", "kind"),
    [
        ("moecore.json", NATIVE, "sparse"),
        ("config.json", NATIVE[:3], "sparse"),
        ("config.json", NATIVE[:3], "objects"),
        ("model.safetensors.index.json", NATIVE[:3], "sparse"),
        (".metadata", NATIVE[:3], "sparse"),
        ("given config.json", ["convert"], "sparse"),
        ("given config.json", ["convert"], "objects"),
    ],
)
def test_a_file_of_another_size_is_one_line(home, capsys, tmp_path, file, commands, kind):
    options = []
    if file == "moecore.json":
        place = save(tmp_path / "run", 1, torch.nn.Linear(2, 2), None) / file
        path, options = tmp_path / "run", ["--config", home / "hf"]
    elif file == ".metadata":
        path, options = tmp_path / "dcp", ["--config", home / "hf"]
        to = ("--to", "dcp", "--config", home / "hf")
        assert run(capsys, "convert", home / "run", path, *to)[0] == 0
        place = path / file
    elif file == "given config.json":
        place = tmp_path / "given" / "config.json"
        place.parent.mkdir()
        path, options = home / "run", ["--config", place]
    else:
        shutil.copytree(home / "hf", path := tmp_path / "hf")
        place = path / file
    spoil(place, kind)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for command in commands:
        more = {"convert": [tmp_path / "out", *options], "prune": ["--keep", 1]}.get(command, [])
        code, out, err = run(capsys, command, path, *more)
        assert (code, out, err.count("\n")) == (1, "", 1), err
        assert err.startswith("moecore: ") and err.endswith("so copy it again\n")
        assert f"path ({place}) must have at most " in err and not (tmp_path / "out").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KB


def fix(text: str) -> ValueError:
    return ValueError(f"name ({text}) must be shorter: fix it")


@pytest.mark.parametrize(
    ("error", "code", "begin", "end"),
    [
        (KeyboardInterrupt(), 130, "", ""),
        (MemoryError(), 1, "moecore: this machine has too little memory for it", "(MemoryError)\n"),
        *((fix(x * n), 1, "moecore: name (", ") must be shorter: fix it\n") for x, n in LONG),
    ],
    ids=range(2 + len(LONG)),
)
def test_an_error_is_a_line_of_bounded_length(home, capsys, monkeypatch, error, code, begin, end):
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("moecore.io.commands.read_manifest", fail)
    found, out, err = run(capsys, "inspect", home / "run")
    assert (found, out) == (code, "") and len(err) < 2100 and err.count("\n") == (code == 1)
    assert err.startswith(begin) and err.endswith(end)
    assert all(line.isprintable() for line in err.splitlines())


# The first module that takes long to import: before `main` runs, as a module and as the installed
# script imports it, or in a command that imports torch.
INTERRUPTED = dict.fromkeys(("-m moecore", "-c 'from moecore.__main__ import main'"), "difflib")
for name in ("train", "pretrain", "finetune", "grpo", "tiny-model"):
    INTERRUPTED[f"-m moecore {name} --help"] = "torch"


@pytest.mark.parametrize("command", INTERRUPTED)
def test_an_interrupt_of_the_command_line_itself_is_no_traceback(command, tmp_path):
    script = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / f"{INTERRUPTED[command]}.py").write_text(script)
    path = os.pathsep.join([str(tmp_path), str(Path(moecore.__file__).parents[1])])
    found = subprocess.run(
        [sys.executable, *shlex.split(command)],
        env=os.environ | {"PYTHONPATH": path},
        # A background job of a shell ignores SIGINT, and its children inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "")
