"""The head and cross-entropy in plain jax.numpy: the CPU path, the base and the yardstick."""

import jax
import jax.numpy as jnp

from liger_ops.cross_entropy import xla


def logits_of(
    hidden: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    logit_scale: float,
    vocab_axis: int,
) -> jax.Array:
    """(..., V). hidden and weight have one dtype, in which the product is."""
    contracted = (((hidden.ndim - 1,), (1 - vocab_axis,)), ((), ()))
    logits = jax.lax.dot_general(hidden, weight, contracted)
    if logit_scale == 1.0 and bias is None:
        return logits
    # In float32, as the rest of what follows.
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32)) * logit_scale
    return logits if bias is None else logits + bias


def token_losses(
    hidden: jax.Array,
    weight: jax.Array,
    classes: jax.Array,
    bias: jax.Array | None,
    class_weight: jax.Array | None,
    logit_scale: float,
    vocab_axis: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
) -> tuple[jax.Array, jax.Array]:
    """ce and z of every token; `classes` is what `cross_entropy.xla.as_classes` returns."""
    logits = logits_of(hidden, weight, bias, logit_scale, vocab_axis)
    return xla.token_losses(logits, classes, class_weight, label_smoothing, softcap, z_loss)
