"""fused_linear_cross_entropy and per_token_logps in JAX: every plan against the oracle and the
plain version, values known by hand, and JAX's transformations.
"""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_liger
from compare import assert_matches_oracle
from liger_ops.cross_entropy.cases import EVERYTHING
from liger_ops.fused_linear_cross_entropy import cases, oracle

pallas = functools.partial(jax_liger.fused_linear_cross_entropy, implementation="pallas")
xla = functools.partial(jax_liger.fused_linear_cross_entropy, implementation="xla")
M, D, V = 300, 24, 290
# Bytes with which 300 rows of bfloat16 logits are kept, are taken in parts, and in parts for hidden
# and three blocks of 128, 128 and 34 classes for weight.
PLANS = {"kept": "fast", "parts": 128 * V * 2 + V * D * 4, "blocks": 128 * V * 2}


def run_jax(implementation, inputs, case, dloss, vocab_axis=0):
    """loss, z_loss and the gradients; weight and its gradient are (V, D) on either axis."""
    given = {name: jnp.asarray(a) for name, a in inputs.items()}
    names = [name for name in ("hidden", "weight", "bias") if name in given]
    turned = (lambda a: a.T) if vocab_axis else (lambda a: a)
    given["weight"] = turned(given["weight"])

    def loss(*arrays):
        return jax_liger.fused_linear_cross_entropy(
            labels=given["labels"], class_weight=given.get("class_weight"),
            logit_scale=case.logit_scale, memory=case.memory, vocab_axis=vocab_axis,
            return_z_loss=True, implementation=implementation,
            **dict(zip(names, arrays, strict=True)), **dataclasses.asdict(case.arguments),
        )  # fmt: skip

    # XLA may not leave out the rounding of the plain version's logits.
    @functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    def value_and_gradients(*arrays):
        (value, z), vjp = jax.vjp(loss, *arrays)
        return value, z, vjp((jnp.asarray(dloss), jnp.ones_like(z)))

    value, z, gradients = value_and_gradients(*(given[name] for name in names))
    gradients = dict(zip(names, gradients, strict=True))
    gradients["weight"] = turned(gradients["weight"])
    results = {"loss": value, "z_loss": z, **{f"d{n}": d for n, d in gradients.items()}}
    return {name: np.asarray(a) for name, a in results.items()}


@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: f"{c.name}-{c.dtype}")
def test_against_the_oracle(case):
    inputs = case.draw()
    shape = inputs["labels"].shape if case.arguments.reduction == "none" else ()
    dloss = np.asarray(np.random.default_rng(1).standard_normal(shape), np.float32)
    given = [inputs.get(k) for k in ("hidden", "weight", "labels", "class_weight", "bias")]
    exact = oracle.forward(*given, case.arguments, case.logit_scale)
    exact |= oracle.backward(*given, case.arguments, dloss, case.logit_scale)
    results = [run_jax(name, inputs, case, dloss) for name in ("pallas", "xla")]
    assert_matches_oracle(*results, exact, case.name)


def draw(dtype="bfloat16", rows=M, ignored=(0, 3, 150), seed=0, **settings):
    case = cases.Case("", (rows,), D, V, dtype, bias_dtype="float32", ignored=ignored, **settings)
    return {name: jnp.asarray(a) for name, a in case.draw(seed).items()}


def gradients_of(fn, inputs, argnums=(0, 1, 2), **settings):
    def loss(hidden, weight, bias):
        return jnp.sum(fn(hidden, weight, inputs["labels"], bias=bias, **settings))

    gradient = jax.jit(jax.value_and_grad(loss, argnums))
    return gradient(inputs["hidden"], inputs["weight"], inputs["bias"])


def assert_close(actual, expected, tolerance=1e-5):
    """Within `tolerance` of the largest value of each array, or of its own rounding."""
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert a.dtype == e.dtype
        ulp = float(jnp.finfo(a.dtype).eps) if jnp.issubdtype(a.dtype, jnp.floating) else 0.0
        a, e = (np.asarray(x).astype(np.float64) for x in (a, e))
        largest = max(np.abs(e).max(initial=0.0), 1e-30)
        np.testing.assert_allclose(a, e, rtol=ulp, atol=tolerance * largest)


