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
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

FACTOR = 1.5
PLAIN = {"pallas": "xla", "triton": "eager"}
ULP = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

Results = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Error:
    """How far a result is from the exact one, in the two ways that are judged."""

    rms: float
    largest: float

    @classmethod
    def between(cls, actual: np.ndarray, exact: np.ndarray) -> "Error":
        """Of `actual` from `exact`; infinite where `actual` is not finite."""
        if actual.shape != exact.shape:
            raise AssertionError(f"shape {actual.shape} is not the exact {exact.shape}")
        difference = np.abs(actual.astype(np.float64) - exact)
        if not np.all(np.isfinite(difference)):
            return cls(np.inf, np.inf)
        if difference.size == 0 or not difference.any():
            return cls(0.0, 0.0)
        scale = np.sqrt(np.mean(exact**2)), np.max(np.abs(exact))
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


def limit_of(base: Error, dtype: str) -> Error:
    """The largest error that passes, beside a plain version's error of `base`."""
    floor = Error.floor(dtype)
    return Error(FACTOR * base.rms + floor.rms, FACTOR * base.largest + floor.largest)


def assert_matches_oracle(actual: Results, plain: Results, exact: Results, label: str = "") -> None:
    """Raises AssertionError naming each result of `actual` that is off the yardstick."""
    if set(actual) != set(exact):
        raise AssertionError(f"{label}: results {sorted(actual)} are not the exact {sorted(exact)}")
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
    first: Results,
    second: Results,
    plains: tuple[Results, Results],
    exact: Results,
    label: str = "",
) -> None:
    """Two kernels differ by no more than the errors of their plain versions together, and a floor.

    Each alone may be 1.5 times as far from the oracle, so this catches two that err to either side.
    """
    for name, wanted in exact.items():
        bases = [Error.between(plain[name], wanted) for plain in plains]
        apart = Error.between(first[name], second[name].astype(np.float64))
        floor = Error.floor(first[name].dtype.name)
        for kind in ("rms", "largest"):
            limit = sum(getattr(base, kind) for base in bases) + getattr(floor, kind)
            if not getattr(apart, kind) <= limit:
                raise AssertionError(
                    f"{label} {name}: {kind} difference {getattr(apart, kind):.3e} is over the sum "
                    f"of the plain versions' errors {limit:.3e}"
                )
