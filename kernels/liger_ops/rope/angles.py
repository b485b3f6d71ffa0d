"""Cos and sin of the rotary angles: the float64 oracle, and what the implementations accept.

With positions p, frequencies f_j and the attention factor a, for each of the R/2 pairs:

    angle_j = p f_j        cos_j = a cos(angle_j)        sin_j = a sin(angle_j)

laid out over R columns: "half" is (c_0, ..., c_(R/2-1)) twice, "interleaved" is c_0, c_0, c_1, c_1,
and so on. In a multimodal model p is one of time, height and width, by the pair.

The implementations take the angle in float32, as every model trained with transformers has. It is
rounded to the nearest there, so that cos and sin are off by up to half a unit in the last place of
the angle: 6e-8 p f_j, which is 2e-4 at p = 4096 and 4e-3 at p = 10^5. A checkpoint expects this.
"""

from collections.abc import Sequence

import numpy as np

from liger_ops.checking import listed
from liger_ops.rope.frequencies import RopeFrequencies

LAYOUTS = ("half", "interleaved")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def forward(
    positions: np.ndarray, frequencies: RopeFrequencies, *, layout: str = "half"
) -> dict[str, np.ndarray]:
    """Returns cos and sin in float64, with no rounding of the angle."""
    positions = np.asarray(positions)
    check_arguments(positions.shape, positions.dtype.name, frequencies, layout)
    p = positions.astype(np.float64)[..., None]
    if positions.ndim == 3:  # each frequency takes the axis that it reads
        p = np.concatenate([p[axis] for axis in frequencies.axes or ()], -1)
    angle = p * frequencies.inv_freq.astype(np.float64)
    angle = np.concatenate([angle, angle], -1) if layout == "half" else np.repeat(angle, 2, -1)
    a = frequencies.attention_factor
    return {"cos": a * np.cos(angle), "sin": a * np.sin(angle)}


def check_arguments(
    shape: Sequence[int], dtype: str, frequencies: RopeFrequencies, layout: str
) -> None:
    """Raises ValueError or TypeError, naming the argument and both values."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {listed(LAYOUTS)}; got {layout!r}")
    if not isinstance(frequencies, RopeFrequencies):
        raise TypeError(
            f"frequencies must be what rope_frequencies returns; got {type(frequencies).__name__}"
        )
    if dtype not in (*INTEGERS, "float32"):
        raise TypeError(f"positions must have an integer dtype or 'float32'; got {dtype}")
    shape = tuple(shape)
    if len(shape) == 3 and frequencies.axes is None:
        raise ValueError(
            "positions must be (T,) or (B, T), as these frequencies are not of a multimodal model; "
            f"got {shape}"
        )
    if len(shape) not in (1, 2, 3) or (len(shape) == 3 and shape[0] != 3):
        raise ValueError(
            "positions must be (T,), (B, T), or in a multimodal model (3, B, T) with time, height "
            f"and width; got {shape}"
        )
