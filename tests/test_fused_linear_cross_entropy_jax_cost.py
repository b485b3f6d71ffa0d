"""What fused_linear_cross_entropy costs in JAX: products and memory, and the plans behind it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_ops.fused_linear_cross_entropy import cases, pallas_parts
from liger_ops.fused_linear_cross_entropy.cases import Plan
from test_fused_linear_cross_entropy_jax import (
    PLANS,
    D,
    M,
    V,
    assert_close,
    draw,
    gradients_of,
    pallas,
    xla,
)


def equations(jaxpr):
    """Every equation but those inside kernels."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != "pallas_call":
            for value in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def products_and_shapes(fn, *arrays):
    found = list(equations(jax.make_jaxpr(fn)(*arrays).jaxpr))
    # Of what lies in memory for certain; elementwise operations are fused.
    held = [e for e in found if e.primitive.name in ("dot_general", "while", "pallas_call")]
    shapes = {(v.aval.shape, v.aval.dtype.name) for e in held for v in e.outvars}
    return sum(e.primitive.name == "dot_general" for e in found), shapes


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("plan", PLANS)
def test_only_what_is_asked_for_is_computed(plan, reduction):
    inputs = draw()
    arrays = [inputs[name] for name in ("hidden", "weight", "bias")]
    settings = {"memory": PLANS[plan], "reduction": reduction}
    _, everything = gradients_of(xla, inputs, reduction=reduction)

    def loss(hidden, weight, bias):
        losses = pallas(hidden, weight, inputs["labels"], bias=bias, **settings)
        return jnp.sum(losses)

    products, shapes = products_and_shapes(loss, *arrays)
    assert products == 1
    assert ((V, D), "float32") not in shapes
    for size in (1, 2, 3):
        for argnums in itertools.combinations(range(3), size):
            fn = jax.grad(loss, argnums)
            products, shapes = products_and_shapes(fn, *arrays)
            # Without a gradient of the weight there is no sum to find room for: never blocks.
            blocks = plan == "blocks" and 1 in argnums
            # How often the logits are computed once more: in the loop over whole blocks and in
            # the last one, and in the loop over the rows.
            again = 2 * blocks
            if plan != "kept" and reduction == "none":
                again += not blocks or size > 1
            asked = (0 in argnums) + (1 in argnums) * (2 if blocks else 1)
            assert products == 1 + again + asked, argnums
            assert (((V, D), "float32") in shapes) == (plan == "parts" and 1 in argnums)
            if argnums in ([(0,), (1,), (2,)] if reduction == "none" else [(0, 1), (1, 2)]):
                expected = tuple(everything[i] for i in argnums)
                assert_close(jax.jit(fn)(*arrays), expected, 2.0**-6)


