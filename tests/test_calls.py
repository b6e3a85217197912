"""A step of one CPU process, and a layer's forward, make few Python calls of moecore's functions.

Each call delays the launch of the next kernel. The bounds are measured numbers that may only fall.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch

import moecore
from moecore import MoELayer, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.models import Decoder, preset
from moecore.train import AdamW

SRC = str(Path(moecore.__file__).parent)
CALLS_OF_A_STEP, CALLS_OF_A_FORWARD = 3578, 170


@contextmanager
def counted() -> Iterator[list[str]]:
    """Within, list the calls of functions and generators of moecore."""
    calls: list[str] = []

    def visit(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SRC):
            calls.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(visit)
    try:
        yield calls
    finally:
        sys.setprofile(before)


@pytest.mark.usefixtures("no_group_left")
def test_a_step_makes_few_python_calls() -> None:
    config = preset("tiny")
    model = parallelize_moe(Decoder(config), build_meshes(ParallelConfig(ep=1), "cpu"))
    step = TrainStep(model, AdamW(model.parameters()), max_norm=1.0)
    tokens = torch.randint(config.vocab_size, (1, 16))
    for _ in range(3):  # the first steps make buffers and states
        with counted() as calls:
            with step.micro_batch():
                model(tokens, tokens).backward()
            step.finish()
    assert 1000 < len(calls) <= CALLS_OF_A_STEP


def test_a_forward_of_a_layer_makes_few_python_calls() -> None:
    config = preset("tiny").moe
    layer, x = MoELayer(config), torch.randn(8, config.dim, requires_grad=True)
    for _ in range(2):
        with counted() as calls:
            layer(x)
    assert 50 < len(calls) <= CALLS_OF_A_FORWARD
