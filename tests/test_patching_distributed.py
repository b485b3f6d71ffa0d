"""Patched models under DDP and FSDP: the gradient of one process, whatever each process holds."""

import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest
import torch

SCRIPT = pathlib.Path(__file__).parent / "patching_distributed_checks.py"
NAMES = re.findall(r'^    "(\w+)":', SCRIPT.read_text(), re.MULTILINE)

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")


@functools.cache
def outcomes() -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "STORE": f"{folder}/store", "OMP_NUM_THREADS": "1"}
        runs = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(rank), "2"], stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, env=environment,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            found = [run.communicate(timeout=300) for run in runs]
        finally:
            for run in runs:
                run.kill()
    for run, (_, errors) in zip(runs, found, strict=True):
        assert run.returncode == 0, errors
    return [dict(line.split(" ", 1) for line in output.splitlines()) for output, _ in found]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.gpu) if n == "fsdp1" else n for n in NAMES]
)
def test_distributed(name):
    assert [outcome[name] for outcome in outcomes()] == ["ok", "ok"]
