"""Run by test_sharding.py in a process of its own, since the number of devices is fixed at start.

Prints one line a check: its name, then "ok" or what went wrong.
"""

import functools
import os
import sys
import traceback

DEVICES = int(sys.argv[1])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PALLAS_INTERPRET"] = "1"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_liger  # noqa: E402

X = jax.random.normal(jax.random.key(0), (8, 6, 40))
WEIGHT = jax.random.normal(jax.random.key(1), (40,))
SPECS = [P("data", None, None), P(None, "data", None), P(None, None, "data")]


def loss(implementation, x, weight):
    y, h = jax_liger.fused_add_rms_norm(x, x, weight, implementation=implementation)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(h))


def gradients(implementation):
    return jax.value_and_grad(functools.partial(loss, implementation), (0, 1))


EXPECTED = gradients("xla")(X, WEIGHT)


def mesh(kind):
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(kind,))


def assert_expected(actual):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(EXPECTED), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=1e-5, atol=1e-5)


def jit_with_sharded_rows():
    auto = mesh(AxisType.Auto)
    x = jax.device_put(X, NamedSharding(auto, SPECS[0]))
    fn = jax.jit(gradients("pallas"))
    text = fn.lower(x, WEIGHT).compile().as_text()
    # The losses and the weight's gradient are summed over devices; x is gathered nowhere.
    assert "all-gather" not in text, text
    assert "all-reduce" in text
    assert_expected(fn(x, WEIGHT))


def jit_with_sharded_time_or_columns():
    auto = mesh(AxisType.Auto)
    for spec in SPECS[1:]:
        if X.shape[spec.index("data")] % DEVICES == 0:
            x = jax.device_put(X, NamedSharding(auto, spec))
            assert_expected(jax.jit(gradients("pallas"))(x, WEIGHT))


def jit_on_one_of_many_devices():
    assert_expected(jax.jit(gradients("pallas"))(X, WEIGHT))
    assert_expected(gradients("pallas")(X, WEIGHT))


def explicit_sharding():
    explicit = mesh(AxisType.Explicit)
    with jax.set_mesh(explicit):
        x = jax.device_put(X, NamedSharding(explicit, SPECS[0]))
        fn = jax.jit(gradients("pallas"))
        assert "all-gather" not in fn.lower(x, WEIGHT).compile().as_text()
        assert_expected(fn(x, WEIGHT))
        assert jax.typeof(fn(x, WEIGHT)[1][0]).sharding.spec == SPECS[0]


# Interpret mode cannot run under check_vma=True; tests/test_lowering.py lowers that for a GPU.
def gradients_of_shard_map():
    def per_device(x, weight):
        return jax.lax.psum(loss("pallas", x, weight), "data")

    fn = jax.shard_map(
        per_device, mesh=mesh(AxisType.Auto), in_specs=(SPECS[0], P()), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    assert_expected(jax.jit(jax.value_and_grad(fn, (0, 1)))(X, WEIGHT))


def gradients_inside_shard_map():
    def per_device(x, weight):
        value, (dx, dweight) = gradients("pallas")(x, weight)
        return jax.lax.psum(value, "data"), (dx, jax.lax.psum(dweight, "data"))

    fn = jax.shard_map(
        per_device, mesh=mesh(AxisType.Auto), in_specs=(SPECS[0], P()),
        out_specs=(P(), (SPECS[0], P())), check_vma=False,
    )  # fmt: skip
    assert_expected(jax.jit(fn)(X, WEIGHT))


def vmap_under_jit():
    stacked = jnp.stack([X, 2 * X])
    results = [
        jax.jit(jax.vmap(gradients(name), (0, None)))(stacked, WEIGHT) for name in ("pallas", "xla")
    ]
    for a, e in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


def swiglu_with_split_features():
    """As tensor parallelism leaves gate and up: no gather of F; and halves of one tensor."""
    gate, up = X, jnp.flip(X)

    def total(implementation, *arrays):
        return jnp.sum(jnp.sin(jax_liger.swiglu(*arrays, implementation=implementation)))

    for arrays, spec in (((gate, up), SPECS[2]), ((gate, up), SPECS[0]), ((gate,), SPECS[0])):
        gradient = jax.grad(functools.partial(total, "pallas"), tuple(range(len(arrays))))
        for kind in (AxisType.Auto, AxisType.Explicit):
            sharding = NamedSharding(mesh(kind), spec)
            placed = [jax.device_put(a, sharding) for a in arrays]
            text = jax.jit(gradient).lower(*placed).compile().as_text()
            assert "all-gather" not in text
            expected = jax.grad(functools.partial(total, "xla"), tuple(range(len(arrays))))(*arrays)
            for a, e in zip(jax.jit(gradient)(*placed), expected, strict=True):
                np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=1e-5, atol=1e-5)


