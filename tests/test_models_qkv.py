"""`fused_qkv` in the Flax decoder: the same numbers, and where it runs step by step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import model_cases
from jax_liger.models import Cache, CausalLM, Config, generate, loss_fn
from jax_liger.models.lora import add_lora, merge_lora
from liger_ops import backend_pallas
from liger_ops.rms_norm_linear_rope import pallas_kernel, rule
from model_cases import CASES, assert_close, gradients, quick_jit, relative, with_config

LLAMA = "llama 3, square, with biases"


@pytest.fixture(autouse=True)
def other_operations_plain(monkeypatch):
    """Interpreting the other kernels takes long, and is done elsewhere."""
    stock = backend_pallas.choose

    def choose(implementation, op, *arrays, **settings):
        plain = jax.default_backend() == "cpu" and op != "rms_norm_linear_rope"
        return stock("xla" if plain else implementation, op, *arrays, **settings)

    monkeypatch.setattr(backend_pallas, "choose", choose)
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def fused(monkeypatch):
    """The weights of the one kernel's calls, as they are traced."""
    shapes = []

    def counted(*given, **settings):
        shapes.append(given[2].shape)
        return kernel(*given, **settings)

    kernel = pallas_kernel.rms_norm_linear_rope
    monkeypatch.setattr(pallas_kernel, "rms_norm_linear_rope", counted)
    return shapes


def model_of(name, layers=2, **settings):
    hf = {**CASES[name].hf_config().to_dict(), "num_hidden_layers": layers, "layer_types": None}
    config = Config.from_hf(hf, **settings)
    model = CausalLM(config, rngs=nnx.Rngs(0))
    for i, (path, parameter) in enumerate(nnx.to_flat_state(nnx.state(model, nnx.Param))):
        shape = parameter[...].shape
        center = 1.0 if any("norm" in str(part) for part in path) else 0.0
        spread = 0.3 if len(shape) == 1 else 1.2 / shape[0] ** 0.5
        noise = jax.random.normal(jax.random.key(i), shape)
        parameter.set_value((center + spread * noise).astype(parameter.dtype))
    return model


def abstract(name, **settings):
    config = Config.from_hf(CASES[name].hf_config(), **settings)
    return nnx.eval_shape(lambda: CausalLM(config, rngs=nnx.Rngs(0)))


ON = {"implementation": "pallas", "fused_qkv": True}
IDS = model_cases.tokens(2, 7)


def logits_of(model, ids=IDS):
    return jax.eval_shape(lambda m, i: m(i), model, ids)


@pytest.mark.parametrize(
    "name, settings",
    [
        (LLAMA, {"remat": "cheap"}),
        ("qwen3", {"layers": 1}),
        ("phi3, longrope in half of a head", {"layers": 1}),
        ("gemma3", {"layers": 1}),
    ],
)
def test_same_logits_and_gradients(fused, name, settings):
    model, batch = model_of(name, **settings), {"input_ids": IDS}
    on, off = with_config(model, **ON), with_config(model, implementation="xla")
    (loss, grads), (want_loss, want) = gradients(on, batch), gradients(off, batch)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    assert_close(jax.tree.leaves(grads), jax.tree.leaves(want), 3e-5)
    step = quick_jit(lambda m, i: m(i))
    assert relative(step(on, IDS), step(off, IDS)).max() < 1e-5
    config = model.config
    columns = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    assert len(fused) >= 2 and set(fused) == {(64, columns)}


def test_decoding_with_a_cache(fused):
    model = model_of("qwen3")
    on, off = with_config(model, **ON), with_config(model, implementation="xla")
    want = quick_jit(lambda m, i: m(i))(off, IDS)[:, 5:]
    step = quick_jit(lambda m, i, c: m(i, cache=c))
    _, cache = step(on, IDS[:, :5], Cache.empty(on.config, 2, 9))
    for t in (5, 6):
        got, cache = step(on, IDS[:, t : t + 1], cache)
        assert relative(got, want[:, t - 5 : t - 4]).max() < 1e-5
    assert len(fused) == 2 * 2  # two layers; the prompt's length and a token's are traced
    got, want = (generate(m, jnp.asarray(IDS), max_new_tokens=3) for m in (on, off))
    np.testing.assert_array_equal(got, want)


