"""rms_norm and fused_add_rms_norm: every implementation against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_liger
import torch_liger
from compare import from_torch, judge, poisoned, to_torch
from liger_ops.drawing import draw_normal
from liger_ops.rms_norm import cases, oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(case: cases.Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The inputs, and the upstream gradients in the dtypes of the outputs they belong to."""
    inputs = case.draw()
    h_dtype = case.dtype
    if case.residual_dtype is not None:
        h_dtype = jnp.promote_types(case.dtype, case.residual_dtype).name
    y_dtype = h_dtype
    if case.weight_dtype is not None and case.casting_mode != "gemma":
        y_dtype = jnp.promote_types(h_dtype, case.weight_dtype).name
    rng = np.random.default_rng(1)
    upstream = {"dy": draw_normal(rng, case.shape, y_dtype)}
    if case.residual_dtype is not None:
        upstream["dh"] = draw_normal(rng, case.shape, h_dtype)
    return inputs, upstream


def exact_results(case, inputs, upstream):
    settings = {"eps": case.eps, "offset": case.offset}
    x, weight, residual = (inputs.get(name) for name in ("x", "weight", "residual"))
    return {
        **oracle.forward(x, weight, residual, **settings),
        **oracle.backward(x, weight, upstream["dy"], residual, upstream.get("dh"), **settings),
    }


def run(implementation, case, inputs, upstream):
    settings = {
        "eps": case.eps,
        "offset": case.offset,
        "casting_mode": case.casting_mode,
        "implementation": implementation,
    }
    order = [name for name in ("x", "residual", "weight") if name in inputs]
    if implementation in ("pallas", "xla"):
        return _run_jax(order, inputs, upstream, settings)
    return _run_torch(order, inputs, upstream, settings)


def _run_jax(order, inputs, upstream, settings):
    def fn(given):
        op = jax_liger.rms_norm if "residual" not in given else jax_liger.fused_add_rms_norm
        outputs = op(*(given[name] for name in order), **settings)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    outputs, vjp = jax.vjp(fn, {name: jnp.asarray(inputs[name]) for name in order})
    (gradients,) = vjp(tuple(jnp.asarray(g) for g in upstream.values()))
    results = dict(zip(("y", "h"), outputs, strict=False))
    results |= {f"d{name}": gradients[name] for name in order}
    return {name: np.asarray(value) for name, value in results.items()}


def _run_torch(order, inputs, upstream, settings):
    given = {name: to_torch(inputs[name], DEVICE).requires_grad_() for name in order}
    op = torch_liger.rms_norm if "residual" not in given else torch_liger.fused_add_rms_norm
    with poisoned():
        outputs = op(*given.values(), **settings)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = torch.autograd.grad(
            outputs, list(given.values()), [to_torch(g, DEVICE) for g in upstream.values()]
        )
    results = dict(zip(("y", "h"), outputs, strict=False))
    results |= {f"d{name}": g for name, g in zip(order, gradients, strict=True)}
    return {name: from_torch(value) for name, value in results.items()}


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_against_the_oracle(case):
    inputs, upstream = draw(case)
    judge(
        lambda implementation: run(implementation, case, inputs, upstream),
        exact_results(case, inputs, upstream),
        case.name,
    )


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
    for residual_dtype in (None, dtype):
        case = cases.Case("full", shape, dtype, dtype, residual_dtype)
        inputs, upstream = draw(case)
        judge(
            lambda implementation: run(implementation, case, inputs, upstream),  # noqa: B023
            exact_results(case, inputs, upstream),
            f"{shape} {dtype}",
        )


@pytest.mark.parametrize("eps, expected", [(1e-6, 0.707107), (1e-5, 0.301511)])
@pytest.mark.parametrize("implementation", ["pallas", "xla", "triton", "eager"])
def test_eps_is_inside_the_root(implementation, eps, expected):
    case = cases.Case("eps", (3, 64), weight_dtype=None, eps=eps)
    inputs = {"x": np.full(case.shape, 1e-3, np.float32)}
    upstream = {"dy": np.ones(case.shape, np.float32)}
    y = run(implementation, case, inputs, upstream)["y"]
    np.testing.assert_allclose(y, expected, rtol=2e-6)


