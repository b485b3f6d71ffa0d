"""What JAX users do with rope: transformations, frozen inputs, 64-bit mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_liger
from liger_ops.rope import pallas_kernel

rope = functools.partial(jax_liger.rope, implementation="pallas")
plain = functools.partial(jax_liger.rope, implementation="xla")


def normal(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


Q, K = normal(2, 3, 4, 8), normal(2, 3, 2, 8, seed=1)
COS, SIN = normal(3, 6, seed=2), normal(3, 6, seed=3)
INPUTS = (Q, K, COS, SIN)


def loss(fn, q, k, cos, sin):
    a, b = fn(q, k, cos, sin)
    return jnp.sum(jnp.sin(a)) + jnp.sum(jnp.cos(b))


def assert_trees_close(actual, expected, rtol=2e-6):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol * max(float(jnp.abs(e).max()), 1e-30))


@pytest.mark.parametrize(
    "transform", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "remat"]
)
@pytest.mark.parametrize("argnums", [(0, 1), (0, 1, 2, 3)])
def test_gradients_under(transform, argnums):
    results = [
        jax.grad(transform(functools.partial(loss, fn)), argnums)(*INPUTS) for fn in (rope, plain)
    ]
    assert_trees_close(*results, rtol=5e-6)


def test_gradients_under_scan():
    def stacked(fn, q, k, cos, sin):
        def layer(carry, _):
            q, k = carry
            a, b = fn(q, k, cos, sin)
            return (a + jnp.sin(q), b + jnp.sin(k)), None

        q, k = jax.lax.scan(layer, (q, k), None, length=3)[0]
        return jnp.sum(q**2) + jnp.sum(k**2)

    results = [jax.grad(functools.partial(stacked, fn), (0, 1))(*INPUTS) for fn in (rope, plain)]
    assert_trees_close(*results, rtol=1e-5)


@pytest.mark.parametrize("in_axes", [(0, 0, None, None), (0, 0, 0, 0), (None, 2, 1, None)])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_vmap_and_its_gradients(in_axes, layout):
    arrays = [
        x if axis is None else jnp.stack([x, 2 * x], axis)
        for x, axis in zip(INPUTS, in_axes, strict=True)
    ]

    def total(fn, *arrays):
        a, b = jax.vmap(functools.partial(fn, layout=layout), in_axes)(*arrays)
        return jnp.sum(jnp.sin(a)) + jnp.sum(jnp.cos(b))

    results = [
        jax.value_and_grad(functools.partial(total, fn), (0, 1))(*arrays) for fn in (rope, plain)
    ]
    assert_trees_close(*results, rtol=5e-6)


def test_vmap_of_grad():
    stacked = jnp.stack([Q, 2 * Q])
    results = [
        jax.vmap(jax.grad(functools.partial(loss, fn), (0, 1)), (0, None, None, None))(
            stacked, *INPUTS[1:]
        )
        for fn in (rope, plain)
    ]
    assert_trees_close(*results)


@pytest.mark.parametrize("argnums", [(0, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_second_derivatives(argnums, layout):
    def penalty(fn, *inputs):
        gradients = jax.grad(
            functools.partial(loss, functools.partial(fn, layout=layout)), argnums
        )(*inputs)
        return sum(jnp.sum(g**3) for g in gradients)

    results = [jax.grad(functools.partial(penalty, fn), argnums)(*INPUTS) for fn in (rope, plain)]
    assert_trees_close(*results, rtol=1e-5)


def test_forward_mode_is_refused():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(rope, INPUTS, INPUTS)


@pytest.mark.parametrize("argnums", [(0,), (1,), (0, 1), (2,), (0, 3)])
@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "remat"]
)
def test_no_work_for_frozen_inputs(argnums, wrap, monkeypatch):
    asked = watched_backward(monkeypatch)
    results = [
        jax.grad(wrap(functools.partial(loss, fn)), argnums)(*INPUTS) for fn in (rope, plain)
    ]
    assert_trees_close(*results, rtol=5e-6)
    needs = (0 in argnums, 1 in argnums)
    assert asked == ([needs] if any(needs) else [])


@pytest.mark.parametrize("used", [0, 1])
def test_an_unused_result_reaches_the_backward_as_nothing(used, monkeypatch):
    asked = watched_backward(monkeypatch)
    results = [
        jax.grad(lambda *a: jnp.sum(jnp.sin(fn(*a)[used])), (0, 1, 2, 3))(*INPUTS)  # noqa: B023
        for fn in (rope, plain)
    ]
    assert_trees_close(*results, rtol=5e-6)
    assert asked == [(used == 0, used == 1)]


def watched_backward(monkeypatch):
    """A list to which every backward adds whether it rotates for q and for k."""
    asked = []
    backward = pallas_kernel._backward

    def watch(settings, dq, dk, cos, sin):
        asked.append((dq is not None, dk is not None))
        return backward(settings, dq, dk, cos, sin)

    monkeypatch.setattr(pallas_kernel, "_backward", watch)
    return asked


def test_only_the_angles_are_kept():
    _, vjp = jax.vjp(lambda q, k: rope(q, k, COS, SIN), Q, K)
    assert sorted(leaf.shape for leaf in jax.tree.leaves(vjp)) == [COS.shape, SIN.shape]


def test_traces_without_running():
    shapes = [
        jax.ShapeDtypeStruct(s, d)
        for s, d in (
            ((2, 13, 7, 10), jnp.bfloat16), ((2, 13, 3, 10), jnp.float32),
            ((1, 13, 6), jnp.float32), ((1, 13, 6), jnp.bfloat16),
        )
    ]  # fmt: skip
    gradients = jax.grad(
        lambda *a: functools.partial(loss, rope)(*a).astype(jnp.float32), (0, 1, 2, 3)
    )
    out = jax.eval_shape(gradients, *shapes)
    assert [(o.shape, o.dtype) for o in out] == [(s.shape, s.dtype) for s in shapes]


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_in_64_bit_mode_the_kernel_holds_no_64_bit_value(layout):
    fn = functools.partial(rope, layout=layout)
    expected = jax.grad(functools.partial(loss, fn), (0, 1))(*INPUTS)
    with jax.enable_x64(True):
        inputs = [np.float32(x) for x in INPUTS]
        gradients = jax.grad(functools.partial(loss, fn), (0, 1))(*inputs)
        text = str(jax.make_jaxpr(jax.grad(functools.partial(loss, fn), (0, 1)))(*inputs))
        assert "pallas_call" in text
        assert ":i64[" not in text and ":f64[" not in text
        in_float64 = [jnp.asarray(x, jnp.float64) for x in INPUTS]
        assert all(y.dtype == jnp.float64 for y in jax_liger.rope(*in_float64))
        with pytest.raises(RuntimeError, match="takes float32, bfloat16 and float16, not float64"):
            rope(*in_float64)
    assert_trees_close(gradients, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_more_than_two_to_the_31_elements(layout):
    time, heads, size = 2**18 + 5, 64, 128
    q, k = normal(1, time, heads, size, dtype=jnp.bfloat16), normal(1, time, 1, size, seed=1)
    angles = normal(time, size, seed=2), normal(time, size, seed=3)
    fn = jax.jit(functools.partial(rope, layout=layout))
    take = jax.jit(
        lambda x, axis: jnp.concatenate(
            [
                jax.lax.slice_in_dim(x, 0, 8, axis=axis),
                jax.lax.slice_in_dim(x, time - 8, time, axis=axis),
            ],
            axis,
        ),
        static_argnums=1,
    )
    alone = fn(take(q, 1), take(k, 1), *(take(a, 0) for a in angles))
    outputs, vjp = jax.vjp(lambda q, k: fn(q, k, *angles), q, k)
    for y, e in zip(outputs, alone, strict=True):
        assert bool((take(y, 1) == e).all())
    _, vjp_alone = jax.vjp(
        lambda q, k: fn(q, k, *(take(a, 0) for a in angles)), take(q, 1), take(k, 1)
    )
    for g, e in zip(vjp(outputs), vjp_alone(alone), strict=True):
        assert bool((take(g, 1) == e).all())
