"""Faults by their places and kinds, from stations."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from liger_validate.subject import Station

# What a station may be off by, RMS over RMS: the sums' rounding in float32, and in bfloat16 the
# numbers that fall to the other side of a rounding, or are rounded once more or less in between, as
# a product is before its bias is added.
BANDS = {
    "float32": {
        "angles": 2e-6, "embedding": 5e-7, "norm": 1e-6, "linear": 5e-6, "gated": 2e-6,
        "attention": 2e-5, "residual": 1e-6, "head": 1e-5,
        "linear, backward": 5e-6, "norm, backward": 5e-6, "gated, backward": 5e-6,
        "attention, backward": 5e-5, "sum, backward": 2e-6,
    },
    "bfloat16": {
        "angles": 6e-3, "embedding": 3e-3, "norm": 1.2e-3, "linear": 5e-3, "gated": 6e-3,
        "attention": 2e-2, "residual": 6e-3, "head": 6e-3,
        "linear, backward": 6e-3, "norm, backward": 1e-2, "gated, backward": 1e-2,
        "attention, backward": 4e-2, "sum, backward": 8e-3,
    },
}  # fmt: skip
POSITION = 1e-7  # that much more for each position: the rounding of an angle in float32
EXPLAINS = 0.3  # of the formula's error, at most, is left by the fault that explains it


@dataclass(frozen=True)
class Finding:
    """One station of one model that is off its formula.

    error: RMS of the difference from the formula over that of the formula's values. left: what of
    it the diagnosis leaves. diagnosis: the kind of fault, or "unknown".
    """

    model: str
    station: str
    kind: str
    error: float
    band: float
    diagnosis: str
    detail: str
    left: float | None


def error_of(actual: np.ndarray, wanted: np.ndarray, counted: np.ndarray) -> float:
    """RMS of the difference over that of the wanted values, where tokens count."""
    actual, wanted = (a.reshape(*counted.shape, -1)[counted] for a in (actual, wanted))
    if not np.isfinite(actual).all():
        return float("inf")
    scale = float(np.sqrt(np.mean(wanted**2)))
    difference = float(np.sqrt(np.mean((actual - wanted) ** 2)))
    return difference / scale if scale else (0.0 if difference == 0.0 else float("inf"))


def findings(
    stations: Iterable[Station], model: str, dtype: str, counted: np.ndarray
) -> list[Finding]:
    """The stations that are out of their bands, in order, each with the fault that explains it."""
    found = []
    for station in stations:
        band = BANDS[dtype][station.kind]
        if station.kind == "angles":
            band += POSITION * counted.shape[1]
        error = error_of(station.actual, station.formula(), counted)
        if error <= band:
            continue
        tried = [
            (error_of(station.actual, formula(), counted), name, detail)
            for name, detail, formula in station.faults
        ]
        best = min(tried, default=(np.inf, "", ""), key=lambda fault: fault[0])
        left: float | None = None
        diagnosis, detail = "unknown", "none of the faults that were tried explains it"
        if best[0] <= max(band, 1e-12) and best[0] <= EXPLAINS * error:
            left, diagnosis, found_detail = best
            detail = found_detail if isinstance(found_detail, str) else found_detail()
        found.append(
            Finding(model, station.name, station.kind, error, band, diagnosis, detail, left)
        )
    return found
