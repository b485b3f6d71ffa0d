"""What JAX users do with rms_norm_linear_rope: transformations, frozen inputs, 64-bit mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_liger
from liger_ops.rms_norm_linear_rope import pallas_kernel, rule
from liger_ops.rms_norm_linear_rope.cases import Config

HEADS = {"num_heads": 3, "num_kv_heads": 2, "head_dim": 16}
COLUMNS, D, B, T = 7 * 16, 24, 2, 5
op = functools.partial(jax_liger.rms_norm_linear_rope, **HEADS)
fused = functools.partial(op, implementation="pallas")
plain = functools.partial(op, implementation="xla")


# Compiling takes most of the time on a CPU.
OPTIONS = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
jit = functools.partial(jax.jit, compiler_options=OPTIONS)


def normal(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


NAMES = ("x", "norm_weight", "qkv_weight", "bias", "q_norm_weight", "k_norm_weight", "cos", "sin")
SHAPES = [(B, T, D), (D,), (COLUMNS, D), (COLUMNS,), (16,), (16,), (T, 12), (T, 12)]
INPUTS = tuple(normal(*shape, seed=i) for i, shape in enumerate(SHAPES))


def call(fn, *arrays):
    return fn(**dict(zip(NAMES, arrays, strict=True)))


def loss(fn, *arrays):
    q, k, v = call(fn, *arrays)
    return jnp.sum(jnp.sin(q)) + jnp.sum(jnp.cos(k)) + jnp.sum(v * v)


def assert_trees_close(actual, expected, rtol=1e-5):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol * max(float(jnp.abs(e).max()), 1e-30))


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint], ids=["jit", "remat"])
def test_gradients_under(transform):
    argnums = tuple(range(8))
    results = [
        jit(jax.grad(transform(functools.partial(loss, fn)), argnums))(*INPUTS)
        for fn in (fused, plain)
    ]
    assert_trees_close(*results)


def test_gradients_under_scan():
    def stacked(fn, x, *others):
        def layer(x, _):
            q, k, v = call(fn, x, *others)
            return x + 0.1 * sum(y.sum(2) for y in (q, k, v))[..., :1], None

        return jnp.sum(jax.lax.scan(layer, x, None, length=3)[0] ** 2)

    results = [
        jit(jax.grad(functools.partial(stacked, fn), (0, 1, 2)))(*INPUTS) for fn in (fused, plain)
    ]
    assert_trees_close(*results)


@pytest.mark.parametrize("in_axes", [
    (0, None, None, None, None, None, None, None), (None, 0, 1, 0, 0, None, 0, 0),
])  # fmt: skip
def test_vmap_and_its_gradients(in_axes):
    arrays = [
        x if axis is None else jnp.stack([x, 2 * x], axis)
        for x, axis in zip(INPUTS, in_axes, strict=True)
    ]
    results = []
    for fn in (fused, plain):
        gradient = jax.vmap(jax.value_and_grad(functools.partial(loss, fn), (0, 1, 2)), in_axes)
        results.append(jit(gradient)(*arrays))
    assert_trees_close(*results)


def test_second_derivatives():
    def penalty(fn, *arrays):
        gradients = jax.grad(functools.partial(loss, fn), (0, 1, 2, 4))(*arrays)
        return sum(jnp.sum(g**2) for g in gradients)

    argnums = (0, 1, 2, 3, 4, 6)
    results = [
        jit(jax.grad(functools.partial(penalty, fn), argnums))(*INPUTS) for fn in (fused, plain)
    ]
    assert_trees_close(*results, rtol=1e-4)


def test_forward_mode_is_refused():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(functools.partial(call, fused), INPUTS, INPUTS)


def watched(monkeypatch):
    """A list to which every backward adds the names of the gradients that it makes."""
    asked, backward = [], pallas_kernel._backward

    def watch(settings, need, given, upstream):
        asked.append({name for name, needed in zip(NAMES, need, strict=False) if needed})
        return backward(settings, need, given, upstream)

    monkeypatch.setattr(pallas_kernel, "_backward", watch)
    return asked


@pytest.mark.parametrize("argnums", [(0,), (2,), (1, 3), (6,), (0, 1, 2, 3)])
def test_no_work_for_frozen_inputs(argnums, monkeypatch):
    asked = watched(monkeypatch)
    arrays = (*INPUTS[:4], None, None, *INPUTS[6:])
    gradients = [jax.grad(functools.partial(loss, fn), argnums) for fn in (fused, plain)]
    assert_trees_close(*(jit(fn)(*arrays) for fn in gradients))
    names = {NAMES[i] for i in argnums} - {"cos", "sin"}
    assert asked == ([names] if names else [])
    if names:
        asked_of_x = bool({"x", "norm_weight"} & names)
        needs_y = "qkv_weight" in names
        # The kernel and the rotation backwards; for the weight the norm once more and a product,
        # for x a product and the norm's backward.
        text = str(jax.make_jaxpr(gradients[0])(*arrays))
        assert text.count("pallas_call[") == 2 + needs_y + asked_of_x
        assert text.count("dot_general[") == 1 + needs_y + asked_of_x


@pytest.mark.parametrize("used", [0, 2])
def test_one_result_alone(used):
    results = [
        jit(jax.grad(lambda *a: jnp.sum(jnp.sin(call(fn, *a)[used])), range(4)))(*INPUTS)  # noqa: B023
        for fn in (fused, plain)
    ]
    assert_trees_close(*results)


def test_only_the_arguments_are_kept():
    _, vjp = jax.vjp(functools.partial(call, fused), *INPUTS)
    assert sorted(leaf.shape for leaf in jax.tree.leaves(vjp)) == sorted(SHAPES)


@pytest.mark.parametrize("scales, norm_weight", [("x", True), ("weight", True), ("x", False)])
def test_x_has_one_use_where_it_is_multiplied_as_it_lies(scales, norm_weight):
    """Its squares, the only sums along rows where heads have no norms, are then added up before."""
    x, weight, *angles = (INPUTS[i] for i in (0, 2, 6, 7))
    given = (x, INPUTS[1] if norm_weight else None, weight, None, None, None, *angles)
    traced = jax.make_jaxpr(functools.partial(
        pallas_kernel.rms_norm_linear_rope, heads=pallas_kernel.Heads(*HEADS.values()),
        norm=pallas_kernel.Norm(1e-6, 0.0, "llama"), out_axis=0,
        config=Config(16, 32, 16, 4, 2, scales),
    ))(*given)  # fmt: skip

    def kernels(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                yield str(equation.params["jaxpr"])
            else:
                for value in equation.params.values():
                    inner = getattr(value, "jaxpr", value)
                    if hasattr(inner, "eqns"):
                        yield from kernels(inner)

    (kernel,) = kernels(traced.jaxpr)
    assert "dot_general" in kernel
    assert ("reduce_sum" in kernel) == (scales == "x" and norm_weight)


def test_traces_without_running():
    dtypes = [jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.float32,
              jnp.float32, jnp.bfloat16]  # fmt: skip
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in zip(SHAPES, dtypes, strict=True)]
    gradients = jax.grad(
        lambda *a: functools.partial(loss, fused)(*a).astype(jnp.float32), range(8)
    )
    out = jax.eval_shape(gradients, *shapes)
    assert [(o.shape, o.dtype) for o in out] == [(s.shape, s.dtype) for s in shapes]


def test_in_64_bit_mode_the_kernels_hold_no_64_bit_value():
    argnums = tuple(range(6))
    gradient = jax.grad(functools.partial(loss, fused), argnums)
    expected = jit(gradient)(*INPUTS)
    with jax.enable_x64(True):
        inputs = [np.float32(x) for x in INPUTS]
        text = str(jax.make_jaxpr(gradient)(*inputs))
        assert "pallas_call" in text
        assert ":i64[" not in text and ":f64[" not in text
        gradients = jit(gradient)(*inputs)
        in_float64 = [jnp.asarray(x, jnp.float64) for x in INPUTS]
        assert all(y.dtype == jnp.float64 for y in call(plain, *in_float64))
        with pytest.raises(RuntimeError, match="takes float32, bfloat16 and float16, not float64"):
            call(fused, *in_float64)
    assert_trees_close(gradients, expected)


def test_the_precision_of_float32_is_that_of_the_library(monkeypatch):
    seen, run = [], pallas_kernel._run

    def watch(settings, *arrays):
        seen.append(settings.full_precision)
        return run(settings, *arrays)

    monkeypatch.setattr(pallas_kernel, "_run", watch)
    x = INPUTS[0][:, :3]  # of a shape that no other test has traced
    arrays = (x, *INPUTS[1:6], *(a[:3] for a in INPUTS[6:]))
    for precision, full in (("highest", True), ("default", False)):
        with jax.default_matmul_precision(precision):
            text = str(jax.make_jaxpr(functools.partial(call, fused))(*arrays))
        assert seen[-1] == full and ("HIGHEST" in text) == full


def test_the_rule_decides_where_nothing_is_asked_for(monkeypatch):
    ran, config = [], Config(16, 32, 16, 4, 2)
    for name in ("rms_norm_linear_rope", "composed"):
        original = getattr(pallas_kernel, name)
        monkeypatch.setattr(pallas_kernel, name, lambda *a, n=name, o=original, **k: (
            ran.append((n, k.get("config"))) or o(*a, **k)))  # fmt: skip
    expected, asked = call(plain, *INPUTS), []
    for choice, name in ((rule.Choice(True, config), "rms_norm_linear_rope"),
                         (rule.Choice(False), "composed")):  # fmt: skip
        monkeypatch.setattr(rule, "choose", lambda *a, c=choice, **k: asked.append((a, k)) or c)
        assert_trees_close(call(op, *INPUTS), expected)
        assert ran[-1] == (name, choice.config)
    assert asked[0][0][1:] == ("pallas", B * T, D, tuple(HEADS.values()))
    assert asked[0][1] == {"dtype": "float32", "as_measured": False, "trained": None}
    whole = (*INPUTS[:4], None, None, *(normal(T, 16, seed=seed) for seed in (6, 7)))
    for weight, out_axis in ((INPUTS[2], 0), (INPUTS[2].T, 1)):
        call(functools.partial(op, out_axis=out_axis), *whole[:2], weight, *whole[3:])
        assert asked[-1][1]["as_measured"] == (out_axis == 0)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    rows, dim = 2**20 + 5, 2048
    x = normal(1, rows, dim, dtype=jnp.bfloat16)
    weight = normal(34 * 64, dim, seed=1, dtype=jnp.bfloat16) * dim**-0.5
    angles = [normal(rows, 64, seed=seed, dtype=jnp.bfloat16) for seed in (2, 3)]
    fn = jit(functools.partial(
        jax_liger.rms_norm_linear_rope, num_heads=32, num_kv_heads=1, head_dim=64,
        implementation="pallas",
    ))  # fmt: skip
    whole = fn(x, None, weight, *angles)
    for first in (0, rows - 300):
        part = slice(first, first + 300)
        alone = fn(x[:, part], None, weight, *(a[part] for a in angles))
        for w, a in zip(whole, alone, strict=True):
            error = jnp.abs(w[:, part].astype(jnp.float32) - a.astype(jnp.float32)).max()
            assert error < 0.05
