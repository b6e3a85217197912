"""Compares ways to balance experts: trains one small model with each and prints their loads.

    python examples/balancing.py --steps 300 --plot docs/balancing.png

The script runs on a CPU, in one process, in about a minute and a half. docs/balancing.md has the
table that it prints.
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from moecore import BalanceConfig, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.models import Decoder, DecoderConfig, preset
from moecore.recipes.data import make_generator, scan_stdlib

BATCH_SIZE, SEQ_LEN = 8, 64
LAST = 50  # steps that the table's means are over
EVAL_BATCHES = 50


@dataclass(frozen=True, slots=True)
class Way:
    """One way to balance experts.

    Attributes:
        name: name in table and plot.
        balance: losses and bias.
        expert_bias: whether the router has a selection bias.
        score_function: the router's function of logits. Quantile balancing needs scores in [0,
            1] that do not depend on each other.
    """

    name: str
    balance: BalanceConfig
    expert_bias: bool = False
    score_function: str = "softmax"


@dataclass(slots=True)
class Curve:
    """Results of a run: losses, and loads as the most loaded expert over the mean (worst layer).

    Attributes:
        losses: training loss of each step.
        loads: load of each step, counted in training.
        eval_loss: loss in eval mode after the last step, on other text.
    """

    losses: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    eval_loss: float = float("nan")

    def compute_means(self) -> tuple[float, float]:
        """Return the mean loss and the mean load of the last steps."""
        last = min(LAST, len(self.losses))
        return sum(self.losses[-last:]) / last, sum(self.loads[-last:]) / last


WAYS = (
    Way("none", BalanceConfig()),
    Way("micro-batch loss", BalanceConfig(micro_batch_coef=0.02)),
    Way("sequence loss", BalanceConfig(sequence_coef=0.02)),
    Way("bias, sign", BalanceConfig(bias_update_rate=0.01), expert_bias=True),
    Way(
        "bias, quantile",
        BalanceConfig(bias_update="quantile", bias_update_rate=0.5),
        expert_bias=True,
        score_function="sigmoid",
    ),
    Way(
        "the same per micro-batch",
        BalanceConfig(bias_update="quantile", bias_update_rate=0.5, bias_per_micro_batch=True),
        expert_bias=True,
        score_function="sigmoid",
    ),
)


def make_config(way: Way) -> DecoderConfig:
    """Return the config of a decoder with two MoE layers of 16 experts each, top 2."""
    base = preset("tiny")
    assert base.moe is not None
    moe = replace(
        base.moe,
        dim=64,
        hidden_dim=32,
        num_experts=16,
        balance=way.balance,
        expert_bias=way.expert_bias,
        score_function=way.score_function,
    )
    return replace(
        base, dim=64, num_layers=2, head_dim=16, dense_layers=(), mlp_hidden_dim=0, moe=moe
    )


def read_corpus() -> torch.Tensor:
    """Return the bytes of the sources of Python's standard library."""
    text = b"\n".join(path.read_bytes() for path in scan_stdlib())
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def read_batch(
    corpus_N: torch.Tensor, key: str, batch_size: int = BATCH_SIZE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels [B, T] of random windows of the corpus; `key` is the seed's text."""
    starts_B = torch.randint(len(corpus_N) - SEQ_LEN, (batch_size,), generator=make_generator(key))
    rows_BT = corpus_N[starts_B[:, None] + torch.arange(SEQ_LEN + 1)].long()
    return rows_BT[:, :-1], rows_BT[:, 1:]


def train(
    way: Way, corpus: torch.Tensor, *, steps: int, seed: int, batch_size: int = BATCH_SIZE
) -> Curve:
    """Train a model with one way and return its curve; all ways have equal weights and batches."""
    model = Decoder(make_config(way))
    model.init_weights(seed=seed)
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    owner = TrainStep(model, optimizer)
    curve = Curve()
    for step in range(steps):
        tokens, labels = read_batch(corpus, f"{seed}/{step}", batch_size)
        with owner.micro_batch():
            loss = model(tokens, labels)
            loss.backward()
        metrics = owner.finish().metrics
        curve.losses.append(float(loss.detach()))
        curve.loads.append(max(metrics.compute_load_max_over_mean().values()))
    curve.eval_loss = compute_eval_loss(model, corpus, seed=seed + 1)
    return curve


@torch.no_grad()
def compute_eval_loss(model: Decoder, corpus: torch.Tensor, *, seed: int) -> float:
    """Return the mean loss over `EVAL_BATCHES` batches in eval mode."""
    model.eval()
    total = 0.0
    for step in range(EVAL_BATCHES):
        tokens, labels = read_batch(corpus, f"{seed}/{step}")
        total += float(model(tokens, labels))
    return total / EVAL_BATCHES


def format_table(curves: dict[str, Curve]) -> str:
    """Return a Markdown table of the means over the last steps and the loss in eval mode."""
    lines = [
        "| balancing | training loss | eval loss | hottest expert / mean |",
        "| --- | --- | --- | --- |",
    ]
    for name, curve in curves.items():
        loss, load = curve.compute_means()
        lines.append(f"| {name} | {loss:.3f} | {curve.eval_loss:.3f} | {load:.2f} |")
    return "\n".join(lines)


def plot(curves: dict[str, Curve], path: Path) -> None:
    """Draw loads and losses of every run; each point is the mean of ten steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for curve in curves.values():
        for axes, values in ((left, curve.loads), (right, curve.losses)):
            groups = [values[i : i + 10] for i in range(0, len(values), 10)]
            axes.plot([10 * i for i in range(len(groups))], [sum(g) / len(g) for g in groups])
    for axes, title in ((left, "hottest expert / mean"), (right, "training loss")):
        axes.set_xlabel("step")
        axes.set_title(title)
    left.legend(list(curves), fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def find_plot_problem(path: Path) -> str | None:
    """Return why no plot can be written to a path, as the end of an error; None = it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "go with matplotlib: pip install matplotlib"
    from matplotlib.backend_bases import FigureCanvasBase

    if path.suffix[1:] not in FigureCanvasBase.get_supported_filetypes():
        return "end in a format of matplotlib: use .png"
    if not path.parent.is_dir():
        return "be in a folder that is there: create it"
    if path.exists() and not path.is_file():
        return "be a plain file: use another name"
    return None


def main() -> None:
    """Train with every way, print the table, and draw the plot if --plot is set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, help="of 64 bytes each")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    parser.add_argument("--plot", type=Path, help="file to draw the curves into")
    args = parser.parse_args()
    if args.plot and (problem := find_plot_problem(args.plot)):
        parser.error(f"--plot ({args.plot}) must {problem}")
    corpus = read_corpus()
    size = args.batch_size
    curves = {
        w.name: train(w, corpus, steps=args.steps, seed=args.seed, batch_size=size) for w in WAYS
    }
    print(format_table(curves))
    if args.plot:
        plot(curves, args.plot)


if __name__ == "__main__":
    main()
