"""The oracles' own gradients against finite differences in float64."""

import numpy as np
import pytest

from liger_ops.rms_norm import oracle


def central_difference(fn, array, direction, step=1e-6):
    return (fn(array + step * direction) - fn(array - step * direction)) / (2 * step)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("with_residual", [True, False])
def test_rms_norm_backward(offset, with_weight, with_residual):
    rng = np.random.default_rng(0)
    shape, eps = (3, 2, 7), 1e-2
    inputs = {"x": rng.standard_normal(shape)}
    inputs["weight"] = rng.standard_normal(shape[-1]) if with_weight else None
    inputs["residual"] = rng.standard_normal(shape) if with_residual else None
    dy = rng.standard_normal(shape)
    dh = rng.standard_normal(shape) if with_residual else None

    def loss(**changed):
        given = {**inputs, **changed}
        outputs = oracle.forward(
            given["x"], given["weight"], given["residual"], eps=eps, offset=offset
        )
        return np.sum(outputs["y"] * dy) + (np.sum(outputs["h"] * dh) if with_residual else 0.0)

    gradients = oracle.backward(
        inputs["x"], inputs["weight"], dy, inputs["residual"], dh, eps=eps, offset=offset
    )
    given = {name: value for name, value in inputs.items() if value is not None}
    assert set(gradients) == {f"d{name}" for name in given}
    for name, value in given.items():
        direction = rng.standard_normal(value.shape)
        numeric = central_difference(lambda v: loss(**{name: v}), value, direction)  # noqa: B023
        assert np.sum(gradients[f"d{name}"] * direction) == pytest.approx(numeric, rel=1e-7)
