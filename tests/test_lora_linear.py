"""lora_linear: every implementation against the oracle, and what is counted, kept and refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_liger
import torch_liger
from compare import assert_agree, assert_matches_oracle, from_torch, poisoned, to_torch
from liger_ops.drawing import draw_normal
from liger_ops.lora_linear import cases, eager, oracle, triton_dropout, xla

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(implementation, case, inputs, dy):
    """y and the gradient of every input."""
    settings = {"scaling": case.scaling, "dropout_p": case.dropout_p, "seed": case.seed}
    names = list(inputs)
    if implementation == "xla":
        transposed = {k: a.T if a.ndim == 2 and k != "x" else a for k, a in inputs.items()}
        fn = lambda given: jax_liger.lora_linear(**given, **settings)  # noqa: E731
        y, vjp = jax.vjp(fn, {k: jnp.asarray(a) for k, a in transposed.items()})
        (given,) = vjp(jnp.asarray(dy))
        gradients = {k: a.T if a.ndim == 2 and k != "x" else a for k, a in given.items()}
        return {"y": np.asarray(y), **{f"d{k}": np.asarray(a) for k, a in gradients.items()}}
    tensors = {k: to_torch(a, DEVICE).requires_grad_() for k, a in inputs.items()}
    with poisoned():
        y = torch_liger.lora_linear(**tensors, **settings, implementation=implementation)
        gradients = torch.autograd.grad(y, list(tensors.values()), to_torch(dy, DEVICE))
    results = {"y": y, **{f"d{k}": g for k, g in zip(names, gradients, strict=True)}}
    return {k: from_torch(t) for k, t in results.items()}


def exact_results(case, inputs, dy):
    factors = 1.0
    if case.dropout_p:
        factors = oracle.dropout_factors(case.seed, inputs["x"].shape, case.dropout_p)
    settings = {"scaling": case.scaling, "factors": factors}
    given = [inputs.get(k) for k in ("x", "weight", "lora_a", "lora_b", "bias")]
    return {**oracle.forward(*given, **settings), **oracle.backward(*given, dy, **settings)}


def check(case):
    inputs = case.draw()
    dy = draw_normal(np.random.default_rng(1), (*case.rows, case.out), case.dtype)
    exact = exact_results(case, inputs, dy)
    results = {name: run(name, case, inputs, dy) for name in ("triton", "eager", "xla")}
    assert_matches_oracle(results["triton"], results["eager"], exact, case.name)
    plains = (results["eager"], results["eager"])
    assert_agree(results["xla"], results["triton"], plains, exact, f"{case.name} frameworks")


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_against_the_oracle(case):
    check(case)


IN_PARTS = [case for case in cases.CASES if case.name.startswith("parts") or case.rank == 3]


@pytest.mark.parametrize("case", IN_PARTS, ids=lambda case: case.name)
def test_against_the_oracle_in_parts(case, monkeypatch):
    monkeypatch.setattr(cases, "SCRATCH", 1)
    assert cases.rows_of_a_part(case.dim, 4) == 128
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("adapter", ["float32", "bfloat16"])
def test_full_size_against_the_oracle(adapter, dropout_p):
    check(cases.Case("full", (2, 1031), 2048, 5632, 64, "bfloat16", adapter, True, 1.0, dropout_p))


@pytest.mark.parametrize("planted", ["scaling", "factors", "dlora_a"])
def test_the_judge_sees_a_planted_fault(planted):
    case = cases.Case("planted", (9,), 24, 20, 4, "bfloat16", dropout_p=0.3, seed=7)
    inputs = case.draw()
    dy = draw_normal(np.random.default_rng(1), (9, 20), "bfloat16")
    exact, plain = exact_results(case, inputs, dy), run("eager", case, inputs, dy)
    wrong = case
    if planted == "scaling":
        wrong = cases.Case(**{**vars(case), "scaling": 1.9})
    elif planted == "factors":
        wrong = cases.Case(**{**vars(case), "seed": 8})
    results = run("triton", wrong, inputs, dy)
    if planted == "dlora_a":  # as if x had not been dropped out in the backward
        results["dlora_a"] = run(
            "triton", cases.Case(**{**vars(case), "dropout_p": 0.0}), inputs, dy
        )["dlora_a"]
    with pytest.raises(AssertionError):
        assert_matches_oracle(results, plain, exact)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_oracle_backward_by_finite_differences(dropout_p):
    rng = np.random.default_rng(0)
    inputs = {
        "x": rng.standard_normal((2, 3, 5)),
        "weight": rng.standard_normal((4, 5)),
        "lora_a": rng.standard_normal((2, 5)),
        "lora_b": rng.standard_normal((4, 2)),
        "bias": rng.standard_normal(4),
    }
    dy = rng.standard_normal((2, 3, 4))
    factors = oracle.dropout_factors(3, (2, 3, 5), dropout_p)
    total = lambda given: np.sum(  # noqa: E731
        dy * oracle.forward(*given.values(), scaling=0.7, factors=factors)["y"]
    )
    gradients = oracle.backward(*inputs.values(), dy, scaling=0.7, factors=factors)
    for name, value in inputs.items():
        direction, step = rng.standard_normal(value.shape), 1e-6
        ahead, behind = (total({**inputs, name: value + s * step * direction}) for s in (1, -1))
        numeric = (ahead - behind) / (2 * step)
        assert np.sum(gradients[f"d{name}"] * direction) == pytest.approx(numeric, rel=1e-6)


def test_philox_by_its_published_vectors():
    """The known answer of philox4x32-10 for a counter and a key of zeros, from Random123."""
    words = lambda *a: [int(w[0, 0]) for w in oracle._philox(*a)]  # noqa: E731
    at = lambda n: np.array([[n]])  # noqa: E731
    assert words(0, at(0), at(0), 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("seed", [0, 5, 2**31 + 9, 2**62 + 12345])
@pytest.mark.parametrize("shape, stream", [((5, 37), 0), ((2, 3, 64), 2), ((4, 1), 1)])
def test_the_same_elements_are_dropped_everywhere(shape, stream, seed):
    wanted = oracle.dropout_factors(seed, shape, 0.3, stream)
    on_device = torch.tensor([seed], device=DEVICE)
    plain = eager.dropout_factors(on_device, torch.Size(shape), 0.3, stream)
    np.testing.assert_allclose(from_torch(plain), wanted, rtol=1e-6)
    ones = torch.ones(shape, device=DEVICE).view(-1, shape[-1])
    kernel = torch.full_like(ones, float("nan"))
    triton_dropout.dropout(ones, kernel, on_device, 0.3, stream, first_row=0)
    np.testing.assert_allclose(from_torch(kernel).reshape(shape), wanted, rtol=1e-6)
    words = jnp.array([seed & (2**32 - 1), seed >> 32], jnp.uint32)
    np.testing.assert_allclose(xla.dropout_factors(words, shape, 0.3, stream), wanted, rtol=1e-6)


def test_the_factors_are_those_of_independent_draws():
    shape, p = (512, 400), 0.1
    first, other_seed = (oracle.dropout_factors(seed, shape, p) for seed in (1, 2))
    other_stream = oracle.dropout_factors(1, shape, p, stream=1)
    dropped = first == 0.0
    deviation = np.sqrt(p * (1 - p))
    assert abs(dropped.mean() - p) < 4 * deviation / dropped.size**0.5
    assert np.abs(dropped.mean(0) - p).max() < 5.5 * deviation / shape[0] ** 0.5
    assert np.abs(dropped.mean(1) - p).max() < 5.5 * deviation / shape[1] ** 0.5
    shifted = [np.roll(dropped, 1, 0), np.roll(dropped, 1, 1), np.roll(dropped, 100, 1)]
    for other in (*shifted, other_seed == 0.0, other_stream == 0.0):
        both = (dropped & other).mean()
        assert abs(both - p * p) < 5 * p / dropped.size**0.5


def test_jax_transformations_and_what_is_kept():
    x = jax.random.normal(jax.random.key(0), (3, 4, 32))
    w, a, b = (jax.random.normal(jax.random.key(i), s) for i, s in ((1, (32, 24)), (2, (32, 4)),
                                                                    (3, (4, 24))))  # fmt: skip
    op = functools.partial(jax_liger.lora_linear, scaling=0.5, dropout_p=0.5)
    loss = lambda x, a, b, seed: jnp.sum(jnp.sin(op(x, w, a, b, seed=seed)))  # noqa: E731
    plain = jax.grad(loss, (0, 1, 2))(x, a, b, 5)
    for seed in (jnp.int32(5), jnp.uint32(5)):
        under = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(x, a, b, seed)
        for one, other in zip(plain, under, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    each = jax.vmap(loss, (0, None, None, 0))(x, a, b, jnp.arange(3))
    for i in range(3):
        np.testing.assert_allclose(each[i], loss(x[i], a, b, i), rtol=1e-5)
    key = jax.random.key(9)
    assert not np.array_equal(loss(x, a, b, key), loss(x, a, b, jax.random.key(10)))
    _, vjp = jax.vjp(lambda a: op(x, w, a, b, seed=key), a)
    kept = [leaf for leaf in jax.tree.leaves(vjp) if leaf.size >= x.size]
    assert all(leaf.shape == w.shape or np.array_equal(leaf, x) for leaf in kept)


def test_no_64_bit_value_in_64_bit_mode():
    with jax.enable_x64(True):
        fn = lambda x, w, a, b: jnp.sum(  # noqa: E731
            jax_liger.lora_linear(x, w, a, b, dropout_p=0.1, seed=2**40)
        )
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((6, 8), (8, 5), (8, 2), (2, 5))]
        text = str(jax.make_jaxpr(jax.grad(fn, (0, 2, 3)))(*shapes))
        assert ":i64[" not in text and ":f64[" not in text and ":u64[" not in text


EMPTY = "an empty weight is what a sharded parameter looks like outside its module"
BAD = {
    "weight": ({"weight": (5, 7)}, ValueError, "weight must have shape {0} with D = 8, the last "
               "dimension of x (2, 8); got {1}", ("(O, D)", "(D, O)")),
    "lora-a": ({"lora_a": (3, 9)}, ValueError, "lora_a must have shape {0} with D = 8, the last "
               "dimension of x (2, 8), and r at least 1; got {1}", ("(r, D)", "(D, r)")),
    "lora-b": ({"lora_b": (5, 4)}, ValueError, "lora_b must have shape {0} with O = 5 of weight "
               "and r = 3 of lora_a; got {1}", ("(O, r)", "(r, O)")),
    "empty": ({"weight": (0,)}, ValueError, "weight must have shape {0} with D = 8, the last "
              "dimension of x (2, 8); got {1}; " + EMPTY, ("(O, D)", "(D, O)")),
    "bias": ({"bias": (4,)}, ValueError, "bias must have shape (O,) with O = 5 of weight; got {1}",
             ("", "")),
    "scaling": ({"scaling": float("inf")}, ValueError, "scaling must be finite; got inf", ("", "")),
    "dropout": ({"dropout_p": 1.0}, ValueError, "dropout_p must be in [0, 1); got 1.0", ("", "")),
    "no-dimension": ({"x": ()}, ValueError, "x must have at least one dimension, (..., D); got "
                     "shape ()", ("", "")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    changed, kind, message, letters = BAD[name]
    shapes = {"x": (2, 8), "weight": (5, 8), "lora_a": (3, 8), "lora_b": (5, 3), **changed}
    for transposed, package, zeros in ((0, torch_liger, torch.zeros), (1, jax_liger, jnp.zeros)):
        given = {}
        for key, value in shapes.items():
            turned = key != "x" and transposed and isinstance(value, tuple)
            value = value[::-1] if turned else value
            given[key] = zeros(value) if isinstance(value, tuple) else value
        bad = given[next(iter(changed))]
        shape = tuple(bad.shape) if hasattr(bad, "shape") else None
        with pytest.raises(kind) as caught:
            package.lora_linear(**given)
        assert str(caught.value) == message.format(letters[transposed], shape)


def test_bad_dtypes_and_what_only_one_framework_asks():
    x, w, a, b = (torch.zeros(s) for s in ((2, 8), (5, 8), (3, 8), (5, 3)))
    with pytest.raises(TypeError, match=r"^lora_a must have a dtype of .*; got int32$"):
        torch_liger.lora_linear(x, w, a.int(), b)
    with pytest.raises(ValueError, match="lora_b must be on x's device, cpu; got meta"):
        torch_liger.lora_linear(x, w, a, b.to("meta"))
    with pytest.raises(ValueError, match=r"^projections\[1\]\.lora_b must have .* of projections"):
        torch_liger.lora_linears(x, [(w, a, b), (w, a, b[:4])])
    with pytest.raises(ValueError, match="projections must hold at least one projection"):
        torch_liger.lora_linears(x, [])
    with pytest.raises(ValueError, match=r"seed must be given .* got None and 0\.5"):
        jax_liger.lora_linear(*(jnp.zeros(s) for s in ((2, 8), (8, 5), (8, 3), (3, 5))),
                              dropout_p=0.5)  # fmt: skip
