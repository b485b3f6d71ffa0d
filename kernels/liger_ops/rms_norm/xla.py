"""RMSNorm in plain jax.numpy: the CPU path, the benchmark's base and the judge's yardstick."""

import jax
import jax.numpy as jnp


def rms_norm(
    x: jax.Array, weight: jax.Array | None, eps: float, offset: float, casting_mode: str
) -> jax.Array:
    compute_dtype = jnp.promote_types(x.dtype, jnp.float32)
    x_up = x.astype(compute_dtype)
    n = x_up * jax.lax.rsqrt(jnp.mean(x_up * x_up, axis=-1, keepdims=True) + eps)
    if weight is None:
        return n.astype(x.dtype)
    if casting_mode == "llama":
        scale = weight if offset == 0.0 else weight + offset
        return scale * n.astype(x.dtype)
    y = n * (weight.astype(compute_dtype) + offset)
    return y.astype(
        x.dtype if casting_mode == "gemma" else jnp.promote_types(x.dtype, weight.dtype)
    )


def fused_add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array | None,
    eps: float,
    offset: float,
    casting_mode: str,
) -> tuple[jax.Array, jax.Array]:
    h = x + residual
    return rms_norm(h, weight, eps, offset, casting_mode), h