def cross_entropy_with_sharded_rows():
    labels = jnp.arange(48).reshape(8, 6) % 40
    labels = labels.at[0, :3].set(-100)

    def total(implementation, logits, labels):
        loss, metrics = jax_liger.cross_entropy(
            logits, labels, class_weight=jnp.linspace(0.5, 2.0, 40), label_smoothing=0.1,
            z_loss=1e-2, return_metrics=True, implementation=implementation,
        )  # fmt: skip
        return loss, metrics.token_accuracy

    gradient = jax.value_and_grad(functools.partial(total, "pallas"), has_aux=True)
    expected = jax.value_and_grad(functools.partial(total, "xla"), has_aux=True)(X, labels)
    for kind in (AxisType.Auto, AxisType.Explicit):
        rows = NamedSharding(mesh(kind), SPECS[0])
        placed = (
            jax.device_put(X, rows),
            jax.device_put(labels, NamedSharding(mesh(kind), P("data", None))),
        )
        with jax.set_mesh(mesh(kind)):
            fn = jax.jit(gradient)
            assert "all-gather" not in fn.lower(*placed).compile().as_text()
            actual = fn(*placed)
        for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=1e-5, atol=1e-6)


def fused_linear_cross_entropy_with_sharded_rows():
    """Every plan, with a replicated weight: hidden is gathered nowhere, the weight's and the bias's
    gradients are summed over the devices, and a mean is over the tokens of all.
    """
    hidden = jax.random.normal(jax.random.key(0), (64, 8, 16))
    weight = jax.random.normal(jax.random.key(1), (40, 16))
    bias = jax.random.normal(jax.random.key(2), (40,))
    labels = (jnp.arange(512).reshape(64, 8) % 40).at[:20, :3].set(-100)
    part = 128 * 40 * 4  # bytes of 128 rows' logits; half of it leaves no room for a float32 sum

    def total(implementation, settings, hidden, weight, bias, labels):
        loss, metrics = jax_liger.fused_linear_cross_entropy(
            hidden, weight, labels, bias=bias, class_weight=jnp.linspace(0.5, 2.0, 40),
            label_smoothing=0.1, z_loss=1e-2, logit_scale=0.5, return_metrics=True,
            implementation=implementation, **settings,
        )  # fmt: skip
        return jnp.sum(jnp.sin(loss)), metrics.token_accuracy

    def gradients(implementation, settings):
        loss = functools.partial(total, implementation, settings)
        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)

    arrays, specs = (hidden, weight, bias, labels), (P("data"), P(), P(), P("data"))
    for dtype, memory in (("float32", "fast"), ("float32", part), ("bfloat16", part // 2)):
        given = [a.astype(dtype) if a is hidden or a is weight else a for a in arrays]
        tolerance = 1e-5 if dtype == "float32" else 2e-2
        for reduction in ("mean", "none"):
            settings = {"reduction": reduction, "memory": memory}
            expected = gradients("xla", settings)(*given)
            for kind in (AxisType.Auto, AxisType.Explicit):
                on = mesh(kind)
                placed = [
                    jax.device_put(a, NamedSharding(on, spec))
                    for a, spec in zip(given, specs, strict=True)
                ]
                with jax.set_mesh(on):
                    fn = jax.jit(gradients("pallas", settings))
                    assert "all-gather" not in fn.lower(*placed).compile().as_text()
                    actual = fn(*placed)
                for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
                    a, e = (np.asarray(x, np.float32) for x in (a, e))
                    scale = max(np.abs(e).max(), 1e-3)
                    np.testing.assert_allclose(a, e, atol=tolerance * scale, rtol=tolerance)
                assert actual[1][0].sharding.is_equivalent_to(placed[0].sharding, 3)


def layer_norm_with_sharded_rows():
    """No gather of x; the gradients of weight and bias are summed over the devices."""
    bias = jax.random.normal(jax.random.key(2), (40,))

    def total(implementation, *arrays):
        return jnp.sum(jnp.sin(jax_liger.layer_norm(*arrays, implementation=implementation)))

    expected = jax.grad(functools.partial(total, "xla"), (0, 1, 2))(X, WEIGHT, bias)
    gradient = jax.jit(jax.grad(functools.partial(total, "pallas"), (0, 1, 2)))
    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(mesh(kind)):
            x = jax.device_put(X, NamedSharding(mesh(kind), SPECS[0]))
            text = gradient.lower(x, WEIGHT, bias).compile().as_text()
            assert "all-gather" not in text and "all-reduce" in text
            for a, e in zip(gradient(x, WEIGHT, bias), expected, strict=True):
                np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=1e-5, atol=1e-5)


def rope_with_split_batch_time_or_heads():
    """Tensor parallelism splits the heads of q and k over one axis; where k has too few, it stays
    whole, and so do angles that all rows share.
    """
    q, k = (jax.random.normal(jax.random.key(i), (8, 8, n, 16)) for i, n in enumerate((8, 8)))
    angles = jax.random.normal(jax.random.key(2), (2, 8, 8, 12))

    def total(implementation, q, k, cos, sin):
        a, b = jax_liger.rope(q, k, cos, sin, implementation=implementation)
        return jnp.sum(jnp.sin(a)) + jnp.sum(jnp.cos(b))

    whole, data = P(), "data"
    placements = [  # of q, of k, and of the angles of every row and of all rows
        (P(data), P(data), P(data), whole),
        (P(None, data), P(None, data), P(None, data), P(data)),
        (P(None, None, data), P(None, None, data), whole, whole),
        (P(None, None, data), whole, whole, whole),
        (P(None, None, None, None), P(None, None, data), whole, whole),
    ]
    for number, (q_spec, k_spec, per_row, shared) in enumerate(placements):
        given = ((angles[:, 0], shared), (angles, per_row), (angles[:, :1], P(None, *shared)))
        for angle, spec in given if number < 2 else given[:1]:
            arrays = (q, k, *angle)
            expected = jax.value_and_grad(functools.partial(total, "xla"), (0, 1))(*arrays)
            for kind in (AxisType.Auto, AxisType.Explicit):
                fn = jax.jit(jax.value_and_grad(functools.partial(total, "pallas"), (0, 1)))
                on = mesh(kind)
                placed = [
                    jax.device_put(a, NamedSharding(on, s))
                    for a, s in zip(arrays, (q_spec, k_spec, spec, spec), strict=True)
                ]
                compiled = fn.lower(*placed).compile()
                text = compiled.as_text()
                assert "all-gather" not in text and "all-to-all" not in text, (q_spec, spec, kind)
                actual = compiled(*placed)
                for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
                    np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=2e-5, atol=2e-5)
                for a, x in zip(actual[1], placed[:2], strict=True):
                    assert a.sharding.is_equivalent_to(x.sharding, 4), (a.sharding, x.sharding)


