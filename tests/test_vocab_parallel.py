"""Classes split over devices in JAX: equal to one device, and no logits or weight cross them.

The checks run in processes of their own. Those on two GPUs need a host with two.
"""

import functools
import os
import pathlib
import re
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / "vocab_parallel_checks.py"
# Most is done with two devices; what needs two axes, with more.
ON_MANY = {4: ["a_label_of_another_device", "with_rows_of_their_own"], 8: ["under_shard_map"]}


def names(script: pathlib.Path) -> list[str]:
    """Of the script's checks."""
    return re.findall(r'^    "(\w+)":', script.read_text(), re.MULTILINE)


def gpus() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except FileNotFoundError:
        return 0
    return listed.stdout.count("GPU ")


ON_TWO = [name for name in names(SCRIPT) if name != "with_rows_of_their_own"]
two_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpus() < 2, reason=f"needs two GPUs, and nvidia-smi finds {gpus()}"),
]


def outcomes_of(run: subprocess.Popen) -> dict[str, str]:
    out, errors = run.communicate(timeout=900)
    assert run.returncode == 0, errors
    return dict(line.split(" ", 1) for line in out.splitlines())


def start(script: pathlib.Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, str(script), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=dict(os.environ))


@functools.cache
def outcomes(devices: int, platform: str) -> dict[str, str]:
    return outcomes_of(start(SCRIPT, str(devices), platform, *ON_MANY.get(devices, ON_TWO)))


@pytest.mark.parametrize("name", ON_TWO)
def test_on_two_devices(name):
    assert outcomes(2, "cpu")[name] == "ok"


@pytest.mark.parametrize(
    "devices, name", [(devices, name) for devices, names in ON_MANY.items() for name in names]
)
def test_on_many_devices(devices, name):
    assert outcomes(devices, "cpu")[name] == "ok"


@pytest.mark.parametrize("name", [pytest.param(n, marks=two_gpus) for n in ON_TWO])
def test_on_two_gpus(name):
    assert outcomes(2, "gpu")[name] == "ok"
