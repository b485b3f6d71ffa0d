"""The Flax modules are drop-ins for the stock ones: parameters, results, refused options."""

import itertools

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


DTYPE_NAMES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("dtype", [None, *DTYPE_NAMES])
def test_linen_equals_the_stock_module_in_all_dtypes(implementation, dtype):
    for x_dtype, param_dtype in itertools.product(DTYPE_NAMES, (None, *DTYPE_NAMES)):
        settings = {"epsilon": 1e-5, "dtype": dtype, "use_scale": param_dtype is not None}
        x, variables = X.astype(x_dtype), {}
        if param_dtype is not None:
            settings["param_dtype"] = param_dtype
            variables = {"params": {"scale": SCALE.astype(param_dtype)}}
        ours = jax_liger.linen.RMSNorm(implementation=implementation, **settings)
        # In float32 throughout, and then rounded: what either module's one rounding is to give.
        expected = flax.linen.RMSNorm(**{**settings, "dtype": "float32"}).apply(variables, x)
        stock = flax.linen.RMSNorm(**settings).apply(variables, x)
        assert_same(ours.apply(variables, x), stock)
        assert_same(ours.apply(variables, x), expected.astype(stock.dtype))


def assert_same(actual, expected):
    assert actual.dtype == expected.dtype
    one_ulp = max(jnp.finfo(actual.dtype).eps.astype(float), 2.0**-21)
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


# A feed-forward layer of ours and the activation of the plain composition.
MLPS = {
    "swiglu": ("SwiGLUMLP", {}, jax.nn.silu),
    "geglu": ("GeGLUMLP", {}, lambda g: jax.nn.gelu(g, approximate=True)),
    "geglu-exact": (
        "GeGLUMLP", {"approximate": "none"}, lambda g: jax.nn.gelu(g, approximate=False)
    ),
}  # fmt: skip


