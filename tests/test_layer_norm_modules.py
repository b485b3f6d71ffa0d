"""LayerNorm's modules are drop-ins for torch.nn's and Flax's: parameters, results, options."""

import itertools

import flax.linen
import flax.nnx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_liger.linen
import jax_liger.nnx
from test_layer_norm_torch import DEVICE, assert_close, randn
from torch_liger.nn import LigerLayerNorm


@pytest.mark.parametrize("implementation", ["triton", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_the_module_equals_torchs(bias, dtype, implementation):
    settings = {"device": DEVICE, "dtype": dtype}
    stock = torch.nn.LayerNorm(48, eps=1e-4, bias=bias, **settings)
    for seed, parameter in enumerate(stock.parameters()):
        parameter.data = randn(48, seed=seed + 5, dtype=dtype)
    ours = LigerLayerNorm(48, 1e-4, bias, implementation=implementation, **settings)
    ours.load_state_dict(stock.state_dict())
    results = []
    for module in (ours, stock):
        x = randn(2, 5, 48, dtype=dtype).requires_grad_()
        y = module(x)
        y.backward(randn(2, 5, 48, seed=9, dtype=dtype))
        results.append([y, x.grad, *(p.grad for p in module.parameters())])
    assert [t.dtype for t in results[0]] == [dtype] * (4 if bias else 3)
    assert_close(*results, rtol=5e-6 if dtype == torch.float32 else 2.0**-6)


def test_the_module_is_a_stand_in():
    module = LigerLayerNorm(64)
    assert list(module.state_dict()) == ["weight"] and module.bias is None
    assert (module.weight == 1).all() and module.variance_epsilon == 1e-6
    assert repr(module) == "LigerLayerNorm((64,), eps=1e-06, bias=False)"
    module = LigerLayerNorm(64, 1e-5, True, "zeros")  # as Liger-Kernel's is called
    assert list(module.state_dict()) == ["weight", "bias"]
    assert not module.weight.any() and not module.bias.any()
    with pytest.raises(ValueError, match="init_fn must be one of 'ones', 'zeros'; got 'one'"):
        LigerLayerNorm(64, init_fn="one")


X = jax.random.normal(jax.random.key(0), (4, 6, 48))
SCALE, BIAS = 1 + 0.3 * jax.random.normal(jax.random.key(1), (2, 48))


def assert_same(actual, expected):
    assert actual.dtype == expected.dtype
    one_ulp = 2.0**-7 if actual.dtype == jnp.bfloat16 else 2.0**-20
    np.testing.assert_allclose(
        actual.astype(jnp.float32), expected.astype(jnp.float32), rtol=one_ulp, atol=one_ulp
    )


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("dtype, x_dtype, param_dtype", [
    (None, "float32", "float32"), (None, "bfloat16", "float32"), (None, "bfloat16", "bfloat16"),
    ("bfloat16", "float32", "float32"), ("bfloat16", "bfloat16", "float32"),
    ("float32", "bfloat16", "bfloat16"),
])  # fmt: skip
def test_flax_modules_equal_the_stock_ones(implementation, dtype, x_dtype, param_dtype):
    x = X.astype(x_dtype)
    for use_scale, use_bias in itertools.product((True, False), repeat=2):
        settings = {
            "epsilon": 1e-4, "dtype": dtype, "param_dtype": param_dtype,
            "use_scale": use_scale, "use_bias": use_bias,
        }  # fmt: skip
        stock = flax.nnx.LayerNorm(48, **settings, rngs=flax.nnx.Rngs(0))
        ours = jax_liger.nnx.LayerNorm(
            48, implementation=implementation, **settings, rngs=flax.nnx.Rngs(0)
        )
        params = {}
        if use_scale:
            params["scale"] = SCALE.astype(param_dtype)
            stock.scale[...] = params["scale"]
        if use_bias:
            params["bias"] = BIAS.astype(param_dtype)
            stock.bias[...] = params["bias"]
        flax.nnx.update(ours, flax.nnx.state(stock))  # a stock module's parameters load
        assert isinstance(ours, flax.nnx.LayerNorm)
        assert_same(ours(x), stock(x))

        stock = flax.linen.LayerNorm(**settings)
        ours = jax_liger.linen.LayerNorm(implementation=implementation, **settings)
        variables = {"params": params} if params else {}
        loaded = flax.serialization.from_bytes(
            ours.init(jax.random.key(1), x), flax.serialization.to_bytes(variables)
        )
        assert_same(ours.apply(loaded, x), stock.apply(variables, x))


def test_flax_gradients_of_the_parameters():
    def gradients(module):
        module.scale[...], module.bias[...] = SCALE, BIAS
        return flax.nnx.grad(lambda m: jnp.sum(jnp.sin(m(X))))(module)

    ours = gradients(jax_liger.nnx.LayerNorm(48, implementation="pallas", rngs=flax.nnx.Rngs(0)))
    stock = gradients(flax.nnx.LayerNorm(48, rngs=flax.nnx.Rngs(0)))
    for name in ("scale", "bias"):
        np.testing.assert_allclose(ours[name][...], stock[name][...], rtol=1e-4, atol=1e-4)


def test_linen_rounds_once_to_a_narrow_dtype_from_wide_parameters():
    x = X.astype(jnp.bfloat16)
    module = jax_liger.linen.LayerNorm(dtype=jnp.bfloat16, implementation="pallas")
    variables = {"params": {"scale": SCALE, "bias": BIAS}}
    assert module.apply(variables, x).dtype == jnp.bfloat16
    # No float32 array is written for the result to be cast from.
    text = str(jax.make_jaxpr(module.apply)(variables, x))
    assert "pallas_call" in text and "f32[24,48]" not in text and "f32[4,6,48]" not in text


@pytest.mark.parametrize(
    "option, message",
    [
        ({"reduction_axes": (-2, -1)}, r"reduction_axes must be -1; got \(-2, -1\)"),
        ({"feature_axes": 0}, "feature_axes must be -1; got 0"),
        ({"axis_name": "data"}, "axis_name must be None; got 'data'"),
    ],
)
def test_flax_options_the_kernel_has_not_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        jax_liger.nnx.LayerNorm(48, rngs=flax.nnx.Rngs(0), **option)
    with pytest.raises(ValueError, match=message):
        jax_liger.linen.LayerNorm(**option).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=r"mask must be None; got an array of shape \(48,\)"):
        jax_liger.nnx.LayerNorm(48, rngs=flax.nnx.Rngs(0))(X, mask=jnp.ones((48,), bool))
    with pytest.raises(ValueError, match=r"mask must be None; got an array of shape \(48,\)"):
        jax_liger.linen.LayerNorm().init(jax.random.key(0), X, mask=jnp.ones((48,), bool))
