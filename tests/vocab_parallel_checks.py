"""Run by test_vocab_parallel.py in a process of its own: the number of devices is fixed at start.
The arguments are that number, and "cpu" or "gpu".

Prints one line a check: its name, then "ok" or what went wrong.
"""

import dataclasses
import functools
import os
import re
import sys
import traceback

DEVICES, PLATFORM = int(sys.argv[1]), sys.argv[2]
if PLATFORM == "cpu":
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["PALLAS_INTERPRET"] = "1"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_liger  # noqa: E402
from liger_ops.fused_linear_cross_entropy import cases, oracle  # noqa: E402

cases.LEAST_WORK = 0  # ignored rows of kept logits are left out, as they are of large heads
flce = jax_liger.fused_linear_cross_entropy
M, D, V = 300, 24, 240
EVERYTHING = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-2, "logit_scale": 0.7}
# hidden, weight, bias, labels and class_weight; over "tensor" alone, and with rows over "data".
SPLIT = (P(), P("tensor"), P("tensor"), P(), P("tensor"))
WITH_ROWS = (P("data"), P("tensor"), P("tensor"), P("data"), P("tensor"))
# Under shard_map Pallas's interpreter runs with check_vma=False alone.
KINDS = [("pallas", False), ("xla", True)] + [("pallas", True)] * (PLATFORM == "gpu")
PRECISE = {"xla_allow_excess_precision": False}


def plans(vocab):
    """Bytes with which M rows of float32 logits of so many classes are kept, or taken in parts."""
    return "fast", 128 * vocab * 4


def example(rows=M, vocab=V, ignored=7):
    keys = jax.random.split(jax.random.key(0), 4)
    labels = jax.random.randint(keys[3], (rows,), 0, vocab)
    return (
        jax.random.normal(keys[0], (rows, D)),
        0.6 * jax.random.normal(keys[1], (vocab, D)),
        jax.random.normal(keys[2], (vocab,)),
        labels.at[::ignored].set(-100) if ignored else labels,
        jnp.linspace(0.5, 2.0, vocab),
    )


def tensor_mesh(kind=AxisType.Auto):
    devices = jax.devices()[:DEVICES]
    return jax.make_mesh((DEVICES,), ("tensor",), axis_types=(kind,), devices=devices)


def data_mesh(kind):
    shape, devices = (DEVICES // 2, 2), jax.devices()[:DEVICES]
    return jax.make_mesh(shape, ("data", "tensor"), axis_types=(kind, kind), devices=devices)


def place(mesh, arrays, specs):
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]


def total(settings, hidden, weight, bias, labels, class_weight):
    """A number of the loss, and the rest."""
    loss, z, metrics = flce(
        hidden, weight, labels, bias=bias, class_weight=class_weight, return_z_loss=True,
        return_metrics=True, **EVERYTHING, **settings,
    )  # fmt: skip
    weights = jnp.cos(jnp.arange(loss.size, dtype=jnp.float32)).reshape(loss.shape)
    return jnp.sum(loss * weights), (jnp.sum(z), metrics)


def gradients(settings, argnums=(0, 1, 2)):
    return jax.value_and_grad(functools.partial(total, settings), argnums, has_aux=True)


@functools.cache
def expected(reduction):
    return jax.jit(gradients({"implementation": "xla", "reduction": reduction}))(*example())


def assert_close(actual, wanted, tolerance=1e-5):
    for a, e in zip(*map(jax.tree.leaves, (actual, wanted)), strict=True):
        a, e = np.asarray(a), np.asarray(e)
        atol = tolerance * max(np.abs(e).max(initial=0.0), 1e-3)
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=atol)