class PlainMLP(flax.nnx.Module):
    """The composition as models write it, activated in float32 and rounded once."""

    def __init__(self, hidden_size, intermediate_size, activation, **settings):
        self.gate_proj = flax.nnx.Linear(hidden_size, intermediate_size, **settings)
        self.up_proj = flax.nnx.Linear(hidden_size, intermediate_size, **settings)
        self.down_proj = flax.nnx.Linear(intermediate_size, hidden_size, **settings)
        self.activation = activation

    def __call__(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        activated = self.activation(gate.astype(jnp.float32)).astype(gate.dtype)
        return self.down_proj(activated * up)


def both_mlps(name, implementation=None, **settings):
    """Ours and the plain one, with the same random parameters."""
    class_name, own, activation = MLPS[name]
    settings = {
        "rngs": flax.nnx.Rngs(0),
        "bias_init": flax.nnx.initializers.normal(1.0),
        **settings,
    }
    plain = PlainMLP(48, 80, activation, **{"use_bias": False, **settings})
    ours = getattr(jax_liger.nnx, class_name)(
        48, 80, implementation=implementation, **own, **settings
    )
    flax.nnx.update(ours, flax.nnx.state(plain, flax.nnx.Param))
    return ours, plain


@pytest.fixture(autouse=True)
def no_tf32():
    """Where an input differs in its last bit, TF32 may round it to another number."""
    with jax.default_matmul_precision("highest"):
        yield


def assert_close(actual, expected):
    """To a few roundings of the largest: what is summed has been rounded before."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    rounding = 2.0**-8 if expected.dtype == jnp.bfloat16 else 2.0**-20
    actual, expected = actual.astype(jnp.float32), expected.astype(jnp.float32)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2 * rounding * abs(expected).max())


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("name", MLPS)
def test_mlp_equals_the_plain_composition(name, use_bias, implementation):
    ours, plain = both_mlps(name, implementation, use_bias=use_bias)
    assert_close(ours(X), plain(X))

    def gradients(module):
        of_module, of_x = flax.nnx.grad(lambda m, x: jnp.sum(jnp.sin(m(x))), argnums=(0, 1))(
            module, X
        )
        return {**flax.nnx.to_pure_dict(of_module), "x": of_x}

    actual, expected = gradients(ours), gradients(plain)
    names = {"kernel", "bias"} if use_bias else {"kernel"}
    assert all(expected[layer].keys() == names for layer in ("gate_proj", "up_proj", "down_proj"))
    jax.tree.map(assert_close, actual, expected)  # raises where the names differ

    # The same parameters, as they are, are linen's.
    class_name, own, _ = MLPS[name]
    module = getattr(jax_liger.linen, class_name)(
        80, use_bias=use_bias, implementation=implementation, **own
    )
    params = flax.nnx.to_pure_dict(flax.nnx.state(plain, flax.nnx.Param))
    fresh = module.init(jax.random.key(0), X)["params"]
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, params)
    assert_close(module.apply({"params": params}, X), plain(X))


@pytest.mark.parametrize("dtype, x_dtype", DTYPES)
@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_mlp_dtypes(name, dtype, x_dtype):
    settings = {"dtype": dtype, "param_dtype": jnp.bfloat16}
    ours, plain = both_mlps(name, "pallas", **settings)
    assert ours.gate_proj.kernel.dtype == ours.down_proj.kernel.dtype == jnp.bfloat16
    x = X.astype(x_dtype)
    assert_close(ours(x), plain(x))
    module = getattr(jax_liger.linen, MLPS[name][0])(80, implementation="pallas", **settings)
    params = flax.nnx.to_pure_dict(flax.nnx.state(plain, flax.nnx.Param))
    fresh = module.init(jax.random.key(0), x)["params"]
    assert jax.tree.map(lambda a: a.dtype, fresh) == jax.tree.map(lambda a: a.dtype, params)
    assert_close(module.apply({"params": params}, x), plain(x))


def test_mlp_initialisers_reach_all_layers():
    constant = flax.nnx.initializers.constant(0.5)
    mlp = jax_liger.nnx.SwiGLUMLP(48, 80, kernel_init=constant, rngs=flax.nnx.Rngs(0))
    variables = jax_liger.linen.SwiGLUMLP(80, kernel_init=constant).init(jax.random.key(0), X)
    for layer in ("gate_proj", "up_proj", "down_proj"):
        assert jnp.all(getattr(mlp, layer).kernel[...] == 0.5)
        assert jnp.all(variables["params"][layer]["kernel"] == 0.5)
    drawn = jax_liger.nnx.GeGLUMLP(48, 80, rngs=flax.nnx.Rngs(0))
    assert not jnp.array_equal(drawn.gate_proj.kernel[...], drawn.up_proj.kernel[...])


@pytest.mark.parametrize("layer", ["gate_proj", "up_proj", "down_proj"])
def test_mlp_calls_what_stands_in_for_a_layer(layer):
    ours, plain = both_mlps("swiglu", "pallas")
    before = ours(X)
    for mlp in (ours, plain):
        base = getattr(mlp, layer)
        adapted = flax.nnx.LoRALinear(
            base.in_features,
            base.out_features,
            use_bias=False,
            lora_rank=2,
            b_initializer=flax.nnx.initializers.normal(1.0),
            rngs=flax.nnx.Rngs(3),
        )
        adapted.kernel[...] = base.kernel[...]
        setattr(mlp, layer, adapted)
    assert_close(ours(X), plain(X))
    assert abs(ours(X) - before).max() > 0.1 * abs(before).max()
    wanted = flax.nnx.DiffState(0, flax.nnx.LoRAParam)
    gradient = flax.nnx.grad(lambda m: jnp.sum(jnp.sin(m(X))), argnums=wanted)(ours)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(gradient[layer]))
    assert len(jax.tree.leaves(gradient)) == 2


def test_linen_mlp_calls_its_layers():
    """linen's way of changing a layer: interceptors see each of them."""
    module = jax_liger.linen.SwiGLUMLP(80)
    variables = module.init(jax.random.key(0), X)
    seen = []

    def doubled(call, args, kwargs, context):
        seen.append(context.module.name)
        y = call(*args, **kwargs)
        return 2.0 * y if context.module.name == "up_proj" else y

    with flax.linen.intercept_methods(doubled):
        y = module.apply(variables, X)
    assert {"gate_proj", "up_proj", "down_proj"} <= set(seen)
    assert_close(y, 2.0 * module.apply(variables, X))


def test_geglu_mlp_refuses_another_approximation():
    message = "approximate must be one of 'tanh', 'none'; got 'sigmoid'"
    with pytest.raises(ValueError, match=message):
        jax_liger.nnx.GeGLUMLP(48, 80, approximate="sigmoid", rngs=flax.nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        jax_liger.linen.GeGLUMLP(80, approximate="sigmoid").init(jax.random.key(0), X)
