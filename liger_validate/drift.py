"""How far models have drifted from the exact one, by module and by position, and what is expected.

Exact is transformers' own model with the checkpoint's numbers, rounded to the dtype, in float64.
(Its norms compute in float32 even then.) A model may be FACTOR times as far from it
as transformers' own model in the dtype is, and a floor.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from liger_validate.captures import LOGITS, Capture
from liger_validate.formulas import float64
from liger_validate.judge import ULP
from liger_validate.tensors import squares

FACTOR = 3.0
LEAST = 1e-3  # of the largest gradient: what smaller ones are measured by
FLOOR_ULPS = {"float32": 8.0, "bfloat16": 0.5}

ENDS = ("model.embed_tokens", "model.norm", LOGITS)

CountedAt = Callable[[str], np.ndarray]


@dataclass(frozen=True)
class Drift:
    """RMS of what a module's output, or a gradient, is off by in one model.

    kind: "output", "output gradient" (the loss's, at a module's output), "gradient" (a
    parameter's) or "curve".
    """

    model: str
    name: str
    error: float
    limit: float
    by_position: tuple[float, ...] = ()
    kind: str = "output"

    @property
    def inside(self) -> bool:
        """Whether it is in the band for the dtype."""
        return bool(np.isfinite(self.limit)) and self.error <= self.limit


def is_milestone(name: str) -> bool:
    """Whether a module, or its gradient, is a layer or one of the model's ends."""
    name = name.removesuffix(".output.grad")
    parts = name.split(".")
    return name in ENDS or (len(parts) == 3 and parts[1] == "layers")


def limit_of(plain: float, dtype: str) -> float:
    """The band beside a plain model's error."""
    return FACTOR * plain + FLOOR_ULPS[dtype] * ULP[dtype]


def _rms(a: np.ndarray, axis: int | None = None) -> np.ndarray:
    return np.sqrt(np.mean(a**2, axis=axis))


def _root_mean(sum_of_squares: float, size: int) -> float:
    return math.sqrt(sum_of_squares / size) if math.isfinite(sum_of_squares) else math.inf


def of_outputs(
    capture: Capture, plain: Capture, exact: Capture, counted_at: CountedAt
) -> list[Drift]:
    """Of every module that was captured in all three, in the order of the forward.

    counted_at: (B, T) by module, True where tokens count.
    """
    outputs = [c.outputs for c in (capture, plain, exact)]
    return _at_modules(capture, outputs, list(exact.outputs), counted_at, "output")


def of_output_gradients(
    capture: Capture, plain: Capture, exact: Capture, counted_at: CountedAt
) -> list[Drift]:
    """Of the loss's gradient at every such output, in the order of the backward."""
    gradients = [c.output_gradients for c in (capture, plain, exact)]
    names = [name for name in reversed(exact.outputs) if name in exact.output_gradients]
    return _at_modules(capture, gradients, names, counted_at, "output gradient")


def _at_modules(
    capture: Capture,
    arrays: list[dict[str, np.ndarray]],
    names: list[str],
    counted_at: CountedAt,
    kind: str,
) -> list[Drift]:
    """arrays: of the model, the plain one and the exact one, by name."""
    found, scales = [], {}
    if kind == "output gradient":
        scales = {name: _root_mean(squares(a), a.size) for name, a in arrays[2].items()}
    least = LEAST * max(scales.values(), default=0.0)
    for name in names:
        given, counted = [of.get(name) for of in arrays], counted_at(name)
        sizes = {None if a is None else a.size for a in given}
        if len(sizes) > 1 or given[2] is None or given[2].size % counted.size or not counted.any():
            continue  # experts' rows are not those of tokens
        actual, base, wanted = (
            float64(a).reshape(*counted.shape, -1) for a in given if a is not None
        )
        scale = max(float(_rms(wanted[counted])), least) or 1.0
        off = [a - wanted for a in (actual, base)]
        errors = [float(_rms(a[counted])) / scale for a in off]
        errors = [e if math.isfinite(e) else math.inf for e in errors]
        each = np.where(counted, _rms(off[0], -1), 0.0).max(0) / scale
        shown = name if kind == "output" else f"{name}.output.grad"
        limit = limit_of(errors[1], capture.dtype)
        by_position = tuple(float(value) for value in each)
        found.append(Drift(capture.label, shown, errors[0], limit, by_position, kind))
    return found


def of_gradients(
    captures: Mapping[str, Capture], exact: Capture, beside: Mapping[str, str]
) -> dict[str, list[Drift]]:
    """Of every parameter that all three have a gradient for, by model.

    In units of the parameter's own gradient, or a thousandth of the largest of all where that is
    more: a gradient that is nothing but rounding has no digits to agree in. Every array is fetched
    once, and dropped before the next parameter's.

    beside: by model the one that it is held beside.
    """
    sizes: dict[str, int] = {}
    own: dict[str, float] = {}
    off: dict[str, dict[str, float]] = {}
    for name, wanted in exact.gradients.items():
        sizes[name], own[name], off[name] = math.prod(wanted.shape), squares(wanted), {}
        for label, capture in captures.items():
            if name in capture.gradients:
                actual = capture.gradients[name]
                if actual.shape == wanted.shape:
                    off[name][label] = squares(actual, wanted)
    scales = {name: _root_mean(own[name], size) for name, size in sizes.items()}
    least = LEAST * max(scales.values(), default=0.0)
    found: dict[str, list[Drift]] = {label: [] for label in captures}
    for name, sums in off.items():
        scale = max(scales[name], least) or 1.0
        errors = {label: _root_mean(total, sizes[name]) / scale for label, total in sums.items()}
        for label in errors:
            if beside[label] in errors:
                limit = limit_of(errors[beside[label]], captures[label].dtype)
                found[label].append(
                    Drift(label, f"{name}.grad", errors[label], limit, kind="gradient")
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
    return Drift(label, name, off, limit_of(errors[1], dtype), tuple(actual), "curve")
