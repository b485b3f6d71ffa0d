"""The Pallas kernels on arrays that are split over devices: equal to one device, and no gather."""

import functools
import pathlib
import re
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / "sharding_checks.py"
NAMES = re.findall(r'^    "(\w+)":', SCRIPT.read_text(), re.MULTILINE)


@functools.cache
def outcomes(devices: int) -> dict[str, str]:
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(devices)], capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr
    return dict(line.split(" ", 1) for line in run.stdout.splitlines())


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("name", NAMES)
def test_sharded(name, devices):
    assert outcomes(devices)[name] == "ok"
