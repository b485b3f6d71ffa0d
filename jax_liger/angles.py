"""The rotary embedding's angles: frequencies from a config, cos and sin from positions."""

import jax
import jax.numpy as jnp
import numpy as np

from liger_ops.rope import angles as rope_check
from liger_ops.rope.frequencies import RopeFrequencies as RopeFrequencies
from liger_ops.rope.frequencies import rope_frequencies as rope_frequencies


def rope_angles(
    positions: jax.Array, frequencies: RopeFrequencies, *, layout: str = "half"
) -> tuple[jax.Array, jax.Array]:
    """Cos and sin by which `rope` rotates queries and keys at these positions.

        angle = positions * inv_freq
        cos, sin = attention_factor * cos(angle), attention_factor * sin(angle)

    Args:
        positions: (T,) or (B, T), integers, or float32; any, also traced, so left padding, packed
            rows and decoding need nothing else. For a multimodal model also (3, B, T) with time,
            height and width; with fewer dimensions the three are the same, as in text.
        frequencies: what `rope_frequencies` returns. It is a constant to jit: closed over, or a
            static argument.
        layout: "half" for R columns (c_0, ..., c_(R/2-1)) twice, or "interleaved" for c_0, c_0,
            c_1, c_1, and so on; give `rope` the same. `frequencies.layout` is that of the family's
            checkpoints.

    Returns:
        cos and sin, float32, (T, R) or (B, T, R).

    Numerics: positions, angles, cos and sin in float32, as in transformers: the angle is off by up
    to 6e-8 of itself, which is 4e-3 at position 10^5; positions are exact up to 2^24.
    transformers' modules cast cos and sin to the model's dtype afterwards.

    Raises:
        TypeError, ValueError: for an argument that does not fit, naming it and its value.

    Source: Su et al. (2021), arXiv:2104.09864.
    """
    positions = jnp.asarray(positions)
    rope_check.check_arguments(positions.shape, positions.dtype.name, frequencies, layout)
    p = positions.astype(jnp.float32)
    if p.ndim == 3:  # each frequency takes the axis that it reads
        axes = np.asarray(frequencies.axes)
        time, height, width = p[..., None]
        p = jnp.where(axes == 0, time, jnp.where(axes == 1, height, width))
    else:
        p = p[..., None]
    angle = p * frequencies.inv_freq
    return tuple(  # type: ignore[return-value]
        _laid_out(of(angle) * jnp.float32(frequencies.attention_factor), layout)
        for of in (jnp.cos, jnp.sin)
    )


def _laid_out(columns: jax.Array, layout: str) -> jax.Array:
    if layout == "half":
        return jnp.concatenate([columns, columns], -1)
    return jnp.repeat(columns, 2, -1)