def rms_norm_linear_rope_with_split_batch_or_time():
    """No gather of x or of the results; the weights' gradients are summed over the devices."""
    x = jax.random.normal(jax.random.key(0), (8, 8, 24))
    weight, norm = jax.random.normal(jax.random.key(1), (56, 24)), jnp.linspace(0.5, 1.5, 24)
    bias, own = jnp.linspace(-1, 1, 56), jnp.linspace(0.5, 1.5, 8)
    angles = jax.random.normal(jax.random.key(2), (2, 8, 8, 6))

    def total(implementation, x, norm, weight, bias, own, cos, sin):
        outputs = jax_liger.rms_norm_linear_rope(
            x, norm, weight, cos, sin, bias=bias, q_norm_weight=own, k_norm_weight=own,
            num_heads=3, num_kv_heads=2, head_dim=8, implementation=implementation,
        )  # fmt: skip
        return sum(jnp.sum(jnp.sin(y)) for y in outputs)

    gradient = lambda name: jax.value_and_grad(functools.partial(total, name), range(5))  # noqa: E731
    batch, time = P("data"), P(None, "data")
    for spec, angle, of_angle in ((batch, angles[:, 0], P()), (time, angles, time)):
        arrays = (x, norm, weight, bias, own, *angle)
        expected = gradient("xla")(*arrays)
        for kind in (AxisType.Auto, AxisType.Explicit):
            on = mesh(kind)
            specs = (spec, P(), P(), P(), P(), of_angle, of_angle)
            placed = [
                jax.device_put(a, NamedSharding(on, s)) for a, s in zip(arrays, specs, strict=True)
            ]
            with jax.set_mesh(on):
                compiled = jax.jit(gradient("pallas")).lower(*placed).compile()
                assert "all-gather" not in compiled.as_text()
                actual = compiled(*placed)
            for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
                np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=1e-4, atol=1e-4)
            assert actual[1][0].sharding.is_equivalent_to(placed[0].sharding, 3)


