"""The mean or sum of the tokens' losses in JAX, the same for both implementations."""

from typing import Any

import jax
import jax.numpy as jnp

from liger_ops.cross_entropy.check import Metrics
from liger_ops.cross_entropy.xla import IGNORED, weight_of


def reduce(
    ce: jax.Array,
    z: jax.Array | None,
    classes: jax.Array,
    class_weight: jax.Array | None,
    num_items: jax.Array | None,
    reduction: str,
) -> tuple[jax.Array, jax.Array]:
    """loss and z_loss of the tokens' ce and z, as in the oracle."""
    if reduction == "none":
        return (ce, jnp.zeros_like(ce)) if z is None else (ce + z, z)
    ce_factor = z_factor = jnp.ones((), ce.dtype)
    if reduction == "mean":
        count = weight_sum = jnp.sum(classes != IGNORED) if num_items is None else num_items
        if num_items is None and class_weight is not None:
            weights = weight_of(class_weight.astype(ce.dtype), classes)
            weight_sum = jnp.sum(jnp.where(classes >= 0, weights, 0.0))
        ce_factor, z_factor = inverse(weight_sum, ce.dtype), inverse(count, ce.dtype)
    z = jnp.zeros((), ce.dtype) if z is None else jnp.sum(z) * z_factor
    return jnp.sum(ce) * ce_factor + z, z


def inverse(count: jax.Array, dtype) -> jax.Array:
    """1 / count, and 0 of 0: nothing to average is 0 and not NaN."""
    count = count.astype(dtype)
    return jnp.where(count == 0.0, 0.0, 1.0 / jnp.where(count == 0.0, 1.0, count))


def metrics(predicted: Any, classes: jax.Array) -> Metrics:
    supervised = classes != IGNORED
    right = jnp.sum((predicted == classes) & supervised)
    accuracy = right * inverse(jnp.sum(supervised), jnp.float32)
    return Metrics(accuracy, jnp.where(supervised, predicted, -1))