def test_adapters_step_aside(fused):
    model = with_config(model_of("mistral"), **ON)
    logits_of(model)
    assert len(fused) == 2
    add_lora(model, rank=2, alpha=4.0, targets=["layers.0.self_attn.v_proj"], rngs=nnx.Rngs(1))
    logits_of(model)
    assert len(fused) == 3  # the other layer's
    add_lora(model, rank=2, alpha=4.0, targets=["o_proj", "gate_proj"], rngs=nnx.Rngs(2))
    logits_of(model)
    assert len(fused) == 4
    merge_lora(model)
    logits_of(model)
    assert len(fused) == 6


def test_layers_that_rotate_nothing_step_aside(fused):
    logits_of(abstract("smollm3", **ON))
    assert len(fused) == 1


def test_projections_with_a_product_of_their_own_step_aside(fused):
    model = abstract("mistral", **ON)
    model.model.layers[0].self_attn.k_proj.dot_general = lambda *args, **kwargs: (
        2 * (jax.lax.dot_general(*args, **kwargs))
    )
    logits_of(model)
    assert len(fused) == 1


@pytest.mark.parametrize("tensor", [1, 2])
def test_heads_on_several_devices_step_aside(fused, tensor):
    mesh = jax.sharding.AbstractMesh(
        (2, 1, tensor), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    model = abstract("mistral", **ON)
    with jax.sharding.use_abstract_mesh(mesh):
        logits_of(model)
    assert len(fused) == (2 if tensor == 1 else 0)


@pytest.mark.parametrize("fused_projections", [False, True])
def test_the_rule_decides_where_nothing_is_asked_for(fused, monkeypatch, fused_projections):
    settings = {"fused_projections": fused_projections}
    asked = []

    def text(choice=False, **more):
        answer = rule.Choice(choice)
        monkeypatch.setattr(rule, "choose", lambda *a, **k: asked.append((a, k)) or answer)
        model = abstract(LLAMA, **settings, **more)
        return str(jax.make_jaxpr(lambda m, i: m(i))(model, IDS))

    stock = text(fused_qkv=False)
    assert not asked
    assert text(False, fused_qkv=True) == stock  # no weights are put together either
    (_, framework, rows, dim, heads), how = asked[0]
    assert (framework, rows, dim, tuple(heads)) == ("pallas", 14, 64, (4, 4, 16))
    assert how == {"dtype": "float32", "as_measured": False, "trained": None}
    assert text(fused_qkv=True, implementation="xla") == text(implementation="xla")
    assert not fused
    weights = "f32[64,192] = concatenate"
    one = text(True, fused_qkv=True)
    assert len(fused) == 2
    assert one.count(weights) == (0 if fused_projections else 2)
    assert stock.count(weights) == 0


def test_dtypes(fused):
    """Parameters in float32 beside products in bfloat16."""
    model = abstract("qwen3", dtype="bfloat16", **ON)
    assert logits_of(model).dtype == "bfloat16" and len(fused) == 2
    grads = jax.eval_shape(jax.grad(loss_fn), model, {"input_ids": IDS})
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}


def test_families_that_cannot_have_it():
    hf = CASES["olmo2"].hf_config()
    with pytest.raises(ValueError, match=r"fused_qkv must be False for olmo2, .* for 'llama', "):
        Config.from_hf(hf, fused_qkv=True)
    with pytest.raises(ValueError, match="fused_qkv must be False for olmo2"):
        dataclasses.replace(Config.from_hf(hf), fused_qkv=True)
