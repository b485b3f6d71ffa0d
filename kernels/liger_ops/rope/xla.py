"""Rotary embedding in plain jax.numpy: the CPU path, the base and the judge's yardstick."""

import jax
import jax.numpy as jnp


def rope(
    q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, layout: str
) -> tuple[jax.Array, jax.Array]:
    return rotated(q, cos, sin, layout), rotated(k, cos, sin, layout)


def rotated(
    x: jax.Array, cos: jax.Array, sin: jax.Array, layout: str, transposed: bool = False
) -> jax.Array:
    """x (B, T, N, H) rotated; backwards, as its gradient is, if `transposed`."""
    cos, sin = cos[..., None, :], sin[..., None, :]  # (..., T, 1, R)
    turning, rest = jnp.split(x, [cos.shape[-1]], axis=-1)
    if transposed:
        y = turning * cos - _rotate(turning * sin, layout)
    else:
        y = turning * cos + _rotate(turning, layout) * sin
    y = y.astype(x.dtype)
    return jnp.concatenate([y, rest], axis=-1) if rest.shape[-1] else y


def _rotate(x: jax.Array, layout: str) -> jax.Array:
    if layout == "half":
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([-second, first], axis=-1)
    return jnp.stack([-x[..., 1::2], x[..., ::2]], axis=-1).reshape(x.shape)
