"""fused_linear_cross_entropy: values known by hand, in both frameworks.

Hidden states are multiplied by a head of ones on the diagonal, so that they are the logits.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_liger
import torch_liger
from compare import from_torch, poisoned, to_torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = ["pallas", "xla", "triton", "eager"]
KEPT, PARTS = "fast", 1  # bytes: as little as there can be


def flce(implementation, hidden, weight, labels, bias=None, upstream=None, **settings):
    """loss, dhidden, dweight and, with a bias, dbias; z_loss before them where there is one."""
    settings = {**settings, "implementation": implementation, "return_z_loss": True}
    given = [np.asarray(a, np.float32) for a in (hidden, weight, bias) if a is not None]
    class_weight, labels = settings.pop("class_weight", None), np.asarray(labels)
    if implementation in ("pallas", "xla"):
        if class_weight is not None:
            settings["class_weight"] = jnp.asarray(class_weight, jnp.float32)

        def fn(hidden, weight, *bias):
            biased = {"bias": bias[0]} if bias else {}
            loss, z = jax_liger.fused_linear_cross_entropy(
                hidden, weight, jnp.asarray(labels), **biased, **settings
            )
            return loss, z

        loss, vjp, z = jax.vjp(fn, *map(jnp.asarray, given), has_aux=True)
        dloss = jnp.ones(loss.shape) if upstream is None else jnp.asarray(upstream, jnp.float32)
        return [np.asarray(a) for a in (loss, z, *vjp(dloss))]
    tensors = [to_torch(a, DEVICE).requires_grad_() for a in given]
    biased = {"bias": tensors[2]} if len(tensors) == 3 else {}
    if class_weight is not None:
        settings["class_weight"] = to_torch(np.asarray(class_weight, np.float32), DEVICE)
    with poisoned():
        loss, z = torch_liger.fused_linear_cross_entropy(
            *tensors[:2], to_torch(labels, DEVICE), **biased, **settings
        )
        if upstream is None:
            (loss.sum() if loss.dim() else loss).backward()  # where summed, an expanded gradient
        else:
            loss.backward(to_torch(np.asarray(upstream, np.float32), DEVICE))
    return [from_torch(t.detach()) for t in (loss, z, *(t.grad for t in tensors))]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_soft_cap_is_inside_the_formula(implementation):
    # l = 30 tanh(124 / 30) = 29.98461 beside a logit of 0
    loss, _, dhidden, _ = flce(implementation, [[124.0, 0.0]], np.eye(2), [1], softcap=30.0)
    assert float(loss) == pytest.approx(29.98461, abs=1e-4)
    np.testing.assert_allclose(dhidden, [[1.0 - (29.98461 / 30.0) ** 2, -1.0]], rtol=1e-2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_z_loss_only_where_it_is_asked_for(implementation):
    hidden, weight, labels = np.zeros((3, 8)), np.zeros((1000, 8)), [5, -100, 7]
    bias = np.zeros(1000)
    loss, z, *_ = flce(implementation, hidden, weight, labels, bias)
    assert float(loss) == pytest.approx(6.907755) and float(z) == 0.0
    loss, z, *_, dbias = flce(implementation, hidden, weight, labels, bias, z_loss=1e-4)
    assert float(loss) == pytest.approx(6.907755 + 0.00477171, rel=1e-6)
    assert float(z) == pytest.approx(0.00477171, rel=1e-5)
    p = 1e-3 * (1.0 + 2e-4 * 6.907755)
    np.testing.assert_allclose(dbias[[0, 5]], [p, p - 0.5], rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_label_smoothing_spreads_over_all_classes(implementation):
    hidden = [[2.0, 0.0, 0.0, 0.0]]
    loss, _, dhidden, _ = flce(implementation, hidden, np.eye(4), [0], label_smoothing=0.1)
    assert float(loss) == pytest.approx(0.490753, abs=1e-6)
    np.testing.assert_allclose(dhidden, [[-0.213765, *[0.071255] * 3]], atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("memory", [KEPT, PARTS])
def test_an_ignored_row_changes_nothing(implementation, reduction, memory):
    rng = np.random.default_rng(0)
    hidden, weight, bias = rng.normal(size=(4, 6)), rng.normal(size=(9, 6)), rng.normal(size=9)
    labels = [2, 8, 0, 4]
    settings = {
        "class_weight": rng.uniform(0.2, 2.0, 9), "label_smoothing": 0.1, "softcap": 4.0,
        "z_loss": 1e-2, "reduction": reduction, "memory": memory,
    }  # fmt: skip
    alone = flce(implementation, hidden, weight, labels, bias, **settings)
    hidden, labels = np.insert(hidden, 1, 3.0, axis=0), np.insert(labels, 1, -100)
    with_it = flce(implementation, hidden, weight, labels, bias, **settings)
    assert not with_it[2][1].any()
    with_it[2] = np.delete(with_it[2], 1, axis=0)
    if reduction == "none":
        assert with_it[0][1] == 0.0 and with_it[1][1] == 0.0
        with_it[:2] = [np.delete(a, 1) for a in with_it[:2]]
    for ours, theirs in zip(with_it, alone, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("memory", [KEPT, PARTS])
def test_every_token_has_its_own_upstream_gradient(implementation, memory):
    rng = np.random.default_rng(1)
    hidden, weight, bias = rng.normal(size=(6, 8)), rng.normal(size=(11, 8)), rng.normal(size=11)
    labels, upstream = np.array([-100, 3, 0, -100, 10, 5]), np.array([0, 3, -1, 0.5, 2, 7.0])
    loss, _, dhidden, dweight, dbias = flce(
        implementation, hidden, weight, labels, bias, upstream, reduction="none", memory=memory
    )
    logits = hidden @ weight.T + bias
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    counted = labels != -100
    target = np.zeros_like(p)
    target[counted, labels[counted]] = 1.0
    d = (p - target) * (upstream * counted)[:, None]
    assert loss.shape == (6,) and not loss[~counted].any()
    np.testing.assert_allclose(loss[counted], -np.log(p[counted, labels[counted]]), rtol=1e-5)
    for ours, exact in ((dhidden, d @ weight), (dweight, d.T @ hidden), (dbias, d.sum(0))):
        np.testing.assert_allclose(ours, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_summed_loss_hands_back_an_expanded_gradient(implementation):
    rng = np.random.default_rng(2)
    given = (rng.normal(size=(5, 8)), rng.normal(size=(11, 8)), [1, 2, 3, -100, 4])
    expanded = flce(implementation, *given, reduction="none")
    explicit = flce(implementation, *given, upstream=np.ones(5), reduction="none")
    summed = flce(implementation, *given, reduction="sum")
    for a, b in zip(expanded[2:], explicit[2:], strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(summed[2:], explicit[2:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_logits_keep_their_probabilities(implementation):
    for size in (10.0, 40.0, 160.0):
        hidden = [[size, size - 1.0, -size]]
        loss, _, dhidden, _ = flce(implementation, hidden, np.eye(3), [1])
        assert float(loss) == pytest.approx(math.log(1.0 + math.e), rel=1e-5)
        p = 1.0 / (1.0 + math.exp(-1.0))
        np.testing.assert_allclose(dhidden, [[p, -p, 0.0]], atol=1e-5)
