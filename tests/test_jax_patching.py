"""Someone else's nnx model by the fused norms, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_liger.nnx
from jax_liger.patching import patch, unpatch

D, F = 32, 48


class Block(nnx.Module):
    """A layer as other libraries write them: norms, a gated MLP, and norms of their own."""

    def __init__(self, dtype, rngs):
        settings = dict(param_dtype=jnp.float32, dtype=dtype, rngs=rngs)
        self.input_layernorm = nnx.RMSNorm(D, epsilon=1e-5, **settings)
        self.post_attention_layernorm = nnx.LayerNorm(D, **settings)
        self.over_time = nnx.RMSNorm(D, reduction_axes=-2, **settings)
        self.gate_proj = nnx.Linear(D, F, use_bias=False, **settings)
        self.up_proj = nnx.Linear(D, F, use_bias=False, **settings)
        self.down_proj = nnx.Linear(F, D, use_bias=False, **settings)

    def __call__(self, x):
        x = x + self.over_time(self.input_layernorm(x))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(nnx.silu(self.gate_proj(h)) * self.up_proj(h))


class Own(nnx.RMSNorm):
    """A norm that is no stock one."""

    def __call__(self, x, mask=None):
        return 2.0 * super().__call__(x, mask)


class Decoder(nnx.Module):
    def __init__(self, dtype=jnp.float32):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Block(dtype, rngs) for _ in range(2)])
        self.final_norm = nnx.RMSNorm(D, use_scale=False, dtype=dtype, rngs=rngs)
        self.own = Own(D, dtype=dtype, rngs=rngs)
        self.again = self.layers[0].input_layernorm  # one module in two places
        for path, param in nnx.to_flat_state(nnx.state(self)):
            if "norm" in str(path):
                key = jax.random.key(len(str(path)))
                param.set_value(1.0 + 0.3 * jax.random.normal(key, param.shape))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.again(self.own(self.final_norm(x)))


def example(dtype=jnp.float32):
    return 3.0 * jax.random.normal(jax.random.key(1), (2, 7, D), dtype)


def loss(model, x):
    return jnp.sum(jnp.cos(model(x).astype(jnp.float32)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_the_same_values_and_gradients(dtype, implementation):
    model, x = Decoder(dtype), example(dtype)
    want, wanted = model(x), nnx.grad(loss)(model, x)
    report = patch(model, implementation=implementation)
    text = str(jax.make_jaxpr(lambda x: model(x))(x))
    assert ("pallas_call" in text) == (implementation == "pallas")
    bound = 1e-5 if dtype == jnp.float32 else 0.02
    got, grads = model(x), nnx.grad(loss)(model, x)
    for ours, stock in ((got, want), (grads, wanted)):
        largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(stock))
        for a, b in zip(*map(jax.tree.leaves, (ours, stock)), strict=True):
            assert a.dtype == b.dtype
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            assert np.abs(a - b).max() <= bound * largest
    layer = "layers.{}.{}".format
    # The shared module is met under the first of its two names.
    assert set(report.patched) == {
        *(layer(1, name) for name in ("input_layernorm", "post_attention_layernorm")),
        *("again", layer(0, "post_attention_layernorm"), "final_norm"),
    }
    assert sorted(report.patched.values()) == ["LayerNorm"] * 2 + ["RMSNorm"] * 3
    # A layer's activation is among other things that it computes, and a subclass doubles its own.
    blocks, others = ({layer(i, "over_time") for i in (0, 1)}, {"layers.0", "layers.1", "own"})
    assert set(report.left_out) == blocks | others
    assert "left out x2: reduction_axes must be -1" in str(report)
    assert report.left_out["own"].startswith("it computes no RMSNorm")


def test_unpatch_leaves_what_was_there():
    model = Decoder()
    graphdef, x = nnx.graphdef(model), example()
    before = {id(v) for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}
    want, text = model(x), str(jax.make_jaxpr(lambda x: model(x))(x))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    report = patch(model, implementation="pallas")
    assert type(model.own) is Own and isinstance(model.again, jax_liger.nnx.RMSNorm)
    assert model.again is model.layers[0].input_layernorm
    assert not patch(model).patched  # a second time
    optimizer.update(model, jax.tree.map(jnp.zeros_like, nnx.grad(loss)(model, x)))

    assert set(unpatch(model)) == set(report.patched) and unpatch(model) == []
    assert nnx.graphdef(model) == graphdef
    assert {id(v) for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)} == before
    assert str(jax.make_jaxpr(lambda x: model(x))(x)) == text
    np.testing.assert_array_equal(model(x), want)


def test_norms_that_were_fused_before_stay():
    model = nnx.List([jax_liger.nnx.RMSNorm(D, offset=1.0, rngs=nnx.Rngs(0))])
    assert unpatch(model) == [] and type(model[0]) is jax_liger.nnx.RMSNorm
    assert str(patch(model)) == "nothing"
