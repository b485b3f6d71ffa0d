"""cross_entropy: every implementation against the oracle, and values known from elsewhere."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_liger
import torch_liger
from compare import from_torch, judge, poisoned, to_torch
from liger_ops.cross_entropy import cases, oracle
from liger_ops.cross_entropy.oracle import Arguments
from liger_ops.drawing import DTYPES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = ["pallas", "xla", "triton", "eager"]


def run(implementation, inputs, arguments, upstream=None):
    """loss, z_loss and dlogits."""
    settings = {**dataclasses.asdict(arguments), "implementation": implementation}
    settings["return_z_loss"] = True
    if upstream is None:
        ones = np.ones(inputs["labels"].shape if arguments.reduction == "none" else (), np.float32)
        upstream = [ones, np.zeros_like(ones)]
    if implementation in ("pallas", "xla"):
        logits, labels, weight = (
            None if name not in inputs else jnp.asarray(inputs[name])
            for name in ("logits", "labels", "class_weight")
        )
        settings["class_weight"] = weight
        outputs, vjp = jax.vjp(lambda x: jax_liger.cross_entropy(x, labels, **settings), logits)
        results = [*outputs, *vjp(tuple(map(jnp.asarray, upstream)))]
        return dict(zip(("loss", "z_loss", "dlogits"), map(np.asarray, results), strict=True))
    logits, labels, weight = (
        None if name not in inputs else to_torch(inputs[name], DEVICE)
        for name in ("logits", "labels", "class_weight")
    )
    logits.requires_grad_()
    with poisoned():
        outputs = torch_liger.cross_entropy(logits, labels, class_weight=weight, **settings)
        pairs = [
            (out, to_torch(d, DEVICE))
            for out, d in zip(outputs, upstream, strict=True)
            if out.requires_grad
        ]
        gradients = torch.autograd.grad([p[0] for p in pairs], logits, [p[1] for p in pairs])
    results = map(from_torch, (*outputs, *gradients))
    return dict(zip(("loss", "z_loss", "dlogits"), results, strict=True))


def check(case):
    inputs = case.draw()
    shape = case.shape[:-1] if case.arguments.reduction == "none" else ()
    rng = np.random.default_rng(1)
    upstream = [np.asarray(rng.standard_normal(shape), np.float32) for _ in range(2)]
    given = (inputs["logits"], inputs["labels"], inputs.get("class_weight"), case.arguments)
    exact = {**oracle.forward(*given), **oracle.backward(*given, *upstream)}
    judge(lambda name: run(name, inputs, case.arguments, upstream), exact, case.name)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_against_the_oracle(case):
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "shape", [(64, 128256), (33, 50257), (4097, 1000), (9, 262144), (70001, 33)]
)
def test_full_size_against_the_oracle(shape, dtype):
    check(cases.Case("full", shape, dtype))
    check(cases.Case("full", shape, dtype, Arguments(reduction="none", **cases.EVERYTHING), dtype))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_oracle_backward_by_finite_differences(reduction, weighted):
    arguments = Arguments(reduction=reduction, **cases.EVERYTHING)
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal((5, 7)), np.array([1, -100, 0, 6, 3])
    weight = rng.uniform(0.5, 2.0, 7) if weighted else None
    shape = labels.shape if reduction == "none" else ()
    upstream = [np.asarray(rng.standard_normal(shape)) for _ in range(2)]

    def total(x):
        out = oracle.forward(x, labels, weight, arguments)
        return np.sum(out["loss"] * upstream[0]) + np.sum(out["z_loss"] * upstream[1])

    gradient = oracle.backward(logits, labels, weight, arguments, *upstream)["dlogits"]
    direction, step = rng.standard_normal(logits.shape), 1e-6
    numeric = (total(logits + step * direction) - total(logits - step * direction)) / (2 * step)
    assert np.sum(gradient * direction) == pytest.approx(numeric, rel=1e-7)


def loss_of(implementation, logits, labels, dtype="float32", **arguments):
    inputs = {"logits": np.asarray(logits, DTYPES[dtype]), "labels": np.asarray(labels)}
    if "class_weight" in arguments:
        inputs["class_weight"] = np.asarray(arguments.pop("class_weight"), np.float32)
    return run(implementation, inputs, Arguments(**arguments))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("classes", [257, 1000, 32003, 50257])
def test_no_class_beyond_the_last_is_counted(implementation, classes, dtype):
    """Equal logits far below 0: a padded column's would outweigh them all."""
    out = loss_of(implementation, np.full((2, classes), -20.0), [0, classes - 1], dtype)
    assert float(out["loss"]) == pytest.approx(math.log(classes), rel=1e-6)
    np.testing.assert_allclose(out["dlogits"][0, 1:].astype(float), 0.5 / classes, rtol=1e-2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_soft_cap_is_inside_the_formula(implementation):
    # l = 30 tanh(124 / 30) = 29.98461 beside a logit of 0
    out = loss_of(implementation, [[124.0, 0.0]], [1], softcap=30.0)
    assert float(out["loss"]) == pytest.approx(29.98461, abs=1e-4)
    slope = 1.0 - (29.98461 / 30.0) ** 2
    np.testing.assert_allclose(out["dlogits"], [[slope, -1.0]], rtol=1e-2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_z_loss_only_where_it_is_asked_for(implementation):
    logits, labels = np.zeros((3, 1000)), [5, -100, 7]
    assert float(loss_of(implementation, logits, labels)["loss"]) == pytest.approx(6.907755)
    out = loss_of(implementation, logits, labels, z_loss=1e-4)
    assert float(out["loss"]) == pytest.approx(6.907755 + 0.00477171, rel=1e-6)
    assert float(out["z_loss"]) == pytest.approx(0.00477171, rel=1e-5)
    assert not out["dlogits"][1].any()
    p = 1e-3 * (1.0 + 2e-4 * 6.907755)
    np.testing.assert_allclose(out["dlogits"][0, [0, 5]] * 2.0, [p, p - 1.0], rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_label_smoothing_spreads_over_all_classes(implementation):
    out = loss_of(implementation, [[2.0, 0.0, 0.0, 0.0]], [0], label_smoothing=0.1)
    assert float(out["loss"]) == pytest.approx(0.490753, abs=1e-6)
    np.testing.assert_allclose(out["dlogits"], [[-0.213765, *[0.071255] * 3]], atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_an_ignored_row_changes_nothing(implementation, reduction):
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal((4, 9)), np.array([2, 8, 0, 4])
    weight = rng.uniform(0.2, 2.0, 9)
    settings = {"class_weight": weight, "reduction": reduction, **cases.EVERYTHING}
    alone = loss_of(implementation, logits, labels, **settings)
    # What it holds does not matter either.
    for held in (0.0, np.nan, -np.inf):
        rows = np.insert(logits, 1, held, axis=0)
        out = loss_of(implementation, rows, np.insert(labels, 1, -100), **settings)
        assert not out["dlogits"][1].any()
        others = np.delete(out["dlogits"], 1, axis=0)
        np.testing.assert_allclose(others, alone["dlogits"], rtol=1e-6)
        if reduction == "none":
            assert out["loss"][1] == 0
            out["loss"] = np.delete(out["loss"], 1)
        np.testing.assert_allclose(out["loss"], alone["loss"], rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [0, 1, 4097 if DEVICE == "cuda" else 97])
@pytest.mark.parametrize("settings", [{}, {"num_items": 0}, {"z_loss": 1e-3}])
def test_nothing_supervised_gives_zero_and_zeros(implementation, rows, settings):
    out = loss_of(implementation, np.ones((rows, 5)), np.full((rows,), -100), **settings)
    assert out["loss"] == 0 and out["z_loss"] == 0
    assert out["dlogits"].shape == (rows, 5) and not out["dlogits"].any()


# NumPy, which computes for Triton's interpreter, warns of what becomes NaN on purpose.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_infinite_logits(implementation):
    """Masked classes cost nothing; a masked label costs everything."""
    logits = np.array([[1.0, -np.inf, 2.0], [1.0, -np.inf, 2.0], [-np.inf] * 3])
    out = loss_of(implementation, logits, [0, 1, 2], reduction="none")
    assert out["loss"][0] == pytest.approx(math.log1p(math.e), rel=1e-6)
    assert out["loss"][1] == np.inf and np.isnan(out["loss"][2])
    assert out["dlogits"][0, 1] == 0 and np.isfinite(out["dlogits"][:2]).all()
    assert out["dlogits"][1, 1] == -1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("label", [-1, -99, 5, 6, 2**31 - 1, -(2**31)])
def test_an_invalid_label_is_seen(implementation, label):
    labels = [1, label, -100, 4]
    out = loss_of(implementation, np.ones((4, 5)), labels, reduction="none", **cases.EVERYTHING)
    assert np.isnan(out["loss"]).tolist() == [False, True, False, False]
    assert np.isnan(out["dlogits"]).all(axis=1).tolist() == [False, True, False, False]
    mean = loss_of(implementation, np.ones((4, 5)), labels)
    assert np.isnan(mean["loss"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_token_has_its_own_upstream_gradient(implementation):
    rng = np.random.default_rng(0)
    inputs = {"logits": rng.standard_normal((6, 11), np.float32)}
    inputs["labels"] = np.array([-100, 3, 10, -100, 0, 7])
    upstream = [np.array([0, 3, -1, 0.5, 2, 7], np.float32), np.zeros(6, np.float32)]
    arguments = Arguments(reduction="none")
    out = run(implementation, inputs, arguments, upstream)
    assert out["loss"].shape == (6,) and not out["loss"][[0, 3]].any()
    exact = oracle.backward(inputs["logits"], inputs["labels"], None, arguments, upstream[0])
    np.testing.assert_allclose(out["dlogits"], exact["dlogits"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_metrics(implementation):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((5, 3000)).astype(np.float32)
    logits[1, [7, 2999]] = 9.0  # the first of equals
    logits[2] = -np.inf
    labels = np.array([int(logits[0].argmax()), 7, -100, 12, 5])
    logits[3] = [*[-np.inf] * 2999, 0.0]
    settings = {"return_metrics": True, "implementation": implementation}
    if implementation in ("pallas", "xla"):
        given = jnp.asarray(logits), jnp.asarray(labels)
        loss, metrics = jax_liger.cross_entropy(*given, **settings)
        plain = jax_liger.cross_entropy(*given)
    else:
        given = to_torch(logits, DEVICE).requires_grad_(), to_torch(labels, DEVICE)
        loss, metrics = torch_liger.cross_entropy(*given, **settings)
        plain = torch_liger.cross_entropy(*given).detach()
        loss = loss.detach()
        assert not metrics.token_accuracy.requires_grad
    expected = [labels[0], 7, -1, 2999, logits[4].argmax()]
    assert metrics.predicted_tokens.tolist() == expected
    assert float(metrics.token_accuracy) == pytest.approx(0.5)
    assert float(loss) == float(plain) == np.inf


BAD = {
    "labels-shape": ({"labels": ((3,), "int32")}, ValueError,
                     "labels must have the shape of logits (2, 5) without its last dimension; got "
                     "(3,)"),
    "labels-dtype": ({"labels": ((2,), "float32")}, TypeError,
                     "labels must have an integer dtype; got float32"),
    "logits-dtype": ({"logits": ((2, 5), "int32")}, TypeError,
                     "logits must have a dtype of 'float32', 'bfloat16', 'float16', 'float64'; got "
                     "int32"),
    "no-class": ({"logits": ((2, 0), "float32")}, ValueError,
                 "logits must be (..., V) with V of at least 1; got (2, 0)"),
    "class-weight": ({"class_weight": ((4,), "float32")}, ValueError,
                     "class_weight must have shape (V,) with V = 5, the last dimension of logits "
                     "(2, 5); got (4,)"),
    "label-smoothing": ({"label_smoothing": 1.5}, ValueError,
                        "label_smoothing must be in [0, 1]; got 1.5"),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap must be None or above 0; got 0.0"),
    "z-loss": ({"z_loss": -1.0}, ValueError, "z_loss must be at least 0; got -1.0"),
    "reduction": ({"reduction": "avg"}, ValueError,
                  "reduction must be one of 'mean', 'sum', 'none'; got 'avg'"),
    "num-items": ({"reduction": "sum", "num_items": 3}, ValueError,
                  "num_items takes the place of the mean's count, so reduction must be 'mean'; got "
                  "'sum'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    changed, kind, message = BAD[name]
    for package, make in (
        (jax_liger, lambda shape, dtype: jnp.zeros(shape, dtype)),
        (torch_liger, lambda shape, dtype: torch.zeros(shape, dtype=getattr(torch, dtype))),
    ):
        given = {"logits": ((2, 5), "float32"), "labels": ((2,), "int32"), **changed}
        given = {key: make(*v) if isinstance(v, tuple) else v for key, v in given.items()}
        with pytest.raises(kind) as caught:
            package.cross_entropy(given.pop("logits"), given.pop("labels"), **given)
        assert str(caught.value) == message
