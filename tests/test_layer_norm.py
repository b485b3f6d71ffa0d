"""layer_norm: every implementation against the oracle, and what users do with it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_liger
import jax_liger.linen
import jax_liger.nnx
import torch_liger
from compare import assert_matches_oracle, from_torch, judge, poisoned, to_torch
from liger_ops.drawing import draw_normal
from liger_ops.layer_norm import cases, oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = ["pallas", "xla", "triton", "eager"]


def upstream(case: cases.Case) -> np.ndarray:
    dtypes = [d for d in (case.dtype, case.weight_dtype, case.bias_dtype) if d is not None]
    y_dtype = functools.reduce(jnp.promote_types, dtypes, dtypes[0])
    return draw_normal(np.random.default_rng(1), case.shape, jnp.dtype(y_dtype).name)


def run(implementation, inputs, dy, eps=1e-5):
    """y, and the gradient for each of `inputs`, x and where given weight and bias."""
    settings = {"eps": eps, "implementation": implementation}
    if implementation in ("pallas", "xla"):
        arrays = {name: jnp.asarray(value) for name, value in inputs.items()}
        y, vjp = jax.vjp(lambda given: jax_liger.layer_norm(**given, **settings), arrays)
        results = {"y": y} | {f"d{name}": g for name, g in vjp(jnp.asarray(dy))[0].items()}
        return {name: np.asarray(value) for name, value in results.items()}
    tensors = {n: to_torch(value, DEVICE).requires_grad_() for n, value in inputs.items()}
    with poisoned():
        y = torch_liger.layer_norm(**tensors, **settings)
        gradients = torch.autograd.grad(y, list(tensors.values()), to_torch(dy, DEVICE))
    results = {"y": y} | {f"d{name}": g for name, g in zip(tensors, gradients, strict=True)}
    return {name: from_torch(value) for name, value in results.items()}


def exact_results(inputs, dy, eps=1e-5):
    given = [inputs.get(name) for name in ("x", "weight", "bias")]
    return {**oracle.forward(*given, eps=eps), **oracle.backward(*given, dy, eps=eps)}


def check(case):
    inputs, dy = case.draw(), upstream(case)
    judge(
        lambda implementation: run(implementation, inputs, dy, case.eps),
        exact_results(inputs, dy, case.eps),
        case.name,
    )


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_against_the_oracle(case):
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "shape",
    [
        *((2048, 4096), (4099, 768), (1031, 8192), (515, 16384), (70001, 64)),
        *((257, 32769), (65536, 80), (131, 65536), (33, 3000)),
    ],
)
def test_full_size_against_the_oracle(shape, dtype):
    for center in (0.0, 1e3):
        check(cases.Case(f"{shape} {dtype}", shape, dtype, dtype, dtype, center=center))


@pytest.mark.parametrize("shape", [(33, 80), (2, 20000)])
def test_the_judge_sees_a_variance_that_cancels(shape):
    case = cases.Case("offset", shape, center=1e3)
    inputs, dy = case.draw(), upstream(case)
    results, exact = run("eager", inputs, dy), exact_results(inputs, dy)
    x = inputs["x"]
    mean = np.mean(x, -1, keepdims=True)
    variance = np.mean(x * x, -1, keepdims=True) - mean * mean
    y = (x - mean) / np.sqrt(np.abs(variance) + case.eps) * inputs["weight"] + inputs["bias"]
    with pytest.raises(AssertionError, match="y: rms error"):
        assert_matches_oracle({**results, "y": y}, results, exact)


@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_oracle_backward_by_finite_differences(with_weight, with_bias):
    rng = np.random.default_rng(0)
    shape, eps, step = (3, 2, 7), 1e-2, 1e-6
    inputs = {"x": rng.standard_normal(shape)}
    if with_weight:
        inputs["weight"] = rng.standard_normal(shape[-1])
    if with_bias:
        inputs["bias"] = rng.standard_normal(shape[-1])
    dy = rng.standard_normal(shape)
    gradients = oracle.backward(inputs["x"], inputs.get("weight"), inputs.get("bias"), dy, eps=eps)
    assert set(gradients) == {f"d{name}" for name in inputs}
    for name, value in inputs.items():
        direction = rng.standard_normal(value.shape)
        ahead, behind = (
            np.sum(dy * oracle.forward(**{**inputs, name: value + s * direction}, eps=eps)["y"])
            for s in (step, -step)
        )
        numeric = (ahead - behind) / (2 * step)
        assert np.sum(gradients[f"d{name}"] * direction) == pytest.approx(numeric, rel=1e-7)


@pytest.mark.parametrize("eps, expected", [(1e-6, 0.707107), (1e-5, 0.301511)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_eps_is_inside_the_root(implementation, eps, expected):
    x = np.tile(np.array([1e-3, -1e-3], np.float32), (3, 32))
    y = run(implementation, {"x": x}, np.ones_like(x), eps)["y"]
    np.testing.assert_allclose(np.abs(y), expected, rtol=2e-6)


@pytest.mark.parametrize("dim", [96, 10000, 20000])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_of_equal_numbers_gives_the_bias_and_finite_gradients(implementation, dim):
    inputs = cases.Case("equal", (2, dim)).draw()
    inputs["x"][0], inputs["x"][1] = 0.0, 1.5
    results = run(implementation, inputs, np.ones((2, dim), np.float32))
    np.testing.assert_allclose(results["y"], np.stack([inputs["bias"]] * 2), atol=1e-6)
    assert all(np.isfinite(value).all() for value in results.values())


@pytest.mark.parametrize("dim", [96, 20000])
@pytest.mark.parametrize("implementation", ["pallas", "triton"])
def test_equal_numbers_that_float32_cannot_average_stay_equal(implementation, dim):
    # The mean of 1000.1 is off by a unit in the last place, as is every x less it: 300 times too
    # much for the plain formula, since r is 1 / sqrt(eps).
    x = np.full((2, dim), 1000.1, np.float32)
    y = run(implementation, {"x": x}, np.ones_like(x))["y"]
    np.testing.assert_allclose(y, 0.0, atol=1e-6)


# Rows beyond the last, which fill up a block of them, have no scale then, nor have rows of zeros.
# Triton's interpreter says so of each.
without_eps = pytest.mark.filterwarnings(
    "ignore:(divide by zero|invalid value) encountered:RuntimeWarning"
)


@without_eps
@pytest.mark.parametrize("shape", [(33, 80), (3, 257), (5, 9001), (3, 20000)])
def test_without_eps_against_the_oracle(shape):
    check(cases.Case("no-eps", shape, eps=0.0))


@without_eps
@pytest.mark.parametrize("shape", [(5, 80), (5, 9001), (3, 20000)])
@pytest.mark.parametrize("kernel, plain", [("pallas", "xla"), ("triton", "eager")])
def test_a_row_of_zeros_without_eps_is_as_in_the_plain_version(kernel, plain, shape):
    """It has no scale, and so no value; what has one beside it is not touched."""
    case = cases.Case("zeros", shape, eps=0.0)
    inputs, dy = case.draw(), upstream(case)
    inputs["x"][1] = 0.0
    results, expected = (run(name, inputs, dy, 0.0) for name in (kernel, plain))
    for name, value in expected.items():
        np.testing.assert_array_equal(np.isnan(results[name]), np.isnan(value), err_msg=name)
        np.testing.assert_allclose(results[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert np.isnan(results["y"][1]).all() and np.isfinite(results["y"][[0, 2]]).all()


@pytest.mark.parametrize("dim", [96, 1500, 2048])
def test_outliers_at_any_column(dim):
    # A kernel that sums about a few of a row's numbers, or about one, has to see that they are far
    # from all others: a hundred and more standard deviations of these.
    case = cases.Case("outliers", (4, dim))
    inputs, dy = case.draw(), upstream(case)
    for row, columns in enumerate(([0], [dim - 1], range(0, dim, dim // 4), range(dim // 4))):
        inputs["x"][row, list(columns)] += 1e4
    judge(lambda name: run(name, inputs, dy), exact_results(inputs, dy), "outliers")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_of_no_numbers(implementation):
    inputs = {"x": np.ones((3, 0)), "weight": np.ones(0), "bias": np.ones(0)}
    inputs = {name: value.astype(np.float32) for name, value in inputs.items()}
    results = run(implementation, inputs, inputs["x"])
    assert {name: value.shape for name, value in results.items()} == {
        "y": (3, 0), "dx": (3, 0), "dweight": (0,), "dbias": (0,),
    }  # fmt: skip


@pytest.mark.parametrize("implementation", ["pallas", "triton"])
@pytest.mark.parametrize("dim", [128, 4096])
def test_gradients_of_many_equal_rows_do_not_stall(implementation, dim):
    # A bfloat16 running sum of equal terms stops growing after 256 of them.
    rows = 65536 if DEVICE == "cuda" else 320
    inputs = cases.Case("rows", (rows, dim), "bfloat16", "bfloat16", "bfloat16").draw()
    inputs["x"][:] = inputs["x"][0]
    results = run(implementation, inputs, np.ones_like(inputs["x"]))
    x = inputs["x"][:1].astype(np.float64)
    n = oracle.forward(x)["y"][0]
    np.testing.assert_allclose(results["dweight"].astype(float), rows * n, rtol=2.0**-7, atol=1e-3)
    np.testing.assert_allclose(results["dbias"].astype(float), rows, rtol=2.0**-8)


DTYPES = "'float32', 'bfloat16', 'float16', 'float64'"
BAD = {
    "mismatched-weight": ([((2, 8), "float32"), ((7,), "float32")], {}, ValueError,
                          "weight must have shape (D,) with D = 8, the last dimension of x (2, 8); "
                          "got (7,)"),
    "mismatched-bias": ([((2, 8), "float32"), ((8,), "float32"), ((1, 8), "float32")], {},
                        ValueError,
                        "bias must have shape (D,) with D = 8, the last dimension of x (2, 8); got "
                        "(1, 8)"),
    "integer-x": ([((2, 8), "int32")], {}, TypeError,
                  f"x must have a dtype of {DTYPES}; got int32"),
    "integer-weight": ([((2, 8), "float32"), ((8,), "int32")], {}, TypeError,
                       f"weight must have a dtype of {DTYPES}; got int32"),
    "integer-bias": ([((2, 8), "float32"), ((8,), "float32"), ((8,), "int32")], {}, TypeError,
                     f"bias must have a dtype of {DTYPES}; got int32"),
    "no-dimension": ([((), "float32")], {}, ValueError,
                     "x must have at least one dimension, (..., D); got shape ()"),
    "negative-eps": ([((2, 8), "float32")], {"eps": -1e-6}, ValueError,
                     "eps must be at least 0; got -1e-06"),
    "nan-eps": ([((2, 8), "float32")], {"eps": float("nan")}, ValueError,
                "eps must be at least 0; got nan"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    described, settings, kind, message = BAD[name]
    for package, make in (
        (jax_liger, lambda shape, dtype: jnp.zeros(shape, dtype)),
        (torch_liger, lambda shape, dtype: torch.zeros(shape, dtype=getattr(torch, dtype))),
    ):
        with pytest.raises(kind) as caught:
            package.layer_norm(*(make(*d) for d in described), **settings)
        assert str(caught.value) == message


def test_bad_device_and_implementation():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="bias must be on x's device, cpu; got meta"):
        torch_liger.layer_norm(x, None, torch.zeros(8, device="meta"))
    with pytest.raises(ValueError, match="must be one of None, 'triton', 'eager'; got 'pallas'"):
        torch_liger.layer_norm(x, implementation="pallas")
