"""Random inputs, drawn once in NumPy and rounded, so that every framework gets the same."""

import ml_dtypes
import numpy as np

DTYPES = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def draw_normal(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    dtype: str,
    *,
    center: float = 0.0,
    spread: float = 1.0,
) -> np.ndarray:
    """Normally distributed numbers of the named dtype."""
    return (center + spread * rng.standard_normal(shape, np.float32)).astype(DTYPES[dtype])
