"""How far models have drifted from the exact one, by module and by position, and what is expected.

Exact is transformers' own model with the checkpoint's numbers, rounded to the dtype, in float64.
(Its norms compute in float32 even then.) A model may be FACTOR times as far from it
as transformers' own model in the dtype is, and a floor.
"""

from dataclasses import dataclass

import numpy as np

from liger_validate.captures import Capture
from liger_validate.judge import ULP

FACTOR = 3.0
FLOOR_ULPS = {"float32": 8.0, "bfloat16": 0.5}


@dataclass(frozen=True)
class Drift:
    """One module's output, or one parameter's gradient, in one model: RMS of what it is off by."""

    model: str
    name: str
    error: float
    limit: float
    by_position: tuple[float, ...] = ()

    @property
    def inside(self) -> bool:
        """Whether it is in the band for the dtype."""
        return bool(np.isfinite(self.limit)) and self.error <= self.limit


def limit_of(plain: float, dtype: str) -> float:
    """The band beside a plain model's error."""
    return FACTOR * plain + FLOOR_ULPS[dtype] * ULP[dtype]


def _rms(a: np.ndarray, axis: int | None = None) -> np.ndarray:
    return np.sqrt(np.mean(a**2, axis=axis))


def _relative(actual: np.ndarray, exact: np.ndarray, scale: float) -> float:
    difference = actual.astype(np.float64) - exact
    if not np.isfinite(difference).all():
        return float("inf")
    return float(_rms(difference) / scale) if scale else float(_rms(difference))


def of_outputs(
    capture: Capture, plain: Capture, exact: Capture, counted: np.ndarray
) -> list[Drift]:
    """Of every module that was captured in all three, in the order of the forward."""
    found = []
    for name, wanted in exact.outputs.items():
        arrays = [c.outputs.get(name) for c in (capture, plain)]
        if any(a is None or a.size != wanted.size for a in arrays):
            continue
        if wanted.size % counted.size:
            continue  # experts' rows are not those of tokens
        wanted, actual, base = (
            np.asarray(a).reshape(*counted.shape, -1).astype(np.float64) for a in (wanted, *arrays)
        )
        scale = float(_rms(wanted[counted]))
        errors = [_relative(a[counted], wanted[counted], scale) for a in (actual, base)]
        each = np.where(counted, _rms(actual - wanted, -1), 0.0).max(0) / (scale or 1.0)
        limit = limit_of(errors[1], capture.dtype)
        by_position = tuple(float(value) for value in each)
        found.append(Drift(capture.label, name, errors[0], limit, by_position))
    return found


def of_gradients(capture: Capture, plain: Capture, exact: Capture) -> list[Drift]:
    """Of every parameter that all three have a gradient for.

    In units of the parameter's own gradient, or a thousandth of the largest of all where that is
    more: a gradient that is nothing but rounding has no digits to agree in.
    """
    scales = {name: float(_rms(g.astype(np.float64))) for name, g in exact.gradients.items()}
    least = 1e-3 * max(scales.values(), default=0.0)
    found = []
    for name, wanted in exact.gradients.items():
        arrays = [c.gradients.get(name) for c in (capture, plain)]
        if any(a is None or a.shape != wanted.shape for a in arrays):
            continue
        scale = max(scales[name], least)
        errors = [_relative(a, wanted.astype(np.float64), scale) for a in arrays if a is not None]
        found.append(
            Drift(capture.label, f"{name}.grad", errors[0], limit_of(errors[1], capture.dtype))
        )
    return found


def of_numbers(
    label: str, name: str, actual: list[float], plain: list[float], exact: list[float], dtype: str
) -> Drift:
    """Of a curve, such as the losses of training steps: the largest relative difference."""
    errors = [
        max((abs(a - e) / max(abs(e), 1e-12) for a, e in zip(curve, exact, strict=True)), default=0)
        for curve in (actual, plain)
    ]
    off = errors[0] if np.isfinite(errors[0]) else float("inf")
    return Drift(label, name, off, limit_of(errors[1], dtype), tuple(actual))
