"""Patched models under DDP, FSDP and ZeRO-3: the gradient of one process, whatever each holds."""

import functools
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest
import torch

HERE = pathlib.Path(__file__).parent

ON_CPUS = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on GPUs these checks are run by test_patching_two_gpus.py"
)


def names_in(script: str) -> list[str]:
    """Of the checks, from their list at the script's end."""
    _, listed = (HERE / script).read_text().split("\nCHECKS = ")
    return re.findall(r"^    (\w+),$", listed, re.MULTILINE)


@functools.cache
def outcomes(script: str) -> list[dict[str, str]]:
    """What two processes say of each check."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "STORE": f"{folder}/store", "OMP_NUM_THREADS": "1"}
        runs = [
            subprocess.Popen(
                [sys.executable, str(HERE / script), str(rank), "2"], stdout=subprocess.PIPE,
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
    lines = [output.splitlines() for output, _ in found]
    return [dict(line.split(" ", 1) for line in of if " " in line) for of in lines]


NAMES = names_in("patching_distributed_checks.py")
NAMES_ZERO3 = names_in("patching_zero3_checks.py")
NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)


@ON_CPUS
@pytest.mark.parametrize("name", [name for name in NAMES if name != "fsdp1"])  # of GPUs alone
def test_distributed(name):
    assert [found[name] for found in outcomes("patching_distributed_checks.py")] == ["ok", "ok"]


@ON_CPUS
@NEEDS_DEEPSPEED
@pytest.mark.parametrize("name", NAMES_ZERO3)
def test_zero3(name):
    assert [found[name] for found in outcomes("patching_zero3_checks.py")] == ["ok", "ok"]
