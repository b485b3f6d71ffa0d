"""The norm, the projection and the rotation in plain jax.numpy: the CPU path, the base, the
yardstick. Also the composition of the project's kernels, where those are given in place of the
plain ones.
"""

from collections.abc import Callable
from typing import Any

import jax

from liger_ops.rms_norm import xla as rms_norm_xla
from liger_ops.rms_norm_linear_rope.check import Heads, Norm
from liger_ops.rope import xla as rope_xla


def rms_norm_linear_rope(
    x: jax.Array,
    norm_weight: jax.Array | None,
    weight: jax.Array,
    bias: jax.Array | None,
    q_norm_weight: jax.Array | None,
    k_norm_weight: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    heads: Heads,
    norm: Norm,
    out_axis: int,
    normed: Callable[..., jax.Array] = rms_norm_xla.rms_norm,
    rotated: Callable[..., Any] = rope_xla.rope,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v, in the dtype of the weight, in which the product is."""
    dtype = weight.dtype
    y = normed(x, norm_weight, *norm).astype(dtype)
    qkv = product(y, weight, out_axis)
    if bias is not None:
        qkv = qkv + bias.astype(dtype)
    qkv = qkv.reshape(*x.shape[:-1], heads.q + 2 * heads.kv, heads.size)
    q, k, v = jax.lax.split(qkv, (heads.q, heads.kv, heads.kv), axis=2)
    if q_norm_weight is not None:
        q = normed(q, q_norm_weight, *norm).astype(dtype)
    if k_norm_weight is not None:
        k = normed(k, k_norm_weight, *norm).astype(dtype)
    return *rotated(q, k, cos, sin, "half"), v


def product(y: jax.Array, weight: jax.Array, out_axis: int, dtype: Any = None) -> jax.Array:
    """y (..., D) times the weight, whichever way it lies; in the dtype of both unless given."""
    contracted = (((y.ndim - 1,), (1 - out_axis,)), ((), ()))
    return jax.lax.dot_general(y, weight, contracted, preferred_element_type=dtype)
