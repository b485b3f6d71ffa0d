"""What the tests of `fused_qkv` share: a rule that always says yes, and models patched so."""

import pytest
import torch

import torch_liger
from liger_ops import backend_triton
from liger_ops.rms_norm_linear_rope import rule, triton_kernel
from liger_ops.rms_norm_linear_rope.cases import Config
from patching_models import DEVICE, made, twin

TILES = Config(16, 128, 64, 4, 2)
# What of a family makes a difference to attention.
SETTINGS = {
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "phi3": {"sliding_window": 5},
}


@pytest.fixture(autouse=True)
def other_operations_plain(monkeypatch):
    """Under the interpreter they would take the most time by far."""
    stock = backend_triton.choose

    def choose(implementation, op, *tensors, **settings):
        plain = DEVICE == "cpu" and op != "rms_norm_linear_rope"
        return stock("eager" if plain else implementation, op, *tensors, **settings)

    monkeypatch.setattr(backend_triton, "choose", choose)
    yield
    torch_liger.unpatch()


@pytest.fixture
def fused(monkeypatch):
    """The rule says yes to everything, and to tiles that are few. The calls of the one kernel."""
    calls = []

    def counted(*given, **settings):
        calls.append(given)
        return kernel(*given, **settings)

    kernel = triton_kernel.rms_norm_linear_rope
    monkeypatch.setattr(triton_kernel, "rms_norm_linear_rope", counted)
    monkeypatch.setattr(rule, "choose", lambda *args, **settings: rule.Choice(True, TILES))
    return calls


@pytest.fixture
def copies(monkeypatch):
    """How many weights, of rows of 64, were put into one at a time."""
    found = []

    def counted(tensors, *args, **kwargs):
        if all(tensor.shape[1:] == (64,) for tensor in tensors):
            found.append(len(tensors))
        return stock(tensors, *args, **kwargs)

    stock = torch.cat
    monkeypatch.setattr(torch, "cat", counted)
    return found


def pair(family="llama", **settings):
    """A plain model and the same one patched."""
    plain = made(family, **{**SETTINGS.get(family, {}), **settings})
    model = twin(plain)
    report = torch_liger.apply_liger_kernel(model, fused_qkv=True)
    assert report.applied["fused_qkv"] == report.applied["fused_add_rms_norm"] == 2
    return plain, model