def two_dimensions_of_one_array_on_one_axis():
    """q says to split the batch over the axis, k to split time: one of them has to give way."""
    q, k = (jax.random.normal(jax.random.key(i), (8, 8, 2, 16)) for i in range(2))
    cos, sin = jax.random.normal(jax.random.key(2), (2, 8, 16))
    fn = functools.partial(jax_liger.rope, implementation="pallas")
    expected = jax_liger.rope(q, k, cos, sin, implementation="xla")
    for kind in (AxisType.Auto, AxisType.Explicit):
        on = mesh(kind)
        placed = [
            jax.device_put(a, NamedSharding(on, s))
            for a, s in ((q, P("data")), (k, P(None, "data")), (cos, P()), (sin, P()))
        ]
        for a, e in zip(jax.jit(fn)(*placed), expected, strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=2e-5, atol=2e-5)


CHECKS = {
    "cross_entropy_with_sharded_rows": cross_entropy_with_sharded_rows,
    "fused_linear_cross_entropy_with_sharded_rows": fused_linear_cross_entropy_with_sharded_rows,
    "layer_norm_with_sharded_rows": layer_norm_with_sharded_rows,
    "rms_norm_linear_rope_with_split_batch_or_time": rms_norm_linear_rope_with_split_batch_or_time,
    "rope_with_split_batch_time_or_heads": rope_with_split_batch_time_or_heads,
    "two_dimensions_of_one_array_on_one_axis": two_dimensions_of_one_array_on_one_axis,
    "swiglu_with_split_features": swiglu_with_split_features,
    "jit_with_sharded_rows": jit_with_sharded_rows,
    "jit_with_sharded_time_or_columns": jit_with_sharded_time_or_columns,
    "jit_on_one_of_many_devices": jit_on_one_of_many_devices,
    "explicit_sharding": explicit_sharding,
    "gradients_of_shard_map": gradients_of_shard_map,
    "gradients_inside_shard_map": gradients_inside_shard_map,
    "vmap_under_jit": vmap_under_jit,
}

if __name__ == "__main__":
    for name, check in CHECKS.items():
        try:
            check()
            print(name, "ok", flush=True)
        except Exception:
            print(name, traceback.format_exc().replace("\n", " | ")[-1500:], flush=True)
