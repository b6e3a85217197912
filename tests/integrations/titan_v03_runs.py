"""A Trainer of torchtitan 0.3 on ranks that exist already, from its command line."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

SPECS = "tests.integrations.titan_v03_specs"


def build_trainer(config: str, folder: str, words: list[str], module: str = SPECS) -> Any:
    """Return what `torchtitan.train` would train with this command line. Collective."""
    from torchtitan.config import ConfigManager

    for key, value in (("RANK", dist.get_rank()), ("WORLD_SIZE", dist.get_world_size())):
        os.environ[key] = str(value)
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    torch.compiler.reset()
    counters.clear()
    line = ["--module", module, "--config", config, f"--dump_folder={folder}", *words]
    return ConfigManager().parse_args(line).build()
