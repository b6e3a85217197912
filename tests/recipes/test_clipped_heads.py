import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moecore.base.torch_private import get_local_tensor
from moecore.recipes.loop import train_step
from moecore.recipes.train import build_job, parse_arguments
from tests.helpers.ranks import run_ranks

WORDS = (
    "--preset tiny-shared --tokens random --seq-len 32 --batch-size 2 --steps 1 --workers 0"
    " --optimizer muon --warmup-steps 1 --sample-every 0 --checkpoint-every 0"
)


def train_twice(rank: int, device: str, folder: Path) -> list[tuple[Any, Any, float]]:
    """Train a step with Muon, and again with QK-clip; return tau, logits and weights by layer."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    jobs, maxima = [], list[Tensor]()

    def record(q_BTHd: Tensor, k_BTHd: Tensor, _: Any, scale: float) -> None:
        scores_BHTT = torch.einsum("bthd,bshd->bhts", q_BTHd, k_BTHd).detach() * scale
        future_TT = torch.ones(scores_BHTT.shape[-2:]).triu(1).bool()
        maxima.append(scores_BHTT.masked_fill(future_TT, -torch.inf).amax((0, 2, 3)))

    for more in ("", "--qk-clip {tau}"):
        tau = sorted(maxima[0].tolist())[1] if maxima else 0.0  # above 1 or 2 of 4 heads
        words = f"{WORDS} --run-dir {folder}/{len(jobs)} {more.format(tau=tau)}"
        jobs.append(job := build_job(parse_arguments(words.split())))
        if not more:
            for layer in job.model.layers:
                layer.self_attn.observe_scores = record
        train_step(job, 1)
    layers = [[layer.self_attn for layer in job.model.layers] for job in jobs]
    weights = [
        [
            [
                get_local_tensor(getattr(a, name).weight).detach()
                for name in ("q_proj", "k_proj", "v_proj")
            ]
            for a in of
        ]
        for of in layers
    ]
    return list(zip(maxima, *weights, [tau] * len(maxima), strict=True))


def test_a_step_with_muon_scales_the_heads_above_the_limit(tmp_path: Path) -> None:
    num_clipped = 0
    for max_H, before, after, tau in run_ranks(1, train_twice, tmp_path):
        factor_H = (tau / max_H).clamp(max=1).sqrt()
        num_clipped += int((factor_H < 1).sum())
        rows_R1 = factor_H.repeat_interleave(len(before[0]) // len(factor_H))[:, None]
        for old, new, factors in zip(before, after, (rows_R1, rows_R1, 1.0), strict=True):
            torch.testing.assert_close(new, old * factors)
    assert 2 <= num_clipped < 12
