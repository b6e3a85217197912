import os
import stat
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.power import PowerLog, parse_samples

PRINTED = "690.10, 700.00, 1500\n[N/A], 700.00, 1500\n650.00, 700.00, 1600\n700.0"


def test_lines_that_are_no_samples_are_left_out() -> None:
    assert parse_samples(PRINTED) == [(690.1, 700.0, 1500.0), (650.0, 700.0, 1600.0)]
    assert parse_samples("") == []


def test_means_of_what_is_printed_meanwhile(tmp_path: Path, monkeypatch: Any) -> None:
    tool, seen = tmp_path / "nvidia-smi", tmp_path / "arguments"
    tool.write_text(f'#!/bin/sh\necho "$@" > {seen}\nprintf "{PRINTED}"\nexec sleep 60\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with PowerLog(torch.device("cpu")) as log:
        log._start("GPU-1")
        while not seen.exists() or not seen.read_text():
            time.sleep(0.01)
        time.sleep(0.2)
    assert log.summary() == dict(power_watts=670.05, power_limit_watts=700.0, sm_mhz=1550.0)
    assert "--id=GPU-1" in seen.read_text()


def test_nothing_is_said_without_the_tool(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with PowerLog(torch.device("cpu")) as log:
        log._start("GPU-1")
    assert log.summary() == {}