def run_and_collectives(settings, arrays):
    """The gradients, and every collective of the compiled function: its name, its shape, and
    whether a loop holds it.
    """
    compiled = jax.jit(gradients(settings)).lower(*arrays).compile()
    found, text = [], compiled.as_text()
    bodies = set(re.findall(r"body=%?([\w.-]+)", text))
    kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    pattern = rf"= (.*?) ({kinds})(-start)?\("
    for computation in re.split(r"\n(?=\S)", text):
        # A GPU's program has computations of other kinds as well.
        name = re.match(r"(?:ENTRY )?%?([\w.-]*)", computation)[1]
        in_loop = name in bodies if PLATFORM == "gpu" else not computation.startswith("ENTRY")
        for line in computation.splitlines():
            match = re.search(pattern, line)
            if match:
                shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
                if match[3] and match[2] != "all-reduce":  # has its inputs' shapes first
                    shapes = shapes[len(shapes) // 2 :]
                shapes = [tuple(int(n) for n in shape.split(",") if n) for shape in shapes]
                found += [(match[2], shape, in_loop) for shape in shapes]
    return compiled(*arrays), found


def under_shard_map():
    for implementation, check_vma in KINDS:
        for memory, reduction in zip(plans(V // DEVICES), ("none", "mean"), strict=True):
            settings = {
                "implementation": implementation, "memory": memory, "reduction": reduction,
                "vocab_mesh_axis": "tensor",
            }  # fmt: skip
            fn = jax.shard_map(
                functools.partial(total, settings), mesh=tensor_mesh(), in_specs=SPLIT,
                out_specs=P(), check_vma=check_vma,
            )  # fmt: skip
            fn = jax.jit(jax.value_and_grad(fn, (0, 1, 2), has_aux=True))
            assert_close(fn(*example()), expected(reduction))


def gradients_inside_shard_map():
    """check_vma=True gives the loss's own; without it every psum is counted once a device."""
    for implementation, check_vma in KINDS:
        settings = {"implementation": implementation, "vocab_mesh_axis": ("tensor",)}

        def per_device(*arrays, settings=settings, check_vma=check_vma):
            value, (dhidden, *own) = gradients(settings)(*arrays)
            if not check_vma:
                dhidden = jax.lax.psum(dhidden, "tensor") / DEVICES
                own = [d / DEVICES for d in own]
            return value, (dhidden, *own)

        fn = jax.shard_map(
            per_device, mesh=tensor_mesh(), in_specs=SPLIT, out_specs=(P(), SPLIT[:3]),
            check_vma=check_vma,
        )  # fmt: skip
        assert_close(jax.jit(fn)(*example()), expected("mean"))


def under_jit():
    """Nothing that has the classes or D as a dimension crosses devices, but hidden's gradient."""
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = tensor_mesh(kind)
        arrays = place(mesh, example(), SPLIT)
        for implementation, axis, memory, reduction in (
            ("pallas", None, plans(V)[0], "none"), ("pallas", "tensor", plans(V)[1], "mean"),
            ("xla", "tensor", "fast", "mean"),
        ):  # fmt: skip
            settings = {
                "implementation": implementation, "memory": memory, "reduction": reduction,
                "vocab_mesh_axis": axis,
            }  # fmt: skip
            with jax.set_mesh(mesh):
                actual, found = run_and_collectives(settings, arrays)
            assert_close(actual, expected(reduction))
            assert {name for name, *_ in found} == {"all-reduce"}, found
            shapes = [shape for _, shape, _ in found]
            assert not any(n in (V, V // DEVICES) for shape in shapes for n in shape), found
            assert sum(D in shape for shape in shapes) == 1, found
            for gradient, given in zip(actual[1], arrays, strict=False):
                assert gradient.sharding.is_equivalent_to(given.sharding, given.ndim)


def with_rows_of_their_own():
    """Rows over one axis, classes over another; and rows over both, where the classes come first
    if they were asked for.
    """
    both = (P(("data", "tensor")), *WITH_ROWS[1:3], P(("data", "tensor")), WITH_ROWS[4])
    arrays = example(M - M % DEVICES)
    wanted = jax.jit(gradients({"implementation": "xla"}))(*arrays)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = data_mesh(kind)
        for specs, axis, gathered in (
            (WITH_ROWS, None, []), (both, None, [(V, D)]),
            (both, "tensor", [(len(arrays[0]) * 2 // DEVICES, D)]),
        ):  # fmt: skip
            settings = {"implementation": "pallas", "vocab_mesh_axis": axis, "memory": plans(V)[1]}
            given = place(mesh, arrays, specs)
            with jax.set_mesh(mesh):
                actual, found = run_and_collectives(settings, given)
            assert_close(actual, wanted)
            matrices = [s for name, s, _ in found if name == "all-gather" and D in s]
            assert matrices == gathered, (kind, specs, axis, found)


def fsdp_weights_are_gathered_once():
    """A step's forward and backward, in parts: once, and in no loop."""
    rows = M - M % DEVICES
    arrays = example(rows)
    plain = lambda r: jax.jit(gradients({"implementation": "xla", "reduction": r}))  # noqa: E731
    wanted = {reduction: plain(reduction)(*arrays) for reduction in ("mean", "none")}
    axis = "tensor"  # of rows and of the weight
    _, part = plans(V)
    for kind, weight, reduction, memory in (
        (AxisType.Auto, P(axis), "none", part), (AxisType.Auto, P(None, axis), "mean", part),
        (AxisType.Auto, P(None, axis), "mean", "fast"), (AxisType.Explicit, P(axis), "none", part),
    ):  # fmt: skip
        mesh = tensor_mesh(kind)
        given = place(mesh, arrays, (P(axis), weight, P(), P(axis), P()))
        settings = {"implementation": "pallas", "memory": memory, "reduction": reduction}
        with jax.set_mesh(mesh):
            actual, found = run_and_collectives(settings, given)
        assert_close(actual, wanted[reduction])
        gathered = [(s, loop) for name, s, loop in found if name == "all-gather" and len(s) > 1]
        assert gathered == [((V, D), False)], (weight, reduction, memory, found)
        assert actual[1][1].sharding.is_equivalent_to(given[1].sharding, 2)


def against_the_oracle():
    from compare import assert_matches_oracle  # which wants PyTorch

    names = {f"everything-{plan}" for plan in ("kept-none", "parts-mean", "blocks-mean")}
    few = [case for case in cases.CASES if case.name in names and case.dtype == "bfloat16"]
    assert len(few) == 3
    for case in few if PLATFORM == "cpu" else cases.CASES:
        if case.vocab % DEVICES:
            continue
        inputs = case.draw()
        shape = inputs["labels"].shape if case.arguments.reduction == "none" else ()
        dloss = np.asarray(np.random.default_rng(1).standard_normal(shape), np.float32)
        given = [inputs.get(k) for k in ("hidden", "weight", "labels", "class_weight", "bias")]
        exact = oracle.forward(*given, case.arguments, case.logit_scale)
        exact |= oracle.backward(*given, case.arguments, dloss, case.logit_scale)
        names = [k for k in ("hidden", "weight", "bias") if k in inputs]
        mesh = tensor_mesh()
        split = {k: "tensor" for k in ("weight", "bias", "class_weight")}
        arrays = {
            k: jax.device_put(jnp.asarray(a), NamedSharding(mesh, P(split.get(k))))
            for k, a in inputs.items()
        }

        def run(implementation, arrays, axis, case=case, names=names, dloss=dloss):
            def loss(*wanted):
                given = {**arrays, **dict(zip(names, wanted, strict=True))}
                return flce(
                    given["hidden"], given["weight"], given["labels"], bias=given.get("bias"),
                    class_weight=given.get("class_weight"), logit_scale=case.logit_scale,
                    memory=case.memory, return_z_loss=True, vocab_mesh_axis=axis,
                    implementation=implementation, **dataclasses.asdict(case.arguments),
                )  # fmt: skip

            @functools.partial(jax.jit, compiler_options=PRECISE)
            def value_and_gradients(*wanted):
                (value, z), vjp = jax.vjp(loss, *wanted)
                return value, z, vjp((jnp.asarray(dloss), jnp.zeros_like(z)))

            value, z, found = value_and_gradients(*(arrays[k] for k in names))
            found = {f"d{k}": d for k, d in zip(names, found, strict=True)}
            return {k: np.asarray(a) for k, a in {"loss": value, "z_loss": z, **found}.items()}

        with jax.set_mesh(mesh):
            actual = run("pallas", arrays, "tensor")
        plain = run("xla", {k: jnp.asarray(a) for k, a in inputs.items()}, None)
        assert_matches_oracle(actual, plain, exact, f"{case.name}-{case.dtype}")


def a_label_of_another_device():
    """Is no padded column of this one's: the last number of a tile, and the one after the last."""
    for vocab in (1000, 514 * DEVICES // 2):
        hidden, weight, bias, _, _ = example(8, vocab)
        own = vocab // DEVICES
        at = [0, own - 1, own, own + 1, vocab - 1, own + 12, 2, min(512, vocab - 2)]
        labels = jnp.asarray(at)

        def losses(hidden, weight, bias, labels, **settings):
            return flce(hidden, weight, labels, bias=bias, reduction="none", **settings)

        whole = functools.partial(losses, implementation="xla")
        grad = lambda f: jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2)))  # noqa: E731
        wanted = grad(whole)(hidden, weight, bias, labels)
        assert np.isfinite(wanted[0])
        for implementation in ("pallas", "xla"):
            settings = {"implementation": implementation, "vocab_mesh_axis": "tensor"}
            split = functools.partial(losses, **settings)
            fn = jax.shard_map(
                split, mesh=tensor_mesh(), in_specs=SPLIT[:4], out_specs=P(), check_vma=False
            )
            assert_close(grad(fn)(hidden, weight, bias, labels), wanted)


def labels_that_are_none_or_differ():
    hidden, weight, _, labels, class_weight = example(12, ignored=5)
    for implementation in ("pallas", "xla"):

        def losses(hidden, weight, labels, class_weight, implementation=implementation):
            return flce(
                hidden, weight, labels, class_weight=class_weight, reduction="none",
                vocab_mesh_axis="tensor", implementation=implementation,
            )  # fmt: skip

        def split(labels, losses=losses):
            return jax.jit(jax.shard_map(
                losses, mesh=tensor_mesh(), in_specs=(P(), P("tensor"), labels, P("tensor")),
                out_specs=P(), check_vma=False,
            ))  # fmt: skip

        for label in (-1, V, 2**31 - 1):
            rest = (weight, labels.at[7].set(label), class_weight)
            fn = split(P())

            def total(h, fn=fn, rest=rest):
                values = fn(h, *rest)
                return jnp.sum(values), values

            gradient, values = jax.jit(jax.grad(total, has_aux=True))(hidden)
            for result in (values, gradient.sum(axis=1)):
                assert np.flatnonzero(np.isnan(result)).tolist() == [7]
        # Another batch on every device, as data parallelism has it, is no plausible number.
        many = jnp.concatenate([jnp.roll(labels, i) for i in range(DEVICES)])
        assert np.isnan(np.asarray(split(P("tensor"))(hidden, weight, many, class_weight))).any()


def masked_classes_and_what_asks_for_no_gradient():
    """A device of nothing but classes of -inf; and every input frozen in turn."""
    hidden, weight, bias, labels, _ = example(12, ignored=5)
    bias = bias.at[V // DEVICES :].set(-jnp.inf)
    labels = jnp.where(labels < 0, labels, labels % (V // DEVICES))

    def loss(settings, *arrays):
        return flce(arrays[0], arrays[1], arrays[3], bias=arrays[2], **settings)

    for implementation in ("pallas", "xla"):
        settings = {"implementation": implementation, "vocab_mesh_axis": "tensor"}
        fn = jax.shard_map(
            functools.partial(loss, settings), mesh=tensor_mesh(), in_specs=SPLIT[:4],
            out_specs=P(), check_vma=False,
        )  # fmt: skip
        plain = functools.partial(loss, {"implementation": "xla"})
        for argnums in ((0,), (1, 2)):
            given = (hidden, weight, bias, labels)
            actual = jax.jit(jax.value_and_grad(fn, argnums))(*given)
            assert_close(actual, jax.jit(jax.value_and_grad(plain, argnums))(*given))


def second_derivatives():
    hidden, weight, bias, labels, class_weight = example(140)

    def second(loss):
        def squares(*wanted):
            first = jax.grad(loss, (0, 1, 2))(*wanted)
            return sum(jnp.sum(jnp.square(g)) for g in first)

        return jax.jit(jax.grad(squares, (0, 1, 2)))(hidden, weight, bias)

    def loss(settings, hidden, weight, bias, labels, class_weight):
        return total(settings, hidden, weight, bias, labels, class_weight)[0]

    plain = functools.partial(loss, {"implementation": "xla"})
    wanted = second(lambda *a: plain(*a, labels, class_weight))
    kept, part = plans(V // DEVICES)
    for implementation, memory in (("pallas", kept), ("pallas", part), ("xla", kept)):
        settings = {"implementation": implementation, "memory": memory, "vocab_mesh_axis": "tensor"}
        fn = jax.shard_map(
            functools.partial(loss, settings), mesh=tensor_mesh(), in_specs=SPLIT, out_specs=P(),
            check_vma=False,
        )  # fmt: skip
        assert_close(second(lambda *a, fn=fn: fn(*a, labels, class_weight)), wanted, 1e-4)


def per_token_logps_with_classes_last():
    hidden, weight, bias, labels, _ = example(12, ignored=5)
    settings = {"logit_scale": 0.5, "softcap": 3.0, "temperature": 0.7, "vocab_axis": 1}
    wanted = jax_liger.per_token_logps(
        hidden, weight.T, labels, bias=bias, implementation="xla", **settings
    )
    mesh = tensor_mesh()
    specs = (P(), P(None, "tensor"), P(), P("tensor"))
    given = place(mesh, (hidden, weight.T, labels, bias), specs)
    for implementation in ("pallas", "xla"):
        fn = jax.jit(
            lambda h, w, y, b, implementation=implementation: jax_liger.per_token_logps(
                h, w, y, bias=b, vocab_mesh_axis="tensor", implementation=implementation, **settings
            )
        )
        with jax.set_mesh(mesh):
            assert_close(fn(*given), wanted)


def errors_name_the_argument():
    hidden, weight, _, labels, _ = example(12)

    def message(fn):
        try:
            fn()
        except ValueError as error:
            return str(error)
        raise AssertionError("nothing was raised")

    run = functools.partial(flce, hidden, weight, labels, vocab_mesh_axis="tensor")
    nowhere = "axes of the mesh in scope, (); got 'tensor'; outside shard_map, jax.set_mesh"
    assert nowhere in message(run)
    with jax.set_mesh(tensor_mesh()):
        other = functools.partial(run, vocab_mesh_axis="other")
        assert "the mesh in scope, ('tensor',); got 'other'" in message(other)
        uneven = functools.partial(flce, hidden, weight[:-1], labels, vocab_mesh_axis="tensor")
        assert f"the {DEVICES} devices" in message(uneven) and "got 239" in message(uneven)
    whole = jax.shard_map(
        lambda h, w, y: flce(h, w, y, vocab_mesh_axis="tensor", implementation="xla"),
        mesh=tensor_mesh(), in_specs=P(), out_specs=P(),
    )  # fmt: skip
    assert "that is the same along ['tensor']" in message(lambda: whole(hidden, weight, labels))


CHECKS = {
    "under_shard_map": under_shard_map,
    "gradients_inside_shard_map": gradients_inside_shard_map,
    "under_jit": under_jit,
    "with_rows_of_their_own": with_rows_of_their_own,
    "fsdp_weights_are_gathered_once": fsdp_weights_are_gathered_once,
    "against_the_oracle": against_the_oracle,
    "a_label_of_another_device": a_label_of_another_device,
    "labels_that_are_none_or_differ": labels_that_are_none_or_differ,
    "masked_classes_and_what_asks_for_no_gradient": masked_classes_and_what_asks_for_no_gradient,
    "second_derivatives": second_derivatives,
    "per_token_logps_with_classes_last": per_token_logps_with_classes_last,
    "errors_name_the_argument": errors_name_the_argument,
}

if __name__ == "__main__":
    if PLATFORM == "gpu":
        jax.config.update("jax_default_matmul_precision", "highest")
    for name in sys.argv[3:] or CHECKS:
        try:
            CHECKS[name]()
            print(name, "ok", flush=True)
        except Exception:
            text = traceback.format_exc().replace("\n", " | ")
            print(name, text[:300], "...", text[-1200:], flush=True)
