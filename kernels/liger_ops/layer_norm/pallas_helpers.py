"""What every Pallas kernel of LayerNorm does with a row.

A row is centred in two steps: d = x - s for an s near its mean, and then d - mean(d). So nothing
large cancels, neither in the variance mean(d^2) - mean(d)^2 nor where the mean itself is rounded.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from liger_ops.backend_pallas import load


@dataclass(frozen=True)
class Settings:
    eps: float
    dtype: Any  # of the result
    interpret: bool


def load_parameter(ref: Any, cols: jax.Array, mask: jax.Array | None, absent: float) -> jax.Array:
    """A weight or bias, or `absent` in its place, float32 of the shape of cols."""
    if ref is None:
        return jnp.full(cols.shape, absent, jnp.float32)
    return load(ref, cols, mask=mask, eviction_policy="evict_last").astype(jnp.float32)


def moments(
    sum_d: jax.Array, sum_squares: jax.Array, dim: int, eps: float
) -> tuple[jax.Array, jax.Array]:
    """mean(d) and r = 1 / sqrt(var + eps), of the sums of d and of d^2."""
    e = sum_d / dim
    # Rounding can leave a row of equal numbers just below 0.
    return e, jax.lax.rsqrt(jnp.maximum(sum_squares / dim - e * e, jnp.float32(0.0)) + eps)


def select(mask: jax.Array | None, value: jax.Array) -> jax.Array:
    """value where the mask is True, else 0."""
    return value if mask is None else jnp.where(mask, value, jnp.float32(0.0))