@pytest.mark.parametrize("plan", ["parts", "blocks"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_logits_of_all_rows_exist_nowhere(plan, reduction):
    inputs = draw()
    settings = {"memory": PLANS[plan], "reduction": reduction}
    fn = lambda *a: gradients_of(pallas, {**inputs, "hidden": a[0], "weight": a[1]}, **settings)  # noqa: E731
    _, shapes = products_and_shapes(fn, inputs["hidden"], inputs["weight"])
    logits = {shape for shape, dtype in shapes if dtype == "bfloat16" and D not in shape}
    assert logits == ({(128, V)} if plan == "parts" else {(128, V), (M, 128), (M, V - 256)})


def test_ignored_rows_cost_no_product(monkeypatch):
    """The products of as many parts as the tokens that count fill, whichever these are."""
    calls, plain = [], pallas_parts.logits_of

    def counted(*arrays):
        jax.debug.callback(lambda: calls.append(1))
        return plain(*arrays)

    monkeypatch.setattr(pallas_parts, "logits_of", counted)
    rng = np.random.default_rng(0)
    for count in (0, 128, 129, 517):
        rows = 517  # of a shape that no other test has traced
        kept = rng.permutation(rows)[:count]
        inputs = draw(rows=rows, ignored=())
        inputs["labels"] = jnp.full((rows,), -100).at[kept].set(inputs["labels"][kept])
        calls.clear()
        results = gradients_of(pallas, inputs, memory=PLANS["parts"])
        jax.effects_barrier()
        assert len(calls) == -(-count // 128)
        assert_close(results, gradients_of(xla, inputs), 2.0**-6)
        assert not np.asarray(results[1][0])[np.asarray(inputs["labels"]) == -100].any()


@pytest.mark.parametrize("count", [0, 129, 130, 387, 388, 517])
def test_where_logits_are_kept_the_products_are_of_the_quarters_that_count(count, monkeypatch):
    products, dot = [], jax.lax.dot_general

    def counted(a, b, *settings, **more):
        rows = next(n for n in (*a.shape, *b.shape) if n not in (D, V))
        jax.debug.callback(lambda: products.append(rows))
        return dot(a, b, *settings, **more)

    monkeypatch.setattr(cases, "LEAST_WORK", 0)
    rows = 517
    inputs = draw(rows=rows, ignored=())
    ignored = np.random.default_rng(0).permutation(rows)[count:]
    inputs["labels"] = inputs["labels"].at[ignored].set(-100)
    expected = gradients_of(xla, inputs)
    jax.clear_caches()
    monkeypatch.setattr(jax.lax, "dot_general", counted)
    results = gradients_of(pallas, inputs)
    jax.effects_barrier()
    quarter = next(n for n in (129, 258, 387, 517) if count <= n)
    assert products == [quarter] * 3
    assert_close(results, expected, 2.0**-6)
    assert not np.asarray(results[1][0])[ignored].any()


def test_kept_logits_of_a_batch_are_of_all_rows(monkeypatch):
    """Where each of a batch took a branch of its own, all branches would be computed."""
    monkeypatch.setattr(cases, "LEAST_WORK", 0)
    inputs = draw(rows=96, ignored=range(60))
    batch = jnp.stack([inputs["hidden"], 2 * inputs["hidden"]])
    labels = jnp.stack([inputs["labels"], inputs["labels"][::-1]])
    fn = lambda h, y: gradients_of(pallas, {**inputs, "hidden": h, "labels": y})  # noqa: E731
    of_batch = jax.make_jaxpr(jax.vmap(fn))(batch, labels).jaxpr
    assert [e.primitive.name for e in equations(of_batch)].count("cond") == 2
    both = jax.vmap(fn)(batch, labels)
    for i in range(2):
        alone = gradients_of(xla, {**inputs, "hidden": batch[i], "labels": labels[i]})
        assert_close(jax.tree.map(lambda a, i=i: a[i], both), alone, 2.0**-6)


def test_sums_in_bfloat16_where_they_are_asked_for():
    inputs = draw(rows=512)
    settings = {"memory": 128 * V * 2, "accum_dtype": jnp.bfloat16}
    fn = lambda w: gradients_of(pallas, {**inputs, "weight": w}, **settings)  # noqa: E731
    _, shapes = products_and_shapes(fn, inputs["weight"])
    assert ((V, D), "float32") not in shapes
    assert_close(fn(inputs["weight"]), gradients_of(xla, inputs), 2.0**-5)
    half = draw("float16", rows=512)  # which has not the range for sums
    results = gradients_of(pallas, half, memory=PLANS["parts"], accum_dtype="bfloat16")
    assert_close(results, gradients_of(xla, half), 2.0**-8)


LLAMA = {"dim": 4096, "vocab": 128256, "itemsize": 2, "needs_weight": True}
GIB = 2**30


def scratch(plan, rows, sum_itemsize):
    """Bytes beside the gradients: the sum, and logits that do not lie in a gradient's memory."""
    sums = LLAMA["vocab"] * LLAMA["dim"] * sum_itemsize
    if plan.keeps_logits or plan.classes is not None or sum_itemsize == 2:
        sums = 0
    of_part = 0 if plan.in_gradient else plan.rows * LLAMA["vocab"] * 2
    of_part += of_part * 3 // 4 if plan.skips_kept else 0
    of_block = 0 if plan.classes is None else rows * plan.classes * 2
    return sums + max(of_part, of_block)


@pytest.mark.parametrize("rows", [4096, 16384, 65536])
@pytest.mark.parametrize(
    "sum_itemsize, memory, most", [(4, "fast", 2.2), (2, "fast", 0.4), (4, "least", 0.6)]
)
def test_the_plan_keeps_to_its_memory(rows, sum_itemsize, memory, most):
    plan = Plan.for_shape(rows, sum_itemsize=sum_itemsize, memory=memory, **LLAMA)
    assert scratch(plan, rows, sum_itemsize) <= most * GIB
    assert plan.rows % 128 == 0 and plan.rows <= rows
    if memory == "fast" and sum_itemsize == 4:
        wanted = (
            Plan(4096, True, False, None, True) if rows == 4096 else Plan(4096, False, True, None)
        )
        assert plan == wanted
    if memory == "least":
        assert plan.classes is not None and plan.classes % 128 == 0


def test_plans_of_other_shapes():
    plan = functools.partial(Plan.for_shape, sum_itemsize=4, needs_weight=True)
    assert plan(0, 8, 5, 4) == Plan(0, True, False, None)
    kept = plan(100, 64, 1000, 2)
    assert kept.keeps_logits and not kept.skips_kept  # so little is not worth it
    kept = plan(8192, 4096, 128256, 2)
    assert kept.keeps_logits and not kept.skips_kept  # for there is no room
    # Equal parts, and none of fewer rows than a tile has.
    assert plan(300, D, V, 2, memory=PLANS["parts"]) == Plan(128, False, False, None)
    assert plan(300, D, V, 2, memory=PLANS["blocks"]) == Plan(128, False, False, 128)
    assert plan(300, D, 80, 2, memory=128 * 80 * 2).classes == 80
    assert plan(10**6, 8, 1000, 4, memory=1).rows == 128
    frozen = Plan.for_shape(16384, 4096, 128256, 2, sum_itemsize=4, needs_weight=False)
    assert not frozen.keeps_logits and frozen.rows * 128256 * 2 <= 400 * 2**20
