"""What JAX users do with rms_norm: transformations, frozen inputs, 64-bit mode."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import SymbolicZero

import jax_liger
from liger_ops import backend_pallas, choosing
from liger_ops.rms_norm import pallas_kernel

norm = functools.partial(jax_liger.rms_norm, implementation="pallas")
plain = functools.partial(jax_liger.rms_norm, implementation="xla")
fused = functools.partial(jax_liger.fused_add_rms_norm, implementation="pallas")


def normal(*shape, dtype=jnp.float32, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def loss(fn, x, weight):
    return jnp.sum(jnp.sin(fn(x, weight)))


def assert_trees_close(actual, expected, rtol=2e-6):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol * max(float(jnp.abs(e).max()), 1e-30))


X, WEIGHT = normal(6, 40), normal(40, seed=1)


@pytest.mark.parametrize(
    "transform", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "remat"]
)
def test_gradients_under(transform):
    gradients = [
        jax.grad(transform(functools.partial(loss, fn)), (0, 1))(X, WEIGHT) for fn in (norm, plain)
    ]
    assert_trees_close(*gradients)


def test_gradients_under_scan():
    def stacked(fn, x, weights):
        return jnp.sum(jax.lax.scan(lambda h, w: (h + fn(h, w), None), x, weights)[0] ** 2)

    weights = normal(3, 40, seed=2)
    gradients = [
        jax.grad(functools.partial(stacked, fn), (0, 1))(X, weights) for fn in (norm, plain)
    ]
    assert_trees_close(*gradients, rtol=1e-5)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0), (1, 0)])
def test_vmap_and_its_gradients(in_axes):
    x = normal(3, 4, 40) if in_axes[0] != 1 else normal(4, 3, 40)
    x = x if in_axes[0] is not None else x[0]
    weight = normal(3, 40, seed=1) if in_axes[1] is not None else WEIGHT

    def total(fn, x, weight):
        return jnp.sum(jnp.sin(jax.vmap(fn, in_axes)(x, weight)))

    results = [
        jax.value_and_grad(functools.partial(total, fn), (0, 1))(x, weight) for fn in (norm, plain)
    ]
    assert_trees_close(*results, rtol=5e-6)


def test_vmap_of_grad():
    x = normal(3, 4, 40)
    results = [
        jax.vmap(jax.grad(functools.partial(loss, fn), (0, 1)), (0, None))(x, WEIGHT)
        for fn in (norm, plain)
    ]
    assert_trees_close(*results)


def test_traces_without_running():
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((13, 19), (19,))]
    out = jax.eval_shape(
        jax.grad(lambda x, w: loss(norm, x, w).astype(jnp.float32), (0, 1)), *shapes
    )
    assert [(o.shape, o.dtype) for o in out] == [(s.shape, s.dtype) for s in shapes]
    text = str(jax.make_jaxpr(functools.partial(loss, norm))(X, WEIGHT))
    assert "custom_vjp_call" in text


def test_forward_mode_is_refused():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(norm, (X, WEIGHT), (X, WEIGHT))


def test_second_derivatives():
    def penalty(fn, x, weight):
        dx, dweight = jax.grad(functools.partial(loss, fn), (0, 1))(x, weight)
        return jnp.sum(dx**2) + jnp.sum(dweight**2)

    results = [jax.grad(functools.partial(penalty, fn), (0, 1))(X, WEIGHT) for fn in (norm, plain)]
    assert_trees_close(*results, rtol=1e-5)


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_no_work_for_frozen_inputs(argnums, wrap, monkeypatch):
    asked = []
    backward = pallas_kernel._backward
    monkeypatch.setattr(
        pallas_kernel, "_backward", lambda s, need, *a: asked.append(need) or backward(s, need, *a)
    )
    jax.grad(wrap(functools.partial(loss, norm)), argnums)(X, WEIGHT)
    assert asked == [(argnums != 1, argnums != 0)]


@pytest.mark.parametrize("used", ["normed", "residual", "both"])
def test_fused_add_gradients_of_one_output_or_both(used):
    def total(implementation, x, residual, weight):
        y, h = jax_liger.fused_add_rms_norm(x, residual, weight, implementation=implementation)
        return jnp.sum({"normed": jnp.sin(y), "residual": jnp.cos(h), "both": jnp.sin(y) + h}[used])

    inputs = (X, normal(6, 40, seed=3), WEIGHT)
    results = [
        jax.grad(functools.partial(total, implementation), (0, 1, 2))(*inputs)
        for implementation in ("pallas", "xla")
    ]
    assert_trees_close(*results, rtol=5e-6)


def test_an_unused_output_reaches_the_backward_as_nothing(monkeypatch):
    seen = []
    backward = pallas_kernel._backward
    monkeypatch.setattr(
        pallas_kernel, "_backward", lambda s, n, *a: seen.append(a[-1]) or backward(s, n, *a)
    )
    jax.grad(lambda x: jnp.sum(fused(x, X, WEIGHT)[0]))(X)
    assert seen == [None]
    assert not isinstance(seen[0], SymbolicZero)


@pytest.mark.parametrize("x_dtype, weight_dtype", [("bfloat16", "float32"), ("float32", "bfloat16"),
                                                   ("float16", "bfloat16")])  # fmt: skip
@pytest.mark.parametrize("casting_mode", ["llama", "gemma", "none"])
def test_cotangents_have_their_primals_dtypes(x_dtype, weight_dtype, casting_mode):
    x, weight = X.astype(x_dtype), WEIGHT.astype(weight_dtype)

    def dtypes(fn):
        y, vjp = jax.vjp(functools.partial(fn, casting_mode=casting_mode), x, weight)
        return [y.dtype, *(g.dtype for g in vjp(y))]

    assert dtypes(norm) == dtypes(plain)
    assert dtypes(norm)[1:] == [x.dtype, weight.dtype]


def test_in_64_bit_mode_the_kernels_hold_no_64_bit_value():
    with jax.enable_x64(True):
        x, weight = np.float32(X), np.float32(WEIGHT)
        y = norm(x, weight, eps=1e-6)
        assert y.dtype == jnp.float32
        gradients = jax.grad(lambda x, w: jnp.sum(jnp.sin(norm(x, w))), (0, 1))(x, weight)
        for dim in (48, 20000):
            for fn in (norm, jax.grad(lambda x, w: jnp.sum(norm(x, w)), (0, 1))):
                shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((6, dim), (dim,))]
                text = str(jax.make_jaxpr(fn)(*shapes))
                assert "pallas_call" in text
                assert ":i64[" not in text and ":f64[" not in text
    assert_trees_close(y, norm(X, WEIGHT), rtol=1e-6)
    expected = jax.grad(lambda x, w: jnp.sum(jnp.sin(norm(x, w))), (0, 1))(X, WEIGHT)
    assert_trees_close(gradients, expected, rtol=1e-6)


def test_float64_runs_in_xla_and_not_by_name():
    with jax.enable_x64(True):
        x = jnp.ones((3, 8), jnp.float64)
        assert jax_liger.rms_norm(x).dtype == jnp.float64
        with pytest.raises(RuntimeError, match="takes float32, bfloat16 and float16, not float64"):
            norm(x)


def test_a_fallback_on_a_gpu_is_logged_once_with_its_reason(monkeypatch, caplog):
    monkeypatch.setattr(backend_pallas, "_platform", lambda: "gpu")
    choosing._log_once.cache_clear()
    with jax.enable_x64(True), caplog.at_level(logging.WARNING, "liger_ops"):
        for _ in range(3):
            jax_liger.rms_norm(jnp.ones((3, 8), jnp.float64))
    assert [record.message for record in caplog.records] == [
        "rms_norm: using the xla version on a GPU: the kernel takes float32, bfloat16 and float16, "
        "not float64"
    ]


def test_off_a_gpu_the_kernel_runs_by_name_only_in_interpret_mode(monkeypatch):
    monkeypatch.delenv("PALLAS_INTERPRET", raising=False)
    monkeypatch.setattr(backend_pallas, "_platform", lambda: "cpu")
    assert jax_liger.rms_norm(X).shape == X.shape
    with pytest.raises(
        RuntimeError, match=r"rms_norm: .* is a cpu, and PALLAS_INTERPRET=1 was not"
    ):
        norm(X)


@pytest.mark.parametrize("version", [(0, 9, 2), (0, 13, 0)])
def test_an_unsupported_jax_is_named(version, monkeypatch):
    monkeypatch.setattr(backend_pallas, "JAX_VERSION", version)
    assert jax_liger.rms_norm(X).shape == X.shape
    with pytest.raises(RuntimeError, match=r"outside the supported >= 0\.10\.2, < 0\.13"):
        norm(X)


def test_a_jax_without_the_triton_backend_is_named(monkeypatch):
    monkeypatch.setattr(backend_pallas, "plgpu", None)
    assert jax_liger.rms_norm(X).shape == X.shape
    with pytest.raises(RuntimeError, match="has no Pallas Triton backend"):
        norm(X)
