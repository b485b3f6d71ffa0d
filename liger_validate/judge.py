"""The judge: one yardstick for every implementation of every operation.

For each output and each gradient, the error against the float64 oracle must be at most 1.5 times
that of the plain version in the same framework and dtype, plus a floor. Two errors are looked at:
the root mean square of the difference over that of the exact values, and the largest difference
over the largest exact value.

The floor is in units of the last place: of the result's dtype, for its one rounding, and of
float32, in which everything before that rounding is computed.

               result's dtype   float32
    RMS             0.1            2
    largest         1              8

Results are mappings by name, or single arrays: of NumPy (bfloat16 by ml_dtypes), JAX or PyTorch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

FACTOR = 1.5
PLAIN = {"pallas": "xla", "triton": "eager"}
ULP = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

Results = Mapping[str, np.ndarray]
Given = Mapping[str, Any] | Any


@dataclass(frozen=True)
class Error:
    """How far a result is from the exact one, in the two ways that are judged."""

    rms: float
    largest: float

    @classmethod
    def between(
        cls, actual: np.ndarray, exact: np.ndarray, unit: np.ndarray | None = None
    ) -> "Error":
        """Of `actual` from `exact`; infinite where `actual` is not finite.

        unit: over whose values the difference is taken; those of `exact` if left out.
        """
        if actual.shape != exact.shape:
            raise AssertionError(f"shape {actual.shape} is not the exact {exact.shape}")
        with np.errstate(invalid="ignore"):  # NaN of a small dtype warns when it is cast
            exact = exact.astype(np.float64)
            difference = np.abs(actual.astype(np.float64) - exact)
        if not np.all(np.isfinite(difference)):
            return cls(np.inf, np.inf)
        if difference.size == 0 or not difference.any():
            return cls(0.0, 0.0)
        unit = exact if unit is None else unit
        scale = np.sqrt(np.mean(unit**2)), np.max(np.abs(unit))
        if scale[1] == 0.0:
            return cls(np.inf, np.inf)
        return cls(
            float(np.sqrt(np.mean(difference**2)) / scale[0]), float(difference.max() / scale[1])
        )

    @classmethod
    def floor(cls, dtype: str) -> "Error":
        """What any result of this dtype may be off by, however near its plain version is."""
        return cls(
            0.1 * ULP[dtype] + 2 * ULP["float32"],
            1.0 * ULP[dtype] + 8 * ULP["float32"],
        )

    def within(self, limit: "Error") -> bool:
        """Whether neither is over the limit's."""
        return self.rms <= limit.rms and self.largest <= limit.largest


def limit_of(base: Error, dtype: str) -> Error:
    """The largest error that passes, beside a plain version's error of `base`."""
    floor = Error.floor(dtype)
    return Error(FACTOR * base.rms + floor.rms, FACTOR * base.largest + floor.largest)


def limit_of_pair(bases: Iterable[Error], dtype: str) -> Error:
    """How far two kernels may be apart, beside their plain versions' errors."""
    terms = [*bases, Error.floor(dtype)]
    return Error(sum(e.rms for e in terms), sum(e.largest for e in terms))


def assert_matches_oracle(actual: Given, plain: Given, exact: Given, label: str = "") -> None:
    """Raises AssertionError naming each result of `actual` that is off the yardstick.

    Args:
        actual: the results that are judged, such as outputs and gradients by name.
        plain: those of the plain version in the same framework, whose dtypes they must have.
        exact: the right ones, in float64.
        label: what the message begins with.
    """
    __tracebackhide__ = True
    actual, plain, exact = _arrays(actual), _arrays(plain), _arrays(exact)
    if set(actual) != set(exact):
        raise AssertionError(f"{label}: results {sorted(actual)} are not the exact {sorted(exact)}")
    _check_names(label, exact, plain=plain)
    failures = []
    for name, wanted in exact.items():
        dtype = actual[name].dtype.name
        if dtype != plain[name].dtype.name:
            failures.append(f"{name}: dtype {dtype}, the plain version's {plain[name].dtype.name}")
            continue
        error, base = Error.between(actual[name], wanted), Error.between(plain[name], wanted)
        allowed = limit_of(base, dtype)
        for kind in ("rms", "largest"):
            limit = getattr(allowed, kind)
            if not getattr(error, kind) <= limit:
                failures.append(
                    f"{name}: {kind} error {getattr(error, kind):.3e} is over {limit:.3e} "
                    f"(plain version {getattr(base, kind):.3e})"
                )
    if failures:
        raise AssertionError("\n".join([f"{label} against the oracle:", *failures]))


def assert_agree(
    first: Given,
    second: Given,
    plains: tuple[Given, Given],
    exact: Given,
    label: str = "",
) -> None:
    """Two kernels differ by no more than the errors of their plain versions together, and a floor.

    Each alone may be 1.5 times as far from the oracle, so this catches two that err to either side.

    Args:
        first, second: the results of two implementations, of two frameworks say.
        plains: those of their plain versions, in the same order.
        exact: the right ones, in float64.
        label: what the message begins with.
    """
    __tracebackhide__ = True
    first, second, exact = _arrays(first), _arrays(second), _arrays(exact)
    plain_of_first, plain_of_second = (_arrays(plain) for plain in plains)
    _check_names(label, exact, first=first, second=second,
                 plain_of_first=plain_of_first, plain_of_second=plain_of_second)  # fmt: skip
    for name, wanted in exact.items():
        bases = [Error.between(plain[name], wanted) for plain in (plain_of_first, plain_of_second)]
        apart = Error.between(first[name], second[name])
        limits = limit_of_pair(bases, first[name].dtype.name)
        for kind in ("rms", "largest"):
            limit = getattr(limits, kind)
            if not getattr(apart, kind) <= limit:
                raise AssertionError(
                    f"{label} {name}: {kind} difference {getattr(apart, kind):.3e} is over the sum "
                    f"of the plain versions' errors {limit:.3e}"
                )


def _check_names(label: str, exact: Results, **found: Results) -> None:
    __tracebackhide__ = True
    for what, results in found.items():
        missing = set(exact) - set(results)
        if missing:
            raise AssertionError(
                f"{label}: {what} has the results {sorted(results)} and not {sorted(missing)}"
            )


def _arrays(given: Given) -> Results:
    """By name, in NumPy; a single array is the one named "result"."""
    named = given if isinstance(given, Mapping) else {"result": given}
    return {name: _array(value) for name, value in named.items()}


def _array(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):  # a tensor, whose framework need not be imported for others
        from liger_validate.tensors import from_torch

        return from_torch(value)
    return np.asarray(value)
