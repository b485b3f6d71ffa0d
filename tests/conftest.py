"""Without a GPU the kernels run in their interpreters, which are chosen before the first import."""

import functools
import gc
import os
import pathlib
import subprocess
import sys

import pytest


def _has_gpu() -> bool:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


HAS_GPU = _has_gpu()
# PyTorch multiplies float32 in full precision unless asked otherwise, and JAX on a GPU does not.
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["PALLAS_INTERPRET"] = "1"
else:
    # Both frameworks share the card in these tests.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")  # gives back what it frees


@pytest.fixture(autouse=HAS_GPU)
def _give_memory_back():
    """Several processes may run these tests, and each keeps what PyTorch has freed."""
    yield
    import torch

    torch.cuda.empty_cache()


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Linux gives a process 65,530 mappings of memory. Each program that XLA compiles takes three
    or more of them, and XLA crashes where none are left, to which so many tests would come.
    """
    yield
    mappings, jax = pathlib.Path("/proc/self/maps"), sys.modules.get("jax")
    if jax is not None and mappings.exists() and mappings.read_text().count("\n") > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory):
    """A function of a case's name: transformers' model, and ours with its weights; made once."""
    # Here, since most tests need neither framework's models.
    import model_cases
    from jax_liger.models import from_pretrained

    @functools.cache
    def make(name: str):
        folder = tmp_path_factory.mktemp("checkpoint")
        theirs = model_cases.checkpoint(model_cases.CASES[name], folder)
        return theirs, from_pretrained(folder)

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not HAS_GPU:
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and nvidia-smi finds none")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
