"""What JAX users do with layer_norm: transformations, frozen inputs, 64-bit mode."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_liger
from liger_ops.layer_norm import cases, pallas_kernel
from test_layer_norm import run

NEEDS = list(itertools.product([False, True], repeat=3))[1:]


@pytest.mark.parametrize("needs", NEEDS)
def test_no_work_for_frozen_inputs_in_jax(needs, monkeypatch):
    asked = []
    backward = pallas_kernel._backward
    monkeypatch.setattr(
        pallas_kernel, "_backward", lambda s, need, *a: asked.append(need) or backward(s, need, *a)
    )
    for dim in (48, 9001):
        arrays = [
            jax.random.normal(jax.random.key(seed), shape)
            for seed, shape in enumerate(((5, dim), (dim,), (dim,)))
        ]
        argnums = tuple(i for i, needed in enumerate(needs) if needed)
        results = [
            jax.grad(
                lambda *a: jnp.sum(jax_liger.layer_norm(*a, implementation=name) ** 2),  # noqa: B023
                argnums,
            )(*arrays)
            for name in ("pallas", "xla")
        ]
        for a, e in zip(*results, strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-5, atol=5e-6 * float(jnp.abs(e).max()))
    assert asked == [needs, needs]


def test_statistics_are_kept_only_for_a_backward_in_jax():
    op = functools.partial(jax_liger.layer_norm, implementation="pallas")
    for dim in (48, 20000):
        x = jax.ShapeDtypeStruct((5, dim), jnp.bfloat16)
        assert "f32[5,2]" not in str(jax.make_jaxpr(op)(x))
        assert "f32[5,2]" in str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(op(x))))(x))


def test_jax_transformations():
    arrays = [
        jax.random.normal(jax.random.key(seed), shape)
        for seed, shape in enumerate(((3, 4, 32), (32,), (32,)))
    ]

    def results(implementation):
        op = functools.partial(jax_liger.layer_norm, implementation=implementation)
        loss = lambda *a: jnp.sum(jnp.sin(op(*a)))  # noqa: E731
        argnums = (0, 1, 2)
        grad = jax.grad(loss, argnums)
        second = lambda *a: sum(jnp.sum(g**2) for g in grad(*a))  # noqa: E731

        def scanned(xs, weight, bias):
            layer = lambda h, x: (op(h + x, weight, bias), None)  # noqa: E731
            return jnp.sum(jnp.sin(jax.lax.scan(layer, xs[0], xs)[0]))

        return [
            jax.grad(jax.jit(jax.checkpoint(loss)), argnums)(*arrays),
            jax.vmap(grad, (0, None, None))(*arrays),
            jax.vmap(op, (1, None, 0))(arrays[0], arrays[1], arrays[0][0]),
            jax.grad(second, argnums)(*arrays),
            jax.grad(lambda w, b: second(arrays[0], w, b), (0, 1))(*arrays[1:]),
            jax.grad(scanned, argnums)(*arrays),
        ]

    for a, e in zip(*map(jax.tree.leaves, (results("pallas"), results("xla"))), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "dtypes", [("bfloat16", "float32", "float16"), ("float32", "bfloat16", "bfloat16"),
               ("float16", None, "bfloat16"), ("bfloat16", "float32", None)],
)  # fmt: skip
def test_jax_cotangents_have_their_primals_dtypes(dtypes):
    arrays = [
        None if dtype is None else jnp.ones(shape, dtype)
        for dtype, shape in zip(dtypes, ((3, 8), (8,), (8,)), strict=True)
    ]
    results = []
    for implementation in ("pallas", "xla"):
        op = functools.partial(jax_liger.layer_norm, implementation=implementation)
        y, vjp = jax.vjp(op, *arrays)
        results.append([y.dtype, *(None if g is None else g.dtype for g in vjp(y))])
    assert results[0] == results[1]
    assert results[0][1:] == [None if a is None else a.dtype for a in arrays]


def test_no_64_bit_value_in_64_bit_mode():
    with jax.enable_x64(True):
        op = functools.partial(jax_liger.layer_norm, implementation="pallas", eps=1e-6)
        gradients = jax.grad(lambda *a: jnp.sum(op(*a)), (0, 1, 2))
        for dim in (48, 9001, 20000):
            shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((6, dim), (dim,), (dim,))]
            for fn in (op, gradients):
                text = str(jax.make_jaxpr(fn)(*shapes))
                assert "pallas_call" in text and ":i64[" not in text and ":f64[" not in text
        inputs = {name: np.float32(a) for name, a in cases.Case("x64", (6, 48)).draw().items()}
        actual = run("pallas", inputs, inputs["x"])
    expected = run("pallas", inputs, inputs["x"])
    for name, value in expected.items():
        assert actual[name].dtype == np.float32
        np.testing.assert_allclose(actual[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements_in_jax():
    rows, dim = 524289, 4096
    op = jax.jit(functools.partial(jax_liger.layer_norm, implementation="pallas"))
    x = jax.random.normal(jax.random.key(0), (rows, dim), jnp.bfloat16)
    weight, bias = jax.random.normal(jax.random.key(1), (2, dim), jnp.bfloat16)
    take = jax.jit(lambda a: jnp.concatenate([a[:8], a[-8:]]))
    ends = take(x)
    y, vjp = jax.vjp(op, x, weight, bias)
    y_alone, vjp_alone = jax.vjp(op, ends, weight, bias)
    assert bool((take(y) == y_alone).all())
    assert bool((take(vjp(y)[0]) == vjp_alone(y_alone)[0]).all())
