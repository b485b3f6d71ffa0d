"""A linear layer with a low-rank adapter in plain jax.numpy.

XLA adds the adapter's product to the base's in the call of the library that makes it. Of the
dropout nothing is kept: its factors are counted again in the backward, from the seed.
"""

import functools

import jax
import jax.numpy as jnp


def lora_linear(
    x: jax.Array,
    weight: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    bias: jax.Array | None,
    scaling: float,
    dropout_p: float,
    seed: jax.Array | None,
    stream: int = 0,
) -> jax.Array:
    """x, weight and bias have one dtype, and so have lora_a and lora_b; `seed` is (2,) uint32, its
    lower word first.
    """
    y = x @ weight
    if bias is not None:
        wide = jnp.promote_types(y.dtype, jnp.float32)  # in which the bias's gradient is summed
        y = (y.astype(wide) + bias.astype(wide)).astype(y.dtype)
    if seed is None:
        u = x.astype(lora_a.dtype) @ lora_a
    else:
        u = _down(x, lora_a, seed, dropout_p, stream)
    # Of r columns and not of O, so that the backward makes no scaled copy of y's gradient.
    return (y + (u * scaling) @ lora_b).astype(y.dtype)


@functools.partial(jax.checkpoint, static_argnums=(3, 4))
def _down(
    x: jax.Array, lora_a: jax.Array, seed: jax.Array, dropout_p: float, stream: int
) -> jax.Array:
    factors = dropout_factors(seed, x.shape, dropout_p, stream)
    kept = x.astype(jnp.promote_types(lora_a.dtype, jnp.float32)) * factors
    return kept.astype(lora_a.dtype) @ lora_a


def dropout_factors(
    seed: jax.Array, shape: tuple[int, ...], dropout_p: float, stream: int
) -> jax.Array:
    """0 or 1 / (1 - p) for every element, float32, counted as oracle.py says."""
    dim, leading = shape[-1], shape[:-1]
    quarter = -(-dim // 4)
    row = jnp.zeros((*leading, 1), jnp.uint32)
    stride = 1
    for axis in reversed(range(len(leading))):  # not a reshape, which sharded rows would not take
        row += jax.lax.broadcasted_iota(jnp.uint32, (*leading, 1), axis) * jnp.uint32(stride)
        stride *= leading[axis]
    group = jax.lax.broadcasted_iota(jnp.uint32, (*leading, quarter), len(leading))
    words = jnp.concatenate(_philox(seed, group, row, stream), axis=-1)[..., :dim]
    kept = (words >> 8) >= jnp.uint32(round(dropout_p * 2**24))
    return jnp.where(kept, jnp.float32(1.0 / (1.0 - dropout_p)), jnp.float32(0.0))


def _philox(
    seed: jax.Array, group: jax.Array, row: jax.Array, stream: int
) -> tuple[jax.Array, ...]:
    """Four words of 32 bits for every group and row."""
    zeros = jnp.zeros_like(group)
    c = (group, zeros + row, zeros + jnp.uint32(stream), zeros)
    key = (seed[0], seed[1])
    for _ in range(10):
        high_a, low_a = _product(c[0], 0xD2511F53)
        high_b, low_b = _product(c[2], 0xCD9E8D57)
        c = (high_b ^ c[1] ^ key[0], low_b, high_a ^ c[3] ^ key[1], low_a)
        key = (key[0] + jnp.uint32(0x9E3779B9), key[1] + jnp.uint32(0xBB67AE85))
    return c


def _product(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """The upper and lower 32 bits of a product of 32-bit numbers, by halves."""
    half, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
    a1, a0 = a >> half, a & mask
    b1, b0 = jnp.uint32(b >> 16), jnp.uint32(b & 0xFFFF)
    first, second = a1 * b0, a0 * b1
    carry = ((a0 * b0 >> half) + (first & mask) + (second & mask)) >> half
    return a1 * b1 + (first >> half) + (second >> half) + carry, a * jnp.uint32(b)
