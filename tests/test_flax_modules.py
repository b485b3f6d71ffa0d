"""The Flax modules are drop-ins for the stock ones: parameters, results, refused options."""

import flax.linen
import flax.nnx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_liger.linen
import jax_liger.nnx

X = jax.random.normal(jax.random.key(0), (4, 6, 48))
SCALE = 1 + 0.3 * jax.random.normal(jax.random.key(1), (48,))

DTYPES = [(None, "float32"), (None, "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("dtype, x_dtype", DTYPES)
@pytest.mark.parametrize("use_scale", [True, False])
def test_nnx_equals_the_stock_module(implementation, dtype, x_dtype, use_scale):
    settings = {"epsilon": 1e-5, "dtype": dtype, "use_scale": use_scale, "rngs": flax.nnx.Rngs(0)}
    stock = flax.nnx.RMSNorm(48, **settings)
    ours = jax_liger.nnx.RMSNorm(48, implementation=implementation, **settings)
    if use_scale:
        stock.scale[...] = SCALE
    flax.nnx.update(ours, flax.nnx.state(stock))  # a stock module's parameters load
    assert isinstance(ours, flax.nnx.RMSNorm)
    assert_same(ours(X.astype(x_dtype)), stock(X.astype(x_dtype)))


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("dtype, x_dtype", DTYPES)
@pytest.mark.parametrize("use_scale", [True, False])
def test_linen_equals_the_stock_module(implementation, dtype, x_dtype, use_scale):
    settings = {"epsilon": 1e-5, "dtype": dtype, "use_scale": use_scale}
    stock = flax.linen.RMSNorm(**settings)
    ours = jax_liger.linen.RMSNorm(implementation=implementation, **settings)
    x = X.astype(x_dtype)
    variables = stock.init(jax.random.key(0), x)
    if use_scale:
        variables = {"params": {"scale": SCALE}}
    saved = flax.serialization.to_bytes(variables)
    loaded = flax.serialization.from_bytes(ours.init(jax.random.key(1), x), saved)
    assert_same(ours.apply(loaded, x), stock.apply(variables, x))


def assert_same(actual, expected):
    assert actual.dtype == expected.dtype
    one_ulp = 2.0**-7 if actual.dtype == jnp.bfloat16 else 2.0**-21
    np.testing.assert_allclose(
        actual.astype(jnp.float32), expected.astype(jnp.float32), rtol=one_ulp, atol=one_ulp / 100
    )


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_nnx_gradient_of_the_scale(implementation):
    def scale_gradient(module):
        module.scale[...] = SCALE
        gradients = flax.nnx.grad(lambda m: jnp.sum(jnp.sin(m(X))))(module)
        return gradients["scale"][...]

    ours = jax_liger.nnx.RMSNorm(48, implementation=implementation, rngs=flax.nnx.Rngs(0))
    stock = flax.nnx.RMSNorm(48, rngs=flax.nnx.Rngs(0))
    np.testing.assert_allclose(scale_gradient(ours), scale_gradient(stock), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "option, message",
    [
        ({"reduction_axes": (-2, -1)}, r"reduction_axes must be -1; got \(-2, -1\)"),
        ({"feature_axes": 0}, "feature_axes must be -1; got 0"),
        ({"axis_name": "data"}, "axis_name must be None; got 'data'"),
    ],
)
def test_options_the_kernel_has_not_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        jax_liger.nnx.RMSNorm(48, rngs=flax.nnx.Rngs(0), **option)
    with pytest.raises(ValueError, match=message):
        jax_liger.linen.RMSNorm(**option).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="mask must be None"):
        jax_liger.nnx.RMSNorm(48, rngs=flax.nnx.Rngs(0))(X, mask=jnp.ones((48,), bool))
    with pytest.raises(ValueError, match="mask must be None"):
        jax_liger.linen.RMSNorm().init(jax.random.key(0), X, mask=jnp.ones((48,), bool))


def test_llama_rounding_on_request():
    x = X.astype(jnp.bfloat16)
    module = jax_liger.nnx.RMSNorm(48, casting_mode="llama", offset=0.5, rngs=flax.nnx.Rngs(0))
    expected = jax_liger.rms_norm(x, module.scale[...], casting_mode="llama", offset=0.5)
    assert jnp.array_equal(module(x), expected)