@pytest.mark.parametrize("implementation", ["pallas", "xla", "triton", "eager"])
def test_a_row_of_zeros_gives_zeros_and_finite_gradients(implementation):
    case = cases.Case("zeros", (2, 64))
    inputs = case.draw()
    inputs["x"][0] = 0.0
    upstream = {"dy": np.ones(case.shape, np.float32)}
    results = run(implementation, case, inputs, upstream)
    assert not results["y"][0].any()
    assert all(np.isfinite(value).all() for value in results.values())


# Rows beyond the last, which fill up a block of them, have no scale then, nor have rows of zeros.
# Triton's interpreter says so of each.
without_eps = pytest.mark.filterwarnings(
    "ignore:(divide by zero|invalid value) encountered:RuntimeWarning"
)


@without_eps
@pytest.mark.parametrize("case", [
    cases.Case("no-eps", (33, 80), eps=0.0),
    cases.Case("no-eps-bfloat16", (3, 257), "bfloat16", "bfloat16", eps=0.0),
    cases.Case("no-eps-gemma", (5, 64), "bfloat16", "bfloat16", None, 0.0, 1.0, "gemma"),
    cases.Case("no-eps-wide", (3, 20000), eps=0.0),
    cases.Case("add-no-eps", (33, 80), "bfloat16", "bfloat16", "bfloat16", eps=0.0),
    cases.Case("add-no-eps-wide", (3, 20000), "bfloat16", "bfloat16", "bfloat16", eps=0.0),
], ids=lambda case: case.name)  # fmt: skip
def test_without_eps_against_the_oracle(case):
    inputs, upstream = draw(case)
    exact = exact_results(case, inputs, upstream)
    judge(lambda implementation: run(implementation, case, inputs, upstream), exact, case.name)


@without_eps
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(5, 80), (3, 20000)])
@pytest.mark.parametrize("kernel, plain", [("pallas", "xla"), ("triton", "eager")])
def test_a_row_of_zeros_without_eps_is_as_in_the_plain_version(kernel, plain, shape, residual):
    """It has no scale, and so no value; what has one beside it is not touched."""
    case = cases.Case("zeros", shape, residual_dtype="float32" if residual else None, eps=0.0)
    inputs, upstream = draw(case)
    for name in ("x", "residual")[: 1 + residual]:
        inputs[name][1] = 0.0
    results, expected = (run(name, case, inputs, upstream) for name in (kernel, plain))
    for name, value in expected.items():
        np.testing.assert_array_equal(np.isnan(results[name]), np.isnan(value), err_msg=name)
        np.testing.assert_allclose(results[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert np.isnan(results["y"][1]).all() and np.isfinite(results["y"][[0, 2]]).all()


@pytest.mark.parametrize("implementation", ["pallas", "triton"])
@pytest.mark.parametrize("dim", [128, 4096])
def test_weight_gradient_of_many_equal_rows_does_not_stall(implementation, dim):
    # A bfloat16 running sum of equal terms stops growing after 256 of them.
    rows = 65536 if DEVICE == "cuda" else 320
    case = cases.Case("equal-rows", (rows, dim), "bfloat16", "bfloat16")
    inputs = case.draw()
    inputs["x"][:] = inputs["x"][0]
    upstream = {"dy": np.ones(case.shape, inputs["x"].dtype)}
    dweight = run(implementation, case, inputs, upstream)["dweight"].astype(np.float64)
    x = inputs["x"][:1].astype(np.float64)
    normed = x / np.sqrt(np.mean(x * x) + case.eps)
    np.testing.assert_allclose(dweight, rows * normed[0], rtol=2.0**-7)
