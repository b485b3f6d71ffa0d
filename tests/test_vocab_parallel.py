"""Classes split over devices, in both frameworks: equal to one device, and no logits or weight
cross them.

The checks are scripts in processes of their own. Those of two GPUs need a host with two.
"""

import functools
import os
import pathlib
import re
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
JAX, TORCH = HERE / "vocab_parallel_checks.py", HERE / "vocab_parallel_torch_checks.py"
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


ON_TWO = [name for name in names(JAX) if name != "with_rows_of_their_own"]
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
def jax_outcomes(devices: int, platform: str) -> dict[str, str]:
    return outcomes_of(start(JAX, str(devices), platform, *ON_MANY.get(devices, ON_TWO)))


@pytest.fixture(scope="module")
def torch_outcomes(tmp_path_factory):
    """Of every check, the outcomes of both processes."""

    @functools.cache
    def outcomes(device: str) -> dict[str, set[str]]:
        meeting = str(tmp_path_factory.mktemp("processes") / device)
        runs = [start(TORCH, str(rank), "2", meeting, device) for rank in range(2)]
        try:
            both = [outcomes_of(run) for run in runs]
        finally:
            for run in runs:
                run.kill()
        return {name: {outcome[name] for outcome in both} for name in both[0]}

    return outcomes


@pytest.mark.parametrize("name", ON_TWO)
def test_in_jax_on_two_devices(name):
    assert jax_outcomes(2, "cpu")[name] == "ok"


@pytest.mark.parametrize(
    "devices, name", [(devices, name) for devices, names in ON_MANY.items() for name in names]
)
def test_in_jax_on_many_devices(devices, name):
    assert jax_outcomes(devices, "cpu")[name] == "ok"


@pytest.mark.parametrize("name", names(TORCH))
def test_in_pytorch_with_two_processes(name, torch_outcomes):
    assert torch_outcomes("cpu")[name] == {"ok"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=two_gpus) for n in ON_TWO])
def test_in_jax_on_two_gpus(name):
    assert jax_outcomes(2, "gpu")[name] == "ok"


@pytest.mark.parametrize("name", [pytest.param(n, marks=two_gpus) for n in names(TORCH)])
def test_in_pytorch_on_two_gpus(name, torch_outcomes):
    assert torch_outcomes("cuda")[name] == {"ok"}
