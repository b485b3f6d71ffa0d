"""The rules for a mesh of data, fsdp and tensor: equal to one device, and what crosses devices."""

import functools
import pathlib
import re
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / "models_rules_checks.py"
NAMES = re.findall(r'^    "(\w+)":', SCRIPT.read_text(), re.MULTILINE)


@functools.cache
def outcomes() -> dict[str, str]:
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return dict(line.split(" ", 1) for line in run.stdout.splitlines())


@pytest.mark.parametrize("name", NAMES)
def test_on_several_devices(name):
    assert outcomes()[name] == "ok"
