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

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from liger_ops.drawing import DTYPES

FACTOR = 1.5
PLAIN = {"pallas": "xla", "triton": "eager"}
ULP = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

Results = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Error:
    rms: float
    largest: float

    @classmethod
    def between(cls, actual: np.ndarray, exact: np.ndarray) -> "Error":
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
        return cls(
            0.1 * ULP[dtype] + 2 * ULP["float32"],
            1.0 * ULP[dtype] + 8 * ULP["float32"],
        )


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
        floor = Error.floor(dtype)
        for kind in ("rms", "largest"):
            limit = FACTOR * getattr(base, kind) + getattr(floor, kind)
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


def judge(run: Callable[[str], Results], exact: Results, label: str = "") -> None:
    """Judges "pallas" and "triton" by their plain versions, and then by each other.

    Args:
        run: returns the results of the implementation it is given the name of.
        exact: the oracle's results under the same names.
    """
    results = {name: run(name) for pair in PLAIN.items() for name in pair}
    for name, plain in PLAIN.items():
        assert_matches_oracle(results[name], results[plain], exact, f"{label} {name}")
    plains = (results["xla"], results["eager"])
    assert_agree(results["pallas"], results["triton"], plains, exact, f"{label} pallas and triton")


def to_torch(array: np.ndarray, device: str = "cpu") -> torch.Tensor:
    """A copy of a NumPy array, ml_dtypes' bfloat16 included."""
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(array.copy()).to(device)


def from_torch(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(DTYPES["bfloat16"])
    return tensor.numpy()


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fills every torch.empty with NaN, so that an element no kernel wrote is seen.

    Pallas's interpret mode fills its outputs with NaN by itself.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