@pytest.mark.parametrize("plan", PLANS)
def test_the_weight_lies_either_way(plan):
    case = cases.Case("", (M,), D, V, "bfloat16", bias_dtype="float32", memory=PLANS[plan])
    inputs = case.draw()
    first, second = (run_jax("pallas", inputs, case, np.float32(1.0), axis) for axis in (0, 1))
    assert_close(first, second, 2.0**-8)


@pytest.mark.parametrize(
    "dtype, reduction", [("float32", "mean"), ("bfloat16", "none"), ("float16", "mean")]
)
def test_every_plan_gives_the_same(dtype, reduction):
    inputs = draw(dtype)
    kept, *others = (
        gradients_of(pallas, inputs, memory=memory, reduction=reduction, **EVERYTHING)
        for memory in PLANS.values()
    )
    for other in others:
        assert_close(
            other, kept, {"float32": 1e-6, "bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
        )


@pytest.mark.parametrize(
    "hidden_dtype, weight_dtype",
    list(itertools.permutations(["float32", "bfloat16", "float16"], 2)),  # the equal ones are cases
)
def test_mixed_dtypes(hidden_dtype, weight_dtype):
    inputs = draw("float32", rows=9, ignored=(2,))
    inputs["hidden"] = inputs["hidden"].astype(hidden_dtype)
    inputs["weight"] = inputs["weight"].astype(weight_dtype)
    inputs["bias"] = inputs["bias"].astype(weight_dtype)
    results = [gradients_of(fn, inputs) for fn in (pallas, xla)]
    assert_close(*results, 1e-5 if "float32" in (hidden_dtype, weight_dtype) else 2.0**-6)
    loss, gradients = results[0]
    assert loss.dtype == jnp.float32
    names = [g.dtype.name for g in gradients]
    assert names == [hidden_dtype, weight_dtype, weight_dtype]


def test_accumulated_micro_batches_equal_one_batch():
    """Over a scan, with the count of all as a traced number."""
    inputs = draw("float32", rows=360)
    hidden, labels = inputs["hidden"].reshape(2, 180, D), inputs["labels"].reshape(2, 180)

    @jax.jit
    def accumulated(weight, count):
        def step(total, batch):
            value, gradient = jax.value_and_grad(
                lambda w: pallas(batch[0], w, batch[1], num_items=count, memory=128 * V * 4)
            )(weight)
            return (total[0] + value, total[1] + gradient), None

        return jax.lax.scan(step, (0.0, jnp.zeros_like(weight)), (hidden, labels))[0]

    count = jnp.sum(inputs["labels"] != -100)
    whole = jax.value_and_grad(lambda w: xla(inputs["hidden"], w, inputs["labels"]))
    assert_close(accumulated(inputs["weight"], count), whole(inputs["weight"]))


@pytest.mark.parametrize("rows, memory", [
    (0, "fast"), (1, "fast"), *((M, memory) for memory in PLANS.values())
])  # fmt: skip
def test_nothing_supervised_gives_zero_and_zeros(rows, memory):
    inputs = draw(rows=rows, ignored=range(rows))
    for settings in ({}, {"num_items": 0, "z_loss": 1e-3}, {"reduction": "none"}):
        loss, gradients = gradients_of(pallas, inputs, memory=memory, **settings)
        assert loss == 0 and all(not np.asarray(g).any() for g in gradients)
        assert [g.shape for g in gradients] == [(rows, D), (V, D), (V,)]


@pytest.mark.parametrize("plan, label", list(zip(PLANS, [-1, V, 2**31 - 1], strict=True)))
def test_an_invalid_label_is_seen(plan, label):
    inputs = draw(ignored=(0, 3))
    inputs["labels"] = inputs["labels"].at[7].set(label)
    losses, vjp = jax.vjp(
        lambda h: pallas(h, inputs["weight"], inputs["labels"], memory=PLANS[plan],
                         reduction="none"), inputs["hidden"],
    )  # fmt: skip
    for result in (losses, vjp(jnp.ones(M))[0].sum(axis=1)):
        assert np.flatnonzero(np.isnan(result)).tolist() == [7]
    loss, gradients = gradients_of(pallas, inputs, memory=PLANS[plan])
    assert np.isnan(loss) and all(np.isnan(np.asarray(g)).any() for g in gradients)


def test_values_known_by_hand():
    # Every logit -20: a column beyond the last would outweigh all classes.
    for classes in (257, 1000):
        weight = jnp.zeros((classes, 8)).at[:, 0].set(-20.0)
        loss = pallas(jnp.eye(8)[:1], weight, jnp.asarray([classes - 1]))
        np.testing.assert_allclose(loss, math.log(classes), rtol=1e-6)
    # The bias alone, of known probabilities; and the gradient is their distance from the target.
    p = np.random.default_rng(0).dirichlet(np.ones(V))
    labels, hidden = jnp.asarray([-100, 3, 70, -100]), jnp.ones((4, D))
    fn = lambda b: pallas(hidden, jnp.zeros((V, D)), labels, bias=b)  # noqa: E731
    loss, dbias = jax.value_and_grad(fn)(jnp.asarray(np.log(p), jnp.float32))
    np.testing.assert_allclose(loss, -(np.log(p[3]) + np.log(p[70])) / 2, rtol=1e-5)
    target = np.bincount([3, 70], minlength=V) / 2
    np.testing.assert_allclose(dbias, p - target, atol=1e-6)


def test_a_scale_of_zero_leaves_the_bias():
    inputs = draw("float32", rows=9)
    results = [gradients_of(fn, inputs, logit_scale=0.0) for fn in (pallas, xla)]
    assert_close(*results)
    assert not np.asarray(results[0][1][0]).any() and np.asarray(results[0][1][2]).any()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_equal_tokens_do_not_stall_the_sum(plan, reduction):
    """The exact gradient is n (p - e_y) h; a bfloat16 sum of equal terms stops after 256."""
    n, dim, classes = 1024, 16, 32
    rng = np.random.default_rng(0)
    # Whose products are exact in bfloat16: the logits' own rounding is not at issue.
    weight = jnp.asarray(rng.integers(-2, 3, (classes, dim)) / 8, jnp.bfloat16)
    row = jnp.asarray(rng.choice([-1.0, -0.5, 0.5, 1.0], dim), jnp.bfloat16)
    hidden, labels = jnp.tile(row, (n, 1)), jnp.full((n,), 5)
    memory = {"kept": "fast", "parts": 128 * classes * 2 + classes * dim * 4,
              "blocks": 128 * classes * 2}[plan]  # fmt: skip

    def loss(weight, bias):
        losses = pallas(hidden, weight, labels, bias=bias, reduction=reduction, memory=memory)
        return jnp.sum(losses)

    dweight, dbias = jax.grad(loss, (0, 1))(weight, jnp.zeros(classes))
    row, weight = (np.asarray(a).astype(np.float64) for a in (row, weight))
    p = np.exp(weight @ row) / np.exp(weight @ row).sum()
    dx = p - np.eye(classes)[5]
    # One rounding of the logits' gradient and one of the sum, each by at most 2^-9.
    rtol = 1.01 * 2.0**-8
    np.testing.assert_allclose(np.asarray(dweight).astype(float), n * np.outer(dx, row), rtol)
    np.testing.assert_allclose(dbias, n * dx, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("softcap, temperature", [(None, 1.0), (5.0, 0.7)])
def test_per_token_logps(implementation, softcap, temperature):
    inputs, weights = draw("float32", rows=12), jnp.linspace(-1.0, 2.0, 12)

    def ours(hidden, weight, bias):
        return jax_liger.per_token_logps(
            hidden, weight, inputs["labels"], bias=bias, logit_scale=0.5, softcap=softcap,
            temperature=temperature, implementation=implementation,
        )  # fmt: skip

    def theirs(hidden, weight, bias):
        x = 0.5 * hidden @ weight.T + bias
        x = x if softcap is None else softcap * jnp.tanh(x / softcap)
        labels = inputs["labels"]
        logps = jax.nn.log_softmax(x / temperature)[jnp.arange(12), jnp.maximum(labels, 0)]
        return jnp.where(labels == -100, 0.0, logps)

    results = []
    for fn in (ours, theirs):
        loss = lambda *a: (jnp.sum(weights * fn(*a)), fn(*a))  # noqa: B023, E731
        gradient = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
        results.append(gradient(inputs["hidden"], inputs["weight"], inputs["bias"]))
    assert_close(*results)


def test_the_extras_carry_no_gradient():
    inputs = draw("float32", rows=9)
    for fn in (pallas, xla):

        def z(hidden, fn=fn):
            out = fn(hidden, inputs["weight"], inputs["labels"], z_loss=0.1, return_z_loss=True,
                     return_metrics=True)  # fmt: skip
            return out[1] + out[2].token_accuracy

        assert not np.asarray(jax.grad(z)(inputs["hidden"])).any()
    settings = {"z_loss": 0.1, "softcap": 4.0, "return_z_loss": True, "return_metrics": True}
    many = draw("float32")
    for memory in ("fast", PLANS["blocks"]):
        ours, theirs = (
            fn(many["hidden"], many["weight"], many["labels"], memory=memory, **settings)
            for fn in (pallas, xla)
        )
        assert_close(ours, theirs)


@pytest.mark.parametrize("plan", PLANS)
def test_under_jit_vmap_and_remat(plan):
    inputs = draw("bfloat16", rows=2 * M)
    hidden, labels = inputs["hidden"].reshape(2, M, D), inputs["labels"].reshape(2, M)
    labels = labels.at[0, :200].set(-100)  # so that the loops of the batch differ in length

    def results(fn, transform):
        loss = functools.partial(fn, memory=PLANS[plan], z_loss=1e-2)
        gradient = jax.value_and_grad(transform(loss), (0, 1))
        return jax.jit(jax.vmap(gradient, (0, None, 0)))(hidden, inputs["weight"], labels)

    expected = results(xla, lambda f: f)
    transform = jax.checkpoint if plan == "parts" else lambda f: f
    assert_close(results(pallas, transform), expected, 2.0**-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("plan", PLANS)
def test_second_derivatives(plan, reduction):
    inputs = draw("float32" if plan != "blocks" else "bfloat16")
    memory = 128 * V * 4 if plan == "parts" else PLANS[plan]

    def second(fn):
        def total(hidden, weight, bias):
            given = {**inputs, "hidden": hidden, "weight": weight, "bias": bias}
            value, gradients = gradients_of(
                fn, given, memory=memory, reduction=reduction, z_loss=1e-2, label_smoothing=0.1
            )
            squares = (jnp.sum(jnp.square(g.astype(jnp.float32))) for g in gradients)
            return jnp.sin(value) + sum(squares)

        given = (inputs["hidden"], inputs["weight"], inputs["bias"])
        return jax.grad(total, (0, 1, 2))(*given)

    assert_close(second(pallas), second(xla), 1e-4 if plan != "blocks" else 2.0**-5)


def test_in_64_bit_mode_the_kernels_hold_no_64_bit_value():
    expected = gradients_of(pallas, draw(), memory=PLANS["parts"], **EVERYTHING)
    inputs = draw()
    with jax.enable_x64(True):
        inputs["labels"] = inputs["labels"].astype(jnp.int64)
        for plan in PLANS.values():
            fn = lambda h, plan=plan: gradients_of(  # noqa: E731
                pallas,
                {**inputs, "hidden": h},
                memory=plan,
                **EVERYTHING,
            )
            text = str(jax.make_jaxpr(fn)(inputs["hidden"]))
            kernels = text.split("pallas_call[")[1:]
            assert len(kernels) == (4 if plan == PLANS["blocks"] else 2)
            for kernel in kernels:
                inside = kernel[: kernel.index("out_avals")] if "out_avals" in kernel else kernel
                assert ":i64[" not in inside and ":f64[" not in inside
            assert re.search(r"\bf64\[\d", text) is None  # nothing but constants
            assert_close(fn(inputs["hidden"]), expected, 2.0**-6)


def test_errors_name_the_argument():
    inputs = draw("float32", rows=4, ignored=())
    given = (inputs["hidden"], inputs["weight"], inputs["labels"])
    with pytest.raises(ValueError, match="vocab_axis must be one of 0, 1; got 2"):
        pallas(*given, vocab_axis=2)
    with pytest.raises(
        ValueError, match=r"weight must have shape \(D, V\) with D = 24.*\(290, 24\)"
    ):
        pallas(*given, vocab_axis=1)
    with pytest.raises(ValueError, match=r"accum_dtype must be one of .*; got 'float16'"):
        pallas(*given, accum_dtype=jnp.float16)
    with pytest.raises(ValueError, match="temperature must be above 0; got 0"):
        jax_liger.per_token_logps(*given, temperature=0)
    with pytest.raises(ValueError, match="memory must be 'fast', 'least' or a number of bytes"):
        pallas(*given, memory="most")
