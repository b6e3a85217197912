"""A step in fp16 over two stages: only the last scales a loss, and all divide their gradients."""

from typing import Any

import pytest
import torch

from moecore import (
    DynamicLossScale,
    FSDPOptions,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.models import Decoder, preset
from tests.helpers.ranks import run_ranks


def worker(rank: int, device: torch.device) -> list[list[float]]:
    meshes, found = build_meshes(ParallelConfig(pp=2), "cpu"), []
    tokens = torch.randint(0, 128, (4, 17), generator=torch.Generator().manual_seed(0))
    for dtype, scale in ((None, None), (torch.float16, DynamicLossScale(initial=2.0**10))):
        torch.manual_seed(0)
        how: dict[str, Any] = dict(fsdp=FSDPOptions(param_dtype=dtype), pipeline=PipelineConfig())
        model = parallelize_moe(Decoder(preset("tiny")), meshes, **how)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainStep(model, optimizer, num_micro_batches=2, loss_scale=scale)
        inputs = [{"tokens_BT": x[:, :-1], "labels_BT": x[:, 1:]} for x in tokens.chunk(2)]
        losses = step.forward_backward(inputs).tolist()
        norm = step.finish().norm
        assert norm is not None
        found.append([*losses, float(norm.total)])
    return found


def test_loss_and_gradient_norm_are_those_of_fp32() -> None:
    fp32, fp16 = run_ranks(2, worker)
    assert fp16 != fp32 and fp16 == pytest.approx(fp32, rel=8 * 2.0**-11)  # eight roundings
