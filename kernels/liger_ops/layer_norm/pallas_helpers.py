"""What every Pallas kernel of LayerNorm does with a row, or with a block of rows.

An exchange between the warps that share a row costs more than the arithmetic on it, so sums that do
not depend on each other are exchanged as one.
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
    """A weight or bias as it is stored, or `absent` in its place, of the shape of cols."""
    if ref is None:
        return jnp.full(cols.shape, absent, jnp.float32)
    return load(ref, cols, mask=mask, eviction_policy="evict_last")


def row_sums(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums of the rows of both, (rows, 1) each, in one exchange."""
    both = jnp.sum(jnp.stack([a, b], axis=-1), axis=1)
    # A sum over a pair that one thread holds; the other number is 0.
    which = jnp.arange(2, dtype=jnp.int32)[None, :]
    first, second = (
        jnp.sum(jnp.where(which == i, both, jnp.float32(0.0)), axis=1) for i in range(2)
    )
    return first[:, None], second[:, None]


def first_shift(x_ref: Any, rows: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The mean of four numbers of each row, (rows, 1): every thread reads them itself."""
    dim = x_ref.shape[1]
    numbers = (
        load(x_ref, rows, jnp.full(rows.shape, i * dim // 4, jnp.int32), mask=mask)
        for i in range(4)
    )
    a, b, c, d = (number.astype(jnp.float32) for number in numbers)
    return ((a + b) + (c + d)) / 4


def moments_of_sums(
    sum_d: jax.Array, sum_squares: jax.Array, dim: int
) -> tuple[jax.Array, jax.Array]:
    """mean(d) and var(d), of the sums of d and of d^2."""
    e = sum_d / dim
    # Rounding can leave a row of equal numbers just below 0.
    return e, jnp.maximum(sum_squares / dim - e * e, jnp.float32(0.0))


def is_far(e: jax.Array, variance: jax.Array) -> jax.Array:
    """Whether the numbers of some row were summed about a shift off their mean by more than twice
    their standard deviation. Up to there the variance has at most 5 times the rounding error of a
    sum of squares about the mean itself; beyond, the sums are taken again about the mean found.
    """
    return jnp.max((e * e > 4.0 * variance).astype(jnp.int32)) > 0


def moments(
    x: jax.Array, shift: jax.Array, in_row: jax.Array | None, dim: int
) -> tuple[jax.Array, jax.Array]:
    """mean(x - shift) and var(x)."""
    d = select(in_row, x - shift)
    return moments_of_sums(*row_sums(d, d * d), dim)


def select(mask: jax.Array | None, value: jax.Array) -> jax.Array:
    """value where the mask is True, else 0."""
    return value if mask is None else jnp.where(mask, value, jnp.float32(0.0))


def load_rows(
    x_ref: Any, dy_ref: Any, statistics_ref: Any, rows: jax.Array, cols: jax.Array
) -> tuple[jax.Array, ...]:
    """x and dy (rows, columns) as they are stored, and the rows' mean and scale (rows, 1)."""
    num_rows, dim = x_ref.shape
    inside = rows < num_rows
    mask = inside & (cols < dim)
    x, dy = load(x_ref, rows, cols, mask=mask), load(dy_ref, rows, cols, mask=mask)
    mean, r = (
        load(statistics_ref, rows, jnp.full(rows.shape, i, jnp.int32), mask=inside)
        for i in range(2)
    )
    return x, dy, mean, r
