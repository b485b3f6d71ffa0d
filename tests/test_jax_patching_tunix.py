"""tunix's own models by the fused kernels, where google-tunix is installed."""

import importlib
import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_liger.patching import patch, unpatch
from model_cases import quick_jit

SMALL = dict(
    num_layers=1, vocab_size=11, embed_dim=32, hidden_dim=48, num_heads=4, head_dim=8,
    num_kv_heads=2, rope_theta=10000, norm_eps=1e-5,
)  # fmt: skip
MODELS = {
    "llama3": ("Llama3", "RMSNorm x3, RoPE x1, SwiGLU x1"),
    "qwen2": ("Qwen2", "RMSNorm x3, RoPE x1, SwiGLU x1"),
    "qwen3": ("Qwen3", "RMSNorm x5, RoPE x1, SwiGLU x1"),
}


@pytest.fixture
def model_file(monkeypatch):
    """A function that imports tunix.models.<name>.model, and no more of tunix than that needs."""
    spec = importlib.util.find_spec("tunix")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs google-tunix: no package named tunix is installed")
    root = next(iter(spec.submodule_search_locations))
    for known in [name for name in sys.modules if name.partition(".")[0] == "tunix"]:
        monkeypatch.delitem(sys.modules, known)

    def load(name):
        # The packages' own __init__ import the trainers, with all that those need.
        for package in ("tunix", "tunix.models", f"tunix.models.{name}"):
            module = types.ModuleType(package)
            module.__path__ = [root + "".join(f"/{part}" for part in package.split(".")[1:])]
            monkeypatch.setitem(sys.modules, package, module)
        try:
            return importlib.import_module(f"tunix.models.{name}.model")
        except ImportError as error:
            pytest.skip(f"tunix's {name} does not import beside this jax and flax: {error}")

    yield load
    for known in [name for name in sys.modules if name.partition(".")[0] == "tunix"]:
        del sys.modules[known]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_the_same_values_and_gradients(model_file, name):
    file, (kind, expected) = model_file(name), MODELS[name]
    model = getattr(file, kind)(file.ModelConfig(**SMALL), rngs=nnx.Rngs(0))
    drawn = np.random.default_rng(0)
    for _, param in nnx.to_flat_state(nnx.state(model)):
        spread = 0.3 * drawn.standard_normal(param.shape) + (param.ndim == 1)
        param.set_value(jnp.asarray(spread, param.dtype))
    tokens = jnp.asarray(drawn.integers(0, 11, (2, 7)))
    positions, mask = jnp.arange(7) + jnp.array([[0], [5]]), jnp.tril(jnp.ones((2, 7, 7), bool))

    @quick_jit
    def outcome(model):
        def loss(model):
            y = model(tokens, positions, None, mask)[0]
            return jnp.sum(jnp.cos(y)), y

        gradients, y = nnx.grad(loss, has_aux=True)(model)
        return [y, *jax.tree.leaves(gradients)]

    want, graphdef = outcome(model), nnx.graphdef(model)
    done = patch(model, implementation="pallas")
    assert sorted(str(done).split(", ")) == sorted(expected.split(", "))
    for a, b in zip(outcome(model), want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape and np.abs(a - b).max() <= 1e-5 * np.abs(b).max()
    assert set(unpatch(model)) == set(done.patched) and nnx.graphdef(model) == graphdef
